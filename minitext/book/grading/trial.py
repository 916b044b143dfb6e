"""`Trial`, the second argument of every check: comparisons that explain themselves.

A learner's value is compared with the right one leaf by leaf, in float64. The comparison only converts the learner's
object to a plain NumPy array: it calls no other method of the object, and never trusts its `==`. One that fails raises
`Failure` with a message for the learner. The exception also keeps the observed value, which is how a wrong answer is
matched with the mutant that makes the same mistake.
"""

import contextlib
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from minitext.book.grading.likeness import likeness

SHORT = 12  # entries of a row that is shown whole
SAMPLE = 4096  # entries of an observed array that are kept, for recognising the mistake


class Failure(AssertionError):
    """A failed check: `str(self)` is the message for the learner, then `why`; `observed` is the value seen."""

    def __init__(self, message: str, observed: Any = None, why: str = ""):
        super().__init__(f"{message}: {why}" if why else message)
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
    array = np.array(None)  # of dtype object, like everything that isn't numbers
    if is_array(x) or isinstance(x, (list, tuple)):
        with contextlib.suppress(ValueError):  # nested lists of different lengths
            array = np.array(x)
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
    """None if every entry is within `atol + rtol * abs(want)`, else a message with the worst entry and the pattern.

    NaN equals NaN, and infinities equal themselves. Shapes must be equal: nothing broadcasts.
    """
    g, w = wide(got), wide(want)
    if got.shape != want.shape:
        return _explained(f"got shape {got.shape}, want {want.shape}", likeness(g, w))
    with np.errstate(all="ignore"):
        error = np.abs(g - w)
        exact = got.dtype.kind in "biu" and want.dtype.kind in "biu"
        same = got == want if exact else (g == w) | (np.isnan(g) & np.isnan(w))
        # Without a tolerance `error` mustn't decide: large integers look equal in float64.
        # Nor beside an infinite number, to which any distance is small.
        near = np.isfinite(w) & (error <= atol + rtol * np.abs(w))
        bad = ~(same | near) if rtol or atol else ~same
    if not bad.any():
        return None
    error = np.where(bad, np.where(np.isnan(error), np.inf, error), -1.0)
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    text = f"{_got(got, worst)}, want {_number(want[worst])}"
    if bad.size > 1:
        text += f" ({int(bad.sum())} of {bad.size} values are off"
        text += f", {int(np.isnan(g).sum())} are NaN)" if np.isnan(g).any() else ")"
    return _explained(_explained(text, _row(got, want, worst)), likeness(g, w, bad))


def _row(got: np.ndarray, want: np.ndarray, worst: tuple[Any, ...]) -> str:
    """The whole row in which two arrays differ, if it is short."""
    if not got.ndim or not 1 < got.shape[-1] <= SHORT:
        return ""
    rows = [" ".join(map(_number, x[worst[:-1]])) for x in (got, want)]
    return f"got [{rows[0]}], want [{rows[1]}]" if max(map(len, rows)) <= 60 else ""


def _explained(text: str, found: str) -> str:
    return f"{text}; {found}" if found else text


def not_finite(got: np.ndarray) -> str | None:
    """None if every entry is finite, else a message with the first one that isn't."""
    bad = np.argwhere(~np.isfinite(wide(got)))
    return f"{_got(got, tuple(bad[0]))}, want a finite number" if len(bad) else None


def _got(array: np.ndarray, index: tuple[Any, ...]) -> str:
    where = f"at [{', '.join(map(str, index))}] " if index else ""
    return f"{where}got {_number(array[index])}"


def _number(x: Any) -> str:
    return f"{x:.6g}" if np.asarray(x).dtype.kind in "fc" else str(x)


def equal_values(got: Any, want: Any, whole: bool = True) -> str | None:
    """None if two values are the same, else how they differ; types must match, dtypes needn't.

    `whole` is False for a part of a value: a single number in a list may be an id, which is no amount.
    """
    if is_array(want):
        if isinstance(want, bool) != (plain(got).dtype == np.bool_) and not hasattr(want, "dtype"):
            return f"got {describe(got)}, want {want!r}"
        try:
            array = plain(got)
        except Failure:
            return f"got {describe(got)}, want {describe(want)}"
        text = mismatch(array, plain(want), 0.0, 0.0)
        return text if text is None or whole else text.split("; ")[0]
    if type(got) is not type(want) and not (_sequence(got) and _sequence(want)):
        return f"got {describe(got)}, want {describe(want)}"
    items: Iterable[tuple[str, Any, Any]]
    if isinstance(want, dict):
        if sorted(map(repr, got)) != sorted(map(repr, want)):
            text = f"got the keys {sorted(map(str, got))}, want {sorted(map(str, want))}"
            return _explained(text, _apart(list(got), list(want)))
        items = ((f"[{key!r}]", got[key], want[key]) for key in want)
    elif _sequence(want):
        if len(got) != len(want):
            return f"got {len(got)} entries, want {len(want)}"
        items = ((f"[{i}]", g, w) for i, (g, w) in enumerate(zip(got, want, strict=True)))
    else:
        return None if want == got else f"got {describe(got)}, want {describe(want)}"
    for where, g, w in items:
        text = equal_values(g, w, whole=False)
        if text is not None:
            inner = text.removeprefix("at ") if text.startswith("at [") else f": {text}"
            return f"at {where}{inner}"
    return None


def unequal(got: Any, want: Any) -> str | None:
    """What `equal_values` says, or what `got` is if it has no values to compare."""
    try:
        return equal_values(got, want)
    except Failure as failure:
        return str(failure)


def _apart(got: list, want: list) -> str:
    """Which entries of a list of strings or numbers are missing, and which are too many."""
    kinds = (str, int, float)
    if not all(type(x) in kinds for x in (*got, *want)) or not want:
        return ""
    missing = [repr(x) for x in dict.fromkeys(want) if got.count(x) < want.count(x)]
    more = [repr(x) for x in dict.fromkeys(got) if got.count(x) > want.count(x)]
    if not missing and not more:
        return "the entries are the right ones, in another order"
    found = []
    for names, told in ((missing, "missing"), (more, "too many")):
        if names:
            rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
            found.append(f"{told}: {', '.join(names[:4])}{rest}")
    return "; ".join(found) if len(missing) < len(set(want)) else ""


def _list_likeness(got: Any, want: Any) -> str:
    """What two lists have in common, if they are lists of numbers or of strings."""
    if len(got) == len(want) == 2 and unequal(got[::-1], want) is None:
        return "the two are swapped"
    try:
        g, w = wide(plain(got)), wide(plain(want))
    except Failure:
        return _apart(list(got), list(want))
    return likeness(g, w, g != w if g.shape == w.shape else None) if g.ndim and w.ndim else ""


def _sequence(x: Any) -> bool:
    return type(x) in (list, tuple)


def observe(x: Any) -> Any:
    """What to keep of a value for comparison with a mutant's: a sample of an array, the text of anything else."""
    try:
        array = plain(x)
    except Failure:
        if x is None or isinstance(x, str):
            return ("value", x)
        import jax

        items = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda leaf: leaf is None)[0]
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
    if isinstance(a, tuple) and isinstance(b, tuple):
        if len(a) != len(b):
            return float("inf")
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


def alike(a: Any, b: Any, rtol: float, atol: float) -> bool:
    """Whether two arrays have the same shape and close values."""
    try:
        return mismatch(plain(a), plain(b), rtol, atol) is None
    except Failure:
        return False


def _with_mistake(why: str, mistakes: dict[str, Any] | None, made: Callable[[Any], bool]) -> str:
    """`why`, and the sentence of the first mistake whose value was `made`."""
    told = next((text for text, value in (mistakes or {}).items() if made(value)), "")
    return ". ".join(filter(None, (why, told)))


class Traces:
    """Wraps a function and counts how often it is traced (or compiled, if it was jitted already)."""

    def __init__(self, fn: Any):
        import jax

        if hasattr(fn, "_cache_size"):  # already jitted, perhaps with static arguments
            before = fn._cache_size()
            self._jitted, self._count = fn, lambda: fn._cache_size() - before
            return
        calls = []

        def counted(*args, **kwargs):
            calls.append(None)
            return fn(*args, **kwargs)

        self._jitted, self._count = jax.jit(counted), lambda: len(calls)

    def __call__(self, *args, **kwargs):
        """Calls the jitted function."""
        return self._jitted(*args, **kwargs)

    @property
    def count(self) -> int:
        """Number of traces since this object was created."""
        return self._count()


class Trial:
    """What a check may use: its comparisons, random numbers, and views of a compiled function.

    Every comparison raises `Failure` if it doesn't hold. Its `why` is one sentence for the learner, printed after the
    values.

    Attributes:
        rng: a NumPy generator; its seed is fresh for every grading, and the same for the answer and for the mutants it
            is compared with.
        learner: the learner's own number, for answers that are numbers.
    """

    def __init__(self, seed: int, learner: int, salt: str = ""):
        self.rng = np.random.default_rng([seed, zlib.crc32(salt.encode())])
        self.learner = learner
        self.comparisons = 0

    def close(self, got, want, rtol=1e-5, atol=1e-6, why="", dtype=None, mistakes=None) -> None:
        """Every entry of `got` is within `atol + rtol * abs(want)`; NaN equals NaN, and shapes must be equal.

        Both are arrays, numbers or pytrees of arrays; if `want` is a single array, so must `got` be. `dtype` is the
        dtype that `got` must have, if that matters. `mistakes` maps sentences for the learner to wrong values: that of
        the first value which `got` equals ends the message.
        """
        self.comparisons += 1
        observed = observe(got)
        try:
            for path, g, w in leaves(got, want):
                array = plain(g)
                if dtype is not None and array.dtype != np.dtype(dtype):
                    raise Failure(f"got dtype {array.dtype}, want {np.dtype(dtype)}")
                text = mismatch(array, plain(w), rtol, atol)
                if text is not None:
                    raise Failure(f"{path} {text}".strip())
        except Failure as failure:
            if not alike(got, want, rtol, atol):  # else only its type is wrong
                why = _with_mistake(why, mistakes, lambda value: alike(got, value, rtol, atol))
            raise Failure(str(failure), observed, why) from None

    def equal(self, got, want, why="", mistakes=None) -> None:
        """`got` is exactly `want`: arrays entry by entry, lists, dicts, strings, or any equal object.

        `mistakes` is as for `close`.
        """
        self.comparisons += 1
        text = unequal(got, want)
        if text is not None and _sequence(got) and _sequence(want):
            shown = f"got {got}, want {want}"
            text = _explained(text, shown if len(shown) <= 120 else "")
            text = _explained(text, _list_likeness(got, want))
        if text is not None:
            why = _with_mistake(why, mistakes, lambda value: unequal(got, value) is None)
            raise Failure(text, observe(got), why)

    def true(self, cond, why="", observed=None) -> None:
        """`cond` holds. `why` is the whole message; `observed` is the value that `cond` was computed from."""
        self.comparisons += 1
        if not bool(np.all(plain(cond))):
            text = why or "a condition of this check does not hold"
            raise Failure(text, ("true", why if observed is None else observe(observed)))

    def finite(self, x, why="") -> None:
        """No entry of an array or pytree is NaN or infinite."""
        self.comparisons += 1
        found = list(leaves(x, 0 if is_array(x) else x))
        if not found:
            raise Failure(f"got {describe(x)}, want an array", observe(x), why)
        for path, leaf, _ in found:
            text = not_finite(plain(leaf))
            if text is not None:
                raise Failure(f"{path} {text}".strip(), observe(x), why)

    def raises(self, exc, fn: Callable, *args, why="", match="") -> None:
        """`fn(*args)` raises `exc` with a message in which the regular expression `match` is found.

        Any other exception propagates, with a note of what was wanted.
        """
        self.comparisons += 1
        name = exc.__name__ if isinstance(exc, type) else " or ".join(e.__name__ for e in exc)
        try:
            got = fn(*args)
        except BaseException as error:
            if not isinstance(error, exc):
                error.add_note(f"want {name}: {why}" if why else f"want {name}")
                raise
            if not re.search(match, str(error)):
                text = f"the message of {name} is {str(error)!r}; it must mention {match!r}"
                raise Failure(text, ("message", str(error)), why) from None
            return
        text = f"nothing was raised (got {describe(got)}), want {name}"
        raise Failure(text, observe(got), why)

    def traces(self, fn: Callable) -> Traces:
        """Wraps `fn`, jitting it if needed; `.count` is how often it has been traced since."""
        return Traces(fn)

    def primitives(self, fn: Callable, *args) -> list[str]:
        """Names of the primitives in the jaxpr of `fn(*args)`, including those of inner jaxprs."""
        import jax
        from jax.extend.core import jaxprs_in_params

        def walk(jaxpr: Any) -> Iterator[str]:
            for equation in jaxpr.eqns:
                yield equation.primitive.name
                for inner in jaxprs_in_params(equation.params):
                    yield from walk(inner)

        return list(walk(jax.make_jaxpr(fn)(*args).jaxpr))

    def compiled(self, fn: Callable, *args):
        """`fn`, jitted if needed and compiled for `args`: a `jax.stages.Compiled`."""
        import jax

        jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
        return jitted.lower(*args).compile()

    def hlo(self, fn: Callable, *args) -> str:
        """The optimised HLO text of `fn` for `args`, on this exercise's devices."""
        return self.compiled(fn, *args).as_text()

    def temp_bytes(self, fn: Callable, *args) -> int:
        """Bytes of temporary memory that the compiled `fn` needs for `args`."""
        return self.compiled(fn, *args).memory_analysis().temp_size_in_bytes
