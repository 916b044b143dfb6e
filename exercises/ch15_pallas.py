import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# EXERCISE 15.index_maps
def attention_specs(B, T, N, K, H, block):
    """Return the grid and blocks of causal attention with shared key heads.

    Args:
      B: rows of the batch. All sizes are Python ints; arrays are q_BNTH, k_BKTH
        and v_BKTH.
      T: tokens of a row, queries as well as keys.
      N: query heads.
      K: key heads; N is divisible by it.
      H: width of a head.
      block: number of queries, and of keys, in a block; T is divisible by it.

    Returns:
      (grid, in_specs, out_spec): the grid (B, N, T // block, T // block), whose
        last index numbers the blocks of keys; a list of three `pl.BlockSpec`,
        for q, k and v; and the result's.
    """
    # YOUR CODE HERE
    raise NotImplementedError("15.index_maps")


# EXERCISE 15.reduction
def column_stats(x_MN, block_M=32, block_N=128):
    """Compute the sum and maximum of each column.

    Args:
      x_MN: [M, N] float32 or bfloat16; both sizes are at least 1.
      block_M: rows of a block of x.
      block_N: columns of a block of x.

    Returns:
      (sum_1N, max_1N): two float32 arrays [1, N].
    """
    # YOUR CODE HERE
    raise NotImplementedError("15.reduction")


# EXERCISE 15.out_of_bounds
def second_difference(x_MN):
    """Compute each column's second difference; rows outside x count as 0.

    Args:
      x_MN: float32 [M, N]; both sizes are at least 1.

    Returns:
      float32 [M, N]: x[m - 1] - 2 x[m] + x[m + 1].
    """
    # YOUR CODE HERE
    raise NotImplementedError("15.out_of_bounds")


# EXERCISE 15.softmax
def row_softmax(x_MN, block_M=8):
    """Softmax over each row, in float32; a row that is all -inf gives zeros.

    Args:
      x_MN: [M, N] float32 or bfloat16; both sizes are at least 1, and entries
        may be -inf.
      block_M: rows of a block.

    Returns:
      [M, N] in the type of x_MN.
    """
    # YOUR CODE HERE
    raise NotImplementedError("15.softmax")


# EXERCISE 15.gather
def take_rows(table_VD, ids_T):
    """Look up rows of a table by id; an id without a row gives zeros.

    Args:
      table_VD: float32 [V, D]; both sizes are at least 1.
      ids_T: int32 [T]; T is at least 1.

    Returns:
      float32 [T, D].
    """
    # YOUR CODE HERE
    raise NotImplementedError("15.gather")


# EXERCISE 15.order
def order_steps(wanted_RK):
    """Order the steps of a list so that the fewest blocks of x are loaded.

    Args:
      wanted_RK: bool [R, K]; block r of the result is the sum of the blocks k
        of x for which it is true. Both sizes are at least 1.

    Returns:
      (loads, steps): how many blocks of x the steps load, the fewest possible,
      and a list of tuples (r, k, adds), in order.
    """
    # YOUR CODE HERE
    raise NotImplementedError("15.order")
