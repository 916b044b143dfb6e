"""Kernels on a mesh: each device runs its own on the part of the arrays it has, as the compiler can't divide one."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec


def on_each_device(run: Callable, *args, outs: tuple[tuple[int, int], ...] | None = None) -> Any:
    """Returns `run(*args)`, computed by every device on its own part of the arguments.

    Args:
      run: a function that calls a kernel.
      args: its arguments; each is an array or None.
      outs: for each result, which argument it is split like, and how many of that argument's dimensions it has. None:
        there is one result, split like the first argument.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return run(*args)
    specs = tuple(None if x is None else jax.typeof(x).sharding.spec for x in args)
    out_specs: Any = specs[0]
    if outs is not None:
        out_specs = tuple(PartitionSpec(*(specs[i] or ())[:rank]) for i, rank in outs)
    # Without types for what varies between devices, the gradient of an argument that all devices have whole is the sum
    # over all of them.
    return jax.shard_map(run, in_specs=specs, out_specs=out_specs, check_vma=False)(*args)


def split(x: jax.Array) -> tuple:
    """Returns the mesh axes that each dimension of an array is split over; None where it isn't split."""
    spec = jax.typeof(x).sharding.spec
    return (*spec, *[None] * x.ndim)[: x.ndim]


def attention_reason(q_BTNH, k_BSKH) -> str | None:
    """Returns why devices can't each attend with their own rows and heads, or None."""
    (_, q_tokens, q_heads, _), (_, k_tokens, k_heads, _) = split(q_BTNH), split(k_BSKH)
    if q_tokens or k_tokens:
        return f"it needs a device's rows whole, and tokens are split over {q_tokens}"
    if q_heads != k_heads:
        return f"heads are split over {q_heads} and kv heads over {k_heads}: split both or neither"
    return None
