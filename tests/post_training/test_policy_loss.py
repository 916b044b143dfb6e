"""The losses of PPO and GRPO, against float64 formulas written out token by token."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minitext.post_training.policy_loss import (
    clipped_ratio_loss,
    clipped_value_loss,
    entropy,
    kl_estimate,
    overlong_penalty,
    token_weights,
)

B, T = 4, 7


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    old = rng.normal(-2, 1, (B, T))
    return old + rng.normal(0, 0.4, (B, T)), old, rng.normal(size=(B, T))


def f32(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize(("clip", "high"), [(0.2, None), (0.2, 0.28), (0.1, 0.5)])
def test_ratio_is_clipped_where_it_would_go_on(drawn, clip, high):
    logp, old, advantages = drawn
    found = clipped_ratio_loss(*f32(logp, old, advantages), clip=clip, clip_high=high)
    grad = jax.grad(
        lambda x: jnp.sum(
            clipped_ratio_loss(x, *f32(old, advantages), clip=clip, clip_high=high).loss
        )
    )(*f32(logp))
    above = clip if high is None else high
    for b in range(B):
        for t in range(T):
            ratio, A = math.exp(logp[b, t] - old[b, t]), advantages[b, t]
            stopped = ratio > 1 + above if A > 0 else ratio < 1 - clip
            bound = 1 + above if A > 0 else 1 - clip
            assert bool(found.clipped[b, t]) == stopped
            assert found.loss[b, t] == pytest.approx(-(bound if stopped else ratio) * A, rel=1e-5)
            # d(ratio)/d(logp) is the ratio
            assert grad[b, t] == pytest.approx(0 if stopped else -ratio * A, rel=1e-5)
    assert np.asarray(found.clipped).any() and not np.asarray(found.clipped).all()


def test_divergence_is_estimated_without_bias(drawn):
    """Its mean over tokens drawn from p is KL(p || q), and it is never negative."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    each = np.asarray(kl_estimate(*f32(np.log(p), np.log(q))), np.float64)
    assert (each >= 0).all()
    assert (p * each).sum() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)


def test_entropy_is_that_of_the_softmax():
    logits = np.random.default_rng(2).normal(0, 3, (B, T, 11))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        entropy(*f32(logits)), -(p * np.log(p)).sum(-1), rtol=1e-5, atol=1e-6
    )


def test_values_are_pushed_no_further_than_the_clip(drawn):
    values, old, returns = drawn
    found = clipped_value_loss(*f32(values, old, returns), clip=0.2)
    for b in range(B):
        for t in range(T):
            near = min(max(values[b, t], old[b, t] - 0.2), old[b, t] + 0.2)
            errors = (values[b, t] - returns[b, t]) ** 2, (near - returns[b, t]) ** 2
            assert found[b, t] == pytest.approx(max(errors) / 2, rel=1e-4)


def test_tokens_are_weighted_as_each_paper_does():
    lengths = [1, 3, 0, 5]
    mask = (np.arange(T) < np.asarray(lengths)[:, None]).astype(np.float32)
    loss = np.random.default_rng(3).normal(size=(B, T))
    answers = [loss[b, :n] for b, n in enumerate(lengths) if n]

    def summed(how):
        return float((token_weights(mask, how, 8) * loss).sum())

    assert token_weights(mask, "token", 8).sum() == sum(lengths)
    assert summed("token") == pytest.approx(sum(x.sum() for x in answers), rel=1e-6)
    assert token_weights(mask, "sequence", 8).sum() == pytest.approx(3)
    assert summed("sequence") == pytest.approx(sum(x.mean() for x in answers), rel=1e-6)
    assert summed("constant") == pytest.approx(sum(x.sum() / 8 for x in answers), rel=1e-6)


def test_long_answers_pay_before_the_limit():
    found = overlong_penalty(np.array([3, 6, 7, 8, 10, 12]), 10, 4)
    np.testing.assert_allclose(found, [0, 0, -0.25, -0.5, -1, -1])
    assert not overlong_penalty(np.array([10]), 10, 0).any()
