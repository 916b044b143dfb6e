"""The smaller sections: run, training loop, mesh, sharding, pipeline, optimizer, checkpoints, compiler and profiling.

Chapters: 6.
"""

import re
from collections.abc import Iterator
from typing import Literal

from minitext.config.section import LocalPath, OptionalPath, Section, divisors, setting
from minitext.files import path_problem, shorten

# Rules by which no layer gathers its weights.
NOT_GATHERED = ("dp", "zero1", "zero2", "tp", "tp_seq")


class RunConfig(Section):
    """Where a run keeps its files."""

    dir: LocalPath = setting("runs", "folder that holds run directories")
    name: str | None = setting(None, "run directory in run.dir; null: named after its start time")

    def problems(self) -> Iterator[str]:
        """Checks that the name is that of one folder, which run.dir then holds."""
        if self.name is None:
            return
        problem = path_problem(self.name)
        if problem is None and ("/" in self.name or self.name in (".", "..")):
            problem = "is not the name of a folder in run.dir"
        if problem:
            yield f"run.name={shorten(self.name)} {problem}: choose a name such as run.name=a1"


class TrainConfig(Section):
    """The training loop."""

    steps: int = setting(1000, "optimizer steps in the whole run", ge=1, lt=2**31)
    global_batch: int = setting(16, "sequences per step, over all devices and microbatches", ge=1)
    microbatches: int = setting(1, "parts of a batch whose gradients are accumulated", ge=1)
    save_every: int = setting(100, "steps between checkpoints", ge=1)
    eval_every: int = setting(100, "steps between evaluations of the validation loss", ge=1)
    eval_batches: int = setting(8, "batches per evaluation", ge=1)
    sample_tokens: int = setting(160, "tokens sampled at start, middle and end; 0: none", ge=0)
    z_loss: float = setting(0.0, "weight of the squared logsumexp in the loss", ge=0)
    loss_chunks: int = setting(1, "parts of the sequence whose logits are computed in turn", ge=1)
    loss_impl: Literal["xla", "auto", "pallas_tpu", "pallas_gpu"] = setting(
        "xla",
        "xla: logits, then loss; a kernel: both at once, with less memory and more work; auto: the platform's default",
    )
    seed: int = setting(0, "seed of the parameters", ge=0, lt=2**31)
    on_nan: Literal["stop", "skip"] = setting("stop", "when a loss or gradient isn't finite")
    hang_seconds: float | None = setting(
        None,
        "seconds without a step's end, ten times as many for the first, until stacks are written and the job ends",
        gt=0,
        le=1e6,
    )
    executable: OptionalPath = setting(
        None, "file from minitext compile --save that replaces compiling the step; null: compile"
    )

    def problems(self) -> Iterator[str]:
        """Checks that microbatches divide the batch, and that there are logits to compute in chunks."""
        if self.loss_impl != "xla" and self.loss_chunks > 1:
            yield (
                f"train.loss_chunks={self.loss_chunks} splits the logits, which train.loss_impl={self.loss_impl} may "
                "never make: set train.loss_chunks=1 or train.loss_impl=xla"
            )
        if self.global_batch % self.microbatches:
            yield (
                f"train.global_batch={self.global_batch} is not divisible by train.microbatches={self.microbatches}: "
                f"choose train.microbatches among {divisors(self.global_batch)}"
            )


class SlicesConfig(Section):
    """The factor of each mesh axis that crosses slices, which are joined by the slow data-centre network.

    The factors multiply to the number of slices. If all are 1, the first of data, stage and fsdp that can takes them
    all.
    """

    data: int = setting(1, "factor of mesh.data that crosses slices", ge=1)
    fsdp: int = setting(1, "factor of mesh.fsdp that crosses slices", ge=1)
    tensor: int = setting(1, "factor of mesh.tensor that crosses slices; costly", ge=1)
    context: int = setting(1, "factor of mesh.context that crosses slices; costly", ge=1)
    expert: int = setting(1, "factor of mesh.expert that crosses slices; costly", ge=1)
    stage: int = setting(1, "factor of mesh.stage that crosses slices", ge=1)

    def factors(self) -> dict[str, int]:
        """Returns the factors above 1."""
        return {name: size for name, size in self if size > 1}


class MeshConfig(Section):
    """The device mesh. One axis may be -1: it takes all the devices that the others leave."""

    data: int = setting(-1, "replicas, each with its part of the batch")
    fsdp: int = setting(1, "parts of parameters and of the batch (fully sharded data parallel)")
    tensor: int = setting(1, "parts of heads and feed-forward width")
    context: int = setting(1, "parts of the sequence")
    expert: int = setting(1, "parts of the experts")
    stage: int = setting(1, "parts of the layers (pipeline)")
    dcn: SlicesConfig = setting(SlicesConfig(), "axes that cross slices")
    simulate: int | None = setting(None, "CPU devices to simulate; null: none", ge=1, le=1024)

    def sizes(self) -> dict[str, int]:
        """Returns the axes in mesh order with their configured sizes, -1 left as it is."""
        names = ("stage", "data", "fsdp", "context", "tensor", "expert")
        return {name: getattr(self, name) for name in names}

    def problems(self) -> Iterator[str]:
        """Checks that sizes are positive or -1, and that only one is -1."""
        for name, size in self.sizes().items():
            if size < 1 and size != -1:
                yield f"mesh.{name}={size} is not a size: set it to 1 or more, or to -1 for all remaining devices"
        free = [name for name, size in self.sizes().items() if size == -1]
        if len(free) > 1:
            yield (
                f"mesh.{' and mesh.'.join(free)} are both -1, and only one axis can take the remaining devices: set "
                f"mesh.{free[0]}=1"
            )


class ShardingConfig(Section):
    """Which mesh axes split which dimensions."""

    rules: Literal[
        "dp", "zero1", "zero2", "fsdp", "tp", "tp_seq", "fsdp_tp", "cp", "pp", "ep", "all"
    ] = setting("all", "what the mesh axes split; all: each axis splits what it is named for")
    gather_dtype: Literal["auto", "int8"] = setting(
        "auto",
        "how devices send layers' weights that they store in parts; auto: in the compute type; int8: rounded, half of "
        "bfloat16's bytes",
    )

    def problems(self) -> Iterator[str]:
        """Checks that weights are stored in parts if their gathering is set."""
        if self.gather_dtype != "auto" and self.rules in NOT_GATHERED:
            yield (
                f"sharding.gather_dtype={self.gather_dtype} with sharding.rules={self.rules}: no layer gathers "
                "its weights: set sharding.rules=fsdp, or leave sharding.gather_dtype out"
            )


class PipelineConfig(Section):
    """How microbatches pass through the pipeline's stages; has an effect only if `mesh.stage` is above 1."""

    schedule: Literal["gpipe", "1f1b", "circular"] = setting(
        "1f1b",
        "gpipe: all forward, then all backward; 1f1b: as fast, less memory; circular: smaller bubble, more messages",
    )
    microbatches: int | None = setting(None, "microbatches in flight; null: up to 4 a stage", ge=1)
    repeats: int = setting(2, "circular: groups of layers on each stage", ge=1)


class OptimConfig(Section):
    """The optimizer and its schedule."""

    kind: Literal["adamw", "sgd", "lion", "muon"] = setting("adamw", "update rule")
    learning_rate: float = setting(3e-4, "peak learning rate", gt=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = setting(
        "cosine", "shape of the learning rate after warm-up"
    )
    warmup_steps: int = setting(100, "steps of linear warm-up", ge=0, lt=2**31)
    decay_share: float = setting(0.2, "wsd: final share of the steps that decay", gt=0, le=1)
    min_ratio: float = setting(0.1, "final learning rate as a share of the peak", ge=0, le=1)
    b1: float = setting(0.9, "decay of the first moment, or of sgd's and muon's sum", ge=0, lt=1)
    b2: float = setting(0.95, "decay of the second moment, or of lion's memory", ge=0, lt=1)
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = setting(0.1, "decoupled decay of matrices; norms have none", ge=0)
    clip_norm: float = setting(1.0, "largest global norm of the gradients", gt=0)
    offload: bool = setting(
        False, "keep the state in host memory between steps (runs on CPUs, only compiles for TPUs)"
    )


class CheckpointConfig(Section):
    """Checkpoints."""

    keep: int = setting(3, "newest checkpoints to keep", ge=1)
    keep_every: int | None = setting(None, "also keep multiples of this step; null: none", ge=1)
    local_dir: OptionalPath = setting(
        None, "folder on each process's own disk for copies between checkpoints; null: none"
    )
    local_every: int = setting(10, "steps between copies in checkpoint.local_dir", ge=1)
    load_full_state: OptionalPath = setting(
        None, "run whose parameters, optimizer state and step a new run continues from"
    )
    load_parameters: OptionalPath = setting(
        None, "run or export whose parameters a new run starts from, at step 0"
    )

    def problems(self) -> Iterator[str]:
        """Checks that at most one run is to be loaded."""
        if self.load_full_state is not None and self.load_parameters is not None:
            both = f"{self.load_full_state} and checkpoint.load_parameters={self.load_parameters}"
            yield f"checkpoint.load_full_state={both} are both set: choose one of them"


XLA_OPTION = re.compile(r"(--)?xla_[a-z0-9_]{1,100}=[\w./:,+-]{1,100}")


class XLAConfig(Section):
    """XLA's compiler."""

    recommended: bool = setting(
        True,
        "use the options that are recommended for a chip: minitext compile --options lists them",
    )
    options: tuple[str, ...] = setting(
        (),
        "more of its options for the train step, as in XLA_FLAGS: [xla_tpu_scoped_vmem_limit_kib=98304]",
    )

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the names and values in `options`."""
        found = [text.removeprefix("--").partition("=") for text in self.options]
        return [(name, value) for name, _, value in found]

    def problems(self) -> Iterator[str]:
        """Checks that each option is a name of XLA's and a value."""
        for text in self.options:
            if not XLA_OPTION.fullmatch(text):
                yield (
                    f"xla.options has {shorten(text)!r}: give names and values such as "
                    "xla_tpu_scoped_vmem_limit_kib=98304"
                )


class ProfileConfig(Section):
    """Traces and compiler dumps."""

    first_step: int | None = setting(None, "first step of the trace; null: no trace", ge=1)
    steps: int = setting(3, "steps in the trace", ge=1)
    port: int | None = setting(
        None,
        "port where tools request a trace, port + i for process i; null: none",
        ge=1024,
        lt=65536,
    )
    dump_hlo: bool = setting(False, "have XLA write the train step's programs into RUN/hlo")
    dump_llo: bool = setting(False, "have the TPU compiler write its machine code into RUN/llo")
