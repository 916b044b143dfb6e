"""Norms, rotations, projections and embeddings against their definitions in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from minitext import kernels
from minitext.config.rope import RopeConfig
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.kernels import dispatch
from minitext.kernels.linear.xla import Specs
from minitext.models.layers import Linear, keys_of, make_param, rms_norm
from minitext.models.rope import rope
from minitext.sharding.mesh import make_mesh
from minitext.sharding.rules import RULES, flatten_tokens, unflatten_tokens
from tests.conftest import audit_but

RULE = RULES["fsdp"]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@given(st.integers(0, 99), st.integers(1, 70), st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=20)
def test_rms_norm_is_its_definition(seed, width, size):
    x, scale = size * normal(seed, 3, width), normal(seed + 1, width)
    want = (
        x.astype(np.float64)
        / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
        * scale
    )
    np.testing.assert_allclose(rms_norm(x, scale), want, rtol=2e-5, atol=2e-6)


def test_rms_norm_of_bfloat16_sums_in_float32():
    x = jnp.full((1, 4096), 3.0, jnp.bfloat16)  # a bfloat16 sum of 4096 squares would stop growing
    out = rms_norm(x, jnp.ones(4096))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), 1.0, rtol=4e-3)


@given(st.integers(0, 99), st.sampled_from([2, 8, 64]), st.integers(0, 5000))
@settings(max_examples=15)
def test_rope_keeps_lengths_and_sees_only_distance(seed, width, shift):
    q, k = normal(seed, 1, 5, 2, width), normal(seed + 1, 1, 5, 2, width)
    positions = np.arange(5)[None]
    rotated = rope(q, positions)
    np.testing.assert_allclose(
        np.linalg.norm(rotated, axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5
    )

    def products(shift):
        return jnp.einsum("BTNH,BSNH->BNTS", rope(q, positions + shift), rope(k, positions + shift))

    # float32 angles of thousands of radians are good to about 1e-4.
    np.testing.assert_allclose(products(shift), products(0), atol=3e-3 * width**0.5)


def test_rope_at_position_zero_changes_nothing():
    x = normal(0, 2, 3, 2, 6)
    np.testing.assert_array_equal(rope(x, np.zeros((2, 3), np.int32)), x)


def test_rope_pairs_feature_i_with_i_plus_half():
    x = np.zeros((1, 1, 1, 4), np.float32)
    x[..., 1] = 1.0
    turned = rope(x, np.array([[3]]), RopeConfig(theta=100.0))[0, 0, 0]
    angle = 3 * 100.0 ** (-1 / 2)
    np.testing.assert_allclose(turned, [0, np.cos(angle), 0, np.sin(angle)], atol=1e-6)


def test_parameters_have_the_variance_that_is_asked_for():
    w = make_param(
        jax.random.key(0), (512, 512), ("embed", "mlp"), fan_in=512, scale=0.5, rules=RULE
    ).get_value()
    np.testing.assert_allclose(w.std() * 512**0.5, 0.5, rtol=0.01)
    assert w.dtype == jnp.float32


def test_linear_computes_in_the_inputs_type():
    layer = Linear(6, 4, ("embed", "mlp"), key=jax.random.key(0), rules=RULE)
    x = normal(0, 5, 6)
    np.testing.assert_allclose(
        layer(jnp.asarray(x)), x @ np.asarray(layer.w.get_value()), rtol=1e-5, atol=1e-6
    )
    assert layer(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", RULES)
def test_weights_are_gathered_before_use_and_outputs_keep_the_batch_split(name):
    from minitext.config.sections import MeshConfig
    from minitext.sharding.mesh import make_mesh

    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=8))):
        layer = Linear(16, 4, ("embed", "mlp"), key=jax.random.key(0), rules=RULES[name])
        x = RULES[name].shard(jnp.ones((8, 16)), "batch", "act")
        assert jax.typeof(layer(x)).sharding.spec == P("fsdp", None)


def test_flattening_and_unflattening_are_inverse():
    x = normal(0, 3, 4, 10)
    flat = flatten_tokens(jnp.asarray(x), RULE)
    np.testing.assert_array_equal(flat, x.reshape(12, 10))
    back = unflatten_tokens(flat, 3, "heads", "head_dim", sizes=(2, 5), rules=RULE)
    np.testing.assert_array_equal(back, x.reshape(3, 4, 2, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    audit_but(
        [("auto", 1, 5, 3), ("auto", 64, 24, 40), ("xla_padded", 7, 24, 40)],
        [
            ("auto", 6, 4, 2), ("auto", 1, 5, 3), ("auto", 7, 1, 1), ("auto", 64, 24, 40),
            ("xla_padded", 1, 5, 3), ("xla_padded", 7, 24, 40),
        ],
    ),
)  # fmt: skip
def test_a_projection_and_its_gradients_are_those_of_a_plain_product(dtype, case):
    impl, X, D, F = case
    x, w, probe = (
        jax.random.normal(jax.random.key(i), shape, dtype)
        for i, shape in enumerate(((X, D), (D, F), (X, F)))
    )

    def with_gradients(fn):
        y, pull = jax.vjp(fn, x, w)
        return y, *pull(probe)

    def exact(x, w):
        return (x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(dtype)

    tolerance = 1e-5 if dtype == "float32" else 1e-2
    run = partial(kernels.linear, specs=Specs(None, None, None), impl=impl)
    ours = jax.jit(lambda: with_gradients(run))()
    for got, want in zip(ours, with_gradients(exact), strict=True):
        assert got.dtype == want.dtype == dtype
        np.testing.assert_allclose(
            np.float32(got), np.float32(want), atol=tolerance * float(jnp.abs(want).max())
        )


def test_a_gpu_pads_a_few_tokens_that_every_device_has(monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    x, w = jnp.asarray(normal(0, 7, 8)), jnp.asarray(normal(1, 8, 16))
    mesh = make_mesh(MeshConfig(data=2, tensor=2), devices=jax.devices()[:4])
    whole, divided = (
        Specs(P(rows), P(None, "tensor"), P(rows, "tensor")) for rows in (None, "data")
    )
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x, w: kernels.linear(x, w, whole))(x, w)
        text = jax.jit(lambda x, w: kernels.linear(x, w, whole)).lower(x, w).as_text()
        np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)
        assert y.sharding.spec == whole.y and "stablehlo.pad" in text
        text = jax.jit(lambda x, w: kernels.linear(x, w, divided)).lower(x[:6], w).as_text()
        assert "stablehlo.pad" not in text
        with pytest.raises(UserError, match="tokens that every device has"):
            kernels.linear(x[:6], w, divided, impl="xla_padded")
    with pytest.raises(UserError, match=r"fewer than 8 tokens \[X, D\], and these are \[8, 8\]"):
        kernels.linear(w.T[:8], w, Specs(None, None, None), impl="xla_padded")


def test_a_library_that_replaces_products_sees_the_weight_and_changes_both_gradients(monkeypatch):
    """Qwix replaces `jnp.einsum`, knows a weight by being the parameter itself, and brings gradients of its own."""
    seen, einsum = [], jnp.einsum

    def replaced(subscripts, x, w, **_):
        def product(x, w):
            return einsum(subscripts, x, w)

        def doubled(kept, grad):
            return tuple(2 * g for g in jax.vjp(product, *kept)[1](grad))

        own = jax.custom_vjp(product)
        own.defvjp(lambda x, w: (product(x, w), (x, w)), doubled)
        seen.append(w)
        return own(x, w)

    monkeypatch.setattr(jnp, "einsum", replaced)
    x, w, probe = jnp.asarray(normal(0, 5, 6)), jnp.asarray(normal(1, 6, 4)), normal(2, 5, 4)
    layer = Linear(6, 4, ("embed", "mlp"), key=jax.random.key(0), rules=RULE)
    layer(x)
    assert seen[0] is layer.w.get_value()
    _, pull = jax.vjp(lambda x, w: kernels.linear(x, w, Specs(None, None, None)), x, w)
    for got, want in zip(pull(probe), (probe @ w.T, x.T @ probe), strict=True):
        np.testing.assert_allclose(got, 2 * want, rtol=1e-5, atol=1e-5)


def test_a_blocks_keys_are_those_of_flax_however_many_it_takes():
    @jax.vmap
    def keys(key):
        flax, ours = nnx.Rngs(params=key), keys_of(nnx.Rngs(params=key))
        pairs = [(flax.params(), ours.params()) for _ in range(20)]
        return jax.tree.map(jax.random.key_data, pairs)

    for flax, ours in keys(jax.random.split(jax.random.key(7), 3)):
        np.testing.assert_array_equal(flax, ours)
