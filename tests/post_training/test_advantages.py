"""Advantages, against sums written out from the papers' definitions."""

import numpy as np
import pytest

from minitext.post_training.advantages import (
    EPS,
    generalized_advantages,
    group_advantages,
    no_signal,
    whiten,
)


def test_a_group_is_compared_with_itself():
    rng = np.random.default_rng(0)
    rewards_N = rng.normal(size=24)
    for divide in (True, False):
        found = group_advantages(rewards_N, 8, divide=divide)
        for start in range(0, 24, 8):
            group = rewards_N[start : start + 8]
            want = [r - sum(group) / 8 for r in group]
            if divide:
                deviation = (sum(x * x for x in want) / 7) ** 0.5
                want = [x / (deviation + EPS) for x in want]
            np.testing.assert_allclose(found[start : start + 8], want, rtol=1e-12)


def test_equal_rewards_teach_nothing():
    rewards_N = np.array([0.1] * 7 + [1.0, 0, 0, 0, 0, 0, 0])  # the mean of seven 0.1 isn't 0.1
    assert no_signal(rewards_N, 7).tolist() == [True, False]
    assert np.all(group_advantages(rewards_N, 7)[:7] == 0)
    assert group_advantages(rewards_N, 7)[7] > 0


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.0)])
def test_generalized_advantages_are_the_sum_of_discounted_surprises(discount, decay):
    """Equation 16 as a double sum over each answer's tokens, taken out of its row."""
    rng = np.random.default_rng(1)
    B, T = 5, 12
    rewards, values = rng.normal(size=(B, T)), rng.normal(size=(B, T))
    mask = np.zeros((B, T))
    for b in range(4):  # the last row has no answer
        start, stop = sorted(rng.choice(T + 1, 2, replace=False))
        mask[b, start:stop] = 1
    mask[0] = 1
    mask[0, 4:6] = 0  # another's tokens within an answer
    got, returns = generalized_advantages(rewards, values, mask, discount=discount, decay=decay)
    for b in range(B):
        own = np.flatnonzero(mask[b])
        r, v = rewards[b, own], np.append(values[b, own], 0.0)
        surprises = [r[t] + discount * v[t + 1] - v[t] for t in range(len(own))]
        want = [
            sum((discount * decay) ** (l - t) * surprises[l] for l in range(t, len(own)))
            for t in range(len(own))
        ]
        np.testing.assert_allclose(got[b, own], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(returns[b, own], want + v[:-1], rtol=1e-5, atol=1e-6)
        assert not got[b, mask[b] == 0].any() and not returns[b, mask[b] == 0].any()


def test_whitened_numbers_have_mean_0_and_variance_1():
    rng = np.random.default_rng(2)
    mask = rng.random((6, 9)) < 0.5
    found = whiten(rng.normal(3, 5, (6, 9)), mask)
    assert abs(found[mask].mean()) < 1e-6 and abs(found[mask].std() - 1) < 1e-3
    assert not found[~mask].any()
    assert not whiten(np.ones((2, 2)), np.zeros((2, 2))).any()
