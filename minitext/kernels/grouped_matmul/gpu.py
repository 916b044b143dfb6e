"""Grouped matrix products for NVIDIA GPUs: Pallas kernels that JAX lowers to Triton.

Rows are sorted by group, and groups have any size (Gale et al. 2022, https://arxiv.org/abs/2211.15841). On a GPU a
tile may begin at any row, so each group is cut into its own tiles and no tile has rows of two groups. The number of
tiles is known only at run time. The grid has room for the most that any group sizes need, and leftover programs store
nothing. Rows that no group owns count as one more group, whose product isn't computed and whose result is 0.

Chapters: 19.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from minitext.kernels.grouped_matmul import operands
from minitext.kernels.tiles_gpu import Side, Tile, call, dot, fitted, load, place, side, store


class TileShapes(NamedTuple):
    """Tiles for products with a group's matrix or its transpose, and for the gradient of the matrices."""

    product: Tile
    gradient: Tile


TILES = TileShapes(Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 3))
# Float32 takes twice the memory, and the matrix units don't multiply it.
TILES_F32 = TileShapes(Tile(64, 64, 32, 4, 2), Tile(64, 64, 32, 4, 2))


def grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G, *, tiles: TileShapes | None = None) -> jax.Array:
    """Computes `minitext.kernels.grouped_matmul` in float32, bfloat16 or float16, in tiles that suit the type.

    On a mesh, call it inside `jax.shard_map`; its operands may vary along different axes there.
    """
    tiles = tiles or (TILES_F32 if lhs_MK.dtype == jnp.float32 else TILES)
    return _grouped_matmul(tiles, *operands.vary_alike(lhs_MK, rhs_GKN, group_sizes_G))


def supports(lhs_MK, rhs_GKN, _group_sizes_G) -> str | None:
    """Returns why the kernels can't compute this, or None."""
    return operands.reason(lhs_MK, rhs_GKN, "float32", "bfloat16", "float16")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(tiles: TileShapes, lhs_MK, rhs_GKN, group_sizes_G):
    return _product(tiles.product, lhs_MK, rhs_GKN, group_sizes_G)


def _backward(tiles: TileShapes, residuals, grad_MN):
    lhs_MK, rhs_GKN, group_sizes_G = residuals
    dlhs_MK = _product(tiles.product, grad_MN, rhs_GKN, group_sizes_G, transpose=True)
    return dlhs_MK, _gradient(tiles.gradient, lhs_MK, grad_MN, group_sizes_G), None


_grouped_matmul.defvjp(lambda *args: (_grouped_matmul(*args), args[1:]), _backward)


# ---------------------------------------------------------------------------- the calls


def _product(tile: Tile, lhs_MK, rhs_GKN, group_sizes_G, transpose: bool = False):
    """Returns [M, N]; with `transpose`, takes [M, N] and returns [M, K]."""
    M, G = lhs_MK.shape[0], rhs_GKN.shape[0]
    columns = rhs_GKN.shape[1 if transpose else 2]
    tile = fitted(tile, M, columns, lhs_MK.shape[1])
    table = _row_tiles(group_sizes_G, M, tile.rows)
    return call(
        partial(_product_kernel, tile=tile, groups=G, transpose=transpose),
        (lhs_MK, rhs_GKN, *table),
        out=operands.like(lhs_MK, (M, columns)),
        grid=(len(table[0]) * pl.cdiv(columns, tile.columns),),
        tile=tile,
        name="grouped_matmul",
    )


def _gradient(tile: Tile, lhs_MK, grad_MN, group_sizes_G):
    """Returns lhs^T grad of each group, [G, K, N]."""
    (M, K), N, G = lhs_MK.shape, grad_MN.shape[1], len(group_sizes_G)
    tile = fitted(tile, K, N, M)
    ends_G = jnp.cumsum(group_sizes_G, dtype=jnp.int32)
    return call(
        partial(_gradient_kernel, tile=tile),
        (lhs_MK, grad_MN, ends_G - group_sizes_G, ends_G),
        out=operands.like(lhs_MK, (G, K, N)),
        grid=(pl.cdiv(K, tile.rows) * pl.cdiv(N, tile.columns), G),
        tile=tile,
        name="grouped_matmul_gradient",
    )


def _row_tiles(group_sizes_G, M: int, rows: int):
    """Returns each row tile's group [X], its first row [X], and the row after the group's last [X].

    Rows that no group owns are group G. Leftover tiles begin at or after row M.
    """
    G = len(group_sizes_G)
    ends = jnp.cumsum(group_sizes_G, dtype=jnp.int32)
    ends = jnp.concatenate([ends, jnp.full_like(ends, M)[:1]])
    sizes = jnp.diff(ends, prepend=0)
    counts = pl.cdiv(sizes, rows)
    last = jnp.cumsum(counts)
    tile_X = jnp.arange((M + (G + 1) * (rows - 1)) // rows)
    group_X = jnp.minimum(jnp.sum(tile_X[:, None] >= last, axis=1, dtype=jnp.int32), G)
    first_X = (ends - sizes)[group_X] + (tile_X - (last - counts)[group_X]) * rows
    return group_X, first_X.astype(jnp.int32), ends[group_X]


# ---------------------------------------------------------------------------- the kernels


def _product_kernel(
    lhs_ref, rhs_ref, group_ref, first_ref, end_ref, out_ref, *, tile: Tile, groups: int, transpose
):
    """Computes a tile of the result: rows of one group, by columns."""
    (M, depth), columns = lhs_ref.shape, out_ref.shape[1]
    x, y = place(pl.program_id(0), group_ref.shape[0], pl.cdiv(columns, tile.columns))
    group, first = group_ref[x], first_ref[x]
    column = side(y, tile.columns, columns)

    def step(i, total):
        contraction = side(i, tile.step, depth)
        # These may include rows of the next group; their results aren't stored.
        lhs = load(lhs_ref, (), Side(first, tile.rows, M), contraction)
        if transpose:
            return total + dot(lhs, load(rhs_ref, (group,), column, contraction).T)
        return total + dot(lhs, load(rhs_ref, (group,), contraction, column))

    steps = (group < groups).astype(jnp.int32) * pl.cdiv(depth, tile.step)
    total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = jax.lax.fori_loop(0, steps, step, total)
    store(out_ref, (), total, Side(first, tile.rows, end_ref[x]), column)


def _gradient_kernel(lhs_ref, grad_ref, start_ref, end_ref, out_ref, *, tile: Tile):
    """Computes a tile of one group's gradient, a contraction over the group's rows."""
    K, N = out_ref.shape[1:]
    x, y = place(pl.program_id(0), pl.cdiv(K, tile.rows), pl.cdiv(N, tile.columns))
    row, column = side(x, tile.rows, K), side(y, tile.columns, N)
    group = pl.program_id(1)
    start, end = start_ref[group], end_ref[group]

    def step(i, total, masked):
        contraction = Side(start + i * tile.step, tile.step, end if masked else None)
        lhs, grad = load(lhs_ref, (), contraction, row), load(grad_ref, (), contraction, column)
        return total + dot(lhs.T, grad)

    whole, steps = (end - start) // tile.step, pl.cdiv(end - start, tile.step)
    total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = jax.lax.fori_loop(0, whole, partial(step, masked=False), total)
    total = jax.lax.fori_loop(whole, steps, partial(step, masked=True), total)
    store(out_ref, (group,), total, row, column)
