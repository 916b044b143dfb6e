"""Rotary positions, and the ways in which models trained on short texts stretch them for long ones.

Pair i of a head's features rotates by `theta**(-i/h)` radians per position, of h pairs: the first fast, the last hardly
at all. A text longer than those of training brings the slow pairs to angles that the model has never met. Every
stretching divides frequencies so that these angles come back into the known range; they differ in which pairs they
spare, since the fast ones, which tell neighbours apart, have met every angle already.

Chapters: 4.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minitext.config.rope import (
    LinearRopeConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    NoRopeConfig,
    RopeConfig,
    YarnRopeConfig,
)

Rope = RopeConfig | NoRopeConfig  # the others derive from RopeConfig
DEFAULT = RopeConfig()


def rope(
    x_BTNH: jax.Array, positions_BT: jax.Array, cfg: Rope = DEFAULT, *, scale: float = 1.0
) -> jax.Array:
    """Rotates pairs of features by angles that grow with position (Su et al. 2021).

    Feature i is paired with feature i + h of the 2h that rotate, as in Llama's published weights for Hugging Face and
    in MaxText. After the rotation, the product of a query and a key depends only on the difference of their positions.

    Args:
      x_BTNH: [B, T, N, H], H even.
      positions_BT: [B, T], integers.
      cfg: the frequencies.
      scale: a factor on the result, such as a query's.

    Returns:
      [B, T, N, H] in x's type; angles and rotation are computed in float32.
    """
    if isinstance(cfg, NoRopeConfig):
        return x_BTNH if scale == 1.0 else (x_BTNH * scale).astype(x_BTNH.dtype)
    H = x_BTNH.shape[-1]
    rotated = cfg.rotated(H)
    half = rotated // 2
    frequency = cfg.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    stretched = stretch(cfg, half, positions_BT)
    frequency = frequency if stretched is None else frequency * stretched
    angle_BT1h = positions_BT[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
    # The length is 1 up to rounding. XLA considers a cosine cheap, so its CPU backend recomputes it for each head of
    # each layer, forward and backward. It considers a division expensive and keeps the result.
    length = jnp.sqrt(cos * cos + sin * sin)
    if (factor := scale * attention_factor(cfg)) != 1.0:
        length = length / factor
    cos, sin = cos / length, sin / length
    x = x_BTNH.astype(jnp.float32)
    a, b = jnp.split(x[..., :rotated], 2, axis=-1)
    parts = [a * cos - b * sin, b * cos + a * sin]
    if rotated < H:
        parts.append(x[..., rotated:] * scale)
    return jnp.concatenate(parts, axis=-1).astype(x_BTNH.dtype)


def stretch(cfg: RopeConfig, half: int, positions_BT: Any) -> Any:
    """Returns the factor on each of `half` frequencies, [half] float32, or None where there is none.

    Args:
      cfg: the rotary positions.
      half: pairs that rotate.
      positions_BT: [B, T]; LongRoPE has one set of factors for texts up to the original length and one beyond.
    """
    match cfg:
        case LinearRopeConfig():
            return jnp.full(half, 1 / cfg.factor, jnp.float32)
        case Llama3RopeConfig():
            wavelength = 2 * np.pi * cfg.theta ** (np.arange(half) / half)
            # 1 keeps a frequency, 0 divides it by the factor; between the two wavelengths lies a ramp, if they differ.
            low, high = cfg.low_freq_factor, cfg.high_freq_factor
            keep = np.clip((cfg.original_length / wavelength - low) / max(high - low, 1e-9), 0, 1)
            return jnp.asarray(keep + (1 - keep) / cfg.factor, jnp.float32)
        case YarnRopeConfig():
            keep = 1 - _ramp(cfg, half)
            return jnp.asarray(keep + (1 - keep) / cfg.factor, jnp.float32)
        case LongRopeConfig():
            short, long = (jnp.asarray(f, jnp.float32) for f in (cfg.short_factor, cfg.long_factor))
            return 1 / jnp.where(jnp.max(positions_BT) < cfg.original_length, short, long)
    return None


def _ramp(cfg: YarnRopeConfig, half: int) -> np.ndarray:
    """Returns for each pair how far it is on the way from kept (0) to stretched (1)."""

    def pair(rotations: float) -> float:
        """The pair, as a real number, that turns so often within the original length."""
        turn = cfg.original_length / (rotations * 2 * math.pi)
        return half * math.log(turn) / math.log(cfg.theta)

    first, last = pair(cfg.beta_fast), pair(cfg.beta_slow)
    if cfg.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    # At the lengths and bases of no published model the last may come before the first. Transformers and MaxText don't
    # mind, and this computes what they do.
    width = last - first or 1e-3
    return np.clip((np.arange(half) - first) / width, 0, 1)


def attention_factor(cfg: RopeConfig) -> float:
    """Returns the factor on rotated queries and keys, by which YaRN and LongRoPE sharpen attention over long texts."""
    match cfg:
        case YarnRopeConfig(attention_factor=None):
            if cfg.mscale and cfg.mscale_all_dim:
                return yarn_mscale(cfg, cfg.mscale) / yarn_mscale(cfg, cfg.mscale_all_dim)
            return yarn_mscale(cfg, 1.0)
        case LongRopeConfig(attention_factor=None):
            longer = cfg.max_length / cfg.original_length
            more = math.log(longer) / math.log(cfg.original_length)
            return math.sqrt(1 + more) if longer > 1 else 1.0
        case YarnRopeConfig() | LongRopeConfig():
            return cfg.attention_factor or 1.0
    return 1.0


def yarn_mscale(cfg: YarnRopeConfig, weight: float) -> float:
    """Returns `1 + 0.1 weight ln(factor)` (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(cfg.factor) + 1.0


def logits_factor(cfg: Rope) -> float:
    """Returns the factor that MLA puts on its logits, besides 1/sqrt(H), when YaRN stretches its rotary part."""
    if isinstance(cfg, YarnRopeConfig) and cfg.mscale_all_dim:
        return yarn_mscale(cfg, cfg.mscale_all_dim) ** 2
    return 1.0
