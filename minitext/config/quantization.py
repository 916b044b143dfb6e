"""Rules that say which products of a model multiply 8-bit numbers.

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
        try:
            re.compile(self.module)
        except re.error as error:
            yield f"module={self.module} is not a regular expression ({error}): write one such as blocks/ffn/.*"
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
