import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.book.grading import Exercise
from minitext.compiler.aot import compiles_for
from minitext.kernels.simulator import strict


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def simulate(t, fn, *args):
    """The result and the one kernel's run, in the strict simulator, in an order of its own."""
    with strict(seed=int(t.rng.integers(1, 1000))) as runs:
        out = jax.jit(fn)(*args)
    t.equal(len(runs), 1, why="how many Pallas calls run")
    return out, runs[0]


def compiles(t, fn, *args):
    reason = compiles_for("v5e", fn, *args)
    shapes = ", ".join(str(list(x.shape)) for x in args)
    t.true(reason is None, f"Mosaic does not compile it for a v5e at {shapes}: {reason}", reason)


def largest_outside(fn, *args):
    """The number of entries of the largest array outside of Pallas calls."""
    sizes = [0]

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            sizes.extend(math.prod(out.aval.shape) for out in eqn.outvars)
            if eqn.primitive.name != "pallas_call":
                for inner in jax.tree.leaves(list(eqn.params.values())):
                    if hasattr(inner, "jaxpr"):
                        walk(inner.jaxpr)

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return max(sizes)


def pallas_calls(jaxpr):
    """The equations of a function's Pallas calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
            continue
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "jaxpr"):
                yield from pallas_calls(inner.jaxpr)


def the_call(t, fn, *args):
    calls = list(pallas_calls(jax.make_jaxpr(fn)(*args).jaxpr))
    t.equal(len(calls), 1, why="how many Pallas calls there are")
    return calls[0]


def loads_of(t, run, call, size, count, what):
    """How many blocks are loaded of each array of `size` entries, the most last."""
    arrays = call.invars[call.params["grid_mapping"].num_index_operands :]
    sizes = [math.prod(x.aval.shape) for x in arrays]
    loads = [n for n, entries in zip(run.loads, sizes, strict=False) if entries == size]
    why = f"how many arrays of {size} entries, the size of {what}, the kernel is given"
    t.equal(len(loads), count, why=why)
    return sorted(loads)


def keeps_wide_sums(t, call):
    """Products have factors in bfloat16 and a float32 result, and no scratch is narrower."""
    kernel = call.params["jaxpr"]
    count = call.params["grid_mapping"].num_scratch_operands
    scratch = {ref.aval.dtype.name for ref in kernel.invars[len(kernel.invars) - count :]}
    why = f"for bfloat16 arguments, running sums are kept in {', '.join(sorted(scratch)) or 'no scratch'}"
    t.true("float32" in scratch and "bfloat16" not in scratch, why, "scratch")
    for eqn in all_equations(kernel):
        if eqn.primitive.name == "dot_general":
            types = [x.aval.dtype.name for x in (*eqn.invars, *eqn.outvars)]
            why = f"for bfloat16 arguments, a product of {types[0]} and {types[1]} gives {types[2]}"
            t.true(types == ["bfloat16", "bfloat16", "float32"], why, "product")


def all_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from all_equations(getattr(inner, "jaxpr", inner))


def numbers(t, *shape, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(scale * t.rng.normal(size=shape), dtype)


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


# ----------------------------------------------------------------------------- online_softmax

online = Exercise(
    "17.online_softmax",
    title="Softmax, a block at a time",
    function="online_softmax",
    minutes=25,
    points=10,
    forbid=("jax.nn.softmax", "jax.nn.logsumexp", "jax.scipy.special.logsumexp"),
    statement="""
Write `online_softmax(blocks)`. It gets blocks of logits one after another, each with its values, and returns what
softmax over all of them would give: the weighted sum of values, and the logsumexp.

- `blocks` is an iterator, so you can go through it only once. Its blocks differ in width. Use each block before you ask
  for the next one: a list of all blocks is as large as all the logits at once.
- A row may contain logits of 90 and of -90, in any order, so a block's maximum may be above or below the one before.
  While one row is near 90, another may be near -90.
- Some logits are -inf, perhaps a block's whole row, before or after finite ones. A row that has only -inf gives zeros,
  and -inf as its logsumexp.
- Values may be bfloat16. The sums and both results are float32.
""",
    hints=(
        "Keep three things for each row: the largest logit so far, the sum of exponentials, and the weighted "
        "sum of values. The latter two are relative to the first.",
        "When the maximum goes from `top` to `higher`, multiply everything that is relative to it by "
        "exp(top - higher). What is that factor when both are -inf?",
        "`shift = jnp.where(higher == -jnp.inf, 0, higher)`; exponentials are `exp(logits - shift)`, the factor is "
        "`exp(top - shift)`, and it multiplies the sum and the output. At the end divide by the sum, or by 1 where "
        "it is 0.",
    ),
)


def in_pieces(t, T, widths, H=5, scale=1.0, dtype=jnp.float32):
    return [(numbers(t, T, S, scale=scale), numbers(t, S, H, dtype=dtype)) for S in widths]


def softmax_of(logits_TS):
    exps = np.exp(logits_TS - logits_TS.max(1, keepdims=True))
    return exps / exps.sum(1, keepdims=True)


def inflated(blocks):
    """The output if sums are multiplied by exp(new - old) when the maximum rises from old to new."""
    top, size, out = blocks[0][0].max(1, keepdims=True), 0.0, 0.0
    for logits_TS, v_SH in blocks:
        higher = np.maximum(top, logits_TS.max(1, keepdims=True))
        exps_TS, factor = np.exp(logits_TS - higher), np.exp(higher - top)
        size = size * factor + exps_TS.sum(1, keepdims=True)
        out, top = out * factor + exps_TS @ v_SH, higher
    return out / size


def pieces_are_right(fn, t, pieces, why, rtol=1e-4, atol=1e-5):
    logits = np.concatenate([np.asarray(a, np.float64) for a, _ in pieces], axis=1)
    values = np.concatenate([np.asarray(v, np.float64) for _, v in pieces])
    top = logits.max(1, keepdims=True)
    exps = np.exp(logits - np.where(np.isinf(top), 0, top))
    size = exps.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isinf(top), 0, top) + np.log(size))[:, 0]
    out = exps @ values / np.where(size == 0, 1, size)
    got = fn(pair for pair in pieces)
    t.equal(len(got), 2, why="how many results")
    blocks = [(np.asarray(a, np.float64), np.asarray(v, np.float64)) for a, v in pieces]
    first, last = (np.asarray(pieces[i][0], np.float64) for i in (0, -1))
    v_first, v_last = (np.asarray(pieces[i][1], np.float64) for i in (0, -1))
    with np.errstate(all="ignore"):
        mistakes = {
            "It isn't divided by the sum of exponentials": exps @ values,
            "That is the first block's alone": softmax_of(first) @ v_first,
            "That is the last block's alone": softmax_of(last) @ v_last,
            "It is divided by the number of keys, not by the sum of exponentials": exps @ values / logits.shape[1],
            "That is the sum of each block's own softmax: divide once, by the sum over all blocks": sum(
                softmax_of(a) @ v for a, v in blocks
            ),
            "That is the mean of each block's own softmax: a block counts by its sum of exponentials": sum(
                softmax_of(a) @ v for a, v in blocks
            ) / len(blocks),
            "What was summed before is multiplied by exp(new - old), which is at least 1: swap the two": inflated(
                blocks
            ),
        }  # fmt: skip
        lse_mistakes = {
            "That is the maximum: the logarithm of the sum is missing": top[:, 0],
            "That is the sum: the logarithm is missing": size[:, 0],
            "That is the sum's logarithm to base 2, plus the maximum": top[:, 0]
            + np.log2(size[:, 0]),
            "The maximum is subtracted; it is to be added": np.log(size[:, 0]) - top[:, 0],
            "It has the wrong sign": -lse,
        }
    t.close(got[0], out, rtol, atol, f"output, {why}", np.float32, mistakes)
    t.close(got[1], lse, rtol, atol, f"logsumexp, {why}", np.float32, lse_mistakes)


@online.check("one block")
def _(fn, t):
    pieces_are_right(fn, t, in_pieces(t, 3, [6]), "of one block")


@online.check("small logits in several blocks")
def _(fn, t):
    pieces_are_right(fn, t, in_pieces(t, 4, [3, 1, 5]), "of blocks of 3, 1 and 5 keys")


@online.check("maxima that rise, logits of +-90")
def _(fn, t):
    pieces = [
        (a + s, v) for (a, v), s in zip(in_pieces(t, 4, [4, 2, 3]), (-90, 0, 90), strict=True)
    ]
    pieces_are_right(fn, t, pieces, "of logits near -90, then 0, then 90")


@online.check("maxima that fall, logits of +-90")
def _(fn, t):
    pieces = [
        (a + s, v) for (a, v), s in zip(in_pieces(t, 4, [4, 2, 3]), (90, 89, -90), strict=True)
    ]
    pieces_are_right(fn, t, pieces, "of logits near 90, then 89, then -90")


@online.check("rows and blocks of -inf")
def _(fn, t):
    pieces = [(np.array(a), v) for a, v in in_pieces(t, 5, [4, 3, 2], scale=30)]
    for a, _ in pieces:
        a[1] = -np.inf
    pieces[0][0][2] = pieces[0][0][3, :3] = -np.inf
    pieces[2][0][4] = -np.inf
    pieces = [(jnp.asarray(a), v) for a, v in pieces]
    pieces_are_right(fn, t, pieces, "where row 1 is all -inf, and row 2 in the first block")


@online.check("rows near 90 beside rows near -90")
def _(fn, t):
    offsets = jnp.asarray([[90.0], [-95.0], [0.0], [-250.0]])
    pieces = [(a + offsets, v) for a, v in in_pieces(t, 4, [4, 2, 3])]
    pieces_are_right(fn, t, pieces, "of rows near 90, -95, 0 and -250", rtol=1e-3)


@online.check("values in bfloat16")
def _(fn, t):
    pieces = in_pieces(t, 3, [64, 64], dtype=jnp.bfloat16)
    pieces_are_right(fn, t, pieces, "of bfloat16 values, summed in float32")


@online.check("nothing is collected")
def _(fn, t):
    shapes = [(spec(4, 16, dtype=jnp.float32), spec(16, 8, dtype=jnp.float32))] * 8
    largest = largest_outside(lambda pieces: fn(iter(pieces)), shapes)
    t.true(
        largest <= 4 * 16 * 2,
        f"for blocks of [4, 16] logits and [16, 8] values, an array of {largest} numbers is made: all blocks "
        "together",
        largest,
    )


@online.check("each block is used before the next one")
def _(fn, t):
    def arriving(pieces):
        for logits_TS, v_SH in pieces:
            yield jax.lax.optimization_barrier((logits_TS, v_SH))

    shapes = [(spec(4, 16, dtype=jnp.float32), spec(16, 8, dtype=jnp.float32))] * 4
    names = t.primitives(lambda pieces: fn(arriving(pieces)), shapes)
    seen = [name for name in names if name in ("optimization_barrier", "exp", "exp2")]
    last = len(seen) - 1 - seen[::-1].index("optimization_barrier")
    early = seen[:last].count("optimization_barrier")
    t.true(early < last, f"{early + 1} blocks had come before you took the first exponential", seen)


def online_with(
    *,
    row_tops=True,
    floor=-jnp.inf,
    first_top=False,
    fade_sum=True,
    fade_out=True,
    running=True,
    shifted=True,
    finite=True,
    each=False,
    top_in_lse=True,
    turned=False,
    new_too=False,
    guarded=True,
):
    """The solution with a mistake that is asked for."""

    def fn(blocks):
        top, size, out = -jnp.inf, 0.0, 0.0
        for logits_TS, v_SH in blocks:
            high = jnp.max(logits_TS, axis=1, keepdims=True)
            higher = jnp.maximum(top, high) if running else high
            if not shifted:
                higher = jnp.zeros_like(high)
            if first_top:
                higher = jnp.where(top == -jnp.inf, high, top)
            if not row_tops:
                higher = jnp.full_like(higher, jnp.max(higher))
            higher = jnp.maximum(higher, floor)
            shift = jnp.where(higher == -jnp.inf, 0, higher) if finite else higher
            exps_TS = jnp.exp(logits_TS - shift)
            fade = jnp.exp(shift - top if turned else top - shift) if shifted else 1.0
            part = jnp.sum(exps_TS, axis=1, keepdims=True)
            add = exps_TS @ v_SH.astype(jnp.float32)
            if new_too:
                part, add = part * fade, add * fade
            size = size * (fade if fade_sum else 1) + part
            out = out * (fade if fade_out else 1) + (add / part if each else add)
            top = higher
        size_1 = jnp.where(size == 0, 1, size) if guarded else size
        lse = (shift if top_in_lse else 0) + jnp.log(size_1)
        lse = jnp.where(size == 0, -jnp.inf, lse)[:, 0]
        return (out if each else out / size_1), lse

    return fn


mistaken(
    online,
    "output_not_scaled",
    "You rescale the sum but not the output. Both are relative to the old maximum: multiply both by "
    "exp(top - higher).",
    online_with(fade_out=False),
)
mistaken(
    online,
    "sum_not_scaled",
    "You rescale the output but not the sum. Both are relative to the old maximum: multiply both by "
    "exp(top - higher).",
    online_with(fade_sum=False),
)
mistaken(
    online,
    "maximum_of_the_block",
    "You use each block's own maximum, which may be lower than an earlier one. Then the old sums are scaled *up* "
    "and overflow: keep the larger maximum.",
    online_with(running=False),
)
mistaken(
    online,
    "no_maximum",
    "You don't subtract a maximum. exp(90) is more than float32 can hold, and inf / inf is NaN.",
    online_with(shifted=False),
)
mistaken(
    online,
    "minus_infinity_minus_itself",
    "If a row has seen only -inf, its maximum is -inf, and -inf - (-inf) is NaN. Shift such a row by 0.",
    online_with(finite=False),
)
mistaken(
    online,
    "divided_in_each_block",
    "You divide within each block, so every block has weight 1. Divide once, at the end, by the sum over all.",
    online_with(each=True),
)
mistaken(
    online,
    "logsumexp_without_maximum",
    "Your logsumexp is the logarithm of a sum that is relative to the maximum. Add the maximum to it.",
    online_with(top_in_lse=False),
)


mistaken(
    online,
    "factor_turned_over",
    "Your factor has the wrong sign in its exponent. When the maximum rises, what was summed before becomes smaller, "
    "and exp(old - new) is at most 1.",
    online_with(turned=True),
)
mistaken(
    online,
    "new_block_scaled_too",
    "You multiply the new block's part by the factor as well. It is relative to the new maximum already; only what "
    "came before is relative to the old one.",
    online_with(new_too=True),
)
mistaken(
    online,
    "zero_by_zero",
    "A row of nothing but -inf has a sum of 0, and you divide 0 by it, which is NaN.",
    online_with(guarded=False),
)
mistaken(
    online,
    "one_maximum_for_all_rows",
    "You take one maximum over all rows. A row whose logits are far below it has no exponentials left: take each "
    "row's own.",
    online_with(row_tops=False),
)
mistaken(
    online,
    "maximum_from_zero",
    "Your running maximum begins at 0, or at another finite number. A row whose logits are all far below it has no "
    "exponentials left: begin at -inf.",
    online_with(floor=0.0),
)
mistaken(
    online,
    "maximum_of_the_first_block",
    "You keep the first block's maximum. A later logit may be larger by more than exp can take: compare with every "
    "block.",
    online_with(first_top=True),
)
mistaken(
    online,
    "nothing_is_scaled",
    "When the maximum rises you go on adding, but what you have summed is relative to the old one: multiply the "
    "sum and the output by exp(top - higher).",
    online_with(fade_sum=False, fade_out=False),
)


@online.mutant(
    "You put all blocks into a list before you begin. Together they are as large as all the logits at once: use each "
    "block as it comes, and keep only the maximum, the sum and the output."
)
def listed(blocks):
    return online_with()(list(blocks))


@online.mutant(
    "You round the exponentials to the dtype of the values. The sums are float32: convert the values instead."
)
def narrow_exponentials(blocks):
    top = size = out = None
    for logits_TS, v_SH in blocks:
        high = jnp.max(logits_TS, axis=1, keepdims=True)
        higher = high if top is None else jnp.maximum(top, high)
        shift = jnp.where(higher == -jnp.inf, 0, higher)
        exps_TS = jnp.exp(logits_TS - shift)
        add = (exps_TS.astype(v_SH.dtype) @ v_SH).astype(jnp.float32)
        part = jnp.sum(exps_TS, axis=1, keepdims=True)
        fade = 0.0 if top is None else jnp.exp(top - shift)
        size = part if size is None else size * fade + part
        out = add if out is None else out * fade + add
        top = higher
    lse = jnp.where(size == 0, -jnp.inf, shift + jnp.log(jnp.where(size == 0, 1, size)))
    return out / jnp.where(size == 0, 1, size), lse[:, 0]


@online.mutant(
    "A row of nothing but -inf has a logsumexp of -inf: the logarithm of 0. You return a finite number."
)
def finite_logsumexp(blocks):
    out, lse = online_with()(blocks)
    return out, jnp.where(lse == -jnp.inf, 0.0, lse)


@online.mutant(
    "You join all blocks before you begin. That's exactly the array that a kernel has no room for: use each block as "
    "it comes."
)
def collected(blocks):
    pairs = list(blocks)
    logits = jnp.concatenate([a for a, _ in pairs], axis=1)
    values = jnp.concatenate([v.astype(jnp.float32) for _, v in pairs])
    return online_with()([(logits, values)])


# --------------------------------------------------------------------------------- block_mask

block_mask = Exercise(
    "17.block_mask",
    title="Which blocks a mask leaves",
    function="block_kinds",
    minutes=25,
    points=10,
    seconds=30.0,
    statement="""
Xiao et al. keep a model with sliding windows stable by letting every token see the first few tokens of the row as
well {cite}`xiao2024`. Query t sees key s if $s \\le t$ **and** at least one of two things holds:
$s > t - \\text{window}$ or $s < \\text{prefix}$. `Mask` has no such condition.

Write `block_kinds(T, block_q, block_kv, window, prefix)`, which says for each block whether none (0), some (1) or all
(2) of it is seen. Compute it from the block's corners alone.

- Results are exact. A 1 for a block that isn't seen costs a block's work; a 2 for a block that is only partly seen
  gives wrong results.
- T needn't be a multiple of a block. No query sees keys beyond T, so a block that has such keys is never a 2. Queries
  beyond T don't count.
- A window of 1 is the token itself. The prefix may be 0, or longer than T.
- Never make anything of size T x T: with T = 131,072 and blocks of 256, the function takes less than a second.
""",
    hints=(
        "Four numbers describe a block: its first and last query, its first and last key. Within it, t - s takes "
        "every value between two of them.",
        "*Some*: there's a key that isn't in the future, and either the smallest distance t - s >= 0 is within the "
        "window or the first key is in the prefix. *All* depends on the worst pair: which query and key are farthest "
        "apart, if you leave out the prefix?",
        "Some: `(first_kv <= last_q) & ((max(first_q - last_kv, 0) < window) | (first_kv < prefix))`. All: "
        "`last_kv <= first_q`, and `last_q - max(first_kv, prefix) < window` or `last_kv < prefix`.",
    ),
)


def seen_square(T, window, prefix):
    s, u = np.arange(T)[:, None], np.arange(T)
    return (u <= s) & ((u > s - window) | (u < prefix))


def kinds_of_square(T, block_q, block_kv, window, prefix):
    seen = seen_square(T, window, prefix)
    kinds = np.zeros((-(-T // block_q), -(-T // block_kv)), int)
    for i, j in np.ndindex(*kinds.shape):
        part = seen[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
        kinds[i, j] = int(part.any()) + int(part.all() and (j + 1) * block_kv <= T)
    return kinds


def other_parts(T, block_q, block_kv, window, prefix):
    """Two dicts of wrong answers, under what is to be said of them: blocks that are seen, and blocks that are whole."""
    i, j = np.arange(-(-T // block_q))[:, None], np.arange(-(-T // block_kv))
    first_q, first_kv = i * block_q, j * block_kv
    last_q, last_kv = (np.minimum(x, T) - 1 for x in (first_q + block_q, first_kv + block_kv))
    nearest, farthest = np.maximum(first_q - last_kv, 0), last_q - np.maximum(first_kv, prefix)
    begun, past = first_kv <= last_q, last_kv <= first_q
    exists = first_kv + block_kv <= T
    seen = (nearest < window) | (first_kv < prefix)
    every = ((farthest < window) | (last_kv < prefix)) & exists
    far = last_q - first_kv
    beyond = first_q + block_q - 1
    some = {
        "as if the window were one longer: it has the distances 0 to window - 1": begun
        & ((nearest <= window) | (first_kv < prefix)),
        "as if the window were one shorter: it has the distances 0 to window - 1": begun
        & ((nearest < window - 1) | (first_kv < prefix)),
        "as if the prefix were one longer: it has the keys 0 to prefix - 1": begun
        & ((nearest < window) | (first_kv <= prefix)),
        "as if there were no prefix": begun & (nearest < window),
        "as if only blocks that lie in the prefix as a whole were seen because of it": begun
        & ((nearest < window) | (last_kv < prefix)),
        "as if all queries saw the prefix, even those before its keys": (begun & (nearest < window))
        | (first_kv < prefix),
        "as if queries saw later keys too": seen,
        "as if there were no window": begun,
        "by the farthest pair, last query and first key, where the nearest pair decides": begun
        & ((far < window) | (first_kv < prefix)),
        "by the block's first query and first key, where the nearest pair decides": begun
        & ((first_q - first_kv < window) | (first_kv < prefix)),
        "by the last query and the last key, where the nearest pair decides": begun
        & ((last_q - last_kv < window) | (first_kv < prefix)),
        "by the numbers of the blocks, but these compare only if both blocks have the same size": (j <= i)
        & seen,
        "as if a key were in the future if it is after the block's first query": (first_kv <= first_q)
        & seen,
        "as if the block's last key had to be in the past": (last_kv <= last_q) & seen,
        "as if the block's last key had to be before its first query": past & seen,
        "as if there were queries beyond T": (first_kv <= beyond) & seen,
    }  # fmt: skip
    whole = {
        "as if the window were one longer: it has the distances 0 to window - 1": past
        & ((farthest <= window) | (last_kv < prefix)) & exists,
        "as if the window were one shorter: it has the distances 0 to window - 1": past
        & ((farthest < window - 1) | (last_kv < prefix)) & exists,
        "as if the prefix were one longer: it has the keys 0 to prefix - 1": past
        & ((far - np.maximum(prefix + 1 - first_kv, 0) < window) | (last_kv <= prefix)) & exists,
        "as if a block were in the prefix whose last key is number `prefix`": past
        & ((farthest < window) | (last_kv <= prefix)) & exists,
        "as if there were no prefix": past & (far < window) & exists,
        "as if one of the two had to cover the block alone: its first keys may be in the prefix, the rest in the "
        "window": past & ((far < window) | (last_kv < prefix)) & exists,
        "as if the prefix covered a block if it has the first key": past
        & ((far < window) | (first_kv < prefix)) & exists,
        "as if a few corners decided: the first keys are in the prefix, the last ones in the window, and keys between "
        "them in neither": past & ((far < window) | (first_kv < prefix))
        & ((first_q - last_kv < window) | (last_kv < prefix)) & exists,
        "as if all queries saw the prefix, even those before its keys": (past & every)
        | (last_kv < prefix) & exists,
        "as if queries saw later keys too": every,
        "as if there were no window": past & exists,
        "by the nearest pair, where the farthest decides": past
        & ((nearest < window) | (last_kv < prefix)) & exists,
        "by the first query and the first key, where the farthest pair decides": past
        & ((first_q - first_kv < window) | (last_kv < prefix)) & exists,
        "by the numbers of the blocks, but these compare only if both blocks have the same size": (j < i)
        & every,
        "as if the first key had to be in the past of the first query: the last key has to": (first_kv <= first_q)
        & every,
        "as if the last key had to be in the past of the last query: of the first query it has to": (last_kv <= last_q)
        & every,
        "as if the last key had to be before the first query: it may be that token itself": (last_kv < first_q)
        & every,
        "as if there were keys beyond T": past & (every | ~exists & ((farthest < window) | (last_kv < prefix))),
        "as if there were queries beyond T": past & exists
        & ((beyond - np.maximum(first_kv, prefix) < window) | (last_kv < prefix)),
    }  # fmt: skip
    return some, whole


# Enough cases for two mistakes to differ in one of them.
PARTS = (
    (48, 8, 8, 10, 11), (48, 8, 8, 1, 0), (48, 8, 8, 9, 8), (47, 8, 8, 16, 3), (33, 8, 10, 12, 3), (33, 8, 10, 35, 0),
    (41, 9, 6, 5, 0), (29, 7, 4, 9, 6), (24, 3, 4, 24, 0), (50, 10, 3, 17, 20), (23, 5, 5, 8, 100),
)  # fmt: skip


def wrong_part(fn, *args):
    """Whether it is seen or whole blocks that are wrong, and what the mistake is if all cases show the same."""
    cases = [
        (np.asarray(fn(*case)), kinds_of_square(*case), other_parts(*case))
        for case in (args, *PARTS)
    ]
    if any(got.shape != want.shape for got, want, _ in cases):
        return ""
    told = []
    for part, (name, kinds) in enumerate((("seen at all (1 or 2)", (1, 2)), ("whole (2)", (2,)))):
        if all((np.isin(got, kinds) == np.isin(want, kinds)).all() for got, want, _ in cases):
            told.append(f"Which blocks are {name} is right")
            continue
        fitting = (
            text
            for text in cases[0][2][part]
            if all(
                (np.isin(got, kinds) == (others[part][text] & ((got > 0) | (part == 0)))).all()
                for got, _, others in cases
            )
        )
        found = next(fitting, "")
        wrong = f"Which blocks are {name} is wrong"
        told.append(f"You decide which blocks are {name} {found}" if found else wrong)
    return ". ".join(told)


def kinds_are_right(fn, t, *args):
    T, block_q, block_kv, window, prefix = args
    why = (
        f"T={T}, blocks of {block_q} queries and {block_kv} keys, window={window}, prefix={prefix}"
    )
    got, want = np.asarray(fn(*args)), kinds_of_square(*args)
    if got.shape != want.shape:
        shapes = {
            "The result is transposed: queries come first": want.shape[::-1],
            "Keys are counted in blocks of block_q": (-(-T // block_q), -(-T // block_q)),
            "Queries are counted in blocks of block_kv": (-(-T // block_kv), -(-T // block_kv)),
            "The last block isn't full, but it counts: round up": (T // block_q, T // block_kv),
        }
        t.equal(got.shape, want.shape, why=f"shape: {why}", mistakes=shapes)
    if (got != want).any():
        i, j = (int(n) for n in np.argwhere(got != want)[0])
        first, last = (i * block_q, j * block_kv), ((i + 1) * block_q - 1, (j + 1) * block_kv - 1)
        last_q, last_kv = min(last[0], T - 1), min(last[1], T - 1)
        beyond = f", and keys {T} to {last[1]} don't exist" if last[1] >= T else ""
        why += (
            f". Block [{i}][{j}] has queries {first[0]} to {last_q} and keys {first[1]} to {last_kv}{beyond}, so "
            f"t - s goes from {first[0] - last_kv} to {last_q - first[1]}. The window has 0 to {window - 1}"
        )
        why += f", the prefix keys 0 to {prefix - 1}" if prefix else ""
        part = seen_square(T, window, prefix)[first[0] : last_q + 1, first[1] : last_kv + 1]
        for found, text in ((part, "sees"), (~part, "doesn't see")):
            pair = np.argwhere(found)[:1] + first
            why += "".join(f". Query {q} {text} key {k}" for q, k in pair)
        why = ". ".join(filter(None, (why, wrong_part(fn, *args))))
    t.equal(got.tolist(), want.tolist(), why=why)


@block_mask.check("causal alone")
def _(fn, t):
    kinds_are_right(fn, t, 32, 8, 8, 32, 0)


@block_mask.check("a window")
def _(fn, t):
    for window in (1, 8, 9, 15, 16, 17):  # the farthest pair of two neighbours is 15 apart
        kinds_are_right(fn, t, 48, 8, 8, window, 0)


@block_mask.check("a window and a prefix")
def _(fn, t):
    for prefix in (1, 7, 8, 9, 11, 100):  # of 7, key 7 is the first that isn't in it
        kinds_are_right(fn, t, 48, 8, 8, 10, prefix)
    # Keys 8 to 10 are in the prefix, 11 to 15 in the window of queries 16 to 23.
    kinds_are_right(fn, t, 48, 8, 8, 13, 11)


@block_mask.check("blocks that are not square, and a ragged T")
def _(fn, t):
    kinds_are_right(fn, t, 33, 8, 10, 40, 3)
    kinds_are_right(fn, t, 33, 8, 10, 35, 0)  # the last queries see all, those beyond T would not
    kinds_are_right(fn, t, 24, 3, 4, 24, 0)  # query 3 is the first of its block, key 3 the last
    kinds_are_right(fn, t, 7, 1, 1, 3, 2)
    for _ in range(12):
        T, window = (int(x) for x in t.rng.integers(20, 60, 2))
        block_q, block_kv, prefix = (int(x) for x in t.rng.integers(2, 20, 3))
        kinds_are_right(fn, t, T, block_q, block_kv, window, prefix)


@block_mask.check("a long row")
def _(fn, t):
    n = 512
    i, j = np.arange(n)[:, None], np.arange(n)
    want = np.where((j < i) & ((j > i - 4) | (j == 0)), 2, 0)
    want[(j == i) | ((j == i - 4) & (j > 0))] = 1
    got = np.asarray(fn(256 * n, 256, 256, 1024, 256))
    t.equal(got.shape, want.shape, why="shape for T = 131072 and blocks of 256")
    t.equal(int((got != want).sum()), 0, why="blocks that are wrong for T = 131072")


def kinds_with(
    *, some=None, whole=None, ragged=True, clipped=True, prefix_whole=True, later=True, wider=0, longer=0,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(T, block_q, block_kv, window, prefix):
        count = -(-T // block_q), -(-T // block_kv)
        first_q = block_q * np.arange(count[0])[:, None]
        first_kv = block_kv * np.arange(count[1])[None]
        last_q, last_kv = first_q + block_q - 1, first_kv + block_kv - 1
        if clipped:
            last_q, last_kv = np.minimum(last_q, T - 1), np.minimum(last_kv, T - 1)
        nearest = np.maximum(first_q - last_kv, 0)
        in_window = nearest < window
        if some == "corner":
            in_window = first_q - first_kv < window
        in_prefix = first_kv < prefix
        seen = in_window | in_prefix if later else in_window
        any_ = (first_kv <= last_q) & seen
        if later == "future":
            any_ = ((first_kv <= last_q) & in_window) | in_prefix
        farthest = last_q - np.maximum(first_kv, prefix)
        if whole == "corner":
            farthest = first_q - first_kv
        elif whole == "apart":
            farthest = last_q - first_kv
        inside = farthest < window + wider
        if prefix_whole:
            inside = inside | (last_kv < prefix + longer)
        every = (last_kv <= first_q) & inside
        if ragged:
            every &= first_kv + block_kv <= T
        return any_.astype(int) + (any_ & every)

    return fn


mistaken(
    block_mask,
    "first_corner_decides",
    "You ask whether the block's *first* query and key are within the window. Some of a block is seen if its "
    "nearest pair is: the first query and the last key.",
    kinds_with(some="corner"),
)
mistaken(
    block_mask,
    "whole_by_the_first_query",
    "You call a block whole because its first query sees its first key. The farthest pair decides: the *last* "
    "query and the first key.",
    kinds_with(whole="corner"),
)
mistaken(
    block_mask,
    "prefix_forgotten",
    "You leave out blocks beyond the window that begin with keys of the prefix. All later queries see those keys.",
    kinds_with(later=False),
)
mistaken(
    block_mask,
    "prefix_in_the_future",
    "You let queries see keys of the prefix that come after them. Window and prefix count only if s <= t.",
    kinds_with(later="future"),
)
mistaken(
    block_mask,
    "prefix_or_window_alone",
    "A block can be whole although neither condition covers it: its first keys are in the prefix, and the others "
    "in the window. The worst pair is the last query and the first key that is *not* in the prefix.",
    kinds_with(whole="apart"),
)
mistaken(
    block_mask,
    "window_too_wide_by_one",
    "You call a block whole whose farthest pair is `window` apart. A query sees keys at distances 0 to window - 1.",
    kinds_with(wider=1),
)
mistaken(
    block_mask,
    "prefix_too_long_by_one",
    "You count key `prefix` as part of the prefix. The prefix is keys 0 to prefix - 1, so all of a block is in it if "
    "its last key is less than `prefix`.",
    kinds_with(longer=1),
)
mistaken(
    block_mask,
    "padding_called_whole",
    "You call a block whole that reaches beyond T. No query sees those keys, so the block must be masked: 1.",
    kinds_with(ragged=False),
)
mistaken(
    block_mask,
    "padding_counted",
    "You count queries or keys beyond T: the last query is at most T - 1, and so is the last key.",
    kinds_with(clipped=False),
)


# -------------------------------------------------------------------------------- segment_ids

segment_ids = Exercise(
    "17.segment_ids",
    title="Flash attention in packed rows",
    function="packed_flash",
    minutes=40,
    points=20,
    forbid=("jax.nn.softmax", "jax.numpy.repeat", "jax.nn.dot_product_attention"),
    statement="""
Write `packed_flash(q_NTH, k_KTH, v_KTH, segments_T, block=128)`, the forward kernel for a packed row. Begin with
the kernel `causal_by_hand_kernel` of this chapter and add what the first two points below ask for.

- A token sees only itself and earlier tokens of its own segment.
- Segment ids never fall from one token to the next. So a block's *first* query sees farthest back: to the token with
  which its segment begins. Blocks of keys before that token are **neither loaded nor computed**, like those above the
  diagonal: for each head and block of queries, load at most as many blocks of keys, and of values, as contain a key
  that is seen. The segments are data, so use scalar prefetch.
- `N / K` adjacent query heads share a key head, which is not repeated. T is a multiple of the block.
- If q is bfloat16, so are the factors of all products, and the weights are rounded to it. Products and softmax add up
  in float32. Logits may be +-90.
- Use one Pallas call; heads and blocks of queries are parallel. It compiles for a v5e.
""",
    hints=(
        "For each block of queries, compute the first block of keys that it sees, outside the kernel: "
        "`jnp.searchsorted(segments_T, x)` is the index of segment x's first token. How can the index maps and "
        "`pl.when` use a prefetched argument?",
        "The index map of keys clips its block number between the first one and the diagonal. Pass the segment ids "
        "twice: as [T, 1] for queries and [1, T] for keys. Then comparing two blocks gives a square.",
        "`first = jnp.searchsorted(segments_T, segments_T[::block]) // block`; compute where "
        "`(j >= first_ref[i]) & (j <= i)`, load `jnp.clip(j, first_ref[i], i)`; "
        "`seen = (q_seg_ref[...] == k_seg_ref[...]) & ((j < i) | (s <= t))`.",
    ),
)


def segments_of(t, T, lengths=None):
    if lengths is None:
        return jnp.asarray(np.cumsum(t.rng.random(T) < 6 / T), jnp.int32)
    return jnp.asarray(np.repeat(3 * np.arange(len(lengths)), lengths), jnp.int32)


def attention_by_definition(q, k, v, segments, seen=None, power=0.5, divided=True):
    """With a mistake that is asked for: another mask, another scale, or no division by the sum."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    logits = np.einsum("nth,nsh->nts", q, k) / q.shape[2] ** power
    if seen is None:
        seen = np.tril(np.asarray(segments)[:, None] == np.asarray(segments))
    logits = np.where(seen, logits, -np.inf)
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("nts,nsh->nth", exps / exps.sum(-1, keepdims=True) if divided else exps, v)


def packed_mistakes(args, block):
    same = np.asarray(args[3])[:, None] == np.asarray(args[3])
    tokens = np.arange(len(same))
    near = np.tril(same & (tokens[:, None] // block == tokens // block))
    return {
        "A token sees all earlier tokens, of other segments too": attention_by_definition(
            *args, seen=np.tril(np.ones_like(same))
        ),
        "A token sees later tokens of its segment": attention_by_definition(*args, seen=same),
        "Only the block of keys on the diagonal counts": attention_by_definition(*args, seen=near),
        "The logits aren't divided by sqrt(H)": attention_by_definition(*args, power=0),
        "The logits are divided by H, not by its root": attention_by_definition(*args, power=1),
        "It isn't divided by the sum of exponentials": attention_by_definition(
            *args, divided=False
        ),
    }


def first_wrong_token(out, want, segments, block):
    """Which token's result is wrong first, and what it sees."""
    wrong = ~np.isclose(out, want, 1e-3, 1e-4).all(axis=(0, 2))
    if not wrong.any():
        return ""
    token = int(np.argmax(wrong))
    first = int(np.argmax(np.asarray(segments) == segments[token]))
    text = f"the first wrong token is {token}, in block {token // block}; it sees tokens {first} to {token}"
    text = f"{text}, from block {first // block} on"
    none = np.isnan(out[:, token]).any()
    return (
        f"{text}. A NaN there means that no block was computed for it, that the sums weren't set before the first, or "
        "that -inf was subtracted from -inf: a block may hold nothing that this token sees"
        if none
        else text
    )


def visible_blocks(segments, block):
    """Pairs of blocks of queries and keys with something to give."""
    seen = np.tril(np.asarray(segments)[:, None] == np.asarray(segments))
    n = len(segments) // block
    return seen.reshape(n, block, n, block).any(axis=(1, 3))


def packed_is_right(fn, t, N, K, H, segments, block, why):
    T = len(segments)
    args = *(numbers(t, heads, T, H) for heads in (N, K, K)), segments
    out, run = simulate(t, lambda *args: fn(*args, block=block), *args)
    want = attention_by_definition(*args)
    if out.shape == want.shape:
        why = "; ".join(
            filter(None, (why, first_wrong_token(np.asarray(out), want, segments, block)))
        )
    t.close(out, want, 1e-3, 1e-4, why, np.float32, packed_mistakes(args, block))
    return run, the_call(t, lambda *args: fn(*args, block=block), *args)


@segment_ids.check("one segment")
def _(fn, t):
    packed_is_right(fn, t, 1, 1, 16, segments_of(t, 24, [24]), 8, "one head, one segment")


@segment_ids.check("segments, heads that share keys, what is loaded")
def _(fn, t):
    block, segments = 8, segments_of(t, 40, [5, 13, 8, 11, 3])
    why = "segments of 5, 13, 8, 11 and 3 tokens"
    run, call = packed_is_right(fn, t, 4, 2, 8, segments, block, why)
    most = 4 * int(visible_blocks(segments, block).sum())
    *_, keys = loads_of(t, run, call, 2 * 40 * 8, 2, "keys and of values as they came")
    t.true(
        keys <= most,
        f"{keys} blocks of keys or values are loaded for 4 heads; {most} have something to give",
        keys,
    )
    cores = {core for core, _ in run.visits}
    t.true(len(cores) == 2, "only one core has work to do: no dimension of the grid is parallel")


@segment_ids.check("large logits, and values that nobody sees")
def _(fn, t):
    segments = segments_of(t, 40, [17, 9, 14])
    q, k, v = (numbers(t, 1, 40, 8, scale=s) for s in (60, 1, 1))
    want = attention_by_definition(q, k, v, segments)
    # The first blocks hold keys of the first segment alone, which the last queries do not see.
    v = v.at[:, :16].set(jnp.nan)
    out, _ = simulate(t, lambda *args: fn(*args, block=8), q, k, v, segments)
    why = "outputs from token 24 on, where values of the first 16 are NaN and logits are +-90"
    t.close(out[:, 24:], want[:, 24:], 1e-3, 1e-4, why, np.float32)


@segment_ids.check("Mosaic compiles it")
def _(fn, t):
    args = spec(4, 1024, 128), spec(2, 1024, 128), spec(2, 1024, 128), spec(1024, dtype=jnp.int32)
    compiles(t, lambda *a: fn(*a, block=256), *args)
    keeps_wide_sums(t, the_call(t, fn, *args))
    t.equal(
        jax.eval_shape(fn, *args).dtype.name,
        "bfloat16",
        why="the result's type for bfloat16 queries",
    )


def packed_with(
    *,
    bound="segment",
    load="clip",
    mask="both",
    heads="//",
    fade="both",
    semantics=("parallel", "parallel", "arbitrary"),
    bounded="kv",
    factors=None,
    narrow=False,
    low=-1e30,
):
    """The solution with a mistake that is asked for."""

    def fn(q_NTH, k_KTH, v_KTH, segments_T, block=128):
        (N, T, H), K = q_NTH.shape, k_KTH.shape[0]
        at = segments_T[block - 1 :: block] if bound == "last" else segments_T[::block]
        first = (jnp.searchsorted(segments_T, at) // block).astype(jnp.int32)
        if bound == "up":
            first = -(-jnp.searchsorted(segments_T, at) // block).astype(jnp.int32)
        if bound == "before":
            first = jnp.maximum(first - 1, 0)
        if bound == "none":
            first = jnp.zeros_like(first)
        if heads == "repeated":
            k_KTH, v_KTH = (
                jnp.broadcast_to(x[:, None], (K, N // K, T, H)).reshape(N, T, H)
                for x in (k_KTH, v_KTH)
            )
        sums = q_NTH.dtype if narrow else jnp.float32

        def kernel(first_ref, q_seg, k_seg, q_ref, k_ref, v_ref, o_ref, top_ref, sum_ref, acc_ref):
            i, j = pl.program_id(1), pl.program_id(2)

            @pl.when(j == 0)
            def _():
                top_ref[...] = jnp.full_like(top_ref, low)
                sum_ref[...] = jnp.zeros_like(sum_ref)
                acc_ref[...] = jnp.zeros_like(acc_ref)

            @pl.when((j >= first_ref[i]) & (j <= i))
            def _():
                q, k, v = (x[...].astype(factors or x.dtype) for x in (q_ref, k_ref, v_ref))
                logits = jnp.dot(q, k.T, preferred_element_type=jnp.float32) / math.sqrt(H)
                a, b = (jax.lax.broadcasted_iota(jnp.int32, logits.shape, d) for d in (0, 1))
                same, past = q_seg[...] == k_seg[...], (j < i) | (b <= a)
                seen = {"both": same & past, "causal": past, "segments": same}[mask]
                logits = jnp.where(seen, logits, low)
                top = jnp.maximum(top_ref[...], jnp.max(logits, axis=1, keepdims=True))
                exps, factor = jnp.exp(logits - top), jnp.exp(top_ref[...] - top)
                top_ref[...] = top
                part = jnp.sum(exps, axis=1, keepdims=True)
                sum_ref[...] = sum_ref[...] * factor + part
                add = jnp.dot(exps.astype(v.dtype), v, preferred_element_type=jnp.float32)
                acc = acc_ref[...] * (factor if fade == "both" else 1) + add
                acc_ref[...] = acc.astype(sums)

            @pl.when(j == pl.num_programs(2) - 1)
            def _():
                o_ref[...] = (acc_ref[...] / sum_ref[...]).astype(o_ref.dtype)

        def key_block(i, j, first_ref):
            return {"clip": jnp.clip(j, first_ref[i], i), "min": jnp.minimum(j, i), "all": j}[load]

        def head(n):
            return {"//": n // (N // K), "%": n % K, "repeated": n}[heads]

        query = pl.BlockSpec((None, block, H), lambda n, i, j, ref: (n, i, 0))

        def array(name):
            def at(n, i, j, ref):
                return head(n), key_block(i, j, ref) if name in bounded else j, 0

            return pl.BlockSpec((None, block, H), at)

        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(N, T // block, T // block),
                in_specs=[
                    pl.BlockSpec((block, 1), lambda n, i, j, ref: (i, 0)),
                    pl.BlockSpec((1, block), lambda n, i, j, ref: (0, key_block(i, j, ref))),
                    query,
                    array("k"),
                    array("v"),
                ],
                out_specs=query,
                scratch_shapes=[
                    *[pltpu.VMEM((block, 1), jnp.float32)] * 2,
                    pltpu.VMEM((block, H), sums),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct(q_NTH.shape, q_NTH.dtype),
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        )(first, segments_T[:, None], segments_T[None], q_NTH, k_KTH, v_KTH)

    return fn


mistaken(
    segment_ids,
    "segments_ignored",
    "You bound the blocks by their segments but don't mask within a block, where two segments may meet: compare "
    "the ids of queries and keys.",
    packed_with(mask="causal"),
)
mistaken(
    segment_ids,
    "future_seen",
    "You compare segments but forget the diagonal: within its own segment a token still sees only itself and earlier "
    "tokens.",
    packed_with(mask="segments"),
)
mistaken(
    segment_ids,
    "bounded_by_the_last_query",
    "You take the first block from the *last* query's segment. The block's first query may belong to an earlier "
    "segment, and sees farther back.",
    packed_with(bound="last"),
)
mistaken(
    segment_ids,
    "bounded_by_the_next_block",
    "You round the index of the segment's first token up to a whole block. The segment begins *within* a block, and "
    "that block is the first one needed: divide by `block` and round down.",
    packed_with(bound="up"),
)
mistaken(
    segment_ids,
    "begins_one_block_early",
    "You begin one block before the one that holds the segment's first token. Nothing in it can be seen.",
    packed_with(bound="before"),
)
mistaken(
    segment_ids,
    "masked_with_infinity",
    "You mask with -inf. The first block of keys may hold nothing that a later query of the block sees: its maximum is "
    "then -inf, and -inf - (-inf) is NaN. Mask with a finite number such as -1e30, and begin the maximum there.",
    packed_with(low=-jnp.inf),
)
mistaken(
    segment_ids,
    "key_heads_in_turn",
    "Your query heads take the key heads in turn. Heads that share keys are adjacent: `n // (N // K)`.",
    packed_with(heads="%"),
)
mistaken(
    segment_ids,
    "accumulator_not_scaled",
    "You rescale the sum but not the accumulator.",
    packed_with(fade="sum"),
)
mistaken(
    segment_ids,
    "skipped_but_loaded",
    "You skip the blocks before the first one but still load them: let the index map return the first block "
    "for them, `jnp.clip(j, first_ref[i], i)`.",
    packed_with(load="min"),
)
mistaken(
    segment_ids,
    "nothing_skipped",
    "You mask the segments but compute every block below the diagonal. For each block of queries, prefetch the first "
    "block of keys that it needs.",
    packed_with(bound="none"),
)
mistaken(
    segment_ids,
    "nothing_in_parallel",
    "You do not say that heads and blocks of queries are independent: "
    '`dimension_semantics=("parallel", "parallel", "arbitrary")`.',
    packed_with(semantics=("arbitrary",) * 3),
)
mistaken(
    segment_ids,
    "keys_not_bounded",
    "The values' index map is bounded but the keys' isn't, or the other way round: both need "
    "`jnp.clip(j, first_ref[i], i)`.",
    packed_with(bounded="v"),
)
mistaken(
    segment_ids,
    "keys_repeated",
    "You repeat keys and values before the call, so that each query head has its own copy in HBM. Let the index "
    "map choose the head: `n // (N // K)`.",
    packed_with(heads="repeated"),
)
mistaken(
    segment_ids,
    "factors_in_float32",
    "You convert the factors of a product to float32, which the matrix units multiply far more slowly. Leave q, k "
    "and v as they are, round the weights, and ask for `preferred_element_type=jnp.float32`.",
    packed_with(factors=jnp.float32),
)
mistaken(
    segment_ids,
    "narrow_accumulator",
    "You accumulate in the queries' own type, so each block rounds the sum. Make the scratch float32.",
    packed_with(narrow=True),
)


# ----------------------------------------------------------------------------------- backward

backward = Exercise(
    "17.backward",
    title="Gradients of keys and values",
    function="flash_dkv",
    minutes=40,
    points=20,
    forbid=("jax.nn.softmax", "jax.grad", "jax.vjp", "jax.numpy.repeat"),
    statement="""
Write `flash_dkv(q_GTH, k_TH, v_TH, grad_GTH, lse_GT, delta_GT, block=128)`, the backward pass's second kernel,
for one key head and the G query heads that share it. This chapter's `dq_by_hand_kernel` is the first one.

- A block of keys stays, and all blocks of queries of all G heads pass by it: `dk` and `dv` are sums over
  queries *and* heads. Each block of `dk` and `dv` is stored once.
- Recompute the weights from `lse_GT`. Nothing of size T x T reaches HBM.
- Attention is causal. Blocks of queries before the block of keys are **neither loaded nor computed**: load at most
  `G n (n + 1) / 2` blocks of q, and of the gradient, with `n = T // block`.
- If q is bfloat16, so are the factors of all products, and the weights and the logits' gradients are rounded to it.
  Products add up in float32 scratch, over all heads.
- Use one Pallas call; blocks of keys are parallel. It compiles for a v5e.
""",
    hints=(
        "Which dimensions of the grid are summed over? They come last. When is an accumulator set to zero, and when "
        "is it stored?",
        "With P the weights and dO the output's gradient: dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), "
        "dK = dS^T Q / sqrt(H). In a step before the diagonal, let the index map name the first block that is needed: "
        "`jnp.maximum(i, j)`.",
        "Grid (blocks of keys j, heads g, blocks of queries i), semantics (parallel, arbitrary, arbitrary). Reset "
        "if `(g == 0) & (i == 0)`, compute if `i >= j`, store if both are last. "
        "`probs = jnp.where(seen, jnp.exp(logits - lse_ref[...]), 0)`, with lse as [G, T, 1].",
    ),
)


def in_blocks(weights, rows, block):
    """Sums of blocks of weights [G, T, T] times blocks of rows [G, T, H], the blocks of weights not transposed."""
    (G, T, _), H = weights.shape, rows.shape[2]
    squares = weights.reshape(G, T // block, block, T // block, block)
    parts = rows.reshape(G, T // block, block, H)
    return np.einsum("giajc,gich->jah", squares, parts).reshape(T, H)


def backward_args(t, G, T, H, dtype=jnp.float32, scale=1.0, block=8):
    q, grad = numbers(t, G, T, H, dtype=dtype, scale=scale), numbers(t, G, T, H, dtype=dtype)
    k, v = (numbers(t, T, H, dtype=dtype) for _ in range(2))
    wide = [np.asarray(x, np.float64) for x in (q, k, v, grad)]
    logits = np.where(np.tril(np.ones((T, T), bool)), wide[0] @ wide[1].T / math.sqrt(H), -np.inf)
    top = logits.max(-1, keepdims=True)
    size = np.exp(logits - top).sum(-1, keepdims=True)
    probs = np.exp(logits - top) / size
    out = probs @ wide[2]
    delta = (out * wide[3]).sum(-1)
    grads = probs * (wide[3] @ wide[2].T - delta[..., None])
    dk = np.einsum("gts,gth->sh", grads, wide[0]) / math.sqrt(H)
    dv = np.einsum("gts,gth->sh", probs, wide[3])
    lse = (top + np.log(size))[..., 0]
    args = q, k, v, grad, jnp.asarray(lse, jnp.float32), jnp.asarray(delta, jnp.float32)
    dp = wide[3] @ wide[2].T
    dk_of = lambda grads: np.einsum("gts,gth->sh", grads, wide[0]) / math.sqrt(H)  # noqa: E731
    mistakes = {
        "It lacks 1 / sqrt(H)": dk * math.sqrt(H),
        "It has 1 / sqrt(H) twice": dk / math.sqrt(H),
        "delta is missing": dk_of(probs * dp),
        "delta is added, not subtracted": dk_of(probs * (dp + delta[..., None])),
        "The weights are missing in the gradient of the logits": dk_of(
            np.tril(dp - delta[..., None])
        ),
        "That is the gradient of the values": dv,
    }
    for name, head in (("first", 0), ("last", -1)) if G > 1 else ():
        mistakes[f"It is dk of the {name} head alone"] = (
            grads[head].T @ wide[0][head] / math.sqrt(H)
        )
        mistakes[f"It is dv of the {name} head alone"] = probs[head].T @ wide[3][head]
    mistakes["The weights aren't transposed: their second dimension are the keys"] = in_blocks(
        probs, wide[3], block
    )
    mistakes["The logits' gradients aren't transposed: their second dimension are the keys"] = (
        in_blocks(grads, wide[0], block) / math.sqrt(H)
    )
    with np.errstate(over="ignore"):
        raw = np.exp(wide[0] @ wide[1].T / math.sqrt(H) - (top + np.log(size)))
    past, at = np.tril(np.ones((T, T), bool)), np.arange(T) // block
    diagonal, before = at[:, None] == at, at[:, None] < at
    for text, seen in {
        "Queries before the keys count, and those after them don't": past.T,
        "Blocks of queries before the keys count, and those after them don't": before
        | diagonal & past,
        "Queries before the keys count as well": np.ones((T, T)),
        "In the blocks on the diagonal, queries before the keys count as well": diagonal | past,
    }.items():
        mistakes[text] = np.einsum("gts,gth->sh", np.where(seen, raw, 0), wide[3])
    mistakes["It has the wrong sign"] = -dk
    mistakes["That is the gradient of the keys"] = dk
    return args, dk, dv, mistakes


def gradients_are_right(fn, t, G, T, H, block, why, scale=1.0, dtype=jnp.float32, rtol=1e-3):
    args, dk, dv, mistakes = backward_args(t, G, T, H, dtype, scale, block)
    got, run = simulate(t, lambda *a: fn(*a, block=block), *args)
    t.equal(len(got), 2, why="how many results")
    for name, g, w in (("dv", got[1], dv), ("dk", got[0], dk)):
        t.close(g, w, rtol, rtol * float(np.abs(w).max()), f"{name}, {why}", dtype, mistakes)
    return run


@backward.check("one head")
def _(fn, t):
    gradients_are_right(fn, t, 1, 24, 16, 8, "one head and three blocks")
    run = gradients_are_right(fn, t, 1, 32, 16, 16, "one head and two blocks of 16")
    t.equal(run.stores[-2:], [2, 2], why="blocks of dk and dv that are stored")


@backward.check("heads that share keys, and what is loaded")
def _(fn, t):
    run = gradients_are_right(
        fn, t, 3, 24, 8, 8, "three query heads, three blocks, logits of +-90", scale=60.0
    )
    args = backward_args(t, 3, 24, 8)[0]
    call = the_call(t, lambda *a: fn(*a, block=8), *args)
    loads = loads_of(t, run, call, 3 * 24 * 8, 2, "q and of its gradient")
    t.true(
        loads[1] <= 3 * 6,
        f"{loads[1]} blocks of q or of the gradient are loaded for 3 heads and 3 blocks; 18 lie on or below the "
        "diagonal",
        tuple(loads),
    )
    t.equal(run.stores[-2:], [3, 3], why="blocks of dk and dv that are stored")
    cores = {core for core, _ in run.visits}
    t.true(len(cores) == 2, "only one core has work to do: blocks of keys are independent")


@backward.check("bfloat16")
def _(fn, t):
    why = "bfloat16, summed in float32"
    gradients_are_right(fn, t, 2, 16, 8, 8, why, dtype=jnp.bfloat16, rtol=0.015)
    keys = spec(256, 128)
    args = spec(2, 256, 128), keys, keys, spec(2, 256, 128), *[spec(2, 256, dtype=jnp.float32)] * 2
    keeps_wide_sums(t, the_call(t, fn, *args))


@backward.check("Mosaic compiles it")
def _(fn, t):
    wide, rows = spec(4, 1024, 128), spec(4, 1024, dtype=jnp.float32)
    keys = spec(1024, 128)
    compiles(t, lambda *a: fn(*a, block=256), wide, keys, keys, wide, rows, rows)


def dkv_with(
    *,
    mask=True,
    delta=True,
    scaled=True,
    start="first",
    load=True,
    from_=None,
    narrow=False,
    semantics=("parallel", "arbitrary", "arbitrary"),
    load_grad=True,
    factors=None,
):
    """The solution with a mistake that is asked for."""

    def fn(q_GTH, k_TH, v_TH, grad_GTH, lse_GT, delta_GT, block=128):
        (G, _, H), blocks = q_GTH.shape, q_GTH.shape[1] // block

        def dot(a, b, axis):
            dims = (((axis,), (axis,)), ((), ()))
            return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)

        def kernel(
            q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc, dv_acc
        ):
            j, g, i = (pl.program_id(d) for d in range(3))

            @pl.when((i == 0) if start == "head" else (g == 0) & (i == 0))
            def _():
                dk_acc[...] = jnp.zeros_like(dk_acc)
                dv_acc[...] = jnp.zeros_like(dv_acc)

            @pl.when((i >= j) if from_ is None else (i >= 0))
            def _():
                refs = q_ref, k_ref, v_ref, grad_ref
                q, k, v, grad = (x[...].astype(factors or x.dtype) for x in refs)
                logits = dot(q, k, 1) / math.sqrt(H)
                a, b = (jax.lax.broadcasted_iota(jnp.int32, logits.shape, d) for d in (0, 1))
                probs = jnp.exp(logits - lse_ref[...])
                if mask:
                    probs = jnp.where((i > j) | ((b <= a) & (i == j)), probs, 0)
                grads = dot(grad, v, 1)
                grads = probs * (grads - delta_ref[...] if delta else grads)
                dv = dv_acc[...] + dot(probs.astype(grad.dtype), grad, 0)
                dk = dk_acc[...] + dot(grads.astype(q.dtype), q, 0)
                dk_acc[...], dv_acc[...] = dk.astype(dk_acc.dtype), dv.astype(dv_acc.dtype)

            @pl.when((g == G - 1) & (i == blocks - 1))
            def _():
                scale = math.sqrt(H) if scaled else 1.0
                dk_ref[...] = (dk_acc[...] / scale).astype(dk_ref.dtype)
                dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)

        def rows(width, bounded):
            def at(j, g, i):
                return g, jnp.maximum(i, j) if bounded else i, 0

            return pl.BlockSpec((None, block, width), at)

        query, column, grad_block = rows(H, load), rows(1, load), rows(H, load and load_grad)
        key = pl.BlockSpec((block, H), lambda j, g, i: (j, 0))
        return pl.pallas_call(
            kernel,
            grid=(blocks, G, blocks),
            in_specs=[query, key, key, grad_block, column, column],
            out_specs=(key, key),
            out_shape=(jax.ShapeDtypeStruct(k_TH.shape, k_TH.dtype),) * 2,
            scratch_shapes=[pltpu.VMEM((block, H), k_TH.dtype if narrow else jnp.float32)] * 2,
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        )(q_GTH, k_TH, v_TH, grad_GTH, lse_GT[..., None], delta_GT[..., None])

    return fn


mistaken(
    backward,
    "future_not_masked",
    "On the diagonal some queries come before some keys. Their weights are 0, as in the forward pass, but "
    "exp(logits - lse) alone isn't.",
    dkv_with(mask=False),
)
mistaken(
    backward,
    "delta_forgotten",
    "You leave out delta. The weights of a row sum to 1, so a logit's gradient is its weight times how far dP is "
    "*above the mean*: dP - delta.",
    dkv_with(delta=False),
)
mistaken(
    backward,
    "dk_not_scaled",
    "Your dk lacks 1/sqrt(H). The logits are q k^T / sqrt(H), so their gradient reaches k with the same factor.",
    dkv_with(scaled=False),
)
mistaken(
    backward,
    "begun_for_each_head",
    "You reset the accumulators for each query head, so only the last head's part is left. All heads add to one key "
    "head.",
    dkv_with(start="head"),
)
mistaken(
    backward,
    "skipped_but_loaded",
    "You skip the blocks of queries before the diagonal but still load them: their index map should return "
    "`jnp.maximum(i, j)`.",
    dkv_with(load=False),
)
mistaken(
    backward,
    "heads_forgotten_in_bfloat16",
    "You accumulate in the keys' own type. Summing all queries and heads in bfloat16 loses digits that the result "
    "still has: use float32 scratch.",
    dkv_with(narrow=True),
)
mistaken(
    backward,
    "nothing_in_parallel",
    'You do not say that blocks of keys are independent: `dimension_semantics=("parallel", "arbitrary", '
    '"arbitrary")`.',
    dkv_with(semantics=("arbitrary",) * 3),
)
mistaken(
    backward,
    "gradient_loaded",
    "You don't load blocks of q before the diagonal, but you do load those of the gradient. Every array that follows "
    "the queries needs `jnp.maximum(i, j)`: q, grad, lse and delta.",
    dkv_with(load_grad=False),
)
mistaken(
    backward,
    "factors_in_float32",
    "You convert the factors of a product to float32, which the matrix units multiply far more slowly. Leave q, k, "
    "v and grad as they are, round weights and logits' gradients to their type, and ask for "
    "`preferred_element_type=jnp.float32`.",
    dkv_with(factors=jnp.float32),
)


# -------------------------------------------------------------------------------------- sinks

sinks = Exercise(
    "17.sinks",
    title="A sink, after the fact",
    function="with_sinks",
    minutes=20,
    points=10,
    statement="""
A sink is one more logit in a row's softmax, without a value. If you have attention's result and its logsumexp, you
don't need another kernel for it. Write `with_sinks(out_BTNH, lse_BTN, sinks_N)`, which returns both as if the sink
had been there from the start.

- Sinks and logsumexps may be 90 or -90, in any combination.
- A query that saw no key has an output of 0 and a logsumexp of -inf. The output stays 0, and the logsumexp becomes
  the sink. A head without a sink has a sink of -inf, and nothing changes for it.
- JAX can differentiate the function. For all finite sinks and logsumexps, the gradients are those of the definition,
  and no gradient is ever NaN.
- The output may be bfloat16 and keeps its type; compute in float32.
""",
    hints=(
        "The output is a sum over exp(logit - lse) times value. How does it change if only lse changes?",
        "The new logsumexp is `jnp.logaddexp(lse_BTN, sinks_N)`, and the output is multiplied by exp(lse - new). "
        "What is that if both are -inf? And what is its gradient? `jnp.where` around a NaN repairs only the value.",
        "Replace the input, not the result: `nothing = (lse == -jnp.inf) & (sinks_N == -jnp.inf)`, "
        "`lse = jnp.where(nothing, 0, lse)`; then `new`, `share = jnp.exp(lse - new)`, and "
        "`jnp.where(nothing, -jnp.inf, new)`.",
    ),
)


def soft_with_sinks(logits, values, extra):
    """Attention with sinks by its definition: logits [B, T, N, S], values [S, H], extra [N]."""
    column = jnp.broadcast_to(extra[None, None, :, None], (*logits.shape[:3], 1))
    joined = jnp.concatenate([logits, column], axis=-1)
    weights = jax.nn.softmax(joined, axis=-1)[..., :-1]
    return jnp.einsum("btns,sh->btnh", weights, values), jax.nn.logsumexp(joined, axis=-1)


def soft_without(logits, values):
    out = jnp.einsum("btns,sh->btnh", jax.nn.softmax(logits, axis=-1), values)
    return out, jax.nn.logsumexp(logits, axis=-1)


@sinks.check("values")
def _(fn, t):
    logits, values = numbers(t, 2, 3, 4, 5), numbers(t, 5, 6)
    extra = numbers(t, 4).at[0].set(4.0)  # above most logsumexps
    got = fn(*soft_without(logits, values), extra)
    t.equal(len(got), 2, why="how many results")
    want = soft_with_sinks(logits, values, extra)
    out, lse = (np.asarray(x) for x in soft_without(logits, values))
    sink = np.exp(extra) / np.exp(want[1])
    mistakes = {
        "That is the output as it was": out,
        "It is multiplied by exp(-sink): the new logsumexp is not the sum of both": out
        / np.exp(extra)[:, None],
        "It is multiplied by 1 / (1 + exp(sink)): the sink stands beside exp(lse), not beside 1": out
        / (1 + np.exp(extra))[:, None],
        "It is multiplied by exp(lse - new), but new is only the larger of the two": out
        * np.exp(lse - np.maximum(lse, extra))[..., None],
        "It is divided by the keys' share, not multiplied": out / (1 - sink)[..., None],
        "It is multiplied by the square of the keys' share": out * ((1 - sink) ** 2)[..., None],
        "The sink has a value of 1: it should have none": want[0] + sink[..., None],
    }
    why = "the output, for logits near 0"
    t.close(got[0], want[0], 1e-4, 1e-5, why, np.float32, mistakes)
    mistakes = {
        "That is the logsumexp as it was": lse,
        "That is the sum of both logarithms: the numbers that they belong to are added": lse
        + extra,
        "That is the larger of the two": np.maximum(lse, extra),
        "That is their sum before the logarithm": np.exp(want[1]),
    }
    why = "the logsumexp, for logits near 0"
    t.close(got[1], want[1], 1e-4, 1e-5, why, np.float32, mistakes)


@sinks.check("large numbers")
def _(fn, t):
    shifts = jnp.asarray([90.0, -90, 90, -90, 0])[None, None, :, None]
    logits, values = numbers(t, 1, 3, 5, 4) + shifts, numbers(t, 4, 3)
    extra = jnp.asarray([90.0, -90, -90, 90, 95])
    got, want = fn(*soft_without(logits, values), extra), soft_with_sinks(logits, values, extra)
    for name, g, w, rtol in (
        ("output", got[0], want[0], 1e-3),
        ("logsumexp", got[1], want[1], 1e-4),
    ):
        why = f"the {name}, for logits and sinks of +-90"
        if not np.isfinite(np.asarray(g)).all():
            why += ". exp(90) is more than float32 can hold: exponentiate only differences"
        t.close(g, w, rtol, 1e-6, why, np.float32)


@sinks.check("gradients")
def _(fn, t):
    logits, values, extra = numbers(t, 2, 3, 4, 5), numbers(t, 5, 6), numbers(t, 4)
    probe, other = numbers(t, 2, 3, 4, 6), numbers(t, 2, 3, 4)

    def loss(attend):
        def f(*args):
            out, lse = attend(*args)
            return jnp.sum(probe * out) + jnp.sum(other * lse)

        return jax.grad(f, (0, 1, 2))

    got = loss(lambda a, v, s: fn(*soft_without(a, v), s))(logits, values, extra)
    want = loss(soft_with_sinks)(logits, values, extra)
    t.close(got[2], want[2], 1e-3, 1e-5, "of the sinks")
    t.close(got[0], want[0], 1e-3, 1e-5, "of the logits that out and lse came from")
    signs = jnp.asarray([90.0, -90, 90, -90])[:, None], jnp.asarray([90.0, -90, -90, 90])
    far = logits + signs[0], values, extra + signs[1]
    got = loss(lambda a, v, s: fn(*soft_without(a, v), s))(*far)
    want = loss(soft_with_sinks)(*far)
    for name, g, w in (
        ("sinks", got[2], want[2]),
        ("logits that out and lse came from", got[0], want[0]),
    ):
        why = f"of the {name}, which are near +-90"
        if np.isnan(np.asarray(g)).any():
            why += ". exp(90 + 90) is infinite: a share of 0 that comes from 1 / inf is right, its gradient is NaN"
        t.close(g, w, 1e-3, 1e-4, why)


@sinks.check("no key, no sink")
def _(fn, t):
    out, lse = numbers(t, 1, 2, 3, 4), jnp.asarray(numbers(t, 1, 2, 3))
    out, lse = out.at[0, 0].set(0), lse.at[0, 0].set(-jnp.inf)
    extra = jnp.asarray([1.5, -jnp.inf, -jnp.inf])
    got = fn(out, lse, extra)
    t.close(got[0][0, 0], jnp.zeros((3, 4)), 0, 0, "outputs of a query that saw no key")
    t.close(got[0][0, 1, 1:], out[0, 1, 1:], 1e-6, 0, "outputs of heads whose sink is -inf")
    why = "logsumexp of a query that saw no key: the sink, and -inf without one"
    mistakes = {"It stays -inf even with a sink": jnp.full(3, -jnp.inf)}
    t.close(got[1][0, 0], extra, 1e-6, 0, why, mistakes=mistakes)
    for number, name in enumerate(("output", "logsumexp")):
        grads = jax.grad(lambda *a, n=number: jnp.sum(fn(*a)[n]), (0, 1, 2))(out, lse, extra)
        why = (
            f"gradients of the {name} where logsumexp or sink is -inf. A `jnp.where` around a NaN or an infinite "
            "number repairs the value alone: the gradient of what isn't chosen is 0 times NaN. Replace what goes in"
        )
        t.finite(grads, why)


@sinks.check("bfloat16")
def _(fn, t):
    out, lse, extra = numbers(t, 1, 4, 2, 8, dtype=jnp.bfloat16), numbers(t, 1, 4, 2), numbers(t, 2)
    share = 1 / (1 + np.exp(np.asarray(extra) - np.asarray(lse)))
    want = np.asarray(out, np.float64) * share[..., None]
    got = fn(out, lse, extra)
    t.close(got[0], want, 5e-3, 1e-6, "a bfloat16 output", jnp.bfloat16)
    t.equal(got[1].dtype.name, "float32", why="the type of the logsumexp")
    # The nearest bfloat16 of the product. An error in float32 moves one in thousands to its neighbour, a share that
    # is rounded to bfloat16 moves a third of them.
    out, lse, extra = (
        numbers(t, 4, 32, 8, 8, dtype=jnp.bfloat16),
        numbers(t, 4, 32, 8),
        numbers(t, 8),
    )
    share = 1 / (1 + np.exp(np.asarray(extra, np.float64) - np.asarray(lse)))
    want = jnp.asarray(np.asarray(out, np.float64) * share[..., None], jnp.bfloat16)
    off = np.mean(np.asarray(fn(out, lse, extra)[0] != want))
    text = f"{off:.0%} of a bfloat16 output's numbers are not the nearest to the right one"
    t.true(off < 0.02, text, float(off))


@sinks.mutant(
    "You exponentiate lse or the sink itself. exp(90) is more than float32 can hold: use `jnp.logaddexp`, and "
    "exponentiate only a difference."
)
def overflows(out_BTNH, lse_BTN, sinks_N):
    total = jnp.exp(lse_BTN) + jnp.exp(sinks_N)
    share = jnp.where(total == 0, 0, jnp.exp(lse_BTN) / jnp.where(total == 0, 1, total))
    return (out_BTNH * share[..., None]).astype(out_BTNH.dtype), jnp.log(total)


@sinks.mutant(
    "You return the logsumexp as it was. With the sink in the softmax, its exponential belongs to the sum."
)
def old_logsumexp(out_BTNH, lse_BTN, sinks_N):
    _, share = _new_and_share(lse_BTN, sinks_N)
    return (out_BTNH * share[..., None]).astype(out_BTNH.dtype), lse_BTN


@sinks.mutant(
    "You multiply by the *sink's* share of the weights. The keys keep the rest: exp(lse - new)."
)
def share_of_the_sink(out_BTNH, lse_BTN, sinks_N):
    new, share = _new_and_share(lse_BTN, sinks_N)
    return (out_BTNH * (1 - share)[..., None]).astype(out_BTNH.dtype), new


@sinks.mutant(
    "If a query saw no key and its head has no sink, both numbers are -inf, and their difference is NaN. Replace one "
    "by a finite number before you subtract."
)
def minus_infinity_minus_itself(out_BTNH, lse_BTN, sinks_N):
    new = jnp.logaddexp(lse_BTN, sinks_N)
    share = jnp.exp(lse_BTN - new)
    return (out_BTNH * share[..., None]).astype(out_BTNH.dtype), new


@sinks.mutant(
    "Your values are right but a gradient is NaN: `jnp.where` chooses a value, but the gradient of the other branch "
    "is 0 times NaN. If both are -inf, replace lse *before* it enters `logaddexp`."
)
def mended_too_late(out_BTNH, lse_BTN, sinks_N):
    new = jnp.logaddexp(lse_BTN, sinks_N)
    share = jnp.exp(lse_BTN - jnp.where(new == -jnp.inf, 0, new))
    return (out_BTNH * share[..., None]).astype(out_BTNH.dtype), new


@sinks.mutant(
    "The gradient of your output is right, but that of your logsumexp is NaN if a query saw no key and its head has "
    "no sink. Compute the logsumexp from the replaced numbers too, and choose -inf for it at the end."
)
def logsumexp_not_mended(out_BTNH, lse_BTN, sinks_N):
    _, share = _new_and_share(lse_BTN, sinks_N)
    return (out_BTNH * share[..., None]).astype(out_BTNH.dtype), jnp.logaddexp(lse_BTN, sinks_N)


@sinks.mutant(
    "Your values are right but the sinks get no gradient. They are parameters: don't use `stop_gradient`, and don't "
    "treat the share as a constant."
)
def gradient_stopped(out_BTNH, lse_BTN, sinks_N):
    new, share = _new_and_share(lse_BTN, sinks_N)
    share = jax.lax.stop_gradient(share)
    return (out_BTNH * share[..., None]).astype(out_BTNH.dtype), new


@sinks.mutant(
    "You round the share to bfloat16 before you multiply. Compute in float32 to the end, and round the product."
)
def share_in_bfloat16(out_BTNH, lse_BTN, sinks_N):
    new, share = _new_and_share(lse_BTN, sinks_N)
    return out_BTNH * share.astype(out_BTNH.dtype)[..., None], new


@sinks.mutant(
    "Your result is float32 whatever the output was. Compute in float32, and return the output in its own type."
)
def wrong_type(out_BTNH, lse_BTN, sinks_N):
    new, share = _new_and_share(lse_BTN, sinks_N)
    return out_BTNH.astype(jnp.float32) * share[..., None], new


def _new_and_share(lse, extra):
    nothing = (lse == -jnp.inf) & (extra == -jnp.inf)
    lse = jnp.where(nothing, 0, lse)
    new = jnp.logaddexp(lse, extra)
    return jnp.where(nothing, -jnp.inf, new), jnp.exp(lse - new)
