"""Paged decode attention for XLA's CPU backend: a few pages at a time, as many as the longest sequence has.

XLA gathers keys and values before it multiplies them. Gathered for whole sequences, they go to memory and back. Here
they stay in the processor's cache, and the softmax is updated as it goes on (Milakov and Gimelshein 2018).

Chapters: 17.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from minitext.kernels.attention.mask import CAUSAL, Mask
from minitext.kernels.paged_attention import operands
from minitext.kernels.per_device import on_each_device

BLOCK_BYTES = 2**20  # keys gathered at a time
LEAST = -1e30  # below every logit, and finite, so that no difference is NaN


def paged_attention(
    q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, *,
    mask: Mask = CAUSAL, softcap: float | None = None, sinks_N=None, scales_KP2S=None,
) -> jax.Array:  # fmt: skip
    """Computes `minitext.kernels.paged_attention`. Sequences and heads may be split over a mesh."""
    args = q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B
    run = partial(_paged_attention, mask, softcap)
    return on_each_device(run, *args, operands.with_sinks(sinks_N, q_BNH), scales_KP2S)


def supports(
    q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, *, scales_KP2S=None, **_options
) -> str | None:
    """Returns why `paged_attention` can't compute this, or None."""
    args = q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B
    return operands.split_reason(*args, scales_KP2S)


def _paged_attention(
    mask, softcap, q_BNH, k_pages_KPSH, v_pages_KPSH, table_BX, lengths_B, sinks_N, scales_KP2S
):
    (B, N, H), (K, P, S, _) = q_BNH.shape, k_pages_KPSH.shape
    page_BX, ends_B, starts_B = operands.visible_pages(table_BX, lengths_B, S, mask)
    X = page_BX.shape[1]
    # A sequence's unused pages are all the same one, which stays in the cache.
    page_BX = jnp.where(jnp.arange(X) * S < ends_B[:, None], page_BX, 0)
    # A page is one row of a matrix; each of the K*B pairs of a key head and a sequence has rows of its own.
    caches = operands.caches(k_pages_KPSH, v_pages_KPSH, scales_KP2S)
    pages = [jnp.reshape(x, (K * P, -1)) for x in caches]
    page_KBX = jnp.arange(K)[:, None, None] * P + page_BX
    q_KBGH = jnp.swapaxes(jnp.reshape(q_BNH, (B, K, N // K, H)), 0, 1) / math.sqrt(H)
    sinks_KBG = jnp.broadcast_to(jnp.reshape(sinks_N, (K, 1, N // K)), q_KBGH.shape[:3])
    # Z pairs by a few pages at a time, up to the longest sequence's end.
    page_bytes = S * H * q_BNH.dtype.itemsize
    Z = min(K * B, max(1, BLOCK_BYTES // page_bytes))
    step = min(X, max(1, BLOCK_BYTES // (Z * page_bytes)))
    page_KBX = jnp.pad(page_KBX, ((0, 0), (0, 0), (0, -X % step)))

    def blocks(x):
        x = jnp.reshape(x, (K * B, *x.shape[2:]))
        x = jnp.pad(x, [(0, -(K * B) % Z)] + [(0, 0)] * (x.ndim - 1))
        return jnp.reshape(x, (-1, Z, *x.shape[1:]))

    ends_KB, starts_KB = (jnp.broadcast_to(x, (K, B)) for x in (ends_B, starts_B))
    args = q_KBGH, page_KBX, ends_KB, starts_KB, sinks_KBG
    attend = partial(_attend, pages, S, step, softcap)
    out_YZGH = jax.lax.map(attend, jax.tree.map(blocks, args))
    out_KBGH = jnp.reshape(jnp.reshape(out_YZGH, (-1, N // K, H))[: K * B], (K, B, N // K, H))
    return jnp.reshape(jnp.swapaxes(out_KBGH, 0, 1), (B, N, H)).astype(q_BNH.dtype)


def _attend(pages, S, step, softcap, operands):
    """Attends with Z pairs of a key head and a sequence, `step` pages at a time; returns [Z, G, H]."""
    q_ZGH, page_ZX, end_Z, start_Z, sink_ZG = operands
    Z, _, H = q_ZGH.shape

    def of_pages(i, kept):
        most_ZG, sum_ZG, out_ZGH = kept
        page_Zx = jax.lax.dynamic_slice_in_dim(page_ZX, i * step, step, 1)
        # Within bounds by the caller's promise; XLA's gather takes the nearest page for others.
        k_ZxY, v_ZxY, *scales_ZxY = (x.at[page_Zx].get(mode="promise_in_bounds") for x in pages)
        k_ZLH, v_ZLH = (jnp.reshape(x, (Z, step * S, H)) for x in (k_ZxY, v_ZxY))
        if scales_ZxY:
            k_ZLH, v_ZLH = k_ZLH.astype(q_ZGH.dtype), v_ZLH.astype(q_ZGH.dtype)
            scales_Z2xS = jnp.swapaxes(jnp.reshape(scales_ZxY[0], (Z, step, 2, S)), 1, 2)
            scales_Z2L = jnp.reshape(scales_Z2xS, (Z, 2, step * S))
        wide = {"preferred_element_type": jnp.float32}
        logits_ZGL = jnp.einsum("ZGH,ZLH->ZGL", q_ZGH, k_ZLH, **wide)
        if scales_ZxY:
            logits_ZGL *= scales_Z2L[:, :1]
        if softcap is not None:
            logits_ZGL = softcap * jnp.tanh(logits_ZGL / softcap)
        place_L = i * step * S + jnp.arange(step * S)
        seen_ZL = (place_L >= start_Z[:, None]) & (place_L < end_Z[:, None])
        logits_ZGL = jnp.where(seen_ZL[:, None], logits_ZGL, LEAST)
        new_ZG = jnp.maximum(most_ZG, jnp.max(logits_ZGL, axis=2))
        weight_ZGL = jnp.where(seen_ZL[:, None], jnp.exp(logits_ZGL - new_ZG[..., None]), 0)
        # Unseen values may be NaN, and a weight of 0 doesn't make NaN 0.
        v_ZLH = jnp.where(seen_ZL[..., None], v_ZLH, 0)
        kept_ZG = jnp.exp(most_ZG - new_ZG)
        sum_ZG = sum_ZG * kept_ZG + jnp.sum(weight_ZGL, axis=2)
        if scales_ZxY:
            weight_ZGL *= jnp.where(seen_ZL[:, None], scales_Z2L[:, 1:], 0)
        more_ZGH = jnp.einsum("ZGL,ZLH->ZGH", weight_ZGL.astype(v_ZLH.dtype), v_ZLH, **wide)
        return new_ZG, sum_ZG, out_ZGH * kept_ZG[..., None] + more_ZGH

    most_ZG = jnp.maximum(sink_ZG, LEAST)
    first = most_ZG, jnp.exp(sink_ZG - most_ZG), jnp.zeros(q_ZGH.shape, jnp.float32)
    steps = (jnp.max(end_Z) + step * S - 1) // (step * S)
    _, sum_ZG, out_ZGH = jax.lax.fori_loop(0, steps, of_pages, first)
    return out_ZGH / jnp.where(sum_ZG > 0, sum_ZG, 1)[..., None]  # 0 for one without tokens
