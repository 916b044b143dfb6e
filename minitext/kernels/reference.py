"""The XLA implementations: what every kernel must agree with, and what runs where no kernel does.

Chapters: 4, 17.
"""

import math

import jax
import jax.numpy as jnp

# Finite, so that a row whose keys are all masked gives an even mixture of the values and not 0/0.
MASKED = -1e30


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    query_offset: jax.Array | int = 0,
) -> jax.Array:
    """Causal attention: softmax(q k^T / sqrt(H)) v, with softmax in float32.

    Args:
      q_BTNH: [B, T, N, H] queries.
      k_BSKH: [B, S, K, H] keys; each serves N/K query heads.
      v_BSKH: [B, S, K, H] values.
      segment_ids_BT: [B, T] with T = S: tokens attend within their own segment. Segment 0 is padding.
      query_offset: place of the first query among the keys; query t sees keys 0 .. query_offset + t.

    Returns:
      [B, T, N, H] in the queries' type.
    """
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    S, K = k_BSKH.shape[1:3]
    visible_TS = jnp.arange(T)[:, None] + query_offset >= jnp.arange(S)
    mask_BTS = visible_TS[None]
    if segment_ids_BT is not None:
        mask_BTS = mask_BTS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
    q_BTKGH = _split_heads(q_BTNH, K)
    logits_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    probs_BKGTS = _softmax(logits_BKGTS / math.sqrt(H), mask_BTS[:, None, None])
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", probs_BKGTS.astype(v_BSKH.dtype), v_BSKH)
    return _merge_heads(out_BTKGH).astype(q_BTNH.dtype)


def blocked_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    blocks: int = 4,
) -> jax.Array:
    """The same attention in blocks of queries, each against only the keys that it can see.

    With `blocks` blocks the matrix products do (1 + 1/blocks)/2 of the full square's work, and the logits of one
    block stay in cache. Arguments and result are those of `attention` with T = S divisible by `blocks`.
    """
    size = q_BTNH.shape[1] // blocks
    parts = []
    for i in range(blocks):
        low, high = i * size, (i + 1) * size
        parts.append(_block(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, low, high))
    return jnp.concatenate(parts, axis=1)


def _block(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, low: int, high: int) -> jax.Array:
    K, H = k_BSKH.shape[2:]
    q, k, v = q_BTNH[:, low:high], k_BSKH[:, :high], v_BSKH[:, :high]
    mask_BTS = (jnp.arange(low, high)[:, None] >= jnp.arange(high))[None]
    if segment_ids_BT is not None:
        mask_BTS = mask_BTS & (segment_ids_BT[:, low:high, None] == segment_ids_BT[:, None, :high])
    logits = jnp.einsum(
        "BTKGH,BSKH->BKGTS", _split_heads(q, K), k, preferred_element_type=jnp.float32
    )
    probs = _softmax(logits / math.sqrt(H), mask_BTS[:, None, None])
    out = jnp.einsum("BKGTS,BSKH->BTKGH", probs.astype(v.dtype), v)
    return _merge_heads(out).astype(q.dtype)


def _softmax(logits: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(mask, logits, MASKED), axis=-1)


def _split_heads(x_BTNH: jax.Array, K: int) -> jax.Array:
    B, T, N, H = x_BTNH.shape
    return jnp.reshape(x_BTNH, (B, T, K, N // K, H))


def _merge_heads(x_BTKGH: jax.Array) -> jax.Array:
    B, T, K, G, H = x_BTKGH.shape
    return jnp.reshape(x_BTKGH, (B, T, K * G, H))
