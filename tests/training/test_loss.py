"""Cross-entropy at hostile logits, and masks that hide whatever is behind them."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.training.loss import cross_entropy, masked_sum


@given(st.integers(0, 99), st.integers(2, 9), st.sampled_from([1.0, 90.0, 1e4]))
@settings(max_examples=20)
def test_cross_entropy_is_its_definition(seed, vocab, size):
    rng = np.random.default_rng(seed)
    logits = (size * rng.normal(size=(2, 3, vocab))).astype(np.float32)
    targets = rng.integers(0, vocab, (2, 3))
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    normalizer = (top + np.log(np.exp(wide - top).sum(-1, keepdims=True)))[..., 0]
    want = normalizer - np.take_along_axis(wide, targets[..., None], -1)[..., 0]
    loss = jax.jit(cross_entropy, static_argnames="z_loss")
    np.testing.assert_allclose(loss(logits, targets), want, rtol=1e-5, atol=1e-5 * size)
    with_z = loss(logits, targets, z_loss=0.01)
    np.testing.assert_allclose(with_z, want + 0.01 * normalizer**2, rtol=1e-4, atol=1e-5 * size)


def test_gradient_is_softmax_minus_one_hot_and_finite():
    logits = jnp.asarray([[[90.0, -90.0, 0.0]]])
    grad = jax.grad(lambda x: cross_entropy(x, jnp.asarray([[1]])).sum())(logits)
    np.testing.assert_allclose(grad, [[[1.0, -1.0, 0.0]]], atol=1e-6)


def test_bfloat16_logits_are_widened_first():
    logits = jnp.zeros((1, 1, 1000), jnp.bfloat16)
    assert cross_entropy(logits, jnp.zeros((1, 1), jnp.int32)).dtype == jnp.float32
    np.testing.assert_allclose(
        cross_entropy(logits, jnp.zeros((1, 1), jnp.int32)), np.log(1000), rtol=1e-6
    )


def test_masked_sum_ignores_what_is_not_a_number():
    values = jnp.asarray([[1.0, jnp.nan, jnp.inf, 4.0]])
    mask = jnp.asarray([[1, 0, 0, 1]])
    assert masked_sum(values, mask) == 5.0
    np.testing.assert_array_equal(jax.grad(masked_sum)(values, mask), [[1.0, 0.0, 0.0, 1.0]])
