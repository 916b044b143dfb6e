"""The settings: frozen pydantic models with types, defaults, one-line descriptions and rules between values.

`minitext.config.config` fills them from presets, files and the command line. A value's type and range are checked by
pydantic; `faults` adds the rules that hold between values, each as one line with the values, the rule and a way out.

Chapters: 6.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from minitext.config.section import Section, divisors


class RunConfig(Section):
    """Where a run keeps what it makes."""

    dir: str = Field(default="runs", description="folder that holds run directories")
    name: str | None = Field(
        default=None,
        description="run directory below run.dir; null: named after the time it starts",
    )


class TrainConfig(Section):
    """The training loop."""

    steps: int = Field(default=1000, ge=1, description="optimizer steps in the whole run")
    global_batch: int = Field(
        default=16, ge=1, description="sequences per step, over all devices and microbatches"
    )
    microbatches: int = Field(
        default=1, ge=1, description="parts a step's batch is split into; gradients are accumulated"
    )
    save_every: int = Field(default=100, ge=1, description="steps between checkpoints")
    eval_every: int = Field(
        default=100, ge=1, description="steps between measurements of the validation loss"
    )
    eval_batches: int = Field(
        default=8, ge=1, description="batches in one measurement of the validation loss"
    )
    sample_tokens: int = Field(
        default=160, ge=0, description="tokens of text sampled at start, middle and end; 0: none"
    )
    z_loss: float = Field(
        default=0.0, ge=0, description="weight of the squared log-normalizer in the loss"
    )
    loss_chunks: int = Field(
        default=1,
        ge=1,
        description="parts of the sequence whose logits are computed one after another",
    )
    loss_impl: Literal["xla", "auto", "pallas_tpu", "pallas_gpu"] = Field(
        default="xla",
        description="xla: logits, then their loss; a kernel: both at once, with less memory and more work; auto: the "
        "platform's",
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the parameters")
    on_nan: Literal["stop", "skip"] = Field(
        default="stop", description="what becomes of a step whose loss or gradient is not finite"
    )
    hang_seconds: float | None = Field(
        default=None,
        gt=0,
        description="seconds without the end of a step, after which every process writes its stacks; null: never",
    )
    executable: str | None = Field(
        default=None,
        description="file of minitext compile --save to run in place of compiling the step; null: compile",
    )

    def faults(self) -> Iterator[str]:
        """Yields the faults: microbatches that don't divide the batch, chunks of logits that a kernel does not make."""
        if self.loss_impl != "xla" and self.loss_chunks > 1:
            yield (
                f"train.loss_chunks={self.loss_chunks} divides logits, which train.loss_impl={self.loss_impl} may not "
                "make: set train.loss_chunks=1 or train.loss_impl=xla"
            )
        if self.global_batch % self.microbatches:
            yield (
                f"train.global_batch={self.global_batch} is not divisible by "
                f"train.microbatches={self.microbatches}: choose train.microbatches among "
                f"{divisors(self.global_batch)}"
            )


class MeshConfig(Section):
    """How devices are arranged. One axis may be -1: it takes the devices that the others leave."""

    data: int = Field(default=-1, description="replicas, each with its part of the batch")
    fsdp: int = Field(
        default=1,
        description="parts of every parameter and of the batch (fully sharded data parallel)",
    )
    tensor: int = Field(default=1, description="parts of heads and feed-forward width")
    context: int = Field(default=1, description="parts of the sequence")
    expert: int = Field(default=1, description="parts of the experts")
    stage: int = Field(default=1, description="parts of the layers (pipeline)")
    simulate: int | None = Field(
        default=None, ge=1, le=1024, description="CPU devices to simulate; null: what is there"
    )

    def sizes(self) -> dict[str, int]:
        """Returns the axes in mesh order with their configured sizes, -1 left as it is."""
        return {
            name: getattr(self, name)
            for name in ("stage", "data", "fsdp", "context", "tensor", "expert")
        }

    def faults(self) -> Iterator[str]:
        """Yields a fault for a size that is no size and for more than one -1."""
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
    """Which dimension of an array lies on which axis of the mesh."""

    rules: Literal[
        "dp", "zero1", "zero2", "fsdp", "tp", "tp_seq", "fsdp_tp", "cp", "pp", "ep", "all"
    ] = Field(
        default="all",
        description="what mesh axes split; all: every axis splits what it is named for",
    )


class PipelineConfig(Section):
    """How microbatches pass through the stages of layers; it matters only if `mesh.stage` is above 1."""

    schedule: Literal["gpipe", "1f1b", "circular"] = Field(
        default="1f1b",
        description="gpipe: all forward, then all backward; 1f1b: as fast, with less memory; circular: a shorter "
        "wait, with more messages",
    )
    microbatches: int | None = Field(
        default=None,
        ge=1,
        description="parts of a batch that are in the pipeline together; null: up to four for each stage",
    )
    repeats: int = Field(
        default=2, ge=1, description="circular: groups of layers on each stage, in turns"
    )


class OptimConfig(Section):
    """The optimizer and its schedule."""

    kind: Literal["adamw", "sgd", "lion", "muon"] = Field(
        default="adamw", description="how a gradient becomes an update"
    )
    learning_rate: float = Field(
        default=3e-4, gt=0, description="learning rate at the peak of the schedule"
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine", description="course of the rate after warm-up"
    )
    warmup_steps: int = Field(default=100, ge=0, description="steps of linear warm-up")
    decay_share: float = Field(
        default=0.2, gt=0, le=1, description="part of all steps in which wsd decays, at their end"
    )
    min_ratio: float = Field(
        default=0.1, ge=0, le=1, description="rate at the end of a decay, as a share of the peak"
    )
    b1: float = Field(
        default=0.9, ge=0, lt=1, description="decay of the first moment, or of sgd's and muon's sum"
    )
    b2: float = Field(
        default=0.95, ge=0, lt=1, description="decay of the second moment, or of lion's memory"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(
        default=0.1, ge=0, description="decoupled decay of matrices; norms have none"
    )
    clip_norm: float = Field(default=1.0, gt=0, description="largest global norm of the gradients")
    offload: bool = Field(
        default=False,
        description="whether the state waits in the host's memory between steps (run on CPUs, only compiled for TPUs)",
    )


class CheckpointConfig(Section):
    """Checkpoints."""

    keep: int = Field(default=3, ge=1, description="newest checkpoints to keep")
    keep_every: int | None = Field(
        default=None, ge=1, description="keep those at multiples of this step too; null: none"
    )
    local_dir: str | None = Field(
        default=None,
        description="folder on each process's own disk for copies between checkpoints; null: none",
    )
    local_every: int = Field(
        default=10, ge=1, description="steps between copies in checkpoint.local_dir"
    )
    load_full_state: str | None = Field(
        default=None, description="run whose parameters, optimizer and step a new run goes on from"
    )
    load_parameters: str | None = Field(
        default=None, description="run or export whose parameters a new run begins with, at step 0"
    )

    def faults(self) -> Iterator[str]:
        """Yields a fault if two runs are to be loaded."""
        if self.load_full_state is not None and self.load_parameters is not None:
            both = f"{self.load_full_state} and checkpoint.load_parameters={self.load_parameters}"
            yield f"checkpoint.load_full_state={both} are both set: choose one of them"


class ProfileConfig(Section):
    """What is recorded of a run for a closer look."""

    first_step: int | None = Field(
        default=None, ge=1, description="first step of the trace; null: none is made"
    )
    steps: int = Field(default=3, ge=1, description="steps in the trace")
    port: int | None = Field(
        default=None,
        ge=1024,
        lt=65536,
        description="port at which other tools ask for a trace, process i at port + i; null: none",
    )
    dump_hlo: bool = Field(
        default=False, description="whether XLA writes the train step's programs into RUN/hlo"
    )
    dump_llo: bool = Field(
        default=False, description="whether the TPU's compiler writes its machine code into RUN/llo"
    )
