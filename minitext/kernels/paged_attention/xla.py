"""Paged decode attention in XLA, which gathers all of a sequence's pages, in use or not, and masks.

Chapters: 17.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from minitext.kernels.attention.mask import CAUSAL, Mask
from minitext.kernels.attention.xla import masked_softmax
from minitext.kernels.paged_attention import operands


def paged_attention(
    q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, *,
    mask: Mask = CAUSAL, softcap: float | None = None, sinks_N=None, scales_KP2S=None,
) -> jax.Array:  # fmt: skip
    """Computes `minitext.kernels.paged_attention`."""
    (B, N, H), (K, _, S, _) = q_BNH.shape, k_pages_KPSH.shape
    X = page_table_BX.shape[1]
    seen_BL = mask.sees(lengths_B[:, None] - 1, jnp.arange(X * S))
    seen_BX = jnp.any(jnp.reshape(seen_BL, (B, X, S)), axis=2)
    page_BX = jnp.where(seen_BX, page_table_BX, 0)

    sharding = None
    if not jax.sharding.get_abstract_mesh().empty:
        heads, sequences = (jax.typeof(x).sharding.spec[0] for x in (k_pages_KPSH, page_table_BX))
        sharding = PartitionSpec(heads, sequences, None, None, None)

    def tokens(pages_KPSH):
        x_KBXSH = pages_KPSH.at[:, page_BX].get(out_sharding=sharding)
        x_KBLH = jnp.reshape(x_KBXSH, (K, B, X * S, H))
        x_KBLH = x_KBLH if scales_KP2S is None else x_KBLH.astype(q_BNH.dtype)
        # Unseen values may be NaN, and a weight of 0 doesn't make NaN 0.
        return jnp.where(seen_BL[:, :, None], x_KBLH, 0)

    def scales(pages_KP2S, which):
        x_KBXS = pages_KP2S.at[:, page_BX].get(out_sharding=sharding)[:, :, :, which]
        x_BKL = jnp.swapaxes(jnp.reshape(x_KBXS, (K, B, X * S)), 0, 1)
        return jnp.where(seen_BL[:, None], x_BKL, 0)[:, :, None]

    q_BKGH = jnp.reshape(q_BNH, (B, K, N // K, H))
    logits_BKGL = jnp.einsum(
        "BKGH,KBLH->BKGL", q_BKGH, tokens(k_pages_KPSH), preferred_element_type=jnp.float32
    )
    logits_BKGL /= math.sqrt(H)
    if scales_KP2S is not None:
        logits_BKGL *= scales(scales_KP2S, 0)
    if softcap is not None:
        logits_BKGL = softcap * jnp.tanh(logits_BKGL / softcap)
    sinks_KG1 = jnp.reshape(operands.with_sinks(sinks_N, q_BNH), (K, N // K, 1))
    probs_BKGL = masked_softmax(logits_BKGL, seen_BL[:, None, None], sinks_KG1)
    if scales_KP2S is not None:
        probs_BKGL *= scales(scales_KP2S, 1)
    values = tokens(v_pages_KPSH)
    out_BKGH = jnp.einsum("BKGL,KBLH->BKGH", probs_BKGL.astype(values.dtype), values)
    return jnp.reshape(out_BKGH, (B, N, H)).astype(q_BNH.dtype)
