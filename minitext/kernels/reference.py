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
) -> jax.Array:
    """Causal attention: softmax(q k^T / sqrt(H)) v, with softmax in float32.

    Args:
      q_BTNH: [B, T, N, H] queries.
      k_BSKH: [B, S, K, H] keys, S = T; each serves N/K query heads.
      v_BSKH: [B, S, K, H] values.
      segment_ids_BT: [B, T] with T = S: tokens attend within their own segment. Segment 0 is padding.

    Returns:
      [B, T, N, H] in the queries' type.
    """
    H, S, K = q_BTNH.shape[3], *k_BSKH.shape[1:3]
    mask_BTS = jnp.tril(jnp.ones((1, S, S), bool))
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


def cached_attention(
    q_BTNH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    cached_k_BKSH: jax.Array,
    cached_v_BKSH: jax.Array,
    length: jax.Array | int,
) -> jax.Array:
    """The same attention for T tokens that follow the first `length` of a cache's S places.

    The cache is read where it lies and not joined to the new keys and values; only the logits are.

    Args:
      q_BTNH: [B, T, N, H] queries.
      k_BKTH: [B, K, T, H] keys of the new tokens.
      v_BKTH: [B, K, T, H] values, likewise.
      cached_k_BKSH: [B, K, S, H] keys of the tokens before; places from `length` on are not seen.
      cached_v_BKSH: [B, K, S, H] values, likewise.
      length: how many places are filled.

    Returns:
      [B, T, N, H] in the queries' type.
    """
    B, T, N, H = q_BTNH.shape
    K, S = cached_k_BKSH.shape[1:3]
    q_BKGTH = jnp.transpose(_split_heads(q_BTNH, K), (0, 2, 3, 1, 4))
    q_BKXH = jnp.reshape(
        q_BKGTH, (B, K, -1, H)
    )  # a key head's X = G*T queries, all rows of one product

    def logits(keys):
        wide = jnp.einsum("BKXH,BKSH->BKXS", q_BKXH, keys, preferred_element_type=jnp.float32)
        return wide / math.sqrt(H)

    both = jnp.concatenate([logits(cached_k_BKSH), logits(k_BKTH)], axis=-1)
    filled_TS = jnp.broadcast_to(jnp.arange(S) < length, (T, S))
    mask_TS = jnp.concatenate([filled_TS, jnp.tril(jnp.ones((T, T), bool))], axis=-1)
    probs = _softmax(both, jnp.tile(mask_TS, (N // K, 1))).astype(v_BKTH.dtype)
    out_BKXH = jnp.einsum("BKXS,BKSH->BKXH", probs[..., :S], cached_v_BKSH)
    out_BKXH += jnp.einsum("BKXS,BKSH->BKXH", probs[..., S:], v_BKTH)
    out_BKGTH = jnp.reshape(out_BKXH, (B, K, -1, T, H))
    return _merge_heads(jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4))).astype(q_BTNH.dtype)


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
