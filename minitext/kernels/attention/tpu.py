"""Flash attention for TPUs in Pallas: softmax(q k^T) v and its gradients, in blocks that stay in VMEM.

Softmax is computed online (Milakov & Gimelshein 2018): each block of logits is used at once, relative to the maximum
so far, and earlier sums are scaled down when the maximum rises. The backward pass recomputes the blocks from the saved
logsumexp (Dao et al. 2022; Dao 2023). As in JAX's splash attention
(jax.experimental.pallas.ops.tpu.splash_attention), the grid lists only the blocks that the mask leaves. So what the
mask excludes is neither loaded nor computed.

Logits are stored transposed, keys x queries. A query's maximum, sum and logsumexp are then one lane of a row, and
reductions over keys add whole registers instead of lanes within one.

Chapters: 17.
"""

import math
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from minitext.kernels import block_shapes
from minitext.kernels.attention.mask import ALL, CAUSAL, SOME, Mask
from minitext.kernels.attention.tpu_grid import (
    BLOCKS_BYTES,
    FIRST,
    LANES,
    LAST,
    BlockShape,
    Task,
    call,
    resident_bytes,
)  # fmt: skip
from minitext.kernels.attention.xla import MASKED, NO_SINK
from minitext.kernels.per_device import attention_reason, on_each_device
from minitext.kernels.tiles_tpu import dot

LOG2E = math.log2(math.e)
HEAD_DIM_STEP = 64
# Dimensions that a product sums over. N is a matrix as it is, T its transpose.
NT, NN, TN = (1, 1), (1, 0), (0, 0)


def flash_attention(
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=None, *,
    mask: Mask = CAUSAL, softcap: float | None = None, sinks_N=None, blocks: BlockShape | None = None,
) -> jax.Array:  # fmt: skip
    """Computes `minitext.kernels.attention` for any T, in memory linear in T.

    Matrix products take their inputs as they are and sum in float32; float32 inputs are multiplied at full precision.
    On a mesh each device computes its own rows and heads. `blocks` says how the work is divided, by default as in
    `block_shapes`; it's shrunk to fit T and the mask's blocks.
    """
    T = q_BTNH.shape[1]
    if blocks is None:
        row = block_shapes.find("flash_attention")
        blocks = BlockShape(row["q"], row["kv"])
    shape = blocks.fit(T, mask)
    chip = block_shapes.find_this_chip()
    if chip is not None and chip.vmem_bytes is not None:
        # XLA and the other kernels need the rest.
        room = 3 * chip.vmem_bytes // 4 - BLOCKS_BYTES
        fits = resident_bytes(T, k_BSKH.shape[3], k_BSKH.dtype.itemsize) <= room
        shape = shape._replace(resident=shape.resident and fits)
    task = Task(mask, softcap, T, shape)

    def heads_first(x_BTNH, block):
        x_BNTH = jnp.swapaxes(x_BTNH, 1, 2)
        return jnp.pad(x_BNTH, ((0, 0), (0, 0), (0, -T % block), (0, 0)))

    q_BNTH = heads_first(q_BTNH, shape.q)
    k_BKSH, v_BKSH = (heads_first(x, shape.kv) for x in (k_BSKH, v_BSKH))
    if sinks_N is not None and not jax.sharding.get_abstract_mesh().empty:
        sinks_N = jax.sharding.reshard(sinks_N, P(jax.typeof(q_BNTH).sharding.spec[1]))
    out_BNTH: Any = _flash(q_BNTH, k_BKSH, v_BKSH, segment_ids_BT, sinks_N, task)
    return jnp.swapaxes(out_BNTH[:, :, :T], 1, 2)


def supports(
    q_BTNH, k_BSKH, v_BSKH, _segments=None, *, mask: Mask = CAUSAL, **_options
) -> str | None:
    """Returns why the kernels can't compute this, or None."""
    H = q_BTNH.shape[3]
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it computes in bfloat16 or float32 and the queries are {q_BTNH.dtype}"
    if H % HEAD_DIM_STEP:
        return f"it needs heads of a multiple of {HEAD_DIM_STEP}, half a row of lanes: got {H}"
    if v_BSKH.shape[3] != H:
        return f"it needs values as wide as keys: got {v_BSKH.shape[3]} and {H}"
    if mask.blocks is not None and mask.block % LANES:
        return f"it needs a mask of blocks of a multiple of {LANES} tokens: got {mask.block}"
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and not mesh.are_all_axes_manual:
        # A pipeline stage, for example. JAX 0.10 expects another type of the gradient of a `custom_vjp` there.
        return f"it has no gradient where some axes of the mesh are manual, {mesh.manual_axes}, and others not"
    return attention_reason(q_BTNH, k_BSKH)


# --- the parts of a block --------------------------------------------------------------------------


def _units(task: Task, H: int) -> tuple[float, float]:
    """Returns two factors: from q k^T to the result of `_logits`, and from there to base-2 logits."""
    if task.softcap is None:
        return 1.0, LOG2E / math.sqrt(H)
    return 1 / (math.sqrt(H) * task.softcap), LOG2E * task.softcap


def _logits(task: Task, q, k):
    """Returns logits [tile_kv, tile_q] up to a factor, which costs nothing extra in the exponential."""
    logits = dot(k, q, NT)
    if task.softcap is not None:
        logits = jnp.tanh(logits * _units(task, q.shape[1])[0])
    return logits


def _seen(task: Task, q_block, kv_block, tile, q_segments_ref, kv_segments_ref, masked: bool):
    """Returns which keys of a tile its queries see, [tile_kv, tile_q] booleans, or None if all."""
    rows, cols = tile
    seen: Any = None
    if masked:
        t = q_block * task.shape.q + cols.start
        s = kv_block * task.shape.kv + rows.start
        t += jax.lax.broadcasted_iota(jnp.int32, (1, cols.size), 1)
        s += jax.lax.broadcasted_iota(jnp.int32, (rows.size, 1), 0)
        seen = task.mask.sees(t, s)
        if not task.mask.causal:  # a causal mask already excludes the padding, which comes last
            seen &= s < task.tokens
    if q_segments_ref is not None:
        same = kv_segments_ref[rows, :] == q_segments_ref[:, cols]
        seen = same if seen is None else seen & same
    return seen


def _compute(task: Task, kind, tiles, ahead: int, make, use) -> None:
    """Calls `use(tile, made)` for the tiles of a step's block, if any of it is seen.

    `made` has the results of `make(tile, masked)` for this tile and `ahead` tiles after it: the matrix units compute
    those products while the vector units work on exponentials. Tiles are masked only where the mask cuts through the
    block.
    """

    def run(masked):
        made = []
        for i, tile in enumerate(tiles):
            made += [make(t, masked) for t in tiles[len(made) : i + 1 + ahead]]
            use(tile, made[i:])

    for which, masked in ((SOME, True), (ALL, False)):
        pl.when((kind & (SOME | ALL)) == which)(partial(run, masked))


# --- kernels ---------------------------------------------------------------------------------------


def _forward_kernel(
    task, plan_q, plan_kv, plan_kind, sinks_ref, q_ref, k_ref, v_ref, q_segments, kv_segments,
    out_ref, lse_ref, lost_ref, top_ref, sum_ref, acc_ref,
):  # fmt: skip
    step = pl.program_id(2)
    kind, shape = plan_kind[step], task.shape
    factor = _units(task, q_ref.shape[1])[1]
    column = shape.column // shape.forward.kv  # tiles with a common maximum

    @pl.when((kind & FIRST) != 0)
    def _():
        # The sink is the first logit. For a head without one, it vanishes at the first key.
        top_ref[...] = jnp.full(top_ref.shape, sinks_ref[0, pl.program_id(1)])
        sum_ref[...] = jnp.ones(sum_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def make(tile, masked):
        rows, cols = tile
        logits = _logits(task, q_ref[cols, :], k_ref[rows, :])
        seen = _seen(task, plan_q[step], plan_kv[step], tile, q_segments, kv_segments, masked)
        shown = logits if seen is None else jnp.where(seen, logits, MASKED)
        return shown, jnp.max(shown, axis=0, keepdims=True)

    # Of a column of tiles: its maximum, sum and result. They don't wait for those of the column before.
    running: Any = None

    def use(tile, made):
        nonlocal running
        rows, cols = tile
        if rows.start % shape.column == 0:
            tops = [top for _, top in made[:column]]
            running = reduce(jnp.maximum, tops, top_ref[:, cols]), 0.0, 0.0
        top, total, acc = running
        exps = jnp.exp2((made[0][0] - top) * factor)
        total += jnp.sum(exps, axis=0, keepdims=True)
        acc += dot(v_ref[rows, :], exps.astype(v_ref.dtype), TN)
        running = top, total, acc
        if (rows.start + rows.size) % shape.column == 0:
            fade = jnp.exp2((top_ref[:, cols] - top) * factor)
            top_ref[:, cols] = top
            sum_ref[:, cols] = sum_ref[:, cols] * fade + total
            acc_ref[:, cols] = acc_ref[:, cols] * fade + acc

    _compute(task, kind, task.tiles(shape.forward, shape.column), column, make, use)

    @pl.when((kind & LAST) != 0)
    def _():
        out = (acc_ref[...] / sum_ref[...]).T
        out_ref[...] = out.astype(out_ref.dtype)
        lse_ref[...] = top_ref[...] * factor + jnp.log2(sum_ref[...])
        if lost_ref is not None:
            # Read back, because XLA may replace a value that was rounded and widened by the original.
            lost_ref[...] = (out - out_ref[...].astype(jnp.float32)).astype(lost_ref.dtype)


def _backward_compute(task: Task, step, plans, refs, use):
    """Calls `use(tile, weights, gradients of the logits times sqrt(H))` for each tile of a step's block."""
    plan_q, plan_kv, plan_kind = plans
    q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, q_segments, kv_segments = refs
    _, factor = _units(task, q_ref.shape[1])

    def make(tile, masked):
        rows, cols = tile
        seen = _seen(task, plan_q[step], plan_kv[step], tile, q_segments, kv_segments, masked)
        logits = _logits(task, q_ref[cols, :], k_ref[rows, :])
        return seen, logits, dot(v_ref[rows, :], grad_ref[cols, :], NT)

    def finish(tile, made):
        cols = tile[1]
        seen, logits, grad_probs = made[0]
        shown = logits if seen is None else jnp.where(seen, logits, MASKED)
        probs = jnp.exp2(shown * factor - lse_ref[:, cols])
        grads = probs * (grad_probs - delta_ref[:, cols])
        if task.softcap is not None:
            grads = grads * (1 - logits * logits)
        # Gradients stay in float32, as they do before XLA's products. A TPU's matrix units round them on the way in,
        # in hardly more bundles than a cast takes; the simulator's CPU doesn't round them.
        use(tile, probs.astype(grad_ref.dtype), grads)

    tiles = task.tiles(task.shape.backward, task.shape.kv)
    _compute(task, plan_kind[step], tiles, 1, make, finish)


def _gradients_kernel(task, plan_q, plan_kv, plan_kind, *refs: Any):
    """Computes all gradients. Those of all keys stay in VMEM while the query heads of their head go by."""
    inputs, (dq_ref, dk_ref, dv_ref, dq_acc_ref, dk_acc_ref, dv_acc_ref) = refs[:-6], refs[-6:]
    q_ref, k_ref, _, grad_ref = inputs[:4]
    member, step = pl.program_id(2), pl.program_id(3)
    kind, bkv, scale = plan_kind[step], task.shape.kv, 1 / math.sqrt(q_ref.shape[1])

    @pl.when((member == 0) & (step == 0))
    def _():
        @pl.loop(0, dk_ref.shape[0], step=bkv)
        def _(start):
            rows = pl.ds(pl.multiple_of(start, bkv), bkv)
            dk_acc_ref[rows, :] = jnp.zeros(k_ref.shape, jnp.float32)
            dv_acc_ref[rows, :] = jnp.zeros(k_ref.shape, jnp.float32)

    @pl.when((kind & FIRST) != 0)
    def _():
        dq_acc_ref[...] = jnp.zeros(dq_acc_ref.shape, jnp.float32)

    def add(tile, probs, grads):
        rows, cols = tile
        start = pl.multiple_of(plan_kv[step] * bkv + rows.start, rows.size)
        dv_acc_ref[pl.ds(start, rows.size), :] += dot(probs, grad_ref[cols, :], NN)
        dk_acc_ref[pl.ds(start, rows.size), :] += dot(grads, q_ref[cols, :], NN)
        dq_acc_ref[:, cols] += dot(k_ref[rows, :], grads, TN)

    _backward_compute(task, step, (plan_q, plan_kv, plan_kind), inputs, add)

    @pl.when((kind & LAST) != 0)
    def _():
        dq_ref[...] = (dq_acc_ref[...] * scale).T.astype(dq_ref.dtype)

    @pl.when((member == pl.num_programs(2) - 1) & (step == pl.num_programs(3) - 1))
    def _():
        @pl.loop(0, dk_ref.shape[0], step=bkv)
        def _(start):
            rows = pl.ds(pl.multiple_of(start, bkv), bkv)
            dk_ref[rows, :] = (dk_acc_ref[rows, :] * scale).astype(dk_ref.dtype)
            dv_ref[rows, :] = dv_acc_ref[rows, :].astype(dv_ref.dtype)


def _dq_kernel(task, plan_q, plan_kv, plan_kind, *refs: Any):
    inputs, (dq_ref, acc_ref) = refs[:-2], refs[-2:]
    q_ref, k_ref = inputs[:2]
    step = pl.program_id(2)
    kind = plan_kind[step]

    @pl.when((kind & FIRST) != 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def add(tile, _probs, grads):
        rows, cols = tile
        acc_ref[:, cols] += dot(k_ref[rows, :], grads, TN)

    _backward_compute(task, step, (plan_q, plan_kv, plan_kind), inputs, add)

    @pl.when((kind & LAST) != 0)
    def _():
        dq_ref[...] = (acc_ref[...] / math.sqrt(q_ref.shape[1])).T.astype(dq_ref.dtype)


def _dkv_kernel(task, plan_q, plan_kv, plan_kind, *refs: Any):
    inputs, (dk_ref, dv_ref, dk_acc_ref, dv_acc_ref) = refs[:-4], refs[-4:]
    q_ref, grad_ref = inputs[0], inputs[3]
    step, member = pl.program_id(2), pl.program_id(3)
    kind = plan_kind[step]

    @pl.when(((kind & FIRST) != 0) & (member == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape, jnp.float32)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape, jnp.float32)

    def add(tile, probs, grads):
        rows, cols = tile
        dv_acc_ref[rows, :] += dot(probs, grad_ref[cols, :], NN)
        dk_acc_ref[rows, :] += dot(grads, q_ref[cols, :], NN)

    _backward_compute(task, step, (plan_q, plan_kv, plan_kind), inputs, add)

    @pl.when(((kind & LAST) != 0) & (member == pl.num_programs(3) - 1))
    def _():
        dk_ref[...] = (dk_acc_ref[...] / math.sqrt(q_ref.shape[1])).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# --- calls -----------------------------------------------------------------------------------------


def _forward_call(task, q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, *, differentiated=False):
    """Returns the output [B, N, T, H], the base-2 logsumexp [B, N, 1, T], and the output's rounding error.

    The rounding error is None in float32, and when there's no backward pass to use it.
    """
    (B, N, T, H), bq = q_BNTH.shape, task.shape.q
    tops_1N = jnp.full((1, N), NO_SINK)
    if sinks_N is not None:
        factor = _units(task, H)[1]
        tops_1N = jnp.maximum(tops_1N, sinks_N.astype(jnp.float32)[None] * (LOG2E / factor))
    out = jax.ShapeDtypeStruct(q_BNTH.shape, q_BNTH.dtype)
    lost = out if differentiated and out.dtype != jnp.float32 else None
    return call(
        _forward_kernel, task, (q_BNTH, k_BKSH, v_BKSH), segments_BT, by="q", first=(tops_1N,),
        ins=("q", "kv", "kv"), outs=("q", "row", lost and "q"), scratch=[(1, bq), (1, bq), (H, bq)],
        out_shapes=[out, jax.ShapeDtypeStruct((B, N, 1, T), jnp.float32), lost],
    )  # fmt: skip


def _backward_call(
    task, q_BNTH, k_BKSH, v_BKSH, segments_BT, out_BNTH, lse_BN1T, lost_BNTH, grad_BNTH
):
    """Returns the gradients of q, k and v, and the row sums of output times gradient [B, N, T].

    The row sum is subtracted from all gradients of a query's logits. Taken from the rounded output, as other flash
    attentions do, it would add an error there as large as that of rounding the gradients, where few keys have most of
    the weight.
    """
    (bq, bkv), (S, H) = task.shape[:2], k_BKSH.shape[2:]
    exact_BNTH = out_BNTH.astype(jnp.float32)
    if lost_BNTH is not None:
        exact_BNTH += lost_BNTH.astype(jnp.float32)
    delta_BNT = jnp.sum(grad_BNTH.astype(jnp.float32) * exact_BNTH, axis=-1)
    arrays = (q_BNTH, k_BKSH, v_BKSH, grad_BNTH, lse_BN1T, delta_BNT[:, :, None])
    ins = ("q", "kv", "kv", "q", "row", "row")
    q_like, k_like, v_like = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:3])
    if task.shape.resident:
        dq_BNTH, dk_BKSH, dv_BKSH = call(
            _gradients_kernel, task, arrays, segments_BT, by="head", ins=ins, outs=("q", "all_kv", "all_kv"),
            out_shapes=[q_like, k_like, v_like], scratch=[(H, bq), (S, H), (S, H)],
        )  # fmt: skip
        return dq_BNTH, dk_BKSH, dv_BKSH, delta_BNT
    (dq_BNTH,) = call(
        _dq_kernel, task, arrays, segments_BT, by="q", ins=ins,
        outs=("q",), out_shapes=[q_like], scratch=[(H, bq)],
    )  # fmt: skip
    dk_BKSH, dv_BKSH = call(
        _dkv_kernel, task, arrays, segments_BT, by="kv", ins=ins,
        outs=("kv", "kv"), out_shapes=[k_like, v_like], scratch=[(bkv, H), (bkv, H)],
    )  # fmt: skip
    return dq_BNTH, dk_BKSH, dv_BKSH, delta_BNT


# Which argument each result is split like, and its number of dimensions.
_FORWARD_OUTS, _BACKWARD_OUTS = ((0, 4), (0, 2), (0, 4)), ((0, 4), (1, 4), (2, 4), (0, 3))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, task):
    args = (q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N)
    return on_each_device(partial(_forward_call, task), *args, outs=_FORWARD_OUTS)[0]


def _flash_forward(q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, task):
    args = (q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N)
    forward = partial(_forward_call, task, differentiated=True)
    out_BNTH, lse_BN1T, lost_BNTH = on_each_device(forward, *args, outs=_FORWARD_OUTS)
    return out_BNTH, (*args, out_BNTH, lse_BN1T, lost_BNTH)


def _flash_backward(task, residuals, grad_BNTH):
    *args, sinks_N, out_BNTH, lse_BN1T, lost_BNTH = residuals
    args += out_BNTH, lse_BN1T, lost_BNTH, grad_BNTH
    backward = partial(_backward_call, task)
    *grads, delta_BNT = on_each_device(backward, *args, outs=_BACKWARD_OUTS)
    if sinks_N is None:
        return *grads, None, None
    weights_BNT = jnp.exp2(sinks_N.astype(jnp.float32)[:, None] * LOG2E - lse_BN1T[:, :, 0])
    grad_N = -jnp.sum(weights_BNT * delta_BNT, axis=(0, 2))
    return *grads, None, grad_N.astype(sinks_N.dtype)


_flash.defvjp(_flash_forward, _flash_backward)
