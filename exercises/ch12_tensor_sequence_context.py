import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P


# EXERCISE 12.tp_mlp
def tp_mlp(x_BTD, gate_DF, up_DF, down_FD):
    """`(silu(x @ gate) * (x @ up)) @ down`, features split over `tensor`.

    Args:
      x_BTD: [B, T, D], as P("data", None, None).
      gate_DF: [D, F], as P(None, "tensor").
      up_DF: [D, F], as P(None, "tensor").
      down_FD: [F, D], as P("tensor", None).

    Returns:
      [B, T, D] as P("data", None, None).
    """
    # YOUR CODE HERE
    raise NotImplementedError("12.tp_mlp")


# EXERCISE 12.vocab_parallel_loss
def vocab_parallel_loss(x_XD, w_DV, targets_X):
    """The cross-entropy of every token; the vocabulary is split.

    Args:
      x_XD: [X, D] float32, whole on every device.
      w_DV: [D, V] float32, as P(None, "tensor").
      targets_X: [X] int32, whole on every device, from 0 to V-1.

    Returns:
      [X] float32, whole on every device: the negative log-likelihood in nats.
    """
    # YOUR CODE HERE
    raise NotImplementedError("12.vocab_parallel_loss")


# EXERCISE 12.ring_attention
def ring_attention(q_BTNH, k_BTNH, v_BTNH):
    """Causal attention of tokens in order; keys go around a ring.

    Args:
      q_BTNH: [B, T, N, H] float32, as P(None, "context").
      k_BTNH: [B, T, N, H] float32, as P(None, "context").
      v_BTNH: [B, T, N, H] float32, as P(None, "context").

    Returns:
      [B, T, N, H] float32, as P(None, "context").
    """
    # YOUR CODE HERE
    raise NotImplementedError("12.ring_attention")


# EXERCISE 12.zigzag
def zigzag_order(T, devices):
    """The order of tokens that gives every device the same causal work.

    Args:
      T: tokens of a row, a Python int.
      devices: how many share it, a Python int.

    Returns:
      (pieces, order, back): integer arrays of shape [devices, 2], [T] and [T].
        Device i holds the pieces `pieces[i]`, of T / (2 * devices) tokens each,
        the earlier first. `row[order]` are the tokens of device 0, then those
        of device 1, and so on; `row[order][back]` is the row again.

    Raises:
      ValueError: 2 * devices does not divide T.
    """
    # YOUR CODE HERE
    raise NotImplementedError("12.zigzag")
