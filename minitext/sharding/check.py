"""What a configuration cannot do on a mesh, refused in one line before anything is compiled.

Chapters: 9.
"""

import functools
import math

from jax.sharding import AbstractMesh, Mesh

from minitext.config.config import Config
from minitext.config.model import MoEConfig
from minitext.config.section import divisors
from minitext.errors import UserError
from minitext.sharding.mesh import BATCH_AXES
from minitext.sharding.pipeline_schedule import count_microbatches, stored_groups
from minitext.sharding.rules import RULES, ShardingRules

HOST = "pinned_host"  # JAX's name of the host's memory from which a device can copy


@functools.lru_cache(maxsize=64)
def check_mesh(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a mesh that the configuration cannot use; the line names the key to change.

    Raises:
      UserError: if a mesh axis has no use under the rules, or the batch, the sequence, a parameter or the layers
        cannot be split over it, or two settings do not go together.
    """
    rules, shape = RULES[cfg.sharding.rules], dict(mesh.shape)
    _check_use(cfg, rules, shape)
    rows = _check_batch(cfg, shape)
    _check_sizes(cfg, rules, shape)
    _check_loss(cfg, rules, shape)
    _check_experts(cfg, shape)
    _check_stages(cfg, shape, rows)
    _check_offload(cfg, mesh)


def _check_use(cfg: Config, rules: ShardingRules, shape: dict[str, int]) -> None:
    for axis, size in shape.items():
        if size > 1 and axis not in rules.axes():
            usable = ", ".join(f"mesh.{a}" for a in shape if a in rules.axes())
            raise UserError(
                f"mesh.{axis}={size} would do the same work {size} times: sharding.rules={cfg.sharding.rules} uses "
                f"only {usable}"
            )


def _check_batch(cfg: Config, shape: dict[str, int]) -> int:
    """Returns the rows of a microbatch on one device."""
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


def _check_sizes(cfg: Config, rules: ShardingRules, shape: dict[str, int]) -> None:
    sizes = [
        ("layers", "model.layers", cfg.model.layers),
        ("embed", "model.embed", cfg.model.embed),
        *(("embed", *more) for more in cfg.model.attention.embed_sizes().items()),
        ("heads", "model.heads", cfg.model.heads),
        ("kv_heads", "model.kv_heads", cfg.model.K),
        ("mlp", "model.mlp", cfg.model.mlp),
        ("vocab", "model.vocab", cfg.model.vocab),
        ("seq", "data.seq_len", cfg.data.seq_len),
        ("residual", "data.seq_len", cfg.data.seq_len),
    ]
    if isinstance(cfg.model.ffn, MoEConfig):
        sizes.append(("expert", "model.ffn.experts", cfg.model.ffn.experts))
    table = {**rules.table, **rules.optimizer}
    for name, key, size in sizes:
        factors = {f"mesh.{axis}={shape[axis]}": shape[axis] for axis in table[name]}
        if "context" in table[name] and cfg.model.attention.context == "ring":
            factors["the ring's 2 pieces"] = 2 if shape["context"] > 1 else 1
        if "stage" in table[name] and name == "layers":
            groups = stored_groups(cfg.pipeline, shape["stage"])
            factors[f"pipeline.repeats={groups}"] = groups
        needed, used = math.prod(factors.values()), [f for f, n in factors.items() if n > 1]
        if size % needed:
            raise UserError(
                f"{key}={size} is not divisible by {' x '.join(used)}: choose a multiple of {needed}, or another "
                f"{used[0].partition('=')[0]}"
            )


def _check_experts(cfg: Config, shape: dict[str, int]) -> None:
    ffn = cfg.model.ffn
    if not isinstance(ffn, MoEConfig):
        return
    if shape["stage"] > 1:
        # Inside a stage's `cond` an all-to-all would wait for devices of stages that wait themselves.
        raise UserError(
            f"mesh.stage={shape['stage']} does not go with model.ffn.kind=moe: set mesh.stage=1, and for instance "
            f"mesh.expert={shape['stage']}"
        )
    if shape["context"] > 1 and ffn.capacity_factor is not None:
        # Who is dropped is decided by position in the row, of which a device has a part.
        raise UserError(
            f"model.ffn.capacity_factor={ffn.capacity_factor} does not go with mesh.context={shape['context']}: set "
            "model.ffn.capacity_factor=null, or mesh.context=1"
        )


def _check_stages(cfg: Config, shape: dict[str, int], rows: int) -> None:
    if shape["stage"] == 1:
        return
    if shape["context"] > 1:
        # Inside a stage's `cond` a ring would wait for devices of stages that wait themselves, and JAX 0.10 cannot
        # lower the gradient of attention's own shard_map within the stage's.
        raise UserError(
            f"mesh.context={shape['context']} does not go with mesh.stage={shape['stage']}: set one of them to 1"
        )
    count_microbatches(cfg.pipeline, shape["stage"], rows)


def _check_offload(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Refuses to offload to a host whose memory the mesh's devices don't name.

    On jax 0.10.2 those of CPUs (where host and device share one memory) and of TPUs do, real and ahead of time.
    Ahead-of-time GPUs don't, and their compiler then leaves the state on the device without saying so.
    """
    if cfg.optim.offload and isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise UserError(
                f"optim.offload=true needs devices with {HOST} memory, and {device.device_kind} here has "
                f"{', '.join(kinds) or 'none that JAX knows of'}: set optim.offload=false"
            )
