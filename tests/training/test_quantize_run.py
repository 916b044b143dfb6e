"""A run becomes one with stored weights, which the commands then use like any other."""

import itertools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from minitext.checkpoint import leaves
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config.config import load_config, to_yaml
from minitext.config.quantization import STORAGE_PRESETS, StorageRule
from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError
from minitext.inference.cpu_decode import StreamedLinear, split_projections, unstack_layers
from minitext.inference.engine import Engine, EngineOptions
from minitext.inference.generate import Sampling, generate
from minitext.inference.requests import Request
from minitext.models.transformer import Transformer
from minitext.training import calibration, run_dir
from minitext.training.quantize_run import abstract_weights, quantize_run, read_rules
from tests.conftest import audit_but

SETTINGS = ["model.layers=2", "model.embed=32", "model.heads=4", "model.mlp=48", "data.seq_len=16",
            "train.global_batch=8", "data.source=grammar", "train.eval_batches=1"]  # fmt: skip


def write_run(folder, *settings, preset=None, damage=lambda params: params):
    """A run directory of random weights."""
    cfg = load_config(preset, [*SETTINGS, *settings])
    params = damage(nnx.state(Transformer(cfg.model, rngs=nnx.Rngs(0)), nnx.Param))
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text(to_yaml(cfg))
    ByteTokenizer().save(folder / "tokenizer.json")
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(3, {"params": params}, {}, cfg.model_dump(mode="json"), wait=True)
    return cfg, params


VARIANTS = {"dense": [], "moe": ["model.ffn.kind=moe", "model.tie_embeddings=true"]}


@pytest.mark.parametrize(
    "case", audit_but([("nf4", "moe")], [*itertools.product(STORAGE_PRESETS, VARIANTS)])
)
def test_a_run_is_stored_as_the_model_would_store_it(tmp_path, case):
    kind, more = case[0], VARIANTS[case[1]]
    write_run(tmp_path / "a", *more)
    rows = quantize_run(tmp_path / "a", tmp_path / "b", STORAGE_PRESETS[kind])
    cfg, params, _, step = run_dir.load_run(tmp_path / "b")
    want = nnx.state(Transformer(cfg.model, rngs=nnx.Rngs(0)))
    assert step == 3
    for name, leaf in leaves.named(want).items():
        found = leaves.named(params)[name]
        assert found.dtype == leaf.dtype, name
        # Drawn and divided in one program there and in two here: a number in thousands falls on the other side.
        different = np.asarray(found) != np.asarray(leaf)
        assert np.mean(different) < 1e-2, name
    assert {row.weight for row in rows if row.kind != "float32"} == {
        name.replace(".", "/") for name in abstract_weights(cfg)
    }
    assert sum(row.after for row in rows) == sum(x.nbytes for x in jax.tree.leaves(params))
    for row in rows:
        low, high = {"int8": (1e-3, 2e-2), "fp8": (1e-2, 4e-2), "float32": (-1, 0)}.get(
            row.kind, (0.05, 0.13)
        )
        assert low < row.error <= row.worst <= high or row.kind == "float32", row


def test_one_parameter_is_read_after_another(tmp_path):
    _, params = write_run(tmp_path / "a")
    with Checkpointer(tmp_path / "a" / "checkpoints") as checkpointer:
        step, each = checkpointer.read_each({"params": params})
        for (name, found), (path, leaf) in zip(
            each, leaves.named({"params": params}).items(), strict=True
        ):
            assert name == path
            np.testing.assert_array_equal(found, leaf)
    assert step == 3
    with Checkpointer(tmp_path / "none") as checkpointer:
        assert checkpointer.read_each({"params": params}) is None


@pytest.mark.audit
@pytest.mark.parametrize("kind", audit_but(["nf4"], STORAGE_PRESETS))
def test_engine_and_generate_say_the_same_of_a_stored_run(tmp_path, kind):
    write_run(tmp_path / "a")
    quantize_run(tmp_path / "a", tmp_path / "b", STORAGE_PRESETS[kind])
    cfg, params, _, _ = run_dir.load_run(tmp_path / "b")
    prompt = list(b"the cat")
    greedy = Sampling(temperature=0)
    want = list(generate(cfg.model, params, prompt, max_tokens=6, sampling=greedy))
    engine = Engine(
        cfg.model, params, EngineOptions(max_sequences=2, max_length=32, cache_tokens=64)
    )
    found = []
    engine.submit(
        Request(tuple(prompt), 6, temperature=0.0),
        lambda event: found.append(event.token) if event.token is not None else None,
    )
    while engine.step():
        pass
    assert found == want


def test_commands_take_a_stored_run(tmp_path, minitext):
    write_run(tmp_path / "a")
    code, out, err = minitext("quantize", tmp_path / "a", tmp_path / "b", "--rules", "int4")
    assert code == 0 and "blocks/ffn/gate/w" in out and "times smaller" in out, err
    assert "peak memory" in err
    code, out, err = minitext("quantize", tmp_path / "a", tmp_path / "c", "--json")
    rows = json.loads(out)
    assert code == 0 and {row["kind"] for row in rows} == {"int8", "float32"}
    code, out, err = minitext("eval", tmp_path / "b")
    assert code == 0 and "validation loss" in out, err
    code, out, err = minitext("generate", tmp_path / "b", "--prompt", "the", "--max-tokens", 3)
    assert code == 0 and out.startswith("the"), err
    code, out, err = minitext(
        "train", f"config={tmp_path / 'b' / 'config.yml'}", f"run.dir={tmp_path}", "run.name=d"
    )
    assert (
        code == 2 and err.count("\n") == 1 and "model.storage stores weights in fewer bits" in err
    )


def test_what_cannot_be_quantized_leaves_nothing(tmp_path, minitext):
    write_run(tmp_path / "a")
    quantize_run(tmp_path / "a", tmp_path / "b", STORAGE_PRESETS["int8"])

    def damaged(params):
        w = params["blocks"]["ffn"]["up"]["w"]
        w.set_value(w.get_value().at[1, 2, 3].set(np.nan))
        return params

    write_run(tmp_path / "nan", damage=damaged)
    (tmp_path / "file.yml").write_text("[{module: blocks/.*, dtype: int3}]")
    for source, rules, message in (
        ("a", "int5", "no preset has this name"),
        ("a", "[{module: blocks/mlp}]", r"matches no module"),
        ("a", "[{module: '('}]", "not a regular expression"),
        ("a", "[{modul: x}]", "did you mean module"),
        ("a", "[{block: 0}]", "choose 1 or more"),
        ("a", "[{dtype: none, block: 4}]", "has no effect"),
        ("a", "[", "is not YAML"),
        ("a", "{}", "is not a list of rules"),
        ("a", str(tmp_path / "file.yml"), "rule 0: dtype=int3"),
        ("a", str(tmp_path / "missing.yml"), "cannot be read"),
        ("b", "int8", "is quantized already"),
        ("nan", "int8", "blocks.ffn.up.w has numbers that are NaN"),
        ("missing", "int8", "not a run directory"),
    ):
        code, out, err = minitext("quantize", tmp_path / source, tmp_path / "out", "--rules", rules)
        assert code == 2 and out == "" and message in err and err.count("\n") == 1, (rules, err)
        assert not (tmp_path / "out").exists()
    code, _, err = minitext("quantize", tmp_path / "a", tmp_path / "b")
    assert code == 2 and "exists" in err


def test_a_run_with_adapters_is_to_be_exported_first(tmp_path):
    """It has adapters alone: what would be made couldn't be read beside the float32 weights of its base."""
    more = ["model.lora.rank=2", f"checkpoint.load_parameters={tmp_path / 'base'}"]
    write_run(tmp_path / "a", *more)
    with pytest.raises(UserError, match="has adapters alone.*: export it"):
        quantize_run(tmp_path / "a", tmp_path / "b", STORAGE_PRESETS["int8"])
    assert not (tmp_path / "b").exists()


# Text with some words far more frequent than others, so that inputs differ in their moments.
TEXT = "the cat sat on the mat and the dog sat on the cat; " * 60


@pytest.mark.audit
def test_calibration_lowers_the_error_of_logits(tmp_path, minitext):
    write_run(tmp_path / "a")
    (tmp_path / "text.txt").write_text(TEXT)
    tokens_BT = jax.numpy.asarray(
        calibration.text_rows(str(tmp_path / "text.txt"), ByteTokenizer(), 16, 8)
    )

    def logits(folder):
        cfg, params, _, _ = run_dir.load_run(folder)
        model = nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg.model, rngs=nnx.Rngs(0))))
        return jax.jit(lambda params: nnx.merge(model, params)(tokens_BT))(params)

    rules = "[{module: blocks/.*, dtype: int4, block: 8}]"
    quantize_run(tmp_path / "a", tmp_path / "nearest", read_rules(rules))
    words = ("--rules", rules, "--calibrate", tmp_path / "text.txt")
    code, out, err = minitext("quantize", tmp_path / "a", tmp_path / "b", *words)
    assert code == 0 and "blocks/ffn/up/w" in out, err
    want = logits(tmp_path / "a")
    near, calibrated = (
        float(np.linalg.norm(logits(tmp_path / name) - want)) for name in ("nearest", "b")
    )
    assert calibrated < 0.85 * near
    code, _, err = minitext("quantize", tmp_path / "a", tmp_path / "c", "--calibrate", "data")
    assert code == 2 and "--calibrate has no effect" in err
    (tmp_path / "short.txt").write_text("the")
    words = ("--rules", "int4", "--calibrate", tmp_path / "short.txt")
    code, _, err = minitext("quantize", tmp_path / "a", tmp_path / "c", *words)
    assert code == 2 and "has 3 tokens" in err and not (tmp_path / "c").exists()


def test_little_text_is_measured_without_the_padding_of_its_batch(tmp_path):
    """A run of a hundred bytes has fewer rows than a batch, and the last row isn't full."""
    (tmp_path / "text.txt").write_text(TEXT[:200])
    data = [
        f"data.path={tmp_path / 'text.txt'}",
        "data.source=files",
        "data.validation_fraction=0.4",
    ]
    cfg, _ = write_run(tmp_path / "a", *data)
    rows_BT = calibration.read_rows(calibration.VALIDATION, cfg, ByteTokenizer())
    assert rows_BT.shape[1] == 16 and 1 < len(rows_BT) < calibration.ROWS
    assert (rows_BT > 0).all()  # a byte 0 is nowhere in the text


@pytest.mark.audit
def test_a_sweep_compares_all_presets(tmp_path, minitext):
    write_run(tmp_path / "a", "model.attention.kind=gqa")
    (tmp_path / "text.txt").write_text(TEXT)
    words = ("--sweep", "--text", tmp_path / "text.txt", "--calibrate", tmp_path / "text.txt")
    code, out, err = minitext(
        "quantize", tmp_path / "a", *words, "--plot", tmp_path / "p.svg", "--json"
    )
    assert code == 0, err
    found = {row["name"]: row for row in json.loads(out)}
    assert list(found) == [
        "float32",
        "int8",
        "fp8",
        "int4",
        "int4 calibrated",
        "nf4",
        "nf4 calibrated",
    ]
    assert found["nf4"]["bytes"] < found["int4"]["bytes"] < found["int8"]["bytes"]
    losses = {name: row["loss"] for name, row in found.items()}
    apart = {name: abs(loss - losses["float32"]) for name, loss in losses.items()}
    assert apart["int8"] < 1e-2 and max(apart.values()) < 0.3
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    # The stored runs' own bytes.
    quantize_run(tmp_path / "a", tmp_path / "b", STORAGE_PRESETS["int4"])
    params = run_dir.load_run(tmp_path / "b")[1]
    assert found["int4"]["bytes"] == sum(x.nbytes for x in jax.tree.leaves(params))
    for words, message in (
        (("--sweep", "--rules", "int8"), "int8 has no effect with --sweep"),
        ((tmp_path / "c", "--plot", tmp_path / "q.svg"), "has no effect without --sweep"),
        ((), "OUT is missing"),
    ):
        code, _, err = minitext("quantize", tmp_path / "a", *words)
        assert code == 2 and message in err


def test_a_stored_run_is_not_exported_for_others(tmp_path, minitext):
    write_run(tmp_path / "a")
    quantize_run(tmp_path / "a", tmp_path / "b", STORAGE_PRESETS["int8"])
    for words in (("m.gguf", "--format", "gguf"), ("hf", "--format", "hf")):
        code, _, err = minitext("export", tmp_path / "b", tmp_path / words[0], *words[1:])
        assert code == 2 and "export the run that it was made of" in err
    code, _, err = minitext("export", tmp_path / "b", tmp_path / "again")
    assert code == 0, err
    a, b = (leaves.named(run_dir.load_run(tmp_path / name)[1]) for name in ("b", "again"))
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("tied", audit_but(["true"], ["true", "false"]))
def test_one_token_on_a_cpu_multiplies_stored_int8(tmp_path, tied):
    """Layers taken apart read int8 as two rows of int8 and give what the stored weights give."""
    write_run(tmp_path / "a", f"model.tie_embeddings={tied}", "model.scan_layers=false")
    quantize_run(tmp_path / "a", tmp_path / "b", STORAGE_PRESETS["int8"])
    cfg, params, _, _ = run_dir.load_run(tmp_path / "b")
    model = nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg.model, rngs=nnx.Rngs(0)))), params
    )
    tokens_11 = jax.numpy.asarray([[100]])
    run = nnx.jit(lambda model, tokens: model(tokens))
    want = run(model, tokens_11)
    apart = split_projections(unstack_layers(model), 2)
    assert isinstance(apart.blocks[0].ffn.up, StreamedLinear)
    found = run(apart, tokens_11)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-3 * float(abs(want).max()))
    text = jax.jit(lambda tokens: apart(tokens)).lower(tokens_11).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line and "i8>" in line]
    assert len(products) == 2 * 7 + 1
    many = jax.numpy.asarray([[100, 101, 102, 103]])
    np.testing.assert_allclose(
        run(apart, many), run(model, many), rtol=0, atol=2e-2 * float(abs(want).max())
    )


def test_rules_are_presets_files_or_yaml(tmp_path):
    text = "[{module: blocks/ffn/.*, dtype: int4, block: 16}, {dtype: int8}]"
    want = (StorageRule(module="blocks/ffn/.*", dtype="int4", block=16), StorageRule())
    (tmp_path / "rules.yml").write_text(text)
    assert read_rules(text) == read_rules(str(tmp_path / "rules.yml")) == want
    assert read_rules("nf4") == STORAGE_PRESETS["nf4"]
