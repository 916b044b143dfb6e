"""Hugging Face's config.json and our keys: the kinds of rows that a family's table is made of.

A family describes its model by a list of rows. Each reads some keys of config.json into settings of every layer, and
writes them back from a configuration of ours. `read` runs the rows, refuses a key that none of them took, and folds the
layers into the keys of `model`: a dense prefix, a period, and what all layers share. `write` runs them the other way;
reading the result again must give the same layers, so a setting that a family has no key for can't get lost.

Both spellings of rotary positions are read: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.

Chapters: 23.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from minitext.config.model import LAYER_KEYS, DeltaNetConfig, GQAConfig, ModelConfig
from minitext.config.rope import RopeConfig
from minitext.config.section import Section, choices
from minitext.errors import UserError

REQUIRED = object()  # a key without a default
MAX_LAYERS = 10_000  # more is a damaged file, and would only take memory
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a list"}

# Keys that don't change what a model computes: names, files, training, generation, output.
WITHOUT_EFFECT = {
    "_attn_implementation_autoset", "_name_or_path", "_sliding_window_pattern", "architectures",
    "attention_dropout", "attn_implementation", "auto_map", "aux_loss_alpha", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "ep_size",
    "experts_per_token", "hidden_dropout", "id2label", "initial_context_length", "initializer_range",
    "is_llama_config", "label2id", "max_position_embeddings", "max_window_layers", "model_type",
    "num_mtp_layers", "num_nextn_predict_layers", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "seq_aux", "sliding_window_pattern",
    "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip

# Settings that say how a model runs or trains, and that config.json has no place for.
_OF_A_RUN = ("attention.impl", "attention.context", "ffn.capacity_factor", "ffn.balance_loss")
_OF_A_RUN += ("ffn.z_loss", "dtype", "scan_layers", "remat", "remat_save")
_OF_THE_MODEL = ("layers", "dense_layers", "dense_mlp", "period")

HEADS = ("heads", "kv_heads", "head_dim")

# Names of one key; versions of transformers write one or the other.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SAME_KEYS = {name: _EXPERTS for name in _EXPERTS}

Layers = list[dict[str, Any]]


class Source:
    """A config.json that is being read.

    Args:
      values: its keys.
      name: of the family, for messages.
    """

    def __init__(self, values: Mapping[str, Any], name: str):
        self.values, self.name, self.unread = values, name, set(values)

    def take(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """Returns a key's value, or the default where it is missing or null.

        Raises:
          UserError: for a missing key without a default, or a value of another type.
        """
        value = None
        for name in _SAME_KEYS.get(key, (key,)):
            self.unread.discard(name)
            other = self.values.get(name)
            if value is not None and other not in (None, value):
                raise self.refuse(name, f"{key} is {quoted(value)}")
            value = other if value is None else value
        if value is None:
            if default is REQUIRED:
                raise UserError(f"config.json: {key} is missing, and {self.name} needs it")
            return default
        return checked(key, value, kind)

    def refuse(self, key: str, why: str) -> UserError:
        """Returns the error for a key's value."""
        return UserError(f"config.json: {key}={quoted(self.values.get(key))} ({self.name}): {why}")


def checked(key: str, value: Any, kind: type) -> Any:
    """Returns a value of config.json if it is of the type that its key wants.

    Raises:
      UserError: if it is of another type or not finite.
    """
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not right or (kind is float and not math.isfinite(value)):
        raise UserError(f"config.json: {key}={quoted(value)} is not {WORDS.get(kind, 'a mapping')}")
    return value


def quoted(value: Any) -> str:
    """Returns a value of config.json in at most 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Target:
    """A configuration that is being written as config.json.

    Attributes:
      layers: the configuration of each layer.
      length: tokens of the longest text.
    """

    layers: Sequence[ModelConfig]
    length: int

    @functools.cached_property
    def settings(self) -> list[dict[str, Any]]:
        """`settings` of each layer."""
        known = {id(layer): settings(layer) for layer in self.layers}
        return [known[id(layer)] for layer in self.layers]

    def each(self, key: str) -> list[Any]:
        """Returns a key's value in each layer; None where the layer's variant doesn't have it."""
        return [found.get(key) for found in self.settings]

    def one(self, key: str) -> Any:
        """Returns the value that all layers with this key share.

        A size of heads that no layer uses, because all have DeltaNet, is the configuration's own. For another key that
        no layer has, the value is None.

        Raises:
          UserError: if they differ.
        """
        values = {found[key] for found in self.settings if key in found}
        if len(values) > 1:
            raise UserError(f"model.{key} differs between layers, and config.json has one value")
        if not values and key in HEADS:
            return getattr(self.layers[0], key)
        return values.pop() if values else None


def settings(layer: ModelConfig) -> dict[str, Any]:
    """Returns all that decides what a layer computes as dotted keys, null values resolved."""
    flat: dict[str, Any] = {}
    for name in type(layer).model_fields:
        value = getattr(layer, name)
        inner = (
            {f"{name}.{k}": getattr(value, k) for k in type(value).model_fields}
            if isinstance(value, Section)
            else {}
        )
        flat |= inner or {name: value}
    for key in (*_OF_A_RUN, *_OF_THE_MODEL):
        flat.pop(key, None)
    # Their values are folded into the final norm's scale, and a bias exists or does not.
    flat["logit_scale"], flat["embed_scale"] = 1.0, flat["embed_scale"] or 1.0
    flat["residual_scale"] = flat["residual_scale"] or 1.0
    if "ffn.bias_rate" in flat:
        flat["ffn.bias_rate"] = bool(flat["ffn.bias_rate"])
    if isinstance(layer.attention, GQAConfig):
        flat |= {"kv_heads": layer.K, "head_dim": layer.H}
        flat["attention.scale"] = flat["attention.scale"] or layer.H**-0.5
        if layer.attention.temperature_length is None:
            flat["attention.temperature_scale"] = None
    if isinstance(layer.attention, DeltaNetConfig):  # these are for other layers
        flat = {k: v for k, v in flat.items() if k not in HEADS and not k.startswith("rope.")}
    return flat


class Stacked(NamedTuple):
    """Layers whose parameters are stacked together.

    Attributes:
      path: of the module, such as `blocks` or `blocks.layers.1`.
      layers: their numbers, in the order of the stack.
      cfg: the configuration of each of them.
    """

    path: str
    layers: Sequence[int]
    cfg: ModelConfig


def stacked(model: ModelConfig) -> list[Stacked]:
    """Returns where a model keeps its layers."""
    found, first = [], 0
    for name, stack in model.stacks.items():
        together = len(stack.layers)
        after = first + stack.repeats * together
        for i, cfg in enumerate(stack.layers):
            apart = len(model.period) > 1 and name != "prefix"
            path = f"{name}.layers.{i}" if apart else name
            found.append(Stacked(path, range(first + i, after, together), cfg))
        first = after
    return found


def each_layer(model: ModelConfig) -> list[ModelConfig]:
    """Returns the configuration of each layer."""
    numbered = {number: s.cfg for s in stacked(model) for number in s.layers}
    return [numbered[number] for number in range(model.layers)]


class Row(Protocol):
    """Some keys of config.json and some of ours."""

    def read(self, source: Source, layers: Layers) -> None:
        """Adds settings to each layer; raises UserError for a value that ours can't express."""
        ...

    def write(self, target: Target) -> dict[str, Any]:
        """Returns keys of config.json; raises UserError for a setting that they can't express."""
        ...


def read(rows: Sequence[Row], values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns our keys, such as `model.embed`, for a config.json.

    Raises:
      UserError: for a key or a value that the rows don't know.
    """
    source = Source(values, name)
    if "quantization_config" in values:
        how = values["quantization_config"]
        how = how.get("quant_method") if isinstance(how, Mapping) else how
        raise UserError(
            f"config.json: the weights are quantized ({quoted(how)}): dequantize them first"
        )
    Only(is_encoder_decoder=False, add_cross_attention=False).read(source, [])
    count = source.take("num_hidden_layers", int)
    if not 1 <= count <= MAX_LAYERS:
        raise source.refuse("num_hidden_layers", f"choose 1 to {MAX_LAYERS}")
    layers: Layers = [{} for _ in range(count)]
    for row in rows:
        row.read(source, layers)
    for key in sorted(source.unread - WITHOUT_EFFECT):
        if values[key] is not None:
            raise source.refuse(
                key, f"minitext doesn't know this key of {name}; if it changes nothing, remove it"
            )
    return fold(layers)


def write(rows: Sequence[Row], model: ModelConfig, length: int) -> dict[str, Any]:
    """Returns the keys of config.json for a model of ours.

    Raises:
      UserError: for a setting that the rows can't express.
    """
    target = Target(each_layer(model), length)
    values: dict[str, Any] = {"num_hidden_layers": model.layers, "max_position_embeddings": length}
    for row in rows:
        values |= row.write(target)
    return values


def differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Returns the keys in which any layer of two models with as many layers differs, as `model.key=a's value`."""
    pairs = zip(each_layer(a), each_layer(b), strict=True)
    found: dict[str, Any] = {}
    for one, other in pairs:
        mine, theirs = settings(one), settings(other)
        found |= {k: mine.get(k) for k in sorted(mine | theirs) if mine.get(k) != theirs.get(k)}
    return [f"model.{key}={quoted(value)}" for key, value in found.items()]


# Layers to the keys of `model`.


def fold(layers: Layers) -> dict[str, Any]:
    """Returns the keys of `model` for layers that are given one by one.

    The shortest dense prefix and period are found that together make these layers.
    """
    layers = [_known(layer) for layer in layers]
    shared = {k: v for k, v in layers[0].items() if k.partition(".")[0] not in LAYER_KEYS}
    own = [{k: v for k, v in layer.items() if k not in shared} for layer in layers]
    dense = next((i for i, layer in enumerate(own) if layer["ffn.kind"] != "swiglu"), 0)
    starts = [0, dense] if all(_as_prefix(layer, own[dense]) for layer in own[:dense]) else [0]
    start = min(starts, key=lambda n: n + _period(own[n:]))
    period = _period(own[start:])
    base = own[start] if start else _base(own[:period])
    keys = {f"model.{k}": v for k, v in (shared | base).items()} | {"model.layers": len(layers)}
    if start:
        keys |= {"model.dense_layers": start, "model.dense_mlp": own[0]["mlp"]}
    if period > 1:
        keys["model.period"] = [_changes(base, layer) for layer in own[start : start + period]]
    return keys


def _base(layers: Layers) -> dict[str, Any]:
    """Returns the layer from which the others differ: one whose attention has settings for how a model runs."""
    default = ModelConfig.model_fields["attention"].default.kind
    return next((layer for layer in layers if layer["attention.kind"] == default), layers[0])


def _known(layer: dict[str, Any]) -> dict[str, Any]:
    """Drops the settings that the layer's variants don't have, such as the experts of a dense layer."""
    kept = {}
    for key, value in layer.items():
        section, _, name = key.rpartition(".")
        if section:
            kinds = choices(ModelConfig.model_fields[section])
            kind = layer[f"{section}.kind"]
            if name != "kind" and name not in kinds[kind].model_fields:
                continue
        if key != "type":  # what `Types` told other rows
            kept[key] = value
    return kept


def _as_prefix(layer: dict[str, Any], base: dict[str, Any]) -> bool:
    """Returns whether a dense layer differs from the base only as those of the dense prefix do."""
    kept = ("ffn.activation", "ffn.bias")
    others = [
        k for k in layer | base if not (k == "mlp" or (k.startswith("ffn.") and k not in kept))
    ]
    return all(layer.get(k) == base.get(k) for k in others)


def _period(layers: Layers) -> int:
    """Returns after how many layers they repeat."""
    return next(p for p in range(1, len(layers) + 1) if layers[p:] == layers[:-p])


def _changes(base: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in layer.items():
        section, _, name = key.rpartition(".")
        other = section and layer[f"{section}.kind"] != base[f"{section}.kind"]
        if other or value != base.get(key):
            (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


# The rows.


def _all(layers: Layers, **values: Any) -> None:
    for layer in layers:
        layer.update(values)


class Same:
    """A key of config.json with one key of ours, or several that it sets together.

    Args:
      hf: the key of config.json.
      ours: ours, below `model`.
      kind: its type.
      default: transformers' value where the key is missing.
      codes: their value -> ours, where these differ; the first of several for one of ours is written.
      null: its value where the key is null: by default false for a switch, and else `default`.
    """

    def __init__(
        self,
        hf: str,
        *ours: str,
        kind: type = int,
        default: Any = REQUIRED,
        codes: Mapping[Any, Any] | None = None,
        null: Any = REQUIRED,
    ):
        self.hf, self.ours, self.kind, self.default, self.codes = hf, ours, kind, default, codes
        self.null = null
        if null is REQUIRED:
            self.null = False if kind is bool else default

    def read(self, source: Source, layers: Layers) -> None:
        """Copies the value to every layer."""
        default = self.null if self.hf in source.values else self.default
        value = source.take(self.hf, self.kind, default)
        if self.codes is not None:
            if value not in self.codes:
                raise source.refuse(self.hf, f"minitext knows {', '.join(map(str, self.codes))}")
            value = self.codes[value]
        _all(layers, **dict.fromkeys(self.ours, value))

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the value that all layers share."""
        value = target.one(self.ours[0])
        if self.codes is not None:
            back = [theirs for theirs, ours in self.codes.items() if ours == value]
            if not back:
                raise UserError(f"model.{self.ours[0]}={value} has no value of {self.hf}")
            return {self.hf: back[0]}
        # A key that no layer has, or null where transformers would put a default in its place, is left out.
        return {} if value is None and self.null is not None else {self.hf: value}


class Fixed:
    """Settings of ours that the family always has: keys below `model`, with `__` for the dot, and their values."""

    def __init__(self, **ours: Any):
        self.ours = {key.replace("__", "."): value for key, value in ours.items()}

    def read(self, source: Source, layers: Layers) -> None:
        """Sets them in every layer."""
        _all(layers, **self.ours)

    def write(self, target: Target) -> dict[str, Any]:
        """Returns nothing: reading the result again shows whether the model has them."""
        return {}


class Only:
    """Keys of config.json of which minitext knows one value, or several that mean the same."""

    def __init__(self, **values: Any):
        self.values = {k: v if isinstance(v, tuple) else (v,) for k, v in values.items()}

    def read(self, source: Source, layers: Layers) -> None:
        """Refuses any other value."""
        for key, known in self.values.items():
            source.unread.discard(key)
            value = source.values.get(key)
            off = key in source.values and value is None and known == (True,)  # null is false
            if off or (value is not None and value not in known):
                raise source.refuse(key, f"minitext knows {' and '.join(map(str, known))} alone")

    def write(self, target: Target) -> dict[str, Any]:
        """Returns nothing: transformers' default is this value."""
        return {}


@dataclass(frozen=True)
class Unused:
    """A key of a family's config.json that changes nothing in its model, whatever its value.

    Attributes:
      hf: the key.
    """

    hf: str

    def read(self, source: Source, layers: Layers) -> None:
        """Passes over it."""
        source.unread.discard(self.hf)

    def write(self, target: Target) -> dict[str, Any]:
        """Returns nothing."""
        return {}


@dataclass(frozen=True)
class HeadDim:
    """The width of a head.

    Attributes:
      default: transformers' width where config.json has none; None: embed / heads.
      written: whether the family has the key at all.
    """

    default: int | None = None
    written: bool = True

    def read(self, source: Source, layers: Layers) -> None:
        """Sets it, or leaves it to embed / heads."""
        if not self.written:
            return _all(layers, head_dim=None)
        default = None if "head_dim" in source.values else self.default
        width = source.take("head_dim", int, default)
        embed, heads = layers[0]["embed"], layers[0]["heads"]
        if width is None and heads > 0 and embed % heads:
            width = embed // heads  # as transformers rounds
        _all(layers, head_dim=width)

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the width."""
        return {"head_dim": target.one("head_dim")} if self.written else {}


@dataclass(frozen=True)
class Implied:
    """A key of config.json that is a sum of settings of ours, and so can't have another value.

    Attributes:
      hf: the key.
      ours: ours, below `model`.
    """

    hf: str
    ours: tuple[str, ...]

    def read(self, source: Source, layers: Layers) -> None:
        """Refuses another value."""
        want = sum(layers[0][key] for key in self.ours)
        if source.take(self.hf, int, want) != want:
            raise source.refuse(
                self.hf, f"minitext knows {want} alone, which follows from the other keys"
            )

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the value."""
        found = [target.one(key) for key in self.ours]
        return {} if None in found else {self.hf: sum(found)}


class EmbedScale:
    """Token vectors times sqrt(D), as all of Gemma has them."""

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the factor."""
        _all(layers, embed_scale=math.sqrt(max(layers[0]["embed"], 0)))

    def write(self, target: Target) -> dict[str, Any]:
        """Returns nothing."""
        return {}


@dataclass(frozen=True)
class LogitScale:
    """A factor on the logits, which most families don't have.

    Attributes:
      hf: the key.
      divides: whether the logits are divided by it.
    """

    hf: str
    divides: bool

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the factor."""
        value = source.take(self.hf, float, 1.0)
        if value <= 0:
            raise source.refuse(self.hf, "choose a positive number")
        _all(layers, logit_scale=1 / value if self.divides else value)

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the key's value."""
        factor = logit_factor(target.layers[0])
        return {self.hf: 1 / factor if self.divides else factor}


def logit_factor(model: ModelConfig) -> float:
    """Returns the factor on a model's logits."""
    if model.logit_scale is not None:
        return model.logit_scale
    return model.embed**-0.5 if model.tie_embeddings else 1.0


class QueryScalar:
    """The number whose inverse root multiplies queries, in place of a head's width (Gemma)."""

    KEY = "query_pre_attn_scalar"

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the scale of the logits."""
        scalar = source.take(self.KEY, float, 256.0)
        if scalar <= 0:
            raise source.refuse(self.KEY, "choose a positive number")
        _all(layers, **{"attention.scale": scalar**-0.5})

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the number, which transformers wants as an integer."""
        scale = target.one("attention.scale")
        return {} if scale is None else {self.KEY: round(scale**-2)}


@dataclass(frozen=True)
class Window:
    """One attention window for all layers, with or without a switch.

    Attributes:
      default: transformers' window where the key is missing.
      switch: a key without which the window counts for nothing.
    """

    default: int | None = None
    switch: str | None = None

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the window of every layer."""
        given = "sliding_window" in source.values
        window = source.take("sliding_window", int, None if given else self.default)
        on = self.switch is None or source.take(self.switch, bool, False)
        _all(layers, **{"attention.window": window if on else None})

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the window and its switch."""
        window = target.one("attention.window")
        return {"sliding_window": window} | (
            {self.switch: window is not None} if self.switch else {}
        )


LIMITS = {
    "full_attention": None,
    "sliding_attention": ("sliding_window", "attention.window"),
    "chunked_attention": ("attention_chunk_size", "attention.chunk"),
}


@dataclass(frozen=True)
class Types:
    """What each layer attends to, `layer_types`.

    Attributes:
      default: (source, layers) -> the types where config.json has none.
      window: transformers' `sliding_window` or `attention_chunk_size` where the key is missing.
      switch: a key without which no layer has a window.
      known: the types that the family has.
    """

    default: Callable[[Source, Layers], list[str]]
    window: int | None = 4096
    switch: str | None = None
    known: tuple[str, ...] = ("full_attention", "sliding_attention")

    def read(self, source: Source, layers: Layers) -> None:
        """Sets each layer's window and chunk, and its type for `TypedRope`."""
        on = self.switch is None or source.take(self.switch, bool, False)
        sizes = {}
        for kind in self.known:
            if LIMITS[kind]:
                key = LIMITS[kind][0]
                given = source.take(key, int, None if key in source.values else self.window)
                sizes[kind] = given if on else None
        types = source.take("layer_types", list, None) or self.default(source, layers)
        if len(types) != len(layers):
            raise UserError(
                f"config.json: layer_types has {len(types)} entries for {len(layers)} layers"
            )
        for layer, kind in zip(layers, types, strict=True):
            if kind not in self.known:
                raise source.refuse(
                    "layer_types", f"of {quoted(kind)}, minitext knows {', '.join(self.known)}"
                )
            if LIMITS[kind] and not on:
                raise source.refuse(str(self.switch), f"layer_types names {kind}: set it to true")
            if LIMITS[kind] and not sizes[kind]:
                raise source.refuse(LIMITS[kind][0], f"layer_types names {kind}: give its length")
            layer |= {"type": kind, "attention.window": None, "attention.chunk": None}
            if LIMITS[kind]:
                layer[LIMITS[kind][1]] = sizes[kind]

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the types and the lengths of windows and chunks."""
        values: dict[str, Any] = {"layer_types": ["full_attention"] * len(target.layers)}
        for kind in self.known:
            if not LIMITS[kind]:
                continue
            key, ours = LIMITS[kind]
            each = target.each(ours)
            if lengths := {length for length in each if length is not None}:
                if len(lengths) > 1:
                    raise UserError(
                        f"model.{ours} has several lengths, and config.json has one: {sorted(lengths)}"
                    )
                values[key] = lengths.pop()
                values["layer_types"] = [
                    kind if length else old
                    for length, old in zip(each, values["layer_types"], strict=True)
                ]
            if self.switch:
                values[self.switch] = key in values
        return values


class LinearLayers:
    """Which layers have DeltaNet, `layer_types`: by default all but each n-th."""

    KINDS: ClassVar = {"linear_attention": "deltanet", "full_attention": "gqa"}

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the kind of attention of each layer."""
        step = source.take("full_attention_interval", int, 4)
        if step < 1:
            raise source.refuse("full_attention_interval", "choose 1 or more")
        names = tuple(self.KINDS)
        types = source.take("layer_types", list, None)
        types = types or [names[(i + 1) % step == 0] for i in range(len(layers))]
        if len(types) != len(layers):
            raise UserError(
                f"config.json: layer_types has {len(types)} entries for {len(layers)} layers"
            )
        for layer, kind in zip(layers, types, strict=True):
            if kind not in names:
                raise source.refuse(
                    "layer_types", f"of {quoted(kind)}, minitext knows {', '.join(names)}"
                )
            layer["attention.kind"] = self.KINDS[kind]

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the types."""
        back = {ours: theirs for theirs, ours in self.KINDS.items()}
        kinds = target.each("attention.kind")
        if unknown := sorted(set(kinds) - set(back)):
            raise UserError(f"model.attention.kind={unknown[0]} has no entry of layer_types")
        return {"layer_types": [back[kind] for kind in kinds]}


def every(n: int, key: str | None = None) -> Callable[[Source, Layers], list[str]]:
    """Returns a default of `Types`: all but each n-th layer have a window; `key` may set another n."""

    def types(source: Source, layers: Layers) -> list[str]:
        step = source.take(key, int, n) if key else n
        if step < 1:
            raise source.refuse(str(key), "choose 1 or more")
        kinds = ("full_attention", "sliding_attention")
        return [kinds[(i + 1) % step != 0] for i in range(len(layers))]

    return types


@dataclass(frozen=True)
class Unrotated:
    """Layers without rotary positions, `no_rope_layers`: 0 where there is none. Comes after the rotary positions."""

    def read(self, source: Source, layers: Layers) -> None:
        """Takes the rotation from these layers."""
        interval = source.take("no_rope_layer_interval", int, 4)
        if interval < 1:
            raise source.refuse("no_rope_layer_interval", "choose 1 or more")
        rotated = source.take("no_rope_layers", list, None)
        rotated = rotated or [int((i + 1) % interval != 0) for i in range(len(layers))]
        if len(rotated) < len(layers) or not all(flag in (0, 1) for flag in rotated):
            raise source.refuse("no_rope_layers", f"give {len(layers)} numbers, 0 or 1")
        for layer, flag in zip(layers, rotated, strict=False):
            if not flag:
                layer["rope.kind"] = "none"

    def write(self, target: Target) -> dict[str, Any]:
        """Returns which layers rotate."""
        return {"no_rope_layers": [int(kind != "none") for kind in target.each("rope.kind")]}


@dataclass(frozen=True)
class LocalRotation:
    """Rotary positions in layers with a window alone, if config.json has a window (EXAONE 4). Comes after them.

    Attributes:
      window: transformers' `sliding_window` where the key is missing.
    """

    window: int

    def read(self, source: Source, layers: Layers) -> None:
        """Takes the rotation from layers that see everything."""
        if source.values.get("sliding_window", self.window) is not None:
            for layer in layers:
                if layer["type"] == "full_attention":
                    layer["rope.kind"] = "none"

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the window that no layer has but that takes the rotation from all, or null, which leaves it."""
        if any(target.each("attention.window")):
            return {}
        rotated = any(kind != "none" for kind in target.each("rope.kind"))
        return {"sliding_window": None if rotated else self.window}


class Temperature:
    """Queries that grow with their position, in layers without rotary positions (Llama 4)."""

    def read(self, source: Source, layers: Layers) -> None:
        """Sets length and scale in these layers."""
        source.unread.discard("attn_temperature_tuning")  # published files say 4, transformers true
        length, scale = source.take("floor_scale", int, 8192), source.take("attn_scale", float, 0.1)
        on = source.values.get("attn_temperature_tuning", True)
        for layer in layers:
            has = bool(on) and layer["rope.kind"] == "none"
            layer["attention.temperature_length"] = length if has else None
            layer["attention.temperature_scale"] = scale if has else 0.1

    def write(self, target: Target) -> dict[str, Any]:
        """Returns length and scale, if any layer has them."""
        lengths = {x for x in target.each("attention.temperature_length") if x is not None}
        if not lengths:
            return {"attn_temperature_tuning": False}
        scales = {x for x in target.each("attention.temperature_scale") if x is not None}
        tuned = {"floor_scale": max(lengths), "attn_scale": max(scales)}
        return {"attn_temperature_tuning": True} | tuned


class L2Norm:
    """Queries and keys divided by their root mean square, in layers with rotary positions (Llama 4)."""

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the norm in these layers."""
        on = source.take("use_qk_norm", bool, True)
        for layer in layers:
            layer["attention.qk_norm"] = "l2" if on and layer["rope.kind"] != "none" else "none"

    def write(self, target: Target) -> dict[str, Any]:
        """Returns whether any layer has it."""
        return {"use_qk_norm": "l2" in target.each("attention.qk_norm")}


@dataclass(frozen=True)
class Experts:
    """Which layers have experts, and the widths of the two kinds of layers.

    Attributes:
      sparse: (source, layers) -> whether each layer has experts.
      back: whether each layer has experts -> keys of config.json.
      dense: the key with the width of the other layers.
      width: the key with the width of an expert.
    """

    sparse: Callable[[Source, Layers], list[bool]]
    back: Callable[[list[bool]], dict[str, Any]]
    dense: str = "intermediate_size"
    width: str = "moe_intermediate_size"

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the kind and the width of each feed-forward layer."""
        sparse = self.sparse(source, layers)
        # A family whose layers all have experts may leave out the width of the others.
        width = source.take(self.width, int) if any(sparse) else source.take(self.width, int, None)
        dense = source.take(self.dense, int, REQUIRED if not all(sparse) else None)
        for layer, has in zip(layers, sparse, strict=True):
            layer |= (
                {"ffn.kind": "moe", "mlp": width} if has else {"ffn.kind": "swiglu", "mlp": dense}
            )

    def write(self, target: Target) -> dict[str, Any]:
        """Returns which layers have experts, and both widths."""
        sparse = [kind == "moe" for kind in target.each("ffn.kind")]
        values = self.back(sparse)
        widths = list(zip(sparse, target.each("mlp"), strict=True))
        for key, want in ((self.width, True), (self.dense, False)):
            found = {width for has, width in widths if has == want}
            if len(found) > 1:
                raise UserError(
                    f"model.mlp has several widths, and config.json has one {key}: {sorted(found)}"
                )
            values |= {key: found.pop()} if found else {}
        return values


def first_dense(default: int) -> Experts:
    """Returns the row of a family whose first layers are dense (DeepSeek, GLM)."""

    def sparse(source: Source, layers: Layers) -> list[bool]:
        dense = source.take("first_k_dense_replace", int, default)
        return [i >= dense for i in range(len(layers))]

    def back(sparse: list[bool]) -> dict[str, Any]:
        dense = sparse.index(True) if True in sparse else len(sparse)
        return {"first_k_dense_replace": dense}

    return Experts(sparse, back)


def every_step() -> Experts:
    """Returns the row of a family in which each n-th layer has experts, but for some (Qwen)."""

    def sparse(source: Source, layers: Layers) -> list[bool]:
        step, dense = (
            source.take("decoder_sparse_step", int, 1),
            source.take("mlp_only_layers", list, []),
        )
        if step < 1:
            raise source.refuse("decoder_sparse_step", "choose 1 or more")
        return [i not in dense and (i + 1) % step == 0 for i in range(len(layers))]

    def back(sparse: list[bool]) -> dict[str, Any]:
        dense = [i for i, has in enumerate(sparse) if not has]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Experts(sparse, back)


def expert_rows() -> Experts:
    """Returns the row of a family that lists its layers with experts (Llama 4)."""

    def sparse(source: Source, layers: Layers) -> list[bool]:
        step = source.take("interleave_moe_layer_step", int, 1)
        if step < 1:
            raise source.refuse("interleave_moe_layer_step", "choose 1 or more")
        moe = source.take("moe_layers", list, None)
        moe = list(range(step - 1, len(layers), step)) if moe is None else moe
        return [i in moe for i in range(len(layers))]

    def back(sparse: list[bool]) -> dict[str, Any]:
        return {"moe_layers": [i for i, has in enumerate(sparse) if has]}

    return Experts(sparse, back, dense="intermediate_size_mlp", width="intermediate_size")


@dataclass(frozen=True)
class SharedWidth:
    """The width of the shared experts together, a multiple of one expert's (Qwen).

    Attributes:
      default: transformers' width where config.json has none.
    """

    KEY: ClassVar = "shared_expert_intermediate_size"
    default: int

    def read(self, source: Source, layers: Layers) -> None:
        """Sets their number."""
        width = source.take(self.KEY, int, self.default)
        one = next((layer["mlp"] for layer in layers if layer["ffn.kind"] == "moe"), width)
        if min(width, one) < 1 or width % one:
            raise source.refuse(
                self.KEY, f"minitext knows multiples of moe_intermediate_size={one} alone"
            )
        _all(layers, **{"ffn.shared_experts": width // one})

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the width."""
        widths = [
            count * mlp
            for count, mlp in zip(
                target.each("ffn.shared_experts"), target.each("mlp"), strict=True
            )
            if count is not None
        ]
        return {self.KEY: widths[0]} if widths else {}


# Rotary positions.

# Their name -> ours, type, default (None: may be null), for each kind; the length is handled apart.
_FACTOR = ("factor", "factor", float, REQUIRED)
ROPE_KEYS: dict[str, tuple[tuple[str, str, type, Any], ...]] = {
    "default": (),
    "linear": (_FACTOR,),
    "llama3": (
        _FACTOR,
        ("low_freq_factor", "low_freq_factor", float, REQUIRED),
        ("high_freq_factor", "high_freq_factor", float, REQUIRED),
    ),
    "yarn": (
        ("factor", "factor", float, None),
        ("beta_fast", "beta_fast", float, 32.0),
        ("beta_slow", "beta_slow", float, 1.0),
        ("mscale", "mscale", float, None),
        ("mscale_all_dim", "mscale_all_dim", float, None),
        ("attention_factor", "attention_factor", float, None),
        ("truncate", "truncate", bool, True),
    ),
    "longrope": (
        ("factor", "factor", float, None),
        ("short_factor", "short_factor", list, REQUIRED),
        ("long_factor", "long_factor", list, REQUIRED),
        ("attention_factor", "attention_factor", float, None),
    ),
}
_WITH_LENGTH = ("llama3", "yarn", "longrope")
_ORIGINAL = "original_max_position_embeddings"
_ROUNDED = (
    "transformers takes truncate=true, whatever it says, where each type of layer has its own"
)


@dataclass(frozen=True)
class Rope:
    """Rotary positions, the same in all layers that have them.

    Attributes:
      theta: transformers' base where config.json has none.
      kinds: the kinds of scaling that the family has.
      fraction: transformers' share of a head's features that rotate; None: the family rotates them all.
      default: transformers' scaling where config.json has none.
      original: transformers' original length where config.json has none; None: its longest text.
      old: old names of kinds.
    """

    theta: float = 10_000.0
    kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    fraction: float | None = None
    default: Mapping[str, Any] | None = None
    original: int | None = None
    old: Mapping[str, str] | None = None

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the rotary positions of every layer."""
        old, new = (source.take(key, dict, None) for key in ("rope_scaling", "rope_parameters"))
        given = dict(new or {})
        for key, value in (old or {}).items():
            if given.setdefault(key, value) != value:
                raise source.refuse("rope_scaling", f"rope_parameters has another {key}")
        if not old and not new:
            given = dict(self.default or {})
        for key in ("rope_theta", "partial_rotary_factor"):
            value = source.take(key, float, None)
            if value is not None and given.setdefault(key, value) != value:
                raise source.refuse(key, f"rope_parameters has {key}={quoted(given[key])}")
        _all(layers, **rope_settings(given, source, self))

    def write(self, target: Target) -> dict[str, Any]:
        """Returns both spellings."""
        parameters, length = rope_parameters(_rotated(target.layers), self)
        scaling = {
            k: v for k, v in parameters.items() if k not in ("rope_theta", "partial_rotary_factor")
        }
        values = {"rope_theta": parameters["rope_theta"], "rope_parameters": parameters}
        values["rope_scaling"] = None if parameters["rope_type"] == "default" else scaling
        if self.fraction is not None:
            values["partial_rotary_factor"] = parameters["partial_rotary_factor"]
        if self.original is not None and _ORIGINAL in parameters:
            values[_ORIGINAL] = parameters[_ORIGINAL]
        return values | ({"max_position_embeddings": length} if length else {})


class RotaryDim:
    """How many of a head's features rotate, in older files of MiniMax-M2. Comes after the rotary positions."""

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the share of a head that rotates."""
        count = source.take("rotary_dim", int, None)
        if count is None:
            return
        share = count / (layers[0]["head_dim"] or layers[0]["embed"] // layers[0]["heads"])
        if layers[0]["rope.fraction"] not in (1.0, share):
            raise source.refuse("rotary_dim", "partial_rotary_factor says another share of a head")
        _all(layers, **{"rope.fraction": share})

    def write(self, target: Target) -> dict[str, Any]:
        """Returns nothing: `partial_rotary_factor` says it."""
        return {}


@dataclass(frozen=True)
class TypedRope:
    """Rotary positions by type of layer: the scaled ones of layers that see everything, and plain ones of the others.

    Attributes:
      theta: transformers' base in layers that see everything.
      local: its base in layers with a window.
      local_key: its key in the older spelling; None: that spelling has one base for both.
    """

    theta: float
    local: float
    local_key: str | None = None
    kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    fraction: float | None = None
    original: int | None = None
    old: Mapping[str, str] | None = None

    def read(self, source: Source, layers: Layers) -> None:
        """Sets the rotary positions of each layer by its type."""
        new = source.take("rope_parameters", dict, None) or {}
        if unknown := sorted(set(new) - set(LIMITS)):
            raise source.refuse(
                "rope_parameters", f"minitext knows {' and '.join(LIMITS)}, not {unknown[0]}"
            )
        given = {}
        for kind in ("full_attention", "sliding_attention"):
            given[kind] = dict(checked(f"rope_parameters.{kind}", new.get(kind) or {}, dict))
        for key, value in source.take("rope_scaling", dict, {}).items():
            if given["full_attention"].setdefault(key, value) != value:
                raise source.refuse("rope_scaling", f"rope_parameters has another {key}")
        where = "rope_parameters" if new else "rope_scaling"
        for found in given.values():
            if found.get("truncate") is False:
                raise source.refuse(where, _ROUNDED)
            if found.get("rope_type") is None and found.get("type") not in (None, "default"):
                # Transformers takes the rotary positions of such a file to be plain.
                raise source.refuse(where, "name its kind rope_type, not type")
        self._bases(source, given)
        for layer in layers:
            full = layer["type"] == "full_attention"
            rope = Rope(self.theta if full else self.local, self.kinds)
            layer |= rope_settings(given[layer["type"]], source, rope)

    def _bases(self, source: Source, given: dict[str, Any]) -> None:
        theta = source.take("rope_theta", float, None)
        if theta is not None and given["full_attention"].setdefault("rope_theta", theta) != theta:
            raise source.refuse("rope_theta", "rope_parameters has another")
        local = source.take(self.local_key, float, None) if self.local_key else theta
        if local is None:
            return
        if (
            self.local_key is None
            and "rope_theta" not in given["sliding_attention"]
            and local != self.local
        ):
            # Versions of transformers read it differently for layers with a window.
            raise source.refuse("rope_theta", "give rope_parameters for each type of layer")
        old = given["sliding_attention"].setdefault("rope_theta", local)
        if self.local_key and old != local:
            raise source.refuse(self.local_key, "rope_parameters has another rope_theta")

    def write(self, target: Target) -> dict[str, Any]:
        """Returns the nested spelling, and the bases of the older one."""
        windows = target.each("attention.window")
        values: dict[str, Any] = {"rope_parameters": {}}
        for kind, local in (("full_attention", False), ("sliding_attention", True)):
            chosen = [c for c, w in zip(target.layers, windows, strict=True) if bool(w) == local]
            if not chosen:
                continue
            parameters, length = rope_parameters(_rotated(chosen), self)
            if not parameters.get("truncate", True):
                raise UserError(f"model.rope.truncate=False: {_ROUNDED}")
            values["rope_parameters"][kind] = parameters
            if local and self.local_key:
                values[self.local_key] = parameters["rope_theta"]
            elif not local:
                values |= {"max_position_embeddings": length} if length else {}
                if self.local_key:
                    values["rope_theta"] = parameters["rope_theta"]
        return values


def _rotated(layers: Sequence[ModelConfig]) -> ModelConfig:
    """Returns the first layer with rotary positions, whose settings all others that rotate must share.

    If none rotates, config.json has some all the same, and other keys switch them off.
    """
    rotated = [layer for layer in layers if layer.rope.kind != "none"]
    if not rotated:
        return layers[0].model_copy(update={"rope": RopeConfig()})
    if any(layer.rope != rotated[0].rope for layer in rotated):
        raise UserError("model.rope differs between layers, and config.json has one")
    return rotated[0]


def rope_settings(given: Mapping[str, Any], source: Source, family: Rope) -> dict[str, Any]:
    """Returns our keys `rope.*` for the parameters of rotary positions in either spelling.

    Raises:
      UserError: for a kind, key or value that the family or minitext doesn't have.
    """
    left = {key: value for key, value in given.items() if value is not None}
    theta = checked("rope_theta", left.pop("rope_theta", family.theta), float)
    kind, older = left.pop("rope_type", None), left.pop("type", None)
    kind = older if kind is None else kind
    kind = "default" if kind is None else checked("rope_type", kind, str)
    kind = (family.old or {}).get(kind, kind)
    if kind not in family.kinds:
        raise UserError(
            f"config.json: rope_type={quoted(kind)} ({source.name}): minitext knows {', '.join(family.kinds)}"
        )
    fraction = left.pop("partial_rotary_factor", family.fraction)
    if family.fraction is None and fraction not in (None, 1.0):
        raise UserError(
            f"config.json: partial_rotary_factor={quoted(fraction)}: {source.name} rotates all features"
        )
    found: dict[str, Any] = {"kind": kind, "theta": theta}
    found["fraction"] = checked(
        "partial_rotary_factor", 1.0 if fraction is None else fraction, float
    )
    longest = source.take("max_position_embeddings", int, None)
    if kind in _WITH_LENGTH:
        inner = left.pop(_ORIGINAL, None)
        # Where a family has the key outside, transformers takes it, or its default, in any case.
        original = source.take(_ORIGINAL, int, None) or family.original or inner or longest
        found["original_length"] = checked(_ORIGINAL, original, int)
        if found["original_length"] < 2:
            raise UserError(f"config.json: {_ORIGINAL}={original}: choose 2 or more")
    elif _ORIGINAL in source.values:  # without scaling it has no effect
        source.unread.discard(_ORIGINAL)
    for theirs, ours, type_, default in ROPE_KEYS[kind]:
        value = left.pop(theirs, default)
        if value is REQUIRED:
            raise UserError(f"config.json: {theirs} is missing, and rope_type={kind} needs it")
        found[ours] = value if value is None else checked(theirs, value, type_)
    if left:
        key = sorted(left)[0]
        raise UserError(
            f"config.json: {key}={quoted(left[key])} has no meaning with rope_type={kind}: remove it"
        )
    _lengths(found, longest)
    return {f"rope.{key}": value for key, value in found.items()}


def _lengths(found: dict[str, Any], longest: int | None) -> None:
    """Resolves what transformers computes from lengths: YaRN's factor, and LongRoPE's longest text."""
    if found["kind"] == "yarn":
        # Both count for nothing unless both are there and not 0, but for the scale of MLA's logits.
        found["factor"] = (
            found["factor"]
            or checked("max_position_embeddings", longest, int) / found["original_length"]
        )
    if found["kind"] == "longrope":
        factor, original = found.pop("factor"), found["original_length"]
        for key in ("short_factor", "long_factor"):
            found[key] = tuple(checked(key, number, float) for number in found[key])
        if factor is None:
            found["max_length"] = checked("max_position_embeddings", longest, int)
            return
        found["max_length"] = round(factor * original)
        if found["attention_factor"] is None and found["max_length"] != factor * original:
            more = math.log(factor) / math.log(original) if factor > 1 else 0.0
            found["attention_factor"] = math.sqrt(1 + more)


def rope_parameters(layer: ModelConfig, family: Any) -> tuple[dict[str, Any], int | None]:
    """Returns `rope_parameters` of a layer's rotary positions, and the longest text that follows from them.

    Raises:
      UserError: for a kind that the family doesn't have.
    """
    rope: Any = layer.rope
    if rope.kind not in family.kinds:
        raise UserError(f"model.rope.kind={rope.kind} has no place in its config.json")
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if family.fraction is not None:
        values["partial_rotary_factor"] = rope.fraction
    if rope.kind in _WITH_LENGTH:
        values[_ORIGINAL] = rope.original_length
    for theirs, ours, _, _ in ROPE_KEYS[rope.kind]:
        value = getattr(rope, ours, None)
        if value is not None:
            values[theirs] = list(value) if isinstance(value, tuple) else value
    if rope.kind == "longrope":
        return values, rope.max_length
    if rope.kind in ("llama3", "yarn"):
        return values, round(rope.factor * rope.original_length)
    return values, None
