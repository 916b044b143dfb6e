"""Configuration: frozen pydantic models, presets, overrides, and where every value came from.

A configuration is built in layers, each overriding the one before it:

    defaults  <  preset (configs/NAME.yml)  <  config=FILE  <  key=value on the command line

`load_config("laptop", ["train.steps=300"])` resolves the layers, checks every value and every relation between
values, and returns a frozen `Config` that remembers the layer of each value. Nothing here touches a device, and the
preset's name is never read again after loading.

Chapters: 6.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo
from pydantic import model_validator as _model_validator

from minitext.errors import UserError

DEFAULT_PRESET = "laptop"


class ConfigError(UserError):
    """One or more faults in a configuration, one line each."""

    def __init__(self, faults: Sequence[str]):
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


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

    dir: str = Field("runs", description="folder that holds run directories")
    name: str | None = Field(None, description="run directory below run.dir; null: named after the time it starts")


class TrainConfig(Section):
    """The training loop."""

    steps: int = Field(1000, ge=1, description="optimizer steps in the whole run")
    global_batch: int = Field(16, ge=1, description="sequences per step, over all devices and microbatches")
    microbatches: int = Field(1, ge=1, description="parts a step's batch is split into; gradients are accumulated")
    save_every: int = Field(100, ge=1, description="steps between checkpoints")
    eval_every: int = Field(100, ge=1, description="steps between measurements of the validation loss")
    eval_batches: int = Field(8, ge=1, description="batches in one measurement of the validation loss")
    sample_tokens: int = Field(160, ge=0, description="tokens of text sampled at start, middle and end; 0: none")
    z_loss: float = Field(0.0, ge=0, description="weight of the squared log-normalizer in the loss")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the parameters")

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

    source: Literal["stdlib", "grammar", "files", "hf"] = Field(
        "stdlib", description="the Python standard library's text, a synthetic grammar, local files, or Hugging Face"
    )
    path: str | None = Field(None, description="files: a file, folder or glob of txt, md, py, jsonl or parquet")
    seq_len: int = Field(256, ge=2, le=2**24, description="tokens per row (T)")
    tokenizer: Literal["byte", "bpe"] = Field("byte", description="bytes, or byte-pair encoding trained on the source")
    text_key: str = Field("text", description="field that holds the text in jsonl, parquet and Hugging Face records")
    hf_name: str | None = Field(None, description="hf: dataset name, or parquet or json with data.path")
    hf_subset: str | None = Field(None, description="hf: configuration of the dataset")
    hf_split: str = Field("train", description="hf: split of the dataset")
    validation_fraction: float = Field(0.05, gt=0, lt=1, description="share of the rows held out for validation")
    shuffle: bool = Field(True, description="whether training rows come in random order, new in every epoch")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the order of rows")

    def faults(self) -> Iterator[str]:
        """Yields a fault for a source that lacks its setting or has one that it cannot use."""
        if self.source == "files" and not self.path:
            yield "data.source=files needs data.path: set it to a file, a folder or a glob"
        if self.source == "hf" and not self.hf_name:
            yield "data.source=hf needs data.hf_name: set it to a dataset's name, such as allenai/c4"
        if self.source == "grammar" and self.tokenizer != "byte":
            yield (
                f"data.tokenizer={self.tokenizer} does not go with data.source=grammar, whose entropy rate is "
                "computed per byte: set data.tokenizer=byte"
            )


class GQAConfig(Section):
    """Grouped-query attention (Ainslie et al. 2023); heads and widths stand in `model`."""

    kind: Literal["gqa"] = Field("gqa", description="grouped-query attention")
    impl: Literal["auto", "xla", "xla_blocked"] = Field("auto", description="implementation of the attention kernel")


class SwiGLUConfig(Section):
    """Gated feed-forward layer (Shazeer 2020); its width stands in `model.mlp`."""

    kind: Literal["swiglu"] = Field("swiglu", description="gated linear unit with SiLU")


class ModelConfig(Section):
    """The decoder: sizes, numerics and how its layers are run."""

    vocab: int = Field(320, ge=2, description="rows of the embedding table (V)")
    layers: int = Field(4, ge=1, description="decoder layers (L)")
    embed: int = Field(192, ge=1, description="width of the residual stream (D)")
    heads: int = Field(6, ge=1, description="query heads (N)")
    kv_heads: int | None = Field(None, ge=1, description="key and value heads (K); null: as many as heads")
    head_dim: int | None = Field(None, ge=2, description="width of a head (H); null: embed / heads")
    mlp: int = Field(512, ge=1, description="width of the feed-forward layer (F)")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    norm_eps: float = Field(1e-6, gt=0, description="added to the mean square in RMSNorm")
    tie_embeddings: bool = Field(False, description="whether the output layer is the embedding table transposed")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="compute type; parameters stay float32")
    scan_layers: bool = Field(True, description="run layers by lax.scan (compiles once) instead of unrolled")
    remat: Literal["none", "dots", "full"] = Field(
        "none", description="what the backward pass recomputes: nothing, all but matmuls, or everything"
    )
    attention: GQAConfig = Field(GQAConfig(), description="attention variant")
    ffn: SwiGLUConfig = Field(SwiGLUConfig(), description="feed-forward variant")

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

    data: int = Field(-1, description="replicas, each with its part of the batch")
    fsdp: int = Field(1, description="parts of every parameter and of the batch (fully sharded data parallel)")
    tensor: int = Field(1, description="parts of heads and feed-forward width")
    context: int = Field(1, description="parts of the sequence")
    expert: int = Field(1, description="parts of the experts")
    stage: int = Field(1, description="parts of the layers (pipeline)")
    simulate: int | None = Field(None, ge=1, le=1024, description="CPU devices to simulate; null: what is there")

    def sizes(self) -> dict[str, int]:
        """Returns the axes in mesh order with their configured sizes, -1 left as it is."""
        return {name: getattr(self, name) for name in ("stage", "data", "fsdp", "context", "tensor", "expert")}

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

    rules: Literal["dp", "fsdp"] = Field("fsdp", description="dp: replicated parameters; fsdp: sharded parameters")


class OptimConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(3e-4, gt=0, description="learning rate at the peak of the schedule")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="course of the rate after warm-up")
    warmup_steps: int = Field(100, ge=0, description="steps of linear warm-up from zero")
    min_ratio: float = Field(0.1, ge=0, le=1, description="rate at the end of cosine, as a share of the peak")
    b1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    b2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled decay of matrices; norms have none")
    clip_norm: float = Field(1.0, gt=0, description="largest global norm of the gradients")


class CheckpointConfig(Section):
    """Checkpoints."""

    keep: int = Field(3, ge=1, description="newest checkpoints to keep")


class Config(Section):
    """A whole configuration, resolved and checked."""

    run: RunConfig = Field(RunConfig(), description="run directory")
    train: TrainConfig = Field(TrainConfig(), description="training loop")
    data: DataConfig = Field(DataConfig(), description="data")
    model: ModelConfig = Field(ModelConfig(), description="model")
    mesh: MeshConfig = Field(MeshConfig(), description="devices")
    sharding: ShardingConfig = Field(ShardingConfig(), description="sharding")
    optim: OptimConfig = Field(OptimConfig(), description="optimizer")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="checkpoints")
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
        return _resolve([("replaced", dict(values))], base=self)


def keys(section: type[Section] = Config, prefix: str = "") -> dict[str, Any]:
    """Returns every dotted key of the configuration with its pydantic field, in order."""
    found = {}
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        sections = [k for k in kinds if isinstance(k, type) and get_origin(k) is None and issubclass(k, Section)]
        if not sections:
            found[prefix + name] = field
        for kind in sections:
            found |= keys(kind, f"{prefix}{name}.")
    return found


def presets() -> list[str]:
    """Returns the names of the presets that come with the package."""
    return sorted(p.name[:-4] for p in resources.files("minitext.configs").iterdir() if p.name.endswith(".yml"))


def load_config(preset: str | None = DEFAULT_PRESET, overrides: Sequence[str] = ()) -> Config:
    """Resolves a configuration.

    Args:
      preset: name of a preset, or None for the defaults alone.
      overrides: `key=value` strings with dotted keys; values are YAML. `config=FILE` adds a layer from a file
        before the others, and then the preset counts only if it is named.

    Returns:
      The frozen configuration.

    Raises:
      ConfigError: for an unknown preset, key or value, or values that do not go together; one line each.
    """
    pairs = [_split(text) for text in overrides]
    files = [value for key, value in pairs if key == "config"]
    layers = []
    if preset is not None:
        if preset not in presets():
            raise ConfigError([f"unknown preset {preset!r}{_suggest(preset, presets())}; presets: {', '.join(presets())}"])
        text = resources.files("minitext.configs").joinpath(f"{preset}.yml").read_text(encoding="utf-8")
        layers.append((f"preset {preset}", _flatten(_parse(text, f"preset {preset}"))))
    for file in files:
        layers.append((f"file {file}", _flatten(_read(file))))
    line: dict[str, Any] = {}
    for key, value in pairs:
        if key != "config":
            parsed = _parse(value, key)
            line |= _flatten({key: parsed}) if isinstance(parsed, Mapping) else {key: parsed}
    layers.append(("command line", line))
    return _resolve(layers)


def to_yaml(cfg: Config, *, provenance: bool = False) -> str:
    """Writes a resolved configuration as YAML, with each value's origin as a comment if asked for.

    `load_config(None, ["config=FILE"])` reads it back to an equal configuration.
    """
    text = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    if not provenance:
        return text
    lines, path = [], []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = [*path[:depth], line.strip().split(":")[0]]
        key = ".".join(path)
        lines.append(f"{line:<40}# {cfg.provenance(key)}" if key in keys() else line)
    return "\n".join(lines) + "\n"


def _resolve(layers: Sequence[tuple[str, dict[str, Any]]], base: Config | None = None) -> Config:
    """Lays the layers over each other, reports every unknown key, then validates once."""
    known = keys()
    tree = base.model_dump() if base else {}
    origin = dict(base._provenance) if base else {}
    faults = []
    for layer, values in layers:
        for key, value in values.items():
            if key not in known:
                faults.append(f"unknown key {key!r} ({layer}){_suggest(key, list(known))}")
                continue
            node = tree
            *path, leaf = key.split(".")
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = value
            origin[key] = layer
    if faults:
        raise ConfigError(faults)
    try:
        cfg = Config.model_validate(tree, context={"whole": True})
    except ValidationError as error:
        raise ConfigError([_say(e, known, origin) for e in error.errors()]) from None
    if faults := list(cfg.faults()):
        raise ConfigError(faults)
    cfg._provenance.update(origin)
    return cfg


def _say(error: Any, known: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    """Turns one of pydantic's errors into one line: key, value, origin, rule."""
    key = ".".join(str(part) for part in error["loc"])
    while key not in known and "." in key:
        key = key.rpartition(".")[0]
    rule = error["msg"][:1].lower() + error["msg"][1:]
    return f"{key}={_short(error['input'])} ({origin.get(key, 'default')}): {rule}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split()) if not isinstance(value, str) else ascii(value)[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."


def _split(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError([f"{_short(text)!r} is not key=value, such as train.steps=300"])
    return key.strip(), value


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError) as error:
        reason = " ".join(str(getattr(error, "problem", None) or error).split())[:80]
        raise ConfigError([f"{where}: {_short(text)} is not YAML ({reason})"]) from None


def _read(file: str) -> Any:
    path = Path(file).expanduser()
    try:
        return _parse(path.read_text(encoding="utf-8"), f"file {file}")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([f"config={_short(file)} cannot be read ({reason}): name a YAML file"]) from None


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Turns nested mappings into dotted keys."""
    if not isinstance(tree, Mapping):
        if tree is None and not prefix:
            return {}
        raise ConfigError([f"{_short(tree)} is not a mapping of keys to values"])
    flat = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        flat |= _flatten(value, dotted + ".") if isinstance(value, Mapping) and value else {dotted: value}
    return flat


def _suggest(word: str, known: Sequence[str]) -> str:
    tails = {k.rpartition(".")[2]: k for k in known}
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6) or [
        tails[t] for t in difflib.get_close_matches(word.rpartition(".")[2], list(tails), n=1, cutoff=0.7)
    ]
    return f": did you mean {close[0]}?" if close else ""


def _divisors(n: int) -> str:
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")
