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
    ends = np.cumsum(sizes)
    touched = -(-ends // tile) - (ends - sizes) // tile
    numbers = {
        "An empty group whose beginning is within a tile is counted as if it had a row there": touched.sum(),
        "That is the length of the arrays, not the number of visits": length,
        "That is the number of tiles in which a group has a row: a shared one counts once for each group": len(
            {number for _, number in pairs}
        ),
        "That is the number of groups with rows: a group has a visit for each of its tiles": np.sum(
            sizes > 0
        ),
        "A tile of which a group has only the beginning is forgotten: round the group's end up": sum(
            ends // tile - (ends - sizes) // tile
        ),
        "That is the last visit's number; `count` is one more": len(pairs) - 1,
    }
    mistakes = {text: int(n) for text, n in numbers.items() if n != len(pairs)}
    t.equal(np.shape(count), (), why="shape of the count, which is a scalar")
    t.equal(int(count), len(pairs), why=f"visits, {where}", mistakes=mistakes)
    mistakes = {
        "V is ceil(rows / tile) + G - 1; yours is one more": ((length + 1,),) * 2,
        "Those are only the visits; the arrays have the fixed length V": ((len(pairs),),) * 2,
        "The tile that isn't full is forgotten: round rows / tile up": (
            (rows // tile + len(sizes) - 1,),
        )
        * 2,
    }
    wanted = ((length,),) * 2
    mistakes = {text: shape for text, shape in mistakes.items() if shape != wanted}
    t.equal((groups.shape, tiles.shape), wanted, why=f"shapes, {where}", mistakes=mistakes)
    got = [(int(g), int(v)) for g, v in zip(groups, tiles, strict=True)]
    why = f"(group, tile) of each visit, {where}"
    mine, (own_groups, own_tiles) = (
        got[: len(pairs)],
        zip(*pairs, strict=True) if pairs else ((), ()),
    )
    through = np.cumsum(touched * (sizes > 0))
    late = [int(np.sum(through < v)) for v in range(len(pairs))]
    if [group for group, _ in mine] == late != list(own_groups):
        why += ". A group's first visit still has the number of the group before"
    elif sorted(mine) == sorted(pairs):
        why += ". Those are the right visits in another order"
    elif [number for _, number in mine] == list(own_tiles):
        why += ". The tiles are right, the groups aren't"
    elif [group for group, _ in mine] == list(own_groups):
        why += ". The groups are right, the tiles aren't"
    t.equal(mine, pairs, why=why)
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
        "group's bounds, store the value that `o_ref` has. After the kernel, clear the rows that no visit wrote: they "
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
    owned = own[:, None] >= 0
    wide = np.where(owned, x, 0).astype(np.float64)
    bias, matrix = np.where(owned, b[own], 0), w[own].astype(np.float64)
    first, last = (
        np.einsum("mk,mkn->mn", wide[:, part], matrix[:, part]) + bias
        for part in (slice(tile_k), slice(-tile_k, None))
    )
    mistakes = {
        "Rows that no group owns hold what was there before, or a product with it: 0 * NaN is NaN": np.where(
            owned, want, np.nan
        ),
        "The bias is missing": want - bias,
        "The bias is added twice": want + bias,
        "Rows that no group owns got the last group's bias": np.where(owned, want, b[-1]),
        "Only the first block of the contraction counts": first,
        "Only the last block of the contraction counts: a later block replaces the sum": last,
    }
    t.close(
        got, want, rtol, 1e-2 if dtype == jnp.bfloat16 else 1e-3, where, dtype, mistakes=mistakes
    )
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


def products_by_visits(
    x, grad, sizes, tile, *, owns="rows", clear="group", masked=("x", "grad"), last=1
):
    """The gradients of groups with rows, visit by visit, with a mistake that is asked for; NaN for empty groups."""
    past = -len(x) % tile
    x, grad = (
        np.pad(a.astype(np.float64), ((0, past), (0, 0)), constant_values=np.nan) for a in (x, grad)
    )
    ends = np.cumsum(sizes)
    made = np.full((len(sizes), x.shape[1], grad.shape[1]), np.nan)
    total, before = 0.0, None
    pairs = visits_by_hand(sizes, tile)
    pairs += pairs[-1:] * (last - 1)
    for group, number in pairs:
        row = np.arange(tile) + (0 if owns == "places" else number * tile)
        own = (row >= ends[group] - sizes[group]) & (row < ends[group])
        if owns == "one more":
            own |= row == ends[group]
        elif owns == "to the end":
            own = row < ends[group]
        elif owns == "from the start":
            own = row >= ends[group] - sizes[group]
        elif owns == "all":
            own |= True
        now = {"group": group, "tile": number, "never": 0}[clear]
        total = 0.0 if now != before else total
        before = now
        part = slice(number * tile, (number + 1) * tile)
        mine = [
            np.where(own[:, None] | (name not in masked), a[part], 0)
            for name, a in (("x", x), ("grad", grad))
        ]
        total = total + mine[0].T @ mine[1]
        made[group] = total
    return made


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
    firsts, lasts, halves = np.zeros_like(want), np.zeros_like(want), np.zeros_like(want)
    for g, size in enumerate(sizes):
        if size:
            mine = np.flatnonzero(own == g)
            for made, of in ((firsts, mine[0]), (lasts, mine[-1])):
                part = mine[mine // tile == of // tile]
                made[g] = x[part].astype(np.float64).T @ grad[part].astype(np.float64)
            halves[g] = want[g] / size
    mistakes = {
        "Only a group's last visit counts": lasts,
        "Only a group's first visit counts": firsts,
        "Each is divided by the group's rows: the gradient is a sum": halves,
        "Each group's product is transposed: x's columns come first": want.swapaxes(1, 2),
        "Only the last group is stored": np.where(
            np.arange(len(sizes))[:, None, None] == len(sizes) - 1, want, np.nan
        ),
        "The last group isn't stored: no other group follows its last visit": np.where(
            np.arange(len(sizes))[:, None, None] == len(sizes) - 1, np.nan, want
        ),
    }
    if all(sizes):
        wrong = {
            "Row `end` is the next group's: a group has the rows from start to end - 1": {
                "owns": "one more"
            },
            "A group's first tile also has rows of the group before: you don't check where it starts": {
                "owns": "to the end"
            },
            "A group's last tile also has rows of the group after: you don't check where it ends": {
                "owns": "from the start"
            },
            "You compare a row's place in its tile with the bounds, which count rows of the matrix": {
                "owns": "places"
            },
            "The sum begins anew at each tile, not at each group": {"clear": "tile"},
            "The last visit counts more than once: the grid is `(count,)`": {
                "last": len(sizes) - 1
            },
            "The last visit counts twice: the grid is `(count,)`": {"last": 2},
            "Each group is added to the sum of those before it": {"clear": "never"},
            "Rows of other groups count too: whole tiles are multiplied": {"owns": "all"},
        }
        for text, options in wrong.items():
            mistakes[text] = products_by_visits(x, grad, sizes, tile, **options)
    t.close(
        got, want, rtol, 1e-2 if dtype == jnp.bfloat16 else 1e-3, where, dtype, mistakes=mistakes
    )
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


def gradients_with(
    *, mask="both", begin="group", skip=False, acc=jnp.float32, copy=False, complete="last", own="rows", entries=False
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(x_MK, grad_MN, table, tile_m=8):
        K, N = x_MK.shape[1], grad_MN.shape[1]
        *table, count = table
        G = table[0].shape[0] - 1

        def kernel(bounds_ref, groups_ref, tiles_ref, x_ref, grad_ref, o_ref, acc_ref):
            v, steps = pl.program_id(0), pl.num_programs(0)
            g = groups_ref[v]
            first = (v == 0) | (g != groups_ref[jnp.maximum(v - 1, 0)])
            other = g != groups_ref[jnp.minimum(v + 1, steps - 1)]
            last = other if complete == "next" else (v == steps - 1) | other
            turned = (v == 0) | (tiles_ref[v] != tiles_ref[jnp.maximum(v - 1, 0)])

            @pl.when({"group": first, "visit": v >= 0, "once": v == 0, "tile": turned}[begin])
            def _():
                acc_ref[...] = jnp.zeros_like(acc_ref)

            row = tiles_ref[v] * tile_m + jax.lax.broadcasted_iota(jnp.int32, (tile_m, 1), 0)
            row = row - (tiles_ref[v] * tile_m if own == "places" else 0)
            mine = (row >= bounds_ref[g]) & (row < bounds_ref[g + 1])
            if own == "one more":
                mine = (row >= bounds_ref[g]) & (row <= bounds_ref[g + 1])
            elif own == "to the end":
                mine = row < bounds_ref[g + 1]
            x, grad = x_ref[...].astype(jnp.float32), grad_ref[...].astype(jnp.float32)
            if mask != "none":
                x = jnp.where(mine, x, 0)
                grad = jnp.where(mine, grad, 0) if mask == "both" else grad
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
                grid=(table[1].shape[0] if entries else count,),
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
    "never_completed",
    "You store a group's sum when the next visit is another group's, so the last group is never stored: no visit "
    "follows. Store it in the last step too.",
    gradients_with(complete="next"),
)
mistaken(
    backward,
    "one_row_more",
    "Row `end` is the next group's first. A group has the rows from its bound up to the next bound, without that one.",
    gradients_with(own="one more"),
)
mistaken(
    backward,
    "lower_bound_forgotten",
    "You check only where a group ends. Its first tile may also have rows of the group before.",
    gradients_with(own="to the end"),
)
mistaken(
    backward,
    "rows_of_the_tile",
    "You compare a row's place in its tile with the bounds. They count rows of the matrix: add the tile's first row, "
    "`tile * tile_m`.",
    gradients_with(own="places"),
)
mistaken(
    backward,
    "begins_at_each_tile",
    "You reset the sum when the tile changes. A group may have several tiles, and a tile several groups: reset it when "
    "the group changes.",
    gradients_with(begin="tile"),
)
mistaken(
    backward,
    "grid_of_all_entries",
    "Your grid has a step for every entry of the table. Those from `count` on repeat the last visit, whose product is "
    "then added again: the grid is `(count,)`.",
    gradients_with(entries=True),
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

It's right if no group is empty, the groups' rows fill every tile, and none of them holds a NaN. Write
`group_means(x_MN, group_sizes_G, tile=8)`, which fixes it.

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
    in_parts, last_part, one_more = (np.zeros_like(want, shape=(len(sizes), N)) for _ in range(3))
    padded = np.pad(x, ((0, -rows % tile), (0, 0)), constant_values=np.nan)
    for g, size in enumerate(sizes):
        mine = np.flatnonzero(own == g)
        for number in np.unique(mine // tile):
            part = x[mine[mine // tile == number]]
            in_parts[g] += part.mean(0)
            last_part[g] = part.sum(0) / size
        if size:
            end = mine[-1] + 1
            one_more[g] = padded[mine[0] : end + (end % tile > 0)].sum(0) / size
    if spoiled is not None:
        in_parts, last_part, one_more = (
            np.delete(a, spoiled, 0) for a in (in_parts, last_part, one_more)
        )
    at = sizes if spoiled is None else np.delete(sizes, spoiled)
    at = at[:, None].astype(np.float64)
    mistakes = {
        "Those are sums; a mean is divided by the group's rows": want * at,
        "Each sum is divided by the tile's rows, not by the group's": want * at / tile,
        "Each sum is divided by the group's rows plus 1": want * at / (at + 1),
        "These are the means of each tile's part of a group, added up": in_parts,
        "Only a group's last tile counts: its sum begins anew at each visit": last_part,
        "Row `end` is the next group's: a group has the rows from start to end - 1": one_more,
        "The NaN is a product of 0 and a row of somebody else, or that row itself": np.where(
            np.isnan(np.broadcast_to(got, want.shape)), np.nan, want
        ),
    }
    t.close(got, want, 1e-4, 1e-5, where, np.float32, mistakes=mistakes)
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


# -------------------------------------------------------------------------------------- share

share = Exercise(
    "19.share",
    title="Equal work for every program",
    function="share_steps",
    minutes=40,
    points=20,
    statement="""
On a GPU, each group is cut into its own tiles, and each tile needs a number of steps along K. Programs run at the same
time, and the slowest decides how long they all take. With five tiles for four programs, one program has two tiles and
the others wait. Divide the *steps* instead of the tiles: every program gets equally many. Where a tile's steps go to
several programs, each stores a partial sum, and these are added afterwards.

Write `share_steps(group_sizes_G, rows, tile, steps, programs)`, which returns `(pieces, first)`, the work of every
program as arrays of fixed length.

- From its first row, each group is cut into tiles of `tile` rows. Its last tile may have fewer. The matrix's rows may
  go on after those of the last group; they have no tile. Each tile needs `steps` steps, however many rows it has.
- Put all tiles' steps on one line, tile by tile in the order of the rows. If there are S steps, program p has those
  from `p * S // programs` to `(p + 1) * S // programs` (without the last).
- A **piece** is what one program has of one tile. Pieces come in the order of the line. Program p has the pieces
  `first[p]` to `first[p + 1]` (without the last), and a program without steps has none. `first` has `programs + 1`
  entries.
- `pieces` has six arrays with an entry for each piece. `"group"` is the group of the piece's tile, `"row"` the tile's
  first row in the matrix, and `"rows"` the number of the tile's rows. The piece has the tile's steps from `"begin"` to
  `"end"` (without the last), counted from 0.
- `"slot"` is -1 for a piece with all the steps of its tile. The others are numbered 0, 1, 2 and so on in the order of
  the line: that's where they store their partial sums.
- All arrays are int32. Those of `pieces` have the length `V = (rows + G * (tile - 1)) // tile + programs - 1`, which
  suffices for any sizes. Entries that aren't pieces may hold anything.
- It works under `jax.jit` with sizes that are data, one trace for all sizes. There is at least one row, group, step and
  program. Numbers up to `programs * S` fit into int32.
""",
    hints=(
        "Begin with a simpler case. What would the list be if the whole line were one program's? "
        "And which exercise of this chapter cut rows that are in groups of any size into tiles of "
        "a fixed size?",
        "On the line, the programs' shares are like the groups of `19.group_metadata`, and "
        "`steps` is like its `tile`: a piece is a visit of a program to a tile. The tiles' groups "
        "and rows come from a second list of the same kind, in which each group has `ceil(size / "
        "tile)` tiles.",
        "`bounds = jnp.arange(programs + 1) * S // programs`. A program with steps has `ceil(end "
        "/ steps) - start // steps` pieces; `first` is their cumulative sum after a 0. From the "
        "number of a piece find its program as you found a visit's group, then its tile on the "
        "line, and clip the share to the tile for `begin` and `end`.",
    ),
)  # fmt: skip

PIECE = "group", "row", "rows", "begin", "end", "slot"


def pieces_by_hand(sizes, tile, steps, programs):
    """For each program a list of dictionaries, by loops."""
    tiles, row = [], 0
    for group, size in enumerate(np.asarray(sizes).tolist()):
        tiles += [(group, row + at, min(tile, size - at)) for at in range(0, size, tile)]
        row += size
    total, slot, work = steps * len(tiles), 0, []
    for p in range(programs):
        at, last, mine = p * total // programs, (p + 1) * total // programs, []
        while at < last:
            number, begin = divmod(at, steps)
            end = min(steps, begin + last - at)
            whole = end - begin == steps
            values = *tiles[number], begin, end, -1 if whole else slot
            mine.append(dict(zip(PIECE, values, strict=True)))
            slot += not whole
            at += end - begin
        work.append(mine)
    return work


def shares(t, fn, sizes, rows, tile, steps, programs):
    """Compares the pieces of an answer with those made by hand; returns the answer's, as NumPy arrays."""
    sizes = np.asarray(sizes, np.int32)
    what = f"sizes {sizes.tolist()}, tiles of {tile}, {steps} steps, {programs} programs"
    got = fn(jnp.asarray(sizes), rows, tile, steps, programs)
    t.true(
        isinstance(got, (tuple, list)) and len(got) == 2,
        "it doesn't return two values, `pieces` and `first`",
    )
    pieces, first = got
    t.true(
        isinstance(pieces, dict),
        "`pieces`, the first value, isn't a dictionary",
        isinstance(first, dict),
    )
    t.equal(sorted(map(str, pieces)), sorted(PIECE), why="the keys of `pieces`")
    work = pieces_by_hand(sizes, tile, steps, programs)
    starts = np.cumsum([0, *map(len, work)])
    total = steps * sum(-(-int(s) // tile) for s in sizes)
    bounds = [p * total // programs for p in range(programs + 1)]
    t.equal(np.shape(first), (programs + 1,), why="the shape of `first`")
    t.close(
        first, starts, 0, 0, why=f"`first`, for {what}; the shares on the line end at {bounds[1:]}", dtype=np.int32
    )  # fmt: skip
    length = (rows + len(sizes) * (tile - 1)) // tile + programs - 1
    flat = [piece for mine in work for piece in mine]
    of = [p for p, mine in enumerate(work) for _ in mine]
    made = {}
    for name in PIECE:
        t.equal(
            np.shape(pieces[name]), (length,), why=f"the shape of `{name}`; {what}, {rows} rows"
        )
        made[name] = np.asarray(pieces[name])[: len(flat)]
    for name in PIECE:
        want = np.array([piece[name] for piece in flat], int)
        off = np.flatnonzero(made[name] != want)
        why = f"`{name}` of the {len(flat)} pieces, for {what}"
        if off.size:
            v = int(off[0])
            full = ", ".join(f"{key} {flat[v][key]}" for key in PIECE if key != name)
            why += f". Piece {v} is of program {of[v]}, with {full}"
        t.close(made[name], want, 0, 0, why=why, dtype=np.int32)
    return made, starts


def drawn(t, groups, rows):
    """Sizes of groups with rows, which take most of the rows."""
    cuts = np.sort(t.rng.choice(np.arange(1, rows), groups, replace=False))
    return np.diff(cuts, prepend=0)


# Most checks have four groups, three programs and ten entries, because JAX compiles operations for each shape.


@share.check("three full tiles for three programs")
def _(fn, t):
    for sizes in ([24, 0, 0, 0], [8, 16, 0, 0], [8, 8, 8, 0]):
        shares(t, fn, sizes, 40, 8, 5, 3)


@share.check("three tiles of any size for three programs")
def _(fn, t):
    small = t.rng.integers(1, 8, 3)
    for sizes in ([8 + small[0], small[1], 0, 0], [*small, 0], [16 + small[2], 0, 0, 0]):
        shares(t, fn, sizes, 40, 8, 5, 3)


@share.check("groups without rows before others")
def _(fn, t):
    size = t.rng.integers(1, 8)
    for sizes in ([0, 8 + size, 0, 6], [0, 0, 16 + size, 0], [0, size, 16, 0]):
        shares(t, fn, sizes, 40, 8, 5, 3)


@share.check("one tile for three programs")
def _(fn, t):
    shares(t, fn, [t.rng.integers(1, 9), 0, 0, 0], 40, 8, 5, 3)
    shares(t, fn, [0, 0, t.rng.integers(1, 5), 0], 20, 4, 7, 3)


@share.check("five tiles for three programs")
def _(fn, t):
    shares(t, fn, [40, 0, 0, 0], 40, 8, 5, 3)
    shares(t, fn, [20, 0, 0, 0], 20, 4, 7, 3)


@share.check("groups of any size")
def _(fn, t):
    for _ in range(4):
        shares(t, fn, drawn(t, 4, 40), 40, 8, 5, 3)
        shares(t, fn, drawn(t, 4, 20), 20, 4, 7, 3)


@share.check("groups without rows among others")
def _(fn, t):
    for _ in range(3):
        sizes = drawn(t, 4, 40)
        sizes[t.rng.choice(4, 2, replace=False)] = 0
        shares(t, fn, sizes, 40, 8, 5, 3)


@share.check("no rows in any group")
def _(fn, t):
    shares(t, fn, [0, 0, 0, 0], 40, 8, 5, 3)


@share.check("a full list")
def _(fn, t):
    # Every group's last tile has one row, and every share ends within a tile.
    shares(t, fn, t.rng.permutation([17, 9, 9, 1]), 40, 8, 5, 3)


@share.check("other numbers of groups and programs")
def _(fn, t):
    shares(t, fn, [19], 24, 8, 3, 1)
    for _ in range(2):
        shares(t, fn, drawn(t, 6, 60), 60, 4, 7, 5)


@share.check("more programs than steps")
def _(fn, t):
    shares(t, fn, [3, 0, 0, 0], 40, 8, 2, 3)
    for sizes in ([0, 3, 0, 0, 0, 0], [0, 0, 2, 0, 1, 0]):
        shares(t, fn, sizes, 60, 4, 2, 5)
    shares(t, fn, [0, 0, 0, 0, 4, 3], 60, 4, 1, 5)


@share.check("very many steps")
def _(fn, t):
    for _ in range(3):
        shares(t, fn, drawn(t, 4, 40), 40, 8, int(t.rng.integers(6e7, 8e7)), 3)


@share.check("one trace for all sizes")
def _(fn, t):
    traced = t.traces(lambda sizes: fn(sizes, 40, 8, 5, 3))
    for sizes in ([40, 0, 0, 0], [0, 9, 1, 12], [3, 3, 3, 3]):
        shares(t, lambda sizes, *_: traced(sizes), sizes, 40, 8, 5, 3)
    t.equal(traced.count, 1, why="how often it was traced for three sizes")


@share.check("the product, from pieces in any order")
def _(fn, t):
    sizes, rows, tile, steps, programs = drawn(t, 4, 40), 40, 8, 5, 3
    made, first = shares(t, fn, sizes, rows, tile, steps, programs)
    x, w = numbers(t, rows, 4 * steps), numbers(t, 4, 4 * steps, 6)
    got, partial_sums = np.full((rows, 6), np.nan), {}
    for p in t.rng.permutation(programs):
        for v in range(first[p], first[p + 1]):
            mine = {name: int(made[name][v]) for name in PIECE}
            of_rows = slice(mine["row"], mine["row"] + mine["rows"])
            of_K = slice(4 * mine["begin"], 4 * mine["end"])
            product = x[of_rows, of_K] @ w[mine["group"], of_K]
            if mine["slot"] < 0:
                got[of_rows] = product
            else:
                partial_sums[mine["slot"]] = of_rows, product
    for slot in sorted(partial_sums):
        of_rows, product = partial_sums[slot]
        got[of_rows] = np.nan_to_num(got[of_rows]) + product
    own = owners(sizes, rows)
    want = np.stack([x[i] @ w[g] if g >= 0 else np.full(6, np.nan) for i, g in enumerate(own)])
    t.close(got, want, 1e-4, 1e-4, why="the product of every group, added up from the pieces")


def shared(
    sizes, rows, tile, steps, programs, *, tiles="own", bounds="equal", ends="up", empty=True, group="right",
    row="matrix", height="edge", begin=True, end=True, numbers="tile", slot="parts", length="most", first="all",
    dtype=np.int32, late=False, numpy=False,
):  # fmt: skip
    """The solution with a mistake that is asked for; in NumPy, which is faster, unless it is traced."""
    xp = np if numpy or not isinstance(sizes, jax.core.Tracer) else jnp
    sizes = xp.asarray(np.asarray(sizes) if xp is np else sizes)
    G = len(sizes)
    lengths = {
        "most": (rows + G * (tile - 1)) // tile + programs - 1,
        "visits": -(-rows // tile) + G - 1 + programs - 1,
        "tiles": (rows + G * (tile - 1)) // tile,
        "rows": -(-rows // tile) + programs - 1,
    }
    most = lengths[length]
    lasts = xp.cumsum(sizes)
    begins = lasts - sizes
    counts = -(-sizes // tile)
    if tiles == "down":
        counts = sizes // tile
    elif tiles == "one more":
        counts = sizes // tile + 1
    elif tiles == "visits":  # tiles of the matrix, one for each group that has rows in it
        counts = xp.where(sizes > 0, -(-lasts // tile) - begins // tile, 0)
    through = xp.cumsum(counts)
    all_tiles = through[-1]
    if tiles == "unowned":
        all_tiles = all_tiles + -(-(rows - lasts[-1]) // tile)
    total = steps * all_tiles
    if tiles == "padded":
        total = steps * -(-rows // tile)
    elif tiles == "most":
        total = steps * lengths["tiles"] + 0 * lasts[0]
    p = xp.arange(programs + 1)
    cuts = {
        "equal": lambda: p * total // programs,
        "tiles": lambda: p * all_tiles // programs * steps,
        "up": lambda: xp.minimum(p * -(-total // programs), total),
        "down": lambda: xp.where(p == programs, total, p * (total // programs)),
        "first": lambda: p * (total // programs) + xp.minimum(p, total % programs),
        "round": lambda: (2 * p * total + programs) // (2 * programs),
        "tiles not steps": lambda: p * all_tiles // programs,
    }[bounds]()
    starts, stops = cuts[:-1], cuts[1:]
    past = -(-stops // steps) if ends == "up" else stops // steps + 1
    visits = past - starts // steps
    if ends == "length":
        visits = -(-(stops - starts) // steps)
    elif ends == "length and one":
        visits = (stops - starts) // steps + 1
    if empty:
        visits = xp.where(stops > starts, visits, 0)
    firsts = xp.concatenate([xp.zeros(1, xp.int32), xp.cumsum(visits)])
    piece = xp.arange(most)
    begun = piece[:, None] > firsts[1:] if late else piece[:, None] >= firsts[1:]
    program = xp.minimum(xp.sum(begun, axis=1), programs - 1)
    number = starts[program] // steps + piece - firsts[program]
    at_begin, at_end = starts[program] - number * steps, stops[program] - number * steps
    at_begin = xp.maximum(at_begin, 0) if begin else at_begin
    at_end = xp.minimum(at_end, steps) if end else at_end
    over = number[:, None] > through if group == "left" else number[:, None] >= through
    of = xp.minimum(xp.sum(over, axis=1), G - 1)
    if group == "program":
        of = xp.minimum(program, G - 1)
    inside = number - (through - counts)[of]
    at_row = {
        "matrix": lambda: begins[of] + inside * tile,
        "group": lambda: inside * tile,
        "padded": lambda: number * tile,
        "aligned": lambda: begins[of] // tile * tile + inside * tile,
        "group only": lambda: begins[of],
        "after": lambda: lasts[of] + inside * tile,
        "whole number": lambda: begins[of] + number * tile,
        "number": lambda: number,
        "end": lambda: lasts[of] - (counts[of] - inside) * tile,
    }[row]()
    high = {
        "edge": lambda: xp.minimum(lasts[of] - at_row, tile),
        "tile": lambda: 0 * of + tile,
        "group": lambda: sizes[of],
        "small": lambda: xp.minimum(sizes[of], tile),
        "left": lambda: lasts[of] - at_row,
        "modulo": lambda: xp.where(inside == counts[of] - 1, sizes[of] % tile, tile),
        "matrix": lambda: xp.minimum(rows - at_row, tile),
        "end": lambda: xp.minimum(lasts[of], at_row + tile),
    }[height]()
    part = (at_end - at_begin < steps) & (piece < firsts[-1])
    slots = {
        "parts": lambda: xp.where(part, xp.cumsum(part) - 1, -1),
        "from one": lambda: xp.where(part, xp.cumsum(part), -1),
        "minus": lambda: xp.where(part, xp.cumsum(part), -1) - 1,
        "two each": lambda: xp.where(part, 2 * program + (at_begin == 0), -1),
        "all": lambda: piece,
        "program": lambda: xp.where(part, program, -1),
        "tile": lambda: xp.where(part, number, -1),
        "piece": lambda: xp.where(part, piece, -1),
        "within": lambda: xp.where(
            part, xp.cumsum(part) - 1 - (xp.cumsum(part) - part)[firsts[program] % most], -1
        ),
        "not first": lambda: xp.where(part & (at_begin > 0), xp.cumsum(part & (at_begin > 0)) - 1, -1),
        "not last": lambda: xp.where(part & (at_end < steps), xp.cumsum(part & (at_end < steps)) - 1, -1),
        "turned": lambda: xp.where(part, -1, xp.cumsum(~part) - 1),
        "zero": lambda: xp.where(part, xp.cumsum(part), 0),
    }[slot]()  # fmt: skip
    if numbers == "line":
        at_begin, at_end = at_begin + number * steps, at_end + number * steps
    elif numbers == "last":
        at_end = at_end - 1
    elif numbers == "modulo":
        at_begin, at_end = starts[program] % steps, stops[program] % steps
    elif numbers == "modulo end":
        last = piece == firsts[program + 1] - 1
        at_end = xp.where(last, stops[program] % steps, at_end)
    elif numbers == "count":
        at_end = at_end - at_begin
    elif numbers == "share":
        at_begin, at_end = (
            at_begin + number * steps - starts[program],
            at_end + number * steps - starts[program],
        )
    values = of, at_row, high, at_begin, at_end, slots
    made = {name: x.astype(dtype) for name, x in zip(PIECE, values, strict=True)}
    heads = {
        "all": lambda: firsts,
        "no zero": lambda: firsts[1:],
        "no end": lambda: firsts[:-1],
        "counts": lambda: xp.concatenate([visits, xp.zeros(1, xp.int32)]),
        "bounds": lambda: cuts,
    }[first]()
    return made, heads.astype(dtype)


def mistaken_share(name, hint, **mistake):
    mistaken(share, name, hint, lambda *args: shared(*args, **mistake))


mistaken_share(
    "tiles_of_the_matrix",
    "You cut the whole matrix into tiles, as for the visits on a TPU. Here each group is cut by "
    "itself, from its own first row.",
    tiles="visits",
    row="aligned",
)
mistaken_share(
    "last_tile_forgotten",
    "A group's last tile is missing if it isn't full. Round up the number of tiles.",
    tiles="down",
)
mistaken_share(
    "a_tile_too_many",
    "You give each group one more tile than the full ones. If the tile divides the group's rows, "
    "that is one too many, and a group without rows has no tile.",
    tiles="one more",
)
mistaken_share(
    "groups_ignored",
    "You count the tiles of the matrix's rows, `ceil(rows / tile)`. Each group rounds up by "
    "itself, and rows after the last group have no tile.",
    tiles="padded",
)
mistaken_share(
    "unowned_rows_shared",
    "You share the rows after the last group as well. They have no tile.",
    tiles="unowned",
)
mistaken_share(
    "whole_tiles",
    "Your list is as if programs shared whole tiles. Where a share ends within a tile, this "
    "program has a piece of it, and the next one has another.",
    bounds="tiles",
)
mistaken_share(
    "shares_rounded_up",
    "You give each program the number of steps rounded up, so the last ones have fewer or none. "
    "Program p's share begins at `p * S // programs`.",
    bounds="up",
)
mistaken_share(
    "shares_rounded_down",
    "You give each program the number of steps rounded down, and all that is left to the last, "
    "which then takes longest. Program p's share begins at `p * S // programs`.",
    bounds="down",
)
mistaken_share(
    "first_ones_get_more",
    "You give one step more to the first programs, perhaps because you round the beginnings of the shares up. That's "
    "as fair, but program p's share begins at `p * S // programs`, rounded down.",
    bounds="first",
)
mistaken_share(
    "shares_rounded",
    "You round `p * S / programs` to the nearest number (or up). Program p's share begins at that "
    "number rounded down.",
    bounds="round",
)
mistaken_share(
    "tiles_for_steps",
    "You use the number of tiles as the length of the line. Each tile has `steps` steps.",
    bounds="tiles not steps",
)
mistaken_share(
    "empty_share_visits",
    "A program without steps has a piece in your list, of the tile in which its empty share "
    "begins. It has none.",
    empty=False,
)
mistaken_share(
    "a_piece_too_many",
    "Where a share ends with a tile, you count a piece of the next tile, of which the program has "
    "no step.",
    ends="one more",
)
mistaken_share(
    "begin_below_0",
    "`begin` is negative where a program began in an earlier tile. Of this tile it has the steps "
    "from 0.",
    begin=False,
)
mistaken_share(
    "end_past_the_tile",
    "`end` is more than `steps` where a program goes on in the next tile. Of this tile it has no "
    "more than all steps.",
    end=False,
)
mistaken_share(
    "numbered_on_the_line",
    "`begin` and `end` count from the beginning of the line. They are steps of the tile, from 0 "
    "to `steps`.",
    numbers="line",
)
mistaken_share(
    "numbered_in_the_share",
    "`begin` and `end` count from the beginning of the program's share. They are steps of the "
    "tile, from 0 to `steps`.",
    numbers="share",
)
mistaken_share(
    "end_included",
    "`end` is your last step. It's the one after it, as in Python's slices.",
    numbers="last",
)
mistaken_share(
    "end_is_a_count",
    "`end` is how many steps the piece has. It's the step after the last, counted from the tile's "
    "first.",
    numbers="count",
)
mistaken_share(
    "group_too_early",
    "The first tile of a group goes to the group before. If k tiles belong to the groups up to g, "
    "tile k is already in the"
    'next: compare with `>=`, or use `side="right"`.',
    group="left",
)
mistaken_share(
    "group_of_the_program",
    "You use the program's number as the group. A program may have tiles of several groups, and "
    "a group several programs.",
    group="program",
)
mistaken_share(
    "row_within_the_group",
    "`row` counts from the group's first row. It's the row in the matrix.",
    row="group",
    height="end",
)
mistaken_share(
    "row_as_if_padded",
    "`row` is the number of the tile times `tile`. The groups' last tiles may have fewer rows, so "
    "a group's tiles begin where the group does.",
    row="padded",
)
mistaken_share(
    "row_of_the_group",
    "`row` is the group's first row for all its tiles. Each tile begins `tile` rows after the one "
    "before.",
    row="group only",
)
mistaken_share(
    "row_is_a_tile",
    "`row` is the number of the tile. It's the tile's first row in the matrix.",
    row="number",
)
mistaken_share(
    "cut_from_the_end",
    "You cut groups from their last row backwards. Each group is cut from its first row, so its "
    "*last* tile may be shorter.",
    row="end",
)
mistaken_share(
    "rows_always_a_tile",
    "`rows` is always `tile`. A group's last tile may have fewer, and the rows after it belong to "
    "another group.",
    height="tile",
)
mistaken_share(
    "rows_of_the_group",
    "`rows` is the number of rows of the group. A tile has at most `tile` of them.",
    height="group",
)
mistaken_share(
    "rows_to_the_end",
    "`rows` is all that is left of the group. A tile has at most `tile` of them.",
    height="left",
)
mistaken_share(
    "rows_modulo",
    "You use `size % tile` as the number of rows of a group's last tile. That's 0 where the tile divides "
    "the size.",
    height="modulo",
)
mistaken_share(
    "rows_of_the_matrix",
    "You end tiles only at the end of the matrix. A group's last tile ends with the group.",
    height="matrix",
)
mistaken_share(
    "rows_is_an_end",
    "`rows` is the row after the tile's last. It's how many rows the tile has.",
    height="end",
)
mistaken_share(
    "every_piece_a_slot",
    "Every piece has a slot in your list. One with all the steps of its tile stores the result "
    "itself: its slot is -1.",
    slot="all",
)
mistaken_share(
    "slots_from_one",
    "Your slots begin at 1. The first is 0.",
    slot="from one",
)
mistaken_share(
    "slot_of_the_program",
    "You use the program's number as the slot. A program can have two parts of tiles, at the "
    "beginning and at the end.",
    slot="program",
)
mistaken_share(
    "slot_of_the_tile",
    "You use the tile's number as the slot. Then the parts of a tile overwrite each other. "
    "Number the parts: 0, 1, 2.",
    slot="tile",
)
mistaken_share(
    "slot_of_the_piece",
    "You use the piece's number as the slot, so slots of whole tiles stay empty. Count only "
    "those that are parts.",
    slot="piece",
)
mistaken_share(
    "slots_in_each_program",
    "Your slots begin at 0 again in every program. They are numbered on the whole line, or "
    "programs overwrite each other.",
    slot="within",
)
mistaken_share(
    "first_part_without_a_slot",
    "The first part of a shared tile has no slot in your list. Every piece that lacks a step of "
    "its tile has one.",
    slot="not first",
)
mistaken_share(
    "last_part_without_a_slot",
    "The last part of a shared tile has no slot in your list. Every piece that lacks a step of "
    "its tile has one.",
    slot="not last",
)
mistaken_share(
    "slots_for_whole_tiles",
    "You number the whole tiles and give -1 to the parts. It's the other way round.",
    slot="turned",
)
mistaken_share(
    "slot_0_for_whole_tiles",
    "A whole tile has slot 0 in your list, like a part. It's -1.",
    slot="zero",
)
mistaken_share(
    "as_long_as_visits",
    "Your arrays have the length of a list of visits, `ceil(rows / tile) + G - 1`, and `programs "
    "- 1` more. The statement's V differs: `(rows + G * (tile - 1)) // tile + programs - 1`.",
    length="visits",
)
mistaken_share(
    "as_long_as_tiles",
    "Your arrays are as long as the list of tiles. Each program but the first may begin within a "
    "tile, which is one piece more: add `programs - 1`.",
    length="tiles",
)
mistaken_share(
    "too_short_for_edges",
    "Your arrays have `ceil(rows / tile) + programs - 1` entries. Every group may have a tile "
    "that isn't full: see V in the statement.",
    length="rows",
)
mistaken_share(
    "first_without_the_0",
    "`first` lacks an entry. It has `programs + 1`: 0 at the beginning, and the number of all "
    "pieces at the end.",
    first="no zero",
)
mistaken_share(
    "first_not_summed",
    "`first` is how many pieces each program has. Sum them up, after a 0.",
    first="counts",
)
mistaken_share(
    "first_on_the_line",
    "`first` has the steps at which the shares begin. It counts pieces.",
    first="bounds",
)
mistaken_share(
    "most_tiles_shared",
    "You share the most tiles that there can be. Share those of these sizes, which are data: the "
    "last entry of a cumulative sum.",
    tiles="most",
)
mistaken_share(
    "pieces_by_length",
    "You use the length of a share, divided by `steps` and rounded up, as its number of pieces. "
    "A share that begins within a tile can touch one more: it depends on where it begins and "
    "ends.",
    ends="length",
)
mistaken_share(
    "pieces_by_length_and_one",
    "You count `length // steps + 1` pieces for each share. How many tiles a share touches "
    "depends on where it begins and ends.",
    ends="length and one",
)
mistaken_share(
    "program_too_early",
    "The first piece of a program goes to the program before. If program p's pieces end at `first[p + 1]`, that "
    'piece is the next program\'s: compare with `>=`, or use `side="right"`.',
    late=True,
)
mistaken_share(
    "row_after_the_group",
    "You count `row` from the end of the group: a cumulative sum of sizes is where groups end. "
    "Subtract the group's size.",
    row="after",
)
mistaken_share(
    "row_by_all_tiles",
    "You add the tile's number on the line times `tile` to the group's first row. Count the tiles "
    "within the group.",
    row="whole number",
)
mistaken_share(
    "rows_of_a_small_group",
    "`rows` is `tile` or the group's size, whichever is less. A group's last tile has what the "
    "tiles before it left.",
    height="small",
)
mistaken_share(
    "begin_and_end_modulo",
    "You take the ends of the program's share modulo `steps` in all its pieces. That fits only "
    "the first `begin` and the last `end`, and an `end` at the end of a tile becomes 0.",
    numbers="modulo",
)
mistaken_share(
    "end_modulo",
    "`end` is 0 where a share ends together with a tile: a remainder is never `steps` itself.",
    numbers="modulo end",
)
mistaken_share(
    "two_slots_each",
    "You give each program two slots, whether it needs them or not. Slots are numbered without "
    "gaps, in the order of the line.",
    slot="two each",
)
mistaken_share(
    "slot_of_minus_2",
    "You subtract 1 from the -1 of whole tiles too. Their slot is -1.",
    slot="minus",
)
mistaken_share(
    "floating_point",
    "Your arrays are float32. Sizes and positions are int32: divide with `//`.",
    dtype=np.float32,
)
mistaken(
    share,
    "in_python",
    "You convert sizes to Python numbers or NumPy arrays. Under `jax.jit` they are traced and "
    "have no values: use jnp.",
    lambda *args: shared(*args, numpy=True),
)
mistaken(
    share,
    "values_swapped",
    "You return `first` first. It's `(pieces, first)`.",
    lambda *args: shared(*args)[::-1],
)
mistaken(
    share,
    "only_the_pieces",
    "You return the pieces alone. Return `(pieces, first)`.",
    lambda *args: shared(*args)[0],
)
mistaken(
    share,
    "a_tuple_of_arrays",
    "Your pieces are a tuple or a list of arrays. They are a dictionary with the six names.",
    lambda *args: (tuple(shared(*args)[0].values()), shared(*args)[1]),
)
