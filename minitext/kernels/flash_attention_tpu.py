"""Flash attention for TPUs, in Pallas: softmax(q k^T) v by blocks that stay in VMEM, and its gradients.

Softmax is computed online (Milakov & Gimelshein 2018): a block of logits is used as it is made, against the maximum so
far, and what came before is scaled down when the maximum rises. The gradients make the blocks again from the kept
logsumexp (Dao et al. 2022; Dao 2023). The grid has no square of blocks but the list of those that the mask leaves,
known when the program is traced and read by the index maps through scalar prefetch, as in JAX's splash attention
(jax.experimental.pallas.ops.tpu.splash_attention): what the mask excludes is neither loaded nor computed.

Logits lie transposed, keys x queries. A query's maximum, sum and logsumexp are then one row of lanes, and reductions
over keys add whole registers instead of lanes within one.

Chapters: 17.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from minitext.kernels.mask import ALL, CAUSAL, SOME, Mask
from minitext.kernels.reference import MASKED, NO_SINK

LANES = 128
LOG2E = math.log2(math.e)
HEAD_DIM_STEP = 64
# Bits of a step's kind beside those of `Mask.kinds`: whether it is its accumulator's first or last.
FIRST, LAST = 4, 8
NT, NN, TN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))


class BlockShape(NamedTuple):
    """How the kernels divide their work.

    Attributes:
      q: queries of a block, a multiple of 128.
      kv: keys of a block, a multiple of `inner`.
      inner: keys whose logits are made at once.
    """

    q: int = 512
    kv: int = 512
    inner: int = 256


class Task(NamedTuple):
    """What a kernel must know when it is traced, beside its arrays' shapes.

    Attributes:
      mask: which keys a query sees.
      softcap: bound of the logits, or None.
      tokens: T without the padding.
      shape: the blocks.
    """

    mask: Mask
    softcap: float | None
    tokens: int
    shape: BlockShape


class Plan(NamedTuple):
    """The steps of a grid: int32 arrays of one length, in SMEM before the kernel starts.

    Attributes:
      q: each step's block of queries.
      kv: its block of keys.
      kind: SOME or ALL of it is seen (0: nothing), and FIRST and LAST.
    """

    q: Any
    kv: Any
    kind: Any


def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    blocks: BlockShape = BlockShape(),
) -> jax.Array:
    """Attention as `minitext.kernels.attention` defines it, of any T, in memory linear in T.

    Matrix products take their inputs as they are and add up in float32; float32 inputs are multiplied at full
    precision. On a mesh each device computes its own rows and heads.

    Args:
      q_BTNH: [B, T, N, H] queries.
      k_BSKH: [B, S, K, H] keys, S = T, N divisible by K; they are not repeated.
      v_BSKH: [B, S, K, H] values.
      segment_ids_BT: [B, T] integers, or None.
      mask: which keys a query sees.
      softcap: c for logits of c tanh(logits / c), or None.
      sinks_N: [N] a logit per head that has no value, or None.
      blocks: how the work is divided; made smaller where T or the mask's blocks are.

    Returns:
      [B, T, N, H] in the queries' type; zero where a query sees no key.
    """
    T = q_BTNH.shape[1]
    shape = _fit(blocks, T, mask)
    task = Task(mask, softcap, T, shape)

    def heads_first(x_BTNH, block):
        x_BNTH = jnp.swapaxes(x_BTNH, 1, 2)
        return jnp.pad(x_BNTH, ((0, 0), (0, 0), (0, -T % block), (0, 0)))

    q_BNTH = heads_first(q_BTNH, shape.q)
    k_BKSH, v_BKSH = (heads_first(x, shape.kv) for x in (k_BSKH, v_BSKH))
    out_BNTH = _flash(q_BNTH, k_BKSH, v_BKSH, segment_ids_BT, sinks_N, task)
    return jnp.swapaxes(out_BNTH[:, :, :T], 1, 2)


def supports(
    q_BTNH, k_BSKH, _v, segment_ids_BT=None, *, platform: str, mask: Mask = CAUSAL, **_options
) -> str | None:
    """Returns the reason why the kernels can't compute this, or None."""
    H = q_BTNH.shape[3]
    if platform != "tpu":
        return f"it is a kernel for TPUs, and the program is for a {platform}"
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it computes in bfloat16 or float32 and the queries are {q_BTNH.dtype}"
    if H % HEAD_DIM_STEP:
        return f"it needs heads of a multiple of {HEAD_DIM_STEP}, half a row of lanes: got {H}"
    if mask.blocks is not None and mask.block % LANES:
        return f"it needs a mask of blocks of a multiple of {LANES} tokens: got {mask.block}"
    if not jax.sharding.get_abstract_mesh().empty:
        q_spec, k_spec = (jax.typeof(x).sharding.spec for x in (q_BTNH, k_BSKH))
        if q_spec[1] or k_spec[1]:
            return f"it needs a device's rows whole, and tokens are split over {q_spec[1]}"
        if q_spec[2] != k_spec[2]:
            return f"heads are split over {q_spec[2]} and kv heads over {k_spec[2]}: split both or none"
    return None


def _fit(blocks: BlockShape, T: int, mask: Mask) -> BlockShape:
    """Shrinks blocks to whole lanes of T, and to what divides the mask's own blocks."""
    whole = -(-T // LANES) * LANES
    q, kv = min(blocks.q, whole), min(blocks.kv, whole)
    if mask.blocks is not None:
        q, kv = math.gcd(q, mask.block), math.gcd(kv, mask.block)
    return BlockShape(q, kv, math.gcd(kv, blocks.inner))


def plan(task: Task, *, by_kv: bool = False) -> Plan:
    """Returns the steps that the mask leaves: block by block of queries, or of keys.

    An accumulator whose blocks are all excluded has one step nonetheless, which computes nothing and writes its zeros.
    """
    kinds = task.mask.kinds(task.tokens, task.shape.q, task.shape.kv)
    rows = kinds.T if by_kv else kinds
    steps, other = [], 0
    for row, seen in enumerate(rows):
        places = np.flatnonzero(seen)
        # A step without work names the block that is there already, so that nothing is loaded for it.
        others = [int(x) for x in places] or [other]
        row_kinds = [int(seen[x]) for x in others] if len(places) else [0]
        row_kinds[0] |= FIRST
        row_kinds[-1] |= LAST
        steps += [(row, x, kind) for x, kind in zip(others, row_kinds, strict=True)]
        other = others[-1]
    row, column, kind = np.array(steps, np.int32).T
    return Plan(column, row, kind) if by_kv else Plan(row, column, kind)


# --- the parts of a block --------------------------------------------------------------------------


def _dot(a, b, dims) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, dims, precision=precision, preferred_element_type=jnp.float32
    )


def _units(task: Task, H: int) -> tuple[float, float]:
    """Returns two factors: from q k^T to what `_logits` gives, and from there to base-2 logits."""
    if task.softcap is None:
        return 1.0, LOG2E / math.sqrt(H)
    return 1 / (math.sqrt(H) * task.softcap), LOG2E * task.softcap


def _logits(task: Task, q, k):
    """Logits [inner, block_q] but for a factor, which the exponential takes up for nothing."""
    logits = _dot(k, q, NT)
    if task.softcap is not None:
        logits = jnp.tanh(logits * _units(task, q.shape[1])[0])
    return logits


def _seen(task: Task, q_block, kv_block, rows, q_segments_ref, kv_segments_ref, masked: bool):
    """[inner, block_q] booleans of the keys `rows` of a block, or None if all are seen."""
    bq, bkv, inner = task.shape
    seen = None
    if masked:
        t = q_block * bq + jax.lax.broadcasted_iota(jnp.int32, (1, bq), 1)
        s = kv_block * bkv + rows.start + jax.lax.broadcasted_iota(jnp.int32, (inner, 1), 0)
        seen = task.mask.sees(t, s)
        if not task.mask.causal:  # else padding comes after all that looks back
            seen &= s < task.tokens
    if q_segments_ref is not None:
        same = kv_segments_ref[rows, :] == q_segments_ref[...]
        seen = same if seen is None else seen & same
    return seen


def _for_each_part(task: Task, kind, compute) -> None:
    """Calls `compute(rows, masked)` for the parts of a step's block, masked only where the mask cuts through it."""
    for which, masked in ((SOME, True), (ALL, False)):

        @pl.when((kind & (SOME | ALL)) == which)
        def _(masked=masked):
            for start in range(0, task.shape.kv, task.shape.inner):
                compute(pl.ds(start, task.shape.inner), masked)


# --- kernels ---------------------------------------------------------------------------------------


def _forward_kernel(
    task, plan_q, plan_kv, plan_kind, sinks_ref, q_ref, k_ref, v_ref, q_segments, kv_segments,
    out_ref, lse_ref, top_ref, sum_ref, acc_ref,
):  # fmt: skip
    step = pl.program_id(2)
    kind = plan_kind[step]
    _, factor = _units(task, q_ref.shape[1])

    @pl.when((kind & FIRST) != 0)
    def _():
        # The sink is the first logit; that of a head without one vanishes at the first key.
        top_ref[...] = jnp.full(top_ref.shape, sinks_ref[0, pl.program_id(1)])
        sum_ref[...] = jnp.ones(sum_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def compute(rows, masked):
        logits = _logits(task, q_ref[...], k_ref[rows, :])
        seen = _seen(task, plan_q[step], plan_kv[step], rows, q_segments, kv_segments, masked)
        if seen is not None:
            logits = jnp.where(seen, logits, MASKED)
        old = top_ref[...]
        top = jnp.maximum(old, jnp.max(logits, axis=0, keepdims=True))
        exps = jnp.exp2((logits - top) * factor)
        fade = jnp.exp2((old - top) * factor)
        top_ref[...] = top
        sum_ref[...] = sum_ref[...] * fade + jnp.sum(exps, axis=0, keepdims=True)
        acc_ref[...] = acc_ref[...] * fade + _dot(v_ref[rows, :], exps.astype(v_ref.dtype), TN)

    _for_each_part(task, kind, compute)

    @pl.when((kind & LAST) != 0)
    def _():
        out_ref[...] = (acc_ref[...] / sum_ref[...]).T.astype(out_ref.dtype)
        lse_ref[...] = top_ref[...] * factor + jnp.log2(sum_ref[...])


def _probs_and_grads(task, seen, q, k, v, grad, lse, delta):
    """Weights and the gradients of the logits, but for 1/sqrt(H), both [inner, block_q]."""
    logits = _logits(task, q, k)
    shown = logits if seen is None else jnp.where(seen, logits, MASKED)
    probs = jnp.exp2(shown * _units(task, q.shape[1])[1] - lse)
    grads = probs * (_dot(v, grad, NT) - delta)
    if task.softcap is not None:
        grads = grads * (1 - logits * logits)
    return probs.astype(grad.dtype), grads.astype(q.dtype)


def _dq_kernel(
    task, plan_q, plan_kv, plan_kind, q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref,
    q_segments, kv_segments, dq_ref, acc_ref,
):  # fmt: skip
    step = pl.program_id(2)
    kind = plan_kind[step]

    @pl.when((kind & FIRST) != 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def compute(rows, masked):
        seen = _seen(task, plan_q[step], plan_kv[step], rows, q_segments, kv_segments, masked)
        q, k, v, grad = q_ref[...], k_ref[rows, :], v_ref[rows, :], grad_ref[...]
        _, grads = _probs_and_grads(task, seen, q, k, v, grad, lse_ref[...], delta_ref[...])
        acc_ref[...] += _dot(k, grads, TN)

    _for_each_part(task, kind, compute)

    @pl.when((kind & LAST) != 0)
    def _():
        dq_ref[...] = (acc_ref[...] / math.sqrt(q_ref.shape[1])).T.astype(dq_ref.dtype)


def _dkv_kernel(
    task, plan_q, plan_kv, plan_kind, q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref,
    q_segments, kv_segments, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref,
):  # fmt: skip
    step, member = pl.program_id(2), pl.program_id(3)
    kind = plan_kind[step]

    @pl.when(((kind & FIRST) != 0) & (member == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape, jnp.float32)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape, jnp.float32)

    def compute(rows, masked):
        seen = _seen(task, plan_q[step], plan_kv[step], rows, q_segments, kv_segments, masked)
        q, k, v, grad = q_ref[...], k_ref[rows, :], v_ref[rows, :], grad_ref[...]
        probs, grads = _probs_and_grads(task, seen, q, k, v, grad, lse_ref[...], delta_ref[...])
        dv_acc_ref[rows, :] += _dot(probs, grad, NN)
        dk_acc_ref[rows, :] += _dot(grads, q, NN)

    _for_each_part(task, kind, compute)

    @pl.when(((kind & LAST) != 0) & (member == pl.num_programs(3) - 1))
    def _():
        dk_ref[...] = (dk_acc_ref[...] / math.sqrt(q_ref.shape[1])).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# --- calls -----------------------------------------------------------------------------------------


class _Specs:
    """Which block of each kind of array a step reads or writes.

    The grid is (B, N, steps), or for gradients of keys (B, K, steps, N/K): a key head's blocks stay while its query
    heads pass.
    """

    def __init__(self, task: Task, H: int, group: int, by_kv: bool):
        bq, bkv, _ = task.shape

        def at(b, head, step, *rest):
            if by_kv:
                member, q, kv, _ = rest
                return b, head * group + member, head, q[step], kv[step]
            q, kv, _ = rest
            return b, head, head // group, q[step], kv[step]

        def spec(shape, place):
            return pl.BlockSpec(shape, lambda *ids: place(*at(*ids)))

        self.q = spec((None, None, bq, H), lambda b, n, k, i, j: (b, n, i, 0))
        self.kv = spec((None, None, bkv, H), lambda b, n, k, i, j: (b, k, j, 0))
        self.row = spec((None, None, 1, bq), lambda b, n, k, i, j: (b, n, 0, i))
        self.q_segments = spec((None, 1, bq), lambda b, n, k, i, j: (b, 0, i))
        self.kv_segments = spec((None, bkv, 1), lambda b, n, k, i, j: (b, j, 0))


def _call(kernel, task, arrays, segments_BT, *, by_kv, ins, outs, out_shapes, scratch, first=()):
    """Calls a kernel over the steps of its plan; `ins` and `outs` name attributes of `_Specs`."""
    q, k = arrays[:2]
    (B, N, T, H), (K, S) = q.shape, k.shape[1:3]
    specs = _Specs(task, H, N // K, by_kv)
    q_segments = kv_segments = None
    if segments_BT is not None:
        padded = jnp.pad(segments_BT, ((0, 0), (0, max(T, S) - task.tokens)), constant_values=-1)
        q_segments = padded[:, None, :T]
        kv_segments = padded[:, :S, None]
    steps = plan(task, by_kv=by_kv)
    segment_specs = [None if segments_BT is None else s for s in (specs.q_segments, specs.kv_segments)]
    inner = ("parallel", "parallel", "arbitrary", "arbitrary")
    grid = (B, K, len(steps.q), N // K) if by_kv else (B, N, len(steps.q))
    return pl.pallas_call(
        partial(kernel, task),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[
                *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in first),
                *(getattr(specs, name) for name in ins),
                *segment_specs,
            ],
            out_specs=[getattr(specs, name) for name in outs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=inner[: len(grid)]),
        name=kernel.__name__.strip("_"),
    )(*steps, *first, *arrays, q_segments, kv_segments)


def _forward_call(task, q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N):
    """Returns the output [B, N, T, H], and the base-2 logsumexp [B, N, 1, T]."""
    (B, N, T, H), bq = q_BNTH.shape, task.shape.q
    tops_1N = jnp.full((1, N), NO_SINK)
    if sinks_N is not None:
        factor = _units(task, H)[1]
        tops_1N = jnp.maximum(tops_1N, sinks_N.astype(jnp.float32)[None] * (LOG2E / factor))
    return _call(
        _forward_kernel, task, (q_BNTH, k_BKSH, v_BKSH), segments_BT, by_kv=False, first=(tops_1N,),
        ins=("q", "kv", "kv"), outs=("q", "row"), scratch=[(1, bq), (1, bq), (H, bq)],
        out_shapes=[
            jax.ShapeDtypeStruct(q_BNTH.shape, q_BNTH.dtype),
            jax.ShapeDtypeStruct((B, N, 1, T), jnp.float32),
        ],
    )  # fmt: skip


def _backward_call(task, q_BNTH, k_BKSH, v_BKSH, segments_BT, out_BNTH, lse_BN1T, grad_BNTH):
    """Returns the gradients of q, k and v, and the row sums of output times gradient [B, N, T]."""
    (bq, bkv, _), H = task.shape, q_BNTH.shape[3]
    delta_BNT = jnp.sum(grad_BNTH.astype(jnp.float32) * out_BNTH.astype(jnp.float32), axis=-1)
    arrays = (q_BNTH, k_BKSH, v_BKSH, grad_BNTH, lse_BN1T, delta_BNT[:, :, None])
    ins = ("q", "kv", "kv", "q", "row", "row")
    q_like, k_like, v_like = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:3])
    (dq_BNTH,) = _call(
        _dq_kernel, task, arrays, segments_BT, by_kv=False, ins=ins,
        outs=("q",), out_shapes=[q_like], scratch=[(H, bq)],
    )  # fmt: skip
    dk_BKSH, dv_BKSH = _call(
        _dkv_kernel, task, arrays, segments_BT, by_kv=True, ins=ins,
        outs=("kv", "kv"), out_shapes=[k_like, v_like], scratch=[(bkv, H), (bkv, H)],
    )  # fmt: skip
    return dq_BNTH, dk_BKSH, dv_BKSH, delta_BNT


def _on_each_device(function, outs, *arrays):
    """Runs a function on each device's rows and heads: the compiler can't divide a kernel.

    `outs` names for each result the argument whose spec it has, and how many of its entries count.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function(*arrays)
    specs = [None if x is None else jax.typeof(x).sharding.spec for x in arrays]
    out_specs = tuple(P(*specs[i][:rank]) for i, rank in outs)
    return jax.shard_map(function, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)(*arrays)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, task):
    return _flash_forward(q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, task)[0]


def _flash_forward(q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, task):
    if sinks_N is not None and not jax.sharding.get_abstract_mesh().empty:
        heads = jax.typeof(q_BNTH).sharding.spec[1]
        sinks_N = jax.sharding.reshard(sinks_N, P(heads))
    args = (q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N)
    out_BNTH, lse_BN1T = _on_each_device(partial(_forward_call, task), ((0, 4), (0, 2)), *args)
    return out_BNTH, (*args, out_BNTH, lse_BN1T)


def _flash_backward(task, residuals, grad_BNTH):
    q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, out_BNTH, lse_BN1T = residuals
    *grads, delta_BNT = _on_each_device(
        partial(_backward_call, task), ((0, 4), (1, 4), (2, 4), (0, 3)),
        q_BNTH, k_BKSH, v_BKSH, segments_BT, out_BNTH, lse_BN1T, grad_BNTH,
    )  # fmt: skip
    if sinks_N is None:
        return *grads, None, None
    weights_BNT = jnp.exp2(sinks_N.astype(jnp.float32)[:, None] * LOG2E - lse_BN1T[:, :, 0])
    grad_N = -jnp.sum(weights_BNT * delta_BNT, axis=(0, 2))
    return *grads, None, grad_N.astype(sinks_N.dtype)


_flash.defvjp(_flash_forward, _flash_backward)
