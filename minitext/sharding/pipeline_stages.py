"""Runs a pipeline stage's program on its devices, and sends arrays between stages.

Chapters: 13.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from minitext import hardware

AXIS = "stage"


def on_each_stage(f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `shard_map` of f over `stage`; arrays keep their shardings along other axes.

    Stages take different branches of a `cond`, so `stage` has to be a manual axis. Inside a stage the other axes stay
    Explicit, and layers are sharded as usual. But JAX 0.10 gathers arrays over Explicit axes when they enter or leave a
    partly manual `shard_map`; over Auto axes the compiler chooses. So the other axes are Auto at this boundary, which
    autodiff can't cross (see `differentiable`).

    Args:
      f: a function of arrays, or trees of arrays.
      in_specs: how they are split over `stage`.
      out_specs: how its results are split over `stage`.
    """

    def run(*args):
        mesh, out_shardings = jax.sharding.get_abstract_mesh(), []
        rest = tuple(axis for axis in mesh.axis_names if axis != AXIS)

        def inside(*args):
            out = f(*args)
            out_shardings.append(jax.tree.map(_spec, out))
            return out

        outside = jax.tree.map(lambda x: _part(_spec(x), lambda axis: axis == AXIS), args)
        within = jax.tree.map(lambda x: _part(_spec(x), lambda axis: axis != AXIS), args)
        explicit = jax.sharding.explicit_axes(inside, axes=rest, in_sharding=within)
        mapped = jax.shard_map(explicit, axis_names={AXIS}, in_specs=in_specs, out_specs=out_specs)
        auto = mesh.update_axis_types(dict.fromkeys(rest, AxisType.Auto))
        with jax.sharding.use_abstract_mesh(auto):
            out = mapped(*jax.sharding.reshard(args, outside))
        return jax.sharding.reshard(out, jax.tree.map(_join, out, out_shardings[-1]))

    return run


def differentiable(f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `on_each_stage` of f with a gradient for every argument but the last, which holds integers."""
    program = []  # the backward pass's tree structure, known once the forward pass is traced

    def forward(*args):
        def keep(*args):
            *args, seen = args
            y, pull = jax.vjp(lambda *args: f(*args, seen), *args)
            kept, tree = jax.tree.flatten(pull)
            program.append(tree)
            return y, [x[None] for x in kept]

        return on_each_stage(keep, in_specs, (out_specs, P(AXIS)))(*args)

    def backward(kept, grad):
        def pull(kept, grad):
            return jax.tree.unflatten(program[-1], [x[0] for x in kept])(grad)

        grads = on_each_stage(pull, (P(AXIS), out_specs), tuple(in_specs[:-1]))(kept, grad)
        return (*grads, None)

    run = jax.custom_vjp(on_each_stage(f, in_specs, out_specs))
    run.defvjp(forward, backward)
    return run


def _spec(x: jax.Array) -> P:
    return jax.typeof(x).sharding.spec


def _part(spec: P, wanted: Callable[[Any], bool]) -> P:
    return P(*(axes if wanted(axes) else None for axes in spec))


def _join(x: jax.Array, rest: P) -> P:
    """Combines the spec in x's type, which knows only `stage`, with that of the other axes."""
    return P(*(a or b for a, b in itertools.zip_longest(_spec(x), rest)))


def shift(x: jax.Array, step: int) -> jax.Array:
    """Sends every stage's x `step` stages forward around the ring."""
    S = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(x, AXIS, [(s, (s + step) % S) for s in range(S)])


def broadcast(x: jax.Array, stage: int) -> jax.Array:
    """Returns one stage's x on all stages."""
    mine = jnp.where(jax.lax.axis_index(AXIS) == stage, x, 0)
    return jax.lax.psum(mine.astype(_sum_type(x)), AXIS).astype(x.dtype)


def varying(x: jax.Array) -> jax.Array:
    """Types an x that is equal on all stages as varying, so its gradient is summed over them."""
    return jax.lax.pcast(x.astype(_sum_type(x)), AXIS, to="varying").astype(x.dtype)


def _sum_type(x: jax.Array) -> Any:
    # A bfloat16 sum over one manual axis crashes XLA's CPU backend ("Invalid binary instruction opcode copy").
    return jnp.float32 if hardware.platform() == "cpu" else x.dtype
