"""Pipelines: layers split into stages over the mesh axis `stage`, and microbatches that pass from stage to stage.

Letters besides the usual ones: S stages, M microbatches, R groups of layers in each stage (above 1 only in a circular
pipeline). "Some layers" have parameters [l, ...].

Chapters: 13.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from minitext.config.sections import PipelineConfig
from minitext.sharding.pipeline_schedule import (
    backward_work,
    count_microbatches,
    forward_ticks,
    forward_work,
    groups_per_stage,
    one_f_one_b_ticks,
)
from minitext.sharding.pipeline_stages import (
    AXIS,
    broadcast,
    differentiable,
    on_each_stage,
    shift,
    varying,
)
from minitext.sharding.rules import ShardingRules, flatten_tokens, unflatten_tokens


def split_rows(x: jax.Array, parts: int, *names: str | None, rules: ShardingRules) -> jax.Array:
    """Splits [B, ...], with dimensions of these names, into [parts, B / parts, ...].

    Row b goes to part b % parts, so no row moves to another device; each device's rows must be divisible by `parts`.
    """
    shape, split = (x.shape[0] // parts, parts, *x.shape[1:]), (names[0], None, *names[1:])
    return jnp.swapaxes(jax.lax.reshape(x, shape, out_sharding=rules.out(*split)), 0, 1)


def _pick(tree: Any, number: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


def run_stages(
    layers: Callable[[Any, jax.Array, Any], jax.Array],
    params: Any,
    x_MBTD: jax.Array,
    seen: Any,
    rules: ShardingRules,
) -> jax.Array:
    """Passes M microbatches through the stages: GPipe (Huang et al. 2019), or circular if R > 1.

    The backward pass is autodiff's, which runs after all forward work and in reverse. So the activations of all
    microbatches are alive in between.

    Args:
      layers: (parameters of some layers, activations, seen) -> activations.
      params: parameters [R, L/R, ...], L/R split over `stage`: each group of a stage has L / (R*S) layers.
      x_MBTD: [M, B, T, D] activations of each microbatch.
      seen: arrays [M, B, T] that all layers see.
      rules: the sharding rules.

    Returns:
      [M, B, T, D], on all stages.
    """
    M, R = x_MBTD.shape[0], jax.tree.leaves(params)[0].shape[0]

    @partial(differentiable, in_specs=(P(None, AXIS), P(), P()), out_specs=P())
    def run(params, x_MBTD, seen):
        stage, S = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
        ticks, x_MBTD = forward_ticks(S, M, R), varying(x_MBTD)

        def tick(arrived, t):
            work = forward_work(t, stage, S, M, R)
            enters = (stage == 0) & (work.group == 0)
            x_XD = jnp.where(enters, flatten_tokens(_pick(x_MBTD, work.microbatch), rules), arrived)
            y_XD = jax.lax.cond(
                work.active,
                lambda: layers(_pick(params, work.group), x_XD, _pick(seen, work.microbatch)),
                lambda: x_XD,
            )
            return shift(y_XD, 1), y_XD

        nothing = jnp.zeros_like(flatten_tokens(x_MBTD[0], rules))
        _, y_tXD = jax.lax.scan(tick, nothing, jnp.arange(ticks))
        done = [forward_work(t, S - 1, S, M, R) for t in range(ticks)]
        leaves = [t for t, w in enumerate(done) if w.active and w.group == R - 1]
        y_MXD = broadcast(y_tXD[jnp.array(leaves)], S - 1)
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

    1F1B differs from GPipe only in its backward pass, so this runs GPipe for it.

    Args:
      layers: as in `run_stages`.
      params: parameters of all layers, [L, ...] or in a circular pipeline [R, L/R, ...].
      x_XD: [B*T, D].
      seen: positions and segments [B, T].
      cfg: the schedule.
      rules: the sharding rules.

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
    where = rules.out("batch", "seq", "act")
    y_BTD = jax.lax.reshape(jnp.swapaxes(y_MBTD, 0, 1), x_BTD.shape, out_sharding=where)
    return flatten_tokens(y_BTD, rules)


class Pieces(NamedTuple):
    """A model in three pieces; `batch` is one microbatch, arrays [B, T] by name.

    Attributes:
      embed: (parameters outside the layers, batch) -> activations [X, D].
      layers: (parameters of some layers, activations, batch) -> activations.
      loss: (parameters outside the layers, activations, batch) -> a sum to differentiate, and sums to report.
    """

    embed: Callable[[Any, Any], jax.Array]
    layers: Callable[[Any, jax.Array, Any], jax.Array]
    loss: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]


def one_forward_one_backward(
    pieces: Pieces, outer: Any, layers: Any, batch: Any
) -> tuple[tuple[jax.Array, Any], tuple[Any, Any]]:
    """Computes loss and gradients by 1F1B (Fan et al. 2021; Narayanan et al. 2021, section 2.2.1).

    In each tick a stage does the forward work of one microbatch and the backward work of another. It keeps only the
    inputs of microbatches in flight, and recomputes its layers to differentiate them. At most 2S-1 microbatches are in
    flight, whatever their number. All stages together compute the embedding of the microbatch that enters and the
    output layer and loss of the one that leaves.

    Args:
      pieces: the model.
      outer: parameters outside the layers.
      layers: parameters [L, ...], split over `stage`.
      batch: arrays [M, B, T].

    Returns:
      The sums of `Pieces.loss`, and the gradients of `outer` and `layers`, all summed over microbatches.
    """
    S, M = jax.sharding.get_abstract_mesh().shape[AXIS], _count(batch)
    x_XD = jax.eval_shape(pieces.embed, outer, _pick(batch, 0))

    def on_stages(*sizes: int) -> jax.Array:
        spec = P(AXIS, *(None for _ in sizes), *x_XD.sharding.spec)
        return jnp.zeros((S, *sizes, *x_XD.shape), x_XD.dtype, out_sharding=spec)

    def last_layer(total, y_XD, one):
        """Adds the loss of the microbatch that leaves; returns the gradient of the last stage's output too."""
        gradient = jax.value_and_grad(pieces.loss, argnums=(0, 1), has_aux=True)
        sums, (grad_outer, grad_y_XD) = gradient(outer, y_XD, one)
        return jax.tree.map(jnp.add, total, (sums, grad_outer)), grad_y_XD

    def first_layer(total, grad_x_XD, one):
        sums, grad_outer = total
        _, pull = jax.vjp(lambda outer: pieces.embed(outer, one), outer)
        return sums, jax.tree.map(jnp.add, grad_outer, *pull(grad_x_XD))

    def tick(carry, t):
        total, grad_layers, arrived, came_back, kept = carry
        leaves, entered = forward_work(t, S - 1, S, M), backward_work(t, 0, S, M)
        x_XD = pieces.embed(outer, _pick(batch, t))  # unused after M ticks, but cheap
        y_XD, arrived, kept = _forward(pieces.layers, layers, x_XD, arrived, kept, batch, t)
        total, grad_y_XD = jax.lax.cond(
            leaves.active,
            lambda: last_layer(total, y_XD, _pick(batch, leaves.microbatch)),
            lambda: (total, jnp.zeros_like(y_XD)),
        )
        grad_x_XD, came_back, grad_layers = _backward(
            pieces.layers, layers, grad_y_XD, came_back, kept, grad_layers, batch, t
        )
        total = jax.lax.cond(
            entered.active,
            lambda: first_layer(total, grad_x_XD, _pick(batch, entered.microbatch)),
            lambda: total,
        )
        return (total, grad_layers, arrived, came_back, kept), None

    sums = jax.eval_shape(pieces.loss, outer, x_XD, _pick(batch, 0))
    zero = jax.tree.map(jnp.zeros_like, ((sums, outer), layers))
    start = (*zero, on_stages(), on_stages(), on_stages(2 * S - 1))
    (total, grad_layers, *_), _ = jax.lax.scan(tick, start, jnp.arange(one_f_one_b_ticks(S, M)))
    sums, grad_outer = total
    return sums, (grad_outer, grad_layers)


def _forward(run, layers, x_XD, arrived, kept, batch, t):
    """Runs the forward half of a tick.

    Args:
      run: `Pieces.layers`.
      layers: parameters of all layers.
      x_XD: [X, D] input of the microbatch that enters stage 0.
      arrived: [S, X, D] activations that each stage received.
      kept: [S, 2S-1, X, D] inputs of the microbatches in flight.
      batch: arrays [M, B, T].
      t: the tick.

    Returns:
      The last stage's output [X, D], on all stages; `arrived` and `kept` for the next tick.
    """

    @partial(
        on_each_stage, in_specs=(P(AXIS), P(), P(AXIS), P(AXIS), P(), P()), out_specs=(P(), P(AXIS), P(AXIS))
    )  # fmt: skip
    def on_stage(layers, x_XD, arrived, kept, batch, t):
        stage, S = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
        work = forward_work(t, stage, S, _count(batch))
        x_XD = jnp.where(stage == 0, x_XD, arrived[0])

        def active():
            slots = jax.lax.dynamic_update_index_in_dim(
                kept[0], x_XD, work.microbatch % kept.shape[1], 0
            )
            return run(layers, x_XD, _pick(batch, work.microbatch)), slots

        y_XD, slots = jax.lax.cond(work.active, active, lambda: (x_XD, kept[0]))
        return broadcast(y_XD, S - 1), shift(y_XD, 1)[None], slots[None]

    return on_stage(layers, x_XD, arrived, kept, batch, t)


def _backward(run, layers, grad_y_XD, came_back, kept, grad_layers, batch, t):
    """Runs the backward half of a tick, with the arguments of `_forward` and gradients.

    `grad_y_XD` [X, D] is that of the last stage's output, `came_back` [S, X, D] are those of the other stages' outputs,
    each sent by the following stage, and `grad_layers` are those of the parameters so far.

    Returns:
      The gradient of the first stage's input [X, D], on all stages; `came_back` and `grad_layers` for the next tick.
    """

    @partial(
        on_each_stage, in_specs=(P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS), P(), P()),
        out_specs=(P(), P(AXIS), P(AXIS)),
    )  # fmt: skip
    def on_stage(layers, grad_y_XD, came_back, kept, grad_layers, batch, t):
        stage, S = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
        work = backward_work(t, stage, S, _count(batch))
        grad_y_XD = jnp.where(stage == S - 1, grad_y_XD, came_back[0])

        def active():
            x_XD = _pick(kept[0], work.microbatch % kept.shape[1])
            one = _pick(batch, work.microbatch)
            _, pull = jax.vjp(lambda layers, x_XD: run(layers, x_XD, one), layers, x_XD)
            more, grad_x_XD = pull(grad_y_XD)
            return grad_x_XD, jax.tree.map(jnp.add, grad_layers, more)

        grad_x_XD, total = jax.lax.cond(work.active, active, lambda: (grad_y_XD, grad_layers))
        return broadcast(grad_x_XD, 0), shift(grad_x_XD, -1)[None], total

    return on_stage(layers, grad_y_XD, came_back, kept, grad_layers, batch, t)


def _count(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]
