"""The attention layer: causality, grouped heads, and the key-value cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minitext.config.model import ModelConfig
from minitext.models.attention import GQA, KVCache
from minitext.models.transformer import make_cache
from minitext.sharding.rules import RULES

CFG = ModelConfig(vocab=16, layers=1, embed=24, heads=4, kv_heads=2, mlp=8)


@pytest.fixture(scope="module")
def layer():
    return GQA(CFG, rules=RULES["dp"], rngs=nnx.Rngs(0))


def run(layer, x_BTD, positions=None, segments=None):
    B, T, D = x_BTD.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T)) if positions is None else positions
    return layer(x_BTD.reshape(B * T, D), positions, segments)[0].reshape(B, T, D)


def test_no_output_depends_on_a_later_input(layer):
    x = jax.random.normal(jax.random.key(0), (1, 7, 24))
    jacobian = jax.jit(jax.jacobian(lambda x: run(layer, x)[0].sum(-1)))(x)[:, 0]  # [T, S, D]
    reach = np.abs(jacobian).max(-1) > 0
    np.testing.assert_array_equal(reach, np.tril(np.ones((7, 7), bool)))


def test_rows_and_segments_are_independent(layer):
    x = jax.random.normal(jax.random.key(0), (2, 6, 24))
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2]] * 2)
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2]] * 2)
    packed = run(layer, x, positions, segments)
    alone = run(layer, x[:, 3:])
    np.testing.assert_allclose(packed[:, 3:], alone, atol=1e-6)


def test_one_layer_cache_continues_where_it_stopped(layer):
    x = jax.random.normal(jax.random.key(0), (2, 8, 24))
    want = nnx.jit(run)(layer, x)

    @nnx.jit
    def read(layer, x, cache):
        positions = cache.length + jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        out, new = layer(x.reshape(-1, 24), positions, None, cache)
        return out.reshape(x.shape), cache.append(new)

    stacked = make_cache(CFG, 2, 10, RULES["dp"])
    cache = KVCache(stacked.k[0], stacked.v[0], stacked.length)
    parts, at = [], 0
    for size in (5, 1, 2):
        out, cache = read(layer, x[:, at : at + size], cache)
        parts.append(out)
        at += size
    assert int(cache.length) == 8
    np.testing.assert_allclose(np.concatenate(parts, 1), want, atol=2e-6)


def test_cache_bytes_shrink_with_the_key_value_heads():
    full = make_cache(CFG.model_copy(update={"kv_heads": 4}), 2, 10)
    assert full.k.nbytes == 2 * make_cache(CFG, 2, 10).k.nbytes == 2 * 10 * 4 * 6 * 4
