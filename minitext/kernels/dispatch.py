"""Kernels: one public function per operation, several implementations behind a table.

`impl="auto"` takes the first implementation in the platform's order that supports the arguments and logs once which
one; a named implementation that cannot run raises with the reason. Nothing falls back silently.

Chapters: 4, 17, 18, 19.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from minitext.errors import UserError
from minitext.hardware import platform
from minitext.kernels.attention import cudnn
from minitext.kernels.attention import gpu as flash_attention_gpu
from minitext.kernels.attention import tpu as flash_attention_tpu
from minitext.kernels.attention import xla as reference
from minitext.kernels.attention.mask import CAUSAL, Mask
from minitext.kernels.grouped_matmul import cpu as grouped_matmul_blocked
from minitext.kernels.grouped_matmul import gpu as grouped_matmul_gpu
from minitext.kernels.grouped_matmul import tpu as grouped_matmul_tpu
from minitext.kernels.grouped_matmul import xla as grouped_matmul_xla
from minitext.kernels.linear_cross_entropy import gpu as linear_cross_entropy_gpu
from minitext.kernels.linear_cross_entropy import tpu as linear_cross_entropy_tpu
from minitext.kernels.linear_cross_entropy import xla as linear_cross_entropy_xla
from minitext.kernels.paged_attention import gpu as paged_attention_gpu
from minitext.kernels.paged_attention import tpu as paged_attention_tpu
from minitext.kernels.paged_attention import xla as paged_attention_xla
from minitext.kernels.rms_norm import gpu as rms_norm_gpu
from minitext.kernels.rms_norm import tpu as rms_norm_tpu
from minitext.kernels.rms_norm import xla as rms_norm_xla

log = logging.getLogger("minitext.kernels")


def _always(*_args, **_options) -> None:
    return None


class Implementation(NamedTuple):
    """One way to compute an operation.

    Attributes:
      run: the function.
      supports: takes the same arguments and returns None, or the reason why `run` can't take them.
      platform: the only one that it runs on, or None if it runs everywhere.
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None] = _always
    platform: str | None = None

    def reason(self, *args, **options) -> str | None:
        """Returns why it can't compute this in the program that is being made, or None."""
        if self.platform not in (None, where := platform()):
            return f"it is for a {self.platform}, and the program is for a {where}"
        return self.supports(*args, **options)


def _plain(supports: Callable[..., str | None]) -> Callable[..., str | None]:
    """For implementations that know the causal mask and segments and no option beyond."""

    def check(*args, **options) -> str | None:
        if options:
            return f"it computes causal attention without {', '.join(options)}"
        return supports(*args)

    return check


IMPLEMENTATIONS: dict[tuple[str, str], Implementation] = {
    ("attention", "xla"): Implementation(reference.attention),
    ("attention", "xla_blocked"): Implementation(
        reference.blocked_attention, _plain(reference.blocked_supports)
    ),
    ("attention", "cudnn"): Implementation(cudnn.attention, _plain(cudnn.supports), "gpu"),
    ("attention", "pallas_tpu"): Implementation(
        flash_attention_tpu.flash_attention, flash_attention_tpu.supports, "tpu"
    ),
    ("attention", "pallas_gpu"): Implementation(
        flash_attention_gpu.flash_attention, flash_attention_gpu.supports, "gpu"
    ),
    ("grouped_matmul", "xla"): Implementation(grouped_matmul_xla.grouped_matmul),
    ("grouped_matmul", "xla_blocked"): Implementation(grouped_matmul_blocked.grouped_matmul),
    ("grouped_matmul", "pallas_tpu"): Implementation(
        grouped_matmul_tpu.grouped_matmul, grouped_matmul_tpu.supports, "tpu"
    ),
    ("grouped_matmul", "pallas_gpu"): Implementation(
        grouped_matmul_gpu.grouped_matmul, grouped_matmul_gpu.supports, "gpu"
    ),
    ("rms_norm", "xla"): Implementation(rms_norm_xla.rms_norm),
    ("rms_norm", "pallas_tpu"): Implementation(rms_norm_tpu.rms_norm, rms_norm_tpu.supports, "tpu"),
    ("rms_norm", "pallas_gpu"): Implementation(rms_norm_gpu.rms_norm, rms_norm_gpu.supports, "gpu"),
    ("linear_cross_entropy", "xla"): Implementation(linear_cross_entropy_xla.linear_cross_entropy),
    ("linear_cross_entropy", "pallas_tpu"): Implementation(
        linear_cross_entropy_tpu.linear_cross_entropy, linear_cross_entropy_tpu.supports, "tpu"
    ),
    ("linear_cross_entropy", "pallas_gpu"): Implementation(
        linear_cross_entropy_gpu.linear_cross_entropy, linear_cross_entropy_gpu.supports, "gpu"
    ),
    ("paged_attention", "xla"): Implementation(paged_attention_xla.paged_attention),
    ("paged_attention", "pallas_tpu"): Implementation(
        paged_attention_tpu.paged_attention, paged_attention_tpu.supports, "tpu"
    ),
    ("paged_attention", "pallas_gpu"): Implementation(
        paged_attention_gpu.paged_attention, paged_attention_gpu.supports, "gpu"
    ),
}

# The order in which `auto` tries implementations on each platform. Our kernels for GPUs are not in it where XLA, or a
# library, has one: they were compiled for an H100 and never timed on one.
ORDER: dict[tuple[str, str], tuple[str, ...]] = {
    ("attention", "cpu"): ("xla_blocked", "xla"),
    # cuDNN first: ours is for what it does not compute (masks, soft-caps, sinks, float32).
    ("attention", "gpu"): ("cudnn", "pallas_gpu", "xla"),
    ("attention", "tpu"): ("pallas_tpu", "xla"),
    ("grouped_matmul", "cpu"): ("xla_blocked",),
    ("grouped_matmul", "gpu"): ("pallas_gpu", "xla"),
    ("grouped_matmul", "tpu"): ("pallas_tpu", "xla"),
} | {
    (op, where): ("pallas_tpu", "xla") if where == "tpu" else ("xla",)
    for op in ("rms_norm", "linear_cross_entropy", "paged_attention")
    for where in ("cpu", "gpu", "tpu")
}


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    impl: str = "auto",
) -> jax.Array:
    """Masked grouped-query attention.

    Args:
      q_BTNH: [B, T, N, H] queries.
      k_BSKH: [B, S, K, H] keys, S = T, N divisible by K.
      v_BSKH: [B, S, K, H] values.
      segment_ids_BT: [B, T] integers, or None; tokens attend within their own segment only.
      mask: which keys a query sees; by default itself and all before it.
      softcap: c > 0, for logits of c tanh(logits / c) (Gemma 2, 2024), or None.
      sinks_N: [N] a logit per query head that takes part in softmax and has no value (GPT-OSS, 2025), or None.
      impl: `auto`, or the name of an implementation.

    Returns:
      [B, T, N, H] in the queries' type. A query that sees no key gives zero, and has no gradient.

    Raises:
      UserError: if the mask is none for T tokens, or the named implementation does not exist or can't take these
        arguments.
    """
    if reason := mask.fault(q_BTNH.shape[1]):
        raise UserError(f"attention's mask: {reason}")
    if softcap is not None and not softcap > 0:
        raise UserError(f"attention's softcap={softcap}: choose a positive number, or None")
    # Only what differs from plain causal attention, so that an implementation need not know what it can't do.
    options: dict[str, Any] = {} if mask == CAUSAL else {"mask": mask}
    options |= {} if softcap is None else {"softcap": softcap}
    options |= {} if sinks_N is None else {"sinks_N": sinks_N}
    args = q_BTNH, k_BSKH, v_BSKH, segment_ids_BT
    return choose("attention", impl, *args, **options)(*args, **options)


def grouped_matmul(
    lhs_MK: jax.Array, rhs_GKN: jax.Array, group_sizes_G: jax.Array, *, impl: str = "auto"
) -> jax.Array:
    """Multiplies each group of rows by the group's own matrix, as the experts of a mixture are.

    Args:
      lhs_MK: [M, K] rows sorted by group: group g owns the `group_sizes_G[g]` rows after those of group g - 1.
      rhs_GKN: [G, K, N] one matrix for each group.
      group_sizes_G: [G] int32, in all at most M; groups may be empty.
      impl: `auto`, or the name of an implementation.

    Returns:
      [M, N] in the type of `lhs_MK`, summed in float32. Rows that no group owns give zeros and have no gradient,
      whatever they hold.

    Raises:
      UserError: if the named implementation does not exist or can't take these arguments.
    """
    run = choose("grouped_matmul", impl, lhs_MK, rhs_GKN, group_sizes_G)
    return run(lhs_MK, rhs_GKN, group_sizes_G)


def rms_norm(
    x: jax.Array, scale_D: jax.Array, eps: float = 1e-6, *, impl: str = "auto"
) -> jax.Array:
    """Divides by the root of the mean square over the last dimension (Zhang and Sennrich 2019).

    Args:
      x: [..., D], any float type.
      scale_D: [D], float32.
      eps: added to the mean square.
      impl: `auto`, or the name of an implementation.

    Returns:
      [..., D] in x's type; the mean square is taken in float32.

    Raises:
      UserError: if the named implementation does not exist or can't take these arguments.
    """
    return choose("rms_norm", impl, x, scale_D, eps)(x, scale_D, eps)


def linear_cross_entropy(
    x_XD: jax.Array, w_DV: jax.Array, targets_X: jax.Array, *, impl: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Returns what `minitext.training.loss.cross_entropy` makes of the logits x w, which a kernel need not store.

    With a weight z, the loss with z-loss is `loss_X + z * log_normalizer_X**2`.

    Args:
      x_XD: [X, D] hidden states.
      w_DV: [D, V] output layer, of the same type.
      targets_X: [X] integers. One that is not below V has no logit: its loss is the log-normalizer.
      impl: `auto`, or the name of an implementation.

    Returns:
      loss_X: [X] float32, the negative log-likelihood of every target, in nats.
      log_normalizer_X: [X] float32, the logarithm of the sum of the logits' exponentials.

    Raises:
      UserError: if the named implementation does not exist or can't take these arguments.
    """
    return choose("linear_cross_entropy", impl, x_XD, w_DV, targets_X)(x_XD, w_DV, targets_X)


def paged_attention(
    q_BNH: jax.Array,
    k_pages_KPSH: jax.Array,
    v_pages_KPSH: jax.Array,
    page_table_BX: jax.Array,
    lengths_B: jax.Array,
    *,
    impl: str = "auto",
) -> jax.Array:
    """Attention of one new token per sequence over a cache in pages (Kwon et al. 2023). It has no gradient.

    Token t of sequence b stands at `[:, page_table_BX[b, t // S], t % S]`. Pages may lie in any order and belong to
    several sequences; what the cache holds beyond a sequence's tokens is never seen.

    Args:
      q_BNH: [B, N, H] queries.
      k_pages_KPSH: [K, P, S, H] keys in P pages of S tokens, N divisible by K.
      v_pages_KPSH: [K, P, S, H] values.
      page_table_BX: [B, X] integers below P; entries beyond a sequence's pages are not read.
      lengths_B: [B] tokens of each sequence in the cache, at most X * S; with 0 its output is 0.
      impl: `auto`, or the name of an implementation.

    Returns:
      [B, N, H] in the queries' type.

    Raises:
      UserError: if the named implementation does not exist or can't take these arguments, and when differentiated.
    """
    args = q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B
    chosen = choose("paged_attention", impl, *args)
    run = jax.custom_jvp(lambda *args: chosen(*args))

    @run.defjvp
    def _(_primals, _tangents):
        raise UserError("paged_attention has no gradient: to train, call attention")

    return run(*args)


def choose(op: str, impl: str, *args, **options) -> Callable[..., Any]:
    """Returns the implementation of `op` that `impl` asks for, checked against the arguments."""
    if impl == "auto":
        where = platform()
        for name in ORDER[op, where]:
            if IMPLEMENTATIONS[op, name].reason(*args, **options) is None:
                _say_once(op, name, where)
                return IMPLEMENTATIONS[op, name].run
        raise ValueError(f"no implementation of {op} on {where} takes these arguments")
    if (op, impl) not in IMPLEMENTATIONS:
        known = ", ".join(name for o, name in IMPLEMENTATIONS if o == op)
        raise UserError(f"unknown implementation {impl!r} of {op}: choose auto, {known}")
    if reason := IMPLEMENTATIONS[op, impl].reason(*args, **options):
        raise UserError(f"{op} cannot run as {impl!r}: {reason}")
    return IMPLEMENTATIONS[op, impl].run


@functools.cache
def _say_once(op: str, name: str, where: str) -> None:
    log.info("%s on %s: %s", op, where, name)
