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
    # YOUR CODE HERE
    raise NotImplementedError("19.group_metadata")


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
    # YOUR CODE HERE
    raise NotImplementedError("19.masked_store")


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
    # YOUR CODE HERE
    raise NotImplementedError("19.backward")


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
    # YOUR CODE HERE
    raise NotImplementedError("19.empty_groups")


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
    # YOUR CODE HERE
    raise NotImplementedError("19.share")
