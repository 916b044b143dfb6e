"""Compares a learner's value with the right one, leaf by leaf, in float64.

The comparison only converts the learner's object to a plain NumPy array: it calls no other method of the object, and
never trusts its `==`.

Chapters: none.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

SAMPLE = 4096  # entries of an observed array that are kept, for recognising the mistake


class Failure(AssertionError):
    """A failed check: `str(self)` is the message for the learner, `observed` the value seen."""

    def __init__(self, message: str, observed: Any = None):
        super().__init__(message)
        self.observed = observed


def is_array(x: Any) -> bool:
    """True for numbers, NumPy arrays and JAX arrays (including JAX's extended dtypes)."""
    if isinstance(x, (bool, int, float, complex, np.ndarray, np.generic)):
        return True
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def plain(x: Any) -> np.ndarray:
    """A new plain NumPy copy of an array, number or nested list of numbers.

    Raises:
        Failure: if `x` is anything else; the message says what.
    """
    dtype = getattr(x, "dtype", None)
    if dtype is not None and str(dtype).startswith("key<"):
        import jax

        x = jax.random.key_data(x)
    if not is_array(x) and not isinstance(x, (list, tuple)):
        raise Failure(f"got {describe(x)}, want an array", ("not an array", type(x).__name__))
    try:
        array = np.array(x)
    except ValueError:  # nested lists of different lengths
        array = np.array(None)
    if array.dtype.kind in "OSUmM" or array.dtype.names is not None:
        raise Failure(f"got {describe(x)}, want an array", ("not an array", type(x).__name__))
    return array


def wide(x: np.ndarray) -> np.ndarray:
    """Converts to float64 (or complex128), which holds bf16, float8 and 53-bit integers exactly."""
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def describe(x: Any) -> str:
    """A short description of a value, for a message."""
    if is_array(x) and getattr(x, "ndim", 0):
        return f"an array of shape {tuple(x.shape)} and dtype {x.dtype}"
    text = repr(x).replace("\n", " ")
    text = text if len(text) <= 80 else text[:77] + "..."
    return text if x is None or isinstance(x, (str, int, float)) else f"{type(x).__name__} {text}"


def leaves(got: Any, want: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, got, want) for each leaf of two pytrees with the same structure.

    If `want` is a single array, `got` is a single leaf, whatever it is.

    Raises:
        Failure: if the structures differ.
    """
    if is_array(want):
        yield "", got, want
        return
    import jax

    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    want_leaves, want_tree = jax.tree_util.tree_flatten_with_path(want)
    if got_tree != want_tree:
        shown = f"got the structure {got_tree}, want {want_tree}".replace("PyTreeDef", "")
        raise Failure(shown, ("structure", str(got_tree)))
    for (path, g), (_, w) in zip(got_leaves, want_leaves, strict=True):
        yield jax.tree_util.keystr(path), g, w


def mismatch(got: np.ndarray, want: np.ndarray, rtol: float, atol: float) -> str | None:
    """None if every entry is within `atol + rtol * abs(want)`, else a message with the worst entry.

    NaN equals NaN, and infinities equal themselves. Shapes must be equal: nothing broadcasts.
    """
    if got.shape != want.shape:
        return f"got shape {got.shape}, want {want.shape}"
    g, w = wide(got), wide(want)
    with np.errstate(all="ignore"):
        error = np.abs(g - w)
        exact = got.dtype.kind in "biu" and want.dtype.kind in "biu"
        same = got == want if exact else (g == w) | (np.isnan(g) & np.isnan(w))
        # Without a tolerance `error` mustn't decide: large integers look equal in float64.
        bad = ~(same | (error <= atol + rtol * np.abs(w))) if rtol or atol else ~same
    if not bad.any():
        return None
    error = np.where(bad, np.where(np.isnan(error), np.inf, error), -1.0)
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    text = f"{_got(got, worst)}, want {_number(want[worst])}"
    if bad.size > 1:
        text += f" ({int(bad.sum())} of {bad.size} values are off"
        text += f", {int(np.isnan(g).sum())} are NaN)" if np.isnan(g).any() else ")"
    return text


def not_finite(got: np.ndarray) -> str | None:
    """None if every entry is finite, else a message with the first one that isn't."""
    bad = np.argwhere(~np.isfinite(wide(got)))
    return f"{_got(got, tuple(bad[0]))}, want a finite number" if len(bad) else None


def _got(array: np.ndarray, index: tuple[Any, ...]) -> str:
    where = f"at [{', '.join(map(str, index))}] " if index else ""
    return f"{where}got {_number(array[index])}"


def _number(x: Any) -> str:
    return f"{x:.6g}" if np.asarray(x).dtype.kind in "fc" else str(x)


def equal_values(got: Any, want: Any) -> str | None:
    """None if two values are the same, else how they differ; types must match, dtypes needn't."""
    if is_array(want):
        if isinstance(want, bool) != (plain(got).dtype == np.bool_) and not hasattr(want, "dtype"):
            return f"got {describe(got)}, want {want!r}"
        return mismatch(plain(got), plain(want), 0.0, 0.0)
    if type(got) is not type(want) and not (_sequence(got) and _sequence(want)):
        return f"got {describe(got)}, want {describe(want)}"
    if isinstance(want, dict):
        if sorted(map(repr, got)) != sorted(map(repr, want)):
            return f"got the keys {sorted(map(str, got))}, want {sorted(map(str, want))}"
        return _first((f"[{key!r}]", got[key], want[key]) for key in want)
    if _sequence(want):
        if len(got) != len(want):
            return f"got {len(got)} entries, want {len(want)}"
        return _first((f"[{i}]", g, w) for i, (g, w) in enumerate(zip(got, want, strict=True)))
    return None if want == got else f"got {describe(got)}, want {describe(want)}"


def _sequence(x: Any) -> bool:
    return type(x) in (list, tuple)


def _first(items: Iterator[tuple[str, Any, Any]]) -> str | None:
    for where, got, want in items:
        text = equal_values(got, want)
        if text is not None:
            inner = text.removeprefix("at ") if text.startswith("at [") else f": {text}"
            return f"at {where}{inner}"
    return None


def observe(x: Any) -> Any:
    """What to keep of a value for comparison with a mutant's: a sample of an array, the text of anything else."""
    try:
        array = plain(x)
    except Failure:
        if x is None or isinstance(x, str):
            return ("value", describe(x))
        import jax

        items = jax.tree_util.tree_flatten_with_path(x)[0]
        if len(items) == 1 and items[0][1] is x:
            return ("value", re.sub(r"0x[0-9a-f]+", "0x", describe(x)))
        return ("tree", tuple((jax.tree_util.keystr(path), observe(leaf)) for path, leaf in items))
    flat = wide(array).reshape(-1)
    return ("array", array.shape, flat[:: max(1, flat.size // SAMPLE)])


def distance(a: Any, b: Any) -> float:
    """How far apart two observations are: 0 if they are the same, inf if they are of different kinds.

    For arrays of one shape it is the largest difference relative to the largest finite entry: about 1e-7 for rounding
    noise, about 1 for another mistake.
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _array_distance(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return max((distance(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    return 0.0 if type(a) is type(b) and a == b else float("inf")


def _array_distance(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        return float("inf")
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = max(float(np.abs(b[finite]).max()), float(np.abs(a[finite]).max()), 1e-30)
    return float(np.abs(a[finite] - b[finite]).max()) / scale
