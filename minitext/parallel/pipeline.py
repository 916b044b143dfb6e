"""Pipelines: layers split in stages over the mesh axis `stage`, and microbatches that pass from one to the next.

Chapters: 13.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from minitext.config import PipelineConfig
from minitext.layers import flatten_tokens, unflatten_tokens
from minitext.parallel.schedule import (
    Work,
    backward_work,
    count_microbatches,
    forward_ticks,
    forward_work,
    groups_per_stage,
    one_f_one_b_ticks,
)
from minitext.sharding import ShardingRules

AXIS = "stage"

# Each device runs its own branch of a `cond`, so the program must be its own: `stage` is manual. Inside a stage the
# other axes stay Explicit, and layers are sharded there as anywhere else.
_on_each_stage = partial(jax.shard_map, axis_names={AXIS})


def split_rows(x: jax.Array, parts: int, *names: str | None, rules: ShardingRules) -> jax.Array:
    """Splits [B, ...] into [parts, B / parts, ...]: row b goes to part b % parts, so that no row moves.

    Args:
      x: [B, ...]; every device's rows are divisible by `parts`.
      parts: how many.
      names: names of x's dimensions.
      rules: what they mean.
    """
    shape, places = (x.shape[0] // parts, parts, *x.shape[1:]), (names[0], None, *names[1:])
    return jnp.swapaxes(jax.lax.reshape(x, shape, out_sharding=rules.out(*places)), 0, 1)


def join_rows(x: jax.Array, *names: str | None, rules: ShardingRules) -> jax.Array:
    """Undoes `split_rows`: [parts, b, ...] to [parts * b, ...]; `names` are those of the result."""
    shape = (x.shape[0] * x.shape[1], *x.shape[2:])
    return jax.lax.reshape(jnp.swapaxes(x, 0, 1), shape, out_sharding=rules.out(*names))


def _pass_on(x: jax.Array, step: int) -> jax.Array:
    """Every stage's x goes `step` stages on, round the ring."""
    S = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(x, AXIS, [(s, (s + step) % S) for s in range(S)])


def _to_all(x: jax.Array, stage: int) -> jax.Array:
    """One stage's x, on all of them."""
    return jax.lax.psum(jnp.where(jax.lax.axis_index(AXIS) == stage, x, 0), AXIS)


def _varying(tree: Any) -> Any:
    """Zeros like these arrays, typed as different on each stage."""
    return jax.tree.map(lambda x: jax.lax.pcast(jnp.zeros_like(x), AXIS, to="varying"), tree)


def _pick(tree: Any, number: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), tree
    )


def run_stages(
    layers: Callable[[Any, jax.Array, Any], jax.Array],
    params: Any,
    x_MBTD: jax.Array,
    seen: Any,
    rules: ShardingRules,
) -> jax.Array:
    """Passes M microbatches through the stages of layers: GPipe (Huang et al. 2019), or circular if R > 1.

    The backward pass is autodiff's: all forward work first, then all backward work in reverse, so the activations of
    all microbatches are alive in between.

    Args:
      layers: (parameters of some layers [l, ...], activations, context) -> activations.
      params: parameters [R, L/R, ...], L/R split over `stage`: group r of a stage has L / (R*S) layers.
      x_MBTD: [M, B, T, D] activations of each microbatch.
      seen: arrays [M, B, T] that all layers see.
      rules: where batch and sequence lie.

    Returns:
      [M, B, T, D], on all stages.
    """
    M, R = x_MBTD.shape[0], jax.tree.leaves(params)[0].shape[0]

    @partial(_on_each_stage, in_specs=(P(None, AXIS), P(), P()), out_specs=P())
    def run(params, x_MBTD, seen):
        stage, S = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
        ticks = forward_ticks(S, M, R)

        def tick(arrived, t):
            work = forward_work(t, stage, S, M, R)
            enters = (stage == 0) & (work.group == 0)
            x_XD = jnp.where(enters, flatten_tokens(_pick(x_MBTD, work.microbatch), rules), arrived)
            y_XD = jax.lax.cond(
                work.active,
                lambda: layers(_pick(params, work.group), x_XD, _pick(seen, work.microbatch)),
                lambda: x_XD,
            )
            return _pass_on(y_XD, 1), y_XD

        nothing = _varying(flatten_tokens(x_MBTD[0], rules))
        _, y_tXD = jax.lax.scan(tick, nothing, jnp.arange(ticks))
        done = [forward_work(t, S - 1, S, M, R) for t in range(ticks)]
        leaves = [t for t, w in enumerate(done) if w.active and w.group == R - 1]
        y_MXD = _to_all(y_tXD[jnp.array(leaves)], S - 1)
        shape = x_MBTD.shape
        return jax.lax.reshape(y_MXD, shape, out_sharding=rules.out(None, "batch", "seq", "act"))

    return run(params, x_MBTD, seen)


def pipelined(
    layers: Callable[[Any, jax.Array, Any], jax.Array],
    params: Any,
    x_XD: jax.Array,
    seen: tuple[jax.Array, jax.Array | None],
    *,
    cfg: PipelineConfig,
    rules: ShardingRules,
) -> jax.Array:
    """Runs all layers on a batch through a pipeline.

    Args:
      layers: (parameters of some layers, activations, seen) -> activations.
      params: parameters of all layers, [L, ...] or in a circular pipeline [R, L/R, ...].
      x_XD: [B*T, D].
      seen: positions and segments [B, T].
      cfg: the schedule; 1F1B differs from GPipe in its backward pass only, so this is GPipe.
      rules: where batch and layers lie.

    Returns:
      [B*T, D].
    """
    S, B = jax.sharding.get_abstract_mesh().shape[AXIS], seen[0].shape[0]
    M = count_microbatches(cfg, S, B // rules.ways("batch"))
    if groups_per_stage(cfg) == 1:
        params = jax.tree.map(lambda x: x[None], params)
    x_BTD = unflatten_tokens(x_XD, B, "act", sizes=x_XD.shape[-1:], rules=rules)
    x_MBTD = split_rows(x_BTD, M, "batch", "seq", "act", rules=rules)
    seen = jax.tree.map(lambda x: split_rows(x, M, "batch", "seq", rules=rules), seen)
    y_MBTD = run_stages(layers, params, x_MBTD, seen, rules)
    y_BTD = join_rows(y_MBTD, "batch", "seq", "act", rules=rules)
    return flatten_tokens(y_BTD, rules)
