"""Rules that say which products of a model multiply 8-bit numbers, and which weights are stored in 4 or 8 bits.

Chapters: 25.
"""

import re
from collections.abc import Iterator
from typing import Literal

from minitext.config.section import Section, setting


class QuantizationRule(Section):
    """How the products of some modules are quantized, forward and backward."""

    module: str = setting(
        ".*", "a regular expression for the module's whole path, such as blocks/ffn/.*"
    )
    dtype: Literal["none", "int8", "fp8"] = setting(
        "int8", "what the products multiply; none: leave them alone"
    )
    granularity: Literal["tensor", "channel", "block"] = setting(
        "channel", "numbers that share a scale: all, a row or column, or part of one"
    )
    block: int = setting(128, "granularity=block: its length", ge=1)
    gradients: Literal["e4m3", "e5m2"] = setting(
        "e4m3", "fp8: the type of gradients, e5m2 with more range and half the accuracy"
    )
    stochastic: bool = setting(False, "int8: round gradients up or down at random")

    def problems(self) -> Iterator[str]:
        """Checks the regular expression, and that every setting has an effect."""
        yield from _expression_problems(self.module)
        defaults = type(self).model_fields
        needs = {
            "granularity": self.dtype != "none",
            "block": self.granularity == "block",
            "gradients": self.dtype == "fp8",
            "stochastic": self.dtype == "int8",
        }
        for name, effective in needs.items():
            value = getattr(self, name)
            if not effective and value != defaults[name].default:
                yield (
                    f"{name}={str(value).lower()} has no effect with dtype={self.dtype} and granularity="
                    f"{self.granularity}: leave it out"
                )


class StorageRule(Section):
    """How the weights of some modules are stored: as narrow numbers with scales beside them."""

    module: str = setting(
        ".*", "a regular expression for the module's whole path, such as blocks/ffn/.*"
    )
    dtype: Literal["none", "int8", "fp8", "int4", "nf4"] = setting(
        "int8", "type of the stored numbers; fp8 is e4m3; none: leave them in float32"
    )
    block: int | None = setting(
        None,
        "inputs of an output whose weights share a scale; null: all of them (by channel)",
        ge=1,
    )

    def problems(self) -> Iterator[str]:
        """Checks the regular expression, and that the block has an effect."""
        yield from _expression_problems(self.module)
        if self.dtype == "none" and self.block is not None:
            yield f"block={self.block} has no effect with dtype=none: leave it out"


def _expression_problems(module: str) -> Iterator[str]:
    try:
        re.compile(module)
    except re.error as error:
        yield f"module={module} is not a regular expression ({error}): write one such as blocks/ffn/.*"


# The output layer, whose error no later layer evens out, has 8 bits where the others have 4.
_ENDS = StorageRule(module="embed|unembed", dtype="int8")
STORAGE_PRESETS: dict[str, tuple[StorageRule, ...]] = {
    "int8": (StorageRule(dtype="int8"),),
    "fp8": (StorageRule(dtype="fp8"),),
    "int4": (_ENDS, StorageRule(dtype="int4", block=32)),
    "nf4": (_ENDS, StorageRule(dtype="nf4", block=64)),
}
