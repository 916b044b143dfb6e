"""Schedules and AdamW: what decays, what is clipped, and where the rate goes."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.config import ModelConfig, OptimConfig
from minitext.model import Transformer
from minitext.optim import decay_mask, make_optimizer, make_schedule


@given(st.integers(1, 400), st.integers(0, 300), st.floats(1e-5, 1e-1), st.floats(0, 1))
@settings(max_examples=20)
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(steps, warmup, peak, ratio):
    cfg = OptimConfig(learning_rate=peak, warmup_steps=warmup, min_ratio=ratio)
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


def test_norm_scales_do_not_decay_also_when_stacked():
    model = Transformer(ModelConfig(layers=2, embed=8, heads=2, mlp=8, vocab=8), rngs=nnx.Rngs(0))
    mask = decay_mask(nnx.state(model, nnx.Param))
    kept = {"/".join(map(str, path)) for path, x in nnx.to_flat_state(mask) if not x.get_value()}
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
