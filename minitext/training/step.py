"""The training state and the step: pure functions, jitted at the edge.

`make_train_step` is what `minitext train` runs, the benchmarks time, and `minitext compile` compiles for chips that
aren't there. Nothing here looks at `jax.devices()`: the mesh says where arrays are.

Chapters: 6.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from minitext.checkpoint import stacks
from minitext.compiler.options import compiler_options
from minitext.config.config import Config
from minitext.config.model import ModelConfig
from minitext.config.section import cached
from minitext.config.sections import OptimConfig, PipelineConfig, ShardingConfig
from minitext.errors import UserError
from minitext.models import moe
from minitext.models.transformer import Transformer
from minitext.sharding.check import HOST, check_mesh
from minitext.sharding.mesh import BATCH_AXES
from minitext.sharding.pipeline import Pieces, one_forward_one_backward, split_rows
from minitext.sharding.pipeline_schedule import count_microbatches, stored_groups
from minitext.sharding.rules import RULES, ShardingRules, reshard_tree, rules_of, tree_shardings
from minitext.training import nonfinite
from minitext.training.objective import Batch, Objective, count_targets, language_modelling
from minitext.training.optim import DIRECTIONS, make_optimizer, make_schedule, state_bytes

Metrics = dict[str, jax.Array]


class Sums(NamedTuple):
    """What is reported about a batch or a part of it, before dividing by its `Objective.weight`.

    Attributes:
      values: the objective's sums by name; of language modelling, `loss` is the negative log-likelihood of the targets,
        in nats.
      routing: in a mixture of experts, the layers' routing, with its means multiplied by the weight.
    """

    values: dict[str, jax.Array]
    routing: moe.Routing | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step changes.

    Attributes:
      step: int32 scalar, steps taken.
      params: `nnx.State` of the float32 parameters that are trained.
      opt_state: the optimizer's state.
      frozen: `nnx.State` of the model's other parameters, or None. Checkpoints don't have it.
      reference: `nnx.State` of another model's parameters that the objective compares with, or None. Checkpoints don't
        have it.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    frozen: Any = None
    reference: Any = None

    @property
    def model_params(self) -> Any:
        """All parameters of the model."""
        return self.params if self.frozen is None else nnx.merge_state(self.frozen, self.params)

    @property
    def saved(self) -> "TrainState":
        """What checkpoints have of it."""
        return dataclasses.replace(self, frozen=None, reference=None)


@cached
def abstract_state(cfg: Config, mesh: Mesh | AbstractMesh) -> TrainState:
    """Returns the state's shapes, types and shardings without allocating anything."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shapes = jax.eval_shape(_initialiser(cfg, mesh))
    rules = RULES[cfg.sharding.rules]
    shardings = tree_shardings(shapes, mesh, rules)
    of_optimizer = tree_shardings(shapes.opt_state, mesh, rules.of_optimizer)
    if cfg.optim.offload:
        of_optimizer = jax.tree.map(lambda s: s.with_memory_kind(HOST), of_optimizer)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        dataclasses.replace(shardings, opt_state=of_optimizer),
    )


@cached
def make_init(
    cfg: Config, mesh: Mesh | AbstractMesh, frozen: bool = True
) -> Callable[[], TrainState]:
    """Returns the jitted function that draws the state; every array is born on its shard.

    The same arguments give the same function, which compiles once.

    Args:
      cfg: the configuration.
      mesh: the devices.
      frozen: whether parameters that aren't trained are drawn too.
    """
    check_mesh(cfg, mesh)
    abstract = abstract_state(cfg, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract if frozen else abstract.saved)
    return jax.jit(_initialiser(cfg, mesh, frozen), out_shardings=shardings)


def init_state(cfg: Config, mesh: Mesh, frozen: bool = True) -> TrainState:
    """Draws the parameters from `train.seed`, the same on every mesh, with the arguments of `make_init`."""
    with jax.set_mesh(mesh):
        return make_init(cfg, mesh, frozen)()


def _initialiser(
    cfg: Config, mesh: Mesh | AbstractMesh | None = None, frozen: bool = True
) -> Callable[[], TrainState]:
    """Returns the function that draws the state; one and the same while what it depends on is, so JAX traces it once.

    A circular pipeline's layers are stored [repeats, L / repeats, ...].
    """
    repeats = stored_groups(cfg.pipeline, mesh.shape["stage"]) if mesh is not None else 1
    return _draws(
        cfg.model, cfg.sharding, cfg.optim, cfg.train.steps, cfg.train.seed, repeats, frozen
    )


@cached
def _draws(
    model_cfg: ModelConfig,
    sharding: ShardingConfig,
    optim: OptimConfig,
    steps: int,
    seed: int,
    repeats: int,
    keep_frozen: bool,
) -> Callable[[], TrainState]:
    def init() -> TrainState:
        model = Transformer(model_cfg, rules=rules_of(sharding), rngs=nnx.Rngs(seed))
        if repeats > 1:
            graphdef, blocks = nnx.split(model.blocks)
            model.blocks = nnx.merge(graphdef, stacks.in_groups(blocks, repeats))
        params, frozen = nnx.state(model, nnx.Param), None
        if model_cfg.lora.rank:
            # A value head is no part of the base, and learned with the adapters.
            trained = nnx.Any(nnx.LoRAParam, nnx.PathContains("value"))
            params, frozen = nnx.split_state(params, trained, ...)
        opt_state = make_optimizer(optim, steps).init(params)
        state = TrainState(jnp.zeros((), jnp.int32), params, opt_state, frozen)
        return state if keep_frozen else state.saved

    return init


def abstract_batch(
    cfg: Config, mesh: Mesh | AbstractMesh, objective: Objective | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, types and shardings of one batch, [B, T] each."""
    shape = (cfg.train.global_batch, cfg.data.seq_len)
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, None))  # as `make_batches` places it
    kinds = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32) | {
        "loss_mask": jnp.float32
    }
    kinds |= dict.fromkeys(objective.arrays if objective else (), jnp.float32)
    return {
        name: jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for name, kind in kinds.items()
    }


def optimizer_memory(cfg: Config) -> dict[str, dict[str, int]]:
    """Returns the bytes of `parameters`, `gradients` and `state` over all devices, for each kind of optimizer."""
    state = jax.eval_shape(_initialiser(cfg))
    params = state.params

    def size(tree: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    return {
        kind: {
            "parameters": size(params) + size(state.frozen),
            "gradients": size(params),
            "state": state_bytes(cfg.optim.model_copy(update={"kind": kind}), params),
        }
        for kind in DIRECTIONS
    }


def model_def(cfg: Config) -> Any:
    """Returns the model's static part; `nnx.merge(model_def(cfg), params)` is the model."""
    return _static_part(cfg.model, cfg.sharding, cfg.pipeline)


@cached
def _static_part(model: ModelConfig, sharding: ShardingConfig, pipeline: PipelineConfig) -> Any:
    new = partial(Transformer, model, rules=rules_of(sharding), pipeline=pipeline)
    return nnx.graphdef(nnx.eval_shape(lambda: new(rngs=nnx.Rngs(0))))


def make_loss_fn(
    cfg: Config, objective: Objective | None = None
) -> Callable[..., tuple[jax.Array, Sums]]:
    """Returns a function of (params, batch, frozen=None) giving the summed loss and `Sums`.

    Args:
      cfg: the configuration.
      objective: what to minimise; None: cross-entropy, in nats.
    """
    graphdef, rules = model_def(cfg), RULES[cfg.sharding.rules]
    objective = objective or language_modelling(cfg)

    def loss_fn(params, batch, frozen=None):
        batch = _sharded(batch, rules)
        model = nnx.merge(graphdef, *(() if frozen is None else (frozen,)), params)
        x_BTD, _, routing = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
        loss, values = objective.summed(model, x_BTD, batch)
        if routing is None:
            return loss, Sums(values)
        weight = objective.weight(batch)
        loss = loss + weight * jnp.sum(routing.loss)
        return loss, Sums(values, moe.scaled(routing, weight))

    return loss_fn


def make_value_and_grad(
    cfg: Config, mesh: Mesh | AbstractMesh, objective: Objective | None = None
) -> Callable[..., Any]:
    """Returns a function of (params, batch, frozen=None) giving ((summed loss, `Sums`), the gradients of params).

    It's autodiff's, except for the pipeline schedule 1F1B: autodiff can't interleave forward and backward work.
    """
    S = mesh.shape["stage"]
    if S == 1 or cfg.pipeline.schedule != "1f1b":
        return jax.value_and_grad(make_loss_fn(cfg, objective), has_aux=True)
    graphdef, rules = model_def(cfg), RULES[cfg.sharding.rules]
    summed = (objective or language_modelling(cfg)).summed

    def value_and_grad(params, batch, frozen=None):
        assert frozen is None  # `check_trainable`
        model = nnx.merge(graphdef, params)
        blocks, outer = nnx.split_state(params, nnx.PathContains("blocks"), ...)
        blocks_def = nnx.graphdef(model.blocks)

        def with_outer(outer):
            return nnx.merge(graphdef, nnx.merge_state(outer, blocks))

        def layers(blocks, x_XD, one):
            seen = model.order_tokens((one["positions"], one["segment_ids"]))
            return model.apply_layers(nnx.merge(blocks_def, blocks["blocks"]), x_XD, *seen)[0]

        def loss(outer, x_XD, one):
            model = with_outer(outer)
            x_BTD = model.final_norm(x_XD, one["tokens"].shape[0])
            return summed(model, x_BTD, one)

        def embed(outer, one):
            return with_outer(outer).embed_tokens(model.order_tokens(one["tokens"]))

        M = count_microbatches(cfg.pipeline, S, batch["tokens"].shape[0] // rules.ways("batch"))
        batch = _sharded(batch, rules)
        parts = {n: split_rows(x, M, "batch", "seq", rules=rules) for n, x in batch.items()}
        pieces = Pieces(embed, layers, loss)
        (total, values), grads = one_forward_one_backward(pieces, outer, blocks, parts)
        return (total, Sums(values)), nnx.merge_state(*grads)

    return value_and_grad


def check_trainable(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Checks that a model can be trained on a mesh (`check_mesh`).

    Raises:
      UserError: if not; if weights are stored in fewer bits and no adapters are trained; or if the pipeline's schedule
        can't leave weights as they are.
    """
    if cfg.model.is_stored and not cfg.model.lora.rank:
        raise UserError(
            "model.storage stores weights in fewer bits, and training changes float32 ones: train adapters beside them "
            "(model.lora.rank=8) or the run from which they were quantized, or set model.storage=[]"
        )
    if cfg.model.lora.rank and mesh.shape["stage"] > 1 and cfg.pipeline.schedule == "1f1b":
        raise UserError(
            f"pipeline.schedule=1f1b trains all weights, and model.lora.rank={cfg.model.lora.rank} only adapters: set "
            "pipeline.schedule=gpipe"
        )
    check_mesh(cfg, mesh)


def make_train_step(
    cfg: Config, mesh: Mesh | AbstractMesh, objective: Objective | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the jitted train step `(state, batch) -> (state, metrics)`; the old state's memory is reused.

    Metrics are float32 scalars: those of the objective, by default `loss` (nats per target token over the whole batch);
    `grad_norm` (before clipping), `learning_rate`, and `tokens` (target tokens in the batch); for a mixture of experts
    also those of `moe.metrics`; and with `train.on_nan=skip` whether the step was `skipped`, 0 or 1.
    """
    step = make_step_fn(cfg, mesh, objective)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return step(state, batch)[:2]

    return jax.jit(train_step, donate_argnums=0, compiler_options=compiler_options(cfg.xla, mesh))


def make_step_fn(
    cfg: Config, mesh: Mesh | AbstractMesh, objective: Objective | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics, Any]]:
    """Returns the function that `make_train_step` jits, `(state, batch) -> (state, metrics, gradients)`."""
    check_trainable(cfg, mesh)
    rules = RULES[cfg.sharding.rules]
    optimizer = make_optimizer(cfg.optim, cfg.train.steps)
    schedule = make_schedule(cfg.optim, cfg.train.steps)
    objective = objective or language_modelling(cfg)
    value_and_grad = make_value_and_grad(cfg, mesh, objective)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, Any]:
        # Sums over the whole batch are divided once: a mean of the microbatches' or devices' means would weight tokens
        # by how full their part of the batch is.
        weight = objective.weight(batch)

        def prepared(params, part):
            return value_and_grad(
                params, _prepare(cfg, objective, state, part), frozen=state.frozen
            )

        sums, grads = accumulate(prepared, cfg)(state.params, batch)
        share = 1.0 / jnp.where(weight == 0, 1.0, weight)
        # With ZeRO each device updates the parameters whose optimizer state it holds, and then all gather them.
        params, grads = (reshard_tree(x, rules.of_optimizer) for x in (state.params, grads))
        grads = jax.tree.map(lambda g: g * share, grads)
        opt_state = state.opt_state
        if cfg.optim.offload:
            opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
        old = state.params, opt_state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        with jax.named_scope("optimizer"):
            params = optax.apply_updates(params, updates)
        params = reshard_tree(params, rules)
        if sums.routing is not None and state.frozen is None:
            params = moe.update_bias(params, sums.routing.load_E, cfg.model)
        metrics = {
            **{name: value * share for name, value in sums.values.items()},
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "tokens": count_targets(batch),
        }
        if sums.routing is not None:
            metrics |= moe.metrics(moe.scaled(sums.routing, share))
        if cfg.train.on_nan == "skip":
            finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            params, opt_state = nonfinite.skip(finite, (params, opt_state), old)
            metrics["skipped"] = jnp.where(finite, 0.0, 1.0)
        if cfg.optim.offload:
            opt_state = jax.device_put(opt_state, jax.memory.Space.Host)
        changes = {"step": state.step + 1, "params": params, "opt_state": opt_state}
        return dataclasses.replace(state, **changes), metrics, grads

    return step


def _prepare(cfg: Config, objective: Objective, state: TrainState, batch: Batch) -> Batch:
    """Returns the batch with what the objective needs of its reference model."""
    if objective.prepare is None:
        return batch
    reference = state.frozen if state.reference is None else state.reference
    return objective.prepare(reference, _sharded(batch, RULES[cfg.sharding.rules]))


def _sharded(batch: Batch, rules: ShardingRules) -> Batch:
    return {name: rules.shard(x, "batch", "seq") for name, x in batch.items()}


def accumulate(value_and_grad: Callable, cfg: Config) -> Callable[[Any, Batch], tuple[Sums, Any]]:
    """Returns a function giving `Sums` and the gradient, summed over microbatches one after another."""
    M, rules = cfg.train.microbatches, RULES[cfg.sharding.rules]

    def whole(params, batch):
        (_, sums), grads = value_and_grad(params, batch)
        return sums, reshard_tree(grads, rules.of_optimizer) if rules.scatter else grads

    def split(x_BT):
        return split_rows(x_BT, M, "batch", None, rules=rules)

    def in_parts(params, batch):
        def add(total, part):
            return jax.tree.map(jnp.add, total, whole(params, part)), None

        parts = jax.tree.map(split, batch)
        sums, _ = jax.eval_shape(whole, params, jax.tree.map(lambda x: x[0], parts))
        zero = jax.tree.map(jnp.zeros_like, (sums, params))
        if rules.scatter:
            zero = reshard_tree(zero, rules.of_optimizer)
        return jax.lax.scan(add, zero, parts)[0]

    return whole if M == 1 else in_parts


def make_eval_step(
    cfg: Config, objective: Objective | None = None
) -> Callable[..., tuple[dict[str, jax.Array], jax.Array]]:
    """Returns a jitted function of (state, batch) giving the objective's sums by name, and what to divide them by."""
    objective = objective or language_modelling(cfg)
    loss_fn = make_loss_fn(cfg, objective)

    def eval_step(state, batch):
        weight, batch = objective.weight(batch), _prepare(cfg, objective, state, batch)
        return loss_fn(state.params, batch, state.frozen)[1].values, weight

    return jax.jit(eval_step)


def evaluate(
    eval_step: Callable, state: TrainState, batches: Any, limit: int | None = None
) -> dict[str, float]:
    """Returns the means of an objective's sums by name, such as `loss`, over at most `limit` batches."""
    total, count = dict[str, float](), 0.0
    for i, batch in enumerate(batches):
        if limit is not None and i >= limit:
            break
        values, weight = eval_step(state, batch)
        total = {name: total.get(name, 0.0) + float(value) for name, value in values.items()}
        count += float(weight)
    return {name: value / max(count, 1.0) for name, value in total.items()}
