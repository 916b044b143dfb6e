"""Paged decode attention for XLA's CPU backend: a few key heads of a few sequences at a time.

XLA gathers keys and values before it multiplies them. Gathered for all sequences at once, they go to memory and back.
Here they stay in the processor's cache.

Chapters: 17.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from minitext.kernels.attention.mask import CAUSAL, Mask
from minitext.kernels.attention.xla import masked_softmax
from minitext.kernels.paged_attention import operands
from minitext.kernels.per_device import on_each_device

BLOCK_BYTES = 2**20  # keys gathered at a time


def paged_attention(
    q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, *,
    mask: Mask = CAUSAL, softcap: float | None = None, sinks_N=None,
) -> jax.Array:  # fmt: skip
    """Computes `minitext.kernels.paged_attention`. Sequences and heads may be split over a mesh."""
    args = q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B
    run = partial(_paged_attention, mask, softcap)
    return on_each_device(run, *args, operands.with_sinks(sinks_N, q_BNH))


def supports(q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, **_options) -> str | None:
    """Returns why `paged_attention` can't compute this, or None."""
    return operands.split_reason(q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B)


def _paged_attention(
    mask, softcap, q_BNH, k_pages_KPSH, v_pages_KPSH, table_BX, lengths_B, sinks_N
):
    (B, N, H), (K, P, S, _) = q_BNH.shape, k_pages_KPSH.shape
    page_BX, ends_B, starts_B = operands.visible_pages(table_BX, lengths_B, S, mask)
    X = page_BX.shape[1]
    # A sequence's unused pages are all the same one, which stays in the cache.
    page_BX = jnp.where(jnp.arange(X) * S < ends_B[:, None], page_BX, 0)
    # A page is one row of a matrix; each of the Z = K*B pairs of a key head and a sequence has rows of its own.
    k_pages, v_pages = (jnp.reshape(x, (K * P, S * H)) for x in (k_pages_KPSH, v_pages_KPSH))
    page_ZX = jnp.reshape(jnp.arange(K)[:, None, None] * P + page_BX, (K * B, X))
    q_KBGH = jnp.swapaxes(jnp.reshape(q_BNH, (B, K, N // K, H)), 0, 1)
    q_ZGH = jnp.reshape(q_KBGH, (K * B, N // K, H))
    sinks_ZG1 = jnp.repeat(jnp.reshape(sinks_N, (K, N // K, 1)), B, axis=0)
    ends_Z, starts_Z = jnp.tile(ends_B, K), jnp.tile(starts_B, K)

    def attend(operands):
        q_GH, page_X, end, start, sinks_G1 = operands
        # Within bounds by the caller's promise; XLA's gather takes the nearest page for others.
        k_LH, v_LH = (
            jnp.reshape(x.at[page_X].get(mode="promise_in_bounds"), (X * S, H))
            for x in (k_pages, v_pages)
        )
        logits_GL = jnp.einsum("GH,LH->GL", q_GH, k_LH, preferred_element_type=jnp.float32)
        logits_GL /= math.sqrt(H)
        if softcap is not None:
            logits_GL = softcap * jnp.tanh(logits_GL / softcap)
        place_L = jnp.arange(X * S)
        seen_L = (place_L >= start) & (place_L < end)
        probs_GL = masked_softmax(logits_GL, seen_L, sinks_G1).astype(v_LH.dtype)
        # Unseen values may be NaN, and a weight of 0 doesn't make NaN 0.
        v_LH = jnp.where(seen_L[:, None], v_LH, 0)
        return jnp.einsum("GL,LH->GH", probs_GL, v_LH, preferred_element_type=jnp.float32)

    rows = max(1, BLOCK_BYTES // (X * S * H * k_pages_KPSH.dtype.itemsize))
    args = q_ZGH, page_ZX, ends_Z, starts_Z, sinks_ZG1
    out_ZGH = jax.lax.map(attend, args, batch_size=rows)
    out_BKGH = jnp.swapaxes(jnp.reshape(out_ZGH, (K, B, N // K, H)), 0, 1)
    return jnp.reshape(out_BKGH, (B, N, H)).astype(q_BNH.dtype)
