"""Paged decode attention as a Pallas kernel for TPUs, which loads only the pages in use.

The cache stays in HBM. The kernel itself copies a few of a sequence's pages at a time into vector memory, and computes
on them while it copies the next. Pallas's own pipeline would do the same with blocks, but here the kernel reads which
pages to copy, and how many, while it runs. After a sequence's last page it copies the first of the next sequence.

Chapters: 17.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.kernels.attention.mask import CAUSAL, Mask
from minitext.kernels.paged_attention import operands
from minitext.kernels.per_device import on_each_device

# Scalar memory for the page table, out of the 1 MiB that a chip has.
TABLE_BYTES = 2**19
LANES = 128  # elements in a row of a tile


class Blocks(NamedTuple):
    """Block sizes, each an upper bound.

    Attributes:
      tokens: tokens whose keys and values are copied, in whole pages, and computed on at a time.
      heads: key heads per block. A chip whose two cores are one device needs two blocks to use both cores.
    """

    tokens: int = 512
    heads: int = 4


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
    arrays = q_BNH, k_pages_KPSH, v_pages_KPSH
    reason = operands.types_reason(*arrays, scales_KP2S, types=("float32", "bfloat16"))
    if reason := reason or operands.split_reason(*arrays, page_table_BX, lengths_B, scales_KP2S):
        return reason
    dtype, S = k_pages_KPSH.dtype, k_pages_KPSH.shape[2]
    # Whole tiles, of the scales too, whose tokens are along a tile's rows.
    tile = 32 // dtype.itemsize if scales_KP2S is None else LANES
    if S % tile:
        return f"pages of {dtype} need a multiple of {tile} tokens: got {S}"
    if 4 * page_table_BX.size > TABLE_BYTES:
        return f"the page table must fit in {TABLE_BYTES} bytes of scalar memory: got {page_table_BX.shape} numbers"
    return None


def _paged_attention(
    blocks: Blocks, mask, softcap, q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, sinks_N, scales_KP2S
):  # fmt: skip
    (B, N, H), (K, _, S, _) = q_BNH.shape, k_pages_KPSH.shape
    table_BX, ends_B, starts_B = operands.visible_pages(page_table_BX, lengths_B, S, mask)
    G, k = N // K, math.gcd(K, blocks.heads)
    pages = max(1, min(table_BX.shape[1], blocks.tokens // S))
    heads = pl.BlockSpec((1, k, G, H), lambda i, b, *_: (b, i, 0, 0))
    sinks = pl.BlockSpec((k, G, 1), lambda i, b, *_: (i, 0, 0))
    caches = operands.caches(k_pages_KPSH, v_pages_KPSH, scales_KP2S)
    tokens = pages * S
    shapes = (2, k, tokens, H), (2, k, tokens, H), (2, k, 2, tokens)
    out_BKGH = pl.pallas_call(
        partial(_kernel, pages=pages, softcap=softcap, begins=mask != CAUSAL),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(K // k, B),
            in_specs=[heads, [pl.BlockSpec(memory_space=pl.ANY)] * len(caches), sinks],
            out_specs=heads,
            scratch_shapes=[
                [pltpu.VMEM(shape, x.dtype) for shape, x in zip(shapes, caches, strict=False)],
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B, K, G, H), q_BNH.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="paged_attention",
    )(
        table_BX,
        ends_B,
        starts_B,
        jnp.reshape(q_BNH, (B, K, G, H)),
        list(caches),
        jnp.reshape(sinks_N, (K, G, 1)),
    )
    return jnp.reshape(out_BKGH, (B, N, H))


def _kernel(
    table_ref, ends_ref, starts_ref, q_ref, cache_refs, sinks_ref, out_ref, buffers, done, first_ref, *,
    pages: int, softcap: float | None, begins: bool,
):  # fmt: skip
    b, B = pl.program_id(1), pl.num_programs(1)
    (_, k, G, H), tokens = q_ref.shape, buffers[0].shape[2]
    heads, end = pl.ds(pl.program_id(0) * k, k), ends_ref[b]
    steps = pl.cdiv(end, tokens)
    start, wait = _copies(table_ref, ends_ref, cache_refs, buffers, done, heads, pages)

    @pl.when(b == 0)
    def _():
        first_ref[0] = 0
        start(0, 0, 0)

    # The half with this sequence's first pages, which the previous sequence had copied.
    first = first_ref[0]
    first_ref[0] = (first + steps) % 2

    @pl.when((steps == 0) & (b + 1 < B))
    def _():
        start(b + 1, 0, first)

    def step(i, state):
        half, last = (first + i) % 2, i + 1 == steps
        next_b = jnp.where(last, b + 1, b)

        @pl.when(next_b < B)
        def _():
            start(next_b, jnp.where(last, 0, i + 1), 1 - half)

        wait(b, i, half)
        seen = starts_ref[b] - i * tokens if begins else None, end - i * tokens
        k_kSH, v_kSH, *scales = (buffer[half] for buffer in buffers)
        both = k_kSH, v_kSH, scales[0] if scales else None
        return _attend(q_ref[0], *both, seen, softcap, state)

    # A sink is a logit with a value of 0. A head without one has a sink below any logit, so that nothing is divided by
    # 0 where there are no tokens.
    state = sinks_ref[...], jnp.ones((k, G, 1), jnp.float32), jnp.zeros((k, G, H), jnp.float32)
    _, sum_kG1, out_kGH = jax.lax.fori_loop(0, steps, step, state)
    out_ref[0] = (out_kGH / sum_kG1).astype(out_ref.dtype)


def _copies(table_ref, ends_ref, cache_refs, buffers, done, heads, pages: int):
    """Returns two functions of (sequence, step, half) that start, and wait for, the copies of a step's pages.

    The pages go into one half of the buffers, in order. Pages beyond the sequence's last aren't touched.
    """
    S = cache_refs[0].shape[2]

    def each(act, b, step, half):
        for i in range(pages):
            page = step * pages + i

            @pl.when(page * S < ends_ref[b])
            def _(i=i, page=page):
                tokens = pl.ds(i * S, S)
                for n, (cache_ref, buffer_ref) in enumerate(zip(cache_refs, buffers, strict=True)):
                    source = cache_ref.at[heads, table_ref[b, page]]
                    # Of scales, tokens are the last dimension.
                    target = buffer_ref.at[
                        (half, slice(None), tokens) if n < 2 else (half, ..., tokens)
                    ]
                    act(pltpu.make_async_copy(source, target, done.at[half]))

    return partial(each, lambda copy: copy.start()), partial(each, lambda copy: copy.wait())


def _attend(q_kGH, k_kSH, v_kSH, scales_k2S, seen, softcap, state):
    """Adds S tokens to a softmax's running (maximum, sum, output).

    Only tokens from seen[0] on (None: from the first on) and before seen[1] take part. With scales, logits are
    multiplied by the scales of keys and weights by those of values, so keys and values never exist unquantized.
    """

    def counts(shape: tuple[int, ...], axis: int) -> jax.Array:
        token = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        before = token < seen[1]
        return before if seen[0] is None else (token >= seen[0]) & before

    max_kG1, sum_kG1, out_kGH = state
    exact = jax.lax.Precision.HIGHEST if q_kGH.dtype == jnp.float32 else None
    dot = partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)
    if scales_k2S is not None:
        k_kSH, v_kSH = k_kSH.astype(q_kGH.dtype), v_kSH.astype(q_kGH.dtype)
    logits_kGS = dot("kGH,kSH->kGS", q_kGH, k_kSH) / math.sqrt(q_kGH.shape[-1])
    if scales_k2S is not None:
        logits_kGS *= scales_k2S[:, :1]
    if softcap is not None:
        logits_kGS = softcap * jnp.tanh(logits_kGS / softcap)
    logits_kGS = jnp.where(counts(logits_kGS.shape, 2), logits_kGS, -jnp.inf)
    new_kG1 = jnp.maximum(max_kG1, jnp.max(logits_kGS, axis=-1, keepdims=True))
    weights_kGS, kept_kG1 = jnp.exp(logits_kGS - new_kG1), jnp.exp(max_kG1 - new_kG1)
    # Unseen values may be NaN, and a weight of 0 doesn't make NaN 0.
    v_kSH = jnp.where(counts(v_kSH.shape, 1), v_kSH, 0)
    sum_kG1 = sum_kG1 * kept_kG1 + jnp.sum(weights_kGS, axis=-1, keepdims=True)
    if scales_k2S is not None:
        weights_kGS *= jnp.where(counts(weights_kGS.shape, 2), scales_k2S[:, 1:], 0)
    part_kGH = dot("kGS,kSH->kGH", weights_kGS.astype(v_kSH.dtype), v_kSH)
    return new_kG1, sum_kG1, out_kGH * kept_kG1 + part_kGH
