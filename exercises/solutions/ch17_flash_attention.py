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
    # BEGIN SOLUTION
    top, size, out = -jnp.inf, 0.0, 0.0
    for logits_TS, v_SH in blocks:
        higher = jnp.maximum(top, jnp.max(logits_TS, axis=1, keepdims=True))
        # A row that has seen only -inf is shifted by 0, because -inf - (-inf)
        # is NaN.
        shift = jnp.where(higher == -jnp.inf, 0, higher)
        exps_TS, fade = jnp.exp(logits_TS - shift), jnp.exp(top - shift)
        size = size * fade + jnp.sum(exps_TS, axis=1, keepdims=True)
        out = out * fade + exps_TS @ v_SH.astype(jnp.float32)
        top = higher
    lse_T1 = jnp.where(
        size == 0, -jnp.inf, shift + jnp.log(jnp.where(size == 0, 1, size))
    )
    return out / jnp.where(size == 0, 1, size), lse_T1[:, 0]
    # END SOLUTION


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
    # BEGIN SOLUTION
    first_q = np.arange(0, T, block_q)[:, None]
    first_kv = np.arange(0, T, block_kv)[None]
    last_q = np.minimum(first_q + block_q, T) - 1
    last_kv = np.minimum(first_kv + block_kv, T) - 1
    # the least distance that is not in the future
    nearest = np.maximum(first_q - last_kv, 0)
    some = (first_kv <= last_q) & ((nearest < window) | (first_kv < prefix))
    # of keys that are not in the prefix
    farthest = last_q - np.maximum(first_kv, prefix)
    whole = (last_kv <= first_q) & ((farthest < window) | (last_kv < prefix))
    whole &= first_kv + block_kv <= T
    return some.astype(np.int32) + (some & whole)
    # END SOLUTION


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
    # BEGIN SOLUTION
    (N, T, H), G = q_NTH.shape, q_NTH.shape[0] // k_KTH.shape[0]
    # The first block of keys that a block of queries sees: where its first
    # token's segment begins.
    first_tokens = jnp.searchsorted(
        segments_T, segments_T[::block], side="left"
    )
    first_blocks = (first_tokens // block).astype(jnp.int32)

    def kernel(
        first_ref,
        q_seg_ref,
        k_seg_ref,
        q_ref,
        k_ref,
        v_ref,
        o_ref,
        top_ref,
        sum_ref,
        acc_ref,
    ):
        i, j = pl.program_id(1), pl.program_id(2)

        @pl.when(j == 0)
        def _():
            top_ref[...] = jnp.full_like(top_ref, -1e30)
            sum_ref[...] = jnp.zeros_like(sum_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when((j >= first_ref[i]) & (j <= i))
        def _():
            q, k, v = q_ref[...], k_ref[...], v_ref[...]
            logits = jnp.dot(
                q, k.T, preferred_element_type=jnp.float32
            ) / math.sqrt(H)
            t, s = (
                jax.lax.broadcasted_iota(jnp.int32, logits.shape, d)
                for d in (0, 1)
            )
            seen = (q_seg_ref[...] == k_seg_ref[...]) & ((j < i) | (s <= t))
            logits = jnp.where(seen, logits, -1e30)
            top = jnp.maximum(
                top_ref[...], jnp.max(logits, axis=1, keepdims=True)
            )
            exps, fade = jnp.exp(logits - top), jnp.exp(top_ref[...] - top)
            top_ref[...] = top
            sum_ref[...] = sum_ref[...] * fade + jnp.sum(
                exps, axis=1, keepdims=True
            )
            part = jnp.dot(
                exps.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            acc_ref[...] = acc_ref[...] * fade + part

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = (acc_ref[...] / sum_ref[...]).astype(o_ref.dtype)

    def key_block(i, j, first_ref):
        return jnp.clip(j, first_ref[i], i)

    query = pl.BlockSpec((None, block, H), lambda n, i, j, first_ref: (n, i, 0))
    key = pl.BlockSpec(
        (None, block, H),
        lambda n, i, j, first_ref: (n // G, key_block(i, j, first_ref), 0),
    )
    q_seg = pl.BlockSpec((block, 1), lambda n, i, j, first_ref: (i, 0))
    k_seg = pl.BlockSpec(
        (1, block), lambda n, i, j, first_ref: (0, key_block(i, j, first_ref))
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(N, T // block, T // block),
            in_specs=[q_seg, k_seg, query, key, key],
            out_specs=query,
            scratch_shapes=[
                pltpu.VMEM((block, width), jnp.float32) for width in (1, 1, H)
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_NTH.shape, q_NTH.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )(first_blocks, segments_T[:, None], segments_T[None], q_NTH, k_KTH, v_KTH)
    # END SOLUTION


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
    # BEGIN SOLUTION
    G, T, H = q_GTH.shape
    blocks = T // block

    def dot(a, b, contracted):
        dims = ((contracted[:1], contracted[1:]), ((), ()))
        return jax.lax.dot_general(
            a, b, dims, preferred_element_type=jnp.float32
        )

    def kernel(
        q_ref,
        k_ref,
        v_ref,
        grad_ref,
        lse_ref,
        delta_ref,
        dk_ref,
        dv_ref,
        dk_acc,
        dv_acc,
    ):
        j, g, i = (pl.program_id(d) for d in range(3))

        @pl.when((g == 0) & (i == 0))
        def _():
            dk_acc[...] = jnp.zeros_like(dk_acc)
            dv_acc[...] = jnp.zeros_like(dv_acc)

        @pl.when(i >= j)
        def _():
            q, grad = q_ref[...], grad_ref[...]
            logits = dot(q, k_ref[...], (1, 1)) / math.sqrt(H)
            t, s = (
                jax.lax.broadcasted_iota(jnp.int32, logits.shape, d)
                for d in (0, 1)
            )
            probs = jnp.where(
                (i > j) | (s <= t), jnp.exp(logits - lse_ref[...]), 0
            )
            grad_probs = dot(grad, v_ref[...], (1, 1))
            grad_logits = probs * (grad_probs - delta_ref[...])
            dv_acc[...] += dot(probs.astype(grad.dtype), grad, (0, 0))
            dk_acc[...] += dot(grad_logits.astype(q.dtype), q, (0, 0))

        @pl.when((g == G - 1) & (i == blocks - 1))
        def _():
            dk_ref[...] = (dk_acc[...] / math.sqrt(H)).astype(dk_ref.dtype)
            dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)

    query = pl.BlockSpec(
        (None, block, H), lambda j, g, i: (g, jnp.maximum(i, j), 0)
    )
    column = pl.BlockSpec(
        (None, block, 1), lambda j, g, i: (g, jnp.maximum(i, j), 0)
    )
    key = pl.BlockSpec((block, H), lambda j, g, i: (j, 0))
    return pl.pallas_call(
        kernel,
        grid=(blocks, G, blocks),
        in_specs=[query, key, key, query, column, column],
        out_specs=(key, key),
        out_shape=(jax.ShapeDtypeStruct(k_TH.shape, k_TH.dtype),) * 2,
        scratch_shapes=[pltpu.VMEM((block, H), jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
    )(q_GTH, k_TH, v_TH, grad_GTH, lse_GT[..., None], delta_GT[..., None])
    # END SOLUTION


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
    # BEGIN SOLUTION
    nothing_BTN = (lse_BTN == -jnp.inf) & (sinks_N == -jnp.inf)
    # Replaced before it is used: a gradient of 0 times NaN would be NaN.
    old_BTN = jnp.where(nothing_BTN, 0, lse_BTN)
    new_BTN = jnp.logaddexp(old_BTN, sinks_N)
    share_BTN = jnp.exp(old_BTN - new_BTN)
    out_BTNH = (out_BTNH * share_BTN[..., None]).astype(out_BTNH.dtype)
    return out_BTNH, jnp.where(nothing_BTN, -jnp.inf, new_BTN)
    # END SOLUTION
