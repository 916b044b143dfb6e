"""Flash attention for NVIDIA GPUs: Pallas kernels that JAX lowers to Triton.

The logits of a block of queries against a block of keys live in registers and are never written to memory; softmax is
taken on the way, with a running maximum and sum (Dao et al. 2022, https://arxiv.org/abs/2205.14135). One program of
the grid owns one block of the result, so that nothing is added from two places and two runs are bit-equal: the
backward pass is one kernel over blocks of queries for dq, and one over blocks of keys for dk and dv, which walks
through the query heads that share its key head. Both recompute the weights from the logits' log-sum-exp.

Chapters: 17.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

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
from minitext.kernels.tiles_gpu import MIN_TILE, dot

# As in `minitext.kernels.attention.xla`: a query that sees no key gives its whole weight to a sink, and zero as its output.
MASKED, NO_SINK = -1e30, -5e29
LOG2_E = math.log2(math.e)  # the GPU computes powers of 2, so logits are kept in that base
HEAD_DIMS = (16, 32, 64, 128, 256)


class BlockShapes(NamedTuple):
    """The blocks of the three kernels."""

    forward: Tile
    dq: Tile
    dkv: Tile


BLOCKS = BlockShapes(Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2))
# Float32 takes twice the registers, and its products are not done by the matrix units.
BLOCKS_F32 = BlockShapes(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2))


class Plan(NamedTuple):
    """What is known when a kernel is traced, besides its arguments' shapes.

    Attributes:
      mask: which keys a query sees.
      softcap: c of c tanh(x / c), or None.
      shapes: the kernels' blocks.
    """

    mask: Mask
    softcap: float | None
    shapes: BlockShapes


def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    blocks: BlockShapes | None = None,
) -> jax.Array:
    """Attention as `minitext.kernels.attention` defines it; batch and heads may be spread over a mesh.

    Args:
      q_BTNH: [B, T, N, H] queries in float32, bfloat16 or float16.
      k_BSKH: [B, S, K, H] keys, S = T, of which each serves N/K query heads.
      v_BSKH: [B, S, K, H] values.
      segment_ids_BT: [B, T] integers, or None.
      mask: which keys a query sees.
      softcap: bounds the logits, or None.
      sinks_N: [N] logits that take part in softmax and have no value, or None.
      blocks: the kernels' blocks; by default what suits the type.

    Returns:
      [B, T, N, H] in the queries' type; zero where a query sees no key.
    """
    shapes = blocks or (BLOCKS_F32 if q_BTNH.dtype == jnp.float32 else BLOCKS)
    plan = Plan(mask, softcap, _fitted(shapes, q_BTNH.shape[1], mask))
    run = partial(_flash, plan)
    args = (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)
    if jax.sharding.get_abstract_mesh().empty:
        return run(*args)
    # The compiler can't look into a kernel, so each device runs it on its own rows and heads.
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, args)
    return jax.shard_map(run, in_specs=specs, out_specs=specs[0], check_vma=False)(*args)


def supports(
    q_BTNH, k_BSKH, v_BSKH, _segment_ids=None, *, mask: Mask = CAUSAL, **_options
) -> str | None:
    """Returns the reason why the kernels can't compute this, or None."""
    if q_BTNH.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"it computes in float32, bfloat16 or float16: got {q_BTNH.dtype}"
    if q_BTNH.shape[3] not in HEAD_DIMS or v_BSKH.shape[3] != q_BTNH.shape[3]:
        return f"it needs heads of {HEAD_DIMS}: got {q_BTNH.shape[3]} and {v_BSKH.shape[3]}"
    if k_BSKH.shape[1] != q_BTNH.shape[1]:
        return f"it needs as many keys as queries: got {k_BSKH.shape[1]} and {q_BTNH.shape[1]}"
    if mask.blocks is not None and mask.block % MIN_TILE:
        return f"it needs blocks of a multiple of {MIN_TILE} tokens: got mask.block={mask.block}"
    if not jax.sharding.get_abstract_mesh().empty:
        q_spec, k_spec = (jax.typeof(x).sharding.spec for x in (q_BTNH, k_BSKH))
        if q_spec[1] or k_spec[1]:
            return f"it needs a device's rows whole, and tokens are split over {q_spec[1]}"
        if q_spec[2] != k_spec[2]:
            return f"heads are split over {q_spec[2]} and kv heads over {k_spec[2]}: split both or none"
    return None


def _fitted(shapes: BlockShapes, T: int, mask: Mask) -> BlockShapes:
    """Makes blocks no longer than the row, and so that each lies in one block of a block-sparse mask."""

    def fit(size: int) -> int:
        size = min(size, max(MIN_TILE, pl.next_power_of_2(T)))
        return size if mask.blocks is None else math.gcd(size, mask.block)

    return BlockShapes(*(tile._replace(q=fit(tile.q), k=fit(tile.k)) for tile in shapes))


# ---------------------------------------------------------------------------- in a block


def _logits(x, y, seen, plan: Plan):
    """Returns the logits x y^T in base 2, and the softcap's derivative there, or None."""
    products, scale = dot(x, y.T), 1 / math.sqrt(x.shape[1])
    if plan.softcap is None:
        logits, slope = products * (scale * LOG2_E), None
    else:
        bounded = jnp.tanh(products * (scale / plan.softcap))
        logits, slope = bounded * (plan.softcap * LOG2_E), 1 - bounded * bounded
    return logits if seen is None else jnp.where(seen, logits, MASKED), slope


def _weights(x, y, products, lse, delta, seen, plan: Plan):
    """Returns softmax's weights, recomputed, and the gradient of the logits before the softcap.

    Args:
      x: queries, or keys.
      y: keys, or queries.
      products: of the output's gradients and the values, in the same order.
      lse: log-sum-exps of the queries; broadcast along keys.
      delta: products of the queries' outputs and their gradients; likewise.
      seen: see `visible`.
      plan: what is known.
    """
    logits, slope = _logits(x, y, seen, plan)
    weights = jnp.exp2(logits - lse)
    grad_logits = weights * (products - delta)
    return weights, grad_logits if slope is None else grad_logits * slope


def _places(block, size: int, axis: int):
    """Positions of a block's rows, along an axis of two."""
    return _along(block * size + jnp.arange(size), axis)


def _along(x, axis: int) -> Any:
    return None if x is None else jnp.expand_dims(x, 1 - axis)


# ---------------------------------------------------------------------------- the kernels


def _forward_kernel(q_ref, k_ref, v_ref, segments_ref, sinks_ref, table, out_ref, lse_ref, *, plan):
    """A block of queries: its rows of the output, and the log-sum-exp of their logits in base 2."""
    tile, (T, H) = plan.shapes.forward, k_ref.shape
    i = pl.num_programs(0) - 1 - pl.program_id(0)  # with a causal mask, those that see most first
    q, t_segments = (load_rows(ref, i, tile.q, T) for ref in (q_ref, segments_ref))
    t, t_segments = _places(i, tile.q, 0), _along(t_segments, 0)

    def visit(j, carry, masked):
        out, most, total = carry
        k, v, s_segments = (
            load_rows(ref, j, tile.k, T, masked) for ref in (k_ref, v_ref, segments_ref)
        )
        s, s_segments = _places(j, tile.k, 1), _along(s_segments, 1)
        seen = visible(t, s, T, plan.mask, masked, t_segments, s_segments)
        logits, _ = _logits(q, k, seen, plan)
        higher = jnp.maximum(most, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - _along(higher, 0))
        shrink = jnp.exp2(most - higher)
        out = out * _along(shrink, 0) + dot(weights.astype(v.dtype), v)
        return out, higher, total * shrink + jnp.sum(weights, axis=1)

    # A sink is a key that was seen first, and whose value is 0.
    sink = NO_SINK if sinks_ref is None else sinks_ref[0].astype(jnp.float32) * LOG2_E
    most, total = jnp.full(tile.q, sink), jnp.ones(tile.q, jnp.float32)
    walk = keys_of(i, tile, T, plan.mask, table)
    out, most, total = walk.run(visit, (jnp.zeros((tile.q, H), jnp.float32), most, total))
    store_rows(out_ref, i, out / _along(total, 0), T)
    store_rows(lse_ref, i, most + jnp.log2(total), T)


def _dq_kernel(
    q_ref, k_ref, v_ref, segments_ref, grad_ref, lse_ref, delta_ref, table, dq_ref, *, plan
):
    """A block of queries: their gradient."""
    tile, (T, H) = plan.shapes.dq, k_ref.shape
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    q, grad = (load_rows(ref, i, tile.q, T) for ref in (q_ref, grad_ref))
    lse, delta, t_segments = (
        _along(load_rows(ref, i, tile.q, T), 0) for ref in (lse_ref, delta_ref, segments_ref)
    )
    t = _places(i, tile.q, 0)

    def visit(j, dq, masked):
        k, v, s_segments = (
            load_rows(ref, j, tile.k, T, masked) for ref in (k_ref, v_ref, segments_ref)
        )
        s, s_segments = _places(j, tile.k, 1), _along(s_segments, 1)
        seen = visible(t, s, T, plan.mask, masked, t_segments, s_segments)
        _, grad_logits = _weights(q, k, dot(grad, v.T), lse, delta, seen, plan)
        return dq + dot(grad_logits.astype(k.dtype), k)

    walk = keys_of(i, tile, T, plan.mask, table)
    dq = walk.run(visit, jnp.zeros((tile.q, H), jnp.float32))
    store_rows(dq_ref, i, dq / math.sqrt(H), T)


def _dkv_kernel(
    q_ref, k_ref, v_ref, segments_ref, grad_ref, lse_ref, delta_ref, table, dk_ref, dv_ref, *, plan
):
    """A block of keys and values: their gradients, summed over the query heads that they serve.

    Logits are transposed, [keys, queries]: they are the left side of the products that follow, and stay in registers.
    """
    tile, (T, G, H) = plan.shapes.dkv, q_ref.shape
    j = pl.program_id(0)  # with a causal mask, those that are seen most come first
    k, v, s_segments = (load_rows(ref, j, tile.k, T) for ref in (k_ref, v_ref, segments_ref))
    s, s_segments = _places(j, tile.k, 0), _along(s_segments, 0)
    walk = queries_of(j, tile, T, plan.mask, table)

    def head(g, carry):
        def visit(i, carry, masked):
            dk, dv = carry
            q, grad, lse, delta = (
                load_rows(ref, i, tile.q, T, masked, g)
                for ref in (q_ref, grad_ref, lse_ref, delta_ref)
            )
            t_segments = _along(load_rows(segments_ref, i, tile.q, T, masked), 1)
            t, lse, delta = _places(i, tile.q, 1), _along(lse, 1), _along(delta, 1)
            seen = visible(t, s, T, plan.mask, masked, t_segments, s_segments)
            weights, grad_logits = _weights(k, q, dot(v, grad.T), lse, delta, seen, plan)
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
    (B, T, N, H), G = q_BTNH.shape, q_BTNH.shape[2] // k_BSKH.shape[2]
    tile = plan.shapes.forward
    queries = pl.BlockSpec((None, T, None, H), lambda _, n, b: (b, 0, n, 0))
    keys = pl.BlockSpec((None, T, None, H), lambda _, n, b: (b, 0, n // G, 0))
    table = sparse_table(tile, T, plan.mask)
    out_BTNH, lse_BNT = pl.pallas_call(
        partial(_forward_kernel, plan=plan),
        grid=(pl.cdiv(T, tile.q), N, B),
        in_specs=[
            queries, keys, keys,
            _segments_spec(segment_ids_BT),
            None if sinks_N is None else pl.BlockSpec((1,), lambda _, n, b: (n,)),
            jax.tree.map(_whole, table),
        ],
        out_specs=[queries, pl.BlockSpec((None, None, T), lambda _, n, b: (b, n, 0))],
        out_shape=[q_BTNH, jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        compiler_params=_params(tile),
        name="flash_attention_forward",
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N, table)  # fmt: skip
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N, out_BTNH, lse_BNT)


def _flash_backward(plan: Plan, residuals, grad_BTNH):
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N, out_BTNH, lse_BNT = residuals
    delta_BNT = jnp.einsum(
        "BTNH,BTNH->BNT", grad_BTNH.astype(jnp.float32), out_BTNH.astype(jnp.float32)
    )
    args = q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, grad_BTNH, lse_BNT, delta_BNT
    dsinks_N = None
    if sinks_N is not None:
        weights_BNT = jnp.exp2(sinks_N.astype(jnp.float32)[:, None] * LOG2_E - lse_BNT)
        dsinks_N = -jnp.sum(weights_BNT * delta_BNT, axis=(0, 2)).astype(sinks_N.dtype)
    return _dq(plan, *args), *_dkv(plan, *args), None, dsinks_N


_flash.defvjp(_flash_forward, _flash_backward)


def _dq(plan: Plan, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, grad_BTNH, lse_BNT, delta_BNT):
    (B, T, N, H), G = q_BTNH.shape, q_BTNH.shape[2] // k_BSKH.shape[2]
    tile = plan.shapes.dq
    queries = pl.BlockSpec((None, T, None, H), lambda _, n, b: (b, 0, n, 0))
    keys = pl.BlockSpec((None, T, None, H), lambda _, n, b: (b, 0, n // G, 0))
    rows = pl.BlockSpec((None, None, T), lambda _, n, b: (b, n, 0))
    table = sparse_table(tile, T, plan.mask)
    segments = _segments_spec(segment_ids_BT)
    return pl.pallas_call(
        partial(_dq_kernel, plan=plan),
        grid=(pl.cdiv(T, tile.q), N, B),
        in_specs=[queries, keys, keys, segments, queries, rows, rows, jax.tree.map(_whole, table)],
        out_specs=queries,
        out_shape=q_BTNH,
        compiler_params=_params(tile),
        name="flash_attention_dq",
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, grad_BTNH, lse_BNT, delta_BNT, table)


def _dkv(plan: Plan, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, grad_BTNH, lse_BNT, delta_BNT):
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    tile, G = plan.shapes.dkv, N // K
    queries = pl.BlockSpec((None, T, G, H), lambda _, k, b: (b, 0, k, 0))
    keys = pl.BlockSpec((None, T, None, H), lambda _, k, b: (b, 0, k, 0))
    rows = pl.BlockSpec((None, G, T), lambda _, k, b: (b, k, 0))
    table = sparse_table(tile, T, plan.mask, of_keys=True)
    segments = _segments_spec(segment_ids_BT)
    return pl.pallas_call(
        partial(_dkv_kernel, plan=plan),
        grid=(pl.cdiv(T, tile.k), K, B),
        in_specs=[queries, keys, keys, segments, queries, rows, rows, jax.tree.map(_whole, table)],
        out_specs=[keys, keys],
        out_shape=[k_BSKH, v_BSKH],
        compiler_params=_params(tile),
        name="flash_attention_dkv",
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, grad_BTNH, lse_BNT, delta_BNT, table)


def _segments_spec(segment_ids_BT):
    if segment_ids_BT is None:
        return None
    return pl.BlockSpec((None, segment_ids_BT.shape[1]), lambda _, n, b: (b, 0))


def _whole(array):
    """Every program may read all of it."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _params(tile: Tile):
    return plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
