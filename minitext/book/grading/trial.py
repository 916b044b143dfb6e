"""`Trial`, the second argument of every check: comparisons that explain themselves.

A comparison that fails raises `Failure` with a message for the learner. The exception also keeps the observed value,
which is how a wrong answer is matched with the mutant that makes the same mistake.

Chapters: none.
"""

import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from minitext.book.grading import compare
from minitext.book.grading.compare import Failure


def _fail(text: str, why: str, observed: Any) -> Failure:
    return Failure(f"{text}: {why}" if why else text, observed)


class Traces:
    """Wraps a function and counts how often it is traced (or compiled, if it was jitted already)."""

    def __init__(self, fn: Callable):
        import jax

        if hasattr(fn, "_cache_size"):  # already jitted, perhaps with static arguments
            size: Callable[[], int] = fn._cache_size  # pyright: ignore[reportFunctionMemberAccess]
            before = size()
            self._jitted: Any = fn
            self._count = lambda: size() - before
            return
        calls = []

        def counted(*args, **kwargs):
            calls.append(None)
            return fn(*args, **kwargs)

        self._jitted = jax.jit(counted)
        self._count = lambda: len(calls)

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

    def close(self, got, want, rtol=1e-5, atol=1e-6, why="", dtype=None) -> None:
        """Every entry of `got` is within `atol + rtol * abs(want)`; NaN equals NaN, and shapes must be equal.

        Both are arrays, numbers or pytrees of arrays; if `want` is a single array, so must `got` be. `dtype` is the
        dtype that `got` must have, if that matters.
        """
        self.comparisons += 1
        observed = compare.observe(got)
        try:
            for path, g, w in compare.leaves(got, want):
                array = compare.plain(g)
                if dtype is not None and array.dtype != np.dtype(dtype):
                    raise Failure(f"got dtype {array.dtype}, want {np.dtype(dtype)}")
                text = compare.mismatch(array, compare.plain(w), rtol, atol)
                if text is not None:
                    raise Failure(f"{path} {text}".strip())
        except Failure as failure:
            raise _fail(str(failure), why, observed) from None

    def equal(self, got, want, why="") -> None:
        """`got` is exactly `want`: arrays entry by entry, lists, dicts, strings, or any equal object."""
        self.comparisons += 1
        try:
            text = compare.equal_values(got, want)
        except Failure as failure:
            text = str(failure)
        if text is not None:
            raise _fail(text, why, compare.observe(got))

    def true(self, cond, why="", observed=None) -> None:
        """`cond` holds. `why` is the whole message; `observed` is the value that `cond` was computed from."""
        self.comparisons += 1
        if not bool(np.all(compare.plain(cond))):
            text = why or "a condition of this check does not hold"
            raise Failure(text, ("true", why if observed is None else compare.observe(observed)))

    def finite(self, x, why="") -> None:
        """No entry of an array or pytree is NaN or infinite."""
        self.comparisons += 1
        found = list(compare.leaves(x, 0 if compare.is_array(x) else x))
        if not found:
            raise _fail(f"got {compare.describe(x)}, want an array", why, compare.observe(x))
        for path, leaf, _ in found:
            text = compare.not_finite(compare.plain(leaf))
            if text is not None:
                raise _fail(f"{path} {text}".strip(), why, compare.observe(x))

    def raises(self, exc, fn: Callable, *args, why="", match="") -> None:
        """`fn(*args)` raises `exc` with a message in which the regular expression `match` is found.

        Any other exception propagates.
        """
        self.comparisons += 1
        name = exc.__name__ if isinstance(exc, type) else " or ".join(e.__name__ for e in exc)
        try:
            got = fn(*args)
        except BaseException as error:
            if not isinstance(error, exc):
                raise
            if not re.search(match, str(error)):
                text = f"the message of {name} is {str(error)!r}; it must mention {match!r}"
                raise _fail(text, why, ("message", str(error))) from None
            return
        text = f"nothing was raised (got {compare.describe(got)}), want {name}"
        raise _fail(text, why, compare.observe(got))

    def traces(self, fn: Callable) -> Traces:
        """Wraps `fn`, jitting it if needed; `.count` is how often it has been traced since."""
        return Traces(fn)

    def primitives(self, fn: Callable, *args) -> list[str]:
        """Names of the primitives in the jaxpr of `fn(*args)`, including those of inner jaxprs."""
        import jax

        names: list[str] = []

        def walk(jaxpr) -> None:
            for equation in jaxpr.eqns:
                names.append(equation.primitive.name)
                for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
                    if _is_jaxpr(inner):
                        walk(getattr(inner, "jaxpr", inner))

        walk(jax.make_jaxpr(fn)(*args).jaxpr)
        return names

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


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
