"""Schedules and optimizers: what decays, what is clipped, where the rate goes, and what it all takes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.contrib._muon import orthogonalize_via_newton_schulz
from typer.testing import CliRunner

from minitext.cli.main import app
from minitext.config.model import ModelConfig
from minitext.config.sections import MeshConfig, OptimConfig
from minitext.data.batches import make_batches
from minitext.models.flops import count_params
from minitext.models.transformer import Transformer
from minitext.sharding.mesh import make_mesh
from minitext.training.optim import (
    DIRECTIONS,
    MUON_RMS,
    NEWTON_SCHULZ,
    decay_mask,
    make_optimizer,
    make_schedule,
    muon_labels,
    orthogonalize,
)
from minitext.training.step import abstract_state, init_state, make_train_step, optimizer_memory
from tests.conftest import audit_but


@given(
    st.sampled_from(["cosine", "linear", "wsd"]), st.integers(1, 400), st.integers(0, 300), st.floats(1e-5, 1e-1),
    st.floats(0, 1), st.floats(0.01, 1),
)  # fmt: skip
@settings(max_examples=40)
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(
    schedule, steps, warmup, peak, ratio, share
):
    cfg = OptimConfig(
        schedule=schedule, learning_rate=peak, warmup_steps=warmup, min_ratio=ratio, decay_share=share
    )  # fmt: skip
    # One shape for all examples, so that nothing is compiled anew.
    rates = np.asarray(make_schedule(cfg, steps)(jnp.arange(401)))[: steps + 1]
    assert (rates > 0).all() or ratio < 1e-30
    assert rates.max() <= peak * 1.0001
    top = min(warmup, steps)
    assert (np.diff(rates[: top + 1]) >= 0).all()
    assert (np.diff(rates[top:]) <= peak * 1e-6).all()
    if warmup <= steps:
        np.testing.assert_allclose(rates[warmup], peak, rtol=1e-5)
    if warmup < steps:
        np.testing.assert_allclose(rates[steps], peak * ratio, rtol=1e-4, atol=peak * 1e-6)


def test_constant_stays_at_the_peak():
    cfg = OptimConfig(learning_rate=0.1, warmup_steps=2, schedule="constant")
    np.testing.assert_allclose([make_schedule(cfg, 10)(i) for i in (2, 5, 10)], 0.1, rtol=1e-6)


@given(st.integers(10, 400), st.integers(0, 100), st.floats(0.01, 1))
@settings(max_examples=20)
def test_wsd_is_stable_until_its_decay(steps, warmup, share):
    cfg = OptimConfig(
        schedule="wsd", learning_rate=1.0, warmup_steps=warmup, min_ratio=0.0, decay_share=share
    )
    rates = np.asarray(make_schedule(cfg, steps)(jnp.arange(401)))[: steps + 1]
    begin = steps - max(1, round(share * steps))
    stable, falling = rates[warmup : begin + 1], rates[max(begin, warmup) :]
    np.testing.assert_allclose(stable, 1.0, rtol=1e-6)
    assert (np.diff(falling, 2) < 1e-6).all() and (np.diff(falling) < 0).all()


def test_norm_scales_do_not_decay_also_when_stacked():
    model = Transformer(ModelConfig(layers=2, embed=8, heads=2, mlp=8, vocab=8), rngs=nnx.Rngs(0))
    mask = decay_mask(nnx.state(model, nnx.Param))
    kept = {"/".join(map(str, path)) for path, x in nnx.to_flat_state(mask) if not x}
    assert kept == {"norm/scale", "blocks/norm_attention/scale", "blocks/norm_ffn/scale"}


def test_adamw_is_its_definition():
    cfg = OptimConfig(
        learning_rate=0.1, warmup_steps=0, schedule="constant", clip_norm=1.0, weight_decay=0.2
    )
    rng = np.random.default_rng(0)
    w, m, v = rng.normal(size=(3, 2)), np.zeros((3, 2)), np.zeros((3, 2))
    params, optimizer = {"w": jnp.asarray(w, jnp.float32)}, make_optimizer(cfg, 10)
    state = optimizer.init(params)
    for t in range(1, 5):
        g = rng.normal(size=(3, 2)) * 3
        updates, state = optimizer.update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        g = g / max(1.0, np.linalg.norm(g))
        m, v = cfg.b1 * m + (1 - cfg.b1) * g, cfg.b2 * v + (1 - cfg.b2) * g**2
        step = m / (1 - cfg.b1**t) / (np.sqrt(v / (1 - cfg.b2**t)) + cfg.eps)
        w = w - 0.1 * (step + 0.2 * w)
        np.testing.assert_allclose(params["w"], w, rtol=1e-4, atol=1e-5)


def step_of(kind, params, grads, **settings):
    """What one update adds to the parameters at rate 1, without clipping or decay."""
    cfg = OptimConfig(
        kind=kind, learning_rate=1.0, warmup_steps=0, schedule="constant", clip_norm=1e9, weight_decay=0.0, **settings
    )  # fmt: skip
    optimizer = make_optimizer(cfg, 10)
    return optimizer.update(grads, optimizer.init(params), params)[0]


def test_sgd_lion_and_muon_take_the_step_that_defines_them():
    rng = np.random.default_rng(0)
    g = jnp.asarray(rng.normal(size=(3, 8, 5)), jnp.float32)
    params, grads = {"w": jnp.zeros_like(g)}, {"w": g}
    np.testing.assert_allclose(step_of("sgd", params, grads)["w"], -g, rtol=1e-6)
    np.testing.assert_allclose(step_of("lion", params, grads)["w"], -jnp.sign(g))
    update = -np.asarray(step_of("muon", params, grads)["w"])
    for matrix, gradient in zip(update, np.asarray(g), strict=True):
        u, s, vt = np.linalg.svd(gradient, full_matrices=False)
        # The same singular vectors, all singular values alike.
        inner = u.T @ matrix @ vt.T / (MUON_RMS * np.sqrt(8))
        assert np.abs(inner - np.diag(np.diag(inner))).max() < 1e-4
        assert np.diag(inner).min() > 0.6 and np.diag(inner).max() < 1.3
        assert s.max() / s.min() > 2


@given(
    st.sampled_from([1, 7, 40]), st.sampled_from([1, 7, 40]), st.floats(-6, 6), st.integers(0, 99)
)
@settings(max_examples=12, deadline=None)
def test_orthogonalisation_knows_no_scale_and_no_orientation(rows, columns, exponent, seed):
    x = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    ours, theirs = jax.jit(orthogonalize), jax.jit(orthogonalize_via_newton_schulz)
    once = np.asarray(ours(x))
    np.testing.assert_allclose(ours(x * np.float32(10.0**exponent)), once, atol=1e-2)
    np.testing.assert_allclose(ours(x.T).T, once, atol=1e-5)
    np.testing.assert_allclose(
        once / (MUON_RMS * np.sqrt(max(rows, columns))),
        theirs(x, jnp.asarray(NEWTON_SCHULZ), eps=1e-7),
        atol=1e-4,
    )


def test_muon_leaves_scales_and_vocabulary_to_adam():
    model = Transformer(ModelConfig(layers=2, embed=8, heads=2, mlp=8, vocab=8), rngs=nnx.Rngs(0))
    labels = nnx.to_flat_state(muon_labels(nnx.state(model, nnx.Param)))
    adam = {"/".join(map(str, path)) for path, x in labels if x == "adam"}
    assert adam == {
        "norm/scale", "blocks/norm_attention/scale", "blocks/norm_ffn/scale", "embed/table", "unembed/w",
    }  # fmt: skip


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_the_state_s_bytes_are_predicted_exactly(kind, tiny, one_device):
    cfg = tiny(f"optim.kind={kind}")
    leaves = jax.tree.leaves(abstract_state(cfg, one_device).opt_state)
    memory = optimizer_memory(cfg)[kind]
    assert memory["state"] == sum(x.size * x.dtype.itemsize for x in leaves)
    assert memory["parameters"] == memory["gradients"] == 4 * count_params(cfg.model)
    copies = {"adamw": 2, "sgd": 1, "lion": 1}.get(kind)
    if copies:  # and a few counters
        assert 0 <= memory["state"] - copies * memory["parameters"] <= 8
    else:
        assert memory["parameters"] < memory["state"] < 2 * memory["parameters"]


@pytest.mark.parametrize("kind", audit_but(["muon"], DIRECTIONS))
def test_every_optimizer_learns_and_gives_one_device_s_parameters_on_a_mesh(kind, tiny):
    rate = {"sgd": 0.5, "lion": 2e-3}.get(kind, 3e-3)
    cfg = tiny(
        f"optim.kind={kind}",
        f"optim.learning_rate={rate}",
        "optim.warmup_steps=1",
        "model.layers=1",
    )
    found = []
    for mesh in (make_mesh(devices=jax.devices()[:1]), make_mesh(MeshConfig(data=2, fsdp=4))):
        state, step = init_state(cfg, mesh), make_train_step(cfg, mesh)
        batches = make_batches(cfg.data, mesh, vocab=cfg.model.vocab, global_batch=8)
        with jax.set_mesh(mesh):
            losses = []
            for _ in range(8):
                state, metrics = step(state, next(batches))
                losses.append(float(metrics["loss"]))
        batches.close()
        found.append((losses, jax.device_get(jax.tree.leaves(state.params))))
    (one, params), (many, sharded) = found
    assert one[-1] < one[0] - 0.1
    # A lion's step is a sign, which rounding turns where a gradient is nearly zero.
    np.testing.assert_allclose(many, one, rtol=1e-3 if kind == "lion" else 1e-5)
    if kind != "lion":
        for a, b in zip(params, sharded, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4)


def test_the_command_compares_the_memory_of_all(tiny):
    run = CliRunner().invoke
    answer = json.loads(run(app, ["optim", "memory", "gpt2-124m", "--json"]).stdout)
    assert list(answer) == list(DIRECTIONS)
    assert answer["adamw"]["state"] > 1.99 * answer["lion"]["state"]
    assert "muon" in run(app, ["optim", "memory"]).stdout
