"""Looking up tokens: the GPU's gradient, by Pallas's interpreter, is XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.config.sections import MeshConfig
from minitext.kernels.lookup import gpu, xla
from minitext.sharding.mesh import make_mesh
from tests.kernels.test_gpu import interpreted, with_gradients


@settings(deadline=None, max_examples=5)
@given(
    st.integers(1, 20), st.integers(1, 70), st.integers(0, 200), st.booleans(), st.integers(0, 9)
)
def test_the_gradient_of_a_table_is_a_sum_over_its_tokens(V, D, X, crowded, seed):
    """Rows that nobody looks up get zeros; negative tokens count from the end, and those from V on get nothing."""
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    tokens = jnp.asarray(rng.integers(-V, V + 2, (2, X + 1)) // (1 + 9 * crowded), jnp.int32)
    with interpreted():
        out, grad = with_gradients(gpu.lookup, table, tokens)
    want, want_grad = with_gradients(xla.lookup, table, tokens)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_allclose(grad, want_grad, atol=1e-5)


def test_sums_of_bfloat16_gradients_are_rounded_once():
    table = jnp.zeros((2, 8), jnp.bfloat16)
    with interpreted():
        _, grad = with_gradients(
            gpu.lookup, table, jnp.zeros(1000, jnp.int32), cotangent=jnp.ones_like
        )
    np.testing.assert_array_equal(grad, jnp.asarray([[1000], [0]], jnp.bfloat16).repeat(8, 1))


def test_each_device_looks_up_its_own_tokens():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(9, 24)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 9, (8, 6)), jnp.int32)
    want = with_gradients(xla.lookup, table, tokens, cotangent=jnp.cos)
    with jax.set_mesh(mesh), interpreted():
        tokens = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
        table = jax.device_put(table, NamedSharding(mesh, P()))
        out = with_gradients(gpu.lookup, table, tokens, cotangent=jnp.cos)
        split = jax.device_put(table[:8], NamedSharding(mesh, P("tensor")))
        assert "split over ('tensor', None)" in gpu.supports(split, tokens)
    for got, expected in zip(out, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
