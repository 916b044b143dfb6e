"""The engine's programs, compiled by the real compilers for chips that are not there."""

import importlib.util

import jax
import numpy as np
import pytest
from flax import nnx

import minitext as mt
from minitext.errors import UserError
from minitext.inference.compile import compile_serving, read_program
from minitext.inference.engine import Engine, EngineOptions
from minitext.inference.requests import Request
from minitext.models import attention
from minitext.models.transformer import Transformer
from tests.conftest import audit_but

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
FEW = EngineOptions(max_sequences=8, max_length=1024, chunk=128)


def check(programs, layers):
    """The step fits, reads pages by the kernel, and takes over the cache's memory without a copy."""
    for name, program in programs.items():
        report = program.report
        assert report.fits
        assert program.kernels == (layers if name == "decode" else 0)
        assert program.cache_copies == 0
        assert report.alias_bytes >= program.cache_bytes
        # Two sums of all devices in a layer: after attention and after the feed-forward layer.
        assert report.collectives["all-reduce"][0] >= 2 * layers - 1
    assert programs["decode"].report.argument_bytes >= programs["decode"].weight_bytes


@needs_libtpu
@pytest.mark.parametrize(
    "case", audit_but(["llama3-8b", "narrow"], ["llama3-8b", "qwen3-30b-a3b", "narrow"])
)
def test_layers_of_real_models_compile_for_four_tpus(case):
    """Two layers of each; `narrow` has heads of half a tile's row, which the compiler would turn."""
    preset = "llama3-8b" if case == "narrow" else case
    narrow = ["model.head_dim=64"] if case == "narrow" else []
    cfg = mt.load_config(preset, ["model.layers=2", *narrow]).model
    check(compile_serving(cfg, "v5e:2x2", FEW), 2)


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize(
    ("preset", "target", "texts"),
    [
        ("llama3-8b", "v5e:2x4", 32), ("llama3-8b", "v6e:2x4", 32),
        ("qwen3-30b-a3b", "v5e:2x2", 8), ("qwen3-30b-a3b", "v6e:2x2", 32),
    ],
)  # fmt: skip
def test_whole_models_compile_for_tpus(preset, target, texts):
    cfg = mt.load_config(preset).model
    check(compile_serving(cfg, target, EngineOptions(max_sequences=texts)), cfg.layers)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("preset", ["llama3-8b", "qwen3-30b-a3b"])
def test_layers_of_real_models_compile_for_two_h100s(preset):
    cfg = mt.load_config(preset, ["model.layers=2"]).model
    check(compile_serving(cfg, "h100:1x1x2", FEW), 2)


@needs_libtpu
def test_devices_must_divide_the_heads():
    cfg = mt.load_config("qwen3-30b-a3b").model
    with pytest.raises(UserError, match=r"kv_heads=4 is not divisible by mesh.tensor=8"):
        compile_serving(cfg, "v5e:2x4", FEW)


def test_copies_of_the_cache_are_found():
    text = """ENTRY %main (a: bf16[2,9,8,16]) -> bf16[2,9,8,16] {
  %a = bf16[2,9,8,16]{3,2,1,0} parameter(0)
  %b = bf16[2,9,8,16]{3,0,2,1} copy(%a)
  %c = bf16[2,9]{1,0} copy(%a)
  ROOT %d = bf16[2,9,8,16]{3,2,1,0} custom-call(%b), op="paged_attention"
}
"""
    assert read_program(text, {(2, 9, 8, 16)}) == (1, 1)


def test_padded_heads_change_no_answer(monkeypatch):
    """Pages of a TPU hold whole rows of a tile: zeros follow each narrow head."""
    cfg = mt.load_config(
        "laptop",
        ["model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "model.vocab=50"],
    ).model  # fmt: skip
    params = nnx.state(Transformer(cfg, rngs=nnx.Rngs(1)), nnx.Param)

    def answer():
        engine = Engine(
            cfg, params, EngineOptions(page_tokens=8, max_sequences=2, max_length=64, chunk=8)
        )
        events = []
        engine.submit(Request(tuple(range(1, 21)), max_tokens=24, logprobs=1), events.append)
        while sum(e.token is not None for e in events) < 24:
            engine.step()
        size = jax.tree.leaves(engine.cache)[0].shape[-1]
        got = [e for e in events if e.token is not None]
        return size, [e.token for e in got], np.asarray([e.logprob for e in got])

    plain = answer()
    monkeypatch.setattr(attention, "stored_features", lambda features: 2 * features)
    padded = answer()
    assert padded[0] == 2 * plain[0] and padded[1] == plain[1]
    np.testing.assert_allclose(padded[2], plain[2], atol=1e-5)
