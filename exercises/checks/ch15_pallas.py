import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.book.grading import Exercise
from minitext.compiler.aot import compiles_for
from minitext.kernels.simulator import strict


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# XLA turns a product with a converted bool into a choice, which hides that 0 times NaN is NaN. Mosaic doesn't.
AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp"}


def simulate(t, fn, *args, cores=2):
    """The result and the one kernel's run, in the strict simulator, in an order of its own."""
    with strict(cores=cores, seed=int(t.rng.integers(1, 1000))) as runs:
        out = jax.jit(fn, compiler_options=AS_WRITTEN)(*args)
    t.equal(len(runs), 1, why="how many Pallas calls run")
    return out, runs[0]


def compiles(t, fn, *args):
    shapes = ", ".join(str(list(x.shape)) for x in args)
    reason = compiles_for("v5e", fn, *args)
    t.true(reason is None, f"Mosaic does not compile it for a v5e at {shapes}: {reason}", reason)


def large_outside(fn, x):
    """Primitives outside of Pallas calls whose result is as large as x."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                continue
            inner = [p for p in jax.tree.leaves(list(eqn.params.values())) if hasattr(p, "jaxpr")]
            for sub in inner:
                walk(sub.jaxpr)
            if not inner and any(out.aval.size >= x.size for out in eqn.outvars):
                found.append(eqn.primitive.name)

    walk(jax.make_jaxpr(fn)(x).jaxpr)
    return found


def nothing_outside(t, fn, x):
    found = ", ".join(large_outside(fn, x))
    why = f"operations outside the kernel use arrays of x's size: {found}"
    t.true(not found, why, "outside")  # which they are does not matter to the hint


def changes(blocks):
    """How often a block is loaded: at the first step, and where it is not that of the step before."""
    return 1 + sum(now != before for before, now in itertools.pairwise(blocks))


def numbers(t, *shape, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(scale * t.rng.normal(size=shape), dtype)


# --------------------------------------------------------------------------------- index_maps

index_maps = Exercise(
    "15.index_maps",
    title="The blocks of causal attention",
    function="attention_specs",
    minutes=25,
    points=10,
    statement="""
Here is the core of attention, without its softmax: `o` is the sum over keys of `(q . k) v`, and no query sees a
later key. Its kernel is finished:

```python
def kernel(q_ref, k_ref, v_ref, o_ref):
    t, s = pl.program_id(2), pl.program_id(3)

    @pl.when(s == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    @pl.when(s <= t)
    def _():
        scores = q_ref[...] @ k_ref[...].T
        row = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where((s < t) | (row >= column), scores, 0)
        o_ref[...] += scores @ v_ref[...]
```

`pl.program_id(2)` is the step's index in the grid's third dimension. `pl.when` runs the function below it only if the
condition holds. `broadcasted_iota` gives each score the number of its row, or of its column.

The kernel still lacks index maps. Write `attention_specs(B, T, N, K, H, block)`, which returns the grid and the blocks
of every array. `q` and the result are `[B, N, T, H]`, `k` and `v` are `[B, K, T, H]`.

- The grid is `(B, N, T // block, T // block)`: for each row, head and block of queries, it goes through all blocks of
  keys. The kernel sees blocks of `[block, H]`. A `None` in a block's shape takes one index of that dimension, and
  removes the dimension.
- `N / K` adjacent query heads share a key head, as in chapter 4: query head `n` reads key head `n // (N // K)`.
- The kernel skips blocks of keys that are later than its queries. **They must not be loaded either.** With
  `m = T // block`, load at most `m (m + 1) / 2` blocks of `k`, and of `v`, for each row and query head. Load each block
  of `q` once, and store each block of the result once.
""",
    hints=(
        "Each index map takes four numbers, `b, n, t, s`, and returns four block numbers. Which of the four does the "
        "block of `q` depend on?",
        "A block isn't loaded if its number is that of the previous step. What can the index map of `k` return at a "
        "step with `s > t`, whose block is never read?",
        "`q`: `(b, n, t, 0)`. For `k` and `v` the head is `n // (N // K)` and the block of keys is "
        "`jnp.minimum(s, t)`.",
    ),
)


def attend_kernel(q_ref, k_ref, v_ref, o_ref):
    t, s = pl.program_id(2), pl.program_id(3)

    @pl.when(s == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    @pl.when(s <= t)
    def _():
        scores = q_ref[...] @ k_ref[...].T
        row, column = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (0, 1))
        scores = jnp.where((s < t) | (row >= column), scores, 0)
        o_ref[...] += scores @ v_ref[...]


def attend_with(fn, sizes):
    """The kernel with the blocks that an answer gives."""
    grid, in_specs, out_spec = fn(*sizes)

    def attend(q, k, v):
        return pl.pallas_call(
            attend_kernel,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_spec,
            out_shape=spec(*q.shape),
        )(q, k, v)

    return grid, attend


def attention_args(t, B, T, N, K, H):
    return [numbers(t, B, heads, T, H) for heads in (N, K, K)]


def attend_by_hand(q, k, v):
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    return jnp.einsum("bnts,bnsh->bnth", jnp.tril(jnp.einsum("bnth,bnsh->bnts", q, k)), v)


def attends(fn, t, B, T, N, K, H, block, why):
    grid, attend = attend_with(fn, (B, T, N, K, H, block))
    t.equal(tuple(grid), (B, N, T // block, T // block), why="the grid")
    args = attention_args(t, B, T, N, K, H)
    out, run = simulate(t, attend, *args, cores=1)
    t.close(out, attend_by_hand(*args), rtol=1e-3, atol=1e-3, why=why)
    return run


@index_maps.check("the numbers of blocks, where s <= t")
def _(fn, t):
    B, N, K, tiles = 2, 4, 2, 2
    grid, in_specs, out_spec = fn(B, 8 * tiles, N, K, 16, 8)
    t.equal(tuple(grid), (B, N, tiles, tiles), why="the grid")
    t.equal(len(in_specs), 3, why="the blocks of q, k and v")
    for name, block in zip(("q", "k", "v", "the result"), (*in_specs, out_spec), strict=True):
        shape = tuple(block.block_shape)
        kept = [n for n in shape if isinstance(n, (int, np.integer))]
        why = f"the shape of a block of {name}, {shape}, without the dimensions that a None removes"
        why += "; a 1 keeps its dimension, and the kernel sees [block, H]" if 1 in kept else ""
        t.equal(kept, [8, 16], why=why)
    steps = [step for step in np.ndindex(B, N, tiles, tiles) if step[3] <= step[2]]
    found, wrong = [], []
    for name, block in zip(("q", "k", "v", "the result"), (*in_specs, out_spec), strict=True):
        for b, n, row, column in steps:
            got = [int(x) for x in block.index_map(b, n, row, column)]
            key = [b, n // (N // K), column, 0]
            want = key if name in "kv" else [b, n, row, 0]
            found.append(got)
            if got != want:
                at = f"at (b, n, t, s) = {(b, n, row, column)}, with N = {N} and K = {K}"
                wrong.append(f"{at}, the block of {name} is {got}, want {want}")
    t.true(not wrong, "".join(wrong[:1]), str(found))


@index_maps.check("one head and one block")
def _(fn, t):
    attends(fn, t, 1, 8, 1, 1, 16, 8, "B = N = K = 1 and a single block")


@index_maps.check("heads that share keys, rows, several blocks")
def _(fn, t):
    attends(fn, t, 2, 32, 6, 3, 16, 16, "B=2, N=6, K=3 and two blocks")


def skipped_load(block):
    """Says at which step that the kernel skips a block of keys is loaded, with four blocks of queries and of keys."""
    steps = list(np.ndindex(4, 4))
    found = [tuple(int(x) for x in block.index_map(0, 0, t, s)) for t, s in steps]
    for (t, s), before, now in zip(steps[1:], found, found[1:], strict=False):
        if s > t and now != before:
            said = f"number {now[2]}" if now[2] != before[2] else f"{now}"
            return f". At t = {t}, s = {s}, which it skips, the block changes to {said}, so it is loaded"
    return ""


@index_maps.check("blocks that are loaded")
def _(fn, t):
    run = attends(fn, t, 1, 32, 3, 1, 8, 8, "N=3, K=1 and four blocks")
    _, specs, _ = fn(1, 32, 3, 1, 8, 8)
    q, k, v, _ = run.loads
    t.equal(q, 3 * 4, why="loads of blocks of q, for 3 heads and 4 blocks of queries")
    t.equal(run.stores[-1], 3 * 4, why="blocks of the result that are stored")
    for name, loads, block in (("k", k, specs[1]), ("v", v, specs[2])):
        why = f"{loads} blocks of {name} are loaded, and the kernel reads 30 of them"
        t.true(loads <= 3 * 10, f"{why}{skipped_load(block)}", loads)


@index_maps.check("Mosaic compiles it")
def _(fn, t):
    sizes = (2, 1024, 8, 2, 128, 256)
    _, attend = attend_with(fn, sizes)
    compiles(t, attend, *(spec(2, heads, 1024, 128) for heads in (8, 2, 2)))


def right_specs(B, T, N, K, H, block, *, kv=None, q=None, o=None, grid=None):
    tiles, shape = T // block, (None, None, block, H)
    q = q or (lambda b, n, t, s: (b, n, t, 0))
    kv = kv or (lambda b, n, t, s: (b, n // (N // K), jnp.minimum(s, t), 0))
    key = pl.BlockSpec(shape, kv)
    return (
        grid or (B, N, tiles, tiles),
        [pl.BlockSpec(shape, q), key, key],
        pl.BlockSpec(shape, o or q),
    )


@index_maps.mutant(
    "You read key head `n`, but there are only K of them. N / K adjacent query heads share one: `n // (N // K)`."
)
def key_head_n(B, T, N, K, H, block):
    return right_specs(B, T, N, K, H, block, kv=lambda b, n, t, s: (b, n, jnp.minimum(s, t), 0))


@index_maps.mutant(
    "You divide by K, the number of key heads. A key head is shared by N / K adjacent query heads: `n // (N // "
    "K)`."
)
def divided_by_key_heads(B, T, N, K, H, block):
    return right_specs(
        B, T, N, K, H, block, kv=lambda b, n, t, s: (b, n // K, jnp.minimum(s, t), 0)
    )


@index_maps.mutant(
    "Your query heads take turns with the key heads, `n % K`. Heads that share keys are adjacent: `n // (N // "
    "K)`."
)
def key_heads_in_turn(B, T, N, K, H, block):
    return right_specs(B, T, N, K, H, block, kv=lambda b, n, t, s: (b, n % K, jnp.minimum(s, t), 0))


@index_maps.mutant(
    "Your maps are right, but blocks past the diagonal are loaded and then skipped. Return the previous step's "
    "block there: `jnp.minimum(s, t)`."
)
def loads_what_is_skipped(B, T, N, K, H, block):
    return right_specs(B, T, N, K, H, block, kv=lambda b, n, t, s: (b, n // (N // K), s, 0))


@index_maps.mutant(
    "An index map returns block numbers, but yours returns row numbers. Pallas multiplies by the block's size "
    "itself."
)
def rows_not_blocks(B, T, N, K, H, block):
    at = lambda b, n, t, s: (b, n, t * block, 0)  # noqa: E731
    kv = lambda b, n, t, s: (b, n // (N // K), jnp.minimum(s, t) * block, 0)  # noqa: E731
    return right_specs(B, T, N, K, H, block, q=at, kv=kv)


@index_maps.mutant(
    "Your blocks of keys follow `t`. The grid's last index, `s`, numbers the blocks of keys; `t` is only its "
    "bound."
)
def keys_follow_queries(B, T, N, K, H, block):
    return right_specs(B, T, N, K, H, block, kv=lambda b, n, t, s: (b, n // (N // K), t, 0))


@index_maps.mutant(
    "The result's block must depend on `t` but not on `s`, because the kernel adds to one block while s runs."
)
def result_follows_keys(B, T, N, K, H, block):
    return right_specs(B, T, N, K, H, block, o=lambda b, n, t, s: (b, n, s, 0))


@index_maps.mutant(
    "Past the diagonal your maps go on for one block more. The last block that the kernel reads is number `t`, so that "
    "is the one to stay at: `jnp.minimum(s, t)`."
)
def one_block_too_far(B, T, N, K, H, block):
    return right_specs(
        B, T, N, K, H, block, kv=lambda b, n, t, s: (b, n // (N // K), jnp.minimum(s, t + 1), 0)
    )


@index_maps.mutant(
    "Your blocks have 1 where a dimension should go. A 1 keeps the dimension, and the kernel multiplies matrices of "
    "[block, H]: write None, which removes it."
)
def ones_in_the_shape(B, T, N, K, H, block):
    grid, specs, out = right_specs(B, T, N, K, H, block)
    kept = [pl.BlockSpec((1, 1, block, H), x.index_map) for x in (*specs, out)]
    return grid, kept[:3], kept[3]


# ---------------------------------------------------------------------------------- reduction

reduction = Exercise(
    "15.reduction",
    title="Sum and maximum of columns",
    function="column_stats",
    minutes=25,
    points=10,
    forbid=("jax.numpy.pad",),
    statement="""
Write `column_stats(x_MN, block_M=32, block_N=128)`: the sum and the maximum of every column, in one Pallas call with
two results.

- Blocks of x are `[block_M, block_N]`, and each is loaded once. M and N are at least 1 and needn't be multiples of
  `block_M` and `block_N`. The last block may contain anything past the end, even NaN.
- Both results are float32 arrays `[1, N]`. x may be bfloat16: convert a block before you sum it. Nothing outside the
  call touches an array of x's size.
- With two results, `out_specs` and `out_shape` are lists of two, and the kernel gets two output refs.
- Blocks of columns are independent, so two cores can share them: say so with `dimension_semantics`. The rows of a
  column aren't.
- It compiles for a v5e at `[65536, 4000]`.
""",
    hints=(
        "The result's block must stay the same from step to step until its column is finished. So which dimension of "
        "the grid comes last?",
        "In the last block of rows, `pl.program_id(1) * block_M` plus `jax.lax.broadcasted_iota` shows which rows "
        "exist. What value can replace the others in a sum? And in a maximum?",
        'Grid (columns, rows), semantics ("parallel", "arbitrary"), x\'s map `lambda j, i: (i, j)`, the '
        "results' `lambda j, i: (0, j)`. At i == 0 store 0 and -inf; then add and take maxima of "
        "`jnp.where(is_row, x, 0)` and `jnp.where(is_row, x, -jnp.inf)`.",
    ),
)


def reduces(fn, t, M, N, dtype=jnp.float32, shift=0.0, cores=2, **block):
    x = numbers(t, M, N, dtype=dtype) + jnp.asarray(shift, dtype)
    got, run = simulate(t, partial(fn, **block), x, cores=cores)
    t.equal(len(got), 2, why="how many results")
    wide = np.asarray(x, np.float64)
    text = ", ".join(
        [f"of [{M}, {N}] {jnp.dtype(dtype).name}", *(f"{k}={n}" for k, n in block.items())]
    )
    sums, maxima = wide.sum(0, keepdims=True), wide.max(0, keepdims=True)
    rows = block.get("block_M", 32)
    first, last = wide[:rows], wide[(M - 1) // rows * rows :]
    mistakes = {
        "Those are means": sums / M,
        "Those are the maxima: sums come first": maxima,
        "Only the first block of rows counts": first.sum(0, keepdims=True),
        "Only the last block of rows counts": last.sum(0, keepdims=True),
        "The last block of rows is missing": sums - last.sum(0, keepdims=True),
    }
    lost = ". x has no NaN: a row past the end is counted, or a result that was never set"
    text += lost if any(np.isnan(np.asarray(part)).any() for part in got) else ""
    t.close(got[0], sums, 1e-4, 1e-2, f"sums {text}", np.float32, mistakes)
    mistakes = {
        "Those are minima": wide.min(0, keepdims=True),
        "Those are the sums": sums,
        "They are at least 0: does the maximum begin at 0, or is it 0 past the end?": np.maximum(
            maxima, 0
        ),
        "Only the first block of rows counts": first.max(0, keepdims=True),
        "Only the last block of rows counts": last.max(0, keepdims=True),
        "That is the largest absolute value": np.abs(wide).max(0, keepdims=True),
    }
    t.close(got[1], maxima, 1e-6, 1e-6, f"maxima {text}", np.float32, mistakes)
    return run


@reduction.check("one block")
def _(fn, t):
    reduces(fn, t, 32, 128)


@reduction.check("several blocks of rows")
def _(fn, t):
    run = reduces(fn, t, 96, 128)
    t.equal(run.loads[0], 3, why="blocks of x that are loaded")


@reduction.check("columns that are all negative, ragged rows and columns, bfloat16")
def _(fn, t):
    M, N = int(t.rng.integers(33, 63)), int(t.rng.integers(129, 250))
    # One core: how the simulator compiles what several cores run can't be said.
    reduces(fn, t, M, N, jnp.bfloat16, shift=-10, cores=1)


@reduction.check("blocks of another size, which two cores share")
def _(fn, t):
    run = reduces(fn, t, 40, 512, block_M=16, block_N=256)
    t.equal(run.loads[0], 3 * 2, why="loads of blocks [16, 256] of [40, 512]")
    cores = {core for core, _ in run.visits}
    why = "only one core has work to do: no dimension of the grid is parallel"
    t.true(len(cores) == 2, why, len(cores))


@reduction.check("Mosaic compiles it")
def _(fn, t):
    compiles(t, fn, spec(65536, 4000, dtype=jnp.bfloat16))
    nothing_outside(t, fn, spec(64, 256, dtype=jnp.bfloat16))


def column_stats_with(
    *,
    start="first",
    least=-jnp.inf,
    masked="where",
    wide=jnp.float32,
    semantics=None,
    swap=False,
    fixed=False,
    convert=False,
):
    """The solution with a mistake that is asked for."""

    def fn(x_MN, block_M=32, block_N=128):
        M, N = x_MN.shape
        block_M, block_N = (32, 128) if fixed else (block_M, block_N)
        x_MN = x_MN.astype(jnp.float32) if convert else x_MN

        def kernel(x_ref, sum_ref, max_ref):
            i = pl.program_id(0 if swap else 1)

            @pl.when((i == 0) if start == "first" else (i >= 0) if start == "each" else (i < 0))
            def _():
                sum_ref[...] = jnp.zeros_like(sum_ref)
                max_ref[...] = jnp.full_like(max_ref, least)

            x = x_ref[...].astype(wide)
            row = i * block_M + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            add = top = x
            if masked:
                add, top = jnp.where(row < M, x, 0), jnp.where(row < M, x, least)
            if masked == "product":
                add = x * (row < M)
            part = jnp.sum(add, axis=0, keepdims=True)
            sum_ref[...] = (sum_ref[...].astype(wide) + part).astype(jnp.float32)
            top = jnp.max(top, axis=0, keepdims=True).astype(jnp.float32)
            max_ref[...] = jnp.maximum(max_ref[...], top)

        grid = (pl.cdiv(N, block_N), pl.cdiv(M, block_M))
        out = pl.BlockSpec((1, block_N), (lambda i, j: (0, j)) if swap else (lambda j, i: (0, j)))
        block = (block_M, block_N)
        block = pl.BlockSpec(block, (lambda i, j: (i, j)) if swap else (lambda j, i: (i, j)))
        return pl.pallas_call(
            kernel,
            grid=grid[::-1] if swap else grid,
            in_specs=[block],
            out_specs=(out, out),
            out_shape=(spec(1, N),) * 2,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=semantics or ("parallel", "arbitrary")
            ),
        )(x_MN)

    return fn


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


mistaken(
    reduction,
    "never_begun",
    "You add to results that were never initialised. Memory can start as anything, and NaN plus a number is NaN. "
    "At a column's first block of rows, store 0 and -inf.",
    column_stats_with(start="never"),
)
mistaken(
    reduction,
    "begun_at_each_block",
    "You initialise at every block of rows, so only the last one counts. Do it under `pl.when(... == 0)`.",
    column_stats_with(start="each"),
)
mistaken(
    reduction,
    "least_is_zero",
    "Your maximum starts at 0, or takes 0 for rows past the end. A column may be all negative: use -inf.",
    column_stats_with(least=0.0),
)
mistaken(
    reduction,
    "padding_counted",
    "The last block has rows past the end, and you count them. Replace them with `jnp.where` before you sum.",
    column_stats_with(masked=None),
)
mistaken(
    reduction,
    "multiplied_by_zero",
    "You multiply the rows past the end by 0. They may hold anything, and 0 times NaN is NaN: choose with "
    "`jnp.where`.",
    column_stats_with(masked="product"),
)
mistaken(
    reduction,
    "narrow_sum",
    "You sum in x's own type. A bfloat16 sum loses numbers smaller than its last bit: convert a block to float32 "
    "first.",
    lambda x_MN, block_M=32, block_N=128: column_stats_with(wide=x_MN.dtype)(
        x_MN, block_M, block_N
    ),
)
mistaken(
    reduction,
    "rows_in_parallel",
    "You mark the rows as parallel. Then two cores may add to one result, and the first block may not run first. "
    'Only columns are "parallel"; rows are "arbitrary".',
    column_stats_with(semantics=("parallel", "parallel")),
)
mistaken(
    reduction,
    "nothing_in_parallel",
    'You mark no dimension as parallel, so a second core has nothing to do. Columns are: ("parallel", '
    '"arbitrary").',
    column_stats_with(semantics=("arbitrary", "arbitrary")),
)
mistaken(
    reduction,
    "rows_outermost",
    "Your rows are the grid's first dimension, so each result's block is left and visited again. Its steps must "
    "be consecutive: the reduced dimension comes last.",
    column_stats_with(swap=True, semantics=("arbitrary", "arbitrary")),
)
mistaken(
    reduction,
    "columns_innermost_and_parallel",
    "Your rows are the grid's first dimension, so each result's block is left and visited again. The columns come "
    'first, and they are "parallel"; the rows, which are added up, come last.',
    column_stats_with(swap=True, semantics=("arbitrary", "parallel")),
)

mistaken(
    reduction,
    "blocks_of_one_size",
    "Your blocks are 32 by 128, whatever the arguments say. Use `block_M` and `block_N` in the grid, in the "
    "blocks and where you count rows.",
    column_stats_with(fixed=True),
)
mistaken(
    reduction,
    "converted_outside",
    "You convert all of x before the call. That reads x and writes it in float32, which the kernel then reads. "
    "Convert each block in the kernel.",
    column_stats_with(convert=True),
)

# ------------------------------------------------------------------------------ out_of_bounds

out_of_bounds = Exercise(
    "15.out_of_bounds",
    title="Fix an access out of bounds",
    function="second_difference",
    minutes=20,
    points=10,
    forbid=("jax.numpy.pad", "jax.lax.pad"),
    statement="""
A block of eight rows needs the row above it and the row below it. So this kernel takes the same array three times, with
three index maps:

```python
def broken(x_MN):
    M, N = x_MN.shape

    def kernel(above_ref, x_ref, below_ref, o_ref):
        x = x_ref[...]
        above = jnp.concatenate([above_ref[7:], x[:-1]])
        below = jnp.concatenate([x[1:], below_ref[:1]])
        o_ref[...] = above - 2 * x + below

    def at(shift):
        return pl.BlockSpec((8, N), lambda i: (i + shift, 0))

    return pl.pallas_call(
        kernel,
        grid=(M // 8,),
        in_specs=[at(-1), at(0), at(1)],
        out_specs=at(0),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
    )(x_MN, x_MN, x_MN)
```

It passed its tests with `interpret=True`, it compiles for a v5e, and it's wrong. Write a correct version,
`second_difference(x_MN)`.

- Row m of the result is `x[m - 1] - 2 x[m] + x[m + 1]`. Rows before the first and after the last count as 0.
- Load no block out of bounds. M and N are at least 1.
- It remains one Pallas call that reads x directly, without a padded copy.
""",
    hints=(
        "There are three things to fix. Which blocks do the first and the last step ask for? How many steps does M = "
        "12 need? And what is below the last row if M isn't a multiple of 8?",
        "Clip the block's number to those that exist. A wrong row is then loaded, so replace it with 0, depending on "
        "the number of the row rather than the block.",
        "`row = 8 * pl.program_id(0) + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)`; `above` counts where "
        "`row > 0`, `below` where `row < M - 1`; the grid is `(pl.cdiv(M, 8),)`.",
    ),
)


def neighbours_of(got, want, wide):
    """What the first wrong row was made of; `wide` is x between two rows of zeros."""
    close = lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-5)  # noqa: E731
    wrong = [m for m in range(len(got)) if not close(got[m], want[m])]
    if not wrong:
        return ""
    m, M = wrong[0], len(got)
    if np.isnan(got[m]).any():
        return f". Row {m} has a NaN, which x has not: it comes from rows that don't exist"
    name = lambda r: f"row {r - 1}" if 0 < r <= M else "zeros"  # noqa: E731
    pairs = itertools.product(range(M + 1), repeat=2)
    used = [(a, b) for a, b in pairs if close(got[m], wide[a] - 2 * wide[m + 1] + wide[b])]
    used.sort(key=lambda pair: (pair[0] != m) + (pair[1] != m + 2))  # one of the two is often right
    above, below = name(m), name(m + 2)
    made = f" You have {name(used[0][0])} above and {name(used[0][1])} below" if used else ""
    return f". Row {m} is wrong. Above it is {above}, below it {below}.{made}".removesuffix(".")


def differs(fn, t, M, N):
    x = numbers(t, M, N)
    got, _ = simulate(t, fn, x, cores=1 if M <= 8 else 2)
    wide = np.pad(np.asarray(x), ((1, 1), (0, 0)))
    want = wide[:-2] - 2 * wide[1:-1] + wide[2:]
    why = f"second differences of [{M}, {N}]"
    if got.shape == want.shape:
        why += neighbours_of(np.asarray(got), want, wide)
    t.close(got, want, 1e-5, 1e-5, why, np.float32)


@out_of_bounds.check("one block")
def _(fn, t):
    differs(fn, t, 8, 128)


@out_of_bounds.check("several blocks")
def _(fn, t):
    differs(fn, t, 24, 128)


@out_of_bounds.check("a ragged last block")
def _(fn, t):
    differs(fn, t, int(t.rng.integers(17, 23)), int(t.rng.integers(100, 200)))


@out_of_bounds.check("a single row")
def _(fn, t):
    differs(fn, t, 1, 40)


@out_of_bounds.check("Mosaic compiles it")
def _(fn, t):
    compiles(t, fn, spec(4001, 700))
    nothing_outside(t, fn, spec(64, 256))


def second_difference_with(
    *, clip=True, up="row", down="row", steps=pl.cdiv, wrap=False, swap=False, pad=False, last=None
):
    """The solution with a mistake that is asked for."""

    def fn(x_MN):
        M, N = x_MN.shape
        count = max(1, steps(M, 8))
        if pad:
            below_MN = jnp.zeros((8 * count + 8 - M, N))
            x_MN = jnp.concatenate([jnp.zeros((8, N)), x_MN, below_MN])

        def kernel(above_ref, x_ref, below_ref, o_ref):
            i, x = pl.program_id(0), x_ref[...]
            row = 8 * i + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            above = jnp.concatenate([above_ref[:1] if swap else above_ref[7:], x[:-1]])
            below = jnp.concatenate([x[1:], below_ref[7:] if swap else below_ref[:1]])
            if up == "product":
                above, below = above * (row > 0), below * (row < M - 1)
            elif up:
                above = jnp.where(i > 0 if up == "block" else row > 0, above, 0)
            ends = {
                "row": row < M - 1,
                "late": row < M,
                "block": row < 8 * count - 1,
                "all": i < count - 1,
            }
            if down:
                below = jnp.where(ends[down], below, 0)
            o_ref[...] = above - 2 * x + below

        def at(shift):
            if pad:
                return pl.BlockSpec((8, N), lambda i: (i + shift + 1, 0))
            if wrap:
                return pl.BlockSpec((8, N), lambda i: ((i + shift + count) % count, 0))
            if clip:
                end = last(M) if last else count - 1
                return pl.BlockSpec((8, N), lambda i: (jnp.clip(i + shift, 0, end), 0))
            return pl.BlockSpec((8, N), lambda i: (i + shift, 0))

        return pl.pallas_call(
            kernel,
            grid=(count,),
            in_specs=[at(-1), at(0), at(1)],
            out_specs=pl.BlockSpec((8, N), lambda i: (i, 0)),
            out_shape=spec(M, N),
        )(x_MN, x_MN, x_MN)

    return fn


mistaken(
    out_of_bounds,
    "still_out_of_bounds",
    "You still ask for block -1, or the one after the last. It is loaded even if you don't use it. Clip the "
    "numbers that the index maps return.",
    second_difference_with(clip=False),
)
mistaken(
    out_of_bounds,
    "clipped_and_counted",
    "You clip the block's number, but then use the row that it brought. Before the first row and after the last, "
    "choose 0 with `jnp.where`.",
    second_difference_with(up=None, down=None),
)
mistaken(
    out_of_bounds,
    "wrapped",
    "Your index maps wrap around, so the last row becomes the first one's neighbour. Use 0 before the first row "
    "and after the last.",
    second_difference_with(wrap=True, up=None, down=None),
)
mistaken(
    out_of_bounds,
    "last_rows_forgotten",
    "`M // 8` steps leave out the rows of a block that is not full. Take `pl.cdiv(M, 8)`.",
    second_difference_with(steps=lambda M, size: M // size),
)
mistaken(
    out_of_bounds,
    "masked_by_block",
    "You put 0 below the last row of the last *block*. If M isn't a multiple of 8, the last row of x is further "
    "up, with padding below it: compare with M.",
    second_difference_with(down="block"),
)
mistaken(
    out_of_bounds,
    "all_rows_of_a_block",
    "You put 0 above *all* rows of the first block, or below all rows of the last. Only row 0 has nothing above it, "
    "and only row M - 1 nothing below: compare the row's number, not the block's.",
    second_difference_with(up="block", down="all"),
)
mistaken(
    out_of_bounds,
    "one_row_too_late",
    "You put 0 below the rows from M on, and they aren't stored. The last row is number M - 1: it's the one that has "
    "nothing below it.",
    second_difference_with(down="late"),
)
mistaken(
    out_of_bounds,
    "one_block_too_far",
    "You clip to M // 8. If 8 divides M, the last block is number M // 8 - 1; in general it is `pl.cdiv(M, 8) - 1`.",
    second_difference_with(last=lambda M: M // 8),
)
mistaken(
    out_of_bounds,
    "multiplied_by_zero",
    "You multiply rows that don't exist by 0. They may hold anything, and 0 times NaN is NaN: choose with `jnp.where`.",
    second_difference_with(up="product", down=None),
)
mistaken(
    out_of_bounds,
    "wrong_neighbours",
    "You swapped the two neighbours. Above a block is the *last* row of the previous block; below it is the "
    "*first* of the next.",
    second_difference_with(swap=True),
)
mistaken(
    out_of_bounds,
    "padded_copy",
    "You add rows of zeros around x before the call. That copy reads and writes all of x once more. Read x "
    "directly, and choose the zeros in the kernel.",
    second_difference_with(pad=True),
)

# ------------------------------------------------------------------------------------ softmax

softmax = Exercise(
    "15.softmax",
    title="Softmax, reading its input once",
    function="row_softmax",
    minutes=25,
    points=15,
    forbid=("jax.nn.softmax", "jax.nn.log_softmax", "jax.numpy.pad"),
    statement="""
The chapter began with a softmax that takes four passes over memory. Write `row_softmax(x_MN, block_M=8)`, which takes
two: one read, one write.

- A block is `block_M` whole rows. Each is loaded once and stored once, in one Pallas call, and nothing outside the
  call touches an array of x's size.
- x is float32 or bfloat16, and the result has the same type. In between, compute in float32.
- A row may have logits of both 90 and -90, and entries may be -inf. A row that is all -inf gives zeros.
- M and N are at least 1. Rows are independent, so two cores can share them.
- It compiles for a v5e at `[8190, 4096]`.
""",
    hints=(
        "Each row needs its own maximum: `keepdims=True` keeps it a column. Do you have to mask the rows past the end "
        "in the last block? Are their results ever stored?",
        "Two steps of the softmax can give NaN: -inf minus -inf, and 0 divided by 0. Both happen in a row that is all "
        "-inf, and `jnp.where` fixes both.",
        "`top = jnp.max(x, axis=1, keepdims=True)`, `exps = jnp.exp(x - jnp.where(top == -jnp.inf, 0, top))`, "
        "divide by `jnp.where(total == 0, 1, total)`, and `.astype(o_ref.dtype)`.",
    ),
)


def soft(fn, t, x, why, **block):
    got, run = simulate(t, partial(fn, **block), x)
    wide = np.asarray(x, np.float64)
    top = wide.max(1, keepdims=True)
    exps = np.exp(wide - np.where(np.isinf(top), 0, top))
    total = exps.sum(1, keepdims=True)
    want = exps / np.where(total == 0, 1, total)
    # One rounding to bfloat16 moves a number by up to 1/256 of it.
    rtol = 4.2e-3 if x.dtype == jnp.bfloat16 else 1e-4
    with np.errstate(all="ignore"):
        block_rows = block.get("block_M", 8)
        parts = [exps[i : i + block_rows] for i in range(0, len(exps), block_rows)]
        mistakes = {
            "Those are exponentials that aren't divided by their sum": exps,
            "They are divided by the sum of the whole block": np.concatenate([p / p.sum() for p in parts]),
            "That is a softmax of columns": np.exp(wide) / np.exp(wide).sum(0, keepdims=True),
            "That is the softmax's logarithm": np.log(want),
            "A row that is all -inf gives zeros, not 1 / N": np.where(total == 0, 1 / wide.shape[1], want),
            "They are divided by N, not by the sum": exps / wide.shape[1],
        }  # fmt: skip
    t.close(got, want, rtol, 1e-7, why, x.dtype, mistakes)
    return run


@softmax.check("one block")
def _(fn, t):
    soft(fn, t, numbers(t, 8, 128), "a block of [8, 128]")


@softmax.check("large logits, -inf, and a row that is all -inf")
def _(fn, t):
    x = np.array(numbers(t, 8, 200, scale=60))
    x[1, :3] = 90, -90, -np.inf
    x[2] -= 300
    x[5] = -np.inf
    soft(fn, t, jnp.asarray(x), "logits of +-90 and lower, some -inf")


@softmax.check("blocks, loads and cores")
def _(fn, t):
    M, N = int(t.rng.integers(17, 23)), int(t.rng.integers(130, 250))
    run = soft(fn, t, numbers(t, M, N), f"[{M}, {N}], ragged")
    t.equal(run.loads[0], 3, why="blocks of 8 rows that are loaded")
    t.equal(run.stores[-1], 3, why="blocks that are stored")
    cores = {core for core, _ in run.visits}
    why = "only one core has work to do: the grid's dimension is not parallel"
    t.true(len(cores) == 2, why, len(cores))
    nothing_outside(t, fn, spec(64, 256))


@softmax.check("bfloat16, in blocks of 16 rows")
def _(fn, t):
    x = numbers(t, 20, 300, dtype=jnp.bfloat16, scale=3)
    run = soft(fn, t, x, "[20, 300] bfloat16, computed in float32, block_M=16", block_M=16)
    t.equal(run.loads[0], 2, why="loads of blocks of 16 rows, for 20 rows")
    nothing_outside(t, fn, spec(64, 256, dtype=jnp.bfloat16))


@softmax.check("Mosaic compiles it")
def _(fn, t):
    compiles(t, fn, spec(8190, 4096))


def row_softmax_with(
    *,
    top="row",
    all_masked=True,
    wide=jnp.float32,
    rows=None,
    semantics="parallel",
    split=False,
    convert=False,
    steps=pl.cdiv,
    axis=1,
):
    """The solution with a mistake that is asked for."""

    def fn(x_MN, block_M=8):
        (M, N), narrow = x_MN.shape, x_MN.dtype
        block_M = M if rows == "all" else rows or block_M
        x_MN = x_MN.astype(jnp.float32) if convert else x_MN

        def kernel(x_ref, o_ref):
            x = x_ref[...].astype(wide or x_ref.dtype)
            over = {"row": axis, "block": None, "column": 0}.get(top)
            high = jnp.zeros((1, 1), x.dtype) if top is None else jnp.max(x, over, keepdims=True)
            if all_masked:
                high = jnp.where(high == -jnp.inf, 0, high)
            exps = jnp.exp(x - high)
            total = jnp.sum(exps, axis=axis, keepdims=True)
            if all_masked:
                total = jnp.where(total == 0, 1, total)
            o_ref[...] = (exps if split else exps / total).astype(o_ref.dtype)

        block = pl.BlockSpec((block_M, N), lambda i: (i, 0))
        out = pl.pallas_call(
            kernel,
            grid=(steps(M, block_M),),
            in_specs=[block],
            out_specs=block,
            out_shape=spec(M, N, dtype=x_MN.dtype),
            compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
        )(x_MN)
        if split:
            total = jnp.sum(out, axis=1, keepdims=True)
            out = out / jnp.where(total == 0, 1, total)
        return out.astype(narrow)

    return fn


mistaken(
    softmax,
    "no_maximum",
    "You don't subtract the maximum. exp(90) is more than float32 can hold, and inf / inf is NaN.",
    row_softmax_with(top=None),
)
mistaken(
    softmax,
    "maximum_of_the_block",
    "You subtract one maximum from the whole block. In a row far below it, every exponential is 0. Each row needs "
    "its own.",
    row_softmax_with(top="block"),
)
mistaken(
    softmax,
    "maximum_of_the_column",
    "You take the maximum along the wrong axis. Each row needs its own: `axis=1`.",
    row_softmax_with(top="column"),
)
mistaken(
    softmax,
    "softmax_of_columns",
    "You take the maximum and the sum along axis 0, over the rows of a block. Each row is a softmax by itself: "
    "`axis=1`.",
    row_softmax_with(axis=0),
)
mistaken(
    softmax,
    "last_rows_forgotten",
    "`M // block_M` steps leave out the rows of a block that is not full. Take `pl.cdiv(M, block_M)`.",
    row_softmax_with(steps=lambda M, size: M // size),
)
mistaken(
    softmax,
    "masked_rows_are_nan",
    "A row that is all -inf gives NaN: its maximum is -inf, and -inf minus -inf is NaN. Shift such a row by 0, "
    "and don't divide by its sum of 0.",
    row_softmax_with(all_masked=False),
)
mistaken(
    softmax,
    "narrow",
    "You compute in x's own type. Sums and exponentials in bfloat16 lose digits that the result still shows: "
    "convert the block to float32 first.",
    row_softmax_with(wide=None),
)
mistaken(
    softmax,
    "all_rows_in_a_block",
    "Your block is the whole array. A large one doesn't fit into VMEM: take `block_M` rows.",
    row_softmax_with(rows="all"),
)
mistaken(
    softmax,
    "divided_outside",
    "You divide outside the kernel. That reads and writes the whole array once more, which is what you wanted to "
    "save.",
    row_softmax_with(split=True),
)
mistaken(
    softmax,
    "converted_outside",
    "You convert all of x, or all of the result, outside the call. Each conversion is one more pass over memory: "
    "convert in the kernel, a block at a time.",
    row_softmax_with(convert=True),
)
mistaken(
    softmax,
    "eight_rows_always",
    "Your blocks have 8 rows, whatever the argument says. Use `block_M` in the block and in the grid.",
    row_softmax_with(rows=8),
)
mistaken(
    softmax,
    "nothing_in_parallel",
    'You don\'t say that blocks of rows are independent: `dimension_semantics=("parallel",)`.',
    row_softmax_with(semantics="arbitrary"),
)

# ------------------------------------------------------------------------------------- gather

gather = Exercise(
    "15.gather",
    title="Rows chosen by ids",
    function="take_rows",
    minutes=30,
    points=15,
    forbid=("jax.numpy.take", "jax.numpy.pad", "jax.numpy.take_along_axis"),
    statement="""
An embedding reads rows of a table, and data decides which. So an index map needs more than the grid's indices. Write
`take_rows(table_VD, ids_T)` with scalar prefetch.

- The grid is `(pl.cdiv(T, 8), 8)`: step `(i, r)` makes row `8 i + r` of the result. A block is eight whole rows, of
  both table and result, because Mosaic can't move fewer. The index map chooses the table's block. The kernel chooses
  the row within it and stores it as row r of the result's block.
- A block of the table is loaded only if it isn't the previous step's.
- An id that isn't a row of the table, such as -1 or V, gives a row of zeros, and loads nothing out of bounds.
- V and T are at least 1. The last block of the result may have rows past T, for which `ids_ref` has no entries.
- It compiles for a v5e with a table `[200001, 700]` and 1001 ids.
""",
    hints=(
        "The index map of the table gets `i, r, ids_ref`. Row v of the table is row `v % 8` of block `v // 8`.",
        "Three numbers can be out of bounds: the index into `ids_ref`, the id, and with it the block. Clip the first "
        "two, both in the index map and in the kernel.",
        "`row = ids_ref[jnp.minimum(8 * i + r, T - 1)]`; `kept = jnp.clip(row, 0, V - 1)`; block `kept // 8`. In the "
        "kernel, store `table_ref[pl.ds(kept % 8, 1), :]` to `o_ref[pl.ds(r, 1), :]`, or 0 if `row` isn't `kept`.",
    ),
)


def takes(fn, t, V, D, ids, infinite=()):
    table, ids = numbers(t, V, D), np.asarray(ids, np.int32)
    table = table.at[list(infinite), 0].set(jnp.inf) if infinite else table
    got, run = simulate(t, fn, table, jnp.asarray(ids), cores=1)
    real = (ids >= 0) & (ids < V)
    want = np.where(real[:, None], np.asarray(table)[ids.clip(0, V - 1)], 0)
    why = f"rows {ids.tolist()} of [{V}, {D}]"
    why += "; the first and the last row of the table begin with inf" if infinite else ""
    if got.shape == want.shape and (off := (np.asarray(got) != want).any(axis=1)).any():
        row = int(np.flatnonzero(off)[0])
        same = np.flatnonzero((np.asarray(table) == np.asarray(got)[row]).all(axis=1)).tolist()
        found = f"row {same[0]} of the table" if same else "no row of the table"
        found = found if np.asarray(got)[row].any() else "zeros"
        why += f". Row {row} of the result is {found}; its id is {ids[row]}"
    t.close(got, want, 0, 0, why, np.float32)
    return run


@gather.check("eight ids")
def _(fn, t):
    takes(fn, t, 24, 128, t.rng.integers(0, 24, 8))


@gather.check("a number of ids that 8 doesn't divide")
def _(fn, t):
    takes(fn, t, 24, 128, t.rng.integers(0, 24, 11))


@gather.check("ids that aren't rows, and a ragged table")
def _(fn, t):
    V = int(t.rng.integers(17, 23))
    ids = [0, V - 1, V, -1, 3, V + 100, -(2**31), V - 2]
    takes(fn, t, V, 40, ids)
    takes(fn, t, V, 40, ids, infinite=(0, V - 1))


@gather.check("blocks that are loaded")
def _(fn, t):
    ids = np.sort(t.rng.integers(0, 40, 16))
    run = takes(fn, t, 40, 128, ids)
    most = changes([int(n) // 8 for n in ids])
    t.true(
        run.loads[0] <= most,
        f"{run.loads[0]} blocks of the table are loaded; these ids change their block {most} times",
        run.loads[0],
    )
    t.equal(run.stores[-1], 2, why="blocks of the result that are stored")


@gather.check("Mosaic compiles it")
def _(fn, t):
    compiles(t, fn, spec(200_001, 700), spec(1001, dtype=jnp.int32))


def take_rows_with(
    *,
    place=True,
    clip=True,
    zeros=True,
    wrap=False,
    row=True,
    store=True,
    whole=False,
    steps=pl.cdiv,
):
    """The solution with a mistake that is asked for."""

    def fn(table_VD, ids_T):
        (V, D), T = table_VD.shape, ids_T.shape[0]

        def wanted(i, r, ids_ref):
            return ids_ref[jnp.minimum(8 * i + r, T - 1) if place else 8 * i + r]

        def kept(n):
            return n % V if wrap else jnp.clip(n, 0, V - 1) if clip else n

        def block_of(i, r, ids_ref):
            return (0 if whole else kept(wanted(i, r, ids_ref)) // 8), 0

        def kernel(ids_ref, table_ref, o_ref):
            r = pl.program_id(1)
            n = wanted(pl.program_id(0), r, ids_ref)
            at = kept(n) if whole else {True: kept(n) % 8, False: 0, "step": r}[row]
            found = table_ref[pl.ds(at, 1), :]
            if zeros:
                is_row = {"below": n >= 0, "above": n < V}.get(zeros, (n >= 0) & (n < V))
                found = found * is_row if zeros == "product" else jnp.where(is_row, found, 0)
            if store:
                o_ref[pl.ds(r, 1), :] = found
            else:
                o_ref[...] = jnp.broadcast_to(found, o_ref.shape)

        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(steps(T, 8), 8),
                in_specs=[pl.BlockSpec((V if whole else 8, D), block_of)],
                out_specs=pl.BlockSpec((8, D), lambda i, r, ids_ref: (i, 0)),
            ),
            out_shape=spec(T, D),
        )(ids_T, table_VD)

    return fn


mistaken(
    gather,
    "ids_past_the_end",
    "The last block has steps past T, where you read `ids_ref`. It has only T entries: clip the index.",
    take_rows_with(place=False),
)
mistaken(
    gather,
    "ids_not_clipped",
    "You choose a block with an unchecked id, and ids such as -1 or V have none. Clip it, and put zeros in the "
    "kernel.",
    take_rows_with(clip=False),
)
mistaken(
    gather,
    "clipped_and_taken",
    "You clip the ids, but then return the row at the clipped id. An id that isn't a row gives zeros: choose them "
    "in the kernel.",
    take_rows_with(zeros=False),
)
mistaken(
    gather,
    "multiplied_by_zero",
    "You multiply by 0 what you read for an invalid id. 0 times inf or NaN is NaN: choose with `jnp.where`.",
    take_rows_with(zeros="product"),
)
mistaken(
    gather,
    "wrapped",
    "You take ids modulo V, as Python does for -1. Here an id that isn't a row gives zeros.",
    take_rows_with(wrap=True, zeros=False),
)
mistaken(
    gather,
    "wrapped_below_zero",
    "An id below 0 gives a row from the table's end, as in Python. Here an id that isn't a row gives zeros.",
    take_rows_with(wrap=True, zeros="above"),
)
mistaken(
    gather,
    "too_small_and_taken",
    "An id of V or more gives zeros, but one below 0 gives row 0. It isn't a row either: test both ends.",
    take_rows_with(zeros="above"),
)
mistaken(
    gather,
    "too_large_and_taken",
    "An id below 0 gives zeros, but one of V or more gives the last row. It isn't a row either: test both ends.",
    take_rows_with(zeros="below"),
)
mistaken(
    gather,
    "row_of_the_step",
    "You read row r of the table's block. Row r is where the result goes; the id names row `id % 8` of the table's "
    "block.",
    take_rows_with(row="step"),
)
mistaken(
    gather,
    "last_ids_forgotten",
    "`T // 8` steps leave out the ids of a block of the result that is not full. Take `pl.cdiv(T, 8)`.",
    take_rows_with(steps=lambda T, size: T // size),
)
mistaken(
    gather,
    "first_row_of_the_block",
    "You return the first row of the block. The id names row `id % 8` within it.",
    take_rows_with(row=False),
)
mistaken(
    gather,
    "whole_block_stored",
    "You store the row into all eight rows of the result's block, so only the last id is left. Store it to "
    "`o_ref[pl.ds(r, 1), :]` alone.",
    take_rows_with(store=False),
)
mistaken(
    gather,
    "whole_table_loaded",
    "Your block is the whole table. That reads all of it for a few rows, and a large one doesn't fit into VMEM: a "
    "block is eight rows.",
    take_rows_with(whole=True),
)


# -------------------------------------------------------------------------------------- order

order = Exercise(
    "15.order",
    title="Steps in the best order",
    function="order_steps",
    minutes=40,
    points=20,
    statement="""
In `listed_sums`, each block of the result is a sum of blocks of x, and a list says in which order they are added. In
what order are the fewest blocks loaded?

Write `order_steps(wanted_RK)`, which returns `(loads, steps)`. `wanted_RK` is an array of booleans: block r of the
result is the sum of those blocks k of x for which `wanted_RK[r, k]` is true.

- `steps` is a list of tuples `(r, k, adds)`. Such a step works on block r of the result and has block k of x. The
  first step of a block r sets it to 0. Then, if `adds` is true, the step adds block k.
- Each wanted pair has exactly one step, and that step adds.
- A block of the result that wants nothing still has to be set to 0. It has exactly one step, which adds nothing, with
  any block of x. There are no other steps.
- Blocks of the result come in the order 0, 1, 2 and so on, all the steps of one before those of the next. Within a
  block of the result, the order is yours.
- A block of x is loaded at the first step, and at every step whose block isn't that of the step before, whether the
  step adds or not. `loads` is how many blocks of x your steps load. It must be the fewest that these rules allow. If
  several lists load equally few, return any of them.
- There is at least one block of the result and one of x. Your function has at most a few seconds for a hundred blocks
  of the result, each of which wants ten.
""",
    hints=(
        "Where can a load be saved at all? Draw three blocks of the result that want x's blocks 0 "
        "and 1, 1 and 2, and 1 and 3. How many loads can you save, and what prevents another?",
        "Only the first and the last step of a block of the result matter. Suppose you know, for "
        "each block of x that could come last in result block r, the fewest loads up to there. "
        "How do you get the same for r + 1?",
        "Keep a dictionary from the last block of x to `(loads, steps)`. For each `last` of the "
        "next result block, try every `first` that isn't `last` (unless there is only one): if "
        "`first` is in the dictionary, it saves a load. A result block that wants nothing changes "
        "no `last`.",
    ),
)  # fmt: skip


def wanted_lists(wanted):
    return [np.flatnonzero(row).tolist() for row in np.asarray(wanted)]


def loads_of(steps):
    return changes([k for _, k, _ in steps])


def arranged(ends, wanted, empty="repeat", start="next"):
    """Steps with the given first and last block of each result block that wants several."""
    steps = []
    for r, (blocks, (first, last)) in enumerate(zip(wanted, ends, strict=True)):
        if not blocks:
            before = steps[-1][1] if steps else None
            steps.append((r, before if empty == "repeat" else 0, False))
            continue
        middle = [k for k in blocks if k not in (first, last)]
        row = [first, *middle, last] if len(blocks) > 1 else [first]
        steps += [(r, k, True) for k in row]
    known = next((k for _, k, _ in steps if k is not None), 0) if start == "next" else 0
    return [(r, known if k is None else k, adds) for r, k, adds in steps]


def best_ends(wanted, *, crosses=True, single=True, both=False):
    """The first and last block of each result block, by the best way to every last block.

    With a mistake that is asked for: no saving across result blocks that want nothing, none by one that wants a single
    block, or one block of x as first and last of several.
    """
    best = {None: (0, [])}  # {last: (saved, ends)}
    for blocks in wanted:
        if not blocks:
            kept = [(saved, [*ends, (None, None)]) for saved, ends in best.values()]
            anew = {None: max(kept, key=lambda pair: pair[0])}
            best = dict(zip(best, kept, strict=True)) if crosses else anew
            continue
        after = {}
        for last in blocks:
            firsts = blocks if both else [k for k in blocks if k != last] or [last]
            anywhere = max(best.values(), key=lambda pair: pair[0])
            ways = [(anywhere[0], anywhere[1], firsts[0])]
            for k in firsts:
                if k in best and (single or len(blocks) > 1):
                    ways.append((best[k][0] + 1, best[k][1], k))
            saved, ends, first = max(ways, key=lambda way: way[0])
            after[last] = saved, [*ends, (first, last)]
        best = after
    return max(best.values(), key=lambda pair: pair[0])[1]


def right_steps(wanted_RK):
    wanted = wanted_lists(wanted_RK)
    return arranged(best_ends(wanted), wanted)


def by_number(wanted_RK):
    wanted = wanted_lists(wanted_RK)
    return arranged([(min(b), max(b)) if b else (None, None) for b in wanted], wanted)


def there_and_back(wanted_RK):
    """Every second result block in descending order."""
    wanted = wanted_lists(wanted_RK)
    ends = [(min(b), max(b))[:: -1 if r % 2 else 1] if b else () for r, b in enumerate(wanted)]
    return arranged([pair or (None, None) for pair in ends], wanted)


def one_by_one(wanted_RK, ahead=0, choose=min):
    """Shares a block with the next result block wherever that's possible, from the front.

    It takes the lowest (or what `choose` says), but with `ahead` rather one that isn't the only one the next two share.
    """
    wanted = [blocks for blocks in wanted_lists(wanted_RK) if blocks]
    firsts, lasts = [None] * len(wanted), [None] * len(wanted)
    for r in range(len(wanted) - 1):
        shared = set(wanted[r]) & set(wanted[r + 1])
        if len(wanted[r]) > 1:
            shared -= {firsts[r]}
        if not shared:
            continue
        later = set(wanted[r + 1]) & set(wanted[r + 2]) if ahead and r + 2 < len(wanted) else set()
        good = shared - later if len(later) == 1 and len(wanted[r + 1]) > 1 else shared
        firsts[r + 1] = lasts[r] = choose(good or shared)
    ends = []
    for first, last, blocks in zip(firsts, lasts, wanted, strict=True):
        if len(blocks) == 1:
            first = last = blocks[0]
        first = min(k for k in blocks if k != last or len(blocks) == 1) if first is None else first
        last = max(k for k in blocks if k != first or len(blocks) == 1) if last is None else last
        ends.append((first, last))
    left = iter(ends)
    everything = wanted_lists(wanted_RK)
    return arranged([next(left) if b else (None, None) for b in everything], everything)


def draw_table(t, rows, blocks, most=4):
    """Each block of the result wants one to `most` blocks of x."""
    table = np.zeros((rows, blocks), bool)
    for row in table:
        row[t.rng.choice(blocks, int(t.rng.integers(1, most + 1)), replace=False)] = True
    return table


def of_lists(lists, blocks):
    table = np.zeros((len(lists), blocks), bool)
    for row, wanted in zip(table, lists, strict=True):
        row[list(wanted)] = True
    return table


def renumbered(t, lists, blocks):
    """The lists with the blocks' numbers drawn again."""
    number = t.rng.permutation(blocks)
    return of_lists([[int(number[k]) for k in wanted] for wanted in lists], blocks)


def both_ways(t, lists, blocks):
    """The lists from the front and from the back, each with numbers drawn again, and with these in reverse."""
    table = renumbered(t, lists, blocks)
    return [table, table[:, ::-1], table[::-1], table[::-1, ::-1]]


def tables_where(t, wrong, count=3, rows=7, blocks=6, most=3):
    """Tables for which a wrong rule loads more than it need."""
    found = []
    for _ in range(5000):
        table = draw_table(t, rows, blocks, most)
        if loads_of(wrong(table)) > loads_of(right_steps(table)):
            found.append(table)
        if len(found) == count:
            return found
    raise AssertionError("no table found")


def fault_of(steps, wanted, count):
    """What is wrong with a list of steps, in words without numbers, and the details; or two empty strings."""
    rows = [r for r, _, _ in steps]
    for r, k, _ in steps:
        if not 0 <= r < len(wanted):
            return (
                "a step has a block of the result that there isn't",
                f"block {r} of {len(wanted)}",
            )
        if not 0 <= k < count:
            return "a step has a block of x that there isn't", f"block {k} of {count}"
    missing = sorted(set(range(len(wanted))) - set(rows))
    if missing:
        r = missing[0]
        nothing = "" if wanted[r] else " that wants nothing"
        return f"a block of the result{nothing} has no step", f"block {r}"
    if len(list(itertools.groupby(rows))) > len(wanted):
        return "the steps of a block of the result don't follow one another", f"they are {rows}"
    if rows != sorted(rows):
        return (
            "the blocks of the result don't come in the order 0, 1, 2 and so on",
            f"they are {rows}",
        )
    for r, blocks in enumerate(wanted):
        mine = [(k, adds) for row, k, adds in steps if row == r]
        added = [k for k, adds in mine if adds]
        seen = f"block {r} of the result wants {blocks} and its steps (k, adds) are {mine}"
        if set(added) - set(blocks):
            return "a step adds a block that isn't wanted", seen
        if set(blocks) - {k for k, _ in mine}:
            return "a wanted block has no step", seen
        if idle := len(set(blocks) - set(added)):
            return f"wanted blocks whose step doesn't add: {idle}", seen
        if len(set(added)) < len(added):
            return "a wanted block is added twice", seen
        more = len(mine) - max(1, len(blocks))
        if more:
            return f"steps that add nothing and aren't needed: {more}", seen
    return "", ""


def explained(steps, wanted, best):
    """Why a list loads too much, for a message."""
    text = f"your steps load {loads_of(steps)} blocks, and {best} are enough"
    if len(wanted) < 9:
        text += f"; the blocks of the result want {wanted}"
        text += f", and your steps have the blocks of x {[k for _, k, _ in steps]}"
    begins, at = {}, {}  # the first step of each block of the result; what was there before
    for s, (r, _, _) in enumerate(steps):
        begins.setdefault(r, s)
        at.setdefault(r, steps[s - 1][1] if s else None)
    full = [r for r, blocks in enumerate(wanted) if blocks]
    for r, blocks in enumerate(wanted):
        if not blocks and r and steps[begins[r]][1] != at[r]:
            return (
                f"{text}. A block of x is loaded for block {r} of the result, which wants nothing"
            )
    for a, b in itertools.pairwise(full):
        both = sorted(set(wanted[a]) & set(wanted[b]))
        first = steps[begins[b]][1]
        if both and first != at[b]:
            text += f". Blocks {a} and {b} of the result both want {both}, but {a} ends with {at[b]} and {b} begins "
            begun = steps[begins[a]][1]
            taken = f": block {begun} is what {a} begins with" if both == [begun] != [at[b]] else ""
            return f"{text}with {first}{taken}"
    return text


def order_is_best(t, fn, tables):
    """All lists first, so that a mistake shows in several values at once."""
    got = [fn(table.copy()) for table in tables]
    for pair in got:
        t.true(
            isinstance(pair, (tuple, list)) and len(pair) == 2,
            "it doesn't return two values, `loads` and `steps`",
        )
        t.true(np.ndim(pair[0]) == 0, "`loads`, the first value, isn't a number")
    for _, steps in got:
        t.true(
            isinstance(steps, (tuple, list)), "`steps`, the second value, isn't a list", "a list"
        )
        off = [step for step in steps if np.shape(step) != (3,)]
        t.true(
            not off, f"a step isn't a tuple (r, k, adds): {off[:1]}", [np.shape(s) for s in off[:1]]
        )
        off = [step for step in steps if None in tuple(step)]
        t.true(not off, f"a step has None in it: {off[:1]}", "None")
    lists = [wanted_lists(table) for table in tables]
    steps = [[(int(r), int(k), bool(adds)) for r, k, adds in pair[1]] for pair in got]
    faults = [fault_of(s, w, x.shape[1]) for s, w, x in zip(steps, lists, tables, strict=True)]
    kinds = [kind for kind, _ in faults]
    bad = next(((kind, seen) for kind, seen in faults if kind), ("", ""))
    t.true(not bad[0], f"{bad[0]}: {bad[1]}", "; ".join(kinds))
    want = [loads_of(right_steps(table)) for table in tables]
    made = [loads_of(s) for s in steps]
    worse = next((i for i, (m, w) in enumerate(zip(made, want, strict=True)) if m > w), None)
    why = "" if worse is None else explained(steps[worse], lists[worse], want[worse])
    t.true(worse is None, why, made)
    said = [int(pair[0]) for pair in got]
    wrong = next((i for i, (a, b) in enumerate(zip(said, made, strict=True)) if a != b), 0)
    why = f"`loads`, for steps with the blocks of x {[k for _, k, _ in steps[wrong]][:40]}"
    t.equal(said, made, why=why)


@order.check("one block of the result")
def _(fn, t):
    order_is_best(t, fn, [draw_table(t, 1, 7) for _ in range(3)])


@order.check("two that want no block in common")
def _(fn, t):
    order_is_best(t, fn, [renumbered(t, [[0, 1], [2, 3, 4]], 6), renumbered(t, [[0], [1]], 2)])


@order.check("two that want a block in common")
def _(fn, t):
    tables = [[0, 1, 2], [2, 3]], [[0, 1], [1, 0]], [[0, 1, 2, 3], [1, 4, 5]]
    order_is_best(t, fn, [renumbered(t, lists, 7) for lists in tables])


@order.check("one that wants a single block, between two others")
def _(fn, t):
    tables = [[0, 1], [1], [1, 2]], [[0, 1, 2], [2], [2], [2, 3]], [[1], [1], [1]]
    order_is_best(t, fn, [renumbered(t, lists, 5) for lists in tables])


@order.check("one block that three want")
def _(fn, t):
    tables = [[0, 1], [1, 2], [1, 3]], [[0, 1, 2], [2, 3], [2, 4, 5], [2, 6]]
    order_is_best(t, fn, [renumbered(t, lists, 8) for lists in tables])


@order.check("the blocks of causal attention")
def _(fn, t):
    order_is_best(t, fn, [np.tri(int(n), dtype=bool) for n in (4, t.rng.integers(5, 9))])


@order.check("all blocks wanted")
def _(fn, t):
    order_is_best(t, fn, [np.ones((4, 3), bool), np.ones((3, int(t.rng.integers(4, 8))), bool)])


@order.check("where the order of the numbers loads more")
def _(fn, t):
    order_is_best(t, fn, tables_where(t, by_number) + tables_where(t, there_and_back))


@order.check("where the first block in common is the wrong one")
def _(fn, t):
    order_is_best(t, fn, both_ways(t, [[0, 1, 2], [1, 2, 3], [1, 4]], 6))


@order.check("where looking one ahead isn't enough")
def _(fn, t):
    order_is_best(t, fn, both_ways(t, [[0, 1, 2], [1, 2, 3, 4], [1, 3, 5], [3, 6]], 8))


@order.check("nothing wanted")
def _(fn, t):
    order_is_best(t, fn, [np.zeros((1, 3), bool), np.zeros((4, 5), bool)])


@order.check("one that wants nothing, between two others")
def _(fn, t):
    tables = [[0, 1, 2], [], [3, 4]], [[0, 1, 2], [], [2, 3]], [[1, 2], [], [], [2, 1, 3]]
    order_is_best(t, fn, [renumbered(t, lists, 6) for lists in tables])


@order.check("the first or the last wants nothing")
def _(fn, t):
    tables = [[], [], [4, 5], [5, 1]], [[1, 3], [3, 4], []], [[], [2], []]
    order_is_best(t, fn, [renumbered(t, lists, 7) for lists in tables])


@order.check("random tables, with some that want nothing")
def _(fn, t):
    tables = [draw_table(t, 12, 6, 3) for _ in range(5)]
    for table in tables:
        table[t.rng.choice(12, 3, replace=False)] = False
    order_is_best(t, fn, tables)


@order.check("a large table")
def _(fn, t):
    order_is_best(t, fn, [t.rng.random((100, 40)) < 0.2])


def answer_of(steps):
    return loads_of(steps), steps


def order_with(*, empty="repeat", start="next", **mistake):
    def fn(wanted_RK):
        wanted = wanted_lists(wanted_RK)
        return answer_of(arranged(best_ends(wanted, **mistake), wanted, empty, start))

    return fn


def told_by(count):
    """The right steps, with another number of loads."""

    def fn(wanted_RK):
        steps = right_steps(wanted_RK)
        return count(steps, wanted_lists(wanted_RK)), steps

    return fn


def changed_steps(change):
    """The right steps, changed, with the loads that they then have."""

    def fn(wanted_RK):
        return answer_of(change(right_steps(wanted_RK), wanted_lists(wanted_RK)))

    return fn


mistaken(
    order,
    "in_numerical_order",
    "You go through the blocks of x by their numbers in every block of the result. Then the last "
    "of one is seldom the first of the next, though both may want the same.",
    lambda wanted_RK: answer_of(by_number(wanted_RK)),
)
mistaken(
    order,
    "snake",
    "You go up and down through the blocks in turns. That saves a load only where the highest or "
    "the lowest block is wanted by both. Any block that two results want can be the last of one "
    "and the first of the other.",
    lambda wanted_RK: answer_of(there_and_back(wanted_RK)),
)
mistaken(
    order,
    "lowest_in_common",
    "You go from the front and let two blocks of the result share the first block of x that both "
    "want. It may be the only one that the second shares with the third, and it can't be both "
    "first and last.",
    lambda wanted_RK: answer_of(one_by_one(wanted_RK)),
)
mistaken(
    order,
    "highest_in_common",
    "You go from the front and let two blocks of the result share the last block of x that both "
    "want. It may be the only one that the second shares with the third, and it can't be both "
    "first and last.",
    lambda wanted_RK: answer_of(one_by_one(wanted_RK, choose=max)),
)
mistaken(
    order,
    "one_ahead",
    "You settle pair by pair what two blocks of the result share, and look one ahead at most. What you keep free "
    "there may itself have to be kept free for the next. Don't choose yet: keep the best way to *every* last block.",
    lambda wanted_RK: answer_of(one_by_one(wanted_RK, ahead=1)),
)


@order.mutant(
    "You choose from the back, one pair at a time. From either end, a choice can take the block "
    "that the next pair needs."
)
def from_the_back(wanted_RK):
    turned = one_by_one(np.asarray(wanted_RK)[::-1])
    last = len(wanted_RK) - 1
    return answer_of([(last - r, k, adds) for r, k, adds in reversed(turned)])


@order.mutant(
    "You put the block first that most blocks of the result want. What counts is only what the "
    "one before ends with."
)
def most_wanted_first(wanted_RK):
    wanted = wanted_lists(wanted_RK)
    often = np.asarray(wanted_RK).sum(axis=0)
    ranked = [sorted(blocks, key=lambda k: -often[k]) for blocks in wanted]
    ends = [(blocks[0], blocks[-1]) if blocks else (None, None) for blocks in ranked]
    return answer_of(arranged(ends, wanted))


@order.mutant(
    "Each block of the result begins with what the one before ends with, if it wants it, but you "
    "leave it to chance what comes last. Choose the last one for the sake of the next."
)
def only_the_first_chosen(wanted_RK):
    steps = []
    for r, blocks in enumerate(wanted_lists(wanted_RK)):
        before = steps[-1][1] if steps else None
        row = sorted(blocks, key=lambda k: k != before)
        steps += [(r, k, True) for k in row] or [(r, before, False)]
    known = next((k for _, k, _ in steps if k is not None), 0)
    return answer_of([(r, known if k is None else k, adds) for r, k, adds in steps])


@order.mutant(
    "You pair blocks of the result: 0 with 1, 2 with 3 and so on, and save nothing between the "
    "pairs. One that has several blocks of x can share its first with the one before and its last "
    "with the one after."
)
def in_pairs(wanted_RK):
    wanted = wanted_lists(wanted_RK)
    ends = []
    for a in range(0, len(wanted), 2):
        ends += best_ends(wanted[a : a + 2])
    return answer_of(arranged(ends, wanted))


mistaken(
    order,
    "single_blocks_break",
    "A block of the result that wants a single block of x saves nothing in your list. Its one "
    "block is both its first and its last, so it can pass on what it found.",
    order_with(single=False),
)
mistaken(
    order,
    "nothing_wanted_breaks",
    "You start over after a block of the result that wants nothing. Its step can keep the block "
    "of x that is there, and the next may begin with it.",
    order_with(crosses=False),
)
mistaken(
    order,
    "block_0_if_nothing_wanted",
    "The step of a block of the result that wants nothing has block 0 of x, which may have to be "
    "loaded for it. Let it keep the block that is there.",
    order_with(empty="zero"),
)
mistaken(
    order,
    "block_0_at_the_start",
    "The first blocks of the result want nothing, and you load block 0 of x for them. The first "
    "step loads a block in any case: let it be the one that is wanted next.",
    order_with(start="zero"),
)


@order.mutant(
    "A block of the result that wants nothing has no step in your list. Then nothing sets it to "
    "0, and it holds what was in memory before."
)
def nothing_wanted_left_out(wanted_RK):
    return answer_of([step for step in right_steps(wanted_RK) if step[2]])


mistaken(
    order,
    "nothing_wanted_added",
    "The step of a block of the result that wants nothing adds the block of x that it has. `adds` "
    "must be false there.",
    changed_steps(lambda steps, wanted: [(r, k, True) for r, k, _ in steps]),
)
mistaken(
    order,
    "all_blocks_visited",
    "You have a step for every pair, and those that aren't wanted add nothing. But a step loads "
    "its block whether it adds or not. Unwanted pairs have no step.",
    lambda wanted_RK: answer_of(
        [(r, k, bool(adds)) for r, row in enumerate(wanted_RK) for k, adds in enumerate(row)]
    ),
)


@order.mutant(
    "You leave out the step of a block of x that is still there from the step before. It needs no "
    "load, but without a step it isn't added to this block of the result."
)
def shared_step_left_out(wanted_RK):
    steps = right_steps(wanted_RK)
    kept = [b for a, b in itertools.pairwise(steps) if a[1] != b[1] or not b[2]]
    return answer_of([steps[0], *kept])


mistaken(
    order,
    "by_blocks_of_x",
    "You go through the blocks of x, and through the results that want each. Each is loaded once, "
    "but a result's block is then left and visited again, and section 3 showed that its sum is "
    "lost.",
    changed_steps(lambda steps, wanted: sorted(steps, key=lambda step: step[1])),
)


@order.mutant(
    "You change the order of the blocks of the result to save more. They have to come as 0, 1, 2 "
    "and so on."
)
def results_reordered(wanted_RK):
    wanted = wanted_lists(wanted_RK)
    rest, chosen = list(range(len(wanted))), [0]
    rest.remove(0)
    while rest:
        have = set(wanted[chosen[-1]])
        chosen.append(max(rest, key=lambda r: len(have & set(wanted[r]))))
        rest.remove(chosen[-1])
    steps = right_steps(np.asarray(wanted_RK)[chosen])
    return answer_of([(chosen[r], k, adds) for r, k, adds in steps])


mistaken(
    order,
    "pairs_swapped",
    "Your tuples have the block of x first, or you read `wanted_RK` with its axes swapped. Tuples "
    "are `(r, k, adds)`, and a row of the array belongs to a block of the result.",
    lambda wanted_RK: (answer_of(right_steps(wanted_RK))[0],
                       [(k, r, adds) for r, k, adds in right_steps(wanted_RK)]),
)  # fmt: skip
mistaken(
    order,
    "numbers_within_the_wanted",
    "Your k counts within the blocks that are wanted. It is the block's number in x, the column "
    "of `wanted_RK`.",
    changed_steps(
        lambda steps, wanted: [(r, wanted[r].index(k) if adds else k, adds) for r, k, adds in steps]
    ),
)
mistaken(
    order,
    "adds_nowhere",
    "`adds` is true where a block of the result wants nothing, and false elsewhere. It's the other way round.",
    changed_steps(lambda steps, wanted: [(r, k, not adds) for r, k, adds in steps]),
)
mistaken(
    order,
    "adds_from_the_second_step",
    "`adds` is false at the first step of each block of the result. That step sets the block to 0 "
    "by itself and then has to add what is wanted, like all the others.",
    changed_steps(
        lambda steps, wanted: [
            (r, k, adds and s > 0 and steps[s - 1][0] == r) for s, (r, k, adds) in enumerate(steps)
        ]
    ),
)
mistaken(
    order,
    "first_load_forgotten",
    "You count only changes of the block. The first step loads one as well.",
    told_by(lambda steps, wanted: loads_of(steps) - 1),
)
mistaken(
    order,
    "every_step_a_load",
    "You count a load for every step. A step whose block of x is the one of the step before loads "
    "nothing.",
    told_by(lambda steps, wanted: len(steps)),
)
mistaken(
    order,
    "every_block_once",
    "You count each block of x once, as if it stayed for good. It's there only until a step has "
    "another block, and after that it has to be loaded again.",
    told_by(lambda steps, wanted: len({k for _, k, _ in steps})),
)
mistaken(
    order,
    "wanted_pairs_counted",
    "You count a load for each step that adds. What matters is whether the block changes: a step "
    "that adds may find its block there.",
    told_by(lambda steps, wanted: sum(adds for _, _, adds in steps)),
)
mistaken(
    order,
    "saved_wherever_in_common",
    "You count a saved load wherever two neighbours want a block in common. One block of x can't "
    "be both the first and the last of a result block that wants several, so some of these "
    "savings exclude each other.",
    told_by(
        lambda steps, wanted: (
            sum(map(len, wanted))
            - sum(bool(set(a) & set(b)) for a, b in itertools.pairwise(wanted))
        )
    ),
)
mistaken(
    order,
    "all_in_common_saved",
    "You save a load for each block of x that two neighbours have in common. Only one block is "
    "there when the next result block begins, so at most one load is saved between two.",
    told_by(
        lambda steps, wanted: (
            sum(map(len, wanted)) - sum(len(set(a) & set(b)) for a, b in itertools.pairwise(wanted))
        )
    ),
)
mistaken(
    order,
    "values_swapped",
    "You return the steps first. It's `(loads, steps)`.",
    lambda wanted_RK: answer_of(right_steps(wanted_RK))[::-1],
)
mistaken(
    order,
    "only_the_steps",
    "You return the steps alone. Return `(loads, steps)`.",
    right_steps,
)
mistaken(
    order,
    "nothing_wanted_not_foreseen",
    "You take the first or the last of an empty list. A block of the result may want nothing.",
    lambda wanted_RK: (
        [blocks[0] for blocks in wanted_lists(wanted_RK)] and answer_of(right_steps(wanted_RK))
    ),
)


@order.mutant(
    "You look for a first block that isn't the last, and there is none where a block of the "
    "result wants a single one. There the two are the same."
)
def single_block_not_foreseen(wanted_RK):
    for blocks in wanted_lists(wanted_RK):
        for last in blocks:
            min(k for k in blocks if k != last)
    return answer_of(right_steps(wanted_RK))


@order.mutant(
    "You let one block of x be both the first and the last step of a result block that wants "
    "several, and count it as there twice. It has a single step, so it's one or the other."
)
def first_is_last(wanted_RK):
    wanted = wanted_lists(wanted_RK)
    ends = best_ends(wanted, both=True)
    steps = arranged(ends, wanted)
    once = [step for i, step in enumerate(steps) if step not in steps[:i]]
    full = [pair for pair in ends if pair[0] is not None]
    saved = sum(a[1] == b[0] for a, b in itertools.pairwise(full))
    return max(1, sum(map(len, wanted)) - saved), once


def start_changed(wanted_RK, known):
    """The right steps, but those before any block is wanted have another block of x."""
    loads, steps = answer_of(right_steps(wanted_RK))
    begin = next((s for s, step in enumerate(steps) if step[2]), len(steps))
    return loads, [(r, known, False) for r, _, _ in steps[:begin]] + steps[begin:]


mistaken(
    order,
    "none_at_the_start",
    "A step at the start, before anything is wanted, has None as its block of x. It has to have a "
    "block, and it loads one.",
    partial(start_changed, known=None),
)
mistaken(
    order,
    "minus_one_at_the_start",
    "A step at the start, before anything is wanted, has block -1 of x. It has to have a block "
    "that there is, and it loads one.",
    partial(start_changed, known=-1),
)
mistaken(
    order,
    "no_flag",
    "Your steps are pairs. Each is a tuple `(r, k, adds)`; the third entry says whether the step "
    "adds.",
    lambda wanted_RK: (
        loads_of(right_steps(wanted_RK)), [(r, k) for r, k, _ in right_steps(wanted_RK)],
    ),
)  # fmt: skip
mistaken(
    order,
    "no_load_if_nothing_wanted",
    "You return no loads where nothing is wanted at all. Those steps have a block of x too, and "
    "the first one loads it.",
    told_by(lambda steps, wanted: loads_of(steps) if any(wanted) else 0),
)
mistaken(
    order,
    "a_load_if_nothing_wanted",
    "You count a load for each step that adds nothing. It loads only if its block isn't that of "
    "the step before.",
    told_by(lambda steps, wanted: loads_of(steps) + sum(not adds for *_, adds in steps)),
)
mistaken(
    order,
    "a_step_at_the_end",
    "You add a step at the end that isn't needed. Each wanted pair has one step, and each block "
    "of the result that wants nothing has one. There are no others.",
    changed_steps(lambda steps, wanted: [*steps, (*steps[-1][:2], False)]),
)
