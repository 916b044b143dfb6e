import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from minitext.book.grading import Exercise


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


# ------------------------------------------------------------------------------------- absmax

absmax = Exercise(
    "25.absmax",
    title="Scales by tensor, row and block",
    function="absmax",
    minutes=15,
    points=10,
    statement="""
Write `absmax(x_RC, shared, block)`, which stores a matrix as int8 values times scales.

- `shared` says which numbers share a scale: all of the `"tensor"`, each `"row"`, or each `"block"` of `block`
  neighbours in a row. The last block of a row may be shorter.
- A scale is the largest magnitude among the numbers that share it, divided by 127. Where all of them are 0, it is 1.
- Values are rounded to the nearest integer, so no number is off by more than half its scale.
- Scales are float32 and computed in float32, even for bfloat16 inputs.
""",
    hints=(
        "Bring all three cases into one form: [rows, blocks, numbers of a block]. What is one row of a tensor, and one "
        "block of a row?",
        "Pad the rows with zeros to a whole number of blocks: zeros never change the largest magnitude. Cut them off "
        "at the end.",
        "`x_RN.reshape(rows, -1, size)` with rows = 1 for a tensor, and size = N, the row's length, unless blocks are "
        "asked for. The scales are `jnp.max(jnp.abs(x_RBS), axis=-1) / 127`, with `jnp.where` for zeros.",
    ),
)


def absmax_with(
    *, by="rows", limit=127, magnitude=True, rounds=True, wide=True, zeros=1.0, drops=False, whole=False,
    flat=False, pads=True, cuts=True, epsilon=0.0,
):  # fmt: skip
    def fn(x_RC, shared, block):
        x_RC = x_RC.astype(jnp.float32) if wide else x_RC
        R, C = x_RC.shape
        if by == "columns" and shared != "tensor":
            x_RC = x_RC.T
        rows = 1 if shared == "tensor" or whole else x_RC.shape[0]
        x_RN = jnp.reshape(x_RC, (rows, -1))
        N = x_RN.shape[1]
        size = block if shared == "block" else N
        if drops and size < N:
            x_RN = jnp.where(jnp.arange(N) < N // size * size, x_RN, 0)
        if flat and size < N:
            x_RN = jnp.reshape(x_RN, (1, -1))
        padding = -x_RN.shape[1] % size if pads else 0
        x_RBS = jnp.pad(x_RN, ((0, 0), (0, padding))).reshape(len(x_RN), -1, size)
        largest = jnp.max(jnp.abs(x_RBS) if magnitude else x_RBS, axis=-1)
        scale = jnp.where(largest > 0, largest / limit, zeros).astype(x_RN.dtype) + epsilon
        values = x_RBS / scale[..., None]
        values = jnp.clip(jnp.round(values) if rounds else values, -127, 127)
        values = values.reshape(len(x_RN), -1)
        if flat and size < N:
            return values.reshape(-1)[: R * C].reshape(R, C).astype(jnp.int8), scale.reshape(R, -1)
        values = values[:, :N].reshape(x_RC.shape) if cuts else values.reshape(len(x_RC), -1)
        values = values.T if values.shape != (R, C) else values
        return values.astype(jnp.int8), scale.astype(jnp.float32)

    return fn


def quantizes(fn, t, x_RC, shared, block, why):
    values, scale = fn(x_RC, shared, block)
    _, want = absmax_with()(x_RC, shared, block)
    told = wrong_scales(x_RC, shared, block, want, scale)
    t.close(scale, want, 1e-5, 0, f"scales, {why}", dtype=np.float32, mistakes=told)
    shape, dtype = np.shape(values), getattr(values, "dtype", None)
    t.true(
        shape == x_RC.shape,
        f"values have the shape {shape}, want that of x_RC, {x_RC.shape}, {why}",
        shape,
    )
    t.true(dtype == jnp.int8, f"values are {dtype}, want int8, {why}", str(dtype))
    x, got = np.asarray(x_RC.astype(jnp.float32)), np.asarray(values, np.float32)
    each = spread(np.asarray(want), x.shape, shared, block)
    off = np.abs(got - x / each)
    t.true(np.abs(got).max() <= 127, f"values go beyond -127 to 127, {why}", np.abs(got).max())
    told = f"a number is off by {off.max():.2f} of its scale"
    if np.all(np.abs(got) <= np.abs(x / each) + 1e-3):
        told += "; all are rounded towards 0, not to the nearest"
    elif np.all(got <= x / each + 1e-3):
        told += "; all are rounded down, not to the nearest"
    elif np.all(np.abs(got) >= np.minimum(np.abs(x / each), 127) - 1e-3):
        told += "; all are rounded away from 0, not to the nearest"
    elif np.all(got >= np.minimum(x / each, 127) - 1e-3):
        told += "; all are rounded up, not to the nearest"
    elif np.allclose(got, np.clip(np.round(x * each), -127, 127)):
        told += "; you multiply by the scale instead of dividing by it"
    t.true(off.max() <= 0.501, f"{told}, {why}", off)


def wrong_scales(x_RC, shared, block, want, got):
    """Scales that are wrong in a known way, by the sentence that says how."""
    x, want = np.asarray(x_RC, np.float32), np.asarray(want)
    largest = np.where(want == 1, 0, want * 127)
    size = block if shared == "block" else x.shape[1]
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=-np.inf)
    parts = padded.reshape(1 if shared == "tensor" else len(x), want.shape[1], -1)
    by_column = np.abs(x).max(0) / 127
    kept = np.isfinite(parts)
    mean = np.sum(np.abs(np.where(kept, parts, 0)), -1) / kept.sum(-1).clip(1)
    strided = np.where(kept, parts, 0).reshape(*parts.shape[:1], size, -1)
    flat = np.pad(np.abs(x).reshape(-1), (0, kept.size - x.size)).reshape(parts.shape)
    zeros = np.where(largest == 0, got, want) if np.shape(got) == want.shape else largest / 127
    return {
        "You take the largest number, not the largest magnitude": parts.max(-1) / 127,
        "You take half of the range from the smallest number to the largest; take the largest magnitude": (
            parts.max(-1) - np.where(np.isinf(parts), np.inf, parts).min(-1)
        )
        / 254,
        "A scale is the largest magnitude divided by 127; you don't divide": largest,
        "You divide by 128: the largest magnitude becomes 127": largest / 128,
        "You divide by 127.5: the largest magnitude becomes 127": largest / 127.5,
        "Where all numbers are 0, the scale is 1": largest / 127,
        "All are right but where all numbers are 0: there the scale is 1": zeros,
        "You take the mean of the magnitudes; a scale comes from the largest": mean / 127,
        "Your blocks run on from one row into the next; each row begins a new one": flat.max(-1)
        / 127,
        "Numbers of a block are neighbours; you take every nth of a row": np.abs(strided).max(1)
        / 127,
        "Your scales are reciprocals: values times scales are the numbers": 1 / want,
        "Your scales are those of the columns": by_column[None],
        "Your scales are those of the columns; they have no axis of length 1 either": by_column,
        "You use one scale for all numbers": np.full(want.shape, np.abs(x).max() / 127),
    }


def spread(scale, shape, shared, block):
    """The scale of each number of a matrix."""
    if shared == "block":
        scale = np.repeat(scale, block, axis=1)[:, : shape[1]]
    return np.broadcast_to(scale, shape)


def matrix(t, shape):
    """Numbers whose rows and columns have magnitudes of their own, and mostly one sign in a row."""
    sizes = 10.0 ** t.rng.uniform(-3, 3, (shape[0], 1)) * 10.0 ** t.rng.uniform(-1, 1, shape[1])
    x = t.rng.normal(t.rng.choice([-1.0, 1.0], (shape[0], 1)), 1, shape) * sizes
    return jnp.asarray(x, jnp.float32)


@absmax.check("one scale")
def _(fn, t):
    for shape in ((5, 7), (1, 9), (6, 1)):
        x = jnp.asarray(t.rng.normal(-0.5, 1, shape), jnp.float32)
        x = x.at[shape[0] // 2, shape[1] // 2].set(-4.5)
        quantizes(fn, t, x, "tensor", 3, f"a tensor of {shape}")


@absmax.check("a scale for each row")
def _(fn, t):
    for shape in ((5, 7), (9, 4), (1, 6), (3, 1)):
        quantizes(fn, t, matrix(t, shape), "row", 2, f"rows of {shape}")


@absmax.check("blocks that divide a row")
def _(fn, t):
    for shape, block in (((5, 12), 4), ((2, 7), 1), ((4, 4), 4)):
        quantizes(fn, t, matrix(t, shape), "block", block, f"blocks of {block} in rows of {shape}")


@absmax.check("a last block that is shorter")
def _(fn, t):
    for shape, block in (((3, 11), 4), ((4, 6), 9)):
        quantizes(fn, t, matrix(t, shape), "block", block, f"blocks of {block} in rows of {shape}")


@absmax.check("zeros")
def _(fn, t):
    x = matrix(t, (4, 10)).at[1].set(0).at[2, 4:8].set(0)
    for shared in ("row", "block"):
        quantizes(fn, t, x, shared, 4, f"{shared}s of zeros")
    quantizes(fn, t, jnp.zeros((2, 3)), "tensor", 4, "nothing but zeros")


@absmax.check("bfloat16")
def _(fn, t):
    for shared in ("tensor", "row", "block"):
        x = matrix(t, (4, 10)).astype(jnp.bfloat16)
        quantizes(fn, t, x, shared, 4, f"bfloat16 by {shared}")


for name, hint, options in (
    ("columns", "You give each column a scale. Numbers of one row share it, so take the largest along axis 1.",
     {"by": "columns"}),
    ("tensor_always", "You use one scale for all numbers, whatever `shared` says.", {"whole": True}),
    ("divided_by_128", "You divide by 128. int8 ends at 127, so the largest positive number wouldn't fit.",
     {"limit": 128}),
    ("largest_not_magnitude", "You take the largest number. A row whose numbers are negative needs the largest "
     "magnitude.", {"magnitude": False}),
    ("truncated", "A cast to int8 drops the fraction, which is off by up to a whole step. Round first.",
     {"rounds": False}),
    ("scale_in_bfloat16", "For bfloat16 inputs you compute in bfloat16, whose 8 bits are too few for a quotient up to "
     "127. Convert to float32 first.", {"wide": False}),
    ("zero_scale", "Where all numbers are 0, your scale isn't 1. With 0 in its place, 0 / 0 would be NaN.",
     {"zeros": 0.0}),
    ("last_block_dropped", "The last block of a row may be shorter than the others. Your scales and values miss what "
     "is in it.", {"drops": True}),
    ("blocks_across_rows", "Your blocks run on from one row into the next. Each row begins a new one.",
     {"flat": True}),
    ("rows_reshaped", "You reshape rows whose length is no multiple of `block`. The last block of a row may be "
     "shorter.", {"pads": False}),
    ("padding_returned", "You return the padding too. Values have the shape of x_RC.", {"cuts": False}),
    ("epsilon", "You add a small number to each scale. The scale is an exception only where all numbers are 0: "
     "there it is 1.", {"epsilon": 1e-8}),
):  # fmt: skip
    mistaken(absmax, name, hint, absmax_with(**options))


# -------------------------------------------------------------------------------- int8_matmul

int8_matmul = Exercise(
    "25.int8_matmul",
    title="Three products, all of them int8",
    function="int8_matmul",
    minutes=35,
    points=20,
    statement="""
Write `int8_matmul(x_TD, w_DF)`, which computes `x_TD @ w_DF` from int8 numbers, and whose gradients are also computed
from int8 numbers. With the gradient g of its result, they are g wᵀ and xᵀ g.

- In each of the three products, both factors are quantized to int8 by the largest magnitude (divided by 127) among the
  numbers that the product sums over: in the first, each row of x and each column of w has a scale.
- int8 numbers are multiplied with int8 numbers and added up in int32. Scales are applied afterwards, in float32.
- A row or column of zeros gives zeros.
- The result has the type of x_TD, and each gradient the type of its input.
- Between the forward and the backward pass nothing is kept but x_TD and w_DF.

The checks look at the program too: at what its products multiply.
""",
    hints=(
        "JAX can't differentiate through rounding in a useful way, so you need `jax.custom_vjp`. All three products "
        "can be one helper. Along which axis of each factor does it sum?",
        "A scale can be taken out of a sum only if it is the same for all its terms. The backward pass sums over F and "
        "over T, so x, w and g are quantized again there, from the numbers themselves.",
        "The helper: `a, s = quantize(a_MK, axis=1)`, `b, r = quantize(b_KN, axis=0)`, then `jnp.dot(a, b, "
        "preferred_element_type=jnp.int32).astype(jnp.float32) * s * r`. The backward pass calls it with (g, w.T) and "
        "with (x.T, g).",
    ),
)  # fmt: skip


def to_int8(x, axis, epsilon=0.0):
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
    scale = scale + epsilon if epsilon else jnp.where(scale > 0, scale, 1.0)
    return jnp.round(x / scale).astype(jnp.int8), scale


def int8_dot(a, b, *, axes=(1, 0), sums=jnp.int32, fake=False, epsilon=0.0):
    (q, s), (r, u) = (to_int8(x, axis, epsilon) for x, axis in zip((a, b), axes, strict=True))
    if fake:
        return (q.astype(jnp.float32) * s) @ (r.astype(jnp.float32) * u)
    y = jnp.dot(q, r, preferred_element_type=sums).astype(jnp.float32)
    return y * s * u if axes != (None, None) else y * s[0, 0] * u[0, 0]


def int8_matmul_with(
    *, backward="int8", axes=(1, 0), sums=jnp.int32, fake=False, epsilon=0.0, cast=True, keeps=False
):
    def dot(a, b):
        return int8_dot(a, b, axes=axes, sums=sums, fake=fake, epsilon=epsilon)

    def forward(x, w):
        y = dot(x, w)
        return y.astype(x.dtype) if cast else y

    if backward == "autodiff":
        return forward
    fn = jax.custom_vjp(forward)

    def remember(x, w):
        return forward(x, w), (x, w, *((to_int8(x, 1), to_int8(w, 0)) if keeps else ()))

    def back(kept, g):
        x, w = kept[:2]
        if backward == "wide":
            g = g.astype(jnp.float32)
            grads = g @ w.T, x.astype(jnp.float32).T @ g
        elif backward == "half":
            grads = dot(g, w.T), x.astype(jnp.float32).T @ g.astype(jnp.float32)
        elif backward == "reused":
            # The scales of the forward pass's columns and rows, taken out of sums over other dimensions.
            (q, s), (r, u) = to_int8(x, 1), to_int8(w, 0)
            (g1, s1), (g2, s2) = to_int8(g, 1), to_int8(g, 0)
            grad_x = jnp.dot(g1, r.T, preferred_element_type=jnp.int32) * s1 * jnp.mean(u)
            grad_w = jnp.dot(q.T, g2, preferred_element_type=jnp.int32) * s2 * jnp.mean(s)
            grads = grad_x, grad_w
        elif backward == "once":
            p, v = to_int8(g, 1)
            grads = dot(g, w.T), dot(x.T, p * v)
        elif backward == "straight":
            (q, s), (r, u) = to_int8(x, 1), to_int8(w, 0)
            grads = g @ (r * u).T, (q * s).T @ g
        else:
            grads = dot(g, w.T), dot(x.T, g)
        if backward == "turned":
            return grads[::-1]
        return (grads[0].astype(x.dtype), grads[1].astype(w.dtype)) if cast else grads

    fn.defvjp(remember, back)
    return fn


right_product = int8_matmul_with()


def factors(t, T, D, F):
    """Rows of x, columns of w and both sides of the gradient have magnitudes of their own."""
    x, w, g = (t.rng.normal(size=shape) for shape in ((T, D), (D, F), (T, F)))
    across = [10.0 ** t.rng.uniform(-1, 1, size) for size in (T, F, D)]
    x, w = x * across[0][:, None], w * across[1] * across[2][:, None]
    g = g * across[1] * (10.0 ** t.rng.uniform(-1, 1, T))[:, None]
    return tuple(jnp.asarray(each, jnp.float32) for each in (x, w, g))


def alike(t, got, want, why, mistakes=None):
    """Rounding may fall the other way here and there, so differences count in parts of the typical number."""
    t.true(np.shape(got) == want.shape, f"{why}: got shape {np.shape(got)}, want {want.shape}", got)
    want = np.asarray(want, np.float32)
    typical = np.sqrt(np.mean(want**2, 0, keepdims=True) * np.mean(want**2, 1, keepdims=True))
    typical = np.maximum(typical / np.sqrt(np.mean(want**2) + 1e-30), 1e-30)
    told = {
        text: np.asarray(value, np.float32) / typical for text, value in (mistakes or {}).items()
    }
    t.close(np.asarray(got, np.float32) / typical, want / typical, 0, 0.02, why, mistakes=told)


def wrong_products(a, b):
    """What a product of two factors gives with a mistake, by the sentence that says which."""
    (q, s), (r, u) = to_int8(a, 1), to_int8(b, 0)
    sums = jnp.dot(q, r, preferred_element_type=jnp.int32).astype(jnp.float32)
    small = jnp.dot(q, r, preferred_element_type=jnp.int8).astype(jnp.float32)
    steps = [np.asarray(x, np.float32) / np.asarray(y) for x, y in ((a, s), (b, u))]
    scales = np.asarray(s) * np.asarray(u)
    cut, down = (to(steps[0]) @ to(steps[1]) * scales for to in (np.trunc, np.floor))
    return {
        "You cut off fractions when you quantize; round to the nearest integer": cut,
        "You round down when you quantize; round to the nearest integer": down,
        "The sums don't fit in int8: they overflow": small * s * u,
        "No scale is applied to the sums": sums,
        "The scales of the first factor's rows are missing": sums * u,
        "The scales of the second factor's columns are missing": sums * s,
        "You divide by the scales instead of multiplying by them": sums / s / u,
        "One scale for each factor isn't enough": int8_dot(a, b, axes=(None, None)),
        "Your scales are the largest magnitude divided by 128; divide by 127": (
            np.round(steps[0] * 128 / 127).clip(-128, 127)
            @ np.round(steps[1] * 128 / 127).clip(-128, 127)
        )
        * scales
        * (127 / 128) ** 2,
    }


def pulled(fn, x, w, g):
    y, pull = jax.vjp(fn, x, w)
    return y, pull(g.astype(y.dtype))


def products(fn, *args):
    """The types of the factors and of the result of each product in a program, in order."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                yield tuple(str(v.aval.dtype) for v in (*equation.invars[:2], *equation.outvars))
            for inner in jaxprs_in_params(equation.params):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(fn)(*args).jaxpr))


SIZES = ((7, 40, 12), (33, 5, 8), (1, 64, 3), (6, 9, 1))


@int8_matmul.check("the product")
def _(fn, t):
    for T, D, F in SIZES:
        x, w, _ = factors(t, T, D, F)
        alike(
            t,
            fn(x, w),
            right_product(x, w),
            f"x is [{T}, {D}], w is [{D}, {F}]",
            wrong_products(x, w),
        )


@int8_matmul.check("both gradients")
def _(fn, t):
    for T, D, F in SIZES:
        x, w, g = factors(t, T, D, F)
        got, want = pulled(fn, x, w, g)[1], pulled(right_product, x, w, g)[1]
        (q, s), (r, u) = to_int8(x, 1), to_int8(w, 0)
        rounded = q * s, r * u
        again = "You quantize again what the forward pass had rounded. Quantize x and w themselves"
        straight = "You multiply g by the forward pass's rounded floats. Each product quantizes both of its factors"
        once = "You quantize g once, by its rows. This product sums over its rows: quantize g itself by its columns"
        g_rounded = (lambda p, v: p * v)(*to_int8(g, 1))
        told = (
            {again: int8_dot(g, rounded[1].T), straight: g @ rounded[1].T} | wrong_products(g, w.T),
            {
                again: int8_dot(rounded[0].T, g),
                straight: rounded[0].T @ g,
                once: int8_dot(x.T, g_rounded),
            }
            | wrong_products(x.T, g),
        )
        for name, one, other, mistakes in zip(("x", "w"), got, want, told, strict=True):
            why = f"the gradient of {name}, x is [{T}, {D}], w is [{D}, {F}]"
            alike(
                t,
                one,
                other,
                f"{why}; it is g w^T" if name == "x" else f"{why}; it is x^T g",
                mistakes,
            )


@int8_matmul.check("what the program multiplies")
def _(fn, t):
    x, w, g = factors(t, 6, 10, 4)
    narrow = ("int8", "int8", "int32")
    t.equal(products(fn, x, w), [narrow], "types of the factors and of the sums, forward")
    found = products(lambda *args: pulled(fn, *args)[1], x, w, g)
    t.equal(found, [narrow] * 3, "types of the factors and of the sums, forward and backward")


@int8_matmul.check("sums that int8 could not hold")
def _(fn, t):
    x, w = jnp.full((3, 900), 2.0), jnp.full((900, 2), -0.5)
    t.close(fn(x, w), jnp.full((3, 2), -900.0), 1e-4, 0, "900 equal terms")


@int8_matmul.check("zeros")
def _(fn, t):
    x, w, g = factors(t, 6, 10, 4)
    x, w, g = x.at[2].set(0), w.at[:, 1].set(0).at[3].set(0), g.at[2].set(0)
    y, got = pulled(fn, x, w, g)
    t.finite((y, *got), "with rows and columns of zeros")
    t.equal(np.asarray(y)[2], np.zeros(4, np.float32), "the result of a row of zeros")


@int8_matmul.check("very small gradients")
def _(fn, t):
    x, w, g = factors(t, 6, 10, 4)
    got, want = (pulled(f, x, w, g * 1e-9)[1] for f in (fn, right_product))
    for name, one, other in zip(("x", "w"), got, want, strict=True):
        alike(t, one, other, f"the gradient of {name} for gradients near 1e-9")


@int8_matmul.check("types")
def _(fn, t):
    x, w, g = factors(t, 6, 10, 4)
    x = x.astype(jnp.bfloat16)
    y, (grad_x, grad_w) = pulled(fn, x, w, g)
    got = [str(each.dtype) for each in (y, grad_x, grad_w)]
    t.equal(got, ["bfloat16", "bfloat16", "float32"], "types of the result and the two gradients")


@int8_matmul.check("what is kept")
def _(fn, t):
    x, w, _ = factors(t, 16, 24, 8)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(fn, x, w)[1]))
    most = x.nbytes + w.nbytes
    t.true(kept <= most, f"{kept} bytes are kept for the backward pass; x and w have {most}", kept)


for name, hint, options in (
    ("backward_wide", "Your forward pass is in int8 and your backward pass isn't: two of three products multiply "
     "wide numbers, and most of the arithmetic of training is there.", {"backward": "wide"}),
    ("weight_gradient_wide", "One of three products, the weight's gradient, still multiplies wide numbers.",
     {"backward": "half"}),
    ("fake", "You multiply the quantized numbers by their scales first and then multiply floats. The result is right, "
     "and nothing is gained: multiply the int8 numbers, and apply the scales to the sums.", {"fake": True}),
    ("one_scale", "You use one scale for each factor. Rows and columns of small numbers then round to 0.",
     {"axes": (None, None)}),
    ("int8_sums", "The sums overflow: ask for them with preferred_element_type=jnp.int32.", {"sums": jnp.int8}),
    ("autodiff", "Autodiff goes through your rounding, whose derivative is 0 nearly everywhere. Say what the gradients "
     "are with jax.custom_vjp.", {"backward": "autodiff"}),
    ("forward_numbers_reused", "Your backward pass multiplies the int8 numbers of the forward pass. Their scales "
     "differ along what the backward pass sums over, so no factor after the sum can put them right. Quantize again "
     "along the other dimension.", {"backward": "reused"}),
    ("epsilon", "You add a small number to the scales, against zeros. Gradients are often smaller than that and round "
     "to 0: treat a scale of exactly 0 alone.", {"epsilon": 1e-8}),
    ("g_rounded_once", "You quantize g once, by its rows, for both products. The weight's gradient sums over g's rows: "
     "quantize g itself again, by its columns.", {"backward": "once"}),
    ("no_cast", "The result has the type of x_TD, and each gradient the type of its input.", {"cast": False}),
    ("straight_through", "Your gradients go straight through the rounding, so the backward pass multiplies floats. "
     "Its two products quantize both of their factors, too.", {"backward": "straight"}),
    ("turned_around", "Your backward pass returns the two gradients in the wrong order: that of x comes first.",
     {"backward": "turned"}),
    ("keeps_int8", "You keep the int8 numbers of the forward pass too. The backward pass can't use them: keep x_TD "
     "and w_DF.", {"keeps": True}),
):  # fmt: skip
    mistaken(int8_matmul, name, hint, int8_matmul_with(**options))


# ------------------------------------------------------------------------ stochastic_rounding

stochastic = Exercise(
    "25.stochastic_rounding",
    title="Rounding that is right on average",
    function="quantize_at_random",
    minutes=20,
    points=10,
    statement="""
Write `quantize_at_random(x_RC, key)`: int8 with a scale for each row, rounded at random.

- The scale of a row is its largest magnitude divided by 127, or 1 for a row of zeros.
- In units of its row's scale, a number between two integers becomes one of the two. Over many keys, its mean is the
  number itself: 2.3 becomes 2 with probability 0.7 and 3 with probability 0.3, and -2.3 becomes -2 or -3 with the
  same probabilities.
- Each number is rounded independently of all others. A number that is an integer in these units stays what it is.
- The same key gives the same result, and a different key gives a different one.
""",
    hints=(
        "What is the mean of floor(y + u) if u is uniform between 0 and 1? Try y = 2.3: for which u does the floor "
        "become 3?",
        "A cast to int8 rounds towards zero, which isn't the floor for negative numbers. And every number needs a u "
        "of its own.",
        "`jnp.floor(x_RC / scale_R1 + jax.random.uniform(key, x_RC.shape))`, clipped to -127 and 127 before the cast.",
    ),
)


def at_random_with(*, how="floor", noise="each", rows=True, fixed=False, width=1.0):
    def fn(x_RC, key):
        key = jax.random.key(0) if fixed else key
        axis = 1 if rows else None
        largest = jnp.max(jnp.abs(x_RC), axis=axis, keepdims=True)
        scale = jnp.where(largest > 0, largest / 127, 1.0)
        steps = x_RC / scale
        shape = {"each": x_RC.shape, "row": (len(x_RC), 1), "column": x_RC.shape[1:], "one": ()}[
            noise
        ]
        u = width * jax.random.uniform(key, shape)
        if how == "floor":
            steps = jnp.floor(steps + u)
        elif how == "truncate":
            steps = jnp.trunc(steps + u)
        elif how == "nearest":
            steps = jnp.round(steps)
        elif how == "ceiling":
            steps = jnp.ceil(steps + u)
        elif how == "wide":
            steps = jnp.round(steps + 2 * u - 1)
        elif how == "unsigned":
            steps = jnp.floor(jnp.abs(steps) + u)
        elif how == "above":
            steps = jnp.round(steps + u)
        elif how == "unscaled":
            steps = jnp.floor((x_RC + u) / scale)
        elif how == "normal":
            steps = jnp.floor(steps + 0.5 + 0.3 * jax.random.normal(key, shape))
        elif how == "turned":
            steps = jnp.floor(steps) + (u >= steps - jnp.floor(steps))
        elif how == "even":
            steps = jnp.floor(steps) + (u < 0.5)
        elif how == "magnitude":
            size = jnp.abs(steps)
            steps = jnp.sign(steps) * jnp.floor(size) + (u < size - jnp.floor(size))
        elif how == "negative":
            steps = jnp.where(u < steps - jnp.trunc(steps), jnp.ceil(steps), jnp.floor(steps))
        values = jnp.clip(steps, -127, 127).astype(jnp.int8)
        return values, jnp.broadcast_to(scale, (len(x_RC), 1))

    return fn


def steps_of(x_RC):
    scale_R1 = np.abs(x_RC).max(1, keepdims=True) / 127
    scale_R1 = np.where(scale_R1 > 0, scale_R1, 1.0)
    return x_RC / scale_R1, scale_R1


def key_of(t):
    return jax.random.key(int(t.rng.integers(2**31)))


@stochastic.check("one of two neighbours")
def _(fn, t):
    for shape in ((4, 30), (1, 7), (9, 1)):
        x = np.array(matrix(t, shape))
        x[0] = 0 if shape[0] > 1 else x[0]
        steps, scale = steps_of(x)
        values, got = fn(jnp.asarray(x), key_of(t))
        want = scale.astype(np.float32)
        told = wrong_scales(x, "row", None, want, got)
        t.close(got, want, 1e-5, 0, f"the scales of rows, x is {shape}", mistakes=told)
        t.true(values.dtype == jnp.int8, f"values are {values.dtype}, want int8", str(values.dtype))
        t.true(
            values.shape == x.shape,
            f"values have the shape {values.shape}, want {x.shape}",
            values.shape,
        )
        off = np.abs(np.asarray(values, np.float32) - steps)
        at = np.unravel_index(np.argmax(off), off.shape)
        told = (
            f"{steps[at]:.3f} became {values[at]}, which isn't one of the two integers next to it"
        )
        high = np.asarray(values, np.float32) - steps
        if np.all(np.abs(np.abs(np.asarray(values, np.float32)) - np.abs(steps)) < 1.001):
            told += ", but its magnitude is: the sign is lost"
        else:
            told += f"; yours are up to {high.max():.2f} too large and {-high.min():.2f} too small"
        t.true(off.max() < 1.001, told, off)


@stochastic.check("the same key twice")
def _(fn, t):
    x, key = jnp.asarray(matrix(t, (4, 60))), key_of(t)
    first, again = (np.asarray(fn(x, key)[0]) for _ in range(2))
    t.equal(again, first, "the same key gives the same result; all that is random comes from it")


@stochastic.check("whole numbers stay")
def _(fn, t):
    whole = t.rng.integers(-126, 127, (5, 40))
    whole[:, 0] = 127
    x = whole * 2.0 ** t.rng.integers(-9, 9, (5, 1))
    values, _ = fn(jnp.asarray(x, jnp.float32), key_of(t))
    t.equal(np.asarray(values), whole.astype(np.int8), "numbers that are integers of their scale")


@stochastic.check("the mean over many keys")
def _(fn, t):
    x = np.asarray(matrix(t, (3, 16)))
    keys = jax.random.split(key_of(t), 900)
    values, _ = jax.vmap(lambda key: fn(jnp.asarray(x), key))(keys)
    steps = steps_of(x)[0]
    off = np.asarray(values, np.float64).mean(0) - steps
    at = np.unravel_index(np.argmax(np.abs(off)), off.shape)
    below = np.floor(steps)
    up, want = off + steps - below, steps - below
    told = f"{steps[at]:.2f} became {below[at] + 1:.0f} with {up[at]:.2f} of 900 keys, else {below[at]:.0f}"
    bad = np.abs(off) > 0.11
    between = (want > 0.02) & (want < 0.98)
    if bad.any() and not bad[steps > 0].any():
        told += "; only numbers below 0 are off"
    elif bad.any() and not bad[steps < 0].any():
        told += "; only numbers above 0 are off"
    elif np.allclose(up[between], 1 - want[between], 0, 0.11):
        told += "; each is rounded up with the probability of rounding it down"
    elif np.allclose(up[between], 0.5, 0, 0.11):
        told += "; all are rounded up with probability 1/2, however near they are"
    # The mean of 900 has a standard deviation of at most 1/60.
    t.close(
        off, np.zeros_like(off), 0, 0.11, f"mean of 900 keys, less the number, in steps. {told}"
    )


@stochastic.check("each number for itself")
def _(fn, t):
    x = np.full((40, 600), 0.5) * t.rng.choice([-1.0, 1.0], (40, 600))
    x[:, 0] = 127
    values, _ = fn(jnp.asarray(x, jnp.float32), key_of(t))
    up = (np.asarray(values, np.float64) > x)[:, 1:]
    why = "share of 599 halves in each of 40 rows that are rounded up"
    t.close(up.mean(1), np.full(40, 0.5), 0, 0.12, why)
    together = np.corrcoef(up)[~np.eye(40, dtype=bool)]
    t.true(np.abs(together).max() < 0.27, "numbers of different rows are rounded alike", together)


@stochastic.check("another key")
def _(fn, t):
    x, key, other = jnp.asarray(matrix(t, (4, 60))), key_of(t), key_of(t)
    first, third = (np.asarray(fn(x, k)[0]) for k in (key, other))
    t.true((first != third).any(), "another key gives the same values", first != third)


for name, hint, options in (
    ("nearest", "You round to the nearest integer, whatever the key: a number 0.3 above an integer always loses it.",
     {"how": "nearest"}),
    ("towards_zero", "A cast to int8 drops the fraction, so negative numbers are rounded towards zero and their mean "
     "is too large. Take the floor.", {"how": "truncate"}),
    ("rounded_after_noise", "You add u and then round to nearest, which is half a step too high on average. Take the "
     "floor.", {"how": "above"}),
    ("rounded_up_after_noise", "You add u and then round up, which is a whole step too high on average. Take the "
     "floor.", {"how": "ceiling"}),
    ("two_steps_of_noise", "Your noise goes from -1 to 1, which is two steps wide, so numbers pass their neighbours.",
     {"how": "wide"}),
    ("sign_lost", "You round the magnitudes and don't give the signs back.", {"how": "unsigned"}),
    ("one_number_for_all", "All numbers share one u, so they are rounded up together, and their errors add up. Draw "
     "one for each.", {"noise": "one"}),
    ("one_number_a_row", "The numbers of a row share one u. Draw one for each number.", {"noise": "row"}),
    ("one_number_a_column", "The numbers of a column share one u. Draw one for each number.", {"noise": "column"}),
    ("noise_before_the_scale", "You add u before you divide by the scale. It belongs to the number in units of its "
     "row's scale.", {"how": "unscaled"}),
    ("normal_noise", "Your noise isn't uniform between 0 and 1, so the odds of rounding up aren't the fraction.",
     {"how": "normal"}),
    ("key_ignored", "Your result doesn't depend on the key.", {"fixed": True}),
    ("half_the_noise", "Your u ends below 1, so small fractions are never rounded up.", {"width": 0.5}),
    ("one_scale", "You use one scale for the matrix; each row has its own.", {"rows": False}),
    ("turned_around", "You round up with the probability of rounding down. A number near the integer above it mostly "
     "becomes that.", {"how": "turned"}),
    ("even_odds", "You round up half the time, wherever the number is. How often depends on its fraction.",
     {"how": "even"}),
    ("fraction_of_the_magnitude", "For a negative number you take the fraction of its magnitude, but round up with it. "
     "What a number is above the integer *below* it counts: -2.3 is 0.7 above -3.", {"how": "magnitude"}),
    ("fraction_below_zero", "The fraction that you compare with is negative for numbers below 0, so they are never "
     "rounded up. Measure it from the floor.", {"how": "negative"}),
):  # fmt: skip
    mistaken(stochastic, name, hint, at_random_with(**options))


# ---------------------------------------------------------------------------------- find_wide

wide = Exercise(
    "25.find_wide",
    title="The product that was not quantized",
    function="find_wide",
    minutes=30,
    points=15,
    statement="""
Write `find_wide(text)`: it reads a compiled program and lists each product that multiplies wide numbers.

- An instruction is a line such as

      %dot.3 = s32[64,16]{1,0:T(8,128)} dot(%a, %fusion.7), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot"}

  with its name, its type, its opcode, its operands by name, and attributes. `ROOT ` may come before the name.
- Products are the instructions with the opcode `dot` or `convolution` (which is what TPUs call a product).
- A computation begins with a line that ends in `{` and ends with a line `}`. An operand is an instruction of the same
  computation, in an earlier line. Another computation may use the same names for other things.
- A type is narrow if it has 4 or 8 bits: s8, u8, s4, u4, and all that begin with f8. A product is wide if *either*
  factor is not narrow. The type of its result doesn't matter.
- For each wide product the result has a tuple: its op_name, or "" if it has none, and the types of both factors,
  without shapes. The order is that of the text, and what occurs twice is listed twice.
""",
    hints=(
        "The line of a product doesn't say what it multiplies. Which lines do, and how long do you have to remember "
        "them?",
        "Go through the lines once with a dict from names to types. Empty it where a computation begins.",
        r"""`re.match(r"\s*(?:ROOT )?%(\S+) = (\w+)\[\S* ([\w-]+)\(([^)]*)\)", line)` gives name, type, opcode and
        operands; `re.findall(r"%([^\s,]+)", operands)` the operands' names.""",
    ),
)  # fmt: skip


def find_wide_with(
    *, opcodes=("dot", "convolution"), either=True, scoped=True, narrow=r"[su][48]$|f8", by="factors", once=False,
    through=False, root=True, first=False,
):  # fmt: skip
    def fn(text):
        found, types = [], {}
        lines = text.splitlines()
        pattern = r"\s*(?:ROOT )?%(\S+) = (\w+)\[\S* ([\w-]+)\(([^)]*)\)"
        if not root:
            pattern = pattern.replace("(?:ROOT )?", "")
        if not scoped and not first:
            types = {m[1]: m[2] for line in lines if (m := re.match(pattern, line))}
        for line in lines:
            if line.endswith("{") and scoped:
                types = {}
            if (parts := re.match(pattern, line)) is None:
                continue
            name, kind, opcode, operands = parts.groups()
            names = re.findall(r"%([^\s,]+)", operands)
            if scoped or (first and name not in types):
                types[name] = kind
            if through and opcode == "convert" and names[0] in types:
                types[name] = types[names[0]]
            if opcode not in opcodes:
                continue
            factors = [types.get(o, "?") for o in names]
            judged = factors if by == "factors" else [kind]
            bad = [re.match(narrow, each) is None for each in judged]
            if any(bad) if either else all(bad):
                where = re.search(r'op_name="([^"]*)"', line)
                found.append((where[1] if where else "", *factors))
        return list(dict.fromkeys(found)) if once else found

    return fn


LAYOUTS = ("", "{1,0}", "{1,0:T(8,128)}", "{0,1:T(8,128)(4,1)S(1)}")
WIDE, NARROW = ("f32", "bf16", "s32", "f16"), ("s8", "u8", "s4", "u4", "f8e4m3fn", "f8e5m2")
OTHER_F8 = ("f8e4m3", "f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0fnu")


class Program:
    """Writes a module, one computation after another."""

    def __init__(self, t):
        self.t, self.lines, self.number = t, ["HloModule jit_step, is_scheduled=true", ""], 0

    def pick(self, values):
        return values[int(self.t.rng.integers(len(values)))]

    def shape(self, kind):
        sizes = ",".join(str(n) for n in self.t.rng.integers(1, 600, 2))
        return f"{kind}[{sizes}]{self.pick(LAYOUTS)}"

    def computation(self, *pairs, convert=False, same_names=True, opcode=None, labelled=True):
        """A computation with a product for each pair of types; its last instruction is the root."""
        self.number += 1
        head = "ENTRY %main" if self.number == 1 else f"%fused_computation.{self.number}"
        self.lines.append(f"{head} (p.0: f32[2]) -> f32[2] {{")
        mark = "" if same_names else f".{self.number}"
        for i, (left, right) in enumerate(pairs):
            for side, kind in (("a", left), ("b", right)):
                stored = self.pick(NARROW) if convert else kind
                self.line(f"{side}.{i}{mark}", stored, "parameter", str(i))
                if convert:
                    self.line(f"{side}c.{i}{mark}", kind, "convert", f"%{side}.{i}{mark}")
            c = "c" if convert else ""
            code = opcode or self.pick(("dot", "convolution"))
            operands = f"%a{c}.{i}{mark}, %b{c}.{i}{mark}"
            label = f"jit(step)/layer_{self.t.rng.integers(10**6)}/dot_general" if labelled else ""
            result = self.pick(("s32", "f32", "bf16", "s8"))
            root = "ROOT " if i == len(pairs) - 1 else ""
            self.line(f"{code}.{i}{mark}", result, code, operands, label, root)
        self.lines += ["}", ""]
        return self

    def line(self, name, kind, opcode, operands, label="", root=""):
        attributes = ", lhs_contracting_dims={1}" if opcode == "dot" else ""
        if opcode == "convolution":
            attributes = ", dim_labels=bf_io->bf"
        if label:
            attributes += f', metadata={{op_name="{label}" stack_frame_id=3}}'
        self.lines.append(f"  {root}%{name} = {self.shape(kind)} {opcode}({operands}){attributes}")

    def text(self):
        return "\n".join(self.lines)


def lists(fn, t, program, why):
    text = program if isinstance(program, str) else program.text()
    got, want = [tuple(row) for row in fn(text)], find_wide_with()(text)
    lacks, more = ([row for row in a if row not in b] for a, b in ((want, got), (got, want)))
    told = ""
    if got == want[::-1] or (got != want and sorted(map(str, got)) == sorted(map(str, want))):
        told = "; these are the products, but not in the order of the text"
    elif not lacks and not more and len(got) < len(want):
        told = "; what occurs twice is in your list once"
    elif lacks or more:
        rows = [f"you leave out {row}" for row in lacks[:1]] + [
            f"you list {row}" for row in more[:1]
        ]
        told = f"; {', and '.join(rows)}"
    t.equal(got, want, why + told)


@wide.check("one product")
def _(fn, t):
    for opcode in ("dot", "convolution"):
        for pair in (("bf16", "bf16"), ("s8", "s8"), ("f32", "f16")):
            program = Program(t).computation(pair, opcode=opcode)
            lists(fn, t, program, f"a {opcode} of {pair[0]} and {pair[1]}")


@wide.check("all narrow types")
def _(fn, t):
    for kind in (*NARROW, *OTHER_F8):
        program = Program(t).computation((kind, kind), ("s32", "s32"))
        lists(fn, t, program, f"a product of {kind}, then one of s32")


@wide.check("one factor is narrow")
def _(fn, t):
    program = Program(t).computation(("s8", "bf16"), ("f32", "f8e5m2"), ("s8", "u4"))
    lists(fn, t, program, "products of two types")
    for kind in WIDE:
        pairs = [pair for narrow in NARROW for pair in ((narrow, kind), (kind, narrow))]
        lists(fn, t, Program(t).computation(*pairs), f"products of narrow numbers and {kind}")
    pairs = [(left, right) for left in WIDE for right in WIDE]
    lists(fn, t, Program(t).computation(*pairs), "products of two wide types")


@wide.check("converted before it is multiplied")
def _(fn, t):
    program = Program(t).computation(("bf16", "bf16"), ("f32", "f32"), convert=True)
    lists(fn, t, program, "numbers that are stored narrow and multiplied wide")


@wide.check("several computations")
def _(fn, t):
    program = Program(t)
    for pair in (("s8", "s8"), ("bf16", "f32"), ("f8e4m3fn", "f8e5m2"), ("f32", "f32")):
        program.computation(pair)
    lists(fn, t, program, "four computations that use the same names")


@wide.check("the same twice, and one without a name")
def _(fn, t):
    program = Program(t).computation(
        ("f32", "bf16"), ("f32", "bf16"), ("bf16", "bf16"), labelled=False
    )
    lists(fn, t, program, "three products without op_name")


@wide.check("what only looks like a product")
def _(fn, t):
    program = Program(t).computation(("bf16", "bf16"), opcode="multiply")
    program.computation(("f32", "f32"), opcode="custom-call").computation(("s8", "s4"))
    lists(fn, t, program, "op_name says dot_general, the opcode says something else")


@wide.check("a program that was compiled here")
def _(fn, t):
    T, D, F = (int(n) for n in t.rng.integers(20, 90, 3))
    x, w = jnp.zeros((T, D)), jnp.zeros((D, F))
    text = t.hlo(lambda x, w: jnp.tanh(x @ w) @ w.T, x, w)
    lists(fn, t, text, "two products of float32")


for name, hint, options in (
    ("dots_alone", "You look at `dot` alone. On a TPU nearly all products are called `convolution`.",
     {"opcodes": ("dot",)}),
    ("both_wide", "You list a product only if both factors are wide. One wide factor is enough: the other is converted "
     "before the matrix unit sees it.", {"either": False}),
    ("names_of_the_module", "You look for an operand's type in the whole module. Another computation may have the same "
     "name for something else.", {"scoped": False}),
    ("first_of_the_module", "You look for an operand's type in the whole module. Another computation may have the same "
     "name for something else.", {"scoped": False, "first": True}),
    ("no_f8", "You treat 8-bit floats as wide. They begin with f8.", {"narrow": r"[su][48]$"}),
    ("known_f8", "You look for only two 8-bit floats. All types that begin with f8 are narrow.",
     {"narrow": r"[su][48]$|f8e4m3fn$|f8e5m2$"}),
    ("no_int4", "You treat 4-bit integers as wide.", {"narrow": r"[su]8$|f8"}),
    ("by_result", "You judge by the type of the result. Sums of 8-bit numbers are kept wide; the factors count.",
     {"by": "result"}),
    ("each_once", "What occurs twice in the program is multiplied twice: list it twice.", {"once": True}),
    ("through_converts", "You follow the factors to where they are stored. A number that is converted to bf16 is "
     "multiplied as bf16.", {"through": True}),
    ("no_root", "You skip lines that begin with ROOT. In a fusion the product is often just that.", {"root": False}),
):  # fmt: skip
    mistaken(wide, name, hint, find_wide_with(**options))


# ----------------------------------------------------------------------------------- feedback

feedback = Exercise(
    "25.feedback",
    title="Rounding that makes up for itself",
    function="round_with_feedback",
    minutes=40,
    points=25,
    statement="""
Write `round_with_feedback(w_DF, x_ND, damp)`, which rounds weights to 4 bits and has the rows that aren't rounded yet
make up for the error. `x_ND` are inputs that the layer has seen.

- Each column of w has a scale: its largest magnitude divided by 7, or 1 for a column of zeros. It never changes.
- Rows are rounded one after another, beginning with row 0, to the nearest multiple of each column's scale, from -7 to 7
  times the scale.
- Rounding row d leaves an error e_F: the row as it was just before rounding, minus the row as it is now. It changes the
  product by x_N e_F, where x_N is column d of x_ND. Before you go on, add to the *later* rows the change C_RF that
  makes up for it best: the one that minimises ‖x_NR C_RF - x_N e_F‖² + damp ‖C_RF‖², where x_NR are the inputs of the
  later rows.

N x D x F goes up to 300 x 40 x 30 and all checks together have a minute, so you can afford to solve D systems of
equations. The checks compare ‖x (w - rounded)‖² + damp ‖w - rounded‖², with a margin of 3 percent.
""",
    hints=(
        "The change is a least-squares problem that you can solve in one line for all columns at once: e_F is only "
        "a factor in its solution.",
        "With H = xᵀx + damp I, the minimum is where H[later, later] C = H[later, d] e_F.",
        "For each d: `q = clip(round(w[d] / scale), -7, 7)`, `error = w[d] - q * scale`, and "
        "`w[d+1:] += np.outer(np.linalg.solve(H[d+1:, d+1:], H[d+1:, d]), error)`, in float64 and on a copy of w.",
    ),
)  # fmt: skip


def feedback_with(
    *,
    feeds=True,
    sign=1,
    solve="later",
    scales="first",
    limit=7,
    order=1,
    damps=True,
    original=False,
    whole=False,
    moves=False,
    mean=False,
    relative=False,
    in_steps=False,
    onto_next=False,
    by_row=False,
    low=None,
    squared=False,
):
    def fn(w_DF, x_ND, damp):
        D = len(w_DF)
        w, x = w_DF.astype(np.float64), x_ND.astype(np.float64)
        first = np.abs(w).max() if whole else np.abs(w).max(int(by_row))
        scale = np.where(first > 0, first / limit, 1.0)
        scale = scale if by_row else np.broadcast_to(scale, w.shape[1:]).copy()
        H = x.T @ x / (len(x) if mean else 1)
        damp = damp**2 if squared else damp
        H += damp * (np.diag(H).mean() if relative else 1) * np.eye(D) if damps else 0
        inverse = np.linalg.pinv(H)
        values = np.zeros(w.shape)
        places = list(range(D))[::order]
        for n, d in enumerate(places):
            if moves:
                scale = np.where(np.abs(w).max(0) > 0, np.abs(w).max(0) / limit, 1.0)
            values[d] = np.clip(np.round(w[d] / scale), low or -limit, limit)
            error = (w_DF[d] if original else w[d]) - values[d] * scale
            error = error / scale if in_steps else error
            later = places[n + 1 :]
            if not later or not feeds:
                continue
            if solve == "later" and not onto_next:
                share = np.linalg.lstsq(H[np.ix_(later, later)], H[later, d], rcond=None)[0]
            elif onto_next:
                share = np.eye(len(later))[0]
            elif solve == "own":
                share = H[later, d] / H[d, d]
            elif solve == "each":
                share = H[later, d] / np.diag(H)[later]
            elif solve == "next":
                share = np.linalg.lstsq(H[np.ix_(later, later)], H[later, d], rcond=None)[0]
                share[1:] = 0
            elif solve == "diagonal":
                share = H[later, d] / np.diag(H)[later] / len(later)
            else:
                share = -inverse[later, d] / inverse[d, d]
            w[later] += sign * np.outer(share, error)
        return values.astype(np.int8), scale.astype(np.float32)

    return fn


def layer(t, N, D, F, rank=None):
    """Inputs that are strongly correlated, as those of a layer are, and weights."""
    rank = rank or max(1, D // 3)
    x = t.rng.normal(size=(N, rank)) @ t.rng.normal(size=(rank, D)) + 0.15 * t.rng.normal(
        size=(N, D)
    )
    w = t.rng.normal(size=(D, F)) * 10.0 ** t.rng.uniform(-2, 1, F)
    return w.astype(np.float32), x.astype(np.float32)


def objective(w, x, values, scale, damp):
    change = w.astype(np.float64) - np.asarray(values, np.float64) * np.asarray(scale, np.float64)
    # In parts of each column's own size, so that none hides another.
    size = np.maximum(np.abs(w).max(0).astype(np.float64), 1e-30)
    off = (np.sum((x.astype(np.float64) @ change) ** 2, 0) + damp * np.sum(change**2, 0)) / size**2
    return float(np.sum(off))


def rounds(fn, t, w, x, damp, why):
    given = w.copy(), x.copy()
    values, scale = fn(w.copy(), x.copy(), damp)
    want, right = feedback_with()(*given, damp)
    largest = np.abs(w).max(0)
    told = {
        "A column of zeros has scale 1": largest / 7,
        "Each column of w has one, not each row": np.abs(w).max(1) / 7,
        "You take the largest number, not the largest magnitude": w.max(0) / 7,
        "4 bits have two's -8 as well, but here the numbers go from -7 to 7": largest / 8,
        "The largest magnitude becomes 7, not 127: the numbers have 4 bits": largest / 127,
        "From -7 to 7 are 14 steps, but the scale is the largest magnitude divided by 7": largest
        / 7.5,
    }
    t.close(
        scale, right, 1e-5, 0, f"scales of the columns of w as it was given, {why}", mistakes=told
    )
    values = np.asarray(values)
    t.true(
        values.shape == w.shape,
        f"values have the shape {values.shape}, want w's, {why}",
        values.shape,
    )
    t.true(
        values.dtype == np.int8, f"values are {values.dtype}, want int8, {why}", str(values.dtype)
    )
    t.true(
        np.abs(values.astype(int)).max() <= 7,
        f"values go beyond -7 to 7, {why}",
        np.abs(values).max(),
    )
    off = values[0].astype(int) - want[0]
    told = "rounded to the nearest"
    if np.all(off * want[0] <= 0):
        told = (
            "where it is off, it is nearer to 0: don't cut off the fraction, round to the nearest"
        )
    elif np.all(off <= 0) or np.all(off >= 0):
        told = f"where it is off, it is rounded {'down' if off.min() < 0 else 'up'}, not to the nearest"
    t.close(values[0], want[0], 0, 0, f"row 0, which comes first: {told}, {why}")
    last = np.any(w[-1] != 0) and not np.any(values[-1]) and bool(np.any(want[-1]))
    t.true(not last, f"the last row is all zeros: it is rounded like the others, {why}", values[-1])
    got, best = (objective(w, x, each, scale, damp) for each in (values, want))
    wrong = np.flatnonzero(np.any(values != want, 1))
    told = f"the error is {got / max(best, 1e-30):.2f} times what it can be"
    told += f"; row {wrong[0]} is the first that comes out wrong" if len(wrong) else ""
    t.true(got <= 1.03 * best + 1e-9, f"{told}, {why}", got)


@feedback.check("two rows that see the same")
def _(fn, t):
    x = np.repeat(t.rng.normal(size=(30, 1)), 2, axis=1).astype(np.float32)
    w = np.concatenate([t.rng.uniform(-1, 1, (2, 12)), np.ones((2, 1))], 1).astype(np.float32)
    rounds(fn, t, w, x, 0.01, "two equal inputs: the second row can make up for the first")


@feedback.check("a layer")
def _(fn, t):
    for N, D, F in ((300, 40, 30), (120, 17, 25), (200, 24, 8)):
        w, x = layer(t, N, D, F)
        rounds(fn, t, w, x, 0.01 * N, f"{N} tokens, {D} inputs, {F} outputs")


@feedback.check("inputs of which none helps another")
def _(fn, t):
    x = np.eye(12, dtype=np.float32)
    w = t.rng.normal(size=(12, 9)).astype(np.float32)
    values, _ = fn(w.copy(), x, 0.1)
    scale = np.abs(w).max(0) / 7
    t.equal(
        np.asarray(values), np.round(w / scale).astype(np.int8), "x is the identity: plain rounding"
    )


@feedback.check("fewer tokens than inputs, zeros")
def _(fn, t):
    w, x = layer(t, 9, 20, 16)
    x[:, 4] = 0
    w[:, 3] = 0
    for damp in (0.5, 5.0):
        rounds(fn, t, w, x, damp, f"9 tokens, 20 inputs, one of them never seen, damp = {damp}")


@feedback.check("a large damp")
def _(fn, t):
    w, x = layer(t, 60, 20, 16)
    rounds(fn, t, w, x, 60.0, "60 tokens, damp = 60")


@feedback.check("one row, one column")
def _(fn, t):
    for D, F in ((1, 7), (11, 1)):
        w, x = layer(t, 40, D, F)
        rounds(fn, t, w, x, 0.1, f"{D} inputs, {F} outputs")


@feedback.check("the arguments")
def _(fn, t):
    w, x = layer(t, 40, 9, 5)
    given = w.copy(), x.copy()
    fn(w, x, 0.1)
    t.true(
        np.array_equal(w, given[0]) and np.array_equal(x, given[1]), "the arguments were changed", w
    )


def in_place(w_DF, x_ND, damp):
    w, scale = w_DF, np.where(np.abs(w_DF).max(0) > 0, np.abs(w_DF).max(0) / 7, 1.0)
    H = x_ND.astype(np.float64).T @ x_ND + damp * np.eye(len(w))
    values = np.zeros(w.shape)
    for d in range(len(w)):
        values[d] = np.clip(np.round(w[d] / scale), -7, 7)
        error = w[d] - values[d] * scale
        w[d + 1 :] += np.outer(np.linalg.solve(H[d + 1 :, d + 1 :], H[d + 1 :, d]), error)
    return values.astype(np.int8), scale.astype(np.float32)


for name, hint, options in (
    ("nearest", "Each row is rounded by itself, and later rows don't make up for its error.", {"feeds": False}),
    ("wrong_sign", "Your change doubles the error instead of replacing it. What was taken from row d must be added "
     "to the others.", {"sign": -1}),
    ("row_by_row", "You share the error out one row at a time, by the diagonal of H. The later rows are correlated "
     "too: solve for all of them at once.", {"solve": "diagonal"}),
    ("own_row_of_h", "You divide H[later, d] by H[d, d]. What the later rows can do depends on their own part of H: "
     "solve with that.", {"solve": "own"}),
    ("each_for_itself", "You choose the change of each later row as if it alone made up for the error. Together they "
     "do too much: solve for all of them at once.", {"solve": "each"}),
    ("next_row_only", "Only the next row makes up for the error. All later rows change.", {"solve": "next"}),
    ("damp_squared", "You square damp, as if it counted like an input. It counts as it is.", {"squared": True}),
    ("whole_inverse", "You take the inverse of H with all rows. Those that are rounded already can't change any more: "
     "invert what belongs to the later rows.", {"solve": "whole"}),
    ("seven_and_a_half", "The largest magnitude becomes 7, so a scale is that divided by 7.", {"limit": 8}),
    ("last_row_first", "Rows are rounded from row 0 on.", {"order": -1}),
    ("one_scale", "Each column of w has a scale of its own.", {"whole": True}),
    ("error_of_the_original", "You measure the error from the original weights. The row has changed since, to make up "
     "for others: measure it from the row as it was just before.", {"original": True}),
    ("no_damping", "You leave damp out. With fewer tokens than inputs nothing then holds the changes back.",
     {"damps": False}),
    ("scales_move", "You compute scales again after rows have changed. They come from w as it was given.",
     {"moves": True}),
    ("mean_of_tokens", "You divide x^T x by the number of tokens. The sum of squares is over all of them, and damp "
     "counts beside that sum.", {"mean": True}),
    ("relative_damp", "You multiply damp by the mean of the diagonal, as some libraries do. Here it counts as it is.",
     {"relative": True}),
    ("error_in_steps", "You measure the error in steps of the scale. The later rows are weights: add what is missing "
     "in weights.", {"in_steps": True}),
    ("onto_the_next_row", "You add the error to the next row as it is. How much a later row can make up for depends "
     "on the inputs.", {"onto_next": True}),
    ("scale_of_a_row", "You take the largest magnitude of each row. Each column of w has a scale.", {"by_row": True}),
    ("minus_eight", "Your values go beyond -7 to 7. int4 can hold -8, too, but here it isn't used.", {"low": -8}),
):  # fmt: skip
    mistaken(feedback, name, hint, feedback_with(**options))
mistaken(
    feedback,
    "in_place",
    "You write into w_DF, which belongs to the caller. Work on a copy.",
    in_place,
)
