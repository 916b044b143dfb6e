"""Flash attention for NVIDIA GPUs: Pallas kernels that JAX lowers to Triton.

The logits of a block of queries against a block of keys stay in registers and are never written to memory. Softmax
uses a running maximum and sum (Dao et al. 2022, https://arxiv.org/abs/2205.14135). Each program of the grid owns one
block of the result, so no two programs add to the same numbers and two runs are bit-equal. The backward pass has one
kernel over blocks of queries for dq, and one over blocks of keys for dk and dv, which loops over the query heads that
share its key head. Both recompute the weights from the logits' log-sum-exp.

Chapters: 17.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from minitext.kernels.attention.gpu_blocks import (
    Tile,
    keys_of,
    load_rows,
    queries_of,
    sparse_table,
    store_rows,
    visible,
)
from minitext.kernels.attention.mask import CAUSAL, Mask
from minitext.kernels.attention.xla import MASKED, NO_SINK
from minitext.kernels.per_device import attention_reason, on_each_device
from minitext.kernels.tiles_gpu import LOG2_E, MIN_TILE, dot, params, scaled_exp2, whole

HEAD_DIMS = (16, 32, 64, 128, 256)


class BlockShapes(NamedTuple):
    """The blocks of the three kernels."""

    forward: Tile
    dq: Tile
    dkv: Tile


BLOCKS = BlockShapes(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))
# Float32 takes twice the registers, and the matrix units don't multiply it.
BLOCKS_F32 = BlockShapes(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2))


class Plan(NamedTuple):
    """What a kernel needs at tracing time, beside the shapes of its arguments.

    Attributes:
      mask: which keys a query sees.
      softcap: c of c tanh(x / c), or None.
      shapes: the kernels' blocks.
    """

    mask: Mask
    softcap: float | None
    shapes: BlockShapes


def flash_attention(
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=None, *,
    mask: Mask = CAUSAL, softcap: float | None = None, sinks_N=None, blocks: BlockShapes | None = None,
) -> jax.Array:  # fmt: skip
    """Computes `minitext.kernels.attention` in float32, bfloat16 or float16, by default in blocks that suit the type.

    On a mesh each device computes its own rows and heads.
    """
    shapes = blocks or (BLOCKS_F32 if q_BTNH.dtype == jnp.float32 else BLOCKS)
    plan = Plan(mask, softcap, _fitted(shapes, q_BTNH.shape[1], mask))
    return on_each_device(partial(_flash, plan), q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)


def supports(
    q_BTNH, k_BSKH, v_BSKH, _segment_ids=None, *, mask: Mask = CAUSAL, **_options
) -> str | None:
    """Returns why the kernels can't compute this, or None."""
    if q_BTNH.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"it computes in float32, bfloat16 or float16: got {q_BTNH.dtype}"
    if q_BTNH.shape[3] not in HEAD_DIMS or v_BSKH.shape[3] != q_BTNH.shape[3]:
        return f"it needs heads of {HEAD_DIMS}: got {q_BTNH.shape[3]} and {v_BSKH.shape[3]}"
    if k_BSKH.shape[1] != q_BTNH.shape[1]:
        return f"it needs as many keys as queries: got {k_BSKH.shape[1]} and {q_BTNH.shape[1]}"
    if mask.blocks is not None and mask.block % MIN_TILE:
        return f"it needs blocks of a multiple of {MIN_TILE} tokens: got mask.block={mask.block}"
    return attention_reason(q_BTNH, k_BSKH)


def _fitted(shapes: BlockShapes, T: int, mask: Mask) -> BlockShapes:
    """Shrinks blocks to the length of the row, and to divisors of a block-sparse mask's blocks."""

    def fit(size: int) -> int:
        size = min(size, max(MIN_TILE, pl.next_power_of_2(T)))
        return size if mask.blocks is None else math.gcd(size, mask.block)

    return BlockShapes(*(tile._replace(q=fit(tile.q), k=fit(tile.k)) for tile in shapes))


# ---------------------------------------------------------------------------- in a block


def _logits(x, y, seen, plan: Plan):
    """Returns the logits x y^T in a unit of their own, that unit in base 2, and the softcap's derivative, or None."""
    logits, scale, slope = dot(x, y.T), 1 / math.sqrt(x.shape[1]), None
    unit = scale * LOG2_E
    if plan.softcap is not None:
        logits, unit = jnp.tanh(logits * (scale / plan.softcap)), plan.softcap * LOG2_E
        slope = 1 - logits * logits
    return logits if seen is None else jnp.where(seen, logits, MASKED / unit), unit, slope


def _weights(x, y, products, shift, delta, seen, plan: Plan):
    """Returns softmax's weights, recomputed, and the gradient of the logits before the softcap.

    Args:
      x: queries, or keys.
      y: keys, or queries.
      products: of the output's gradients and the values, in the same order as x and y.
      shift: negative log-sum-exps of the queries in base 2, broadcast along keys.
      delta: products of the queries' outputs and their gradients, likewise.
      seen: what `visible` returns.
      plan: the kernel's plan.
    """
    logits, unit, slope = _logits(x, y, seen, plan)
    weights = scaled_exp2(logits, unit, shift)
    grad_logits = weights * (products - delta)
    return weights, grad_logits if slope is None else grad_logits * slope


def _places(block, size: int, axis: int):
    """Positions of a block's rows, along an axis of two."""
    return _along(block * size + jnp.arange(size), axis)


def _along(x, axis: int) -> Any:
    return None if x is None else jnp.expand_dims(x, 1 - axis)


# ---------------------------------------------------------------------------- the kernels


def _forward_kernel(q_ref, k_ref, v_ref, segments_ref, sinks_ref, table, out_ref, lse_ref, *, plan):
    """Computes a block of queries: its output, and the log-sum-exp of its logits in base 2."""
    tile, (T, H) = plan.shapes.forward, k_ref.shape
    i = pl.num_programs(0) - 1 - pl.program_id(0)  # with a causal mask, the longest work first
    q, t_segments = (load_rows(ref, i, tile.q, T) for ref in (q_ref, segments_ref))
    t, t_segments = _places(i, tile.q, 0), _along(t_segments, 0)

    def visit(j, carry, masked):
        out, most, total = carry
        k, v, s_segments = (
            load_rows(ref, j, tile.k, T, masked) for ref in (k_ref, v_ref, segments_ref)
        )
        s, s_segments = _places(j, tile.k, 1), _along(s_segments, 1)
        seen = visible(t, s, T, plan.mask, masked, t_segments, s_segments)
        logits, unit, _ = _logits(q, k, seen, plan)
        higher = jnp.maximum(most, jnp.max(logits, axis=1) * unit)
        weights = scaled_exp2(logits, unit, -_along(higher, 0))
        shrink = jnp.exp2(most - higher)
        out = out * _along(shrink, 0) + dot(weights.astype(v.dtype), v)
        return out, higher, total * shrink + jnp.sum(weights, axis=1)

    # A sink is like a key that was seen first and has the value 0.
    sink = NO_SINK if sinks_ref is None else sinks_ref[0].astype(jnp.float32) * LOG2_E
    most, total = jnp.full(tile.q, sink), jnp.ones(tile.q, jnp.float32)
    walk = keys_of(i, tile, T, plan.mask, table)
    out, most, total = walk.run(visit, (jnp.zeros((tile.q, H), jnp.float32), most, total))
    store_rows(out_ref, i, out * _along(1 / total, 0), T)
    store_rows(lse_ref, i, most + jnp.log2(total), T)


def _dq_kernel(
    q_ref, k_ref, v_ref, segments_ref, grad_ref, shift_ref, delta_ref, table, dq_ref, *, plan
):
    """Computes the gradient of a block of queries."""
    tile, (T, H) = plan.shapes.dq, k_ref.shape
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    q, grad = (load_rows(ref, i, tile.q, T) for ref in (q_ref, grad_ref))
    shift, delta, t_segments = (
        _along(load_rows(ref, i, tile.q, T), 0) for ref in (shift_ref, delta_ref, segments_ref)
    )
    t = _places(i, tile.q, 0)

    def visit(j, dq, masked):
        k, v, s_segments = (
            load_rows(ref, j, tile.k, T, masked) for ref in (k_ref, v_ref, segments_ref)
        )
        s, s_segments = _places(j, tile.k, 1), _along(s_segments, 1)
        seen = visible(t, s, T, plan.mask, masked, t_segments, s_segments)
        _, grad_logits = _weights(q, k, dot(grad, v.T), shift, delta, seen, plan)
        return dq + dot(grad_logits.astype(k.dtype), k)

    walk = keys_of(i, tile, T, plan.mask, table)
    dq = walk.run(visit, jnp.zeros((tile.q, H), jnp.float32))
    store_rows(dq_ref, i, dq / math.sqrt(H), T)


def _dkv_kernel(
    q_ref,
    k_ref,
    v_ref,
    segments_ref,
    grad_ref,
    shift_ref,
    delta_ref,
    table,
    dk_ref,
    dv_ref,
    *,
    plan,
):
    """Computes the gradients of a block of keys and values, summed over the query heads that share them.

    Logits are transposed, [keys, queries]: as the left factor of the products that follow, they stay in registers.
    """
    tile, (T, G, H) = plan.shapes.dkv, q_ref.shape
    j = pl.program_id(0)  # with a causal mask, the longest work first
    k, v, s_segments = (load_rows(ref, j, tile.k, T) for ref in (k_ref, v_ref, segments_ref))
    s, s_segments = _places(j, tile.k, 0), _along(s_segments, 0)
    walk = queries_of(j, tile, T, plan.mask, table)

    def head(g, carry):
        def visit(i, carry, masked):
            dk, dv = carry
            q, grad, shift, delta = (
                load_rows(ref, i, tile.q, T, masked, g)
                for ref in (q_ref, grad_ref, shift_ref, delta_ref)
            )
            t_segments = _along(load_rows(segments_ref, i, tile.q, T, masked), 1)
            t, shift, delta = _places(i, tile.q, 1), _along(shift, 1), _along(delta, 1)
            seen = visible(t, s, T, plan.mask, masked, t_segments, s_segments)
            weights, grad_logits = _weights(k, q, dot(v, grad.T), shift, delta, seen, plan)
            dv = dv + dot(weights.astype(grad.dtype), grad)
            return dk + dot(grad_logits.astype(q.dtype), q), dv

        return walk.run(visit, carry)

    zeros = jnp.zeros((tile.k, H), jnp.float32)
    dk, dv = jax.lax.fori_loop(0, G, head, (zeros, zeros))
    store_rows(dk_ref, j, dk / math.sqrt(H), T)
    store_rows(dv_ref, j, dv, T)


# ---------------------------------------------------------------------------- the calls


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: Plan, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N):
    return _flash_forward(plan, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)[0]


def _flash_forward(plan: Plan, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N):
    B, T, N, _ = q_BTNH.shape
    tile = plan.shapes.forward
    queries, keys, segments, rows = _specs(q_BTNH, k_BSKH, segment_ids_BT)
    table = sparse_table(tile, T, plan.mask)
    out_BTNH, lse_BNT = pl.pallas_call(
        partial(_forward_kernel, plan=plan),
        grid=(pl.cdiv(T, tile.q), N, B),
        in_specs=[
            queries, keys, keys, segments,
            None if sinks_N is None else pl.BlockSpec((1,), lambda _, n, b: (n,)),
            jax.tree.map(whole, table),
        ],
        out_specs=[queries, rows],
        out_shape=[q_BTNH, jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        compiler_params=params(tile),
        name="flash_attention_forward",
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N, table)  # fmt: skip
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N, out_BTNH, lse_BNT)


def _flash_backward(plan: Plan, residuals, grad_BTNH):
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N, out_BTNH, lse_BNT = residuals
    delta_BNT = jnp.einsum(
        "BTNH,BTNH->BNT", grad_BTNH.astype(jnp.float32), out_BTNH.astype(jnp.float32)
    )
    args = q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, grad_BTNH, -lse_BNT, delta_BNT
    dsinks_N = None
    if sinks_N is not None:
        weights_BNT = jnp.exp2(sinks_N.astype(jnp.float32)[:, None] * LOG2_E - lse_BNT)
        dsinks_N = -jnp.sum(weights_BNT * delta_BNT, axis=(0, 2)).astype(sinks_N.dtype)
    dq_BTNH = _gradient(_dq_kernel, plan, plan.shapes.dq, args, by_key=False)
    dk_BSKH, dv_BSKH = _gradient(_dkv_kernel, plan, plan.shapes.dkv, args, by_key=True)
    return dq_BTNH, dk_BSKH, dv_BSKH, None, dsinks_N


_flash.defvjp(_flash_forward, _flash_backward)


def _gradient(kernel, plan: Plan, tile: Tile, args, *, by_key: bool):
    """Calls a backward kernel, for blocks of queries or, with `by_key`, of keys."""
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, *_ = args
    B, T, N, _ = q_BTNH.shape
    queries, keys, segments, rows = _specs(q_BTNH, k_BSKH, segment_ids_BT, by_key)
    table = sparse_table(tile, T, plan.mask, of_keys=by_key)
    blocks, heads = (tile.k, k_BSKH.shape[2]) if by_key else (tile.q, N)
    return pl.pallas_call(
        partial(kernel, plan=plan),
        grid=(pl.cdiv(T, blocks), heads, B),
        in_specs=[queries, keys, keys, segments, queries, rows, rows, jax.tree.map(whole, table)],
        out_specs=[keys, keys] if by_key else queries,
        out_shape=[k_BSKH, v_BSKH] if by_key else q_BTNH,
        compiler_params=params(tile),
        name="flash_attention" + kernel.__name__.removesuffix("_kernel"),
    )(*args, table)


def _specs(q_BTNH, k_BSKH, segment_ids_BT, by_key: bool = False):
    """Returns a program's part of queries, of keys, of segments, and of numbers per query [B, N, T].

    That is one query head and its key head or, with `by_key`, one key head and all of its query heads.
    """
    (_, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    G = N // K
    segments = None if segment_ids_BT is None else pl.BlockSpec((None, T), lambda _, n, b: (b, 0))
    if by_key:
        return (
            pl.BlockSpec((None, T, G, H), lambda _, k, b: (b, 0, k, 0)),
            pl.BlockSpec((None, T, None, H), lambda _, k, b: (b, 0, k, 0)),
            segments,
            pl.BlockSpec((None, G, T), lambda _, k, b: (b, k, 0)),
        )
    return (
        pl.BlockSpec((None, T, None, H), lambda _, n, b: (b, 0, n, 0)),
        pl.BlockSpec((None, T, None, H), lambda _, n, b: (b, 0, n // G, 0)),
        segments,
        pl.BlockSpec((None, None, T), lambda _, n, b: (b, n, 0)),
    )
