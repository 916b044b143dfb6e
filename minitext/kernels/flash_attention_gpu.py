"""Flash attention for NVIDIA GPUs: Pallas kernels that JAX lowers to Triton.

The logits of a block of queries against a block of keys live in registers and are never written to memory; softmax is
taken on the way, with a running maximum and sum (Dao et al. 2022, https://arxiv.org/abs/2205.14135). One program of
the grid owns one block of the result, so that nothing is added from two places and two runs are bit-equal: the
backward pass is one kernel over blocks of queries for dq, and one over blocks of keys for dk and dv, which walks
through the query heads that share its key head. Both recompute the weights from the logits' log-sum-exp.

What a mask excludes is not visited. Causality and windows leave an interval of blocks, whose bounds are computed; its
ends are masked and its middle is not. A block-sparse mask leaves a list of blocks, which is read.

Chapters: 17.
"""

import functools
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from minitext.kernels.mask import ALL, CAUSAL, NONE, SOME, Mask

# As in `minitext.kernels.reference`: a query that sees no key gives its whole weight to a sink, and zero as its output.
MASKED, NO_SINK = -1e30, -5e29
LOG2_E = math.log2(math.e)  # the GPU computes powers of 2, so logits are kept in that base
MIN_BLOCK = 16  # a matrix product of Triton's has no smaller side
HEAD_DIMS = (16, 32, 64, 128, 256)


class Tile(NamedTuple):
    """One kernel's block: its queries and keys, the warps that share it, and the stages of its loop's pipeline."""

    q: int
    k: int
    warps: int
    stages: int


class BlockShapes(NamedTuple):
    """The blocks of the three kernels."""

    forward: Tile
    dq: Tile
    dkv: Tile


WIDE = BlockShapes(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2))
# Float32 takes twice the registers, and its products are not done by the matrix units.
NARROW = BlockShapes(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2))


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
    shapes = blocks or (NARROW if q_BTNH.dtype == jnp.float32 else WIDE)
    plan = Plan(mask, softcap, _fitted(shapes, q_BTNH.shape[1], mask))
    run = partial(_flash, plan)
    args = (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)
    if jax.sharding.get_abstract_mesh().empty:
        return run(*args)
    # The compiler can't look into a kernel, so each device runs it on its own rows and heads.
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, args)
    return jax.shard_map(run, in_specs=specs, out_specs=specs[0], check_vma=False)(*args)


def supports(
    q_BTNH, k_BSKH, v_BSKH, _segment_ids=None, *, platform: str, mask: Mask = CAUSAL, **_options
) -> str | None:
    """Returns the reason why the kernels can't compute this, or None."""
    if platform != "gpu":
        return f"it is a kernel for NVIDIA GPUs, and the program is for a {platform}"
    if q_BTNH.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"it computes in float32, bfloat16 or float16: got {q_BTNH.dtype}"
    if q_BTNH.shape[3] not in HEAD_DIMS or v_BSKH.shape[3] != q_BTNH.shape[3]:
        return f"it needs heads of {HEAD_DIMS}: got {q_BTNH.shape[3]} and {v_BSKH.shape[3]}"
    if k_BSKH.shape[1] != q_BTNH.shape[1]:
        return f"it needs as many keys as queries: got {k_BSKH.shape[1]} and {q_BTNH.shape[1]}"
    if mask.blocks is not None and mask.block % MIN_BLOCK:
        return f"it needs blocks of a multiple of {MIN_BLOCK} tokens: got mask.block={mask.block}"
    return None


def _fitted(shapes: BlockShapes, T: int, mask: Mask) -> BlockShapes:
    """Makes blocks no longer than the row, and so that each lies in one block of a block-sparse mask."""

    def fit(size: int) -> int:
        size = min(size, max(MIN_BLOCK, pl.next_power_of_2(T)))
        return size if mask.blocks is None else math.gcd(size, mask.block)

    return BlockShapes(*(tile._replace(q=fit(tile.q), k=fit(tile.k)) for tile in shapes))


# ---------------------------------------------------------------------------- which blocks meet


class Walk(NamedTuple):
    """The blocks that a program visits, as ranges of steps.

    Attributes:
      ranges: (low, high, masked): steps from low up to high, and whether positions must be compared in them.
      at: the block of a step.
    """

    ranges: list[tuple[Any, Any, bool]]
    at: Callable[[Any], Any]

    def run(self, visit: Callable, carry):
        """Returns `carry` after `visit(block, carry, masked=)` at every step."""
        for low, high, masked in self.ranges:
            step = lambda i, carry, masked=masked: visit(self.at(i), carry, masked)  # noqa: E731
            carry = jax.lax.fori_loop(low, high, step, carry)
        return carry


def _keys_of(i, tile: Tile, T: int, mask: Mask) -> Walk:
    """The blocks of keys that queries [i * q, (i + 1) * q) see; those that all of them see whole lie in the middle."""
    first, last = i * tile.q, (i + 1) * tile.q - 1
    low, whole_low, whole_high, high = 0, 0, T // tile.k, pl.cdiv(T, tile.k)
    if mask.causal:
        whole_high, high = (first + 1) // tile.k, jnp.minimum(high, last // tile.k + 1)
    if mask.window is not None:
        low = jnp.maximum(first - mask.window + 1, 0) // tile.k
        whole_low = pl.cdiv(jnp.maximum(last - mask.window + 1, 0), tile.k)
    ends = mask.window is not None, mask.causal or T % tile.k > 0
    return _interval(low, whole_low, whole_high, high, *ends)


def _queries_of(j, tile: Tile, T: int, mask: Mask) -> Walk:
    """The blocks of queries that see keys [j * k, (j + 1) * k)."""
    first, last = j * tile.k, (j + 1) * tile.k - 1
    low, whole_low, whole_high, high = 0, 0, T // tile.q, pl.cdiv(T, tile.q)
    if mask.causal:
        low, whole_low = first // tile.q, pl.cdiv(last, tile.q)
    if mask.window is not None:
        high = jnp.minimum(high, (last + mask.window - 1) // tile.q + 1)
        whole_high = jnp.minimum(whole_high, (first + mask.window) // tile.q)
    ends = mask.causal, mask.window is not None or T % tile.q > 0
    return _interval(low, whole_low, whole_high, high, *ends)


def _interval(low, whole_low, whole_high, high, first_masked: bool, last_masked: bool) -> Walk:
    ranges = []
    if first_masked:
        whole_low = jnp.minimum(whole_low, high)
        ranges.append((low, whole_low, True))
        low = whole_low
    if last_masked:
        whole_high = jnp.maximum(jnp.minimum(whole_high, high), low)
        return Walk([*ranges, (low, whole_high, False), (whole_high, high, True)], lambda i: i)
    return Walk([*ranges, (low, high, False)], lambda i: i)


def _listed(i, visits) -> Walk:
    """The blocks that a table lists for block i: first those that are seen whole."""
    blocks_ref, whole_ref, count_ref = visits
    whole, count = whole_ref[i], count_ref[i]
    return Walk([(0, whole, False), (whole, count, True)], lambda step: blocks_ref[i, step])


def _visits(tile: Tile, T: int, mask: Mask, of_keys: bool):
    """Returns a block-sparse mask's table, or None: blocks [n, most], how many of them are whole [n] and in all [n].

    It lists the blocks of keys that each block of queries visits, or with `of_keys` the blocks of queries of each
    block of keys.
    """
    if mask.blocks is None:
        return None
    kinds = mask.kinds(T, tile.q, tile.k)
    if of_keys:
        kinds = kinds.T
        kinds[:, -1] = np.minimum(
            kinds[:, -1], SOME if T % tile.q else ALL
        )  # it is loaded with care
    whole, count = np.sum(kinds == ALL, axis=1), np.sum(kinds != NONE, axis=1)
    order = np.argsort(-kinds, axis=1, kind="stable")[:, : max(1, count.max())]
    return tuple(jnp.asarray(x, jnp.int32) for x in (order, whole, count))


def _visible(i, j, tile: Tile, T: int, mask: Mask, masked: bool, q_segments, k_segments):
    """Which keys of block j the queries of block i see, [q, k], or None where that is all."""
    conditions = []
    if masked:
        rows = (i * tile.q + jnp.arange(tile.q))[:, None]
        columns = (j * tile.k + jnp.arange(tile.k))[None, :]
        if mask.causal or mask.window is not None:
            conditions.append(mask.sees(rows, columns))
        if T % tile.k:
            conditions.append(jnp.broadcast_to(columns < T, (tile.q, tile.k)))
    if q_segments is not None:
        conditions.append(q_segments[:, None] == k_segments[None, :])
    return functools.reduce(operator.and_, conditions) if conditions else None


# ---------------------------------------------------------------------------- in a block


def _rows(ref, block, size: int, T: int, masked: bool = True):
    """Loads a block of a reference's T rows; those past the end are 0. None for no reference."""
    if ref is None:
        return None
    rows = ref.at[pl.ds(block * size, size)]
    if not masked or T % size == 0:
        return plgpu.load(rows)
    inside = block * size + jnp.arange(size) < T
    mask = inside if len(rows.shape) == 1 else inside[:, None]
    return plgpu.load(rows, mask=jnp.broadcast_to(mask, rows.shape), other=0)


def _store(ref, block, value, T: int):
    """Stores block `block` of a reference's rows, without those past the end."""
    size = value.shape[0]
    value = value.astype(ref.dtype)
    at = ref.at[pl.ds(block * size, size)]
    if T % size == 0:
        return plgpu.store(at, value)
    inside = block * size + jnp.arange(size) < T
    mask = inside if value.ndim == 1 else inside[:, None]
    return plgpu.store(at, value, mask=jnp.broadcast_to(mask, value.shape))


def _dot(a, b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _logits(q, k, seen, plan: Plan):
    """Returns logits in base 2, and the softcap's derivative there, or None."""
    logits, slope = _dot(q, k.T) / math.sqrt(q.shape[1]), None
    if plan.softcap is not None:
        bounded = jnp.tanh(logits / plan.softcap)
        logits, slope = bounded * plan.softcap, 1 - bounded * bounded
    logits = logits * LOG2_E
    return logits if seen is None else jnp.where(seen, logits, MASKED), slope


def _weights(q, k, v, grad, lse, delta, seen, plan: Plan):
    """Returns softmax's weights, recomputed, and the gradient of the products q k^T / sqrt(H)."""
    logits, slope = _logits(q, k, seen, plan)
    weights = jnp.exp2(logits - lse[:, None])
    grad_logits = weights * (_dot(grad, v.T) - delta[:, None])
    return weights, grad_logits if slope is None else grad_logits * slope


# ---------------------------------------------------------------------------- the kernels


def _forward_kernel(
    q_ref, k_ref, v_ref, segments_ref, sinks_ref, visits, out_ref, lse_ref, *, plan
):
    """A block of queries: its rows of the output, and the log-sum-exp of their logits in base 2."""
    tile, (T, H) = plan.shapes.forward, k_ref.shape
    i = pl.num_programs(0) - 1 - pl.program_id(0)  # with a causal mask, those that see most first
    q, q_segments = _rows(q_ref, i, tile.q, T), _rows(segments_ref, i, tile.q, T)

    def visit(j, carry, masked):
        out, most, total = carry
        k, v = (_rows(ref, j, tile.k, T, masked) for ref in (k_ref, v_ref))
        seen = _visible(
            i, j, tile, T, plan.mask, masked, q_segments, _rows(segments_ref, j, tile.k, T, masked)
        )
        logits, _ = _logits(q, k, seen, plan)
        higher = jnp.maximum(most, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - higher[:, None])
        shrink = jnp.exp2(most - higher)
        out = out * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return out, higher, total * shrink + jnp.sum(weights, axis=1)

    # A sink is a key that was seen first, and whose value is 0.
    sink = NO_SINK if sinks_ref is None else sinks_ref[0].astype(jnp.float32) * LOG2_E
    carry = (
        jnp.zeros((tile.q, H), jnp.float32),
        jnp.full(tile.q, sink),
        jnp.ones(tile.q, jnp.float32),
    )
    walk = _listed(i, visits) if visits else _keys_of(i, tile, T, plan.mask)
    out, most, total = walk.run(visit, carry)
    _store(out_ref, i, out / total[:, None], T)
    _store(lse_ref, i, most + jnp.log2(total), T)


def _dq_kernel(
    q_ref, k_ref, v_ref, segments_ref, grad_ref, lse_ref, delta_ref, visits, dq_ref, *, plan
):
    """A block of queries: their gradient."""
    tile, (T, H) = plan.shapes.dq, k_ref.shape
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    q, q_segments, grad, lse, delta = (
        _rows(ref, i, tile.q, T) for ref in (q_ref, segments_ref, grad_ref, lse_ref, delta_ref)
    )

    def visit(j, dq, masked):
        k, v, k_segments = (
            _rows(ref, j, tile.k, T, masked) for ref in (k_ref, v_ref, segments_ref)
        )
        seen = _visible(i, j, tile, T, plan.mask, masked, q_segments, k_segments)
        _, grad_logits = _weights(q, k, v, grad, lse, delta, seen, plan)
        return dq + _dot(grad_logits.astype(k.dtype), k)

    walk = _listed(i, visits) if visits else _keys_of(i, tile, T, plan.mask)
    dq = walk.run(visit, jnp.zeros((tile.q, H), jnp.float32))
    _store(dq_ref, i, dq / math.sqrt(H), T)


def _dkv_kernel(
    q_ref, k_ref, v_ref, segments_ref, grad_ref, lse_ref, delta_ref, visits, dk_ref, dv_ref, *, plan
):
    """A block of keys and values: their gradients, summed over the query heads that they serve."""
    tile, (T, G, H) = plan.shapes.dkv, q_ref.shape
    j = pl.program_id(0)  # with a causal mask, those that are seen most come first
    k, v, k_segments = (_rows(ref, j, tile.k, T) for ref in (k_ref, v_ref, segments_ref))
    walk = _listed(j, visits) if visits else _queries_of(j, tile, T, plan.mask)

    def head(g, carry):
        def visit(i, carry, masked):
            dk, dv = carry
            q, grad = (_rows(ref.at[:, g], i, tile.q, T, masked) for ref in (q_ref, grad_ref))
            lse, delta = (_rows(ref.at[g], i, tile.q, T, masked) for ref in (lse_ref, delta_ref))
            q_segments = _rows(segments_ref, i, tile.q, T, masked)
            seen = _visible(i, j, tile, T, plan.mask, masked, q_segments, k_segments)
            weights, grad_logits = _weights(q, k, v, grad, lse, delta, seen, plan)
            dv = dv + _dot(weights.astype(grad.dtype).T, grad)
            return dk + _dot(grad_logits.astype(q.dtype).T, q), dv

        return walk.run(visit, carry)

    zeros = jnp.zeros((tile.k, H), jnp.float32)
    dk, dv = jax.lax.fori_loop(0, G, head, (zeros, zeros))
    _store(dk_ref, j, dk / math.sqrt(H), T)
    _store(dv_ref, j, dv, T)


# ---------------------------------------------------------------------------- the calls


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: Plan, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N):
    return _flash_forward(plan, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)[0]


def _flash_forward(plan: Plan, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N):
    (B, T, N, H), G = q_BTNH.shape, q_BTNH.shape[2] // k_BSKH.shape[2]
    tile = plan.shapes.forward
    queries = pl.BlockSpec((None, T, None, H), lambda _, n, b: (b, 0, n, 0))
    keys = pl.BlockSpec((None, T, None, H), lambda _, n, b: (b, 0, n // G, 0))
    visits = _visits(tile, T, plan.mask, of_keys=False)
    out_BTNH, lse_BNT = pl.pallas_call(
        partial(_forward_kernel, plan=plan),
        grid=(pl.cdiv(T, tile.q), N, B),
        in_specs=[
            queries, keys, keys,
            _segments_spec(segment_ids_BT),
            None if sinks_N is None else pl.BlockSpec((1,), lambda _, n, b: (n,)),
            jax.tree.map(_whole, visits),
        ],
        out_specs=[queries, pl.BlockSpec((None, None, T), lambda _, n, b: (b, n, 0))],
        out_shape=[q_BTNH, jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        compiler_params=_params(tile),
        name="flash_attention_forward",
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N, visits)  # fmt: skip
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
    visits = _visits(tile, T, plan.mask, of_keys=False)
    segments = _segments_spec(segment_ids_BT)
    return pl.pallas_call(
        partial(_dq_kernel, plan=plan),
        grid=(pl.cdiv(T, tile.q), N, B),
        in_specs=[queries, keys, keys, segments, queries, rows, rows, jax.tree.map(_whole, visits)],
        out_specs=queries,
        out_shape=q_BTNH,
        compiler_params=_params(tile),
        name="flash_attention_dq",
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, grad_BTNH, lse_BNT, delta_BNT, visits)


def _dkv(plan: Plan, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, grad_BTNH, lse_BNT, delta_BNT):
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    tile, G = plan.shapes.dkv, N // K
    queries = pl.BlockSpec((None, T, G, H), lambda _, k, b: (b, 0, k, 0))
    keys = pl.BlockSpec((None, T, None, H), lambda _, k, b: (b, 0, k, 0))
    rows = pl.BlockSpec((None, G, T), lambda _, k, b: (b, k, 0))
    visits = _visits(tile, T, plan.mask, of_keys=True)
    segments = _segments_spec(segment_ids_BT)
    return pl.pallas_call(
        partial(_dkv_kernel, plan=plan),
        grid=(pl.cdiv(T, tile.k), K, B),
        in_specs=[queries, keys, keys, segments, queries, rows, rows, jax.tree.map(_whole, visits)],
        out_specs=[keys, keys],
        out_shape=[k_BSKH, v_BSKH],
        compiler_params=_params(tile),
        name="flash_attention_dkv",
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, grad_BTNH, lse_BNT, delta_BNT, visits)


def _segments_spec(segment_ids_BT):
    if segment_ids_BT is None:
        return None
    return pl.BlockSpec((None, segment_ids_BT.shape[1]), lambda _, n, b: (b, 0))


def _whole(array):
    """Every program may read all of it."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _params(tile: Tile):
    return plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
