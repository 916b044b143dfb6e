"""The fused RMSNorm in the strict simulator: against float64, against XLA, on a mesh, and compiled for every chip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext import kernels
from minitext.compiler.targets import topology_mesh
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.sharding.mesh import make_mesh
from tests.kernels.simulated import simulate

pytestmark = pytest.mark.usefixtures("as_on_a_tpu")
EPS = 1e-6


def with_gradients(norm):
    """A function of (x, scale, gradient of y) giving y and the gradients of x and scale."""

    def run(x, scale, grad):
        y, pull = jax.vjp(norm, x, scale)
        return y, *pull(grad)

    return run


def fused(x, scale):
    return kernels.rms_norm(x, scale, EPS, impl="pallas_tpu")


def xla(x, scale):
    return kernels.rms_norm(x, scale, EPS, impl="xla")


def oracle(x, scale, grad):
    """The same three in float64."""
    x, scale, grad = (np.asarray(a, np.float64) for a in (x, scale, grad))
    inverse = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS)
    unit, scaled = x * inverse, grad * scale
    grad_x = inverse * (scaled - unit * np.mean(scaled * unit, -1, keepdims=True))
    return unit * scale, grad_x, np.sum((grad * unit).reshape(-1, x.shape[-1]), 0)


def inputs(seed, shape, dtype, size=1.0):
    rng = np.random.default_rng(seed)
    x, grad = size * rng.normal(size=shape), rng.normal(size=shape)
    scale = jnp.asarray(rng.normal(size=shape[-1]), jnp.float32)
    return jnp.asarray(x, dtype), scale, jnp.asarray(grad, dtype)


def far(got, want):
    """The largest difference, by the size of what is compared."""
    want = np.asarray(want, np.float64)
    return np.max(np.abs(np.asarray(got, np.float64) - want)) / max(1.0, np.max(np.abs(want)))


@given(
    seed=st.integers(0, 99), X=st.sampled_from([130, 1, 5, 16, 300]), D=st.sampled_from([200, 1, 7, 128]),
    dtype=st.sampled_from(["float32", "bfloat16"]), size=st.sampled_from([1e4, 1.0, 1e-4]),
    cores=st.sampled_from([2, 1]),
)  # fmt: skip
@settings(max_examples=2)  # the first takes the first of each list
def test_values_and_gradients_are_the_definition(seed, X, D, dtype, size, cores):
    args = inputs(seed, (X, D), dtype, size)
    got = simulate(with_gradients(fused), *args, seed=seed, cores=cores)
    plain, want = jax.jit(with_gradients(xla))(*args), oracle(*args)
    for a, b, c in zip(got, plain, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # In bfloat16 no further away than XLA's, but for the rounding of float32 before the last.
        assert far(a, c) <= max(2e-5, 1.01 * far(b, c))


def test_rows_of_zeros_stay_zeros():
    x, scale, grad = inputs(0, (20, 130), "float32")
    y, grad_x, grad_scale = simulate(with_gradients(fused), x.at[3:].set(0), scale, grad)
    assert not np.any(y[3:]) and all(np.all(np.isfinite(g)) for g in (grad_x, grad_scale))


def test_on_a_mesh_every_device_takes_its_rows():
    x, scale, grad = inputs(0, (4, 6, 8), "float32")
    want = oracle(x, scale, grad)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, context=2), devices=jax.devices()[:4])):
        x, grad = (jax.device_put(a, jax.P("data", "context", None)) for a in (x, grad))
        got = simulate(with_gradients(fused), x, jax.device_put(scale, jax.P(None)), grad)
        assert jax.typeof(got[0]).sharding.spec == jax.P("data", "context", None)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        split = jax.device_put(scale, jax.P("data"))
        with pytest.raises(UserError, match=r"those of scale are split over data"):
            fused(x, split)


def test_it_says_what_it_cannot_take():
    scale = jnp.ones(40_000)
    with pytest.raises(UserError, match=r"got D=40000"):
        fused(jnp.ones((2, 40_000)), scale)
    with pytest.raises(UserError, match=r"at least one row"):
        fused(jnp.ones((0, 8)), scale[:8])


CHIPS = ["v5e:2x2"] + [
    pytest.param(chip, marks=pytest.mark.audit)
    for chip in ("v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("dtype", "D"), [("bfloat16", 4096), ("bfloat16", 32_768), ("float32", 16_384)]
)
def test_it_compiles(chip, dtype, D):
    mesh = topology_mesh(chip)
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P("data", None))
        x = jax.ShapeDtypeStruct((8192, D), dtype, sharding=place)
        scale = jax.ShapeDtypeStruct((D,), "float32", sharding=jax.NamedSharding(mesh, jax.P(None)))
        jax.jit(with_gradients(fused)).lower(x, scale, x).compile()
