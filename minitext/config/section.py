"""The base of every section: frozen, closed to unknown keys, and checked as a whole.

Pydantic checks each value's type and limits. `problems` adds the rules between values, each as one line with the
values, the rule and a way out.

Chapters: 6.
"""

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from minitext.files import local_path

T = TypeVar("T")
P = ParamSpec("P")


def own_path(path: str | None) -> str | None:
    """Returns a path without the ~ that a shell leaves in `run.dir=~/runs`, once `local_path` has checked it."""
    return None if local_path(path) is None else os.path.expanduser(str(path))


# Keys that name a file or a folder.
LocalPath = Annotated[str, AfterValidator(own_path)]
OptionalPath = Annotated[str | None, AfterValidator(own_path)]


def setting(default: T, description: str, **limits: Any) -> T:
    """Declares a key: its default, a one-line description, and limits for pydantic such as `ge=1`."""
    return Field(default=default, description=description, **limits)


def size(default: T, description: str, least: int = 1) -> T:
    """Declares a dimension of arrays: a key of at least `least`, and at most 2**24, which no model comes near."""
    return setting(default, description, ge=least, le=2**24)


class Section(BaseModel):
    """A frozen group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def problems(self) -> Iterator[str]:
        """Yields one line for each broken rule between values."""
        yield from ()

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo):
        # In a whole Config all sections' problems are collected and reported together (Config.problems).
        if not (info.context and info.context.get("whole")) and (found := list(self.problems())):
            raise ValueError("; ".join(found))
        return self


def choices(field: FieldInfo) -> dict[str, type[Section]]:
    """Returns the sections that a field may hold, by the default of their key `kind`; none for a plain value."""
    union = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if union else [field.annotation]
    sections = [k for k in kinds if isinstance(k, type) and issubclass(k, Section)]
    return {s.model_fields["kind"].default if union else "": s for s in sections}


def cached(fn: Callable[P, T]) -> Callable[P, T]:
    """Remembers a function's results by its arguments: sections hash, though type checkers don't see it."""
    return lru_cache(maxsize=64)(fn)  # pyright: ignore


def divisors(n: int) -> str:
    """Returns the first dozen divisors of n as a list to choose from."""
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")
