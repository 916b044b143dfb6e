"""What every section of the configuration is: frozen, with nothing unknown in it, and checked as a whole.

Chapters: 6.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationInfo
from pydantic import model_validator as _model_validator


class Section(BaseModel):
    """A frozen group of settings; `faults()` yields what is wrong between its values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    if TYPE_CHECKING:  # pydantic hashes what is frozen

        def __hash__(self) -> int: ...

    def faults(self) -> Iterator[str]:
        """Yields one line for every rule between values that does not hold."""
        yield from ()

    @_model_validator(mode="after")
    def _check(self, info: ValidationInfo):
        # Inside a whole Config the faults of all sections are gathered and reported together (Config.faults).
        if not (info.context and info.context.get("whole")) and (faults := list(self.faults())):
            raise ValueError("; ".join(faults))
        return self


def divisors(n: int) -> str:
    """Returns the divisors of n as a list to choose from, the first dozen of them."""
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")
