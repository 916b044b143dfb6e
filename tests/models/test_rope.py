"""Rotary positions: what turns, by how much, and what each stretching does to it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minitext.config.rope import (
    LinearRopeConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    NoRopeConfig,
    RopeConfig,
    YarnRopeConfig,
)
from minitext.models.rope import rope

H = 16
X = jax.random.normal(jax.random.key(0), (2, 5, 3, H))
POSITIONS = jnp.array([[0, 1, 2, 3, 40], [7, 8, 9, 0, 1]])


def rotated(x, positions, frequencies, factor=1.0):
    """The definition in complex numbers, float64."""
    half, x = len(frequencies), np.asarray(x, np.float64)
    turn = np.exp(1j * np.asarray(positions)[:, :, None, None] * np.asarray(frequencies)) * factor
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], axis=-1)


def plain(theta, half):
    return theta ** (-np.arange(half) / half)


def llama3(cfg, half):
    """As in the paper's code: by wavelength, with a smooth middle."""
    found = []
    for f in plain(cfg.theta, half):
        wave = 2 * math.pi / f
        if wave > cfg.original_length / cfg.low_freq_factor:
            found.append(f / cfg.factor)
        elif wave < cfg.original_length / cfg.high_freq_factor:
            found.append(f)
        else:
            smooth = cfg.original_length / wave - cfg.low_freq_factor
            smooth /= cfg.high_freq_factor - cfg.low_freq_factor
            found.append((1 - smooth) * f / cfg.factor + smooth * f)
    return np.array(found)


def yarn(cfg, half):
    def pair(turns):
        return half * math.log(cfg.original_length / (turns * 2 * math.pi)) / math.log(cfg.theta)

    low, high = pair(cfg.beta_fast), pair(cfg.beta_slow)
    if cfg.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    f = plain(cfg.theta, half)
    return f / cfg.factor * ramp + f * (1 - ramp)


LLAMA3 = Llama3RopeConfig(factor=8.0, original_length=64)
YARN = {"factor": 4.0, "original_length": 256, "beta_fast": 8.0, "beta_slow": 1.0}
REVERSED = {"factor": 4.0, "original_length": 4, "theta": 100.0, "truncate": False}
LONG = LongRopeConfig(
    short_factor=tuple(1 + 0.1 * i for i in range(8)),
    long_factor=tuple(2.0 + i for i in range(8)),
    original_length=32,
    max_length=128,
)
HALF = H // 2
CASES = {
    "default": (RopeConfig(theta=500.0), plain(500.0, HALF), 1.0),
    "fraction": (RopeConfig(fraction=0.5), plain(10_000.0, HALF // 2), 1.0),
    "linear": (LinearRopeConfig(factor=4.0), plain(10_000.0, HALF) / 4, 1.0),
    "llama3": (LLAMA3, llama3(LLAMA3, HALF), 1.0),
    "yarn": (
        YarnRopeConfig(**YARN),
        yarn(YarnRopeConfig(**YARN), HALF),
        0.1 * math.log(4) + 1,
    ),
    "yarn-exact": (
        YarnRopeConfig(**YARN, truncate=False, mscale=1.0, mscale_all_dim=0.5),
        yarn(YarnRopeConfig(**YARN, truncate=False), HALF),
        (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
    ),
    "yarn-reversed": (  # the last stretched pair comes before the first
        YarnRopeConfig(**REVERSED),
        yarn(YarnRopeConfig(**REVERSED), HALF),
        0.1 * math.log(4) + 1,
    ),
    "longrope": (
        LONG,
        plain(10_000.0, HALF) / LONG.long_factor,
        math.sqrt(1 + math.log(4) / math.log(32)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pairs_turn_as_the_definition_says(name):
    cfg, frequencies, factor = CASES[name]
    got = rope(X, POSITIONS, cfg)
    np.testing.assert_allclose(got, rotated(X, POSITIONS, frequencies, factor), atol=2e-5)


def test_longrope_takes_short_factors_up_to_the_original_length():
    frequencies = plain(10_000.0, HALF) / LONG.short_factor
    short = jnp.minimum(POSITIONS, 31)
    want = rotated(X, short, frequencies, CASES["longrope"][2])
    np.testing.assert_allclose(rope(X, short, LONG), want, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_products_depend_on_the_distance_alone(name):
    cfg, first = CASES[name][0], jnp.arange(33, 38)[None].repeat(2, 0)

    def products(positions):
        q, k = rope(X, positions, cfg), rope(X[:, ::-1], positions, cfg)
        return jnp.einsum("BTNH,BSNH->BNTS", q, k)

    np.testing.assert_allclose(products(first), products(first + 11), atol=1e-4)


def test_no_rope_changes_nothing_but_the_scale():
    np.testing.assert_array_equal(rope(X, POSITIONS, NoRopeConfig()), X)
    np.testing.assert_allclose(rope(X, POSITIONS, NoRopeConfig(), scale=3.0), 3 * X)
    halved = rope(X, POSITIONS, RopeConfig(fraction=0.5), scale=3.0)
    np.testing.assert_allclose(halved, 3 * rope(X, POSITIONS, RopeConfig(fraction=0.5)), atol=1e-5)
