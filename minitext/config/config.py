"""Configuration: frozen pydantic models, presets, overrides, and where every value came from.

A configuration is built in layers, each overriding the one before it:

    defaults  <  preset (presets/NAME.yml)  <  config=FILE  <  key=value on the command line

`load_config("laptop", ["train.steps=300"])` resolves the layers, checks every value and every relation between
values, and returns a frozen `Config` that remembers the layer of each value. Nothing here touches a device, and the
preset's name is never read again after loading.

Chapters: 6.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationError

from minitext.config import variants
from minitext.config.data import DataConfig
from minitext.config.model import ModelConfig
from minitext.config.section import Section
from minitext.config.sections import (
    CheckpointConfig,
    MeshConfig,
    OptimConfig,
    PipelineConfig,
    ProfileConfig,
    RunConfig,
    ShardingConfig,
    TrainConfig,
)
from minitext.errors import UserError


class Config(Section):
    """A whole configuration, resolved and checked."""

    run: RunConfig = Field(default=RunConfig(), description="run directory")
    train: TrainConfig = Field(default=TrainConfig(), description="training loop")
    data: DataConfig = Field(default=DataConfig(), description="data")
    model: ModelConfig = Field(default=ModelConfig(), description="model")
    mesh: MeshConfig = Field(default=MeshConfig(), description="devices")
    sharding: ShardingConfig = Field(default=ShardingConfig(), description="sharding")
    pipeline: PipelineConfig = Field(default=PipelineConfig(), description="pipeline")
    optim: OptimConfig = Field(default=OptimConfig(), description="optimizer")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="checkpoints")
    profile: ProfileConfig = Field(default=ProfileConfig(), description="profiling")
    _provenance: dict[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        # Two configurations are equal if their values are, wherever those came from.
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def faults(self) -> Iterator[str]:
        """Yields the faults of every section, and those between sections."""
        for name in type(self).model_fields:
            yield from getattr(self, name).faults()
        if (self.profile.dump_hlo or self.profile.dump_llo) and self.run.name is None:
            key = "dump_hlo" if self.profile.dump_hlo else "dump_llo"
            yield (
                f"profile.{key}=true with run.name=null: the compiler is told where to write before the run is named "
                "after the time, so set run.name"
            )
        first, steps = self.profile.first_step, self.profile.steps
        if first is None and steps != ProfileConfig().steps:
            yield (
                f"profile.steps={steps} with profile.first_step=null traces nothing: set profile.first_step to the "
                "first of these steps, or leave profile.steps out"
            )
        if first is not None and first + steps - 1 > self.train.steps:
            yield (
                f"profile.first_step={first} with profile.steps={steps} ends at step {first + steps - 1}, after "
                f"train.steps={self.train.steps}: set profile.first_step={max(1, self.train.steps - steps + 1)}"
                f"{' profile.steps=1' if steps > self.train.steps else ''}"
            )

    def provenance(self, key: str) -> str:
        """Returns the layer a dotted key's value came from, such as `preset laptop` or `command line`."""
        return self._provenance.get(key, "default")

    def replace(self, values: Mapping[str, Any]) -> "Config":
        """Returns a copy with dotted keys (`{"train.steps": 3}`) replaced and everything checked again."""
        from minitext.config.config import resolve

        return resolve([("replaced", dict(values))], base=self)


DEFAULT_PRESET = "laptop"


class ConfigError(UserError):
    """One or more faults in a configuration, one line each."""

    def __init__(self, faults: Sequence[str]):
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


def keys(section: type[Section] = Config, prefix: str = "") -> dict[str, Any]:
    """Returns every dotted key of the configuration with its pydantic field, in order.

    Of a section with variants these are the keys of all of them; `kind`, which chooses one, is a choice.
    """
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        sections = variants.sections_of(field)
        if not sections:
            found[prefix + name] = field
        for kind in sections:
            found |= keys(kind, f"{prefix}{name}.")
        if len(sections) > 1:
            found[f"{prefix}{name}.kind"] = variants.choice_of(sections)
    return found


def presets() -> list[str]:
    """Returns the names of the presets that come with the package."""
    return sorted(
        p.name[:-4]
        for p in resources.files("minitext.config.presets").iterdir()
        if p.name.endswith(".yml")
    )


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
            raise ConfigError(
                [
                    f"unknown preset {preset!r}{suggest(preset, presets())}; presets: {', '.join(presets())}"
                ]
            )
        text = (
            resources.files("minitext.config.presets")
            .joinpath(f"{preset}.yml")
            .read_text(encoding="utf-8")
        )
        layers.append((f"preset {preset}", flatten(_parse(text, f"preset {preset}"))))
    for file in files:
        layers.append((f"file {file}", flatten(_read(file))))
    line: dict[str, Any] = {}
    for key, value in pairs:
        if key != "config":
            parsed = _parse(value, key)
            line |= flatten({key: parsed}) if isinstance(parsed, Mapping) else {key: parsed}
    layers.append(("command line", line))
    return resolve(layers)


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


def resolve(layers: Sequence[tuple[str, dict[str, Any]]], base: Config | None = None) -> Config:
    """Lays named layers of dotted keys over each other and checks the result.

    Raises:
      ConfigError: with every unknown key, else every bad value, else every pair of values that do not go together.
    """
    known = keys()
    tree = base.model_dump() if base else {}
    origin = dict(base._provenance) if base else {}
    faults = []
    for layer, values in layers:
        variants.change_kinds(Config, tree, origin, values)
        for key, value in values.items():
            if key not in known:
                faults.append(f"unknown key {key!r} ({layer}){suggest(key, list(known))}")
                continue
            node = tree
            *path, leaf = key.split(".")
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = value
            origin[key] = layer
    if faults := faults or list(variants.check_kinds(Config, tree, origin, _short)):
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
    key, rest, kinds = "", [], variants.find(Config)
    for part in map(str, error["loc"]):
        if part not in kinds.get(key, ()):  # pydantic names the kind of a variant, no key does
            key = f"{key}.{part}" if key else part
    while key not in known and "." in key:
        key, _, last = key.rpartition(".")
        rest.insert(0, last)
    # Of a list, such as data.mixture, the item and its field are told; elsewhere the rest is a kind's name.
    where = ".".join([key, *rest]) if rest and rest[0].isdigit() else key
    rule = error["msg"][:1].lower() + error["msg"][1:]
    if error["type"] == "extra_forbidden":  # and known: of another variant
        rule = f"it is a setting of another {key.rpartition('.')[0]}.kind"
    return f"{where}={_short(error['input'])} ({origin.get(key, 'default')}): {rule}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split()) if not isinstance(value, str) else ascii(value)[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."


def _split(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError([f"{_short(text)!r} is not key=value, such as train.steps=300"])
    return key.strip(), value


def _parse(text: str, where: str) -> Any:
    if re.fullmatch(r"[-+]?\d+(:\d+)+", text.strip()):
        return text  # YAML 1.1 counts to the base 60: 6:8 would be 368
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
        raise ConfigError(
            [f"config={_short(file)} cannot be read ({reason}): name a YAML file"]
        ) from None


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one mapping of dotted keys."""
    if not isinstance(tree, Mapping):
        if tree is None and not prefix:
            return {}
        raise ConfigError([f"{_short(tree)} is not a mapping of keys to values"])
    flat = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        flat |= (
            flatten(value, dotted + ".")
            if isinstance(value, Mapping) and value
            else {dotted: value}
        )
    return flat


def suggest(word: str, known: Sequence[str]) -> str:
    """Returns `: did you mean X?` for the nearest known word, or nothing."""
    tails = {k.rpartition(".")[2]: k for k in known}
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6) or [
        tails[t]
        for t in difflib.get_close_matches(word.rpartition(".")[2], list(tails), n=1, cutoff=0.7)
    ]
    return f": did you mean {close[0]}?" if close else ""
