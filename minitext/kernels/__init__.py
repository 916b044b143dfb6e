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
from minitext.kernels import cudnn, flash_attention_tpu, reference
from minitext.kernels.mask import CAUSAL
from minitext.kernels.mask import Mask as Mask
from minitext.kernels.reference import cached_attention as cached_attention

log = logging.getLogger("minitext.kernels")


class Implementation(NamedTuple):
    """One way to compute an operation.

    Attributes:
      run: the function.
      supports: takes the same arguments and returns None, or the reason why `run` can't take them.
    """

    run: Callable[..., jax.Array]
    supports: Callable[..., str | None]


def _always(*_args, **_options) -> None:
    return None


def _plain(supports: Callable[..., str | None]) -> Callable[..., str | None]:
    """For implementations that know the causal mask and segments and no option beyond."""

    def check(*args, **options) -> str | None:
        if options:
            return f"it computes causal attention without {', '.join(options)}"
        return supports(*args)

    return check


def _blocked_supports(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT=None) -> str | None:
    T = q_BTNH.shape[1]
    if T % 4 or T < 128:
        return f"it needs at least 128 tokens, and a number divisible by 4: got T={T}"
    return None


def _cudnn_supports(*args) -> str | None:
    return cudnn.supports(*args, platform=platform())


def _flash_tpu_supports(*args, **options) -> str | None:
    return flash_attention_tpu.supports(*args, **options, platform=platform())


IMPLEMENTATIONS: dict[tuple[str, str], Implementation] = {
    ("attention", "xla"): Implementation(reference.attention, _always),
    ("attention", "xla_blocked"): Implementation(
        reference.blocked_attention, _plain(_blocked_supports)
    ),
    ("attention", "cudnn"): Implementation(cudnn.attention, _plain(_cudnn_supports)),
    ("attention", "pallas_tpu"): Implementation(
        flash_attention_tpu.flash_attention, _flash_tpu_supports
    ),
}

# The order in which `auto` tries implementations on each platform.
ORDER: dict[tuple[str, str], tuple[str, ...]] = {
    ("attention", "cpu"): ("xla_blocked", "xla"),
    ("attention", "gpu"): ("cudnn", "xla"),
    ("attention", "tpu"): ("pallas_tpu", "xla"),
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


def choose(op: str, impl: str, *args, **options) -> Callable[..., jax.Array]:
    """Returns the implementation of `op` that `impl` asks for, checked against the arguments."""
    if impl == "auto":
        where = platform()
        for name in ORDER[op, where]:
            if IMPLEMENTATIONS[op, name].supports(*args, **options) is None:
                _say_once(op, name, where)
                return IMPLEMENTATIONS[op, name].run
        raise ValueError(f"no implementation of {op} on {where} takes these arguments")
    if (op, impl) not in IMPLEMENTATIONS:
        known = ", ".join(name for o, name in IMPLEMENTATIONS if o == op)
        raise UserError(f"unknown implementation {impl!r} of {op}: choose auto, {known}")
    if reason := IMPLEMENTATIONS[op, impl].supports(*args, **options):
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
