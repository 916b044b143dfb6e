import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# EXERCISE 17.online_softmax
def online_softmax(blocks):
    """Softmax over logits that come in blocks, applied to their values.

    Args:
      blocks: an iterator over pairs (logits_TS, v_SH). T and H are the same in
        all pairs, but S may differ. Logits are float32 and may be -inf; values
        are float32 or bfloat16.

    Returns:
      (out_TH, lse_T), float32: softmax over all S of all blocks times the
      values, and the logarithm of the sum of the logits' exponentials. A row of
      nothing but -inf gives zeros, and -inf.
    """
    # YOUR CODE HERE
    raise NotImplementedError("17.online_softmax")


# EXERCISE 17.block_mask
def block_kinds(T, block_q, block_kv, window, prefix):
    """Says for each block of the T x T square how much of it is seen.

    Query t sees key s if s <= t and either s > t - window or s < prefix.

    Args:
      T: queries, and keys.
      block_q: queries of a block; the last block may reach beyond T.
      block_kv: keys of a block, likewise.
      window: how far a query sees, at least 1.
      prefix: how many of the first keys all later queries see, at least 0.

    Returns:
      NumPy integers [ceil(T / block_q), ceil(T / block_kv)]: 0 if no query of
      the block sees any of its keys, 2 if all queries see all of its block_kv
      keys, 1 otherwise. No query sees keys beyond T; queries beyond T don't
      count.
    """
    # YOUR CODE HERE
    raise NotImplementedError("17.block_mask")


# EXERCISE 17.segment_ids
def packed_flash(q_NTH, k_KTH, v_KTH, segments_T, block=128):
    """Causal flash attention within the segments of a packed row.

    Args:
      q_NTH: [N, T, H] queries, float32 or bfloat16; T is divisible by block.
      k_KTH: [K, T, H] keys; each key head serves N/K adjacent query heads.
      v_KTH: [K, T, H] values.
      segments_T: int32 [T], never falling. A token sees only tokens of its own
        segment.
      block: how many queries, and how many keys, a block holds.

    Returns:
      [N, T, H] in the type of the queries.
    """
    # YOUR CODE HERE
    raise NotImplementedError("17.segment_ids")


# EXERCISE 17.backward
def flash_dkv(q_GTH, k_TH, v_TH, grad_GTH, lse_GT, delta_GT, block=128):
    """Gradients of keys and values of causal attention, for one key head.

    Args:
      q_GTH: [G, T, H] queries of the G heads that share the key head; float32
        or bfloat16. T is divisible by block.
      k_TH: [T, H] keys, in the same type.
      v_TH: [T, H] values, likewise.
      grad_GTH: [G, T, H] gradient of the output, likewise.
      lse_GT: float32 [G, T], the logarithm of the sum of exponentials of q k^T
        / sqrt(H) over the keys seen.
      delta_GT: float32 [G, T], the sum over H of the output times its gradient.
      block: how many queries, and how many keys, a block holds.

    Returns:
      (dk_TH, dv_TH) in the type of the keys.
    """
    # YOUR CODE HERE
    raise NotImplementedError("17.backward")


# EXERCISE 17.sinks
def with_sinks(out_BTNH, lse_BTN, sinks_N):
    """Gives each head a sink, after attention: a logit without a value.

    Args:
      out_BTNH: [B, T, N, H] float32 or bfloat16, the result of attention
        without sinks.
      lse_BTN: float32 [B, T, N], the logsumexp of its logits. A query that saw
        no key has -inf, and output 0.
      sinks_N: float32 [N], a logit for each head; -inf for a head without a
        sink.

    Returns:
      (out_BTNH, lse_BTN) as attention with sinks would give them, out in the
      type that it had. JAX can differentiate both with respect to all three
      arguments.
    """
    # YOUR CODE HERE
    raise NotImplementedError("17.sinks")
