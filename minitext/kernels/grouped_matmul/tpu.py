"""Grouped matrix products for TPU in Pallas, forward and backward, without padding the groups.

As in MegaBlocks (Gale et al. 2022, arxiv.org/abs/2211.15841), rows sorted by group are cut into tiles as if there were
no groups, and a tile that two groups share is visited once for each. The work of a grid step is data, not shape: JAX
computes a table of visits from the group sizes. Pallas loads it before the tiles (scalar prefetch) for the index maps
to read, and the grid is as long as the table.

Chapters: 19.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.kernels import block_shapes
from minitext.kernels.grouped_matmul import operands
from minitext.kernels.tiles_tpu import dot

# Columns of `lhs` that `tgmm` transposes at a time: few enough for the transpose to stay in registers.
STRIP = 128
VMEM_LIMIT = 32 * 2**20  # bytes; by default the compiler grants 16 MiB, too little for large tiles


class Tiles(NamedTuple):
    """Tile sizes along each dimension, for all three products; a smaller dimension is a single tile.

    A dimension needn't be a multiple of its tile. The compiler wants tiles to be multiples of 128.

    Attributes:
      m: rows.
      k: the forward product's contraction.
      n: columns.
    """

    m: int
    k: int
    n: int


def default_tiles(dtype: jnp.dtype) -> Tiles:
    """Returns the chip's tiles in `block_shapes`; for float32, whose products take six times the code, 512 at most."""
    tiles = Tiles(**block_shapes.find("grouped_matmul"))
    return tiles if dtype.itemsize == 2 else Tiles(*(min(512, length) for length in tiles))


class Visits(NamedTuple):
    """Which tile of rows each grid step works on, and for which group.

    Attributes:
      bounds_G1: [G + 1] the first row of each group; the last entry is the number of rows in all groups.
      groups_V: [V] each visit's group, where V is the most visits that any group sizes need. It never decreases.
      tiles_V: [V] each visit's tile of rows. It never decreases.
    """

    bounds_G1: jax.Array
    groups_V: jax.Array
    tiles_V: jax.Array


def grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G, tiles: Tiles | None = None) -> jax.Array:
    """Computes `minitext.kernels.grouped_matmul` in tiles of the given sizes, or of `default_tiles`.

    On a mesh, call it inside `jax.shard_map`; its operands may vary along different axes there.
    """
    lhs_MK, rhs_GKN, group_sizes_G = operands.vary_alike(lhs_MK, rhs_GKN, group_sizes_G)
    return _grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G, tiles or default_tiles(lhs_MK.dtype))


def supports(lhs_MK, rhs_GKN, _group_sizes_G) -> str | None:
    """Returns why these kernels can't compute this, or None."""
    return operands.reason(lhs_MK, rhs_GKN, "bfloat16", "float32")


def visits(
    group_sizes_G: jax.Array, rows: int, tile: int, *, empty: bool, unowned: bool = False
) -> tuple:
    """Returns the table of visits, and how many of its entries to visit.

    Args:
      group_sizes_G: [G] int32 rows in each group, with a sum of at most `rows`.
      rows: rows in the matrix.
      tile: rows in a tile.
      empty: whether a group without rows gets one visit.
      unowned: whether a tile whose rows no group owns gets one visit, which belongs to the last group.
    """
    G, tiles = len(group_sizes_G), pl.cdiv(rows, tile)
    ends_G = jnp.cumsum(group_sizes_G, dtype=jnp.int32)
    starts_G = ends_G - group_sizes_G
    first_G = starts_G // tile
    count_G = jnp.where(group_sizes_G > 0, pl.cdiv(ends_G, tile) - first_G, int(empty))
    if unowned:
        first_G = jnp.where(group_sizes_G > 0, first_G, pl.cdiv(ends_G, tile))
        count_G = count_G.at[-1].set(tiles - first_G[-1])
    visit_ends_G = jnp.cumsum(count_G)
    # Each tile once, and once more for each group that begins inside it.
    visit_V = jnp.arange(tiles + G - 1, dtype=jnp.int32)
    groups_V = jnp.sum(visit_V[:, None] >= visit_ends_G, axis=1, dtype=jnp.int32)
    groups_V = jnp.minimum(groups_V, G - 1)
    tiles_V = first_G[groups_V] + visit_V - (visit_ends_G - count_G)[groups_V]
    # An empty group at the very end, and entries that aren't visited, would point past the last tile.
    tiles_V = jnp.minimum(tiles_V, tiles - 1)
    bounds_G1 = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_G])
    return Visits(bounds_G1, groups_V, tiles_V), visit_ends_G[-1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G, tiles):
    return gmm(lhs_MK, rhs_GKN, group_sizes_G, tiles)


def _backward(tiles, residuals, grad_MN):
    lhs_MK, rhs_GKN, group_sizes_G = residuals
    grad_lhs_MK = gmm(grad_MN, rhs_GKN, group_sizes_G, tiles, transpose_rhs=True)
    return grad_lhs_MK, tgmm(lhs_MK, grad_MN, group_sizes_G, tiles), None


_grouped_matmul.defvjp(lambda *args: (gmm(*args), args[:3]), _backward)


def gmm(lhs_MK, rhs_GKN, group_sizes_G, tiles: Tiles, *, transpose_rhs: bool = False):
    """Multiplies each group's rows by the group's matrix: returns [M, N], with zeros after the last group.

    With `transpose_rhs` it takes [M, N] and returns [M, K]: matrices are transposed tile by tile on their way into the
    matrix unit.
    """
    # From here on, K and k are the contraction, and N and n the columns.
    (M, K), N = lhs_MK.shape, rhs_GKN.shape[1 if transpose_rhs else 2]
    _, k, n = (tiles.m, tiles.n, tiles.k) if transpose_rhs else tiles
    m, k, n = min(tiles.m, M), min(k, K), min(n, N)
    table, count = visits(group_sizes_G, M, m, empty=False, unowned=True)
    if transpose_rhs:
        rhs_spec = pl.BlockSpec((None, n, k), lambda j, v, i, table: (table.groups_V[v], j, i))
    else:
        rhs_spec = pl.BlockSpec((None, k, n), lambda j, v, i, table: (table.groups_V[v], i, j))
    return pl.pallas_call(
        functools.partial(_gmm_kernel, K=K, transpose_rhs=transpose_rhs),
        out_shape=operands.like(lhs_MK, (M, N)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # Visits to one tile are consecutive: its result stays in VMEM until the last group has stored.
            grid=(pl.cdiv(N, n), count, pl.cdiv(K, k)),
            in_specs=[
                pl.BlockSpec((m, k), lambda j, v, i, table: (table.tiles_V[v], i)),
                rhs_spec,
            ],
            out_specs=pl.BlockSpec((m, n), lambda j, v, i, table: (table.tiles_V[v], j)),
            scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=_cost(M, K, N, lhs_MK, rhs_GKN),
        name="gmm_transposed" if transpose_rhs else "gmm",
    )(table, lhs_MK, rhs_GKN)


def tgmm(lhs_MK, grad_MN, group_sizes_G, tiles: Tiles):
    """Returns each group's lhs^T grad, [G, K, N], in the type of `lhs_MK`; zeros for groups without rows."""
    (M, K), N, G = lhs_MK.shape, grad_MN.shape[1], len(group_sizes_G)
    m, k, n = min(tiles.m, M), min(tiles.k, K), min(tiles.n, N)
    table, count = visits(group_sizes_G, M, m, empty=True)
    return pl.pallas_call(
        _tgmm_kernel,
        out_shape=operands.like(lhs_MK, (G, K, N)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(N, n), pl.cdiv(K, k), count),
            in_specs=[
                pl.BlockSpec((m, k), lambda j, i, v, table: (table.tiles_V[v], i)),
                pl.BlockSpec((m, n), lambda j, i, v, table: (table.tiles_V[v], j)),
            ],
            out_specs=pl.BlockSpec((None, k, n), lambda j, i, v, table: (table.groups_V[v], i, j)),
            scratch_shapes=[pltpu.VMEM((k, n), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=_cost(M, K, N, lhs_MK, grad_MN),
        name="tgmm",
    )(table, lhs_MK, grad_MN)


def _gmm_kernel(table, lhs_ref, rhs_ref, out_ref, acc_ref, *, K, transpose_rhs):
    v, i = pl.program_id(1), pl.program_id(2)
    (m, k), dim = lhs_ref.shape, int(transpose_rhs)
    last = pl.cdiv(K, k) - 1

    def accumulate(left):
        lhs_mk, rhs = lhs_ref[...], rhs_ref[...]
        if left < k:  # memory past the end of K can hold anything, and 0 * NaN is NaN
            lhs_mk, rhs = _keep(lhs_mk, 1, 0, left), _keep(rhs, dim, 0, left)
        acc_ref[...] = jnp.where(i == 0, 0, acc_ref[...]) + dot(lhs_mk, rhs, (1, dim))

    low, high = _rows(table, v, m)

    @pl.when((i < last) & (high > 0))
    def _():
        accumulate(k)

    # A second copy of the product lets the compiler overlap it with the store.
    @pl.when((i == last) & (high > 0))
    def _():
        accumulate(K - last * k)
        first = (v == 0) | (table.tiles_V[v] != table.tiles_V[jnp.maximum(v - 1, 0)])
        other_mn = jnp.where(first, 0, out_ref[...].astype(jnp.float32))  # the tile's other groups
        row_m1 = jax.lax.broadcasted_iota(jnp.int32, (m, 1), 0)
        out_mn = jnp.where((row_m1 >= low) & (row_m1 < high), acc_ref[...], other_mn)
        out_ref[...] = out_mn.astype(out_ref.dtype)

    # Rows after the last group
    @pl.when((i == last) & (high <= 0))
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)


def _tgmm_kernel(table, lhs_ref, grad_ref, out_ref, acc_ref):
    v, count = pl.program_id(2), pl.num_programs(2)
    group = table.groups_V[v]
    first = (v == 0) | (group != table.groups_V[jnp.maximum(v - 1, 0)])
    last = (v == count - 1) | (group != table.groups_V[jnp.minimum(v + 1, count - 1)])
    low, high = _rows(table, v, lhs_ref.shape[0])

    @pl.when(low < high)
    def _():
        for start in range(0, lhs_ref.shape[1], STRIP):
            strip = slice(start, start + STRIP)
            # Masked again for every strip, because `grad` doesn't fit in registers.
            lhs_mk, grad_mn = (_keep(x, 0, low, high) for x in (lhs_ref[:, strip], grad_ref[...]))
            acc_ref[strip] = jnp.where(first, 0, acc_ref[strip]) + dot(lhs_mk, grad_mn, (0, 0))

    @pl.when(last)
    def _():
        out_ref[...] = jnp.where(low < high, acc_ref[...], 0).astype(out_ref.dtype)


def _rows(table, v, m):
    """Returns where a visit's group begins and ends, in rows of the visit's tile; both may be outside it."""
    group, start = table.groups_V[v], table.tiles_V[v] * m
    return table.bounds_G1[group] - start, table.bounds_G1[group + 1] - start


def _keep(x, dim, low, high):
    """Returns `x` with zeros before index `low` and from `high` on, along one dimension."""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
    # A mask fits 32-bit values as it is. For 16-bit values the compiler would pack it first.
    return jnp.where((index >= low) & (index < high), x.astype(jnp.float32), 0).astype(x.dtype)


def _cost(M, K, N, *inputs):
    size = sum(x.size * x.dtype.itemsize for x in inputs)
    return pl.CostEstimate(flops=2 * M * K * N, bytes_accessed=size, transcendentals=0)
