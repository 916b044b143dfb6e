"""Scaling laws: known ones are found again, with noise too, and poor data gives no nonsense."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitext.journey import scaling

COMPUTE = [5e10, 5e11, 2.5e12, 1e13]


def losses(floor, scale, exponent, compute=COMPUTE):
    return [floor + scale * (c / COMPUTE[0]) ** -exponent for c in compute]


@given(st.floats(0.0, 3.0), st.floats(0.5, 5.0), st.integers(50, 500))
def test_known_constants_are_found(floor, scale, thousandths):
    exponent = thousandths / 1000
    law = scaling.fit_law(COMPUTE, losses(floor, scale, exponent))
    assert law.exponent == pytest.approx(exponent, abs=1e-3)
    assert law.floor == pytest.approx(floor, abs=2e-2) and law.residual < 1e-4
    at = 6e13
    assert law(at) == pytest.approx(losses(floor, scale, exponent, [at])[0], rel=1e-3)


def test_noise_moves_a_prediction_little():
    rng, off = np.random.default_rng(0), []
    right = losses(1.5, 4.0, 0.2, [6e13])[0]
    for _ in range(50):
        noisy = np.array(losses(1.5, 4.0, 0.2)) * (1 + 0.003 * rng.normal(size=4))
        found = scaling.predict(COMPUTE, noisy.tolist(), 6e13)
        assert found.low <= found.loss <= found.high
        off.append(abs(found.loss / right - 1))
    assert np.median(off) < 0.01 and max(off) < 0.05


def test_predictions_lie_between_the_floor_and_the_last_loss():
    rng = np.random.default_rng(1)
    for _ in range(50):
        noisy = sorted(rng.uniform(1, 6, 4), reverse=True)
        law = scaling.fit_law(COMPUTE, noisy)
        assert law.floor >= 0 and law.scale >= 0
        assert law.floor <= law(1e20) <= law(1e14) <= max(noisy)


def test_flat_losses_and_growing_ones_predict_their_mean():
    assert scaling.predict(COMPUTE, [3.0] * 4, 1e14).loss == pytest.approx(3.0)
    grows = scaling.fit_law(COMPUTE, [2.0, 2.1, 2.2, 2.3])
    assert grows.scale == 0 and 2.0 < grows.floor < 2.3


def test_two_points_give_a_power_law_without_a_floor():
    law = scaling.fit_law(COMPUTE[:2], [4.0, 2.0])
    assert law.floor == 0 and law.exponent == pytest.approx(np.log10(2), abs=1e-3)


@pytest.mark.parametrize(
    ("compute", "loss"),
    [([1e9], [3.0]), ([1e9, 1e9], [3.0, 2.9]), ([1e9, -1.0], [3.0, 2.0]), ([1e9, 1e10], [3.0, float("nan")])],
)  # fmt: skip
def test_what_is_no_series_is_refused(compute, loss):
    with pytest.raises(ValueError):
        scaling.fit_law(compute, loss)
