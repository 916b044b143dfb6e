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
    mask: Mask = CAUSAL, softcap: float | None = None, sinks_N=None, blocks: Blocks = DEFAULT,
) -> jax.Array:  # fmt: skip
    """Computes `minitext.kernels.paged_attention`. Sequences and heads may be split over a mesh."""
    args = q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B
    run = partial(_paged_attention, blocks, mask, softcap)
    return on_each_device(run, *args, operands.with_sinks(sinks_N, q_BNH))


def supports(q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, **_options) -> str | None:
    """Returns why the kernel can't compute this, or None."""
    arrays = q_BNH, k_pages_KPSH, v_pages_KPSH
    reason = operands.types_reason(*arrays, types=("float32", "bfloat16"))
    if reason := reason or operands.split_reason(*arrays, page_table_BX, lengths_B):
        return reason
    tile, S = 32 // q_BNH.dtype.itemsize, k_pages_KPSH.shape[2]
    if S % tile:
        return f"pages of {q_BNH.dtype} need a multiple of {tile} tokens: got {S}"
    if 4 * page_table_BX.size > TABLE_BYTES:
        return f"the page table must fit in {TABLE_BYTES} bytes of scalar memory: got {page_table_BX.shape} numbers"
    return None


def _paged_attention(
    blocks: Blocks, mask, softcap, q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, sinks_N
):  # fmt: skip
    (B, N, H), (K, _, S, _) = q_BNH.shape, k_pages_KPSH.shape
    table_BX, ends_B, starts_B = operands.visible_pages(page_table_BX, lengths_B, S, mask)
    G, k = N // K, math.gcd(K, blocks.heads)
    pages = max(1, min(table_BX.shape[1], blocks.tokens // S))
    heads = pl.BlockSpec((1, k, G, H), lambda i, b, *_: (b, i, 0, 0))
    sinks = pl.BlockSpec((k, G, 1), lambda i, b, *_: (i, 0, 0))
    cache = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, k, pages * S, H), q_BNH.dtype)
    out_BKGH = pl.pallas_call(
        partial(_kernel, pages=pages, softcap=softcap, begins=mask != CAUSAL),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(K // k, B),
            in_specs=[heads, cache, cache, sinks],
            out_specs=heads,
            scratch_shapes=[
                buffer,
                buffer,
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
        k_pages_KPSH,
        v_pages_KPSH,
        jnp.reshape(sinks_N, (K, G, 1)),
    )
    return jnp.reshape(out_BKGH, (B, N, H))


def _kernel(
    table_ref, ends_ref, starts_ref, q_ref, k_ref, v_ref, sinks_ref, out_ref,
    k_buffer, v_buffer, done, first_ref, *, pages: int, softcap: float | None, begins: bool,
):  # fmt: skip
    b, B = pl.program_id(1), pl.num_programs(1)
    (_, k, G, H), tokens = q_ref.shape, k_buffer.shape[2]
    heads, end = pl.ds(pl.program_id(0) * k, k), ends_ref[b]
    steps = pl.cdiv(end, tokens)
    both = (k_ref, k_buffer), (v_ref, v_buffer)
    start, wait = _copies(table_ref, ends_ref, both, done, heads, pages)

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
        return _attend(q_ref[0], k_buffer[half], v_buffer[half], seen, softcap, state)

    # A sink is a logit with a value of 0. A head without one has a sink below any logit, so that nothing is divided by
    # 0 where there are no tokens.
    state = sinks_ref[...], jnp.ones((k, G, 1), jnp.float32), jnp.zeros((k, G, H), jnp.float32)
    _, sum_kG1, out_kGH = jax.lax.fori_loop(0, steps, step, state)
    out_ref[0] = (out_kGH / sum_kG1).astype(out_ref.dtype)


def _copies(table_ref, ends_ref, both, done, heads, pages: int):
    """Returns two functions of (sequence, step, half) that start, and wait for, the copies of a step's pages.

    The pages go into one half of the buffers, in order. Pages beyond the sequence's last aren't touched.
    """
    S = both[0][0].shape[2]

    def each(act, b, step, half):
        for i in range(pages):
            page = step * pages + i

            @pl.when(page * S < ends_ref[b])
            def _(i=i, page=page):
                for cache_ref, buffer_ref in both:
                    source = cache_ref.at[heads, table_ref[b, page]]
                    target = buffer_ref.at[half, :, pl.ds(i * S, S)]
                    act(pltpu.make_async_copy(source, target, done.at[half]))

    return partial(each, lambda copy: copy.start()), partial(each, lambda copy: copy.wait())


def _attend(q_kGH, k_kSH, v_kSH, seen, softcap, state):
    """Adds S tokens to a softmax's running (maximum, sum, output).

    Tokens count from seen[0] on, which may be None for the first, and before seen[1].
    """

    def counts(shape: tuple[int, ...], axis: int) -> jax.Array:
        token = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        before = token < seen[1]
        return before if seen[0] is None else (token >= seen[0]) & before

    max_kG1, sum_kG1, out_kGH = state
    exact = jax.lax.Precision.HIGHEST if q_kGH.dtype == jnp.float32 else None
    dot = partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)
    logits_kGS = dot("kGH,kSH->kGS", q_kGH, k_kSH) / math.sqrt(q_kGH.shape[-1])
    if softcap is not None:
        logits_kGS = softcap * jnp.tanh(logits_kGS / softcap)
    logits_kGS = jnp.where(counts(logits_kGS.shape, 2), logits_kGS, -jnp.inf)
    new_kG1 = jnp.maximum(max_kG1, jnp.max(logits_kGS, axis=-1, keepdims=True))
    weights_kGS, kept_kG1 = jnp.exp(logits_kGS - new_kG1), jnp.exp(max_kG1 - new_kG1)
    # Unseen values may be NaN, and a weight of 0 doesn't make NaN 0.
    v_kSH = jnp.where(counts(v_kSH.shape, 1), v_kSH, 0)
    part_kGH = dot("kGS,kSH->kGH", weights_kGS.astype(v_kSH.dtype), v_kSH)
    sum_kG1 = sum_kG1 * kept_kG1 + jnp.sum(weights_kGS, axis=-1, keepdims=True)
    return new_kG1, sum_kG1, out_kGH * kept_kG1 + part_kGH
