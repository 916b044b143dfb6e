import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxprs_in_params

from minitext.book.grading import Exercise
from minitext.compiler.aot import compiles_for
from minitext.kernels.grouped_matmul.tpu import visits
from minitext.kernels.simulator import strict


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def simulate(t, fn, *args, steps=True):
    """The result and the one kernel's run, in the strict simulator, in an order of its own.

    A grid without steps leaves no record; `steps` may be None where both are right.
    """
    with strict(cores=1, seed=int(t.rng.integers(1, 1000))) as runs:
        out = jax.jit(fn)(*args)
    if steps is not None:
        t.equal(len(runs), int(steps), why="how many Pallas calls run")
    return out, runs[0] if runs else None


def compiles(t, fn, *args):
    shapes = ", ".join(str(list(x.shape)) for x in args)
    reason = compiles_for("v5e", fn, *args)
    t.true(reason is None, f"Mosaic does not compile it for a v5e at {shapes}: {reason}", reason)


def equations(jaxpr):
    """The equations of a jaxpr and of those within it, but for Pallas kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(eqn.params):
                yield from equations(inner)


def copies_outside(fn, *args):
    """Names of what computes arrays as large as the smallest of the matrices in `args`, outside of Pallas kernels."""
    least = min(x.size for x in args if len(x.shape) > 1)
    return [
        eqn.primitive.name
        for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr)
        if eqn.primitive.name not in ("jit", "reshape", "pallas_call")
        and any(v.aval.size >= least for v in eqn.outvars)
    ]


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


def numbers(t, *shape, dtype=jnp.float32):
    return np.asarray(jnp.asarray(t.rng.normal(size=shape), dtype))


def table_of(sizes_G, rows, tile, *, empty):
    table, count = visits(sizes_G, rows, tile, empty=empty)
    return *table, count


def visits_by_hand(sizes, tile, *, empty=False):
    """Pairs (group, tile), one group after the other."""
    pairs, start = [], 0
    for group, size in enumerate(sizes):
        end = start + int(size)
        tiles = range(start // tile, -(-end // tile)) if size else [start // tile] * empty
        pairs += [(group, number) for number in tiles]
        start = end
    return pairs


def owners(sizes, rows):
    """[rows] the group of each row; -1 for rows that no group owns."""
    own = np.repeat(np.arange(len(sizes)), sizes)
    return np.concatenate([own, np.full(rows - len(own), -1)])


# ----------------------------------------------------------------------------- group_metadata

group_metadata = Exercise(
    "19.group_metadata",
    title="The list of visits",
    function="list_visits",
    minutes=25,
    points=10,
    forbid=("minitext.kernels.grouped_matmul.tpu.visits",),
    statement="""
Write `list_visits(group_sizes_G, rows, tile)`, which returns the list that the loop made, as arrays of fixed
length. A kernel's grid can then be as long as the list.

- There is one visit for each pair of a group and a tile in which the group has a row. Groups come in order, and so do
  the tiles of each group.
- A tile that two groups share is visited twice. A group without rows is never visited, nor is a tile whose rows no
  group owns.
- Return `(groups_V, tiles_V, count)`. Both arrays are int32 and have the length
  `V = ceil(rows / tile) + G - 1`, which suffices for any sizes. `count` is the number of visits.
- Entries from `count` on repeat the last visit, so nothing is loaded there. If there is no visit, they are 0.
- It works under `jax.jit` with sizes that are data: one trace for all sizes, and no Python loop over groups.
""",
    hints=(
        "First find the number of visits of each group. Its first tile is `start // tile`. Which is the first tile "
        "after its end?",
        "The cumulative sum of those numbers says at which visit each group is over. The group of visit v is the "
        "number of groups that are over at v: compare [V, 1] with [G], and sum.",
        "`through_G = jnp.cumsum(count_G)`; `groups_V = jnp.sum(visit_V[:, None] >= through_G, axis=1)`; the "
        "tile is `first_G[groups_V] + visit_V - (through_G - count_G)[groups_V]`. Before all this, clip `visit_V` to "
        "the last visit.",
    ),
)


def lists(fn, t, sizes, rows, tile, why, run=None):
    sizes = np.asarray(sizes, np.int32)
    groups, tiles, count = (run or fn)(jnp.asarray(sizes), rows, tile)
    groups, tiles = np.asarray(groups), np.asarray(tiles)
    pairs, length = visits_by_hand(sizes, tile), -(-rows // tile) + len(sizes) - 1
    where = f"{why}: sizes {sizes.tolist()}, {rows} rows, tiles of {tile}"
    t.equal((np.shape(count), int(np.sum(count))), ((), len(pairs)), why=f"visits, {where}")
    t.equal((groups.shape, tiles.shape), ((length,),) * 2, why=f"shapes, {where}")
    got = [(int(g), int(v)) for g, v in zip(groups, tiles, strict=True)]
    t.equal(got[: len(pairs)], pairs, why=f"(group, tile) of each visit, {where}")
    rest = [pairs[-1] if pairs else (0, 0)] * (length - len(pairs))
    t.equal(got[len(pairs) :], rest, why=f"entries after the last visit, {where}")
    t.equal((str(groups.dtype), str(tiles.dtype)), ("int32", "int32"), why="types")


@group_metadata.check("one group, one tile")
def _(fn, t):
    lists(fn, t, [8], 8, 8, "a single visit")


@group_metadata.check("groups of whole tiles")
def _(fn, t):
    lists(fn, t, 8 * t.rng.integers(1, 4, 3), 72, 8, "no tile is shared")


@group_metadata.check("tiles that groups share")
def _(fn, t):
    sizes = t.rng.integers(1, 8, 6) * 2 + 1
    lists(fn, t, sizes, int(sizes.sum()), 6, "odd sizes")
    lists(fn, t, [2, 2, 2, 2], 8, 8, "four groups in one tile")


@group_metadata.check("empty groups, at tiles' edges and inside")
def _(fn, t):
    lists(fn, t, [0, 8, 0, 5, 0, 3, 0], 16, 8, "empty groups")


@group_metadata.check("rows that no group owns")
def _(fn, t):
    lists(fn, t, [int(t.rng.integers(9, 15)), 0, 3], 43, 8, "fewer rows in groups than in all")
    lists(fn, t, [0, 0, 0], 20, 8, "nothing owned")


@group_metadata.check("sizes are data")
def _(fn, t):
    traces = t.traces(lambda sizes: fn(sizes, 40, 8))
    for _ in range(3):
        sizes = t.rng.multinomial(37, [0.5, 0.1, 0.3, 0.1])
        lists(fn, t, sizes, 40, 8, "under jit", run=lambda s, *_: traces(s))
    t.equal(traces.count, 1, why="traces for three arrays of sizes")


@group_metadata.check("all groups at once")
def _(fn, t):
    few, many = (
        len(list(equations(jax.make_jaxpr(lambda s: fn(s, 40, 8))(spec(G, dtype=jnp.int32)).jaxpr)))
        for G in (8, 40)
    )
    looped = many >= few + 32
    t.true(not looped, why="a loop of Python goes through the groups", observed=looped)


def list_with(
    *, shared=True, empty=False, padded=False, inside=False, tail="last", numpy=False, over=False
):
    """The solution with a mistake that is asked for."""

    def fn(group_sizes_G, rows, tile):
        length = -(-rows // tile) + group_sizes_G.shape[0] - 1
        if numpy:
            pairs = visits_by_hand(np.asarray(group_sizes_G), tile)
            pairs += [pairs[-1] if pairs else (0, 0)] * (length - len(pairs))
            count = len(visits_by_hand(np.asarray(group_sizes_G), tile))
            groups, tiles = np.asarray(pairs, np.int32).T
            return groups, tiles, count
        G, ends_G = group_sizes_G.shape[0], jnp.cumsum(group_sizes_G)
        starts_G = ends_G - group_sizes_G
        first_G = starts_G // tile if shared else pl.cdiv(starts_G, tile)
        through = ends_G // tile + 1 if over else pl.cdiv(ends_G, tile)
        count_G = pl.cdiv(group_sizes_G, tile) if padded else through - first_G
        count_G = jnp.where(group_sizes_G > 0, count_G, int(empty))
        through_G = jnp.cumsum(count_G)
        count = through_G[-1]
        visit_V = jnp.arange(length)
        if tail != "on":
            visit_V = jnp.minimum(visit_V, jnp.maximum(count - 1, 0))
        groups_V = jnp.sum(visit_V[:, None] >= through_G, axis=1)
        groups_V = jnp.where(count > 0, jnp.minimum(groups_V, G - 1), 0)
        tiles_V = visit_V - (through_G - count_G)[groups_V]
        tiles_V = tiles_V if inside else tiles_V + first_G[groups_V]
        if tail == "zeros":
            groups_V, tiles_V = (
                jnp.where(jnp.arange(length) < count, x, 0) for x in (groups_V, tiles_V)
            )
        return groups_V.astype(jnp.int32), tiles_V.astype(jnp.int32), count

    return fn


mistaken(
    group_metadata,
    "shared_tiles_once",
    "You begin a group at the first tile that is its own, so the rows that it has in a shared tile are never "
    "multiplied. Round its start down.",
    list_with(shared=False),
)
mistaken(
    group_metadata,
    "empty_groups_visited",
    "You visit groups without rows. In the forward product that loads a matrix for nothing: their count is 0.",
    list_with(empty=True),
)
mistaken(
    group_metadata,
    "padded_groups",
    "You count `ceil(size / tile)` visits for a group. That's right if each group begins at the start of a tile, but "
    "here a group of 8 rows may touch two tiles. Count from the tile of its first row to that of its last.",
    list_with(padded=True),
)
mistaken(
    group_metadata,
    "tiles_from_zero",
    "You number the tiles from 0 in each group. They are tiles of the whole matrix: add the group's first tile.",
    list_with(inside=True),
)
mistaken(
    group_metadata,
    "tail_runs_on",
    "Your visits are right, but the entries after the last one go on to tiles that may not exist. They should repeat "
    "the last visit.",
    list_with(tail="on"),
)
mistaken(
    group_metadata,
    "tail_of_zeros",
    "Your visits are right, but the entries after the last one are zeros, so the first group's matrix and tile would "
    "be loaded again. They should repeat the last visit.",
    list_with(tail="zeros"),
)
mistaken(
    group_metadata,
    "one_tile_too_many",
    "A group that ends where a tile ends doesn't reach into the next one: count up to `ceil(end / tile)`, not up to "
    "`end // tile + 1`.",
    list_with(over=True),
)
mistaken(
    group_metadata,
    "loop_in_python",
    "You read the sizes in Python, but under `jit` they aren't known yet. Use cumulative sums and comparisons.",
    list_with(numpy=True),
)


def one_group_after_the_other(group_sizes_G, rows, tile):
    G = group_sizes_G.shape[0]
    length = -(-rows // tile) + G - 1
    groups_V = tiles_V = jnp.zeros(length, jnp.int32)
    start = count = jnp.int32(0)
    for g in range(G):
        end = start + group_sizes_G[g]
        more = jnp.where(end > start, -(-end // tile) - start // tile, 0)
        # What later groups don't overwrite repeats the last visit.
        mine_V = (jnp.arange(length) >= count) & (more > 0)
        number_V = start // tile + jnp.minimum(jnp.arange(length) - count, more - 1)
        groups_V, tiles_V = jnp.where(mine_V, g, groups_V), jnp.where(mine_V, number_V, tiles_V)
        start, count = end, count + more
    return groups_V, tiles_V.astype(jnp.int32), count


mistaken(
    group_metadata,
    "one_group_after_the_other",
    "Your visits are right, but a Python loop over the groups makes them, so the program grows with the number of "
    "groups. Find the group of each visit by comparing all visits with all groups.",
    one_group_after_the_other,
)


# ------------------------------------------------------------------------------- masked_store

masked_store = Exercise(
    "19.masked_store",
    title="A linear layer for each group",
    function="grouped_linear",
    minutes=35,
    points=15,
    forbid=("jax.numpy.pad", "jax.lax.ragged_dot"),
    statement="""
Write `grouped_linear(x_MK, w_GKN, b_GN, table, tile_m=8, tile_k=128)`. Row m of the result is
`x[m] @ w[g] + b[g]`, where g is the group of row m. It's this section's kernel with two additions: the
contraction comes in blocks, and each group has a bias.

- `table` is `(bounds_G1, groups_V, tiles_V, count)`, as the package's `visits` makes it. `bounds` has the row
  at which each group begins, and at the end the row after the last group. Empty groups have no visit.
- The grid is `(count, K // tile_k)`. Blocks of x are `[tile_m, tile_k]`, those of a matrix `[tile_k, N]`; each visit
  loads every block that it needs once. N is one block.
- Sum in float32 over all of K, even for bfloat16 inputs, and round once, when you store.
- A visit changes only its own group's rows of the tile. Other groups' rows stay as they are.
- Rows that no group owns are zeros in the result. In x they may be NaN.
- M is any number, and all groups may be empty. It compiles for a v5e.
""",
    hints=(
        "A scratch of `[tile_m, N]` in float32 collects the blocks of the contraction. At which step of a visit is it "
        "reset, and at which is it complete?",
        "A row's number in the matrix is `tiles_ref[v] * tile_m` plus its number in the tile. If it's outside the "
        "group's bounds, store the value that `o_ref` has. Clear the rows that no visit wrote after the kernel: they "
        "start at `bounds_G1[-1]`.",
        "At the last block: `own = (row >= bounds_ref[g]) & (row < bounds_ref[g + 1])`; "
        "`o_ref[...] = jnp.where(own, acc_ref[...] + b_ref[...], o_ref[...].astype(jnp.float32)).astype(o_ref.dtype)`. "
        "Pass the bias as `b_GN[:, None]` in blocks `(None, 1, N)`.",
    ),
)


def linear(
    fn, t, sizes, rows, why, *, K=256, N=24, dtype=jnp.float32, tile=8, tile_k=128, scale=1.0
):
    sizes, own = np.asarray(sizes, np.int32), owners(sizes, rows)
    x, w = numbers(t, rows, K, dtype=dtype), numbers(t, len(sizes), K, N, dtype=dtype)
    b = np.asarray(scale * t.rng.normal(size=(len(sizes), N)), np.float32)
    x = np.where(own[:, None] >= 0, x, np.nan).astype(x.dtype)
    want = np.zeros((rows, N))
    for m in np.flatnonzero(own >= 0):
        want[m] = x[m].astype(np.float64) @ w[own[m]].astype(np.float64) + b[own[m]]

    def call(x, w, b, sizes):
        return fn(x, w, b, table_of(sizes, rows, tile, empty=False), tile_m=tile, tile_k=tile_k)

    got, run = simulate(t, call, x, w, b, sizes, steps=sizes.any())
    rtol = 5e-3 if dtype == jnp.bfloat16 else 1e-4
    where = f"{why}: sizes {sizes.tolist()}, {rows} rows"
    t.close(got, want, rtol, 1e-2 if dtype == jnp.bfloat16 else 1e-3, where, dtype)
    return run


@masked_store.check("tiles that groups share, and what is loaded")
def _(fn, t):
    sizes = [int(t.rng.integers(9, 15)), 3, 0, int(t.rng.integers(4, 8))]
    run = linear(fn, t, sizes, sum(sizes), "shared tiles")
    steps = 2 * len(visits_by_hand(sizes, 8))
    t.equal(len(run.visits), steps, why="steps of the grid")
    for name, loads in zip("xw", run.loads[:2], strict=True):
        t.true(loads <= steps, f"{loads} blocks of {name} in {steps} steps", loads)
    t.equal(run.stores[-1], -(-sum(sizes) // 8), why="stores of the result: one for each tile")


@masked_store.check("rows that no group owns")
def _(fn, t):
    linear(fn, t, [int(t.rng.integers(1, 7)), 0, 4], 29, "rows past the last group are NaN in x")


@masked_store.check("other tiles")
def _(fn, t):
    sizes = [int(t.rng.integers(17, 22)), 3, 12]
    run = linear(fn, t, sizes, 40, "tiles of 16 rows and 256 of K", K=512, tile=16, tile_k=256)
    steps = 2 * len(visits_by_hand(sizes, 16))
    t.equal(len(run.visits), steps, why="steps of the grid with tile_m=16, tile_k=256 and K=512")


@masked_store.check("no group has rows")
def _(fn, t):
    linear(fn, t, [0, 0], 11, "nothing to do")


@masked_store.check("bfloat16, summed in float32")
def _(fn, t):
    linear(fn, t, [5, 6], 11, "bfloat16", K=1024, dtype=jnp.bfloat16, scale=3.0)


@masked_store.check("Mosaic compiles it")
def _(fn, t):
    def call(x, w, b, sizes):
        return fn(x, w, b, table_of(sizes, 1000, 128, empty=False), tile_m=128, tile_k=256)

    bf16, int32 = jnp.bfloat16, jnp.int32
    shapes = spec(1000, 512, dtype=bf16), spec(8, 512, 384, dtype=bf16), spec(8, 384)
    compiles(t, call, *shapes, spec(8, dtype=int32))


def linear_with(
    *, mask="where", begin="visit", bias="last", place=True, ends=True, acc=jnp.float32, row=False
):
    """The solution with a mistake that is asked for."""

    def fn(x_MK, w_GKN, b_GN, table, tile_m=8, tile_k=128):
        (M, K), N = x_MK.shape, w_GKN.shape[2]
        *table, count = table
        last = K // tile_k - 1

        def kernel(bounds_ref, groups_ref, tiles_ref, x_ref, w_ref, b_ref, o_ref, acc_ref):
            v, i = pl.program_id(0), pl.program_id(1)

            @pl.when((i == 0) & ((v == 0) | (begin == "visit")))
            def _():
                acc_ref[...] = jnp.zeros_like(acc_ref)

            part = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
            part = part + b_ref[...] if bias == "each" else part
            acc_ref[...] += part.astype(acc_ref.dtype)

            @pl.when(i == last)
            def _():
                number = jax.lax.broadcasted_iota(jnp.int32, (tile_m, 1), 0)
                number = number + tiles_ref[v] * tile_m if place else number
                g = groups_ref[v]
                own = (number >= bounds_ref[g]) & (number < bounds_ref[g + 1])
                out = acc_ref[...].astype(jnp.float32)
                out = out + b_ref[...] if bias == "last" else out
                old = o_ref[...].astype(jnp.float32)
                if mask == "where":
                    out = jnp.where(own, out, old)
                elif mask == "zeros":
                    out = jnp.where(own, out, 0)
                elif mask == "times":
                    out = own * out + (1 - own) * old
                o_ref[...] = out.astype(o_ref.dtype)

        out_MN = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(count, K // tile_k),
                in_specs=[
                    pl.BlockSpec((tile_m, tile_k), lambda v, i, _b, _g, tiles: (tiles[v], i)),
                    pl.BlockSpec((None, tile_k, N), lambda v, i, _b, groups, _t: (groups[v], i, 0)),
                    pl.BlockSpec((1, N), lambda v, i, _b, groups, _t: (groups[v], 0))
                    if row
                    else pl.BlockSpec((None, 1, N), lambda v, i, _b, groups, _t: (groups[v], 0, 0)),
                ],
                out_specs=pl.BlockSpec((tile_m, N), lambda v, i, _b, _g, tiles: (tiles[v], 0)),
                scratch_shapes=[pltpu.VMEM((tile_m, N), acc)],
            ),
            out_shape=spec(M, N, dtype=x_MK.dtype),
        )(*table, x_MK, w_GKN, b_GN if row else b_GN[:, None])
        if not ends:
            return out_MN
        return jnp.where(jnp.arange(M)[:, None] < table[0][-1], out_MN, 0)

    return fn


mistaken(
    masked_store,
    "stores_the_whole_tile",
    "You store all rows of the tile, or all below the group's end, so the last group that visits it overwrites the "
    "others. Store only the group's own rows, from `bounds[g]` up to `bounds[g + 1] - 1`.",
    linear_with(mask="none"),
)
mistaken(
    masked_store,
    "zeros_for_others",
    "You store zeros for rows of other groups, which erases their results. Put back what `o_ref` has.",
    linear_with(mask="zeros"),
)
mistaken(
    masked_store,
    "mask_multiplies",
    "You mask by multiplying, and 0 times NaN is NaN: at a tile's first visit `o_ref` holds garbage. Choose with "
    "`jnp.where`.",
    linear_with(mask="times"),
)
mistaken(
    masked_store,
    "begins_once",
    "You reset the sum only at the first visit, so each visit adds to the one before. Reset it at each visit's first "
    "block.",
    linear_with(begin="once"),
)
mistaken(
    masked_store,
    "bias_at_each_block",
    "You add the bias at each block of the contraction. Add it once, when the sum is complete.",
    linear_with(bias="each"),
)
mistaken(
    masked_store,
    "rows_of_the_tile",
    "You compare the row's number in its tile with the group's bounds. But the bounds are rows of the matrix: add "
    "`tiles_ref[v] * tile_m`.",
    linear_with(place=False),
)
mistaken(
    masked_store,
    "garbage_past_the_end",
    "Rows that no group owns were never written, and hold whatever was there. Replace them by zeros.",
    linear_with(ends=False),
)
mistaken(
    masked_store,
    "sums_in_bfloat16",
    "Your sum is bfloat16 and is rounded at each block of the contraction. Keep it in float32 until the store.",
    lambda x, *args, **sizes: linear_with(acc=x.dtype)(x, *args, **sizes),
)
mistaken(
    masked_store,
    "bias_in_a_row",
    "Your values are right, but Mosaic doesn't accept a block of one row of `b_GN`: the last two sizes of a block must "
    "be multiples of 8 and 128, or the array's own. Pass it as `b_GN[:, None]`, in blocks `(None, 1, N)`.",
    linear_with(row=True),
)


# ----------------------------------------------------------------------------------- backward

backward = Exercise(
    "19.backward",
    title="The gradient of the matrices",
    function="weight_gradients",
    minutes=35,
    points=15,
    forbid=("jax.numpy.pad", "jax.lax.ragged_dot", "jax.lax.ragged_dot_general"),
    statement="""
Write `weight_gradients(x_MK, grad_MN, table, tile_m=8)`. For each group it returns the group's rows of x, transposed,
times its rows of grad.

- `table` is `(bounds_G1, groups_V, tiles_V, count)`. This time **each group has a visit**: a group without rows
  has one, to some tile in which it owns nothing.
- The grid is `(count,)`. Blocks are `[tile_m, K]`, `[tile_m, N]`, and `[K, N]` for the result. A group's block of the
  result stays in VMEM during all of the group's visits and is stored once.
- Sum in float32 over all visits of a group, even for bfloat16 inputs, and round once.
- Empty groups have gradients of zeros.
- Rows that no group owns may be NaN, in x and in grad, and so may the padding of the last tile.
- Use one Pallas call that reads x and grad themselves: nothing of their size is copied, cleared or
  transposed outside of it. It compiles for a v5e.
""",
    hints=(
        "A group's sum runs over its visits, which follow each other. It begins if `groups_ref[v]` differs from the "
        "group of the visit before, and is complete if the next visit's group differs.",
        "A tile contains rows of other groups. Replace them with zeros before the product. What may they contain, and "
        "so is it enough to do this in one factor? For an empty group, all rows are masked: what is stored then?",
        "A scratch `[K, N]` in float32, set to zeros at a group's first visit; "
        "`jax.lax.dot_general(x, grad, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)` with both "
        "factors masked by `jnp.where`; store at its last visit. Clip `v - 1` and `v + 1` before you read there.",
    ),
)


def grads(fn, t, sizes, rows, why, *, K=24, N=40, dtype=jnp.float32, tile=8):
    sizes, own = np.asarray(sizes, np.int32), owners(sizes, rows)
    x, grad = numbers(t, rows, K, dtype=dtype), numbers(t, rows, N, dtype=dtype)
    x, grad = (np.where(own[:, None] >= 0, a, np.nan).astype(a.dtype) for a in (x, grad))
    want = np.zeros((len(sizes), K, N))
    for g in range(len(sizes)):
        want[g] = x[own == g].astype(np.float64).T @ grad[own == g].astype(np.float64)

    def call(x, grad, sizes):
        return fn(x, grad, table_of(sizes, rows, tile, empty=True), tile_m=tile)

    got, run = simulate(t, call, x, grad, sizes)
    rtol = 5e-3 if dtype == jnp.bfloat16 else 1e-4
    where = f"{why}: sizes {sizes.tolist()}, {rows} rows"
    t.close(got, want, rtol, 1e-2 if dtype == jnp.bfloat16 else 1e-3, where, dtype)
    return run


@backward.check("groups of several tiles, shared tiles, and what is stored")
def _(fn, t):
    sizes = [int(t.rng.integers(17, 23)), 2, int(t.rng.integers(5, 8))]
    run = grads(fn, t, sizes, sum(sizes), "shared tiles")
    t.equal(run.stores[-1], 3, why="stores of the result: one for each group")
    t.equal(len(run.visits), len(visits_by_hand(sizes, 8)), why="steps of the grid")


@backward.check("empty groups: first, between, last")
def _(fn, t):
    grads(fn, t, [0, 7, 0, 0, 9, 0], 16, "empty groups")


@backward.check("rows that no group owns")
def _(fn, t):
    grads(fn, t, [int(t.rng.integers(1, 7)), 0, 4], 29, "rows past the last group are NaN")


@backward.check("larger tiles")
def _(fn, t):
    grads(fn, t, [int(t.rng.integers(9, 15)), 0, 20], 40, "tiles of 16 rows", tile=16)


@backward.check("bfloat16, summed in float32")
def _(fn, t):
    grads(fn, t, [200, 3], 203, "bfloat16, a group of 26 tiles", dtype=jnp.bfloat16, K=8, N=16)


@backward.check("nothing is copied outside, and Mosaic compiles it")
def _(fn, t):
    def call(x, grad, sizes):
        return fn(x, grad, table_of(sizes, 1000, 128, empty=True), tile_m=128)

    bf16 = jnp.bfloat16
    shapes = spec(1000, 512, dtype=bf16), spec(1000, 384, dtype=bf16)
    sizes = spec(8, dtype=jnp.int32)
    copied = copies_outside(call, *shapes, sizes)
    t.equal(copied, [], why="what makes large arrays outside of the kernel")
    compiles(t, call, *shapes, sizes)


def gradients_with(*, mask="both", begin="group", skip=False, acc=jnp.float32, copy=False):
    """The solution with a mistake that is asked for."""

    def fn(x_MK, grad_MN, table, tile_m=8):
        K, N = x_MK.shape[1], grad_MN.shape[1]
        *table, count = table
        G = table[0].shape[0] - 1

        def kernel(bounds_ref, groups_ref, tiles_ref, x_ref, grad_ref, o_ref, acc_ref):
            v, steps = pl.program_id(0), pl.num_programs(0)
            g = groups_ref[v]
            first = (v == 0) | (g != groups_ref[jnp.maximum(v - 1, 0)])
            last = (v == steps - 1) | (g != groups_ref[jnp.minimum(v + 1, steps - 1)])

            @pl.when({"group": first, "visit": v >= 0, "once": v == 0}[begin])
            def _():
                acc_ref[...] = jnp.zeros_like(acc_ref)

            row = tiles_ref[v] * tile_m + jax.lax.broadcasted_iota(jnp.int32, (tile_m, 1), 0)
            own = (row >= bounds_ref[g]) & (row < bounds_ref[g + 1])
            x, grad = x_ref[...].astype(jnp.float32), grad_ref[...].astype(jnp.float32)
            if mask != "none":
                x = jnp.where(own, x, 0)
                grad = jnp.where(own, grad, 0) if mask == "both" else grad
            part = jax.lax.dot_general(
                x.astype(x_ref.dtype),
                grad.astype(grad_ref.dtype),
                (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            acc_ref[...] += part.astype(acc_ref.dtype)

            @pl.when(last & ((bounds_ref[g] < bounds_ref[g + 1]) if skip else True))
            def _():
                o_ref[...] = acc_ref[...].astype(o_ref.dtype)

        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(count,),
                in_specs=[
                    pl.BlockSpec((tile_m, K), lambda v, _b, _g, tiles: (tiles[v], 0)),
                    pl.BlockSpec((tile_m, N), lambda v, _b, _g, tiles: (tiles[v], 0)),
                ],
                out_specs=pl.BlockSpec((None, K, N), lambda v, _b, groups, _t: (groups[v], 0, 0)),
                scratch_shapes=[pltpu.VMEM((K, N), acc)],
            ),
            out_shape=spec(G, K, N, dtype=x_MK.dtype),
        )(*table, x_MK.T.copy().T if copy else x_MK, grad_MN)

    return fn


mistaken(
    backward,
    "no_mask",
    "You multiply whole tiles, with rows of other groups. Replace rows that the visit's group doesn't own by zeros.",
    gradients_with(mask="none"),
)
mistaken(
    backward,
    "one_factor_masked",
    "Rows that no group owns may be NaN, and 0 times NaN is NaN. Mask both factors, and choose with `jnp.where`: a "
    "product with the mask keeps the NaN.",
    gradients_with(mask="one"),
)
mistaken(
    backward,
    "begins_at_each_visit",
    "You reset the sum at each visit, so only a group's last tile counts. Reset it when the group changes.",
    gradients_with(begin="visit"),
)
mistaken(
    backward,
    "begins_once",
    "You reset the sum only at the first visit, so each group adds to the one before. Reset it when the group changes.",
    gradients_with(begin="once"),
)
mistaken(
    backward,
    "empty_groups_skipped",
    "You store nothing for groups without rows, so their blocks hold whatever was there. Their gradient is zero.",
    gradients_with(skip=True),
)
mistaken(
    backward,
    "sums_in_bfloat16",
    "Your sum is bfloat16 and is rounded at each visit. Keep it in float32 scratch until the group is complete.",
    lambda x, *args, **sizes: gradients_with(acc=x.dtype)(x, *args, **sizes),
)
mistaken(
    backward,
    "transposes_outside",
    "You transpose an array before the kernel, which costs a pass over memory. `jax.lax.dot_general` contracts over "
    "the rows of both factors as they are.",
    gradients_with(copy=True),
)


def clears_outside(x_MK, grad_MN, table, tile_m=8):
    owned_M1 = jnp.arange(len(x_MK))[:, None] < table[0][-1]
    x_MK, grad_MN = jnp.where(owned_M1, x_MK, 0), jnp.where(owned_M1, grad_MN, 0)
    return gradients_with()(x_MK, grad_MN, table, tile_m)


mistaken(
    backward,
    "clears_outside",
    "You clear the rows that no group owns before the kernel, which reads and writes x and grad once more. The "
    "kernel has the bounds, so mask there.",
    clears_outside,
)


# ------------------------------------------------------------------------------- empty_groups

empty_groups = Exercise(
    "19.empty_groups",
    title="Fix a kernel that forgets the empty groups",
    function="group_means",
    minutes=20,
    points=10,
    forbid=("jax.numpy.pad", "jax.numpy.nan_to_num", "jax.ops.segment_sum"),
    statement="""
The gradient of a group's bias is a sum over the group's rows, and a training log may want the mean of an expert's
inputs. This kernel computes means:

```python
from minitext.kernels.grouped_matmul.tpu import visits


def broken(x_MN, group_sizes_G, tile=8):
    (M, N), G = x_MN.shape, group_sizes_G.shape[0]
    table, count = visits(group_sizes_G, M, tile, empty=False)

    def kernel(bounds_ref, groups_ref, tiles_ref, x_ref, o_ref):
        v = pl.program_id(0)
        group = groups_ref[v]
        start, end = bounds_ref[group], bounds_ref[group + 1]

        @pl.when((v == 0) | (group != groups_ref[jnp.maximum(v - 1, 0)]))
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        in_tile = jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
        row = tiles_ref[v] * tile + in_tile
        own = ((row >= start) & (row < end)).astype(jnp.float32)
        sum_1N = jnp.sum(own * x_ref[...], axis=0, keepdims=True)
        o_ref[...] += sum_1N / (end - start)

    out_G1N = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(count,),
            in_specs=[pl.BlockSpec((tile, N), lambda v, b, g, t: (t[v], 0))],
            out_specs=pl.BlockSpec(
                (None, 1, N), lambda v, b, g, t: (g[v], 0, 0)
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((G, 1, N), jnp.float32),
    )(*table, x_MN)
    return out_G1N[:, 0]
```

It's right if the groups fill the matrix and none of them is empty. Write `group_means(x_MN, group_sizes_G, tile=8)`,
which fixes it.

- Empty groups have means of zeros, even if all groups are empty.
- Rows that no group owns, and the padding of the last tile, may be NaN, and must not affect any mean.
- A NaN in a row that a group owns makes that group's mean NaN, but no other.
- It stays one Pallas call, which reads x itself: x isn't copied or cleared first.
""",
    hints=(
        "There are three things to fix. Which visit writes the block of an empty group? What is 0 divided by 0? And "
        "what is 0 times NaN?",
        "`visits` can give each group a visit. For an empty group, the kernel then runs with `start == end`.",
        "`empty=True`; `jnp.where(own, x_ref[...], 0)` with a mask of booleans; divide by "
        "`jnp.maximum(end - start, 1)`.",
    ),
)


def means(fn, t, sizes, rows, why, *, N=40, spoiled=None, tile=8):
    sizes, own = np.asarray(sizes, np.int32), owners(sizes, rows)
    x = np.where(own[:, None] >= 0, numbers(t, rows, N), np.nan).astype(np.float32)
    if spoiled is not None:
        x[np.flatnonzero(own == spoiled)[0]] = np.nan
    want = np.stack([x[own == g].mean(0) if size else np.zeros(N) for g, size in enumerate(sizes)])
    call = fn if tile == 8 else lambda x, sizes: fn(x, sizes, tile)
    got, run = simulate(t, call, x, sizes, steps=None)
    where = f"{why}: sizes {sizes.tolist()}, {rows} rows"
    if np.shape(got) == want.shape:
        stored = run.stores[-1] if run else 0
        said = f"NaN in place of the zeros of empty groups; {stored} of {len(sizes)} blocks are stored, {where}"
        t.true(not np.isnan(got[sizes == 0]).any(), said, stored)
    if spoiled is not None:
        t.true(np.isnan(got[spoiled]).all(), f"the mean of a group with NaN is not NaN, {where}")
        got, want = np.delete(got, spoiled, 0), np.delete(want, spoiled, 0)
    t.close(got, want, 1e-4, 1e-5, where, np.float32)
    return run


@empty_groups.check("groups that fill the matrix")
def _(fn, t):
    sizes = [int(t.rng.integers(9, 15)), 2, 8]
    sizes.append(32 - sum(sizes))
    run = means(fn, t, sizes, 32, "nothing empty, nothing left over")
    t.true(run is not None, "no Pallas kernel runs: mend the kernel, don't replace it", "no kernel")
    t.equal(run.stores[-1], 4, why="stores of the result: one for each group")
    t.true(run.loads[0] <= len(visits_by_hand(sizes, 8)), "x is loaded too often", run.loads[0])
    sizes = [int(t.rng.integers(33, 48)), 1]
    run = means(fn, t, sizes, 48, "tiles of 16 rows", tile=16)
    why = f"x is loaded {run.loads[0]} times in tiles of 16 rows"
    t.true(run.loads[0] <= len(visits_by_hand(sizes, 16)), why, run.loads[0])


@empty_groups.check("empty groups: first, between, last")
def _(fn, t):
    means(fn, t, [0, 7, 0, 0, 9, 0], 16, "empty groups")


@empty_groups.check("rows that no group owns, and a ragged last tile")
def _(fn, t):
    means(fn, t, [int(t.rng.integers(9, 12)), 5], 29, "rows past the last group are NaN")
    means(fn, t, [int(t.rng.integers(9, 12)), 8], 21, "a last tile of 5 rows, padded with NaN")


@empty_groups.check("a group that has NaN")
def _(fn, t):
    means(fn, t, [6, 5, 5], 16, "NaN in group 1", spoiled=1)


@empty_groups.check("no group has rows")
def _(fn, t):
    means(fn, t, [0, 0, 0], 11, "nothing owned")


@empty_groups.check("one Pallas call, no copy of x, and Mosaic compiles it")
def _(fn, t):
    def call(x, sizes):
        return fn(x, sizes, 128)

    args = spec(1000, 512), spec(8, dtype=jnp.int32)
    program = list(equations(jax.make_jaxpr(call)(*args).jaxpr))
    calls = [eqn.primitive.name for eqn in program].count("pallas_call")
    t.equal(calls, 1, why="Pallas calls in the program")
    t.equal(copies_outside(call, *args), [], why="what makes large arrays outside of the kernel")
    compiles(t, call, *args)


def means_with(*, empty=True, mask="where", divide="max", begin="group"):
    """The solution with a mistake that is asked for."""

    def fn(x_MN, group_sizes_G, tile=8):
        (M, N), G = x_MN.shape, group_sizes_G.shape[0]
        table, count = visits(group_sizes_G, M, tile, empty=empty)

        def kernel(bounds_ref, groups_ref, tiles_ref, x_ref, o_ref):
            v = pl.program_id(0)
            g = groups_ref[v]
            start, end = bounds_ref[g], bounds_ref[g + 1]
            first = (v == 0) | (g != groups_ref[jnp.maximum(v - 1, 0)])

            @pl.when(first if begin == "group" else first & (end > start))
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

            row = tiles_ref[v] * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
            own = (row >= start) & (row < end)
            x = x_ref[...]
            if mask == "times":
                x = own.astype(jnp.float32) * x
            elif mask == "finite":
                x = jnp.where(own & ~jnp.isnan(x), x, 0)
            else:
                x = jnp.where(own, x, 0)
            size = end - start
            size = {"max": jnp.maximum(size, 1), "size": size, "more": size + 1}[divide]
            o_ref[...] += jnp.sum(x, axis=0, keepdims=True) / size

        out_G1N = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(count,),
                in_specs=[pl.BlockSpec((tile, N), lambda v, _b, _g, tiles: (tiles[v], 0))],
                out_specs=pl.BlockSpec((None, 1, N), lambda v, _b, groups, _t: (groups[v], 0, 0)),
            ),
            out_shape=spec(G, 1, N),
        )(*table, x_MN)
        return out_G1N[:, 0]

    return fn


mistaken(
    empty_groups,
    "nobody_visits_them",
    "The empty groups have no visit, so their blocks are never written. Ask `visits` for `empty=True`.",
    means_with(empty=False),
)
mistaken(
    empty_groups,
    "zero_by_zero",
    "You visit the empty groups, but then divide 0 by 0. Divide by at least 1.",
    means_with(divide="size"),
)
mistaken(
    empty_groups,
    "mask_multiplies",
    "Your mask multiplies, and 0 times NaN is NaN. Choose with `jnp.where`.",
    means_with(mask="times"),
)
mistaken(
    empty_groups,
    "all_nan_dropped",
    "You drop every NaN, not only those in rows that the group doesn't own. An error in an expert's rows must show.",
    means_with(mask="finite"),
)
mistaken(
    empty_groups,
    "divides_by_one_more",
    "You add 1 to every group's size to avoid a division by zero, and all means are too small. Take the maximum.",
    means_with(divide="more"),
)


def clears_outside_means(x_MN, group_sizes_G, tile=8):
    owned_M1 = jnp.arange(len(x_MN))[:, None] < jnp.sum(group_sizes_G)
    return means_with()(jnp.where(owned_M1, x_MN, 0), group_sizes_G, tile)


mistaken(
    empty_groups,
    "clears_outside",
    "You clear the rows that no group owns before the kernel, which reads and writes x once more. The kernel has the "
    "bounds, so mask there.",
    clears_outside_means,
)
