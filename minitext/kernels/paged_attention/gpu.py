"""Attention of one new token over a paged cache for NVIDIA GPUs: a Pallas kernel that JAX lowers to Triton.

One program per sequence would leave most of the chip's hundred multiprocessors idle. So several programs share a
sequence's pages, and their results are combined by their log-sum-exps, as in flash decoding (Dao et al. 2023). The
query heads that share a key head are rows of one product, padded to the fewest rows that the matrix units take.

Chapters: 17.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from minitext.kernels.attention.mask import CAUSAL, Mask
from minitext.kernels.attention.xla import MASKED, NO_SINK
from minitext.kernels.paged_attention import operands
from minitext.kernels.per_device import on_each_device
from minitext.kernels.tiles_gpu import LOG2_E, MIN_TILE, Side, dot, load, params, store


class Blocks(NamedTuple):
    """How the work is divided.

    Attributes:
      parts: programs that share a sequence's pages.
      warps: warps of a program.
      stages: loads that a program's loop keeps in flight.
    """

    parts: int = 8
    warps: int = 4
    stages: int = 3


DEFAULT = Blocks()


def paged_attention(
    q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, *,
    mask: Mask = CAUSAL, softcap: float | None = None, sinks_N=None, scales_KP2S=None, blocks: Blocks = DEFAULT,
) -> jax.Array:  # fmt: skip
    """Computes `minitext.kernels.paged_attention`. Sequences and heads may be split over a mesh."""
    args = q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B
    run = partial(_paged_attention, blocks, mask, softcap)
    return on_each_device(run, *args, operands.with_sinks(sinks_N, q_BNH), scales_KP2S)


def supports(
    q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, *, scales_KP2S=None, **_options
) -> str | None:
    """Returns why the kernel can't compute this, or None."""
    S, H = k_pages_KPSH.shape[2:]
    if any(size < MIN_TILE or size & (size - 1) for size in (S, H)):
        return f"pages and heads must be powers of two, {MIN_TILE} or more: got {S} and {H}"
    arrays = q_BNH, k_pages_KPSH, v_pages_KPSH
    reason = operands.types_reason(*arrays, scales_KP2S, types=("float32", "bfloat16", "float16"))
    return reason or operands.split_reason(*arrays, page_table_BX, lengths_B, scales_KP2S)


def _paged_attention(
    blocks: Blocks, mask, softcap, q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, sinks_N, scales_KP2S
):  # fmt: skip
    (B, N, H), (K, P, S, _) = q_BNH.shape, k_pages_KPSH.shape
    table_BX, ends_B, starts_B = operands.visible_pages(page_table_BX, lengths_B, S, mask)
    X = table_BX.shape[1]
    G, parts = N // K, min(blocks.parts, X)
    pages = pl.BlockSpec((None, P, S, H), lambda _, k, b: (k, 0, 0, 0))
    caches, cache_specs = [k_pages_KPSH, v_pages_KPSH], [pages, pages]
    if scales_KP2S is not None:  # once for keys, once for values
        caches += [scales_KP2S, scales_KP2S]
        cache_specs += [
            pl.BlockSpec((None, P, None, S), lambda _, k, b, i=i: (k, 0, i, 0)) for i in (0, 1)
        ]
    number = pl.BlockSpec((None,), lambda _, k, b: (b,))
    out_ZBKGH, lse_ZBKG = pl.pallas_call(
        partial(_kernel, pages=pl.cdiv(X, parts), softcap=softcap),
        grid=(parts, K, B),
        in_specs=[
            pl.BlockSpec((None, None, G, H), lambda _, k, b: (b, k, 0, 0)),
            cache_specs,
            pl.BlockSpec((None, X), lambda _, k, b: (b, 0)),
            number,
            number,
            pl.BlockSpec((None, G), lambda _, k, b: (k, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, G, H), lambda z, k, b: (z, b, k, 0, 0)),
            pl.BlockSpec((None, None, None, G), lambda z, k, b: (z, b, k, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((parts, B, K, G, H), jnp.float32),
            jax.ShapeDtypeStruct((parts, B, K, G), jnp.float32),
        ],
        compiler_params=params(blocks),
        name="paged_attention",
    )(
        jnp.reshape(q_BNH, (B, K, G, H)),
        caches,
        table_BX,
        ends_B,
        starts_B,
        jnp.reshape(sinks_N, (K, G)),
    )
    weights_ZBKG = jax.nn.softmax(lse_ZBKG, axis=0)
    out_BKGH = jnp.sum(weights_ZBKG[..., None] * out_ZBKGH, axis=0)
    return jnp.reshape(out_BKGH, (B, N, H)).astype(q_BNH.dtype)


def _kernel(
    q_ref, cache_refs, table_ref, end_ref, start_ref, sinks_ref, out_ref, lse_ref, *,
    pages: int, softcap: float | None,
):  # fmt: skip
    """Attends to some pages of one sequence and key head: the output of its query heads, and their log-sum-exp."""
    (G, H), (k_ref, v_ref, *scale_refs) = q_ref.shape, cache_refs
    S = k_ref.shape[1]
    rows = max(MIN_TILE, pl.next_power_of_2(G))
    heads, features = Side(0, rows, None if rows == G else G), Side(0, H, None)
    q, end, start = load(q_ref, (), heads, features), end_ref[...], start_ref[...]

    def visit(i, carry):
        out, most, total = carry
        # A page may hold anything after a text's tokens. Pallas can't put an 8-bit float there instead.
        last = end - i * S
        tokens = Side(0, S, None if scale_refs else last)
        page = table_ref[i]
        k, v = (load(ref, (page,), tokens, features).astype(q.dtype) for ref in (k_ref, v_ref))
        logits = dot(q, k.T) / math.sqrt(H)
        if scale_refs:
            logits *= jnp.expand_dims(load(scale_refs[0], (page,), tokens), 0)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)

        def seen(shape: tuple[int, ...], axis: int):
            token = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            return (token >= start - i * S) & (token < last)

        logits = jnp.where(seen(logits.shape, 1), logits * LOG2_E, MASKED)
        # Unseen values may be NaN, and a weight of 0 doesn't make NaN 0.
        v = jnp.where(seen(v.shape, 0), v, jnp.zeros_like(v))
        higher = jnp.maximum(most, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - jnp.expand_dims(higher, 1))
        shrink = jnp.exp2(most - higher)
        total = total * shrink + jnp.sum(weights, axis=1)
        if scale_refs:
            scale = load(scale_refs[1], (page,), tokens)
            weights *= jnp.expand_dims(jnp.where(seen(scale.shape, 0), scale, 0), 0)
        out = out * jnp.expand_dims(shrink, 1) + dot(weights.astype(v.dtype), v)
        return out, higher, total

    part = pl.program_id(0)
    low = part * pages
    high = jnp.minimum(low + pages, pl.cdiv(end, S))
    # A sink is a logit with a value of 0, and one program adds it.
    most = jnp.where(part == 0, load(sinks_ref, (), heads) * LOG2_E, NO_SINK)
    carry = jnp.zeros((rows, H), jnp.float32), most, jnp.ones(rows, jnp.float32)
    out, most, total = jax.lax.fori_loop(low, high, visit, carry)
    store(out_ref, (), out / jnp.expand_dims(total, 1), heads, features)
    store(lse_ref, (), (most + jnp.log2(total)) / LOG2_E, heads)
