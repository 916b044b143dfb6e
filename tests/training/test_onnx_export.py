"""onnxruntime computes what the run does, for any number of texts and tokens, or the export is refused."""

import builtins
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from flax import nnx

from minitext.errors import UserError
from minitext.models.transformer import Transformer
from minitext.training import onnx_export
from tests.conftest import audit_but
from tests.training.test_quantize_run import write_run

KINDS = {
    "gqa": ["model.kv_heads=2"],
    "gemma": ["model.attention.qk_norm=head", "model.logit_softcap=30", "model.tie_embeddings=true",
              "model.norm_offset=true"],
    "mla": ["model.attention.kind=mla", "model.kv_heads=null"],
    "window": ["model.attention.window=5", "model.attention.softcap=9", "model.attention.sinks=true"],
    "bias": ["model.attention.qkv_bias=true", "model.attention.out_bias=true", "model.dtype=bfloat16"],
}  # fmt: skip
SHAPES = [(1, 1), (2, 9), (3, 40), (5, 2), (1, 64)]


LONGEST = 64


def logits(cfg, params):
    """Our own logits of tokens [B, T], from the model as it is trained: stacked, and scanned."""
    net = Transformer(cfg.model.model_copy(update={"dtype": "float32"}), rngs=nnx.Rngs(0))
    nnx.update(net, params)
    compiled = nnx.jit(lambda net, tokens: net(tokens))

    def computed(tokens_BT):
        # Padded on the right, which no token before it sees: one program for texts of every length.
        (B, T), room = tokens_BT.shape, (0, LONGEST - tokens_BT.shape[1])
        padded = np.pad(tokens_BT, ((0, 5 - B), room))
        return np.asarray(compiled(net, padded))[:B, :T]

    return computed


def run(folder, tokens_BT):
    session = onnx_export.open_session(onnxruntime, folder / "model.onnx")
    assert [i.name for i in session.get_inputs()] == ["tokens"]
    assert [o.name for o in session.get_outputs()] == ["logits"]
    return session.run(None, {"tokens": tokens_BT})[0]


@pytest.mark.parametrize("kind", audit_but(("window",), KINDS))
def test_onnxruntime_gives_the_same_logits(tmp_path, kind):
    cfg, params = write_run(tmp_path / "run", *KINDS[kind])
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, cfg.model.vocab, shape, np.int32) for shape in SHAPES]
    computed = logits(cfg, params)
    want = [computed(text) for text in texts]
    assert onnx_export.export_onnx(tmp_path / "run", tmp_path / "out") == 3
    for text_BT, want_BTV in zip(texts, want, strict=True):
        got_BTV = run(tmp_path / "out", text_BT)
        assert got_BTV.shape == want_BTV.shape and got_BTV.dtype == np.float32
        assert np.abs(got_BTV - want_BTV).max() < 1e-5 * np.abs(want_BTV).max(), text_BT.shape
    tokens = ours = np.array([[1, 2, 3]], np.int32)
    for _ in range(8):
        tokens = np.append(tokens, run(tmp_path / "out", tokens)[:, -1:].argmax(-1), 1).astype("i4")
        ours = np.append(ours, computed(ours)[:, -1:].argmax(-1), 1).astype("i4")
    assert tokens.tolist() == ours.tolist()
    onnx.checker.check_model(tmp_path / "out" / "model.onnx", full_check=True)
    names = {one.name for one in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer}
    assert "norm.scale" in names and any(name.startswith("blocks.1.") for name in names)
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]


def test_the_cards_commands_run(tmp_path, monkeypatch, capsys):
    """What the model card says works in the folder, with onnxruntime and the tokenizer's file alone."""
    write_run(tmp_path / "run", "model.vocab=257")
    onnx_export.export_onnx(tmp_path / "run", tmp_path / "out", "mit")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card and "float32" in card
    monkeypatch.chdir(tmp_path / "out")
    exec(re.search(r"```python\n(.*?)```", card, re.S)[1], {})
    said = capsys.readouterr().out
    assert said.startswith("the ") and len(said) > len("the \n")


def test_large_parameters_are_in_a_file_of_their_own(tmp_path):
    """Which has no limit of size, and without which the file can't be loaded."""
    cfg, params = write_run(tmp_path / "run")
    text_BT = np.arange(12, dtype=np.int32).reshape(2, 6)
    want_BTV = logits(cfg, params)(text_BT)
    onnx_export.export_onnx(tmp_path / "run", tmp_path / "out", single_file_bytes=1000)
    weights = tmp_path / "out" / "model.onnx.data"
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    assert 0.95 * size < weights.stat().st_size < 1.1 * size
    np.testing.assert_allclose(run(tmp_path / "out", text_BT), want_BTV, atol=1e-5)
    weights.unlink()
    with pytest.raises(Exception, match=r"model\.onnx\.data"):
        run(tmp_path / "out", text_BT)


@pytest.mark.parametrize(
    "more, said",
    [
        (["model.attention.kind=deltanet"], "no operator for the recurrence of gated DeltaNet"),
        (["model.ffn.kind=moe"], "cannot be converted to ONNX"),
        (["model.attention.chunk=8"], "cannot be converted to ONNX"),
        (["model.storage=[{module: 'blocks/.*', dtype: int8}]"], "is quantized"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path, more, said):
    write_run(tmp_path / "run", *more)
    with pytest.raises(UserError, match=said) as refused:
        onnx_export.export_onnx(tmp_path / "run", tmp_path / "out")
    assert len(str(refused.value).splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "jax2onnx":
            raise ModuleNotFoundError("No module named 'jax2onnx'", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"needs jax2onnx: pip install 'minitext\[onnx\]'"):
        onnx_export.export_onnx(tmp_path / "run", tmp_path / "out")


def test_a_file_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    """A converter's fault, such as another activation, doesn't get out."""
    write_run(tmp_path / "run")
    real = onnx_export.convert

    def faulty(*args):
        graph = real(*args)
        for node in graph.graph.node:
            node.op_type = {"Sigmoid": "Tanh"}.get(node.op_type, node.op_type)
        return graph

    monkeypatch.setattr(onnx_export, "convert", faulty)
    with pytest.raises(UserError, match="differ by .*: nothing is written"):
        onnx_export.export_onnx(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_jax_is_as_it_was_afterwards(tmp_path):
    """The converter replaces functions of JAX while it works."""
    cfg, params = write_run(tmp_path / "run")
    before = jnp.arange, jax.nn.silu, jax.lax.dot_general
    text_BT = np.ones((1, 4), np.int32)
    want = logits(cfg, params)(text_BT)
    onnx_export.export_onnx(tmp_path / "run", tmp_path / "out")
    assert (jnp.arange, jax.nn.silu, jax.lax.dot_general) == before
    np.testing.assert_array_equal(logits(cfg, params)(text_BT), want)
