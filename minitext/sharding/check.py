"""Checks a configuration against a mesh before anything is compiled, and explains each refusal in one line.

Chapters: 9.
"""

import math

from jax.sharding import AbstractMesh, Mesh

from minitext.config.config import Config
from minitext.config.model import DeltaNetConfig, MoEConfig
from minitext.config.section import cached, divisors
from minitext.errors import UserError
from minitext.sharding.mesh import BATCH_AXES
from minitext.sharding.pipeline_schedule import count_microbatches, stored_groups
from minitext.sharding.rules import RULES, ShardingRules

HOST = "pinned_host"  # JAX's name for host memory that a device can copy from


@cached
def check_mesh(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Checks that the configuration can use a mesh.

    Raises:
      UserError: if the rules don't use a mesh axis, or the batch, the sequence, a parameter or the layers can't be
        split over it, or two settings can't be combined; the line names the key to change.
    """
    rules, shape = RULES[cfg.sharding.rules], dict(mesh.shape)
    for axis, size in shape.items():
        if size > 1 and axis not in rules.axes():
            usable = ", ".join(f"mesh.{a}" for a in shape if a in rules.axes())
            raise UserError(
                f"mesh.{axis}={size} would do the same work {size} times: sharding.rules={cfg.sharding.rules} uses "
                f"only {usable}"
            )
    _check_states(cfg, shape["context"])
    _check_order(cfg, shape["context"])
    rows = _check_batch(cfg, shape)
    check_sizes(cfg, mesh)
    _check_loss(cfg, rules, shape)
    _check_combinations(cfg, shape)
    if shape["stage"] > 1:
        count_microbatches(cfg.pipeline, shape["stage"], rows)
    _check_offload(cfg, mesh)


def _check_states(cfg: Config, context: int) -> None:
    stacks = cfg.model.stacks.values()
    kinds = {type(layer.attention) for stack in stacks for layer in stack.layers}
    if context > 1 and DeltaNetConfig in kinds:
        raise UserError(
            f"mesh.context={context} cannot be combined with model.attention.kind=deltanet in any layer, whose state "
            "passes along the row from token to token: set mesh.context=1"
        )


def _check_order(cfg: Config, context: int) -> None:
    # A ring needs the tokens in an order of its own, and all layers get them in one.
    layers = [layer for stack in cfg.model.stacks.values() for layer in stack.layers]
    methods = {model.attention.context for model in (cfg.model, *layers)}
    if context > 1 and len(methods) > 1:
        raise UserError(
            f"mesh.context={context} needs one model.attention.context for all layers, and model.period has layers "
            f"with another than model.attention.context={cfg.model.attention.context}: set them to the same"
        )


def _check_batch(cfg: Config, shape: dict[str, int]) -> int:
    """Returns the number of rows in one device's part of a microbatch."""
    ways = math.prod(shape[axis] for axis in BATCH_AXES)
    rows = cfg.train.global_batch // cfg.train.microbatches
    if rows % ways:
        raise UserError(
            f"train.global_batch={cfg.train.global_batch} in train.microbatches={cfg.train.microbatches} gives "
            f"{rows} sequences, which mesh.data={shape['data']} x mesh.fsdp={shape['fsdp']} x "
            f"mesh.expert={shape['expert']} does not divide: choose train.global_batch as a multiple of "
            f"{ways * cfg.train.microbatches}"
        )
    return rows // ways


def _check_loss(cfg: Config, rules: ShardingRules, shape: dict[str, int]) -> None:
    chunks, ways = cfg.train.loss_chunks, math.prod(shape[a] for a in rules.table["residual"])
    if cfg.data.seq_len % (chunks * ways):
        raise UserError(
            f"data.seq_len={cfg.data.seq_len} is not divisible by train.loss_chunks={chunks} x {ways} device(s) that "
            f"share a sequence: choose train.loss_chunks among {divisors(cfg.data.seq_len // ways)}"
        )
    if cfg.train.loss_impl != "xla" and (ways > 1 or shape["stage"] > 1):
        raise UserError(
            f"train.loss_impl={cfg.train.loss_impl} takes whole sequences after the last layer, which {ways} device(s) "
            f"share in mesh.stage={shape['stage']} stage(s): set train.loss_impl=xla"
        )


def check_sizes(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Checks that a mesh divides the model's parameters and the sequence.

    Raises:
      UserError: if it doesn't; the line names the key to change.
    """
    rules, shape = RULES[cfg.sharding.rules], dict(mesh.shape)
    kinds = [layer for stack in cfg.model.stacks.values() for layer in stack.layers]
    sizes = [
        ("layers", *_layers(cfg)),
        ("embed", "model.embed", cfg.model.embed),
        *dict.fromkeys(size for layer in kinds for size in layer.attention.sizes(layer)),
        *dict.fromkeys(("mlp", "model.mlp", layer.mlp) for layer in kinds),
        ("vocab", "model.vocab", cfg.model.vocab),
        ("seq", "data.seq_len", cfg.data.seq_len),
        ("residual", "data.seq_len", cfg.data.seq_len),
    ]
    sizes += dict.fromkeys(("expert", "model.ffn.experts", ffn.experts) for ffn in _experts(cfg))
    table = {**rules.table, **rules.optimizer}
    rings = getattr(cfg.model.attention, "context", None) == "ring"
    for name, key, size in sizes:
        factors = {f"mesh.{axis}={shape[axis]}": shape[axis] for axis in table[name]}
        if "context" in table[name] and shape["context"] > 1 and rings:
            factors["the ring's 2 pieces"] = 2
        if "stage" in table[name] and name == "layers":
            groups = stored_groups(cfg.pipeline, shape["stage"])
            factors[f"pipeline.repeats={groups}"] = groups
        needed, used = math.prod(factors.values()), [f for f, n in factors.items() if n > 1]
        if size % needed:
            raise UserError(
                f"{key}={size} is not divisible by {' x '.join(used)}: choose a multiple of {needed}, or another "
                f"{used[0].partition('=')[0]}"
            )


def _layers(cfg: Config) -> tuple[str, int]:
    """Returns what a pipeline splits: layers, or whole periods of them."""
    period = len(cfg.model.period)
    if period < 2:
        return "model.layers", cfg.model.layers
    return f"model.layers={cfg.model.layers} in periods of {period}", cfg.model.layers // period


def _experts(cfg: Config) -> list[MoEConfig]:
    """Returns the mixtures of experts of the layers that have one."""
    layers = [layer for stack in cfg.model.stacks.values() for layer in stack.layers]
    return [layer.ffn for layer in layers if isinstance(layer.ffn, MoEConfig)]


def _check_combinations(cfg: Config, shape: dict[str, int]) -> None:
    experts, stages, context = _experts(cfg), shape["stage"], shape["context"]
    if experts and stages > 1:
        # An all-to-all inside a stage's `cond` would wait for devices whose own stages are idle.
        raise UserError(
            f"mesh.stage={stages} cannot be combined with model.ffn.kind=moe: set mesh.stage=1, and for instance "
            f"mesh.expert={stages}"
        )
    factors = [ffn.capacity_factor for ffn in experts if ffn.capacity_factor is not None]
    if factors and context > 1:
        # Which tokens are dropped depends on their positions in the row, and a device has only part of each row.
        raise UserError(
            f"model.ffn.capacity_factor={factors[0]} cannot be combined with mesh.context={context}: set "
            "model.ffn.capacity_factor=null, or mesh.context=1"
        )
    if stages > 1 and context > 1:
        # A ring inside a stage's `cond` would wait for devices whose own stages are idle, and JAX 0.10 cannot lower
        # the gradient of attention's shard_map nested in the stage's.
        raise UserError(
            f"mesh.context={context} cannot be combined with mesh.stage={stages}: set one of them to 1"
        )
    if stages > 1 and len(cfg.model.stacks) > 1:
        raise UserError(
            f"mesh.stage={stages} cannot be combined with model.dense_layers={cfg.model.dense_layers} or layers that "
            f"model.period of {len(cfg.model.period)} leaves over: set mesh.stage=1"
        )
    if cfg.train.loss_impl != "xla" and cfg.model.logit_softcap is not None:
        raise UserError(
            f"train.loss_impl={cfg.train.loss_impl} cannot be combined with model.logit_softcap="
            f"{cfg.model.logit_softcap}: set train.loss_impl=xla"
        )


def _check_offload(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Refuses offloading if the mesh's devices don't list host memory.

    In jax 0.10.2 CPUs (where host and device share one memory) and TPUs list it, real or ahead of time. Ahead-of-time
    GPUs don't, and their compiler silently leaves the state on the device.
    """
    if cfg.optim.offload and isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise UserError(
                f"optim.offload=true needs devices with {HOST} memory, and {device.device_kind} here has "
                f"{', '.join(kinds) or 'none that JAX knows of'}: set optim.offload=false"
            )
