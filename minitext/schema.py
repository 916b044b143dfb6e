"""The settings: frozen pydantic models with types, defaults, one-line descriptions and rules between values.

`minitext.config` fills them from presets, files and the command line. A value's type and range are checked by
pydantic; `faults` adds the rules that hold between values, each as one line with the values, the rule and a way out.

Chapters: 6.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo
from pydantic import model_validator as _model_validator


class Section(BaseModel):
    """A frozen group of settings; `faults()` yields what is wrong between its values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def faults(self) -> Iterator[str]:
        """Yields one line for every rule between values that does not hold."""
        yield from ()

    @_model_validator(mode="after")
    def _check(self, info: ValidationInfo):
        # Inside a whole Config the faults of all sections are gathered and reported together (Config.faults).
        if not (info.context and info.context.get("whole")) and (faults := list(self.faults())):
            raise ValueError("; ".join(faults))
        return self


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
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the parameters")

    def faults(self) -> Iterator[str]:
        """Yields the fault if microbatches does not divide the batch."""
        if self.global_batch % self.microbatches:
            yield (
                f"train.global_batch={self.global_batch} is not divisible by "
                f"train.microbatches={self.microbatches}: choose train.microbatches among "
                f"{_divisors(self.global_batch)}"
            )


class DataConfig(Section):
    """What text is read and how it becomes rows of tokens."""

    source: Literal["stdlib", "grammar", "files", "arrayrecord", "hf"] = Field(
        default="stdlib",
        description="Python's own library, a synthetic grammar, local files, packed files, or Hugging Face",
    )
    path: str | None = Field(
        default=None, description="files: a file, folder or glob of text; arrayrecord: the folder"
    )
    seq_len: int = Field(default=256, ge=2, le=2**24, description="tokens per row (T)")
    tokenizer: Literal["byte", "bpe"] = Field(
        default="byte", description="bytes, or byte-pair encoding trained on the source"
    )
    text_key: str = Field(
        default="text",
        description="field that holds the text in jsonl, parquet and Hugging Face records",
    )
    hf_name: str | None = Field(
        default=None, description="hf: dataset name, or parquet or json with data.path"
    )
    hf_subset: str | None = Field(default=None, description="hf: configuration of the dataset")
    hf_split: str = Field(default="train", description="hf: split of the dataset")
    validation_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="share of the rows held out for validation"
    )
    shuffle: bool = Field(
        default=True, description="whether training rows come in random order, new in every epoch"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the order of rows")

    def faults(self) -> Iterator[str]:
        """Yields a fault for a source that lacks its setting or has one that it cannot use."""
        if self.source == "files" and not self.path:
            yield "data.source=files needs data.path: set it to a file, a folder or a glob"
        if self.source == "arrayrecord" and not self.path:
            yield "data.source=arrayrecord needs data.path: set it to a folder that minitext data pack made"
        if self.source == "hf" and not self.hf_name:
            yield "data.source=hf needs data.hf_name: set it to a dataset's name, such as allenai/c4"
        if self.source == "grammar" and self.tokenizer != "byte":
            yield (
                f"data.tokenizer={self.tokenizer} does not go with data.source=grammar, whose entropy rate is "
                "computed per byte: set data.tokenizer=byte"
            )


class GQAConfig(Section):
    """Grouped-query attention (Ainslie et al. 2023); heads and widths stand in `model`."""

    kind: Literal["gqa"] = Field(default="gqa", description="grouped-query attention")
    impl: Literal["auto", "xla", "xla_blocked", "cudnn"] = Field(
        default="auto", description="implementation of the attention kernel"
    )


class SwiGLUConfig(Section):
    """Gated feed-forward layer (Shazeer 2020); its width stands in `model.mlp`."""

    kind: Literal["swiglu"] = Field(default="swiglu", description="gated linear unit with SiLU")


class ModelConfig(Section):
    """The decoder: sizes, numerics and how its layers are run."""

    vocab: int = Field(default=320, ge=2, description="rows of the embedding table (V)")
    layers: int = Field(default=4, ge=1, description="decoder layers (L)")
    embed: int = Field(default=192, ge=1, description="width of the residual stream (D)")
    heads: int = Field(default=6, ge=1, description="query heads (N)")
    kv_heads: int | None = Field(
        default=None, ge=1, description="key and value heads (K); null: as many as heads"
    )
    head_dim: int | None = Field(
        default=None, ge=2, description="width of a head (H); null: embed / heads"
    )
    mlp: int = Field(default=512, ge=1, description="width of the feed-forward layer (F)")
    rope_theta: float = Field(default=10_000.0, gt=0, description="base of the rotary frequencies")
    norm_eps: float = Field(default=1e-6, gt=0, description="added to the mean square in RMSNorm")
    tie_embeddings: bool = Field(
        default=False, description="whether the output layer is the embedding table transposed"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="compute type; parameters stay float32"
    )
    scan_layers: bool = Field(
        default=True, description="run layers by lax.scan (compiles once) instead of unrolled"
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="none",
        description="what the backward pass recomputes: nothing, all but matmuls, or everything",
    )
    attention: GQAConfig = Field(default=GQAConfig(), description="attention variant")
    ffn: SwiGLUConfig = Field(default=SwiGLUConfig(), description="feed-forward variant")

    @property
    def K(self) -> int:
        """Key and value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def H(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim or self.embed // self.heads

    def faults(self) -> Iterator[str]:
        """Yields a fault for each pair of sizes that do not go together."""
        if self.head_dim is None and self.embed % self.heads:
            yield (
                f"model.embed={self.embed} is not divisible by model.heads={self.heads}: choose model.heads "
                f"among {_divisors(self.embed)}, or set model.head_dim"
            )
        elif self.H % 2:
            yield (
                f"model.head_dim={self.H} is odd, and rotary positions turn pairs: choose model.heads so that "
                "embed / heads is even, or set an even model.head_dim"
            )
        if self.heads % self.K:
            yield (
                f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}: choose "
                f"model.kv_heads among {_divisors(self.heads)}"
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
            yield f"mesh.{' and mesh.'.join(free)} are both -1: only one axis can take the remaining devices"


class ShardingConfig(Section):
    """Which dimension of an array lies on which axis of the mesh."""

    rules: Literal["dp", "fsdp"] = Field(
        default="fsdp", description="dp: replicated parameters; fsdp: sharded parameters"
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
    warmup_steps: int = Field(default=100, ge=0, description="steps of linear warm-up from zero")
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


class CheckpointConfig(Section):
    """Checkpoints."""

    keep: int = Field(default=3, ge=1, description="newest checkpoints to keep")
    keep_every: int | None = Field(
        default=None, ge=1, description="keep those at multiples of this step too; null: none"
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


class Config(Section):
    """A whole configuration, resolved and checked."""

    run: RunConfig = Field(default=RunConfig(), description="run directory")
    train: TrainConfig = Field(default=TrainConfig(), description="training loop")
    data: DataConfig = Field(default=DataConfig(), description="data")
    model: ModelConfig = Field(default=ModelConfig(), description="model")
    mesh: MeshConfig = Field(default=MeshConfig(), description="devices")
    sharding: ShardingConfig = Field(default=ShardingConfig(), description="sharding")
    optim: OptimConfig = Field(default=OptimConfig(), description="optimizer")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="checkpoints")
    _provenance: dict[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        # Two configurations are equal if their values are, wherever those came from.
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def faults(self) -> Iterator[str]:
        """Yields the faults of every section."""
        for name in type(self).model_fields:
            yield from getattr(self, name).faults()

    def provenance(self, key: str) -> str:
        """Returns the layer a dotted key's value came from, such as `preset laptop` or `command line`."""
        return self._provenance.get(key, "default")

    def replace(self, values: Mapping[str, Any]) -> "Config":
        """Returns a copy with dotted keys (`{"train.steps": 3}`) replaced and everything checked again."""
        from minitext.config import resolve

        return resolve([("replaced", dict(values))], base=self)


def _divisors(n: int) -> str:
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")
