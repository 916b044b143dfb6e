"""Weights that devices send in int8: rounding, gradients, every mesh, and what a compiled step really sends."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import minitext as mt
from minitext.compiler import hlo
from minitext.compiler.targets import topology_mesh
from minitext.errors import UserError
from minitext.models.quantized_gather import gather, gather_part, multiply
from minitext.sharding.mesh import make_mesh
from minitext.training.step import (
    abstract_batch,
    abstract_state,
    init_state,
    make_loss_fn,
    make_train_step,
)
from tests.compiler.test_aot import needs_libtpu
from tests.models.test_quantization import SMALL, batch_of, gradients

ROUNDED = "sharding.gather_dtype=int8"


@pytest.mark.parametrize("dimension", [0, 1])
def test_it_rounds_each_row_by_half_a_step_at_most(dimension):
    w = jax.random.normal(jax.random.key(0), (24, 40)) * jnp.exp(jnp.arange(24.0))[:, None] / 9
    w = jnp.moveaxis(w.at[3].set(0), 0, dimension)
    got = gather(w, dimension, None, jnp.float32)
    step = jnp.max(jnp.abs(w), axis=1 - dimension, keepdims=True) / 127
    assert jnp.all(jnp.abs(got - w) <= step * 0.5001)
    assert jnp.any(got != w) and not jnp.any(jnp.take(got, 3, axis=dimension))
    broken = gather(w.at[5, 5].set(jnp.nan), dimension, None, jnp.float32)
    lost = jnp.all(jnp.isnan(broken), axis=1 - dimension)
    assert jnp.array_equal(lost, jnp.arange(w.shape[dimension]) == 5)


def test_its_gradient_is_that_of_the_weight_and_the_tokens_is_that_of_the_rounded_one():
    x, w = jax.random.normal(jax.random.key(0), (2, 8, 8))
    _, back = jax.vjp(lambda x, w: multiply(jnp.dot, x, w, 0, None), x, w)
    grad_x, grad_w = back(w)
    np.testing.assert_allclose(grad_w, x.T @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_x, w @ gather(w, 0, None, jnp.float32).T, rtol=1e-5, atol=1e-5)
    assert not jnp.allclose(grad_x, w @ w.T, rtol=1e-5, atol=1e-5)


def test_devices_gather_what_one_has():
    mesh = make_mesh(mt.load_config("laptop", ["mesh.fsdp=4", "mesh.tensor=2"]).mesh)
    w = jax.random.normal(jax.random.key(0), (16, 12))
    with jax.set_mesh(mesh):
        stored = jax.device_put(w, P("fsdp", "tensor"))
        got = jax.jit(lambda w: gather(w, 0, P(None, "tensor"), jnp.float32))(stored)
    assert got.sharding.spec == P(None, "tensor")
    assert jnp.array_equal(got, gather(w, 0, None, jnp.float32))


def exact_loss(*settings):
    """Returns the loss per token on one device, whose weights stay as they are."""
    cfg = mt.load_config("laptop", [*SMALL, "mesh.data=1", *settings])
    mesh = make_mesh(cfg.mesh, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        loss, _ = jax.jit(make_loss_fn(cfg))(init_state(cfg, mesh).params, batch_of(cfg))
    return float(loss) / (cfg.train.global_batch * cfg.data.seq_len)


MESHES = {
    "fsdp_tp": ["mesh.fsdp=4", "mesh.tensor=2", "mesh.data=1"],
    "all": ["mesh.fsdp=2", "mesh.context=2", "mesh.data=2"],
    "pp": ["mesh.fsdp=2", "mesh.stage=2", "mesh.data=1"],
}


@pytest.mark.audit  # the layer with experts below has projections that are gathered too
@pytest.mark.parametrize("rules", MESHES)
def test_a_step_is_the_same_on_every_mesh(rules):
    exact = exact_loss()
    one_loss, one = gradients("mesh.data=1", ROUNDED)
    loss, found = gradients(*MESHES[rules], f"sharding.rules={rules}", ROUNDED)
    assert 1e-5 < abs(one_loss - exact) < 1e-2
    assert loss == pytest.approx(one_loss, rel=2e-6)
    for name, want in one.items():
        np.testing.assert_allclose(found[name], want, atol=5e-6 * np.abs(want).max(), err_msg=name)


EXPERTS = (
    "model.layers=1",
    "model.ffn.kind=moe",
    "model.ffn.experts=4",
    "model.ffn.experts_per_token=2",
)


@pytest.mark.audit
@pytest.mark.parametrize(
    "remat",
    ["model.remat=none", pytest.param("model.remat=full", marks=pytest.mark.audit)],
)
def test_experts_are_the_same_on_every_mesh(remat):
    """With an expert on two devices, each of which stores half of the features' other dimension."""
    exact = exact_loss(*EXPERTS, remat)
    one_loss, one = gradients("mesh.data=1", *EXPERTS, remat, ROUNDED)
    axes = "mesh.fsdp=2", "mesh.tensor=2", "mesh.expert=2", "mesh.data=1"
    loss, found = gradients(*axes, *EXPERTS, remat, ROUNDED)
    assert 1e-5 < abs(one_loss - exact) < 1e-2
    assert loss == pytest.approx(one_loss, rel=2e-6)
    for name, want in one.items():
        np.testing.assert_allclose(found[name], want, atol=5e-6 * np.abs(want).max(), err_msg=name)


def test_each_row_of_an_expert_has_its_own_scale_and_its_gradient_is_that_of_the_weight():
    w = jax.random.normal(jax.random.key(0), (3, 4, 8)) * jnp.array([1e-3, 1, 1e3])[:, None, None]

    def sent(w):
        return gather_part(lambda w: w, w, (), features=2, dtype=jnp.float32)

    got, back = jax.vjp(sent, w)
    for expert, want in zip(got, w, strict=True):
        assert jnp.array_equal(expert, gather(want, 0, None, jnp.float32))
    assert jnp.array_equal(back(w)[0], w)


def sent(target, *settings):
    """Returns the types and bytes of what a train step compiled for a target gathers in its loop over layers."""
    cfg = mt.load_config("laptop", [*SMALL, *settings])
    mesh = topology_mesh(target, cfg.mesh)
    with jax.set_mesh(mesh):
        step = make_train_step(cfg, mesh)
        program = step.lower(abstract_state(cfg, mesh), abstract_batch(cfg, mesh)).compile()
    found = Counter()
    for collective in hlo.Module(program.as_text()).collectives():
        if collective.kind == "all-gather" and collective.runs > 1:
            for kind, size in collective.arrays:
                found[kind] += collective.runs * size
    return found


@needs_libtpu
@pytest.mark.slow
@pytest.mark.audit
def test_a_tpu_sends_int8():
    wide = [
        "model.embed=512", "model.head_dim=128", "model.mlp=1024", "data.seq_len=128", "model.dtype=bfloat16",
        "mesh.data=1", "mesh.fsdp=4",
    ]  # fmt: skip
    exact, rounded = sent("v5e:2x2", *wide), sent("v5e:2x2", *wide, ROUNDED)
    weights = exact["bf16"]
    assert rounded["s8"] * 2 == weights > 0
    assert rounded["bf16"] < 0.01 * weights and rounded["f32"] < 0.02 * weights


def test_where_it_would_change_nothing_it_is_refused():
    with pytest.raises(UserError, match="sharding.rules=tp: no layer gathers its weights: set"):
        mt.load_config("laptop", [*SMALL, ROUNDED, "sharding.rules=tp"])
