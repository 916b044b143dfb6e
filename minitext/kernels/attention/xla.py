"""Attention in XLA: the reference that every kernel must agree with, and what runs where no kernel does.

Chapters: 4, 17.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from minitext.kernels.attention.mask import CAUSAL, Mask, check_options
from minitext.kernels.per_device import split

# Finite, because a row whose keys are all masked would otherwise compute inf - inf.
MASKED = -1e30
# Stands in for the sink of a head without one. It's below any visible logit and above any masked one: a query that
# sees no key gives its whole weight to this sink, and its output is zero.
NO_SINK = MASKED / 2


def attention(
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=None, *, mask: Mask = CAUSAL, softcap=None, sinks_N=None
) -> jax.Array:
    """Computes `minitext.kernels.attention` as it is written: softmax(q k^T / sqrt(H)) v, with softmax in float32."""
    H, S, K = q_BTNH.shape[3], *k_BSKH.shape[1:3]
    places = jnp.arange(S)
    mask_BTS = mask.sees(places[:, None], places)[None]
    if mask.blocks is not None:
        mask_BTS = mask_BTS & mask.of_blocks(S)
        if sinks_N is None:  # some queries may see no key
            sinks_N = jnp.full(q_BTNH.shape[2], NO_SINK)
    if segment_ids_BT is not None:
        mask_BTS = mask_BTS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
    q_BTKGH = _split_heads(q_BTNH, K)
    logits_BKGTS = _wide("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH) / math.sqrt(H)
    if softcap is not None:
        logits_BKGTS = softcap * jnp.tanh(logits_BKGTS / softcap)
    sinks_KG11 = None if sinks_N is None else _like_heads(sinks_N, q_BTNH, (K, -1, 1, 1))
    probs_BKGTS = masked_softmax(logits_BKGTS, mask_BTS[:, None, None], sinks_KG11)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", probs_BKGTS.astype(v_BSKH.dtype), v_BSKH)
    return _merge_heads(out_BTKGH).astype(q_BTNH.dtype)


def blocked_attention(
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=None, *, mask: Mask = CAUSAL, softcap=None, sinks_N=None
) -> jax.Array:
    """Computes causal attention in blocks of queries, each against only the keys that some of it can see.

    With n blocks the matrix products do (1 + 1/n)/2 of the full square's work, or less with a window or a chunk, and
    the logits of one block stay in cache. But each block is code of its own to compile, load and set up, and on short
    rows two are as fast as four. The gradient is written by hand, as in a flash kernel (Dao et al. 2022), because
    passes over the logits take longer than the products: weights are normalised after the values are summed, and the
    sum that softmax's gradient needs is taken over H products instead of S.
    """
    sinks_KG11 = None
    if sinks_N is not None:
        sinks_KG11 = _like_heads(sinks_N, q_BTNH, (k_BSKH.shape[2], -1, 1, 1))
    return _blocked(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_KG11, mask, softcap)


def blocked_supports(
    q_BTNH, _k, _v, _segment_ids_BT=None, *, mask: Mask = CAUSAL, **_options
) -> str | None:
    """Returns why `blocked_attention` can't compute this, or None."""
    if not mask.causal or mask.blocks is not None:
        return (
            f"it computes causal attention, perhaps with a window or a chunk: the mask has {mask}"
        )
    T = q_BTNH.shape[1]
    if T % 4 or T < 128:
        return f"it needs at least 128 tokens, in a number divisible by 4: got T={T}"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _blocked(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_KG11, mask, softcap):
    args = q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_KG11
    return _blocked_forward(*args, mask, softcap)[0]


def _blocked_forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_KG11, mask, softcap):
    K, H = k_BSKH.shape[2:]
    q_BKGTH = _heads_first(q_BTNH / math.sqrt(H), K)
    k_BKSH, v_BKSH = jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2)
    outs, kept = [], []
    for start, low, high in _bounds(q_BTNH.shape[1], mask):
        q, k, v = q_BKGTH[:, :, :, low:high], k_BKSH[:, :, start:high], v_BKSH[:, :, start:high]
        logits, slope, sink = _wide("BKGTH,BKSH->BKGTS", q, k), None, None
        if softcap is not None:
            bounded = jnp.tanh(logits / softcap)
            logits, slope = softcap * bounded, 1 - bounded * bounded
        mask_BTS = mask.sees(jnp.arange(low, high)[:, None], jnp.arange(start, high))[None]
        if segment_ids_BT is not None:
            same = segment_ids_BT[:, low:high, None] == segment_ids_BT[:, None, start:high]
            mask_BTS = mask_BTS & same
        logits = jnp.where(mask_BTS[:, None, None], logits, MASKED)
        top = jnp.max(logits, axis=-1, keepdims=True)
        if sinks_KG11 is not None:
            top = jnp.maximum(top, sinks_KG11)
            sink = jnp.exp(sinks_KG11 - top)
        exps = jnp.exp(logits - top)
        total = jnp.sum(exps, axis=-1, keepdims=True)
        total = total if sink is None else total + sink
        exps = exps.astype(v.dtype)
        outs.append(_wide("BKGTS,BKSH->BKGTH", exps, v) / total)
        kept.append((exps, total, slope, sink))
    out_BTNH = _heads_last(jnp.concatenate(outs, axis=3)).astype(q_BTNH.dtype)
    return out_BTNH, (q_BKGTH, k_BKSH, v_BKSH, out_BTNH, kept)


def _blocked_backward(mask, _softcap, residuals, grad_BTNH):
    q_BKGTH, k_BKSH, v_BKSH, out_BTNH, kept = residuals
    (K, T), H = q_BKGTH.shape[1:4:2], q_BKGTH.shape[4]
    delta_BTN1 = jnp.sum(
        grad_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=-1, keepdims=True
    )
    grad_BKGTH, delta_BKGT1 = _heads_first(grad_BTNH, K), _heads_first(delta_BTN1, K)
    grad_q: list[jax.Array] = []
    grad_k: Any = None
    grad_v: Any = None
    grad_sinks: Any = None
    # The last block's keys end where all do. Each earlier one adds to the gradients of keys before its own end.
    bounds = _bounds(T, mask)
    for (start, low, high), parts in reversed(list(zip(bounds, kept, strict=True))):
        exps, total, slope, sink = parts
        q, k, v = q_BKGTH[:, :, :, low:high], k_BKSH[:, :, start:high], v_BKSH[:, :, start:high]
        grad = (grad_BKGTH[:, :, :, low:high] / total).astype(v.dtype)
        grad_probs = _wide("BKGTH,BKSH->BKGTS", grad, v)
        delta = delta_BKGT1[:, :, :, low:high] / total
        grad_logits = exps * (grad_probs - delta)
        if slope is not None:
            grad_logits = grad_logits * slope
        if sink is not None:
            part = -jnp.sum(sink * delta, axis=(0, 3))[..., None]
            grad_sinks = part if grad_sinks is None else grad_sinks + part
        grad_logits = grad_logits.astype(q.dtype)
        grad_q.append(_wide("BKGTS,BKSH->BKGTH", grad_logits, k))
        q_BKHGT, grad_BKHGT = (
            # Transposed before the product, not by it: see `minitext.kernels.linear.cpu.transpose`.
            jax.lax.optimization_barrier(jnp.transpose(x, (0, 1, 4, 2, 3))[None])[0]
            for x in (q, grad)
        )
        grad_k = _add_from(start, grad_k, _wide("BKHGT,BKGTS->BKHS", q_BKHGT, grad_logits))
        grad_v = _add_from(start, grad_v, _wide("BKHGT,BKGTS->BKHS", grad_BKHGT, exps))
    grad_q_BTNH = _heads_last(jnp.concatenate(grad_q[::-1], axis=3)) / math.sqrt(H)
    grads = grad_q_BTNH, *(jnp.transpose(grad, (0, 3, 1, 2)) for grad in (grad_k, grad_v))
    return *(grad.astype(v_BKSH.dtype) for grad in grads), None, grad_sinks


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _wide(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _bounds(T: int, mask: Mask) -> list[tuple[int, int, int]]:
    """Returns for each block its first key, its first query, and the end of both."""
    size = T // (2 if T < 512 else 4)
    found = []
    for low in range(0, T, size):
        start = 0 if mask.window is None else max(0, low - mask.window + 1)
        start = start if mask.chunk is None else max(start, low // mask.chunk * mask.chunk)
        found.append((start, low, low + size))
    return found


def _add_from(start: int, total_BKHS, part_BKHs):
    if total_BKHS is None:
        return jnp.pad(part_BKHs, [(0, 0)] * 3 + [(start, 0)]) if start else part_BKHs
    end = start + part_BKHs.shape[3]
    added = total_BKHS[..., start:end] + part_BKHs
    return jax.lax.dynamic_update_slice(total_BKHS, added, (0, 0, 0, start))


def cached_attention(
    q_BTNH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    cached_k_BKSH: jax.Array,
    cached_v_BKSH: jax.Array,
    length: jax.Array | int,
    *,
    segment_ids_BT: jax.Array | None = None,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Computes causal attention for T new tokens that follow the first `length` tokens of a cache.

    The cache is read in place. Only logits are concatenated, never keys or values. All S slots are read, including
    those that a window or a chunk hides.

    Args:
      q_BTNH: [B, T, N, H] queries.
      k_BKTH: [B, K, T, H] keys of the new tokens.
      v_BKTH: [B, K, T, H] values of the new tokens.
      cached_k_BKSH: [B, K, S, H] keys of the earlier tokens; slots from `length` on are ignored.
      cached_v_BKSH: [B, K, S, H] values of the earlier tokens, likewise.
      length: the number of filled slots, [B] if rows differ. New token t is at position `length` + t, and slot s at s.
      segment_ids_BT: [B, T] texts of the new tokens, one after the other. Each follows the row's earlier tokens and
        doesn't see the others; t then counts from the text's first new token. None: each row is one text.
      mask: which keys a query sees: causal, perhaps with a window or a chunk.
      softcap: c > 0 to bound logits as c tanh(logits / c), or None.
      sinks_N: [N] one logit per query head that joins the softmax and has no value, or None.

    Returns:
      [B, T, N, H] in the queries' type.

    Raises:
      UserError: if the mask isn't causal, has blocks or isn't one, or the soft-cap isn't positive.
    """
    B, T, N, H = q_BTNH.shape
    K, S = cached_k_BKSH.shape[1:3]
    check_options("cached_attention", S + T, mask, softcap, causal=True)
    mask = mask.within(S + T)
    # All X = G*T queries of a key head are rows of one product.
    q_BKXH = jnp.reshape(_heads_first(q_BTNH, K), (B, K, -1, H))

    logits = (_wide("BKXH,BKSH->BKXS", q_BKXH, keys) for keys in (cached_k_BKSH, k_BKTH))
    both = jnp.concatenate([x / math.sqrt(H) for x in logits], axis=-1)
    if softcap is not None:
        both = softcap * jnp.tanh(both / softcap)
    # One length for all rows, or one for each.
    length_B1 = jnp.reshape(length, (-1, 1))
    rows, slots_S = length_B1.shape[0] if segment_ids_BT is None else B, jnp.arange(S)
    filled_BTS = jnp.broadcast_to((slots_S < length_B1)[:, None], (rows, T, S))
    new_BTT = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (rows, T, T))
    index_BT = jnp.arange(T)[None]
    if segment_ids_BT is not None:
        new_BTT &= segment_ids_BT[:, :, None] == segment_ids_BT[:, None]
        index_BT -= jnp.argmax(new_BTT, axis=-1)  # of the text's first token
    mask_BTS = jnp.concatenate([filled_BTS, new_BTT], axis=-1)
    if mask != CAUSAL:
        places_BT = length_B1 + index_BT
        keys_BS = jnp.concatenate([jnp.broadcast_to(slots_S, (rows, S)), places_BT], axis=-1)
        mask_BTS &= mask.sees(places_BT[:, :, None], keys_BS[:, None])
    sinks_KX1 = None
    if sinks_N is not None:
        sinks_KG1 = _like_heads(sinks_N, q_BTNH, (K, -1, 1))
        sinks_KX1 = jnp.repeat(sinks_KG1, T, axis=1)
    mask_B1XS = jnp.tile(mask_BTS, (1, N // K, 1))[:, None]
    probs = masked_softmax(both, mask_B1XS, sinks_KX1).astype(v_BKTH.dtype)
    out_BKXH = jnp.einsum("BKXS,BKSH->BKXH", probs[..., :S], cached_v_BKSH)
    out_BKXH += jnp.einsum("BKXS,BKSH->BKXH", probs[..., S:], v_BKTH)
    out_BKGTH = jnp.reshape(out_BKXH, (B, K, -1, T, H))
    return _heads_last(out_BKGTH).astype(q_BTNH.dtype)


def masked_softmax(logits: jax.Array, mask: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Returns the weights of a softmax over the last dimension.

    Args:
      logits: [..., S] float32.
      mask: booleans that broadcast to the logits': which take part.
      sinks: float32 that broadcast to [..., 1]: one more logit for each row, whose weight isn't returned. Or None.
    """
    logits = jnp.where(mask, logits, MASKED)
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sinks))
    exps = jnp.exp(logits - top)
    return exps / (jnp.sum(exps, axis=-1, keepdims=True) + jnp.exp(sinks - top))


def _like_heads(sinks_N: jax.Array, q_BTNH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the sinks in float32 and another shape, on a mesh split as the query heads are."""
    if not jax.sharding.get_abstract_mesh().empty:
        sinks_N = jax.sharding.reshard(sinks_N, P(split(q_BTNH)[2]))
    return jnp.reshape(sinks_N.astype(jnp.float32), shape)


def _split_heads(x_BTNH: jax.Array, K: int) -> jax.Array:
    B, T, N, H = x_BTNH.shape
    return jnp.reshape(x_BTNH, (B, T, K, N // K, H))


def _heads_first(x_BTNH: jax.Array, K: int) -> jax.Array:
    return jnp.transpose(_split_heads(x_BTNH, K), (0, 2, 3, 1, 4))


def _heads_last(x_BKGTH: jax.Array) -> jax.Array:
    return _merge_heads(jnp.transpose(x_BKGTH, (0, 3, 1, 2, 4)))


def _merge_heads(x_BTKGH: jax.Array) -> jax.Array:
    B, T, K, G, H = x_BTKGH.shape
    return jnp.reshape(x_BTKGH, (B, T, K * G, H))
