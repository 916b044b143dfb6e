"""SwiGLU against its definition."""

import jax
import numpy as np
from flax import nnx

from minitext.config.model import ModelConfig
from minitext.models.ffn import SwiGLU
from minitext.sharding.rules import RULES


def test_swiglu_is_its_definition():
    layer = SwiGLU(
        ModelConfig(embed=12, heads=2, mlp=20, layers=3), rules=RULES["dp"], rngs=nnx.Rngs(0)
    )
    x = np.asarray(jax.random.normal(jax.random.key(0), (5, 12)))
    gate, up, down = (
        np.asarray(m.w.get_value(), np.float64) for m in (layer.gate, layer.up, layer.down)
    )
    hidden = x @ gate
    want = (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down
    np.testing.assert_allclose(layer(x), want, rtol=1e-4, atol=1e-6)


def test_tokens_do_not_mix():
    layer = SwiGLU(ModelConfig(embed=12, heads=2, mlp=20), rules=RULES["dp"], rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (5, 12))
    changed = layer(x.at[2].add(1.0)) != layer(x)
    np.testing.assert_array_equal(np.asarray(changed).any(-1), [False, False, True, False, False])
