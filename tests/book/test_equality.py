"""The equality matrix: however the work is split, three train steps give one device's losses, gradients, parameters."""

import functools

import jax
import pytest

from minitext.book.equality import differences, run_steps
from minitext.book.layouts import LAYOUTS
from minitext.sharding.mesh import make_mesh
from tests.conftest import audit_but

SIZES = [
    "model.layers=4", "model.embed=32", "model.heads=8", "model.kv_heads=4", "model.mlp=64", "model.vocab=256",
    "model.scan_layers=true", "data.seq_len=32", "train.global_batch=16", "mesh.data=1",
]  # fmt: skip


# Heads make their keys from a latent, and widths of keys and values differ.
MLA = (
    "model.kv_heads=null model.attention.kind=mla model.attention.q_rank=24 model.attention.kv_rank=16 "
    "model.attention.nope_dim=4 model.attention.rope_dim=4 model.attention.v_dim=6"
)
# What tells published families apart: each in one of these.
PATTERNS = {
    "windows": [
        "model.layers=4", "model.period=[{}, {attention: {window: null}, rope: {theta: 1.0e6}}]", "model.norms=both",
        "model.attention.window=5", "model.attention.softcap=20.0", "model.attention.scale=0.3",
        "model.attention.qk_norm=head", "model.norm_offset=true", "model.embed_scale=8.0", "model.logit_scale=0.1",
        "model.logit_softcap=10.0",
    ],
    "experts": [
        "model.layers=5", "model.period=[{}, {ffn: {kind: swiglu}}]", "model.dense_layers=1", "model.dense_mlp=96",
        "model.ffn.kind=moe", "model.ffn.experts=4", "model.ffn.router_bias=true", "model.ffn.bias=true",
        "model.ffn.activation=clamped", "model.ffn.shared_experts=1", "model.ffn.shared_gate=true",
        "model.attention.sinks=true", "model.attention.qkv_bias=true", "model.attention.out_bias=true",
    ],
    "chunks": [
        "model.layers=2",
        "model.period=[{}, {rope: {kind: none}, attention: {chunk: null, temperature_length: 4}}]",
        "model.ffn.kind=moe", "model.ffn.experts=4", "model.ffn.router=sigmoid", "model.ffn.scale_input=true",
        "model.attention.qk_norm=l2", "model.attention.chunk=12", "model.attention.gate=true",
    ],
    "whole norms": ["model.layers=2", "model.norms=after", "model.attention.qk_norm=whole", "model.ffn.bias=true"],
}  # fmt: skip
QUICK = ("fsdp x tp x cp",)
OF_MLA = ("pp, 1f1b", "fsdp x tp x cp")


@functools.cache
def one_device(tiny, tied, *model):
    cfg = tiny(*SIZES, f"model.tie_embeddings={tied}", *model)
    return run_steps(cfg, make_mesh(devices=jax.devices()[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", audit_but(QUICK, LAYOUTS))
def test_three_steps_are_those_of_one_device(tiny, layout):
    steps_are_those_of_one_device(tiny, LAYOUTS[layout])


@pytest.mark.audit
@pytest.mark.parametrize("layout", OF_MLA)
def test_three_steps_of_latent_attention_are_those_of_one_device(tiny, layout):
    steps_are_those_of_one_device(tiny, LAYOUTS[layout], *MLA.split())


@pytest.mark.audit
def test_three_steps_on_four_slices_are_those_of_one_device(tiny):
    """Both axes cross, and each slice's two devices are neighbours on `data`: not the order of the devices."""
    steps_are_those_of_one_device(tiny, "mesh.data=4 mesh.fsdp=2 mesh.dcn.data=2 mesh.dcn.fsdp=2")


OF_PATTERNS = ("fsdp x tp x cp", "cp, all-gather", "fsdp x tp", "zero2")


@pytest.mark.audit
@pytest.mark.parametrize("layout", OF_PATTERNS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_three_steps_of_a_pattern_are_those_of_one_device(tiny, pattern, layout):
    want = one_device(tiny, False, *PATTERNS[pattern])
    cfg = tiny(*SIZES, *PATTERNS[pattern], *LAYOUTS[layout].split())
    found = differences(run_steps(cfg, make_mesh(cfg.mesh)), want)
    # Not the parameters: biases start at zero, and AdamW's first steps are the signs of gradients as small as rounding.
    for name in ("loss", *(name for name in found if name.startswith("gradient of"))):
        assert found[name] < (1e-6 if name == "loss" else 2e-5), name


def steps_are_those_of_one_device(tiny, layout, *model):
    cfg = tiny(*SIZES, *model, *layout.split())
    found = differences(
        run_steps(cfg, make_mesh(cfg.mesh)), one_device(tiny, cfg.model.tie_embeddings, *model)
    )
    # Rounding: sums of up to 512 tokens in another order; AdamW divides small gradients by their own size.
    for name, difference in found.items():
        limit = 1e-6 if name == "loss" else 1e-5 if name.startswith("gradient of") else 3e-5
        assert difference < limit, name


def test_a_difference_is_seen(tiny):
    """Of a step on other numbers; and it is measured in the size of what it is in."""
    want = one_device(tiny, False)
    losses = want.losses * [1, 1, 1.5]
    changed = differences(want._replace(losses=losses), want)
    assert changed.pop("loss") > 0.3 and not any(changed.values())
    (name, grad), *_ = want.grads.items()
    grads = want.grads | {name: grad + 0.01 * abs(grad).max()}
    changed = differences(want._replace(grads=grads), want)
    assert changed[f"gradient of {name}"] == pytest.approx(0.01, rel=0.01)
