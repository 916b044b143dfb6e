"""What a wrong array has in common with the right one, in a few words: "each is 2 times what it should be"."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

LARGEST = 200_000  # entries; no larger array is examined
NEAR = 1e-4  # relative; rounding of a float32 sum is smaller, and another mistake is larger
FARTHEST = 8  # places by which an array is looked for elsewhere
SHOWN = 4  # numbers of a list that are shown
BFLOAT16 = 2.0**-7  # relative; a few roundings to 8 bits

FUNCTIONS = {
    "the square of": np.square,
    "the square root of": np.sqrt,
    "the reciprocal of": np.reciprocal,
    "the logarithm of": np.log,
    "e to the power of": np.exp,
    "1 minus": lambda x: 1 - x,
}
FACTORS = (
    {
        math.log(2): "ln 2",
        1 / math.log(2): "1 / ln 2",
        math.sqrt(2): "the root of 2",
        1 / math.sqrt(2): "1 / the root of 2",
        math.pi: "pi",
        2 * math.pi: "2 pi",
    }
    | {10.0**n: f"10^{n}" for n in (2, 3, 6, 9, 12)}
    | {2.0**n: f"2^{n}" for n in (10, 20, 30, 40)}
    | {1.024**n: f"2^{10 * n} / 10^{3 * n}" for n in (1, 2, 3, 4)}
)
ROUNDED = {
    "the absolute value of": np.abs,
    "rounded down from": np.floor,
    "rounded up from": np.ceil,
    "rounded to the nearest whole number from": np.rint,
}


def likeness(got: np.ndarray, want: np.ndarray, bad: np.ndarray | None = None) -> str:
    """The first thing that explains every entry of `got`, or "" if there is none.

    Args:
        got: the wrong array, in float64.
        want: the right one; of another shape only if `bad` is None.
        bad: which entries are off.
    """
    small = 0 < got.size <= LARGEST and 0 < want.size <= LARGEST
    if not small or got.dtype.kind != "f" or want.dtype.kind != "f":
        return ""
    with np.errstate(all="ignore"):
        if bad is None:
            found = _of_another_shape(got, want)
        elif got.size == 1:
            found = _of_a_number(float(got.reshape(())), float(want.reshape(())))
        else:
            found = itertools.chain(_of_all(got, want), _of_some(got, want, bad))
        return next(found, "")


def _alike(a: np.ndarray, b: np.ndarray, near: float = NEAR) -> bool:
    """Whether two arrays are equal but for rounding; what is finite in one must be so in the other."""
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    finite = np.isfinite(a)
    far = np.abs(a - b)[finite]
    scale = np.abs(b[finite]).max(initial=0.0)
    same = np.array_equal(a[~finite], b[~finite], equal_nan=True)
    return same and bool(np.all(far <= near * np.abs(b[finite]) + near * 1e-3 * scale))


def _varied(x: np.ndarray) -> bool:
    """Whether enough entries differ for a pattern to be no accident."""
    return len(np.unique(x[np.isfinite(x)])) > 2


def _of_all(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """What holds for every entry of an array."""
    if not got.any():
        yield "all of yours are 0"
    for i, j in itertools.combinations(range(want.ndim), 2):
        if _alike(got, np.swapaxes(want, i, j)):
            yield f"axes {i} and {j} are swapped"
    if not _varied(want):
        return
    if _alike(got, -want):
        yield "every sign is wrong"
    solid = np.isfinite(got) & np.isfinite(want) & (np.abs(want) > 1e-3 * _largest(want))
    if solid.any():
        ratio = float(np.median(got[solid] / want[solid]))
        if ratio and _alike(got, ratio * want):
            yield f"each is {_times(ratio)} what it should be"
        by = float(np.median(got[solid] - want[solid]))
        if by and _alike(got - by, want):
            yield f"each is too {'large' if by > 0 else 'small'} by {abs(by):.4g}"
    for name, function in FUNCTIONS.items():
        if np.isfinite(got).any() and _alike(got, function(want)):
            yield f"each is {name} what it should be"
    for name, function in ROUNDED.items():
        if _alike(got, function(want)):
            yield f"each is {name} what it should be"
    for axis in range(want.ndim):
        yield from _along(got, want, axis)
    yield from _by_slice(got, want)
    if _alike(np.sort(got, axis=None), np.sort(want, axis=None)):
        yield "the values are the right ones, in another order"


def _along(got: np.ndarray, want: np.ndarray, axis: int) -> Iterator[str]:
    g, w = np.moveaxis(got, axis, 0), np.moveaxis(want, axis, 0)
    along = f"along axis {axis}" if want.ndim > 1 else "in order"
    if len(w) < 3 or np.array_equal(w, np.broadcast_to(w[:1], w.shape)):
        return
    if _alike(g, w[::-1]):
        yield f"they are reversed {along}"
    for by in range(1, min(len(w) - 1, FARTHEST + 1)):
        places = f"{'one place' if by == 1 else f'{by} places'} too"
        if _varied(w[:-by]) and _alike(g[by:], w[:-by]):
            yield f"each comes {places} late {along}"
        if _varied(w[by:]) and _alike(g[:-by], w[by:]):
            yield f"each comes {places} early {along}"
    sums = np.cumsum(w, axis=0)
    if _alike(g, sums):
        yield f"each is the sum of the right ones up to it {along}"
    if _alike(g, sums - w):
        yield f"each is the sum of the right ones before it {along}"
    if _alike(np.cumsum(g, axis=0), w):
        yield f"the sums of yours {along} are right"
    order = np.argsort(w.reshape(len(w), -1)[:, 0], kind="stable")
    mine = np.argsort(g.reshape(len(g), -1)[:, 0], kind="stable")
    if want.ndim > 1 and _alike(g[mine], w[order]):
        yield f"they are in another order {along}"


def _by_slice(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """Whether the slices along an axis are right but for a factor, or a number added, of their own."""
    if want.ndim < 2:
        return
    for axis in range(want.ndim):
        g = np.moveaxis(got, axis, 0).reshape(got.shape[axis], -1)
        w = np.moveaxis(want, axis, 0).reshape(want.shape[axis], -1)
        if w.shape[0] < 2 or w.shape[1] < 3 or not all(map(_varied, w)):
            continue
        largest = np.abs(w).argmax(axis=1)[:, None]
        factor = np.take_along_axis(g, largest, 1) / np.take_along_axis(w, largest, 1)
        others = np.all(np.isfinite(factor)) and np.all(np.abs(factor - 1) > NEAR)
        if others and factor.all() and _alike(g, factor * w):
            shown = " ".join(f"{x:.4g}" for x in factor[:SHOWN, 0])
            more = " ..." if len(factor) > SHOWN else ""
            yield f"each entry along axis {axis} has a factor of its own: {shown}{more}"
        added = np.median(g - w, axis=1, keepdims=True)
        if np.all(np.isfinite(added)) and added.all() and _alike(g - added, w):
            shown = " ".join(f"{x:.4g}" for x in added[:SHOWN, 0])
            more = " ..." if len(added) > SHOWN else ""
            yield f"each entry along axis {axis} is off by a number of its own: {shown}{more}"


def _of_some(got: np.ndarray, want: np.ndarray, bad: np.ndarray) -> Iterator[str]:
    """Where the entries are that are off, and what holds for them, or how little all are off."""
    found = list(itertools.islice(_where(bad), 1))
    off, right = got[bad], want[bad]
    if not bad.all() and len(off) > 1:
        if not right.any() and want[~bad].all():
            found.append("off are exactly those that should be 0")
        elif not off.any():
            found.append("those that are off are 0")
        elif _varied(right) and _alike(off, (ratio := float(np.median(off / right))) * right):
            if np.isfinite(ratio):
                found.append(f"each that is off is {_times(ratio)} what it should be")
        elif _varied(right) and len(np.unique(off)) == 1:
            found.append(f"all that are off are {off[0]:.6g}")
    error = float(np.abs(got - want).max())
    if not found and error <= BFLOAT16 * _largest(want):
        found.append(f"none is off by more than {error / _largest(want):.1g} of the largest")
    if found:
        yield "; ".join(found)


def _where(bad: np.ndarray) -> Iterator[str]:
    """In which part of the array all the entries are that are off."""
    if bad.sum() > 2 and bad.ndim > 1 and bad.shape[-2] == bad.shape[-1] > 2:
        rows, columns = np.indices(bad.shape[-2:])
        for name, outside in (
            ("on", rows != columns),
            ("above", rows >= columns),
            ("below", rows <= columns),
        ):
            if not bad[..., outside].any():
                yield f"only those {name} the diagonal of the last two axes are off"
    for axis, size in enumerate(bad.shape):
        found = np.flatnonzero(np.moveaxis(bad, axis, 0).reshape(size, -1).any(axis=1))
        along = f" along axis {axis}" if bad.ndim > 1 else ""
        if len(found) == size or found[-1] - found[0] >= len(found):
            continue
        which = f"with index {found[0]}"
        if len(found) > 1 and found[0] == 0:
            which = f"the first {len(found)}"
        elif len(found) > 1 and found[-1] == size - 1:
            which = f"the last {len(found)}"
        elif len(found) > 1:
            which = f"with indices {found[0]} to {found[-1]}"
        if bad.sum() > 1:
            yield f"only those {which}{along} are off".replace("those the", "the")


def _of_a_number(got: float, want: float) -> Iterator[str]:
    if not (math.isfinite(got) and math.isfinite(want)) or not got or abs(want) < 1e-30:
        return
    if abs(got + want) <= NEAR * abs(want):
        yield "the sign is wrong"
    if float(want).is_integer() and abs(want) <= 8:
        return  # too many simple things are true of small whole numbers
    if abs(got - want) == 1:
        yield "one too many" if got > want else "one too few"
    for name, function in FUNCTIONS.items():
        if abs(got - function(want)) <= NEAR * abs(got):
            yield f"that is {name} what it should be"
    factor = _fraction(got / want)
    if factor:
        yield f"that is {factor} what it should be"
    for name, function in ROUNDED.items():
        if got == function(want):
            yield f"that is {name} what it should be"


def _times(ratio: float) -> str:
    """A factor in words: "1/4 of", "3 times", "0.8173 times"."""
    return _fraction(ratio) or f"{ratio:.{4 if abs(ratio - 1) > 1e-3 else 8}g} times"


def _fraction(ratio: float) -> str:
    """A factor in words if it's simple, or a fraction of small numbers; or else ""."""
    if abs(ratio - 1) < NEAR or not 1e-300 < abs(ratio) < 1e300:  # nor what overflows
        return ""
    for denominator in range(2, 13):
        numerator = round(ratio * denominator)
        if 1 < numerator < 13 and abs(ratio * denominator / numerator - 1) < NEAR:
            return _simple(ratio) or f"{numerator}/{denominator} of"
    return _simple(ratio)


def _simple(ratio: float) -> str:
    """A factor in words if it's a whole number, one over a whole number, or in `FACTORS`; or else ""."""
    for value, name in FACTORS.items():
        if abs(ratio / value - 1) < NEAR:
            return f"{name} times"
        if abs(ratio * value - 1) < NEAR and value >= 100:
            return f"1/{name} of"
    for value, text in ((ratio, "{} times"), (1 / ratio, "1/{} of")):
        if 1 < round(value) <= 64 and abs(value / round(value) - 1) < NEAR:
            return text.format(round(value))
    return ""


def _of_another_shape(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    if got.size == want.size and _alike(got.reshape(-1), want.reshape(-1)):
        yield "the values are right, the shape isn't"
    if got.ndim == want.ndim:
        for order in itertools.permutations(range(want.ndim) if want.ndim < 5 else ()):
            if _alike(got.transpose(order), want):
                yield "the values are right, the axes are in another order"
        yield from _longer(got, want)
    for kept, reduced, who in ((got, want, "yours"), (want, got, "the right ones")):
        for count in range(1, kept.ndim + 1):
            for axes in itertools.combinations(range(kept.ndim), count):
                for name, reduce in (("sum", np.sum), ("mean", np.mean), ("maximum", np.max)):
                    small = reduce(kept, axis=axes)
                    if small.size == reduced.size and _alike(np.ravel(small), reduced.reshape(-1)):
                        over = f"{'axes' if count > 1 else 'axis'} {', '.join(map(str, axes))}"
                        if who == "yours":
                            yield f"the {name} of yours over {over} is right"
                        else:
                            yield f"you return the {name} of the right values over {over}"


def _longer(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    differ = [axis for axis in range(want.ndim) if got.shape[axis] != want.shape[axis]]
    if len(differ) != 1:
        return
    g, w = np.moveaxis(got, differ[0], 0), np.moveaxis(want, differ[0], 0)
    n, along = abs(len(g) - len(w)), f"along axis {differ[0]}"
    entries = f"{n} {'entry' if n == 1 else 'entries'}"
    short, long = sorted((g, w), key=len)
    verdict = "too many" if len(g) > len(w) else "missing"
    if len(short) and _alike(long[: len(short)], short):
        yield f"{entries} {verdict} at the end {along}"
    if len(short) and _alike(long[n:], short):
        yield f"{entries} {verdict} at the beginning {along}"
    found = _left_over(short, long)
    if found:
        where = ", ".join(map(str, found[:SHOWN])) + (", ..." if n > SHOWN else "")
        yield f"{entries} {verdict} {along}, with index {where} of {'yours' if len(g) > len(w) else 'the right ones'}"


def _left_over(short: np.ndarray, long: np.ndarray) -> list[int]:
    """Indices of the entries without which `long` is `short`, or none if no such are enough."""
    left, at = [], 0
    for index, entry in enumerate(long):
        if at < len(short) and _alike(entry, short[at]):
            at += 1
        else:
            left.append(index)
    return left if at == len(short) > len(left) else []


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
