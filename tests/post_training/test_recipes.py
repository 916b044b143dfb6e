"""Recipes: the settings of a run that begins with another, and supervised fine-tuning by one."""

import json
import shutil

import jax
import numpy as np
import pytest

from minitext.config.config import load_config
from minitext.data.batches import make_batches
from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError
from minitext.models import convert, families
from minitext.post_training import recipes
from minitext.training import run, run_dir
from minitext.training.step import make_loss_fn
from tests.conftest import use_cache
from tests.models import tiny_models
from tests.training.test_quantize_run import write_run

SMALL = [
    "model.layers=1", "model.embed=16", "model.heads=2", "model.mlp=16", "data.seq_len=96", "train.global_batch=8",
    "train.sample_tokens=0", "train.eval_batches=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache_path(tmp_path, monkeypatch):
    use_cache(monkeypatch, tmp_path / "cache")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny run to begin with."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    write_run(folder, *SMALL)
    return folder


def write(path, count=40):
    lines = [
        {"prompt": f"{n} and {n + 1}?", "completion": f"{2 * n + 1} " + "!" * (n % 9)} for n in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_model_comes_from_the_run_and_the_rest_from_the_recipe(base, tmp_path):
    path = write(tmp_path / "a.jsonl")
    cfg = recipes.new_config(base, "sft", [f"data.path={path}"])
    theirs = run_dir.read_config(base)
    assert cfg.model == theirs.model and cfg.data.seq_len == 96
    assert cfg.provenance("model.embed") == f"run {base}"
    assert cfg.provenance("optim.learning_rate") == "recipe sft"
    assert cfg.provenance("data.path") == "command line"
    assert (cfg.run.name, cfg.checkpoint.load_parameters) == ("base-sft", str(base))
    assert cfg.data.source == "conversations" and cfg.data.epochs == 2
    other = recipes.new_config(
        base, "sft", [f"data.path={path}", "optim.learning_rate=1", "run.name=b"]
    )
    assert other.optim.learning_rate == 1 and other.run.name == "b"
    adapted = recipes.new_config(base, "sft", [f"data.path={path}", "model.lora.rank=2"])
    assert adapted.optim.learning_rate == pytest.approx(10 * cfg.optim.learning_rate)


def test_a_tokenizer_that_would_not_be_used_is_refused(base, tmp_path):
    words = [f"data.path={write(tmp_path / 'a.jsonl')}", "data.tokenizer=bpe"]
    with pytest.raises(UserError, match="data.tokenizer=bpe would have no effect"):
        recipes.new_config(base, "sft", words)


def test_conversations_are_not_read_with_another_tokenizer(base, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").unlink()
    words = [f"data.path={write(tmp_path / 'a.jsonl')}", f"run.dir={tmp_path}"]
    with pytest.raises(UserError, match=r"base/tokenizer.json: No such file.*: copy it again"):
        recipes.with_steps(recipes.new_config(tmp_path / "base", "sft", words))


def test_steps_follow_from_epochs(base, tmp_path):
    words = [f"data.path={write(tmp_path / 'a.jsonl')}", "train.global_batch=16"]
    cfg = recipes.with_steps(recipes.new_config(base, "sft", words))
    found = make_batches(
        cfg.data.model_copy(update={"epochs": 1}), vocab=cfg.model.vocab, global_batch=1
    )
    rows = found.left()
    found.close()
    assert cfg.train.steps == -(-2 * rows // 16) and cfg.optim.warmup_steps == 1
    given = recipes.with_steps(
        recipes.new_config(base, "sft", [*words, "train.steps=40", "optim.warmup_steps=7"])
    )
    assert (given.train.steps, given.data.epochs, given.optim.warmup_steps) == (40, None, 7)


def test_words_that_cannot_be_meant_are_refused(base, tmp_path):
    for words, said in (
        (["laptop"], "is not key=value"),
        ([], "needs conversations"),
        (["data.path=a", "train.stepz=1"], "did you mean train.steps"),
    ):
        with pytest.raises(UserError, match=said):
            recipes.new_config(base, "sft", words)
    with pytest.raises(UserError, match="is not a run directory"):
        recipes.new_config(tmp_path, "sft", ["data.path=a"])


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Commands run in a folder of their own."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.audit
def test_a_model_learns_to_answer_and_its_template_stays_with_it(base, minitext, tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": turns}) + "\n") * 50)
    with path.open("a") as file:
        file.write(json.dumps({"messages": turns[:1]}) + "\n")
    words = [
        f"data.path={path}",
        "train.steps=60",
        "optim.learning_rate=0.02",
        "train.eval_every=60",
    ]
    code, _, said = minitext("sft", base, *words, f"run.dir={tmp_path}")
    assert code == 0 and "1 with no turn of the assistant's" in said.replace("\n", " ")
    assert f"minitext generate {tmp_path}/base-sft --chat" in said.replace("\n", " ")
    new = tmp_path / "base-sft"
    assert "<|assistant|>" in (new / "published" / "chat_template.jinja").read_text()
    code, out, _ = minitext("generate", new, "--chat", "q", "--temperature", "0", "--json")
    found = json.loads(out)
    assert code == 0 and found["text"] == "yes" and found["tokens"] <= 4
    code, out, _ = minitext("eval", new, "--json")
    assert code == 0 and json.loads(out)["loss"] < 0.1
    code, _, said = minitext("sft", base, *words, f"run.dir={tmp_path}")
    assert code == 0 and "already trained to step 60" in said


@pytest.mark.audit
def test_it_resumes_bit_for_bit(base, tmp_path):
    words = [
        f"data.path={write(tmp_path / 'a.jsonl')}",
        f"run.dir={tmp_path}",
        "train.save_every=2",
    ]

    def losses(name, *steps):
        for count in steps:
            more = [f"run.name={name}", f"train.steps={count}", "optim.schedule=constant"]
            cfg = recipes.new_config(base, "sft", [*words, *more, "optim.warmup_steps=1"])
            where = run.train(recipes.with_steps(cfg))
        lines = (where / "metrics.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"], line["grad_norm"]) for line in map(json.loads, lines)]

    assert losses("whole", 6) == losses("parts", 2, 4, 6)


@pytest.mark.parametrize(
    "words",
    [
        ["sft"], ["sft", "nowhere", "data.path=a"], ["sft", "{base}"], ["sft", "{base}", "laptop"],
        ["sft", "{base}", "data.path=nowhere.jsonl"], ["sft", "{base}", "data.path=gs://b/a.jsonl"],
        ["sft", "{base}", "data.path={text}"], ["sft", "{base}", "data.path={broken}"],
        ["sft", "{base}", "data.path={bad}"], ["sft", "{base}", "data.path={pairs}"],
        ["sft", "{base}", "data.path={good}", "data.chat_template=nowhere"],
        ["sft", "{base}", "data.path={good}", "data.chat_template={broken}"],
        ["sft", "{base}", "data.path={good}", "data.seq_len=2"],
        ["sft", "{base}", "data.path={good}", "model.vocab=100"],
        ["data", "preview"], ["data", "preview", "nowhere", "{good}"], ["data", "preview", "byte"],
        ["data", "preview", "byte", "{good}", "{good}"], ["data", "preview", "byte", "{good}", "--rows", "-1"],
        ["data", "preview", "byte", "{broken}"], ["data", "preview", "byte", "{bad}"], ["data", "preview", "byte", ""],
        ["data", "preview", "", "{good}"], ["data", "preview", "{base}", "{good}", "data.sourc=x"],
        ["data", "preview", "byte", "{empty}"], ["data", "preview", "{broken}", "{good}"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_hostile_words_get_one_line(words, base, minitext, tmp_path):
    texts = {
        "text.txt": "x", "broken.jsonl": "{", "bad.jsonl": '{"prompt": "q", "completion": ""}', "empty.jsonl": "",
        "pairs.jsonl": '{"prompt": "q", "chosen": "a", "rejected": "b"}',
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    places = {name.partition(".")[0]: str(tmp_path / name) for name in texts}
    places |= {"good": str(write(tmp_path / "good.jsonl")), "base": str(base)}
    code, out, said = minitext(*(word.format(**places) for word in words))
    lines = said.strip().splitlines()
    assert code == 2 and not out and len(lines) == 1 and len(said) < 1000, said
    assert lines[0].startswith("error: ") and not (tmp_path / "runs").exists()


def test_loss_and_gradients_are_those_of_transformers(tmp_path):
    """Packed rows here, one conversation after another there, with labels of -100."""
    import torch

    more = {"vocab_size": 300, "max_position_embeddings": 128}
    both = tiny_models.both("llama", tiny_models.CASES["llama"][1] | more, tmp_path / "model")
    words = [
        f"data.path={write(tmp_path / 'a.jsonl', 20)}", "data.source=conversations", "data.seq_len=128",
        "data.epochs=1",
    ]  # fmt: skip
    cfg = load_config(None, words).model_copy(update={"model": both.cfg})
    (batch,) = make_batches(cfg.data, vocab=300, global_batch=32, tokenizer=ByteTokenizer())
    assert batch["segment_ids"].max() > 1
    from flax import nnx

    value_and_grad = jax.jit(jax.value_and_grad(make_loss_fn(cfg), has_aux=True))
    (loss, _), grads = value_and_grad(nnx.state(both.ours, nnx.Param), batch)

    both.theirs.zero_grad()
    total, conversations = 0.0, 0
    for row in range(len(batch["tokens"])):
        of_row = {name: array[row] for name, array in batch.items()}
        for segment in range(1, of_row["segment_ids"].max() + 1):
            at = of_row["segment_ids"] == segment
            targets, mask = of_row["targets"][at], of_row["loss_mask"][at]
            ids = np.concatenate([of_row["tokens"][at][:1], targets])
            labels = np.concatenate([[-100], np.where(mask == 1, targets, -100)])
            made = both.theirs(torch.as_tensor(ids)[None], labels=torch.as_tensor(labels)[None])
            summed = made.loss * int(mask.sum())
            summed.backward()
            total, conversations = total + summed.item(), conversations + 1
    assert conversations == 19
    assert float(loss) == pytest.approx(total, rel=1e-5)
    table = families.table(both.cfg, both.name)
    ours = dict(zip(convert.tensors(table, grads), convert.values(table, grads), strict=True))
    found = {name: p.grad.numpy() for name, p in both.theirs.named_parameters()}
    # What moves all of a query's logits alike changes nothing: of its gradient there is only rounding.
    least = 1e-3 * np.median([np.abs(array).max() for array in found.values()])
    assert set(ours) == set(found)
    for name, array in ours.items():
        most = max(np.abs(found[name]).max(), least)
        assert np.abs(array - found[name]).max() < 1e-4 * most, name

    def alone(row, segment):
        at = batch["segment_ids"][row] == segment
        return {
            name: np.where(at, array[row], 0).astype(array.dtype)[None]
            for name, array in batch.items()
        }

    loss_of = jax.jit(lambda params, one: make_loss_fn(cfg)(params, one)[0])
    params = nnx.state(both.ours, nnx.Param)
    parts = [
        float(loss_of(params, alone(row, segment)))
        for row in range(len(batch["tokens"]))
        for segment in range(1, batch["segment_ids"][row].max() + 1)
    ]
    assert sum(parts) == pytest.approx(float(loss), rel=1e-5)
