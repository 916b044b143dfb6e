"""Programs of which every stage of a pipeline runs its own, and what stages send each other.

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
    """Returns `shard_map` of f over `stage`, into and out of which arrays keep their places along other axes.

    Each device runs its own branch of a `cond`, so the program must be its own: `stage` is manual. Inside a stage the
    other axes stay Explicit, and layers are sharded there as anywhere else. On its way into a partly manual `shard_map`
    and out, JAX 0.10 gathers an array over Explicit axes; where it lies along Auto axes is left to the compiler. So the
    other axes are Auto at this border, which autodiff cannot cross: `differentiable`.

    Args:
      f: a function of arrays, or trees of arrays.
      in_specs: where they are split over `stage`.
      out_specs: where its results are.
    """

    def run(*args):
        mesh, places = jax.sharding.get_abstract_mesh(), []
        rest = tuple(axis for axis in mesh.axis_names if axis != AXIS)

        def inside(*args):
            out = f(*args)
            places.append(jax.tree.map(_spec, out))
            return out

        outside = jax.tree.map(lambda x: _part(_spec(x), lambda axis: axis == AXIS), args)
        within = jax.tree.map(lambda x: _part(_spec(x), lambda axis: axis != AXIS), args)
        explicit = jax.sharding.explicit_axes(inside, axes=rest, in_sharding=within)
        mapped = jax.shard_map(explicit, axis_names={AXIS}, in_specs=in_specs, out_specs=out_specs)
        auto = mesh.update_axis_types(dict.fromkeys(rest, AxisType.Auto))
        with jax.sharding.use_abstract_mesh(auto):
            out = mapped(*jax.sharding.reshard(args, outside))
        return jax.sharding.reshard(out, jax.tree.map(_join, out, places[-1]))

    return run


def differentiable(f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `on_each_stage` of f with a gradient: for all arguments but the last, which are integers."""
    program = []  # of the backward pass, known once the forward pass is traced

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
    """The spec of x, whose type has `stage` alone, with what is known of the other axes."""
    return P(*(a or b for a, b in itertools.zip_longest(_spec(x), rest)))


def shift(x: jax.Array, step: int) -> jax.Array:
    """Every stage's x goes `step` stages on, round the ring."""
    S = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(x, AXIS, [(s, (s + step) % S) for s in range(S)])


def broadcast(x: jax.Array, stage: int) -> jax.Array:
    """One stage's x, on all of them."""
    mine = jnp.where(jax.lax.axis_index(AXIS) == stage, x, 0)
    return jax.lax.psum(mine.astype(_sum_type(x)), AXIS).astype(x.dtype)


def varying(x: jax.Array) -> jax.Array:
    """An x that is the same on all stages, typed as different; its gradient is the sum of theirs."""
    return jax.lax.pcast(x.astype(_sum_type(x)), AXIS, to="varying").astype(x.dtype)


def _sum_type(x: jax.Array) -> Any:
    # Of a bfloat16 sum over one manual axis XLA's CPU backend dies ("Invalid binary instruction opcode copy").
    return jnp.float32 if hardware.platform() == "cpu" else x.dtype
