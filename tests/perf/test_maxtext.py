"""What `minitext maxtext explain` says is what our own predictions say of the same step."""

import importlib.util
import json
import shlex

import pytest

from minitext.cli import main
from minitext.compiler.targets import parse_target
from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.perf import maxtext, memory, plan
from minitext.sharding.mesh import abstract_mesh

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
SMALL = (
    "python3 -m maxtext.trainers.pre_train.train maxtext/configs/base.yml base_emb_dim=512 base_num_query_heads=4 "
    "base_num_kv_heads=4 base_mlp_dim=2048 base_num_decoder_layers=4 vocab_size=4096 max_target_length=512 steps=100 "
    "per_device_batch_size=4 dataset_type=synthetic"
)


def test_the_answers_are_those_of_the_printed_command():
    found = maxtext.explain(
        f"xpk workload create --device-type=v5e-8 --command '{SMALL} remat_policy=minimal'"
    )
    answers, words = found.answers, found.translation.words
    assert answers is not None and answers.fits and answers.target == "v5e:2x4"
    cfg = load_config(
        None if "=" in words[0] else words[0], words if "=" in words[0] else words[1:]
    )
    assert cfg == found.translation.cfg
    target = parse_target("v5e:2x4")
    used = memory.predict(cfg, abstract_mesh(cfg.mesh), "tpu", target.chip.vmem_bytes)
    times = plan.predict(cfg, target, plan.Work(cfg, target))
    assert (
        answers.memory == used.total
        and answers.lower == times.hidden
        and answers.upper == times.waited
    )
    assert answers.tokens == 4 * 8 * 512 and 0 < answers.mfu < 1 and answers.dcn == 0
    assert set(answers.ici) >= {"all-gather"}


@pytest.mark.audit
def test_slices_send_their_gradients_across():
    one = maxtext.explain(f"{SMALL}", "v5e:2x4").answers
    found = maxtext.explain(f"{SMALL} dcn_data_parallelism=2", "v5e:2x4 slices=2")
    two, model = found.answers, found.translation.cfg.model
    assert one is not None and two is not None
    # Each device sends its part of the gradients, in bfloat16 and those of norms in float32, and receives it:
    # 2 (S - 1)/S of it with S slices.
    norms = (2 * model.layers + 1) * model.embed
    assert two.dcn == pytest.approx((two.parameters + norms) * 2 / 8) and one.dcn == 0
    # Within a slice weights are gathered as in one; the embedding table's gradient is summed whole.
    assert two.tokens == 2 * one.tokens and two.ici["all-gather"] == one.ici["all-gather"]
    assert sum(two.ici.values()) >= sum(one.ici.values())


@pytest.mark.audit
def test_changes_fit_and_are_what_they_say():
    found = maxtext.explain(
        f"{SMALL} per_device_batch_size=256 max_target_length=2048 remat_policy=none", "v5e:2x4"
    )
    answers, cfg = found.answers, found.translation.cfg
    assert answers is not None and not answers.fits and answers.changes
    for change in answers.changes:
        assert change.memory <= answers.usable
        new = cfg.replace(change.settings)
        assert (
            change.memory == memory.predict(new, abstract_mesh(new.mesh), "tpu", 128 * 2**20).total
        )
        assert change.maxtext and change.why


@pytest.mark.audit
def test_experts_are_predicted_for_tpus():
    """The experts' kernel has a grid that depends on the data: its own estimate counts."""
    experts = "decoder_block=mixtral num_experts=4 num_experts_per_tok=2 base_moe_mlp_dim=2048"
    answers = maxtext.explain(f"{SMALL} {experts}", "v5e:2x4").answers
    dense = maxtext.explain(SMALL, "v5e:2x4").answers
    assert answers is not None and dense is not None
    # Two of four experts are twice the feed-forward work.
    assert 0 < answers.mfu < 1 and 1.2 < answers.times["compute"] / dense.times["compute"] < 2


def test_a_command_without_a_machine_says_how_to_name_one(capsys):
    found = maxtext.explain(SMALL)
    assert found.answers is None and found.translation.cfg is not None
    maxtext.print_explanation(found)
    out = capsys.readouterr().out
    assert "--target v5p:4x4x8" in out and "minitext train" in out and "ici_" not in out
    with pytest.raises(UserError, match="unknown chip"):
        maxtext.explain(SMALL, "v9:2x2")


def test_an_unknown_machine_is_named():
    for device, said in (("v9z-16", "isn't known"), ("v5e-3x3x3", "v5e-3x3x3")):
        found = maxtext.explain(f"xpk --device-type={device} --command '{SMALL}'")
        assert found.answers is None and any(said in note for note in found.translation.notes)


def test_gpus_are_counted_without_cuda():
    xpk = (
        "xpk --device-type=h100-mega-80gb-{} --num-nodes={} --command '"
        + f"{SMALL} attention=cudnn_flash_te'"
    )
    found = maxtext.explain(xpk.format(1, 1))
    assert found.answers is not None and any("cudnn" in note for note in found.answers.notes)
    assert "model.attention.impl=cudnn" in found.translation.words
    found = maxtext.explain(xpk.format(8, 2))
    assert found.translation.cfg is not None and found.translation.machine.target == "h100:1x2x8"
    assert found.translation.cfg.train.global_batch == 4 * 16 and found.answers is None
    assert any("links" in note for note in found.translation.notes)


@pytest.mark.audit
@needs_libtpu
def test_the_compiler_has_the_last_word(monkeypatch, capsys):
    """A step that it refuses keeps its predictions, and what to change."""
    command = f"{SMALL} per_device_batch_size=256 max_target_length=2048 remat_policy=none"
    assert run(monkeypatch, command, "--target", "v5e:2x4", "--compile") == 3
    out = capsys.readouterr().out
    assert "as compiled" in out and out.count("does NOT fit") == 2
    assert "tokens/s" in out and "remat_policy=full" in out


@needs_libtpu
@pytest.mark.audit
@pytest.mark.timeout(900)
def test_a_compiled_step_is_near_its_prediction():
    command = (
        "python3 -m maxtext.trainers.pre_train.train base.yml model_name=llama2-7b per_device_batch_size=4 "
        "max_target_length=2048 remat_policy=full ici_fsdp_parallelism=16"
    )
    answers = maxtext.explain(command, "v5p:2x2x4", compiled=True).answers
    assert answers is not None and answers.compiled is not None and answers.fits
    compiled = answers.compiled
    assert compiled["memory"] == pytest.approx(answers.memory, rel=0.1)
    assert compiled["lower"] <= compiled["seconds"] <= compiled["upper"]
    # The compiler cuts the weights' gradients into narrow pieces, which it counts as slow; the formula doesn't.
    assert 1 < compiled["seconds"] / answers.lower < 2
    assert compiled["tokens"] == answers.tokens


def test_only_tpus_compilers_tell_a_time():
    """What is predicted without compiling is answered all the same."""
    command = f"xpk --device-type=h100-mega-80gb-1 --num-nodes=1 --command '{SMALL}'"
    plain, asked = maxtext.explain(command).answers, maxtext.explain(command, compiled=True).answers
    assert plain is not None and asked is not None and asked.compiled is None
    assert asked.memory == plain.memory and asked.fits == plain.fits
    assert any("not compiled: " in note and "TPU" in note for note in asked.notes)


def test_changes_that_do_not_help_enough_are_not_sold_as_a_cure(capsys):
    found = maxtext.explain(f"{SMALL} per_device_batch_size=65536 remat_policy=minimal", "v5e:2x4")
    answers = found.answers
    assert answers is not None and answers.changes
    assert all(change.memory > answers.usable for change in answers.changes)
    maxtext.print_explanation(found)
    assert "nothing that was tried fits" in capsys.readouterr().out


def test_the_printed_command_is_one_line_for_a_shell(capsys):
    found = maxtext.explain(f'{SMALL} run_name="it\'s a`b;c" remat_policy=save_qkv_proj')
    maxtext.print_explanation(found)
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last) == ["minitext", "train", *found.translation.words]


def test_a_refusal_keeps_its_brackets(capsys):
    maxtext.print_explanation(maxtext.explain(f"{SMALL} mlp_activations=[relu]"))
    assert "[silu,linear]" in capsys.readouterr().out


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["minitext", "maxtext", "explain", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def test_the_command_answers_and_its_exit_code_says_whether_it_fits(monkeypatch, capsys):
    assert run(monkeypatch, f"{SMALL} per_device_batch_size=4096", "--target", "v5e:2x4") == 3
    assert "does NOT fit" in capsys.readouterr().out
    assert run(monkeypatch, f"{SMALL} decoder_block=gpt3", "--target", "v5e:2x4") == 2
    assert "LayerNorm" in capsys.readouterr().out
    assert run(monkeypatch, SMALL, "--target", "v5e:2x4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answers"]["fits"] and found["target"] == "v5e:2x4" and not found["refused"]
    assert all(key["ours"] for key in found["keys"])
