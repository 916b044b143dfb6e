"""The rotary positions of a layer: their frequencies, and how a model trained on short texts stretches them.

Chapters: 23.
"""

from collections.abc import Iterator
from typing import Literal

from minitext.config.section import Section, setting

_THETA = "base of the rotary frequencies"
_FRACTION = "share of a head's features that rotate, the first ones"
_FACTOR = "how many times longer texts may be"
_ORIGINAL = "tokens of the texts that the model was first trained on"


class RopeConfig(Section):
    """Rotary positions (Su et al. 2021) as they were first published."""

    kind: Literal["default"] = setting("default", "frequencies as published")
    theta: float = setting(10_000.0, _THETA, gt=0)
    fraction: float = setting(1.0, _FRACTION, gt=0, le=1)

    def rotated(self, width: int) -> int:
        """Returns how many of a head's `width` features rotate."""
        return int(width * self.fraction)


class LinearRopeConfig(RopeConfig):
    """Positions divided by a factor (Chen et al. 2023)."""

    kind: Literal["linear"] = setting("linear", "positions divided by a factor")  # pyright: ignore
    factor: float = setting(8.0, _FACTOR, ge=1)


class Llama3RopeConfig(RopeConfig):
    """Slow rotations slowed further, fast ones kept (Grattafiori et al. 2024; Meta's `apply_scaling`)."""

    kind: Literal["llama3"] = setting("llama3", "slow rotations slowed")  # pyright: ignore
    factor: float = setting(8.0, _FACTOR, ge=1)
    low_freq_factor: float = setting(
        1.0, "llama3: longer waves than original_length/this are stretched", gt=0
    )
    high_freq_factor: float = setting(
        4.0, "llama3: shorter waves than original_length/this are kept", gt=0
    )
    original_length: int = setting(8192, _ORIGINAL, ge=1)

    def problems(self) -> Iterator[str]:
        """Checks the order of the two wavelengths."""
        if self.low_freq_factor > self.high_freq_factor:
            yield (
                f"model.rope.low_freq_factor={self.low_freq_factor} is above "
                f"model.rope.high_freq_factor={self.high_freq_factor}: choose a smaller one"
            )


class YarnRopeConfig(RopeConfig):
    """YaRN (Peng et al. 2023): each frequency stretched by how often it turns within the original length."""

    kind: Literal["yarn"] = setting("yarn", "YaRN")  # pyright: ignore
    factor: float = setting(8.0, _FACTOR, ge=1)
    original_length: int = setting(8192, _ORIGINAL, ge=1)
    beta_fast: float = setting(32.0, "yarn: frequencies that turn more often are kept", gt=0)
    beta_slow: float = setting(1.0, "yarn: those that turn less often are stretched", gt=0)
    mscale: float | None = setting(None, "yarn: weight of the attention factor's logarithm", ge=0)
    mscale_all_dim: float | None = setting(
        None, "yarn: its counterpart in the denominator; mla also scales its logits by it", ge=0
    )
    attention_factor: float | None = setting(
        None, "factor on rotated queries and keys; null: from factor", gt=0
    )
    truncate: bool = setting(True, "yarn: round the first and last stretched pair to integers")


class LongRopeConfig(RopeConfig):
    """LongRoPE (Ding et al. 2024): one searched factor for each frequency, for short texts and for long ones."""

    kind: Literal["longrope"] = setting("longrope", "LongRoPE")  # pyright: ignore
    short_factor: tuple[float, ...] = setting((), "longrope: divisors up to original_length")
    long_factor: tuple[float, ...] = setting((), "longrope: divisors beyond original_length")
    original_length: int = setting(4096, _ORIGINAL, ge=2)
    max_length: int = setting(131_072, "longrope: tokens of the longest text", ge=1)
    attention_factor: float | None = setting(
        None, "factor on rotated queries and keys; null: from the lengths", gt=0
    )


class NoRopeConfig(Section):
    """No rotation: the layer sees the order of tokens through its mask alone (Kazemnejad et al. 2023)."""

    kind: Literal["none"] = setting("none", "no rotation")

    def rotated(self, width: int) -> int:
        """Returns 0: no feature rotates."""
        return 0
