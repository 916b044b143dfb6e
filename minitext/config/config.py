"""The whole configuration: its layers, its check, and where every value came from.

Each layer overrides the one before it:

    defaults  <  preset (presets/NAME.yml)  <  config=FILE  <  key=value on the command line

`load_config("laptop", ["train.steps=300"])` resolves the layers, checks every value and every rule between values, and
returns a frozen `Config` that remembers each value's layer. Nothing here touches a device, and the preset's name is
never read again after loading.

Chapters: 6.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import PrivateAttr, ValidationError
from pydantic.fields import FieldInfo

from minitext.config import sections, yaml_text
from minitext.config.data import DataConfig
from minitext.config.model import ModelConfig
from minitext.config.objective import (
    GRPOConfig,
    LanguageModelConfig,
    PPOConfig,
    PreferenceConfig,
    RolloutConfig,
)
from minitext.config.section import Section, choices, setting
from minitext.errors import UserError, did_you_mean, rule_of
from minitext.files import UnreadableFile, local_path, read_text, shorten


class Config(Section):
    """A whole configuration, resolved and checked."""

    run: sections.RunConfig = setting(sections.RunConfig(), "run directory")
    train: sections.TrainConfig = setting(sections.TrainConfig(), "training loop")
    objective: LanguageModelConfig | PreferenceConfig | GRPOConfig | PPOConfig = setting(
        LanguageModelConfig(), "what a step minimises", discriminator="kind"
    )
    data: DataConfig = setting(DataConfig(), "data")
    model: ModelConfig = setting(ModelConfig(), "model")
    mesh: sections.MeshConfig = setting(sections.MeshConfig(), "devices")
    sharding: sections.ShardingConfig = setting(sections.ShardingConfig(), "sharding")
    pipeline: sections.PipelineConfig = setting(sections.PipelineConfig(), "pipeline")
    optim: sections.OptimConfig = setting(sections.OptimConfig(), "optimizer")
    checkpoint: sections.CheckpointConfig = setting(sections.CheckpointConfig(), "checkpoints")
    xla: sections.XLAConfig = setting(sections.XLAConfig(), "XLA's compiler")
    profile: sections.ProfileConfig = setting(sections.ProfileConfig(), "profiling")
    _provenance: dict[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        # By value, whichever layers the values came from.
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def problems(self) -> Iterator[str]:
        """Checks every section, then the rules between sections."""
        for name in type(self).model_fields:
            yield from getattr(self, name).problems()
        if (self.profile.dump_hlo or self.profile.dump_llo) and self.run.name is None:
            key = "dump_hlo" if self.profile.dump_hlo else "dump_llo"
            yield (
                f"profile.{key}=true with run.name=null: the compiler needs its output folder before the run gets "
                "a name from its start time: set run.name"
            )
        asks, learns = self.data.source == "prompts", self.objective.kind in ("grpo", "ppo")
        if asks != learns:
            fix = "objective.kind=grpo" if asks else "data.source=prompts"
            yield (
                f"objective.kind={self.objective.kind} with data.source={self.data.source}: prompts are what GRPO and "
                f"PPO answer, and nothing else is: set {fix}"
            )
        pairs = self.data.source == "preferences"
        if not learns and pairs != (self.objective.kind == "preference"):
            fix = "objective.kind=preference" if pairs else "data.source=preferences"
            yield (
                f"objective.kind={self.objective.kind} with data.source={self.data.source}: pairs of answers are what "
                f"preferences are learned from, and nothing else is: set {fix}"
            )
        tokens = self.train.global_batch * self.data.seq_len
        if tokens > MOST_TOKENS:
            yield (
                f"train.global_batch={self.train.global_batch} rows of data.seq_len={self.data.seq_len} are "
                f"{tokens:,} tokens, and a step can have {MOST_TOKENS:,}: lower them"
            )
        if isinstance(self.objective, RolloutConfig):
            answers = self.objective.answers
            if (tokens := answers * self.data.seq_len) > MOST_ROLLOUT:
                yield (
                    f"objective.prompts={self.objective.prompts} x objective.group={self.objective.group} answers in "
                    f"rows of data.seq_len={self.data.seq_len} are {tokens:,} tokens, and memory keeps "
                    f"{MOST_ROLLOUT:,}: lower objective.prompts"
                )
        first, steps = self.profile.first_step, self.profile.steps
        if first is None and steps != sections.ProfileConfig().steps:
            yield (
                f"profile.steps={steps} with profile.first_step=null traces nothing: set profile.first_step, or "
                "leave profile.steps out"
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
        return resolve([("replaced", dict(values))], base=self)


# Of a step. The largest batches have a hundred million. The TPU compiler squares this number in 64 bits, and a little
# above this limit it overflows and crashes.
MOST_TOKENS = 3_000_000_000
MOST_ROLLOUT = 300_000_000  # tokens of answers, of which a host keeps ten arrays
DEPTH = 4  # names in a key; the longest keys have three
SHOWN = 12  # problems in a message

DEFAULT_PRESET = "laptop"
PRESETS = resources.files("minitext.config.presets")


class ConfigError(UserError):
    """One or more problems in a configuration, one line each; the message has the first `SHOWN` of them."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        lines = list(self.problems[:SHOWN])
        if (more := len(self.problems) - SHOWN) > 0:
            lines.append(
                f"and {more} more; if these are MaxText's keys, book/maxtext.md says what minitext has for each"
            )
        super().__init__("\n".join(lines))


class Layout(NamedTuple):
    """What can be set.

    Attributes:
      keys: every dotted key with its pydantic field, in order; of a section with variants, the keys of all.
      variants: the dotted key of each section with variants -> kind -> class, the default kind first.
    """

    keys: dict[str, Any]
    variants: dict[str, dict[str, type[Section]]]


def layout(section: type[Section] = Config, prefix: str = "") -> Layout:
    """Returns every key and every choice below a section. The key `kind` chooses among a section's variants."""
    found, variants = {}, {}
    for name, field in section.model_fields.items():
        kinds = choices(field)
        if not kinds:
            found[prefix + name] = field
        for kind in kinds.values():
            below = layout(kind, f"{prefix}{name}.")
            found |= below.keys
            variants |= below.variants
        if len(kinds) > 1:
            variants[prefix + name] = kinds
            of_each = (f"{kind}: {s.model_fields['kind'].description}" for kind, s in kinds.items())
            found[f"{prefix}{name}.kind"] = FieldInfo(
                annotation=Literal[tuple(kinds)],  # pyright: ignore[reportArgumentType]
                default=next(iter(kinds)),
                description="; ".join(of_each),
            )
    return Layout(found, variants)


def unknown_key(key: str, where: str) -> str:
    """Returns one line on a key that does not exist: what minitext says for MaxText's, or else the most similar key.

    Args:
      key: the key.
      where: where it was found, such as `command line`.
    """
    from minitext.config import maxtext  # no run whose keys are known needs it

    if ours := maxtext.answer(key):
        return f"{key} ({where}) {ours}"
    if not key.strip(". "):
        return f"{_short(key)!r} ({where}) is not a key: write one such as train.steps"
    if below := [name for name in layout().keys if name.startswith(f"{key}.")]:
        return f"{key} ({where}) is a section of keys: set one of them, such as {below[0]}"
    hint = did_you_mean(key, layout().keys) or "; see minitext config show laptop"
    return f"{_short(key)} ({where}): unknown key{hint}"


def presets() -> list[str]:
    """Returns the names of the package's presets."""
    names = (path.name for path in PRESETS.iterdir())
    return sorted(name[:-4] for name in names if name.endswith(".yml"))


def load_config(preset: str | None = DEFAULT_PRESET, overrides: Sequence[str] = ()) -> Config:
    """Resolves a configuration.

    Args:
      preset: name of a preset, or None for the defaults alone.
      overrides: `key=value` strings with dotted keys and YAML values. `config=FILE` adds a file as a layer
        below the other overrides.

    Returns:
      The frozen configuration.

    Raises:
      ConfigError: for an unknown preset or key, a bad value, or a broken rule between values; one line each.
    """
    layers = []
    if preset is not None:
        if preset not in presets():
            hint, known = did_you_mean(preset, presets()), ", ".join(presets())
            if preset.endswith((".yml", ".yaml")):  # MaxText takes a file in this place
                hint = f" (did you mean config={preset}?)"
            raise ConfigError([f"unknown preset {preset!r}{hint}: choose among {known}"])
        text = PRESETS.joinpath(f"{preset}.yml").read_text(encoding="utf-8")
        layers.append((f"preset {preset}", flatten(_parse(text, f"preset {preset}"))))
    return resolve(layers + _layers(overrides))


def load_recipe(
    recipe: str, overrides: Sequence[str], start: Mapping[str, Any], where: str
) -> Config:
    """Resolves the configuration of a run that begins with another run's model.

    The layers are `start` < recipe < `config=FILE` < `key=value` on the command line.

    Args:
      recipe: name of a recipe of post-training, a YAML file in `presets/recipes`.
      overrides: as for `load_config`.
      start: dotted keys that are taken from the other run.
      where: what provenance says of them, such as `run runs/a`.

    Raises:
      ConfigError: as `load_config`.
    """
    text = PRESETS.joinpath("recipes", f"{recipe}.yml").read_text(encoding="utf-8")
    of_recipe = f"recipe {recipe}"
    layers = [(where, dict(start)), (of_recipe, flatten(_parse(text, of_recipe)))]
    return resolve(layers + _layers(overrides))


def _layers(overrides: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the layers of `key=value` strings: files that they name, then the values."""
    pairs = [_split(text) for text in overrides]
    layers = [
        (f"file {file}", flatten(_read(file), where=f"config={shorten(file)}: "))
        for key, file in pairs
        if key == "config"
    ]
    line: dict[str, Any] = {}
    for key, value in pairs:
        if key != "config":
            parsed = _parse(value, f"{key}={_short(value)}")
            line |= flatten({key: parsed}) if isinstance(parsed, Mapping) else {key: parsed}
    return [*layers, ("command line", line)]


def to_yaml(cfg: Config, *, provenance: bool = False) -> str:
    """Writes a resolved configuration as YAML, with each value's origin as a comment if asked for.

    `load_config(None, ["config=FILE"])` reads it back to an equal configuration.
    """
    text = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    if not provenance:
        return text
    lines, path, known = [], [], layout().keys
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = [*path[:depth], line.strip().split(":")[0]]
        key = ".".join(path)
        lines.append(f"{line:<40}# {cfg.provenance(key)}" if key in known else line)
    return "\n".join(lines) + "\n"


def resolve(layers: Sequence[tuple[str, dict[str, Any]]], base: Config | None = None) -> Config:
    """Merges named layers of dotted keys, each overriding the ones before it, and checks the result.

    Raises:
      ConfigError: with every unknown key, else every bad value, else every broken rule between values.
    """
    known, variants = layout()
    tree = base.model_dump() if base else {}
    origin = dict(base._provenance) if base else {}
    age, problems = {}, []
    for number, (layer, values) in enumerate(layers):
        for key, value in values.items():
            if key not in known:
                problems.append(unknown_key(key, layer))
                continue
            if isinstance(value, bool) and known[key].annotation is not bool:  # true isn't 1
                problems.append(
                    f"{key}={str(value).lower()} ({layer}): choose something other than true and false, as "
                    f"minitext config explain {key} says"
                )
            node = tree
            *path, leaf = key.split(".")
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = value
            origin[key], age[key] = layer, number
    if problems := problems or list(_settle_kinds(variants, tree, origin, age)):
        raise ConfigError(problems)
    try:
        cfg = Config.model_validate(tree, context={"whole": True})
    except ValidationError as error:
        found = error.errors()
        # A list with a bad item counts as one without it: only the item is at fault.
        items = {e["loc"][:n] for e in found for n in range(len(e["loc"]))}
        found = [e for e in found if e["type"] != "too_short" or e["loc"] not in items]
        raise ConfigError(_explain(e, known, origin) for e in found) from None
    if problems := list(cfg.problems()):
        raise ConfigError(problems)
    cfg._provenance.update(origin)
    return cfg


def _settle_kinds(
    variants: Mapping[str, Any], tree: dict, origin: dict[str, str], age: Mapping[str, int]
) -> Iterator[str]:
    """Fills in default kinds, and leaves each section only its own kind's settings.

    A setting of another kind is dropped if it is older than the choice of this one; else it is a problem.
    """
    for key, kinds in variants.items():
        section = tree
        for part in key.split("."):
            section = section.setdefault(part, {})
        kind = section.setdefault("kind", next(iter(kinds)))
        known = isinstance(kind, str) and kind in kinds
        for name in sorted(set(section) - set(kinds[kind].model_fields)) if known else ["kind"]:
            setting = f"{key}.{name}"
            where = f"{setting}={_short(section[name])} ({origin.get(setting, 'default')})"
            if not known:
                yield f"{where}: choose {' or '.join(kinds)}"
            elif age.get(setting, -1) < age.get(f"{key}.kind", -1):
                del section[name]
                origin.pop(setting, None)
            else:
                others = " or ".join(k for k, s in kinds.items() if name in s.model_fields)
                yield f"{where} has no effect with {key}.kind={kind}: set {key}.kind={others}"


def _explain(error: Any, known: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    """Turns one of pydantic's errors into one line: key, value, layer, rule."""
    key, rest, variants = "", [], layout().variants
    for part in map(str, error["loc"]):
        # pydantic puts a variant's kind into the path, keys don't
        if part not in variants.get(key, ()):
            key = f"{key}.{part}" if key else part
    while key not in known and "." in key:
        key, _, last = key.rpartition(".")
        rest.insert(0, last)
    # In a list, such as data.mixture, name the item and its field; elsewhere the rest is a kind.
    where = ".".join([key, *rest]) if rest and rest[0].isdigit() else key
    rule = rule_of(error)
    if error["type"] == "extra_forbidden" and rest:
        rule = "unknown key"
    elif error["type"] == "extra_forbidden":  # yet a known key: another variant's
        rule = f"it is a setting of another {key.rpartition('.')[0]}.kind"
    if error["type"] == "value_error":  # of `local_path`, which begins with the value
        return f"{where}={error['ctx']['error']}"
    return f"{where}={_short(error['input'])} ({origin.get(key, 'default')}): {rule}"


def _short(value: Any) -> str:
    if value is None:
        return "null"
    text = " ".join(repr(value).split()) if not isinstance(value, str) else ascii(value)[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."


def _split(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError([f"{_short(text)!r} is not key=value, such as train.steps=300"])
    return key.strip(), value


def _parse(text: str, where: str) -> Any:
    if re.fullmatch(r"[-+]?\d+(:\d+)+", text.strip()):
        return text  # YAML 1.1 would read 6:8 as 368, to the base 60
    try:
        return yaml_text.parse(text)
    except yaml_text.BadYAML as error:
        raise ConfigError([f"{where} {error}: correct it"]) from None


def _read(file: str) -> Any:
    path = Path(os.path.expanduser(local_path(file)))
    try:
        return _parse(read_text(path, yaml_text.LIMIT), f"config={shorten(str(path))}")
    except UnreadableFile as error:
        raise ConfigError([f"config={error}"]) from None


def flatten(tree: Any, prefix: str = "", where: str = "") -> dict[str, Any]:
    """Returns nested mappings as one mapping of dotted keys.

    Args:
      tree: the mappings.
      prefix: of the keys.
      where: what an error about the whole tree begins with, such as the name of its file.

    Raises:
      ConfigError: if `tree` is no mapping, or its mappings are nested deeper than any key, such as one that a YAML
        alias makes contain itself.
    """
    if prefix.count(".") > DEPTH:
        raise ConfigError([f"{_short(prefix[:-1])} is nested deeper than any key"])
    if not isinstance(tree, Mapping):
        if tree is None and not prefix:
            return {}
        raise ConfigError([f"{where}{_short(tree)} is not a mapping of keys to values"])
    flat = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        nested = isinstance(value, Mapping) and value
        flat |= flatten(value, dotted + ".") if nested else {dotted: value}
    return flat
