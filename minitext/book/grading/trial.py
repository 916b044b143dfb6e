"""`Trial`, the second argument of every check: comparisons that explain themselves.

A comparison that fails raises `Failure` with a message for the learner, and keeps what it saw, so
that a failing answer can be matched with the mutant that makes the same mistake.

Chapters: none.
"""

import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from minitext.book.grading import compare
from minitext.book.grading.compare import Failure


def _explain(text: str, why: str) -> str:
    return f"{text}: {why}" if why else text


class Traces:
    """A function that counts how often it was traced (or compiled, if it was jitted already)."""

    def __init__(self, fn: Callable):
        import jax

        self._before = 0
        self._count = 0
        if hasattr(fn, "_cache_size"):  # already jitted, perhaps with static arguments: keep it
            self._jitted: Any = fn
            self._before = fn._cache_size()  # pyright: ignore[reportFunctionMemberAccess]
            return

        def counted(*args, **kwargs):
            self._count += 1
            return fn(*args, **kwargs)

        self._jitted = jax.jit(counted)
        self._before = None

    def __call__(self, *args, **kwargs):
        """Calls the jitted function."""
        return self._jitted(*args, **kwargs)

    @property
    def count(self) -> int:
        """Traces since this object was made."""
        if self._before is None:
            return self._count
        return self._jitted._cache_size() - self._before


class Trial:
    """What one check may use.

    Attributes:
        rng: a NumPy generator; its seed is fresh at every grading, and the same for the answer
            and for the mutants it is compared with.
        learner: a number that belongs to the learner, for answers that are numbers.
    """

    def __init__(self, seed: int, learner: int, salt: str = ""):
        self.rng = np.random.default_rng([seed, zlib.crc32(salt.encode())])
        self.learner = learner
        self.comparisons = 0

    def close(self, got, want, rtol=1e-5, atol=1e-6, why="", dtype=None) -> None:
        """Every entry is within `atol + rtol * abs(want)`; NaN equals NaN, shapes must be equal.

        Args:
            got: the learner's array, number or pytree of arrays.
            want: the right one; where it is one array, so must `got` be.
            rtol: relative tolerance.
            atol: absolute tolerance.
            why: one sentence for the learner, printed after the numbers.
            dtype: the dtype that `got` must have, if that matters.

        Raises:
            Failure: if not.
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
            raise Failure(_explain(str(failure), why), observed) from None

    def equal(self, got, want, why="") -> None:
        """`got` is `want` exactly: arrays entry by entry, lists, dicts, strings, any equal object.

        Raises:
            Failure: if not.
        """
        self.comparisons += 1
        try:
            text = compare.equal_values(got, want)
        except Failure as failure:
            text = str(failure)
        if text is not None:
            raise Failure(_explain(text, why), compare.observe(got))

    def true(self, cond, why="", observed=None) -> None:
        """`cond` holds. `why` is the whole message; `observed` the value it was computed from.

        Raises:
            Failure: if not.
        """
        self.comparisons += 1
        if not bool(np.all(compare.plain(cond))):
            text = why or "a condition of this check does not hold"
            raise Failure(text, ("true", why if observed is None else compare.observe(observed)))

    def finite(self, x, why="") -> None:
        """No entry of an array or pytree is NaN or infinite.

        Raises:
            Failure: if one is, with its place.
        """
        self.comparisons += 1
        found = list(compare.leaves(x, 0 if compare.is_array(x) else x))
        if not found:
            text = f"got {compare.describe(x)}, want an array"
            raise Failure(_explain(text, why), compare.observe(x))
        for path, leaf, _ in found:
            text = compare.not_finite(compare.plain(leaf))
            if text is not None:
                raise Failure(_explain(f"{path} {text}".strip(), why), compare.observe(x))

    def raises(self, exc, fn: Callable, *args, why="", match="") -> None:
        """`fn(*args)` raises `exc`, with a message that the regular expression `match` finds.

        Raises:
            Failure: if nothing or something else is raised.
        """
        self.comparisons += 1
        name = exc.__name__ if isinstance(exc, type) else " or ".join(e.__name__ for e in exc)
        try:
            got = fn(*args)
        except BaseException as error:
            if not isinstance(error, exc):
                raise
            if not re.search(match, str(error)):
                text = f"the message of {name} is {str(error)!r}; it must speak of {match!r}"
                raise Failure(_explain(text, why), ("message", str(error))) from None
            return
        text = f"nothing was raised (got {compare.describe(got)}), want {name}"
        raise Failure(_explain(text, why), compare.observe(got))

    def traces(self, fn: Callable) -> Traces:
        """Wraps `fn` so that `.count` tells how often it was traced since; jits it if needed."""
        return Traces(fn)

    def primitives(self, fn: Callable, *args) -> list[str]:
        """Names of the primitives in the jaxpr of `fn(*args)`, those of inner jaxprs included."""
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
        """`fn` compiled for `args` (jitted first if it was not): a `jax.stages.Compiled`."""
        import jax

        jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
        return jitted.lower(*args).compile()

    def hlo(self, fn: Callable, *args) -> str:
        """The optimised HLO text of `fn` for `args`, on the devices of this exercise."""
        return self.compiled(fn, *args).as_text()

    def temp_bytes(self, fn: Callable, *args) -> int:
        """Bytes of temporary memory that the compiled `fn` needs for `args`."""
        return self.compiled(fn, *args).memory_analysis().temp_size_in_bytes


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
