import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# EXERCISE 19.group_metadata
def list_visits(group_sizes_G, rows, tile):
    """Find which group and which tile of rows each step works on.

    Args:
      group_sizes_G: int32 [G], rows of each group, in all at most `rows`;
        groups may be empty.
      rows: rows of the matrix, a Python int.
      tile: rows of a tile, a Python int; it needn't divide `rows`.

    Returns:
      (groups_V, tiles_V, count): int32 arrays of length
      V = ceil(rows / tile) + G - 1, and an int32 scalar, how many of their
      entries are visits. Entries from `count` on repeat the last visit, or are
      0 if there is none.
    """
    # BEGIN SOLUTION
    G = group_sizes_G.shape[0]
    ends_G = jnp.cumsum(group_sizes_G)
    first_G = (ends_G - group_sizes_G) // tile
    count_G = jnp.where(group_sizes_G > 0, pl.cdiv(ends_G, tile) - first_G, 0)
    through_G = jnp.cumsum(count_G)  # visits of a group and of all before it
    count = through_G[-1]
    visit_V = jnp.minimum(
        jnp.arange(pl.cdiv(rows, tile) + G - 1), jnp.maximum(count - 1, 0)
    )
    groups_V = jnp.sum(visit_V[:, None] >= through_G, axis=1)
    groups_V = jnp.where(count > 0, groups_V, 0)
    tiles_V = first_G[groups_V] + visit_V - (through_G - count_G)[groups_V]
    return (
        groups_V.astype(jnp.int32),
        tiles_V.astype(jnp.int32),
        count.astype(jnp.int32),
    )
    # END SOLUTION


# EXERCISE 19.masked_store
def grouped_linear(x_MK, w_GKN, b_GN, table, tile_m=8, tile_k=128):
    """Each group's rows times the group's matrix, plus the group's bias.

    Args:
      x_MK: [M, K] float32 or bfloat16, rows sorted by group.
      w_GKN: [G, K, N] in the same type.
      b_GN: [G, N] float32.
      table: (bounds_G1, groups_V, tiles_V, count), for tiles of tile_m rows;
        empty groups have no visit.
      tile_m: rows of a tile; M need not be a multiple.
      tile_k: columns of x, and rows of a matrix, in a block; K is a multiple.

    Returns:
      [M, N] in the type of x_MK; rows that no group owns are zeros.
    """
    # BEGIN SOLUTION
    (M, K), N = x_MK.shape, w_GKN.shape[2]
    bounds_G1, groups_V, tiles_V, count = table
    last = K // tile_k - 1

    def kernel(
        bounds_ref, groups_ref, tiles_ref, x_ref, w_ref, b_ref, o_ref, acc_ref
    ):
        v, i = pl.program_id(0), pl.program_id(1)

        @pl.when(i == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(
            x_ref[...], w_ref[...], preferred_element_type=jnp.float32
        )

        @pl.when(i == last)
        def _():
            group = groups_ref[v]
            in_tile = jax.lax.broadcasted_iota(jnp.int32, (tile_m, 1), 0)
            row = tiles_ref[v] * tile_m + in_tile
            own = (row >= bounds_ref[group]) & (row < bounds_ref[group + 1])
            others = o_ref[...].astype(jnp.float32)
            stored = jnp.where(own, acc_ref[...] + b_ref[...], others)
            o_ref[...] = stored.astype(o_ref.dtype)

    out_MN = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(count, K // tile_k),
            in_specs=[
                pl.BlockSpec((tile_m, tile_k), lambda v, i, b, g, t: (t[v], i)),
                pl.BlockSpec(
                    (None, tile_k, N), lambda v, i, b, g, t: (g[v], i, 0)
                ),
                pl.BlockSpec((None, 1, N), lambda v, i, b, g, t: (g[v], 0, 0)),
            ],
            out_specs=pl.BlockSpec(
                (tile_m, N), lambda v, i, b, g, t: (t[v], 0)
            ),
            scratch_shapes=[pltpu.VMEM((tile_m, N), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x_MK.dtype),
    )(bounds_G1, groups_V, tiles_V, x_MK, w_GKN, b_GN[:, None])
    # Rows that no group owns were never written.
    return jnp.where(jnp.arange(M)[:, None] < bounds_G1[-1], out_MN, 0)
    # END SOLUTION


# EXERCISE 19.backward
def weight_gradients(x_MK, grad_MN, table, tile_m=8):
    """The gradient of each group's matrix: its rows of x^T times those of grad.

    Args:
      x_MK: [M, K] float32 or bfloat16, rows sorted by group; rows that no group
        owns may be NaN.
      grad_MN: [M, N] in the same type, likewise.
      table: (bounds_G1, groups_V, tiles_V, count), for tiles of tile_m rows;
        each group has a visit, even if it's empty.
      tile_m: rows of a tile; M need not be a multiple.

    Returns:
      [G, K, N] in the type of x_MK, summed in float32; zeros for empty groups.
    """
    # BEGIN SOLUTION
    K, N = x_MK.shape[1], grad_MN.shape[1]
    bounds_G1, groups_V, tiles_V, count = table
    G = bounds_G1.shape[0] - 1

    def kernel(
        bounds_ref, groups_ref, tiles_ref, x_ref, grad_ref, o_ref, acc_ref
    ):
        v, visits = pl.program_id(0), pl.num_programs(0)
        group = groups_ref[v]

        @pl.when((v == 0) | (group != groups_ref[jnp.maximum(v - 1, 0)]))
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        in_tile = jax.lax.broadcasted_iota(jnp.int32, (tile_m, 1), 0)
        row = tiles_ref[v] * tile_m + in_tile
        own = (row >= bounds_ref[group]) & (row < bounds_ref[group + 1])
        # Mask both, because 0 times NaN is NaN.
        x, grad = (
            jnp.where(own, ref[...].astype(jnp.float32), 0)
            for ref in (x_ref, grad_ref)
        )
        acc_ref[...] += jax.lax.dot_general(
            x.astype(x_ref.dtype),
            grad.astype(grad_ref.dtype),
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

        after = groups_ref[jnp.minimum(v + 1, visits - 1)]

        @pl.when((v == visits - 1) | (group != after))
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(count,),
            in_specs=[
                pl.BlockSpec((tile_m, K), lambda v, b, g, t: (t[v], 0)),
                pl.BlockSpec((tile_m, N), lambda v, b, g, t: (t[v], 0)),
            ],
            out_specs=pl.BlockSpec(
                (None, K, N), lambda v, b, g, t: (g[v], 0, 0)
            ),
            scratch_shapes=[pltpu.VMEM((K, N), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((G, K, N), x_MK.dtype),
    )(bounds_G1, groups_V, tiles_V, x_MK, grad_MN)
    # END SOLUTION


# EXERCISE 19.empty_groups
def group_means(x_MN, group_sizes_G, tile=8):
    """The mean of each group's rows.

    Args:
      x_MN: float32 [M, N], rows sorted by group; rows that no group owns may be
        NaN.
      group_sizes_G: int32 [G], in all at most M; groups may be empty.
      tile: rows of a tile; M need not be a multiple.

    Returns:
      float32 [G, N]; zeros for empty groups.
    """
    # BEGIN SOLUTION
    from minitext.kernels.grouped_matmul.tpu import visits

    (M, N), G = x_MN.shape, group_sizes_G.shape[0]
    table, count = visits(group_sizes_G, M, tile, empty=True)

    def kernel(bounds_ref, groups_ref, tiles_ref, x_ref, o_ref):
        v = pl.program_id(0)
        group = groups_ref[v]
        start, end = bounds_ref[group], bounds_ref[group + 1]

        @pl.when((v == 0) | (group != groups_ref[jnp.maximum(v - 1, 0)]))
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        in_tile = jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
        row = tiles_ref[v] * tile + in_tile
        own = (row >= start) & (row < end)
        sum_1N = jnp.sum(jnp.where(own, x_ref[...], 0), axis=0, keepdims=True)
        o_ref[...] += sum_1N / jnp.maximum(end - start, 1)

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
    # END SOLUTION


# EXERCISE 19.share
def share_steps(group_sizes_G, rows, tile, steps, programs):
    """Share the steps of all groups' tiles equally between programs.

    Args:
      group_sizes_G: int32 [G], rows of each group, in all at most `rows`;
        groups may be empty.
      rows: rows of the matrix; this and the following are Python ints.
      tile: rows of a tile.
      steps: steps along K that each tile needs.
      programs: how many programs run at the same time.

    Returns:
      (pieces, first): a dictionary of int32 arrays of length
      V = (rows + G * (tile - 1)) // tile + programs - 1, with the keys
      "group", "row", "rows", "begin", "end" and "slot", and an int32 array
      [programs + 1]: program p has the pieces first[p] to first[p + 1] - 1.
    """
    # BEGIN SOLUTION
    G = group_sizes_G.shape[0]
    most = (rows + G * (tile - 1)) // tile + programs - 1
    ends_G = jnp.cumsum(group_sizes_G)
    tiles_G = -(-group_sizes_G // tile)
    through_G = jnp.cumsum(tiles_G)
    # On the line of steps, programs are like groups of rows, and pieces like
    # visits: a program visits each tile of which it has a step.
    bounds = jnp.arange(programs + 1) * (steps * through_G[-1]) // programs
    starts, ends = bounds[:-1], bounds[1:]
    visits = jnp.where(ends > starts, -(-ends // steps) - starts // steps, 0)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(visits)])
    piece = jnp.arange(most)
    program = jnp.sum(piece[:, None] >= first[1:], axis=1)
    program = jnp.minimum(program, programs - 1)
    number = starts[program] // steps + piece - first[program]
    begin = jnp.maximum(starts[program] - number * steps, 0)
    end = jnp.minimum(ends[program] - number * steps, steps)
    group = jnp.minimum(jnp.sum(number[:, None] >= through_G, axis=1), G - 1)
    row = (ends_G - group_sizes_G)[group]
    row += (number - (through_G - tiles_G)[group]) * tile
    part = end - begin < steps
    pieces = {
        "group": group,
        "row": row,
        "rows": jnp.minimum(ends_G[group] - row, tile),
        "begin": begin,
        "end": end,
        "slot": jnp.where(part, jnp.cumsum(part) - 1, -1),
    }
    int32 = {name: x.astype(jnp.int32) for name, x in pieces.items()}
    return int32, first.astype(jnp.int32)
    # END SOLUTION
