import itertools
import math
import operator
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from minitext.book.grading import Exercise

# ---------------------------------------------------------------------------------- intensity

intensity = Exercise(
    "03.intensity",
    title="The intensity of an einsum",
    function="einsum_cost",
    minutes=15,
    points=10,
    forbid=("minitext.perf.cost", "minitext.perf.roofline"),
    statement="""
Write `einsum_cost(subscripts, shapes, dtype, result_dtype)` for a product of two arrays. It returns
`(flops, bytes, intensity)`.

- Each term of a sum counts as 2 FLOPs, a multiplication and an addition. The first term does too,
  because it is added to 0.
- Both operands are read once and the result is written once. Operands have `dtype`, and the result
  has `result_dtype`, which may be different.
- FLOPs and bytes are exact Python integers. A step of a large model has more FLOPs than 64 bits
  hold.
- If nothing is moved because every array is empty, the intensity is 0.0.
- If a letter has two different sizes, raise a `ValueError` whose message names the letter, as in
  `K is 61 and 62`. You have to look at the shapes to find the letter.
""",
    hints=(
        "Write the product as nested Python loops, one for each letter. How many loops are "
        "there, and how many FLOPs does the innermost line do?",
        "Collect `{letter: size}` from both operands. FLOPs are 2 times the product of all "
        "the sizes, because a letter that both operands have is still one loop. Bytes need "
        "three products, one for each array.",
        "`operands, result = subscripts.split('->')`, then `math.prod(sizes.values())`; "
        "`jnp.dtype(name).itemsize` is the bytes of one number, for bfloat16 as well. Divide "
        "at the end, unless the bytes are 0.",
    ),
)


def right_cost(subscripts, shapes, dtype, result_dtype):
    sizes = {}
    for letters, shape in zip(subscripts.split("->")[0].split(","), shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(letter)
    flops = 2 * math.prod(sizes.values())
    read = sum(map(math.prod, shapes)) * jnp.dtype(dtype).itemsize
    out = math.prod(sizes[letter] for letter in subscripts.split("->")[1])
    return flops, read, out * jnp.dtype(result_dtype).itemsize


def draw_shapes(t, subscripts, low=2, high=40):
    sizes = {x: int(t.rng.integers(low, high)) for x in "BTSDFNHKG"}
    return tuple(tuple(sizes[x] for x in side) for side in subscripts.split("->")[0].split(","))


def wrong_flops(got, want, subscripts, shapes):
    """What a wrong number of FLOPs has too many or too few of, for a message."""
    letters = "".join(subscripts.split("->")[0].split(","))
    for letter, size in dict(zip(letters, itertools.chain(*shapes), strict=True)).items():
        for factor, both in ((1, ""), (2, ", and an operation for two")):
            if got * factor * size == want != got:
                return f"; as if {letter} were no loop{both}"
            if got * factor == want * size != want * factor:
                return f"; as if {letter} were two loops{both}"
        if size and got == want - want // (2 * size) != want:
            return f"; a sum of {size} terms has {2 * size} FLOPs here, not {2 * size - 1}"
    return ""


def wrong_bytes(got, subscripts, shapes, dtype, result_dtype):
    """What a wrong number of bytes has too many or too few of, for a message."""
    _, read, written = right_cost(subscripts, shapes, dtype, result_dtype)
    item, result_item = jnp.dtype(dtype).itemsize, jnp.dtype(result_dtype).itemsize
    left, right = (math.prod(shape) * item for shape in shapes)
    if got * item == read + written and item == result_item > 1:
        return "; you count numbers, not bytes"
    if got == 8 * (read + written) > 0:
        return "; these are bits"
    if got == 8 * read + written:
        return "; the operands' are bits"
    for name, size in (("left operand", left), ("right operand", right), ("result", written)):
        if abs(got - read - written) == size > 0:
            return f"; too {'many' if got > read + written else 'few'} by the {name}'s"
    if got == read + written // result_item * item:
        return "; the result's numbers have the operands' bytes"
    if got == read // item * result_item + written:
        return "; the operands' numbers have the result's bytes"
    return ""


def cost_is(t, fn, subscripts, shapes, dtype, result_dtype, what):
    flops, *moved = right_cost(subscripts, shapes, dtype, result_dtype)
    moved = sum(moved)
    got = fn(subscripts, shapes, dtype, result_dtype)
    t.equal(len(got), 3, why="how many values are returned")
    # As text: an integer beyond 64 bits does not fit an array.
    about = wrong_flops(got[0], flops, subscripts, shapes)
    t.equal(str(operator.index(got[0])), str(flops), why=f"FLOPs of {what}{about}")
    about = wrong_bytes(got[1], subscripts, shapes, dtype, result_dtype)
    t.equal(str(operator.index(got[1])), str(moved), why=f"bytes of {what}{about}")
    kinds = [type(x).__name__ for x in got]
    t.equal(kinds, ["int", "int", "float"], why="the types of the three numbers")
    want = flops / moved if moved else 0.0
    t.close(float(got[2]), want, rtol=1e-9, why=f"FLOPs per byte of {what}")


@intensity.check("a matrix product in float32")
def _(fn, t):
    shapes = draw_shapes(t, "BD,DF->BF")
    cost_is(t, fn, "BD,DF->BF", shapes, "float32", "float32", f"BD,DF->BF of {shapes}")


@intensity.check("letters that both operands keep")
def _(fn, t):
    for subscripts in ("BTNH,BSNH->BNTS", "GBD,GDF->GBF", "BT,BT->BT"):
        shapes = draw_shapes(t, subscripts)
        cost_is(t, fn, subscripts, shapes, "float32", "float32", f"{subscripts} of {shapes}")


@intensity.check("bfloat16, int8, and a result of another dtype")
def _(fn, t):
    of_16, of_8 = ("bfloat16", "bfloat16"), ("float8_e4m3fn", "bfloat16")
    for dtype, result in (of_16, ("bfloat16", "float32"), ("int8", "int32"), of_8):
        shapes = draw_shapes(t, "BTD,DF->BTF")
        cost_is(t, fn, "BTD,DF->BTF", shapes, dtype, result, f"{dtype} to {result}, {shapes}")


@intensity.check("sizes of 1, vectors, and a number as the result")
def _(fn, t):
    n = int(t.rng.integers(3, 90))
    cases = (("BD,DF->BF", ((1, n), (n, 1))), ("D,D->", ((n,), (n,))), ("T,S->TS", ((n,), (1,))))
    for subscripts, shapes in cases:
        cost_is(t, fn, subscripts, shapes, "float32", "float32", f"{subscripts} of {shapes}")


@intensity.check("more FLOPs than 64 bits hold")
def _(fn, t):
    B, D, F = (int(t.rng.integers(2**21, 2**22)) for _ in range(3))
    cost_is(t, fn, "BD,DF->BF", ((B, D), (D, F)), "bfloat16", "bfloat16", f"B={B}, D={D}, F={F}")


@intensity.check("empty arrays")
def _(fn, t):
    n = int(t.rng.integers(3, 90))
    for shapes in (((0, n), (n, 5)), ((0, 0), (0, 0))):
        cost_is(t, fn, "BD,DF->BF", shapes, "float32", "float32", f"BD,DF->BF of {shapes}")


@intensity.check("a letter with two sizes is refused")
def _(fn, t):
    n = int(t.rng.integers(3, 90))
    args = ("BK,KF->BF", ((4, n), (n + 1, 5)), "float32", "float32")
    t.raises(ValueError, fn, *args, match=r"\bK\b", why=f"K is {n} and {n + 1}")


def with_total(flops, read, written):
    moved = read + written
    return flops, moved, flops / moved if moved else 0.0


@intensity.mutant(
    "You count one FLOP for a multiplication and its addition. They are two, here as on every data "
    "sheet."
)
def one_for_both(subscripts, shapes, dtype, result_dtype):
    flops, read, written = right_cost(subscripts, shapes, dtype, result_dtype)
    return with_total(flops // 2, read, written)


@intensity.mutant(
    "You count a letter twice that both operands and the result have. It is one loop: heads and "
    "batches multiply the work once. Take the product over the different letters."
)
def shared_letters_twice(subscripts, shapes, dtype, result_dtype):
    _, read, written = right_cost(subscripts, shapes, dtype, result_dtype)
    (left, right), result = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    summed = math.prod(
        size for x, size in zip(left, shapes[0], strict=True) if x in right and x not in result
    )
    return with_total(
        2 * math.prod(shapes[0]) * math.prod(shapes[1]) // max(summed, 1), read, written
    )


@intensity.mutant(
    "You multiply only the sizes of the result. A letter that both operands have and the result has not is "
    "a loop too."
)
def no_loop_for_the_sum(subscripts, shapes, dtype, result_dtype):
    _, read, written = right_cost(subscripts, shapes, dtype, result_dtype)
    return with_total(2 * (written // jnp.dtype(result_dtype).itemsize), read, written)


@intensity.mutant("You forget that the result is written: it is the third array that is moved.")
def nothing_written(subscripts, shapes, dtype, result_dtype):
    flops, read, _ = right_cost(subscripts, shapes, dtype, result_dtype)
    return with_total(flops, read, 0)


@intensity.mutant(
    "You read the size of a number off its dtype's name. `float8_e4m3fn` has 8 bits and more digits "
    "than that: ask `jnp.dtype(name).itemsize`."
)
def digits_of_the_name(subscripts, shapes, dtype, result_dtype):
    def bits(name):
        return int("".join(filter(str.isdigit, name))[:2])

    flops, read, written = right_cost(subscripts, shapes, "int8", "int8")
    return with_total(flops, read * bits(dtype) // 8, written * bits(result_dtype) // 8)


@intensity.mutant(
    "Your message quotes the subscripts, so whoever reads it still has to find the letter whose "
    "sizes differ. Name the letter."
)
def quotes_the_subscripts(subscripts, shapes, dtype, result_dtype):
    try:
        return with_total(*right_cost(subscripts, shapes, dtype, result_dtype))
    except ValueError:
        raise ValueError(f"two sizes in {subscripts}") from None


@intensity.mutant(
    "You use the operands' bytes per number for the result too. Products of 16-bit numbers are often "
    "returned in 32."
)
def one_dtype_for_all(subscripts, shapes, dtype, result_dtype):
    return with_total(*right_cost(subscripts, shapes, dtype, dtype))


@intensity.mutant(
    "You count four bytes for every number. `jnp.dtype(name).itemsize` says how many they are."
)
def always_four_bytes(subscripts, shapes, dtype, result_dtype):
    return with_total(*right_cost(subscripts, shapes, "float32", "float32"))


@intensity.mutant(
    "You multiply with NumPy's 64-bit integers, and they wrap around without a word. Use `math.prod` "
    "of Python ints."
)
def wraps_around(subscripts, shapes, dtype, result_dtype):
    flops, read, written = right_cost(subscripts, shapes, dtype, result_dtype)
    flops = (flops + 2**63) % 2**64 - 2**63
    return with_total(flops, read, written)


@intensity.mutant(
    "You divide by 0 bytes if every array is empty. Return 0.0 then: an empty product is on "
    "neither side of the ridge."
)
def divides_by_nothing(subscripts, shapes, dtype, result_dtype):
    flops, read, written = right_cost(subscripts, shapes, dtype, result_dtype)
    return flops, read + written, flops / (read + written)


@intensity.mutant(
    "You take the last size that a letter was given and never compare. A wrong shape then gives a "
    "wrong number without a word: raise a ValueError that names the letter."
)
def never_compares(subscripts, shapes, dtype, result_dtype):
    left, right = subscripts.split("->")[0].split(",")
    sizes = dict(zip(left, shapes[0], strict=True)) | dict(zip(right, shapes[1], strict=True))
    same = tuple(tuple(sizes[x] for x in side) for side in (left, right))
    return with_total(*right_cost(subscripts, same, dtype, result_dtype))


@intensity.mutant(
    "You add the sizes. Nested loops multiply: the FLOPs are 2 times the product of all sizes."
)
def sizes_added(subscripts, shapes, dtype, result_dtype):
    _, read, written = right_cost(subscripts, shapes, dtype, result_dtype)
    letters = "".join(subscripts.split("->")[0].split(","))
    sizes = dict(zip(letters, itertools.chain(*shapes), strict=True))
    return with_total(2 * sum(sizes.values()), read, written)


@intensity.mutant(
    "You multiply the sizes of both operands, so each letter that both have is counted twice. The loops "
    "are one for each *different* letter."
)
def every_size_twice(subscripts, shapes, dtype, result_dtype):
    _, read, written = right_cost(subscripts, shapes, dtype, result_dtype)
    return with_total(2 * math.prod(shapes[0]) * math.prod(shapes[1]), read, written)


@intensity.mutant(
    "You count the numbers that are moved, not their bytes. Multiply by the bytes of a number."
)
def numbers_moved(subscripts, shapes, dtype, result_dtype):
    flops, read, written = right_cost(subscripts, shapes, "int8", "int8")
    return with_total(flops, read, written)


@intensity.mutant(
    "You use the result's bytes per number for the operands too. Each has a dtype of its own."
)
def result_dtype_for_all(subscripts, shapes, dtype, result_dtype):
    return with_total(*right_cost(subscripts, shapes, result_dtype, result_dtype))


@intensity.mutant("Your intensity is upside down: it is FLOPs per byte, not bytes per FLOP.")
def bytes_per_flop(subscripts, shapes, dtype, result_dtype):
    flops, moved, _ = with_total(*right_cost(subscripts, shapes, dtype, result_dtype))
    return flops, moved, moved / flops if flops else 0.0


@intensity.mutant(
    "Your intensity is rounded to a whole number: `//` drops the fraction. Divide with `/`."
)
def whole_intensity(subscripts, shapes, dtype, result_dtype):
    flops, moved, _ = with_total(*right_cost(subscripts, shapes, dtype, result_dtype))
    return flops, moved, flops // moved if moved else 0.0


@intensity.mutant("You return the bytes first. The FLOPs come first, then the bytes.")
def bytes_first(subscripts, shapes, dtype, result_dtype):
    flops, moved, ratio = with_total(*right_cost(subscripts, shapes, dtype, result_dtype))
    return moved, flops, ratio


@intensity.mutant(
    "A letter with two sizes is not refused with a ValueError: another exception reaches the caller."
)
def another_exception(subscripts, shapes, dtype, result_dtype):
    try:
        return with_total(*right_cost(subscripts, shapes, dtype, result_dtype))
    except ValueError as error:
        raise AssertionError(str(error)) from None


@intensity.mutant("The second operand is never read in your count. Both are.")
def one_operand_read(subscripts, shapes, dtype, result_dtype):
    flops, _, written = right_cost(subscripts, shapes, dtype, result_dtype)
    return with_total(flops, math.prod(shapes[0]) * jnp.dtype(dtype).itemsize, written)


# ---------------------------------------------------------------------------- crossover_batch

crossover = Exercise(
    "03.crossover_batch",
    title="The smallest batch that is large enough",
    function="crossover_batch",
    minutes=20,
    points=10,
    forbid=("minitext.perf.roofline",),
    statement="""
A layer multiplies a batch `x_BD` by its weights `w_DF`. The weights are read once for the whole
batch, so a larger batch has a higher intensity. Write `crossover_batch(D, F, peak, bandwidth,
activation_bytes, weight_bytes)`: the smallest $B$ whose arithmetic takes **at least** as long as
its memory,

$$
\\frac{2BDF}{\\text{peak}} \\ge \\frac{B(D + F)\\,a + DF\\,w}{\\text{bandwidth}} ,
$$

where each number takes $a$ bytes in the input and in the result, and $w$ bytes in the weights.

- Some layers never get there, whatever the batch, because their input and result alone take longer
  than the arithmetic. Return `None` for these.
- The answer is exact, even for rates of $10^{14}$ FLOP/s and more. If a batch reaches the ridge
  exactly, return that batch and not the next one.
- $w$ may be 0.5 (four-bit weights), or 0 (weights that stay in the chip's own memory). The answer
  is at least 1. With $w = 0$ both times may be equal at every batch; then return 1.
""",
    hints=(
        "Bring every term with a B to one side. What does it mean if the coefficient of B "
        "isn't positive?",
        "$B\\,\\bigl(2DF \\cdot \\text{bandwidth} - \\text{peak} \\cdot a (D + F)\\bigr) \\ge "
        "\\text{peak} \\cdot DFw$. Divide, and round up; but a float has 53 bits, and these products "
        "have more.",
        "`fractions.Fraction(x)` is exact for ints and floats, and `math.ceil` of a Fraction is exact "
        "too. Treat $w = 0$ first: then batch 1 is enough, if any is.",
    ),
)


def right_batch(D, F, peak, bandwidth, a, w):
    peak, bandwidth, w = Fraction(peak), Fraction(bandwidth), Fraction(w)
    gain = 2 * D * F * bandwidth - peak * a * (D + F)
    if w == 0:
        return 1 if gain >= 0 else None
    return math.ceil(peak * w * D * F / gain) if gain > 0 else None


def draw_layer(t):
    D, F = (int(n) for n in t.rng.integers(3000, 9000, 2))
    peak, bandwidth = int(t.rng.integers(100, 450)), int(t.rng.integers(900, 4000))
    return D, F, peak * 10**12, bandwidth * 10**9


def batches_are(t, fn, cases):
    """Compares all answers at once: two mistakes may agree on one of them."""
    got, want = [fn(*args) for args in cases], [right_batch(*args) for args in cases]
    wrong = [args for args, g, w in zip(cases, got, want, strict=True) if g != w]
    why = ""
    if wrong:
        why = f"crossover_batch{wrong[0]}{at_that_batch(wrong[0], got[cases.index(wrong[0])])}"
    t.equal(got, want, why=why)


def at_that_batch(args, B):
    """The two times at a batch, for a message."""
    D, F, peak, bandwidth, a, w = args
    if not isinstance(B, (int, float)) or not 0 < B < math.inf:
        return ""
    arithmetic, memory = 2 * B * D * F / peak, (B * (D + F) * a + D * F * w) / bandwidth
    return f"; at {B} the arithmetic takes {arithmetic:.4g} s and the memory {memory:.4g} s"


@crossover.check("layers in bfloat16 on chips like yours")
def _(fn, t):
    batches_are(t, fn, [(*draw_layer(t), 2, 2) for _ in range(16)])


@crossover.check("weights of one byte, and of a half")
def _(fn, t):
    batches_are(t, fn, [(*draw_layer(t), a, w) for a, w in ((2, 1), (4, 1), (2, 0.5))])


@crossover.check("inputs and results of one byte, and of four")
def _(fn, t):
    chip = (4096, 4096, 200 * 10**12, 10**12)
    batches_are(t, fn, [(*chip, a, w) for a, w in ((1, 1), (4, 4), (4, 2), (1, 2))])


@crossover.check("peak and bandwidth as floats")
def _(fn, t):
    D, F, peak, bandwidth = draw_layer(t)
    args = (D, F, float(peak), float(bandwidth), 2, 2)
    got = fn(*args)
    t.equal(got, right_batch(*args), why=f"crossover_batch{args}")
    t.equal(type(got).__name__, "int", why="the type of the answer")


def exact_layer(t, size, speed):
    """A layer and a chip whose two times are equal at a batch: (B, arguments)."""
    D, F, B = (int(n) for n in t.rng.integers(*size, 3))
    k = int(t.rng.integers(*speed))
    bandwidth, peak = k * (B * (D + F) * 2 + D * F * 2), 2 * B * D * F * k
    return B, (D, F, peak, bandwidth, 2, 2)


@crossover.check("a batch that reaches the ridge exactly")
def _(fn, t):
    B, args = exact_layer(t, (10, 90), (2, 9))
    t.equal(fn(*args), B, why=f"crossover_batch{args}, both times are equal at {B}")


@crossover.check("and so at the sizes of real chips")
def _(fn, t):
    for _ in range(40):
        B, args = exact_layer(t, (1500, 9000), (2000, 9000))
        t.equal(fn(*args), B, why=f"crossover_batch{args}, both times are equal at {B}")


@crossover.check("and so with peak and bandwidth as floats")
def _(fn, t):
    for _ in range(40):
        B, (D, F, peak, bandwidth, *rest) = exact_layer(t, (1500, 9000), (2000, 4500))
        # Both are below 2^53, so nothing is rounded here.
        args = (D, F, float(peak), float(bandwidth), *rest)
        t.equal(fn(*args), B, why=f"crossover_batch{args}, both times are equal at {B}")


@crossover.check("a peak that is higher by one")
def _(fn, t):
    for _ in range(40):
        # A whole pod's peak: one more is less than a float's last bit.
        B, (D, F, peak, *rest) = exact_layer(t, (1500, 9000), (200_000, 900_000))
        args = (D, F, peak + 1, *rest)
        t.equal(fn(*args), B + 1, why=f"crossover_batch{args}, at {B} memory takes a little longer")


@crossover.check("layers that never get there")
def _(fn, t):
    for D, F in ((1, 4096), (64, 64), (int(t.rng.integers(2, 30)), int(t.rng.integers(2, 30)))):
        args = (D, F, 459 * 10**12, 2765 * 10**9, 2, 2)
        t.equal(fn(*args), None, why=f"crossover_batch{args}")
    # 2 D F bandwidth equals peak a (D + F): every larger batch comes closer and none arrives.
    n = int(t.rng.integers(100, 900))
    t.equal(fn(n, n, n * 10**9, 2 * 10**9, 2, 2), None, why="only an infinite batch would do")


@crossover.check("weights that need not be read")
def _(fn, t):
    D, F, peak, bandwidth = draw_layer(t)
    t.equal(fn(D, F, peak, bandwidth, 2, 0), 1, why="w = 0")
    t.equal(fn(8, 8, peak, bandwidth, 2, 0), None, why="w = 0, D = F = 8")


@crossover.check("weights that need not be read, and equal times")
def _(fn, t):
    F = draw_layer(t)[1]
    for a in (2, 4):
        args = (F, F, F * 10**9, a * 10**9, a, 0)
        t.equal(fn(*args), 1, why=f"crossover_batch{args}, both times are equal at every batch")


@crossover.mutant(
    "You divide the ridge point by the intensity of a very large layer, peak / bandwidth times w / 2. "
    "It leaves out the input and the result, which grow with the batch."
)
def rule_of_thumb(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    return max(1, math.ceil(Fraction(peak) * Fraction(weight_bytes) / 2 / Fraction(bandwidth)))


@crossover.mutant(
    "You round to the nearest batch, which may be one at which memory still takes longer. Round up."
)
def rounds_to_nearest(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    if weight_bytes == 0 or right_batch(D, F, peak, bandwidth, activation_bytes, 1) is None:
        return right_batch(D, F, peak, bandwidth, activation_bytes, weight_bytes)
    gain = 2 * D * F * Fraction(bandwidth) - Fraction(peak) * activation_bytes * (D + F)
    return round(Fraction(peak) * Fraction(weight_bytes) * D * F / gain)


@crossover.mutant(
    "You add 1 after dividing, or ask for strictly longer. A batch at which both times are equal is "
    "large enough: round up, and leave whole numbers alone."
)
def one_too_many(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    if weight_bytes == 0 or right_batch(D, F, peak, bandwidth, activation_bytes, 1) is None:
        return right_batch(D, F, peak, bandwidth, activation_bytes, weight_bytes)
    gain = 2 * D * F * Fraction(bandwidth) - Fraction(peak) * activation_bytes * (D + F)
    return math.floor(Fraction(peak) * Fraction(weight_bytes) * D * F / gain) + 1


@crossover.mutant(
    "You forget the result: B times F numbers are written, in addition to the B times D that "
    "are read."
)
def result_forgotten(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    gain = 2 * D * F * Fraction(bandwidth) - Fraction(peak) * activation_bytes * D
    if gain <= 0:
        return None
    return max(1, math.ceil(Fraction(peak) * Fraction(weight_bytes) * D * F / gain))


@crossover.mutant(
    "You use the same number of bytes for weights and activations. Weights are often stored in "
    "fewer bytes, which makes the crossover batch smaller."
)
def weights_like_activations(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    return right_batch(D, F, peak, bandwidth, activation_bytes, activation_bytes)


@crossover.mutant(
    "You count two bytes for every number of the input and the result. How many they are is an argument, "
    "`activation_bytes`."
)
def activations_of_two_bytes(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    return right_batch(D, F, peak, bandwidth, 2, weight_bytes)


@crossover.mutant(
    "You divide by a number that is not positive. If the input and the result alone take longer than "
    "the arithmetic, no batch will do: return None."
)
def always_divides(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    gain = 2 * D * F * Fraction(bandwidth) - Fraction(peak) * activation_bytes * (D + F)
    return max(1, math.ceil(Fraction(peak) * Fraction(weight_bytes) * D * F / gain))


@crossover.mutant(
    "You compute in floats. Their 53 bits round these products, and a quotient that should be a whole "
    "number comes out a little above it. Use integers or fractions.Fraction until the end."
)
def in_floats(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    gain = 2.0 * D * F * bandwidth - float(peak) * activation_bytes * (D + F)
    if weight_bytes == 0:
        return 1 if gain >= 0 else None
    return math.ceil(float(peak) * weight_bytes * D * F / gain) if gain > 0 else None


@crossover.mutant(
    "Your integers are exact only while `peak` and `bandwidth` are integers too. With floats Python goes on "
    "in floats: make all of them `fractions.Fraction` first."
)
def exact_for_integers_only(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    gain = 2 * D * F * bandwidth - peak * activation_bytes * (D + F)
    if weight_bytes == 0:
        return 1 if gain >= 0 else None
    return int(-(-peak * int(2 * weight_bytes) * D * F // (2 * gain))) if gain > 0 else None


@crossover.mutant(
    "You divide with `/`, and the quotient is a float: a value a little above a whole number is"
    " rounded to it before `math.ceil` sees it. Divide Fractions, or integers with `//`."
)
def divides_integers_into_a_float(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    gain = 2 * D * F * bandwidth - peak * activation_bytes * (D + F)
    if weight_bytes == 0:
        return 1 if gain >= 0 else None
    return math.ceil(peak * int(2 * weight_bytes) * D * F / (2 * gain)) if gain > 0 else None


@crossover.mutant(
    "You round the quotient before you round it up. That hides the float's error if both times "
    "are equal, but it also removes real differences. Compute exactly."
)
def rounds_before_rounding_up(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    gain = 2.0 * D * F * bandwidth - float(peak) * activation_bytes * (D + F)
    if weight_bytes == 0:
        return 1 if gain >= 0 else None
    best = float(peak) * weight_bytes * D * F / gain if gain > 0 else math.nan
    return math.ceil(round(best, 6)) if gain > 0 else None


@crossover.mutant(
    "Where the weights need not be read, both times may be equal at every batch. You return None, but "
    "equal is enough: the first batch is 1."
)
def strictly_longer_without_weights(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    gain = 2 * D * F * Fraction(bandwidth) - Fraction(peak) * activation_bytes * (D + F)
    if weight_bytes == 0 and gain == 0:
        return None
    return right_batch(D, F, peak, bandwidth, activation_bytes, weight_bytes)


@crossover.mutant(
    "You return 0 if the weights need not be read. A batch has at least one row, and whether "
    "one is enough depends on the input and the result."
)
def empty_batch(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    return (
        0
        if weight_bytes == 0
        else right_batch(D, F, peak, bandwidth, activation_bytes, weight_bytes)
    )


def with_gain(gain):
    """A right answer but for the two sides of the inequality."""

    def answer(D, F, peak, bandwidth, activation_bytes, weight_bytes):
        peak, bandwidth = Fraction(peak), Fraction(bandwidth)
        a, w = activation_bytes, Fraction(weight_bytes)
        more = gain(D, F, peak, bandwidth, a)
        if w == 0:
            return 1 if more >= 0 else None
        return math.ceil(peak * w * D * F / more) if more > 0 else None

    return answer


def wrong_gain(name, hint, gain):
    fn = with_gain(gain)
    fn.__name__ = name
    crossover.mutant(hint)(fn)


wrong_gain(
    "one_flop_for_two",
    "You count one FLOP for a multiplication and its addition. A product has 2 B D F.",
    lambda D, F, peak, bandwidth, a: D * F * bandwidth - peak * a * (D + F),
)
wrong_gain(
    "square_of_activations",
    "You count D times F numbers for each row of the batch. A row has D numbers going in and F coming out: "
    "D + F.",
    lambda D, F, peak, bandwidth, a: 2 * D * F * bandwidth - peak * a * D * F,
)
wrong_gain(
    "input_forgotten",
    "You forget the input: B times D numbers are read, in addition to the B times F that are written.",
    lambda D, F, peak, bandwidth, a: 2 * D * F * bandwidth - peak * a * F,
)
wrong_gain(
    "activations_added_to_the_gain",
    "The bytes of the input and the result have the wrong sign. Brought to the other side of the "
    "inequality, they are subtracted.",
    lambda D, F, peak, bandwidth, a: 2 * D * F * bandwidth + peak * a * (D + F),
)


@crossover.mutant(
    "You round down. At that batch memory still takes longer; the next whole number is the first that is "
    "large enough."
)
def rounds_down(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    gain = 2 * D * F * Fraction(bandwidth) - Fraction(peak) * activation_bytes * (D + F)
    if weight_bytes == 0:
        return 1 if gain >= 0 else None
    needed = Fraction(peak) * Fraction(weight_bytes) * D * F
    return max(1, math.floor(needed / gain)) if gain > 0 else None


@crossover.mutant(
    "For a layer that never gets there you return a number, such as infinity or -1. Return None."
)
def infinity(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    found = right_batch(D, F, peak, bandwidth, activation_bytes, weight_bytes)
    return math.inf if found is None else found


@crossover.mutant(
    "You return None whenever the weights need not be read. Then one row is enough, if any batch is."
)
def none_without_weights(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    if weight_bytes == 0:
        return None
    return right_batch(D, F, peak, bandwidth, activation_bytes, weight_bytes)


@crossover.mutant(
    "Where the coefficient of B isn't positive, you still divide by it, or return 1. More batch never helps "
    "there: return None."
)
def divides_by_a_negative_gain(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    right = with_gain(lambda D, F, p, b, a: 2 * D * F * b - p * a * (D + F))
    found = right(D, F, peak, bandwidth, activation_bytes, weight_bytes)
    return 1 if found is None else found


@crossover.mutant("Your weights have whole bytes. They may have half a byte each: don't round.")
def whole_bytes(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    right = with_gain(lambda D, F, p, b, a: 2 * D * F * b - p * a * (D + F))
    return right(D, F, peak, bandwidth, activation_bytes, int(weight_bytes))


@crossover.mutant("You return a float, or a Fraction. The batch is a Python int.")
def as_a_float(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    found = right_batch(D, F, peak, bandwidth, activation_bytes, weight_bytes)
    return None if found is None else float(found)


# ----------------------------------------------------------------------------------- classify

classify = Exercise(
    "03.classify",
    title="What does each operation wait for?",
    function="predict_time",
    minutes=20,
    points=10,
    forbid=("minitext.perf.roofline",),
    statement="""
Write `predict_time(ops, peaks, bandwidth)`, the roofline of a whole program. It returns `(limits,
seconds, memory_share)`.

- A product takes either the time of its FLOPs at the peak of its dtype or the time of its bytes at
  the bandwidth, whichever is longer. A dtype that isn't in `peaks` counts as float32.
- Any other operation takes the time of its bytes, because the matrix unit doesn't do elementwise
  arithmetic.
- `limits` has an entry for each operation in order: `"compute"` if its arithmetic takes longer than
  its memory, and `"memory"` otherwise, including when both are equal.
- Operations follow one another, so `seconds` is the sum over all runs of all operations.
- `memory_share` is the fraction of `seconds` taken by operations whose limit is `"memory"`. A
  program that takes no time has a share of 0.0.
""",
    hints=(
        "The roofline holds for one operation at a time. Two operations, one of each kind, "
        "don't overlap: the memory is idle during the first and the arithmetic during the "
        "second.",
        "For each operation compute two times, one for arithmetic and one for memory. "
        "Arithmetic is 0 unless the operation is a product. Take the larger time, then "
        "multiply by `runs`.",
        "`arithmetic = op['flops'] / peaks.get(op['dtype'], peaks['float32']) if "
        "op['product'] else 0.0`. Keep one sum for each limit. The share is the memory sum "
        "over the total, if the total isn't 0.",
    ),
)


def right_times(op, peaks, bandwidth):
    peak = peaks.get(op["dtype"], peaks["float32"])
    return (op["flops"] / peak if op["product"] else 0.0), op["bytes"] / bandwidth


def right_prediction(ops, peaks, bandwidth, times=right_times):
    limits, seconds = [], {"compute": 0.0, "memory": 0.0}
    for op in ops:
        arithmetic, memory = times(op, peaks, bandwidth)
        limits.append("compute" if arithmetic > memory else "memory")
        seconds[limits[-1]] += op["runs"] * max(arithmetic, memory)
    total = sum(seconds.values())
    return limits, total, seconds["memory"] / total if total else 0.0


def draw_machine(t):
    peak, bandwidth = float(t.rng.uniform(1e11, 9e11)), float(t.rng.uniform(2e10, 9e10))
    return {"float32": peak, "bfloat16": 3 * peak}, bandwidth


def draw_ops(t, peaks, bandwidth, count, dtypes=("float32",), product=True, runs=1):
    """Operations on both sides of the ridge, in turns."""
    ops = []
    for i in range(count):
        dtype = str(t.rng.choice(dtypes))
        size = float(t.rng.uniform(1e6, 9e6))
        ridge = peaks.get(dtype, peaks["float32"]) / bandwidth
        far = float(t.rng.uniform(1.5, 2.5))
        flops = size * ridge * (far if i % 2 else 1 / far)
        many = runs if isinstance(runs, int) else int(t.rng.integers(*runs))
        ops.append(
            {"flops": flops, "bytes": size, "runs": many, "dtype": dtype, "product": product}
        )
    return ops


def prediction_is(t, fn, ops, peaks, bandwidth):
    limits, seconds, share = right_prediction(ops, peaks, bandwidth)
    got = fn(ops, peaks, bandwidth)
    t.equal(len(got), 3, why="how many values are returned")
    t.equal(list(got[0]), limits, why="what they wait for")
    t.close(float(got[1]), seconds, rtol=1e-9, atol=0, why="seconds")
    t.close(float(got[2]), share, rtol=1e-9, atol=1e-12, why="the share of memory")


@classify.check("one product on each side of the ridge")
def _(fn, t):
    peaks, bandwidth = draw_machine(t)
    for op in draw_ops(t, peaks, bandwidth, 2):
        limits, seconds, _ = right_prediction([op], peaks, bandwidth)
        got = fn([op], peaks, bandwidth)
        t.equal(len(got), 3, why="how many values are returned")
        arithmetic, memory = right_times(op, peaks, bandwidth)
        times = f"its arithmetic takes {arithmetic:.4g} s and its memory {memory:.4g} s"
        t.equal(list(got[0]), limits, why=f"what it waits for; {times}")
        t.close(float(got[1]), seconds, rtol=1e-9, atol=0, why=f"seconds; {times}")


@classify.check("the share of one product on each side")
def _(fn, t):
    peaks, bandwidth = draw_machine(t)
    for op in draw_ops(t, peaks, bandwidth, 2)[::-1]:
        prediction_is(t, fn, [op], peaks, bandwidth)


@classify.check("several products, one after another")
def _(fn, t):
    peaks, bandwidth = draw_machine(t)
    prediction_is(t, fn, draw_ops(t, peaks, bandwidth, 5), peaks, bandwidth)


@classify.check("products that run many times, or never")
def _(fn, t):
    peaks, bandwidth = draw_machine(t)
    ops = draw_ops(t, peaks, bandwidth, 4, runs=(2, 40))
    ops[2]["runs"] = 0
    prediction_is(t, fn, ops, peaks, bandwidth)


@classify.check("elementwise operations among them")
def _(fn, t):
    peaks, bandwidth = draw_machine(t)
    ops = draw_ops(t, peaks, bandwidth, 3) + draw_ops(t, peaks, bandwidth, 4, product=False)
    prediction_is(t, fn, ops, peaks, bandwidth)


@classify.check("a peak for each dtype")
def _(fn, t):
    peaks, bandwidth = draw_machine(t)
    ops = draw_ops(t, peaks, bandwidth, 6, dtypes=("bfloat16",))
    prediction_is(t, fn, ops + draw_ops(t, peaks, bandwidth, 2), peaks, bandwidth)


@classify.check("a dtype that has no peak of its own")
def _(fn, t):
    peaks, bandwidth = draw_machine(t)
    prediction_is(t, fn, draw_ops(t, peaks, bandwidth, 3, dtypes=("float16",)), peaks, bandwidth)


@classify.check("a product exactly at the ridge")
def _(fn, t):
    n = int(t.rng.integers(3, 90))
    op = {"flops": 8.0 * n, "bytes": 1.0 * n, "runs": 2, "dtype": "float32", "product": True}
    prediction_is(t, fn, [op], {"float32": 2.0**40}, 2.0**37)


@classify.check("nothing to do")
def _(fn, t):
    peaks, bandwidth = draw_machine(t)
    prediction_is(t, fn, [], peaks, bandwidth)
    nothing = {"flops": 0.0, "bytes": 0.0, "runs": 3, "dtype": "float32", "product": True}
    prediction_is(t, fn, [nothing], peaks, bandwidth)


@classify.mutant(
    "You add the time of the arithmetic to that of the memory. The two go on at once: an operation "
    "takes the longer of them."
)
def adds_both(ops, peaks, bandwidth):
    limits, _, _ = right_prediction(ops, peaks, bandwidth)
    seconds = {"compute": 0.0, "memory": 0.0}
    for op, limit in zip(ops, limits, strict=True):
        seconds[limit] += op["runs"] * sum(right_times(op, peaks, bandwidth))
    total = sum(seconds.values())
    return limits, total, seconds["memory"] / total if total else 0.0


@classify.mutant(
    "You put all operations into one: the larger of all the arithmetic and all the memory. That would "
    "need the memory of one operation to be busy during the arithmetic of another. Take the larger "
    "for each, then add."
)
def one_roof_for_all(ops, peaks, bandwidth):
    limits, _, share = right_prediction(ops, peaks, bandwidth)
    times = [[op["runs"] * x for x in right_times(op, peaks, bandwidth)] for op in ops]
    return limits, max((sum(side) for side in zip(*times, strict=True)), default=0.0), share


@classify.mutant(
    "You divide elementwise FLOPs by the peak of the matrix unit, which does not do them. Only "
    "products have a time of arithmetic here."
)
def all_are_products(ops, peaks, bandwidth):
    return right_prediction([op | {"product": True} for op in ops], peaks, bandwidth)


@classify.mutant(
    "You count each operation once. `flops` and `bytes` are of one run: multiply by `runs`."
)
def runs_ignored(ops, peaks, bandwidth):
    return right_prediction([op | {"runs": 1} for op in ops], peaks, bandwidth)


@classify.mutant(
    "You use float32's peak for every dtype. Matrix units multiply 16-bit numbers faster, so "
    "their ridge is further to the right."
)
def one_peak(ops, peaks, bandwidth):
    return right_prediction(ops, {"float32": peaks["float32"]}, bandwidth)


@classify.mutant(
    "You look the dtype up without a way out, and one that `peaks` does not have is a KeyError. It "
    "counts as float32."
)
def no_way_out(ops, peaks, bandwidth):
    known = {op["dtype"]: peaks[op["dtype"]] for op in ops if op["product"]}
    return right_prediction(ops, known | peaks, bandwidth)


@classify.mutant(
    "Where both times are equal you say compute. Exactly at the ridge it is memory: compute must take "
    "longer."
)
def compute_at_the_ridge(ops, peaks, bandwidth):
    limits, total, _ = right_prediction(ops, peaks, bandwidth)
    both = [right_times(op, peaks, bandwidth) for op in ops]
    limits = ["compute" if a >= m and a else "memory" for a, m in both]
    memory = sum(
        op["runs"] * max(pair)
        for op, pair, limit in zip(ops, both, limits, strict=True)
        if limit == "memory"
    )
    return limits, total, memory / total if total else 0.0


@classify.mutant(
    "Your share counts operations. One long product may outweigh a hundred short sums: divide seconds "
    "by seconds."
)
def share_of_operations(ops, peaks, bandwidth):
    limits, total, _ = right_prediction(ops, peaks, bandwidth)
    return limits, total, limits.count("memory") / len(limits) if total else 0.0


@classify.mutant(
    "You add memory time of products that wait for arithmetic. The share is the whole time of those that "
    "wait for memory, over `seconds`."
)
def share_of_all_memory_time(ops, peaks, bandwidth):
    limits, total, _ = right_prediction(ops, peaks, bandwidth)
    memory = sum(op["runs"] * op["bytes"] / bandwidth for op in ops)
    return limits, total, memory / total if total else 0.0


@classify.mutant(
    "You divide by a total of 0 if there is nothing to do. A program that takes no time has a "
    "share of 0.0."
)
def divides_by_no_time(ops, peaks, bandwidth):
    limits, total, _ = right_prediction(ops, peaks, bandwidth)
    seconds = sum(
        op["runs"] * op["bytes"] / bandwidth
        for op, limit in zip(ops, limits, strict=True)
        if limit == "memory"
    )
    return limits, total, seconds / total


@classify.mutant(
    "You take the shorter of the two times. The operation is done when *both* are: take the longer."
)
def shorter_time(ops, peaks, bandwidth):
    limits, _, _ = right_prediction(ops, peaks, bandwidth)
    seconds = {"compute": 0.0, "memory": 0.0}
    for op, limit in zip(ops, limits, strict=True):
        seconds[limit] += op["runs"] * min(right_times(op, peaks, bandwidth))
    total = sum(seconds.values())
    return limits, total, seconds["memory"] / total if total else 0.0


@classify.mutant(
    "Your two labels are the wrong way round. An operation waits for what takes longer."
)
def labels_turned_round(ops, peaks, bandwidth):
    limits, total, share = right_prediction(ops, peaks, bandwidth)
    other = {"compute": "memory", "memory": "compute"}
    return [other[limit] for limit in limits], total, share


@classify.mutant("Your share is that of the arithmetic. The share of memory is asked for.")
def share_of_compute(ops, peaks, bandwidth):
    limits, total, share = right_prediction(ops, peaks, bandwidth)
    return limits, total, 1 - share if total else 0.0


@classify.mutant("Your share is in per cent. It is asked for as a number from 0 to 1.")
def per_cent(ops, peaks, bandwidth):
    limits, total, share = right_prediction(ops, peaks, bandwidth)
    return limits, total, 100 * share


@classify.mutant(
    "You return the seconds that wait for memory. The share is these over all seconds."
)
def seconds_of_memory(ops, peaks, bandwidth):
    limits, total, share = right_prediction(ops, peaks, bandwidth)
    return limits, total, share * total


@classify.mutant(
    "You multiply one of the two times by `runs` before you compare them. Compare times of one run, then "
    "multiply the longer."
)
def runs_on_one_side(ops, peaks, bandwidth):
    def times(op, peaks, bandwidth):
        arithmetic, memory = right_times(op, peaks, bandwidth)
        return op["runs"] * arithmetic, memory

    limits, seconds = [], {"compute": 0.0, "memory": 0.0}
    for op in ops:
        arithmetic, memory = times(op, peaks, bandwidth)
        limits.append("compute" if arithmetic > memory else "memory")
        seconds[limits[-1]] += max(arithmetic, op["runs"] * memory)
    total = sum(seconds.values())
    return limits, total, seconds["memory"] / total if total else 0.0


@classify.mutant("A dtype that `peaks` doesn't have gets a peak other than float32's.")
def another_way_out(ops, peaks, bandwidth):
    known = {op["dtype"]: max(peaks.values()) for op in ops}
    return right_prediction(ops, known | peaks, bandwidth)


@classify.mutant(
    "You return the seconds first. The list of limits comes first, then the seconds, then the share."
)
def seconds_first(ops, peaks, bandwidth):
    limits, total, share = right_prediction(ops, peaks, bandwidth)
    return total, limits, share


# --------------------------------------------------------------------------------- count_scan

count_scan = Exercise(
    "03.count_scan",
    title="Count what a loop really does",
    function="matmul_flops",
    minutes=25,
    points=15,
    forbid=("minitext.perf.cost", "minitext.perf.roofline", "jax.experimental.roofline"),
    statement="""
Write `matmul_flops(closed_jaxpr)`. It takes the result of `jax.make_jaxpr(fn)(*args)` and returns
the FLOPs of every `dot_general` that the program runs, as an exact Python integer.

- Each number in the result of a `dot_general` is a sum, and each term of that sum counts as 2
  FLOPs. `eqn.params["dimension_numbers"]` says which dimensions are summed. If none are, the sum
  has one term; if one of them is empty, it has none.
- The body of a `scan` counts `eqn.params["length"]` times, even in a scan within a scan.
- Look inside every equation that calls another jaxpr: `jit`, `checkpoint`, functions with
  `custom_jvp` or `custom_vjp`, and any of these nested in one another. Some parameters hold a
  jaxpr, and some hold a closed one with the jaxpr as its `.jaxpr`.
- Only one branch of a `cond` runs. Count the one with the most FLOPs.
- Everything else counts as zero. There is no `while` in the checks.
""",
    hints=(
        "Print `jax.make_jaxpr(jax.jit(jnp.matmul))(a, b)`. Where is the `dot_general`, and "
        "how would you get to it from the outermost `eqns`?",
        "Write an inner function that takes a jaxpr and returns a number, and calls itself for every "
        "jaxpr that it finds in `eqn.params`. Only two primitives need a rule of their own: `scan` "
        "multiplies, `cond` takes the largest of `params['branches']`.",
        "For the product: `(contracted, _), _ = eqn.params['dimension_numbers']`; its FLOPs are `2 * "
        "math.prod(eqn.outvars[0].aval.shape)` times the sizes of these dimensions in "
        "`eqn.invars[0].aval.shape`. Other jaxprs are in `params['jaxpr']` or "
        "`params['call_jaxpr']`; `getattr(j, 'jaxpr', j)` opens a closed one.",
    ),
)


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def sizes(t, count, low=2, high=30):
    return (int(n) for n in t.rng.integers(low, high, count))


def counts(t, fn, want, why, f, *args, mistakes=None):
    got = fn(jax.make_jaxpr(f)(*args))
    about = ""
    if got and want:
        about = f"; that is {Fraction(operator.index(got), want)} of it"
    wrong = {text: str(flops) for text, flops in (mistakes or {}).items()}
    t.equal(str(operator.index(got)), str(want), why=f"FLOPs of {why}{about}", mistakes=wrong)
    t.equal(type(got).__name__, "int", why="the type of the answer")


@count_scan.check("plain products")
def _(fn, t):
    B, D, F = sizes(t, 3)
    counts(
        t,
        fn,
        2 * B * D * F,
        f"x_BD @ w_DF, B={B}, D={D}, F={F}",
        jnp.matmul,
        spec(B, D),
        spec(D, F),
        mistakes={
            "you look up the contracted axes of one operand in the other": 2 * B * F * B,
            "you multiply the sizes of both operands": 2 * B * D * D * F,
            "you count only the entries of the result": 2 * B * F,
        },
    )
    two = lambda x, w: jnp.tanh(x @ w) @ w.T  # noqa: E731
    counts(t, fn, 4 * B * D * F, "two products", two, spec(B, D), spec(D, F))
    counts(t, fn, 0, "no product at all", lambda x: jnp.exp(x) * x + 1, spec(B, D))


@count_scan.check("einsums with batch dimensions, several sums, and sizes of 1 and 0")
def _(fn, t):
    B, T, S, N, H = sizes(t, 5)
    for dtype in (jnp.float32, jnp.bfloat16):
        args = spec(B, T, N, H, dtype=dtype), spec(B, S, N, H, dtype=dtype)
        scores = lambda q, k: jnp.einsum("BTNH,BSNH->BNTS", q, k)  # noqa: E731
        counts(t, fn, 2 * B * T * S * N * H, "BTNH,BSNH->BNTS", scores, *args)
    out = lambda y, w: jnp.einsum("BTNH,NHS->BTS", y, w)  # noqa: E731
    wrong = {
        "you add the sizes of two contracted dimensions: multiply them": 2 * B * T * S * (N + H),
        "you count one contracted dimension of two": 2 * B * T * S * N,
        "you count one contracted dimension of the two": 2 * B * T * S * H,
    }
    args = spec(B, T, N, H), spec(N, H, S)
    counts(t, fn, 2 * B * T * S * N * H, "BTNH,NHS->BTS", out, *args, mistakes=wrong)
    counts(t, fn, 2 * T, "a row by a column", jnp.matmul, spec(1, T), spec(T, 1))
    counts(t, fn, 0, "an empty batch", jnp.matmul, spec(0, T), spec(T, S))
    counts(t, fn, 0, "a sum of no terms", jnp.matmul, spec(S, 0), spec(0, T))
    outer = lambda x, y: jax.lax.dot_general(x, y, (((), ()), ((), ())))  # noqa: E731
    counts(t, fn, 2 * S * T, "an outer product", outer, spec(S), spec(T))


@count_scan.check("inside jit")
def _(fn, t):
    B, D = sizes(t, 2)
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w))
    outer = jax.jit(lambda x, w: inner(inner(x, w), w) @ w)
    counts(t, fn, 6 * B * D * D, "jit within jit", outer, spec(B, D), spec(D, D))


def stack(x, w_LDD):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w_LDD)[0]


@count_scan.check("a scan")
def _(fn, t):
    B, D, L = sizes(t, 3)
    wrong = {"you add the length to the body's FLOPs: multiply": L + 2 * B * D * D}
    args = spec(B, D), spec(L, D, D)
    counts(t, fn, L * 2 * B * D * D, f"a scan of {L} layers", stack, *args, mistakes=wrong)
    both = lambda x, w: stack(x, w) @ w[0]  # noqa: E731
    counts(t, fn, (L + 1) * 2 * B * D * D, f"{L} layers and one", both, spec(B, D), spec(L, D, D))
    counts(t, fn, 0, "a scan of no layers", stack, spec(B, D), spec(0, D, D))


@count_scan.check("a scan in a scan")
def _(fn, t):
    B, D, L, M = sizes(t, 4)
    deep = lambda x, w: jax.lax.scan(lambda x, w: (stack(x, w), None), x, w)[0]  # noqa: E731
    counts(
        t, fn, L * M * 2 * B * D * D, f"{L} times {M} layers", deep, spec(B, D), spec(L, M, D, D)
    )


@count_scan.check("a branch")
def _(fn, t):
    B, D = sizes(t, 2)

    def branch(x, w, flag):
        return jax.lax.cond(flag, lambda x: x @ w, lambda x: (x @ w) @ w, x)

    args = (spec(B, D), spec(D, D), spec(dtype=jnp.bool_))
    counts(t, fn, 4 * B * D * D, "one product or two", branch, *args)
    other = lambda x, w, flag: branch(x, w, ~flag)  # noqa: E731
    turned = lambda x, w, flag: jax.lax.cond(flag, lambda x: (x @ w) @ w, lambda x: x @ w, x)  # noqa: E731
    for name, f in (("with the flag turned round", other), ("two products or one", turned)):
        counts(t, fn, 4 * B * D * D, name, f, *args)

    def three(x, w, n):
        return jax.lax.switch(n, [lambda x: x, lambda x: x @ w @ w @ w, lambda x: x @ w], x)

    args = (spec(B, D), spec(D, D), spec(dtype=jnp.int32))
    counts(t, fn, 6 * B * D * D, "none, three or one", three, *args)


@count_scan.check("functions with a rule of their own")
def _(fn, t):
    B, D = sizes(t, 2)

    @jax.custom_jvp
    def forward(x, w):
        return x @ w

    forward.defjvp(lambda primals, tangents: (forward(*primals), forward(*tangents)))

    @jax.custom_vjp
    def reverse(x, w):
        return x @ w

    reverse.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    args = spec(B, D), spec(D, D)
    counts(t, fn, 2 * B * D * D, "custom_jvp", lambda x, w: forward(x, w), *args)
    counts(t, fn, 2 * B * D * D, "custom_vjp", lambda x, w: reverse(x, w), *args)


@count_scan.check("the gradient of a scan that recomputes")
def _(fn, t):
    B, D, L = sizes(t, 3)

    def loss(x, w):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None))
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    # Two forward, the same two again, and four backward: a layer's gradient of x is needed below it.
    grad = jax.jit(jax.grad(loss, argnums=1))
    want = 8 * L * 2 * B * D * D
    counts(t, fn, want, f"the gradient of {L} layers", grad, spec(B, D), spec(L, D, D))


def right_flops(closed, length=True, inside=("jaxpr", "call_jaxpr"), pick=max, product=None):
    """The right count, but for what is passed."""

    def walk(jaxpr):
        total = 0
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name = eqn.primitive.name
            if name == "dot_general":
                total += (product or right_product)(eqn)
            elif name == "scan":
                total += (eqn.params["length"] if length else 1) * walk(eqn.params["jaxpr"])
            elif name == "cond":
                total += pick(walk(branch) for branch in eqn.params["branches"])
            else:
                total += sum(walk(eqn.params[key]) for key in inside if key in eqn.params)
        return total

    return walk(closed)


def right_product(eqn):
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


@count_scan.mutant(
    "You count the body of a scan once, as the compiler's cost analysis does. It runs "
    "`eqn.params['length']` times."
)
def body_once(closed_jaxpr):
    return right_flops(closed_jaxpr, length=False)


@count_scan.mutant(
    "You look at the outermost equations only. `jit` is an equation too, and its body is in "
    "`eqn.params['jaxpr']`."
)
def outermost_only(closed_jaxpr):
    return right_flops(closed_jaxpr, inside=())


@count_scan.mutant(
    "You multiply the sizes of both operands and divide by the summed sizes. Dimensions that "
    "both have and the result keeps, such as heads, then count twice. Begin with the result's "
    "shape."
)
def batch_twice(closed_jaxpr):
    def product(eqn):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left, right = (x.aval.shape for x in eqn.invars)
        terms = math.prod(left[axis] for axis in contracted)
        return 2 * math.prod(left) * math.prod(right) // max(terms, 1)

    return right_flops(closed_jaxpr, product=product)


@count_scan.mutant("You count one FLOP for a multiplication and its addition: they are two.")
def one_for_a_pair(closed_jaxpr):
    return right_flops(closed_jaxpr) // 2


@count_scan.mutant("You add the branches of a cond. Only one of them runs: take the largest.")
def both_branches(closed_jaxpr):
    return right_flops(closed_jaxpr, pick=sum)


@count_scan.mutant(
    "You never look into a cond: `params['branches']` is a tuple of jaxprs. Take the largest."
)
def closed_cond(closed_jaxpr):
    return right_flops(closed_jaxpr, pick=lambda branches: 0)


@count_scan.mutant(
    "You always take the same branch of a cond, the first, the last or the smallest. Any of them may "
    "run: take the one with the most FLOPs."
)
def first_branch(closed_jaxpr):
    return right_flops(closed_jaxpr, pick=lambda branches: next(iter(branches)))


@count_scan.mutant(
    "A sum over an empty dimension has no terms, and you count one. The product of the summed sizes is 1 "
    "only where no dimension is summed: `math.prod` gets both right."
)
def at_least_one_term(closed_jaxpr):
    def product(eqn):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        terms = math.prod(left[axis] for axis in contracted)
        return 2 * math.prod(eqn.outvars[0].aval.shape) * max(1, terms)

    return right_flops(closed_jaxpr, product=product)


@count_scan.mutant(
    "You look for parameters called `jaxpr`. Functions with a custom_jvp or custom_vjp keep theirs "
    "under `call_jaxpr`."
)
def one_name_only(closed_jaxpr):
    return right_flops(closed_jaxpr, inside=("jaxpr",))


@count_scan.mutant(
    "In a scan within a scan you count the inner length alone. Multiply on the way down, or return the "
    "inner count and multiply it outside."
)
def inner_length_only(closed_jaxpr):
    def walk(jaxpr, runs):
        total = 0
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive.name == "dot_general":
                total += runs * right_product(eqn)
            elif eqn.primitive.name == "cond":
                total += max(walk(branch, runs) for branch in eqn.params["branches"])
            else:
                runs_inside = eqn.params.get("length", runs)
                for key in ("jaxpr", "call_jaxpr"):
                    if key in eqn.params:
                        total += walk(eqn.params[key], runs_inside)
        return total

    return walk(closed_jaxpr, 1)


@count_scan.mutant(
    "You take the first contracted dimension and forget the others: `BTNH,NHS->BTS` sums over N and H. "
    "Multiply the sizes of all of them."
)
def first_sum_only(closed_jaxpr):
    def product(eqn):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * left[contracted[0]]

    return right_flops(closed_jaxpr, product=product)


@count_scan.mutant(
    "You look up the summed dimensions in the right operand's shape. The first list of "
    "`dimension_numbers` is the left one's."
)
def sums_of_the_right(closed_jaxpr):
    def product(eqn):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        right = eqn.invars[1].aval.shape
        terms = math.prod(right[axis % len(right)] for axis in contracted)
        return 2 * math.prod(eqn.outvars[0].aval.shape) * terms

    return right_flops(closed_jaxpr, product=product)


@count_scan.mutant(
    "You unpack `dimension_numbers` the wrong way round: its first pair has the summed dimensions, its "
    "second the batch dimensions."
)
def batch_for_summed(closed_jaxpr):
    def product(eqn):
        _, (batch, _) = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[axis] for axis in batch)

    return right_flops(closed_jaxpr, product=product)


@count_scan.mutant(
    "You multiply the left operand's size by the summed dimensions. Begin with the *result's* size: each of "
    "its numbers is a sum."
)
def size_of_the_left(closed_jaxpr):
    def product(eqn):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2 * math.prod(left) * math.prod(left[axis] for axis in contracted)

    return right_flops(closed_jaxpr, product=product)


@count_scan.mutant(
    "You count 2 for each number of the result, whatever the sum has. Multiply by the number of its terms."
)
def result_alone(closed_jaxpr):
    return right_flops(closed_jaxpr, product=lambda e: 2 * math.prod(e.outvars[0].aval.shape))


@count_scan.mutant("You never look into a scan. Its body is in `eqn.params['jaxpr']`.")
def closed_scan(closed_jaxpr):
    return right_flops(closed_jaxpr, length=False, inside=("jaxpr", "call_jaxpr")) and sum(
        right_product(eqn)
        for eqn in outside_scans(getattr(closed_jaxpr, "jaxpr", closed_jaxpr))
        if eqn.primitive.name == "dot_general"
    )


def outside_scans(jaxpr):
    """The equations of a jaxpr and of those it calls, but for the bodies of scans."""
    for eqn in jaxpr.eqns:
        yield eqn
        for key in ("jaxpr", "call_jaxpr"):
            if key in eqn.params and eqn.primitive.name != "scan":
                yield from outside_scans(getattr(eqn.params[key], "jaxpr", eqn.params[key]))


@count_scan.mutant(
    "You treat every inner jaxpr as a closed one, and ask it for its `.jaxpr`. Some parameters hold the "
    "jaxpr itself."
)
def all_are_closed(closed_jaxpr):
    def walk(jaxpr):
        total = 0
        for eqn in jaxpr.jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                total += right_product(eqn)
            elif eqn.primitive.name == "cond":
                total += max(map(walk, eqn.params["branches"]))
            else:
                times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
                inner = [eqn.params[k] for k in ("jaxpr", "call_jaxpr") if k in eqn.params]
                total += times * sum(map(walk, inner))
        return total

    return walk(closed_jaxpr)


@count_scan.mutant(
    "Your answer is a NumPy integer. Those have a largest value: use Python's `math.prod`."
)
def numpy_integer(closed_jaxpr):
    return np.int64(right_flops(closed_jaxpr))


# ---------------------------------------------------------------------------------------- cut

cut = Exercise(
    "03.cut",
    title="Cut a program into kernels",
    function="cut_program",
    minutes=40,
    points=20,
    statement="""
Fusion saves bytes, but a chip has only so much room for what stays out of memory. Suppose you write the kernels
of a chain of operations yourself, each for a stretch of the chain. Where do you cut?

Write `cut_program(ops, first, room, peak, bandwidth, launch)`. It returns `(seconds, lengths)`: the least time in which
the whole chain can run, and how many operations each kernel has, in order.

- A kernel runs one or more operations that follow one another. It reads the result of the operation before it (or the
  input of `first` bytes, if there is none) and the weights of all its operations, and writes the result of its last
  operation. Results inside it never go to memory.
- It has to hold what it reads and the results of *all* its operations at once, in at most `room` bytes. A kernel of one
  operation may be larger, because it can work on one part at a time.
- Its arithmetic overlaps with its memory, even that of different operations: it takes the longer of its FLOPs over
  `peak` and its bytes over `bandwidth`. Each kernel costs `launch` seconds more.
- Kernels run one after another. If several cuts take the least time, return any of them.
- Your function has at most a few seconds for a chain of 60 operations, which can be cut in $2^{59}$ ways. For
  an empty chain, return 0 seconds and no kernels.
""",
    hints=(
        "Try a chain of three operations on paper, with room for two. What decides whether the middle one goes with "
        "the first or with the last? Will a rule that looks only at neighbours always get it right?",
        "Suppose you know the least time for the first k operations, for every k below n. The last kernel of the first "
        "n begins somewhere. What is the least time for each of its beginnings?",
        "`best[0] = (0.0, [])`. For each `end` from 1, try every `begin` below it: if the operations from `begin` to "
        "`end` fit into the room, or there's only one, then `best[begin]` plus this kernel's time is a candidate for "
        "`best[end]`. Take the smallest.",
    ),
)  # fmt: skip


def read_by(chain, begin):
    return chain["ops"][begin - 1]["result"] if begin else chain["first"]


def room_of(chain, begin, end):
    """What a kernel of the operations from `begin` to `end` has to hold."""
    kernel = chain["ops"][begin:end]
    return read_by(chain, begin) + sum(op["weights"] + op["result"] for op in kernel)


def bytes_of(chain, begin, end):
    kernel = chain["ops"][begin:end]
    return read_by(chain, begin) + sum(op["weights"] for op in kernel) + kernel[-1]["result"]


def seconds_of(chain, begin, end):
    flops = sum(op["flops"] for op in chain["ops"][begin:end])
    busy = max(flops / chain["peak"], bytes_of(chain, begin, end) / chain["bandwidth"])
    return chain["launch"] + busy


def best_cut(chain, cost=seconds_of, held=room_of):
    """(least sum of costs, lengths); a kernel of several operations must fit."""
    best = [(0.0, [])]
    for end in range(1, len(chain["ops"]) + 1):
        found = []
        for begin in range(end):
            if end - begin == 1 or held(chain, begin, end) <= chain["room"]:
                before, lengths = best[begin]
                found.append((before + cost(chain, begin, end), [*lengths, end - begin]))
        best.append(min(found))
    return best[-1]


def time_of(chain, lengths):
    """The time of a cut."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return sum(seconds_of(chain, end - n, end) for n, end in zip(lengths, ends, strict=True))


def as_chain(ops, first, room, peak, bandwidth, launch):
    return {
        "ops": ops, "first": first, "room": room, "peak": peak, "bandwidth": bandwidth, "launch": launch,
    }  # fmt: skip


def filled_from_the_front(chain):
    lengths = []
    begin = 0
    while begin < len(chain["ops"]):
        end = begin + 1
        while end < len(chain["ops"]) and room_of(chain, begin, end + 1) <= chain["room"]:
            end += 1
        lengths.append(end - begin)
        begin = end
    return lengths


def merged_step_by_step(chain):
    """Merges the two neighbours that gain most, until none gain."""
    cuts = list(range(len(chain["ops"]) + 1))
    while True:
        gains = []
        for i in range(1, len(cuts) - 1):
            a, b, c = cuts[i - 1 : i + 2]
            if room_of(chain, a, c) <= chain["room"]:
                apart = seconds_of(chain, a, b) + seconds_of(chain, b, c)
                gains.append((apart - seconds_of(chain, a, c), -i))
        if not gains or max(gains)[0] <= 0:
            return [b - a for a, b in itertools.pairwise(cuts)]
        del cuts[-max(gains)[1]]


def fewest_kernels(chain):
    return best_cut(chain, cost=lambda *k: 1.0 + 1e-6 * seconds_of(*k))[1]


def fewest_bytes(chain):
    return best_cut(chain, cost=bytes_of)[1]


def no_launches(chain):
    return best_cut(chain, cost=lambda *k: seconds_of(*k) - chain["launch"])[1]


def draw_chain(t, count, launch=1.0, room=None):
    """A chain near the ridge; a kernel's launch costs about as much as an operation."""
    ops = []
    for _ in range(count):
        size, weights = float(t.rng.integers(10, 90)), float(t.rng.choice([0, 30, 60]))
        flops = float(t.rng.choice([2, 40, 150, 300]))
        ops.append({"flops": flops * 1e6, "weights": weights * 1e3, "result": size * 1e3})
    first = 1e3 * float(t.rng.integers(10, 90))
    room = 1e3 * float(t.rng.integers(220, 420)) if room is None else room
    launch = launch * 1e-6 * float(t.rng.uniform(0.5, 4))
    return as_chain(ops, first, room, 2e13, 2e10, launch)


def chains_where(t, wrong, count=9, **look):
    """Two chains in which a wrong rule takes longer than it need."""
    found = []
    for _ in range(3000):
        chain = draw_chain(t, count, **look)
        if time_of(chain, wrong(chain)) > 1.02 * best_cut(chain)[0]:
            found.append(chain)
        if len(found) == 2:
            return found
    raise AssertionError("no chain found")


def parts_of(chain):
    """The times of the kernels that a chain of one or two operations can have, for a message."""
    count = len(chain["ops"])
    kernels = [(i, j) for i in range(count) for j in range(i + 1, count + 1)] if count < 3 else []
    text = ""
    for begin, end in kernels:
        flops = sum(op["flops"] for op in chain["ops"][begin:end])
        moved = bytes_of(chain, begin, end)
        text += f"; a kernel of operations {begin} to {end - 1} has a launch of "
        text += f"{chain['launch']:.3g} s, {flops / chain['peak']:.3g} s of arithmetic and "
        text += f"{moved / chain['bandwidth']:.3g} s of memory"
    return text


def cut_is_best(t, fn, chains):
    """All times first, so that a mistake shows in several values at once."""
    got = [fn(*chain.values()) for chain in chains]
    for pair in got:
        t.equal(len(pair), 2, why="how many values are returned")
    want = [best_cut(chain)[0] for chain in chains]
    seconds = [float(pair[0]) for pair in got]
    off = [c for c, s, w in zip(chains, seconds, want, strict=True) if abs(s - w) > 1e-9 * w]
    why = f"seconds{parts_of(off[0])}" if off else "seconds"
    t.close(seconds, want, rtol=1e-9, atol=0, why=why)
    for chain, (seconds, lengths) in zip(chains, got, strict=True):
        lengths = [int(n) for n in lengths]
        t.equal(
            sum(lengths), len(chain["ops"]), why="how many operations the kernels have together"
        )
        t.true(min(lengths, default=1) > 0, "each kernel has at least one operation", lengths)
        begin = 0
        for n in lengths:
            fits = n == 1 or room_of(chain, begin, begin + n) <= chain["room"]
            t.true(fits, "a kernel of several operations does not fit into the room", lengths)
            begin += n
        t.close(
            time_of(chain, lengths), float(seconds), rtol=1e-9, atol=0, why="the time of this cut"
        )


@cut.check("a single operation")
def _(fn, t):
    cut_is_best(t, fn, [draw_chain(t, 1) for _ in range(3)])


@cut.check("two operations that fit into one kernel")
def _(fn, t):
    cut_is_best(t, fn, [draw_chain(t, 2, room=1e9) for _ in range(4)])


@cut.check("a chain that fits into one kernel")
def _(fn, t):
    cut_is_best(t, fn, [draw_chain(t, count, room=1e9) for count in (7, 7, 24)])


@cut.check("chains that do not fit")
def _(fn, t):
    cut_is_best(t, fn, [draw_chain(t, 9) for _ in range(6)])


@cut.check("where a full kernel leaves too much behind")
def _(fn, t):
    cut_is_best(t, fn, chains_where(t, filled_from_the_front))


@cut.check("where the best pair is not in the best cut")
def _(fn, t):
    cut_is_best(t, fn, chains_where(t, merged_step_by_step))


@cut.check("where one more kernel takes less time")
def _(fn, t):
    cut_is_best(t, fn, chains_where(t, fewest_kernels, launch=0.3))


@cut.check("where more bytes take less time")
def _(fn, t):
    cut_is_best(t, fn, chains_where(t, fewest_bytes, launch=2))


@cut.check("where a launch decides")
def _(fn, t):
    cut_is_best(t, fn, chains_where(t, no_launches, launch=8))


@cut.check("an operation larger than the room")
def _(fn, t):
    chains = [draw_chain(t, 6) for _ in range(2)]
    for chain in chains:
        chain["ops"][int(t.rng.integers(1, 5))]["weights"] = 2 * chain["room"]
    cut_is_best(t, fn, chains)


@cut.check("a kernel that fills the room exactly")
def _(fn, t):
    chains = [draw_chain(t, 2) for _ in range(3)]
    for chain in chains:
        chain["room"] = room_of(chain, 0, 2)
    cut_is_best(t, fn, chains)


@cut.check("a long chain")
def _(fn, t):
    cut_is_best(t, fn, [draw_chain(t, 60)])


@cut.check("an empty chain")
def _(fn, t):
    chain = draw_chain(t, 0)
    seconds, lengths = fn(*chain.values())
    t.close(float(seconds), 0.0, why="seconds")
    t.equal(list(lengths), [], why="the kernels' lengths")


def told(chain, lengths):
    return time_of(chain, lengths), lengths


@cut.mutant(
    "You give each operation a kernel of its own. Then every result goes to memory and back, and each kernel "
    "costs a launch. Where several fit together, they save both."
)
def each_alone(*args):
    chain = as_chain(*args)
    return told(chain, [1] * len(chain["ops"]))


@cut.mutant(
    "You put the whole chain into one kernel, whatever it has to hold. Several operations must fit into `room`."
)
def room_ignored(*args):
    chain = as_chain(*args)
    return best_cut(chain, held=lambda *k: 0.0)


@cut.mutant(
    "You fill each kernel from the front until nothing more fits. What is left may be cut at a large array, or need a "
    "kernel more. A cut further to the front can be the better one."
)
def fills_up(*args):
    chain = as_chain(*args)
    return told(chain, filled_from_the_front(chain))


@cut.mutant(
    "You merge the two neighbours that gain most, again and again. That merger may keep both from better partners, and "
    "nothing undoes it. Compare whole cuts."
)
def merges(*args):
    chain = as_chain(*args)
    return told(chain, merged_step_by_step(chain))


@cut.mutant("You count no launch. Each kernel costs `launch` seconds more, however short it is.")
def launch_ignored(*args):
    chain = as_chain(*args)
    return best_cut(chain, cost=lambda *k: seconds_of(*k) - chain["launch"])


@cut.mutant(
    "You charge one launch for the whole program, so the number of kernels makes no difference. Each kernel "
    "has its own."
)
def one_launch(*args):
    chain = as_chain(*args)
    seconds, lengths = best_cut(chain, cost=lambda *k: seconds_of(*k) - chain["launch"])
    return seconds + chain["launch"] * bool(lengths), lengths


@cut.mutant(
    "You add a kernel's arithmetic to its memory. They go on at once: it takes the longer of the two."
)
def no_overlap(*args):
    chain = as_chain(*args)

    def cost(chain, begin, end):
        flops = sum(op["flops"] for op in chain["ops"][begin:end])
        moved = bytes_of(chain, begin, end) / chain["bandwidth"]
        return chain["launch"] + flops / chain["peak"] + moved

    return best_cut(chain, cost=cost)


@cut.mutant(
    "You take the longer of arithmetic and memory for each operation, then add. Within a kernel the arithmetic of one "
    "operation hides the memory of another: add first, then take the longer."
)
def longer_for_each(*args):
    chain = as_chain(*args)

    def cost(chain, begin, end):
        total = chain["launch"]
        for i in range(begin, end):
            op = chain["ops"][i]
            moved = op["weights"]
            moved += read_by(chain, begin) if i == begin else 0
            moved += op["result"] if i == end - 1 else 0
            total += max(op["flops"] / chain["peak"], moved / chain["bandwidth"])
        return total

    return best_cut(chain, cost=cost)


@cut.mutant(
    "You write the results inside a kernel to memory. Only that of its last operation goes there; that's what fusion "
    "saves."
)
def writes_all(*args):
    chain = as_chain(*args)

    def cost(chain, begin, end):
        kernel = chain["ops"][begin:end]
        moved = read_by(chain, begin) + sum(op["weights"] + op["result"] for op in kernel)
        flops = sum(op["flops"] for op in kernel)
        return chain["launch"] + max(flops / chain["peak"], moved / chain["bandwidth"])

    return best_cut(chain, cost=cost)


@cut.mutant("You leave the weights out of the bytes. A kernel reads those of all its operations.")
def weights_unread(*args):
    chain = as_chain(*args)

    def cost(chain, begin, end):
        kernel = chain["ops"][begin:end]
        moved = read_by(chain, begin) + kernel[-1]["result"]
        flops = sum(op["flops"] for op in kernel)
        return chain["launch"] + max(flops / chain["peak"], moved / chain["bandwidth"])

    return best_cut(chain, cost=cost)


@cut.mutant(
    "You leave out what a kernel reads from the one before it. That result is in memory, because the kernel before "
    "wrote it there; the first kernel reads `first` bytes."
)
def input_unread(*args):
    chain = as_chain(*args)

    def cost(chain, begin, end):
        moved = bytes_of(chain, begin, end) - read_by(chain, begin)
        flops = sum(op["flops"] for op in chain["ops"][begin:end])
        return chain["launch"] + max(flops / chain["peak"], moved / chain["bandwidth"])

    return best_cut(chain, cost=cost)


@cut.mutant("A kernel has to hold its weights too. You count only what goes in and the results.")
def weights_need_no_room(*args):
    chain = as_chain(*args)

    def held(chain, begin, end):
        return read_by(chain, begin) + sum(op["result"] for op in chain["ops"][begin:end])

    return best_cut(chain, held=held)


@cut.mutant(
    "You let go of results once they are used, or count only what goes to memory. Here a kernel has to hold the "
    "results of *all* its operations at once."
)
def holds_ends_only(*args):
    chain = as_chain(*args)
    return best_cut(chain, held=bytes_of)


@cut.mutant(
    "You count what a kernel makes, and forget to make room for what it reads from the kernel before."
)
def input_needs_no_room(*args):
    chain = as_chain(*args)
    return best_cut(chain, held=lambda *k: room_of(*k) - read_by(*k[:2]))


@cut.mutant(
    "You demand that single operations fit as well, and find no cut if one doesn't. A kernel of one operation may be "
    "larger than the room."
)
def single_ones_must_fit(*args):
    chain = as_chain(*args)
    if any(room_of(chain, i, i + 1) > chain["room"] for i in range(len(chain["ops"]))):
        return math.inf, []
    return best_cut(chain)


@cut.mutant(
    "You look for the fewest kernels. A cut with one more can take less time, if it falls where arrays are small or "
    "pairs arithmetic with memory."
)
def fewest(*args):
    chain = as_chain(*args)
    return told(chain, fewest_kernels(chain))


@cut.mutant(
    "You look for the fewest bytes. Where the arithmetic takes longer, bytes are free, and a launch is not."
)
def least_bytes(*args):
    chain = as_chain(*args)
    return told(chain, fewest_bytes(chain))


@cut.mutant("Your kernels never have more than a few operations. Only `room` limits how many.")
def short_kernels(*args):
    chain = as_chain(*args)
    return best_cut(chain, held=lambda c, i, j: room_of(c, i, j) if j - i <= 8 else math.inf)


@cut.mutant("You return where each kernel begins. The statement asks how many operations it has.")
def where_they_begin(*args):
    seconds, lengths = best_cut(as_chain(*args))
    return seconds, [sum(lengths[:i]) for i in range(len(lengths))]


@cut.mutant("You leave room for nothing: a kernel that fills `room` to the last byte fits.")
def strictly_less(*args):
    chain = as_chain(*args)
    return best_cut(chain, held=lambda *k: math.nextafter(room_of(*k), math.inf))


@cut.mutant("You return the lengths first. The seconds come first, then the lengths.")
def lengths_first(*args):
    return best_cut(as_chain(*args))[::-1]


@cut.mutant("You return where each kernel ends. The statement asks how many operations it has.")
def where_they_end(*args):
    seconds, lengths = best_cut(as_chain(*args))
    return seconds, list(itertools.accumulate(lengths))


@cut.mutant(
    "Every kernel of yours reads `first` bytes. Only the first one does: a later kernel reads the result of "
    "the operation before it."
)
def first_for_all(*args):
    chain = as_chain(*args)

    def cost(chain, begin, end):
        moved = bytes_of(chain, begin, end) - read_by(chain, begin) + chain["first"]
        flops = sum(op["flops"] for op in chain["ops"][begin:end])
        return chain["launch"] + max(flops / chain["peak"], moved / chain["bandwidth"])

    return best_cut(chain, cost=cost)


@cut.mutant(
    "A kernel of yours writes the result of its first operation. It is the last one's that goes to memory."
)
def first_result_written(*args):
    chain = as_chain(*args)

    def cost(chain, begin, end):
        ops = chain["ops"]
        moved = bytes_of(chain, begin, end) - ops[end - 1]["result"] + ops[begin]["result"]
        flops = sum(op["flops"] for op in ops[begin:end])
        return chain["launch"] + max(flops / chain["peak"], moved / chain["bandwidth"])

    return best_cut(chain, cost=cost)


@cut.mutant(
    "Your kernels never write their results. That of a kernel's last operation goes to memory."
)
def result_unwritten(*args):
    chain = as_chain(*args)

    def cost(chain, begin, end):
        moved = bytes_of(chain, begin, end) - chain["ops"][end - 1]["result"]
        flops = sum(op["flops"] for op in chain["ops"][begin:end])
        return chain["launch"] + max(flops / chain["peak"], moved / chain["bandwidth"])

    return best_cut(chain, cost=cost)


@cut.mutant(
    "Your kernels take no time for their arithmetic, or none for their memory. A kernel takes the longer of "
    "the two."
)
def memory_alone(*args):
    chain = as_chain(*args)
    return best_cut(chain, cost=lambda *k: chain["launch"] + bytes_of(*k) / chain["bandwidth"])


@cut.mutant(
    "You take the longest last kernel that fits, and only its beginning is tried. A shorter one can leave a "
    "better cut for those before it: compare all."
)
def longest_from_the_back(*args):
    chain = as_chain(*args)
    lengths, end = [], len(chain["ops"])
    while end:
        begin = end - 1
        while begin and room_of(chain, begin - 1, end) <= chain["room"]:
            begin -= 1
        lengths.insert(0, end - begin)
        end = begin
    return told(chain, lengths)
