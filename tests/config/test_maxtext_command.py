"""Commands, scripts and files of MaxText are read as MaxText reads them, and what isn't one is refused in one line."""

import itertools

import pytest

from minitext.config import maxtext_command
from minitext.errors import UserError

TRAIN = "python3 -m maxtext.trainers.pre_train.train src/maxtext/configs/base.yml"


def test_a_command_sets_its_words():
    found = maxtext_command.read(
        f"{TRAIN} model_name=llama2-7b steps=10 learning_rate=1e-4 run_name='a b'"
    )
    assert found.given == {
        "model_name": "llama2-7b",
        "steps": 10,
        "learning_rate": "1e-4",
        "run_name": "a b",
    }
    assert found.values["base_emb_dim"] == 4096 and found.values["max_target_length"] == 2048
    assert found.device is None and found.slices == 1
    old = maxtext_command.read(
        "python3 MaxText/train.py MaxText/configs/base.yml model_name=llama2-7b steps=10"
    )
    assert old.given == {"model_name": "llama2-7b", "steps": 10}


SCRIPT = """#!/bin/bash
# it's a comment with a quote
set -e
export SIZE=4
export FLAGS="--xla_tpu_x=true \\
  --xla_y=1"
ARGS="\\
model_name=mixtral-8x7b \\
per_device_batch_size=${SIZE} \\
hf_path=${NOWHERE:-allenai/c4} \\
mlp_activations=['silu','linear'] \\
base_output_directory=${BUCKET}"

xpk workload create \\
  --cluster=$CLUSTER \\
  --device-type=v5p-128 --num-slices=2 \\
  --command="set -e && export LIBTPU_INIT_ARGS='${FLAGS}' && \\
python3 -m maxtext.trainers.pre_train.train maxtext/configs/base.yml ${ARGS} | tee log"
"""


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--steps=3", "--steps=3 is not read: MaxText's keys have no dashes, as in steps=VALUE"),
        ("--steps 3", "--steps is not read"),
        ("steps", "steps has no value: write steps=VALUE"),
        ("=3", "=3 has no key before its value"),
    ],
)
def test_words_that_set_nothing_are_noted(word, said):
    found = maxtext_command.read(f"train.py base.yml {word} max_target_length=7")
    assert found.given["max_target_length"] == 7 and "steps" not in found.given
    assert [note for note in found.notes if said in note]


@pytest.mark.parametrize("quote", ["", "'"])
def test_a_comment_begins_at_the_beginning_of_a_word_alone(quote):
    command = f"--command {quote}{TRAIN} run_name=a#b steps=5{quote} # don't\nsteps=7"
    assert maxtext_command.read(command).given == {"run_name": "a#b", "steps": 7}
    assert maxtext_command.read(f"{TRAIN} steps=5;# steps=6").given == {"steps": 5}


@pytest.mark.parametrize(
    "program",
    ["-m maxtext.trainers.post_train.sft.train_sft", "src/maxtext/post_train/train_sft.py"],
)
def test_a_program_reads_its_own_file_if_the_command_names_none(program):
    found = maxtext_command.read(f"python3 {program} model_name=qwen3-4b learning_rate=1e-6")
    assert found.given["use_sft"] is True and found.where["use_sft"] == "sft.yml"
    assert found.values["learning_rate"] == "1e-6" and found.values["base_emb_dim"] == 2560
    assert "use_sft" not in maxtext_command.read(f"python3 {program} base.yml steps=1").given
    found = maxtext_command.read("python3 -m maxtext.trainers.post_train.dpo.train_dpo")
    assert found.values["base_emb_dim"] == 1024 and found.values["steps"] == 10


def test_a_script_with_variables_around_xpk(tmp_path):
    (tmp_path / "recipe.sh").write_text(SCRIPT)
    for text in (SCRIPT, str(tmp_path / "recipe.sh")):
        found = maxtext_command.read(text)
        assert (found.device, found.slices) == ("v5p-128", 2)
        assert found.given == {
            "model_name": "mixtral-8x7b", "per_device_batch_size": 4, "hf_path": "allenai/c4",
            "mlp_activations": ["silu", "linear"], "base_output_directory": "${BUCKET}",
        }  # fmt: skip
        assert found.values["num_experts"] == 8 and "base_output_directory" not in found.values
    spaced = maxtext_command.read(
        f"xpk workload create --tpu-type v6e-256 --command '{TRAIN} model_name=gemma2-9b'"
    )
    assert spaced.device == "v6e-256" and spaced.given == {"model_name": "gemma2-9b"}
    assert maxtext_command.read(f"M_STEPS=7 {TRAIN} model_name=llama2-7b").given["steps"] == 7


MODEL = """MaxTextModel(model_name="a", model_type="llama3.1-8b",
        tuning_params={"per_device_batch_size": 5, "remat_policy": "custom", "ici_fsdp_parallelism": -1},
        xla_flags=(flags.A + flags.B), pathways=__import__("os").system("false"))"""


def test_a_benchmark_of_maxtexts_own_is_read_without_being_run():
    assert maxtext_command.read(MODEL).given == {
        "model_name": "llama3.1-8b", "per_device_batch_size": 5, "remat_policy": "custom", "ici_fsdp_parallelism": -1,
    }  # fmt: skip


def test_files_lead_to_the_ones_below(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "runs" / "deep").mkdir(parents=True)
    (tmp_path / "mine.yml").write_text("steps: 5\nlearning_rate: 0.1\nvocab_size: 100\n")
    (tmp_path / "runs" / "deep" / "top.yml").write_text(
        "base_config: mine.yml\nsteps: 6\nrl:\n  num_generations: 8\n"
    )
    found = maxtext_command.read(str(tmp_path / "runs" / "deep" / "top.yml"))
    assert found.given == {
        "steps": 6,
        "learning_rate": 0.1,
        "vocab_size": 100,
        "rl.num_generations": 8,
    }
    assert found.where == {"steps": "top.yml", "learning_rate": "mine.yml", "vocab_size": "mine.yml",
                           "rl.num_generations": "top.yml"}  # fmt: skip
    # A model that isn't in our table, beside the base that the command names.
    (tmp_path / "models" / "new-1b.yml").write_text("base_emb_dim: 640\ndecoder_block: llama2\n")
    named = maxtext_command.read(
        f"python3 -m maxtext.train {tmp_path / 'mine.yml'} model_name=new-1b steps=2"
    )
    assert named.values["base_emb_dim"] == 640 and named.given["steps"] == 2
    alone = maxtext_command.read(str(tmp_path / "models" / "new-1b.yml"))
    assert alone.values["model_name"] == "new-1b"


def test_a_page_with_a_recipe(tmp_path):
    page = f"# It's a recipe\n\n```bash\npython3 -m bench --device_type=v6e-256\n```\n\n```\n{MODEL},\n```\nDon't.\n"
    (tmp_path / "README.md").write_text(page)
    found = maxtext_command.read(str(tmp_path / "README.md"))
    assert found.device == "v6e-256" and found.given["remat_policy"] == "custom"


HOSTILE = {
    "an open quote": (f"{TRAIN} model_name='llama2-7b", "open quote"),
    "nothing": ("", "sets no key"),
    "words alone": ("hello there", "sets no key"),
    "no such model": (f"{TRAIN} model_name=llama2-7c", "did you mean llama2-7b"),
    "no such file": (f"{TRAIN} other/thing.yml steps=1", "isn't a file on this machine"),
    "no such path": ("nowhere/at-all.yml", "isn't a file on this machine"),
    "a zero byte": (f"{TRAIN} steps=1\0", "zero byte"),
    "too long": ("steps=1 " * 200_000, "characters"),
    "a long value": (f"{TRAIN} run_name={'x' * 20_000}", "characters"),
    "slices": (
        f"xpk workload create --num-slices=many --command '{TRAIN} steps=1'",
        "number of slices",
    ),
    "nodes": (
        f"xpk --device-type=h100-mega-80gb-8 --num-nodes=0 --command '{TRAIN}'",
        "of slices or nodes",
    ),
    "a folder": (".", "is a folder"),
    "an open bracket": ("MaxTextModel(model_type='a', tuning_params={", "no closing bracket"),
    "nested texts": ("a=$B b.yml " + "--command=" * 3 + "x", "isn't a file on this machine"),
    "a nested value": (f"{TRAIN} mesh_axes={'[' * 60}{']' * 60}", "nested too deep"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_texts_are_refused_in_one_line(case):
    text, said = HOSTILE[case]
    with pytest.raises(UserError) as error:
        maxtext_command.read(text)
    assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


def test_hostile_files_are_refused_in_one_line(tmp_path):
    def refused(text: str | bytes, name: str = "x.yml") -> str:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(UserError) as error:
            maxtext_command.read(str(path))
        assert "\n" not in str(error.value)
        return str(error.value)

    names = "abcdefghi"
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n"
    bomb += "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise(names)
    )
    assert "more than 20,000 values" in refused(bomb)
    assert "nested too deep" in refused("a: &a [*a]\n")
    assert "is not YAML" in refused("steps: !!python/object/apply:os.system ['false']\n")
    assert "doesn't hold keys" in refused("- 1\n- 2\n")
    assert "isn't a key" in refused("1: 2\n")
    assert (
        "without end" in refused("base_config: y.yml\n")
        if (tmp_path / "y.yml").write_text("base_config: x.yml\n")
        else 0
    )
    refused(b"\xff\xfe\x00steps", "z.yml")
