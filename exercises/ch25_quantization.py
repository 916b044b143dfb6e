import re

import jax
import jax.numpy as jnp
import numpy as np


# EXERCISE 25.absmax
def absmax(x_RC, shared, block):
    """Quantizes a matrix to int8 with the scale of the largest number.

    Args:
      x_RC: [R, C] float32 or bfloat16.
      shared: "tensor", "row" or "block": which numbers share a scale.
      block: the length of a block, at least 1; used by "block" alone.

    Returns:
      (values_RC, scale): int8 from -127 to 127, and float32 of shape [1, 1],
      [R, 1] or [R, ceil(C / block)].
    """
    # YOUR CODE HERE
    raise NotImplementedError("25.absmax")


# EXERCISE 25.int8_matmul
def int8_matmul(x_TD, w_DF):
    """Multiplies int8 numbers, in the forward and in the backward pass.

    Args:
      x_TD: [T, D] tokens, float32 or bfloat16.
      w_DF: [D, F] weights, float32.

    Returns:
      [T, F] in the type of x_TD. The gradients have the types of x_TD and w_DF.
    """
    # YOUR CODE HERE
    raise NotImplementedError("25.int8_matmul")


# EXERCISE 25.stochastic_rounding
def quantize_at_random(x_RC, key):
    """Quantizes rows to int8, and rounds so that the mean is exact.

    Args:
      x_RC: [R, C] float32.
      key: a JAX random key.

    Returns:
      (values_RC, scale_R1): int8 from -127 to 127, and float32.
    """
    # YOUR CODE HERE
    raise NotImplementedError("25.stochastic_rounding")


# EXERCISE 25.find_wide
def find_wide(text):
    """Finds the products of a compiled program that were not quantized.

    Args:
      text: a module in XLA's text form.

    Returns:
      List of (where, left, right), in the order of the text: the op_name ("" if
      there is none) and the types of both factors, such as "bf16".
    """
    # YOUR CODE HERE
    raise NotImplementedError("25.find_wide")


# EXERCISE 25.feedback
def round_with_feedback(w_DF, x_ND, damp):
    """Rounds weights to 4 bits so that the product with x changes little.

    Args:
      w_DF: [D, F] weights, NumPy float32.
      x_ND: [N, D] inputs of the layer, NumPy float32.
      damp: a positive number.

    Returns:
      (values_DF, scale_F): int8 from -7 to 7, and float32: the weights are
      about values_DF * scale_F.
    """
    # YOUR CODE HERE
    raise NotImplementedError("25.feedback")
