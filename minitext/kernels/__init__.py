"""Kernels: one public function per operation, several implementations behind a table.

`impl="auto"` takes the first implementation in the platform's order that supports the arguments and logs once which
one; a named implementation that cannot run raises with the reason. Nothing falls back silently.

Chapters: 4, 17.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from minitext.errors import UserError
from minitext.kernels import (
    cudnn,
    linear_cross_entropy_tpu,
    linear_cross_entropy_xla,
    paged_attention_tpu,
    paged_attention_xla,
    reference,
    rms_norm_tpu,
    rms_norm_xla,
)
from minitext.kernels.reference import cached_attention as cached_attention

log = logging.getLogger("minitext.kernels")


class Implementation(NamedTuple):
    """One way to compute an operation.

    Attributes:
      run: the function.
      supports: takes the same arguments and returns None, or the reason why `run` can't take them.
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None]


def _always(*_args) -> None:
    return None


def _blocked_supports(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT=None) -> str | None:
    T = q_BTNH.shape[1]
    if T % 4 or T < 128:
        return f"it needs at least 128 tokens, and a number divisible by 4: got T={T}"
    return None


def _cudnn_supports(*args) -> str | None:
    return cudnn.supports(*args, platform=platform())


IMPLEMENTATIONS: dict[tuple[str, str], Implementation] = {
    ("attention", "xla"): Implementation(reference.attention, _always),
    ("attention", "xla_blocked"): Implementation(reference.blocked_attention, _blocked_supports),
    ("attention", "cudnn"): Implementation(cudnn.attention, _cudnn_supports),
    ("rms_norm", "xla"): Implementation(rms_norm_xla.rms_norm, _always),
    ("rms_norm", "pallas_tpu"): Implementation(rms_norm_tpu.rms_norm, rms_norm_tpu.supports),
    ("linear_cross_entropy", "xla"): Implementation(
        linear_cross_entropy_xla.linear_cross_entropy, _always
    ),
    ("linear_cross_entropy", "pallas_tpu"): Implementation(
        linear_cross_entropy_tpu.linear_cross_entropy, linear_cross_entropy_tpu.supports
    ),
    ("paged_attention", "xla"): Implementation(paged_attention_xla.paged_attention, _always),
    ("paged_attention", "pallas_tpu"): Implementation(
        paged_attention_tpu.paged_attention, paged_attention_tpu.supports
    ),
}

# The order in which `auto` tries implementations on each platform.
ORDER: dict[tuple[str, str], tuple[str, ...]] = {
    ("attention", "cpu"): ("xla_blocked", "xla"),
    ("attention", "gpu"): ("cudnn", "xla"),
    ("attention", "tpu"): ("xla",),
    ("rms_norm", "cpu"): ("xla",),
    ("rms_norm", "gpu"): ("xla",),
    ("rms_norm", "tpu"): ("pallas_tpu", "xla"),
    ("linear_cross_entropy", "cpu"): ("xla",),
    ("linear_cross_entropy", "gpu"): ("xla",),
    ("linear_cross_entropy", "tpu"): ("pallas_tpu", "xla"),
    ("paged_attention", "cpu"): ("xla",),
    ("paged_attention", "gpu"): ("xla",),
    ("paged_attention", "tpu"): ("pallas_tpu", "xla"),
}


def attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    impl: str = "auto",
) -> jax.Array:
    """Causal grouped-query attention.

    Args:
      q_BTNH: [B, T, N, H] queries.
      k_BTKH: [B, T, K, H] keys, N divisible by K.
      v_BTKH: [B, T, K, H] values.
      segment_ids_BT: [B, T] integers, or None; tokens attend within their own segment only.
      impl: `auto`, or the name of an implementation.

    Returns:
      [B, T, N, H] in the queries' type.

    Raises:
      UserError: if the named implementation does not exist or can't take these arguments.
    """
    run = choose("attention", impl, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
    return run(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)


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
    """Returns what `minitext.loss.cross_entropy` makes of the logits x w, which a kernel need not store.

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


def choose(op: str, impl: str, *args) -> Callable[..., Any]:
    """Returns the implementation of `op` that `impl` asks for, checked against the arguments."""
    if impl == "auto":
        where = platform()
        for name in ORDER[op, where]:
            if IMPLEMENTATIONS[op, name].supports(*args) is None:
                _say_once(op, name, where)
                return IMPLEMENTATIONS[op, name].run
        raise ValueError(f"no implementation of {op} on {where} takes these arguments")
    if (op, impl) not in IMPLEMENTATIONS:
        known = ", ".join(name for o, name in IMPLEMENTATIONS if o == op)
        raise UserError(f"unknown implementation {impl!r} of {op}: choose auto, {known}")
    if reason := IMPLEMENTATIONS[op, impl].supports(*args):
        raise UserError(f"{op} cannot run as {impl!r}: {reason}")
    return IMPLEMENTATIONS[op, impl].run


def platform() -> str:
    """Returns `cpu`, `gpu` or `tpu`: that of the mesh in use, which ahead of time is not this machine's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


@functools.cache
def _say_once(op: str, name: str, where: str) -> None:
    log.info("%s on %s: %s", op, where, name)
