import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# EXERCISE 16.accumulator
def tiled_matmul(x_MK, w_KN, tiles):
    """Compute x @ w tile by tile, summed in float32 and rounded once.

    Args:
      x_MK: bfloat16 [M, K].
      w_KN: bfloat16 [K, N].
      tiles: (m, k, n), none longer than its dimension; they needn't divide it.

    Returns:
      bfloat16 [M, N].
    """
    # YOUR CODE HERE
    raise NotImplementedError("16.accumulator")


# EXERCISE 16.fused_epilogue
def gated_product(x_MK, gate_KN, up_KN, tiles):
    """Compute silu(x @ gate) * (x @ up), writing nothing but the result.

    Args:
      x_MK: bfloat16 [M, K].
      gate_KN: bfloat16 [K, N].
      up_KN: bfloat16 [K, N].
      tiles: (m, k, n); they divide M, K and N.

    Returns:
      bfloat16 [M, N].
    """
    # YOUR CODE HERE
    raise NotImplementedError("16.fused_epilogue")


# EXERCISE 16.choose_tiles
def choose_tiles(M, K, N, budget):
    """Choose tiles that fit into VMEM and move the fewest bytes.

    Args:
      M: rows of x. All sizes are Python ints, and multiples of 128.
      K: columns of x and rows of w.
      N: columns of w.
      budget: bytes of VMEM for blocks and scratch.

    Returns:
      ((m, k, n), bytes): the tiles, and the bytes they move between HBM and
      VMEM; None if none fit.
    """
    # YOUR CODE HERE
    raise NotImplementedError("16.choose_tiles")


# EXERCISE 16.double_buffering
def streamed_matmul(x_MK, w_KN, k):
    """Compute x @ w, copying w from HBM k rows at a time into two slots.

    Args:
      x_MK: bfloat16 [M, K], which fits into VMEM.
      w_KN: bfloat16 [K, N], which needn't fit.
      k: rows of w in a part; it divides K.

    Returns:
      float32 [M, N].
    """
    # YOUR CODE HERE
    raise NotImplementedError("16.double_buffering")
