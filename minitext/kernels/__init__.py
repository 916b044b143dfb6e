"""Kernels: one public function per operation, several implementations behind a table.

`impl="auto"` takes the first implementation in the platform's order that supports the arguments and logs once which
one; a named implementation that cannot run raises with the reason. Nothing falls back silently.

Chapters: 4, 17.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax

from minitext.errors import UserError
from minitext.kernels import cudnn, grouped_matmul_tpu, grouped_matmul_xla, reference
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


def _always(*_args) -> None:
    return None


def _blocked_supports(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT=None) -> str | None:
    T = q_BTNH.shape[1]
    if T % 4 or T < 128:
        return f"it needs at least 128 tokens, and a number divisible by 4: got T={T}"
    return None


def _cudnn_supports(*args) -> str | None:
    return cudnn.supports(*args, platform=platform())


def _grouped_matmul_tpu_supports(*args) -> str | None:
    return grouped_matmul_tpu.supports(*args, platform=platform())


IMPLEMENTATIONS: dict[tuple[str, str], Implementation] = {
    ("attention", "xla"): Implementation(reference.attention, _always),
    ("attention", "xla_blocked"): Implementation(reference.blocked_attention, _blocked_supports),
    ("attention", "cudnn"): Implementation(cudnn.attention, _cudnn_supports),
    ("grouped_matmul", "xla"): Implementation(grouped_matmul_xla.grouped_matmul, _always),
    ("grouped_matmul", "pallas_tpu"): Implementation(
        grouped_matmul_tpu.grouped_matmul, _grouped_matmul_tpu_supports
    ),
}

# The order in which `auto` tries implementations on each platform.
ORDER: dict[tuple[str, str], tuple[str, ...]] = {
    ("attention", "cpu"): ("xla_blocked", "xla"),
    ("attention", "gpu"): ("cudnn", "xla"),
    ("attention", "tpu"): ("xla",),
    ("grouped_matmul", "cpu"): ("xla",),
    ("grouped_matmul", "gpu"): ("xla",),
    ("grouped_matmul", "tpu"): ("pallas_tpu", "xla"),
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


def choose(op: str, impl: str, *args) -> Callable[..., jax.Array]:
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
