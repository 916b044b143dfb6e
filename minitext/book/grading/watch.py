"""Notices when an answer changes what it was given."""

import dataclasses
import functools
import inspect
import types
from typing import Any

import numpy as np

from minitext.book.grading.trial import Failure, is_array

LONGEST = 60  # characters of an argument that is shown
DEEPEST = 20  # containers within containers that are looked into


class Watched:
    """An answer whose calls fail if they change an argument: lists, dictionaries, sets, NumPy arrays, attributes.

    The functions that it returns are watched in the same way. An exception gets a note with the call's arguments.

    Attributes:
        none: has one entry after a call, of the answer or of a function that it returned: whether it returned None.
    """

    def __init__(self, fn: Any, none: list[bool] | None = None):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self.none: list[bool] = [] if none is None else none

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the answer.

        Raises:
            Failure: if an argument isn't what it was before.
        """
        given = [*enumerate(args), *kwargs.items()]
        before = [_copy(value) for _, value in given]
        try:
            result = self._fn(*args, **kwargs)
        except Exception as error:
            _add_call(error, given)
            raise
        for (place, value), copy in zip(given, before, strict=True):
            if not _same(value, copy):
                name = place if isinstance(place, str) else _name(self._fn, place)
                text = f"your answer changes its argument {name}: work on a copy"
                raise Failure(text, ("changes an argument", place))
        watched = (
            isinstance(result, types.FunctionType) or getattr(result, "watched", False) is True
        )
        self.none[:] = [result is None]
        return Watched(result, self.none) if watched else result

    def __getattr__(self, name: str) -> Any:
        if name in ("_fn", "__setstate__", "__getstate__"):
            raise AttributeError(name)
        return getattr(self._fn, name)


def _name(fn: Any, place: int) -> str:
    names = getattr(fn, "argument_names", None)
    if names is None:
        try:
            names = list(inspect.signature(fn).parameters)
        except (TypeError, ValueError):
            names = []
    return f"`{names[place]}`" if place < len(names) else f"number {place + 1}"


def _add_call(error: Exception, given: list[tuple[Any, Any]]) -> None:
    """Notes the arguments of the innermost call that raised an error."""
    notes = getattr(error, "__notes__", ())
    if given and not any(note.startswith("called with ") for note in notes):
        shown = [f"{name}=" * isinstance(name, str) + _shown(value) for name, value in given]
        error.add_note(f"called with {', '.join(shown)}")


def _shown(x: Any) -> str:
    """An argument in a few characters."""
    if is_array(x) and getattr(x, "ndim", 0):
        return f"{x.dtype}{list(x.shape)}"
    if type(x) in (list, tuple):
        text = ", ".join(map(_shown, x[:LONGEST]))
        text = f"[{text}]" if type(x) is list else f"({text})"
    elif type(x) is dict:
        text = "{" + ", ".join(f"{_shown(key)}: {_shown(value)}" for key, value in x.items()) + "}"
    elif type(x) in (bool, int, float, str, bytes, type(None)):
        text = repr(x)
    else:
        text = type(x).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _parts(x: Any) -> dict[str, Any] | None:
    """The fields of a plain object that an answer could set, or None."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: getattr(x, f.name, None) for f in dataclasses.fields(x)}
    return dict(vars(x)) if isinstance(x, types.SimpleNamespace) else None


def _copy(x: Any, depth: int = DEEPEST) -> Any:
    """A copy of everything in a value that can be changed in place; other objects stand for themselves."""
    if depth == 0:
        return x
    if isinstance(x, np.ndarray):
        return np.array(x, copy=True)
    if type(x) in (list, tuple):
        return [_copy(item, depth - 1) for item in x]
    if isinstance(x, dict):
        return {key: _copy(value, depth - 1) for key, value in x.items()}
    if isinstance(x, (set, bytearray)):
        return x.copy()
    parts = _parts(x)
    return x if parts is None else {key: _copy(value, depth - 1) for key, value in parts.items()}


def _same(x: Any, copy: Any, depth: int = DEEPEST) -> bool:
    if depth == 0:
        return True
    if isinstance(x, np.ndarray):
        if x.dtype.kind == "O":
            return x.shape == copy.shape and all(map(_identical, x.flat, copy.flat))
        return x.shape == copy.shape and x.dtype == copy.dtype and x.tobytes() == copy.tobytes()
    if type(x) in (list, tuple):
        return len(x) == len(copy) and all(
            _same(a, b, depth - 1) for a, b in zip(x, copy, strict=True)
        )
    if not isinstance(x, (dict, set, bytearray)):
        parts = _parts(x)
        if parts is None:
            return _identical(x, copy)
        x = parts
    if isinstance(x, dict):
        return list(x) == list(copy) and all(_same(x[key], copy[key], depth - 1) for key in copy)
    return x == copy


def _identical(x: Any, y: Any) -> bool:
    if x is y:
        return True
    plain = (int, float, complex, str, bytes, bool, np.generic)
    return type(x) is type(y) and isinstance(x, plain) and repr(x) == repr(y)
