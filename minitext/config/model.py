"""The model section: the decoder and its attention and feed-forward variants.

Chapters: 6.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, PlainSerializer, ValidationError, field_validator

from minitext.config.lora import LoraConfig
from minitext.config.quantization import QuantizationRule, StorageRule
from minitext.config.rope import (
    LinearRopeConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    NoRopeConfig,
    RopeConfig,
    YarnRopeConfig,
)
from minitext.config.section import Section, cached, divisors, setting, size
from minitext.errors import did_you_mean, rule_of

# A layer's tensors that `model.remat_save` can keep; the layers mark them with `checkpoint_name`.
REMAT_NAMES = ("qkv", "attention", "attention_out", "gate_up", "hidden", "latents")
# Results of products with weights that the backward pass reads; attention's own products are recomputed.
PRODUCTS = ("latents", "qkv", "attention_out", "gate_up")

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped"]
AttentionImpl = Literal["auto", "xla", "xla_blocked", "cudnn", "pallas_tpu", "pallas_gpu"]
ContextMethod = Literal["ring", "allgather"]
_IMPL = "implementation of the attention kernel"
_CONTEXT = "how tokens attend to the rest of a sequence split over mesh.context"
_ACTIVATION = "of the gate; clamped: silu(1.702 gate) of bounded inputs, as in gpt-oss"
# What a layer of a period may set for itself.
LAYER_KEYS = ("heads", "kv_heads", "head_dim", "mlp", "rope", "attention", "ffn")


class GQAConfig(Section):
    """Grouped-query attention (Ainslie et al. 2023); `model` has its heads and widths."""

    kind: Literal["gqa"] = setting("gqa", "grouped-query attention")
    impl: AttentionImpl = setting("auto", _IMPL)
    context: ContextMethod = setting("ring", _CONTEXT)
    window: int | None = setting(None, "gqa: a token sees itself and the window-1 before it", ge=1)
    chunk: int | None = setting(None, "gqa: a token sees its own chunk of so many positions", ge=1)
    softcap: float | None = setting(None, "gqa: bound of the logits, c tanh(logits / c)", gt=0)
    sinks: bool = setting(False, "gqa: one learned logit per head without a value")
    scale: float | None = setting(None, "gqa: factor on q.k; null: 1/sqrt(head_dim)", gt=0)
    qkv_bias: bool = setting(False, "gqa: biases of queries, keys and values")
    out_bias: bool = setting(False, "gqa: bias of the output projection")
    qk_norm: Literal["none", "head", "whole", "l2"] = setting(
        "none", "gqa: RMSNorm of queries and keys: by head, over all heads, or by head, unscaled and after rope"
    )  # fmt: skip
    gate: bool = setting(False, "gqa: multiply each head's output by a sigmoid of the input")
    temperature_length: int | None = setting(
        None, "gqa: queries grow by the logarithm of their position over this", ge=1
    )
    temperature_scale: float = setting(0.1, "gqa: how much they grow", gt=0)

    def problems(self) -> Iterator[str]:
        """Checks that the settings don't exclude each other."""
        if self.window is not None and self.chunk is not None:
            yield (
                f"model.attention.window={self.window} and model.attention.chunk={self.chunk}: set one of them to null"
            )

    def problems_in(self, model: "ModelConfig") -> Iterator[str]:
        """Checks the model's heads and widths, and that no latents are to be kept."""
        if model.head_dim is None and model.embed % model.heads:
            yield (
                f"model.embed={model.embed} is not divisible by model.heads={model.heads}: choose model.heads "
                f"among {divisors(model.embed)}, or set model.head_dim"
            )
        else:
            yield from _odd_rope(model, model.H, "model.head_dim")
        if model.heads % model.K:
            yield (
                f"model.heads={model.heads} is not divisible by model.kv_heads={model.kv_heads}: choose "
                f"model.kv_heads among {divisors(model.heads)}"
            )
        yield from _no_latents(model, self.kind)

    def sizes(self, model: "ModelConfig") -> list[tuple[str, str, int]]:
        """Returns the dimensions that rules may split, as (its name in the rules, key, size)."""
        return [("heads", "model.heads", model.heads), ("kv_heads", "model.kv_heads", model.K)]


class MLAConfig(Section):
    """Multi-head latent attention (DeepSeek-AI 2024): keys and values are computed from one low-rank latent vector.

    The defaults have DeepSeek-V2's proportions at 32 per head, except that few heads need a smaller rank.
    """

    kind: Literal["mla"] = setting("mla", "multi-head latent attention")
    impl: AttentionImpl = setting("auto", _IMPL)
    context: ContextMethod = setting("ring", _CONTEXT)
    q_rank: int | None = size(None, "mla: width of the queries' latent; null: no latent")
    kv_rank: int = size(64, "mla: width of the keys' and values' latent")
    nope_dim: int = size(32, "mla: width of a head's queries and keys without positions")
    rope_dim: int = size(16, "mla: width of the rotary part; its key serves all heads", least=2)
    v_dim: int = size(32, "mla: width of a head's values")

    latent_eps: float = setting(1e-6, "mla: added to the mean square of the latents", gt=0)

    def problems_in(self, model: "ModelConfig") -> Iterator[str]:
        """Checks that the model sets nothing that only GQA uses, and that the rotary part has pairs."""
        yield from _odd_rope(model, self.rope_dim, "model.attention.rope_dim")
        if model.kv_heads is not None:
            yield (
                f"model.kv_heads={model.kv_heads} has no effect with model.attention.kind=mla, in which each head has "
                "its own keys and values: set model.kv_heads=null"
            )
        if model.head_dim is not None:
            yield (
                f"model.head_dim={model.head_dim} has no effect with model.attention.kind=mla: set it to null, and set "
                "model.attention.nope_dim, rope_dim and v_dim instead"
            )

    def sizes(self, model: "ModelConfig") -> list[tuple[str, str, int]]:
        """Returns what `GQAConfig.sizes` does; latents, as rows of matrices, are split like `model.embed`."""
        ranks = {"kv_rank": self.kv_rank} | ({"q_rank": self.q_rank} if self.q_rank else {})
        latents = [("embed", f"model.attention.{name}", size) for name, size in ranks.items()]
        return [*latents, ("heads", "model.heads", model.heads)]


class DeltaNetConfig(Section):
    """Gated DeltaNet (Yang et al. 2024): attention whose memory of earlier tokens is one matrix for each head.

    It has heads and widths of its own; those of `model`, and its rotary positions, are for other layers. The defaults
    have the proportions of Qwen3-Next at model.embed=192.
    """

    kind: Literal["deltanet"] = setting("deltanet", "gated linear attention")
    key_heads: int = size(4, "deltanet: heads of queries and keys")
    value_heads: int = size(8, "deltanet: heads of values, a multiple of key_heads")
    key_dim: int = size(48, "deltanet: width of a head's queries and keys")
    value_dim: int = size(48, "deltanet: width of a head's values")
    conv: int = setting(4, "deltanet: tokens that the convolution of q, k and v sees", ge=1)

    # Nothing to choose: XLA runs it, over sequences that stay in one piece and in the text's order.
    impl: ClassVar[AttentionImpl] = "xla"
    context: ClassVar[ContextMethod] = "allgather"

    def problems(self) -> Iterator[str]:
        """Checks that each head of keys serves as many heads of values."""
        if self.value_heads % self.key_heads:
            yield (
                f"model.attention.value_heads={self.value_heads} is not divisible by model.attention.key_heads="
                f"{self.key_heads}: choose model.attention.key_heads among {divisors(self.value_heads)}"
            )

    def problems_in(self, model: "ModelConfig") -> Iterator[str]:
        """Checks that no latents are to be kept."""
        yield from _no_latents(model, self.kind)

    def sizes(self, _model: "ModelConfig") -> list[tuple[str, str, int]]:
        """Returns what `GQAConfig.sizes` does."""
        return [
            ("heads", "model.attention.value_heads", self.value_heads),
            ("kv_heads", "model.attention.key_heads", self.key_heads),
        ]


def _no_latents(model: "ModelConfig", kind: str) -> Iterator[str]:
    if "latents" in model.remat_save:
        yield (
            "model.remat_save: only model.attention.kind=mla makes latents: leave them out with "
            f"model.attention.kind={kind}"
        )


def _odd_rope(model: "ModelConfig", width: int, key: str) -> Iterator[str]:
    """Checks that the features of a head that rotate come in pairs."""
    if width % 2:
        more = " so that embed / heads is even, or set an even model.head_dim"
        choose = f"model.heads{more}" if key == "model.head_dim" else "an even one"
        yield f"{key}={width} is odd, and rotary positions rotate pairs: choose {choose}"
    elif isinstance(model.rope, NoRopeConfig):
        return
    elif (rotated := model.rope.rotated(width)) % 2 or not rotated:
        yield (
            f"model.rope.fraction={model.rope.fraction} rotates {rotated} of {width} features, and rotary "
            f"positions rotate pairs: choose for instance {max(2, rotated // 2 * 2) / width:g}"
        )
    elif isinstance(model.rope, LongRopeConfig):
        for name in ("short_factor", "long_factor"):
            if (n := len(getattr(model.rope, name))) != rotated // 2:
                yield f"model.rope.{name} has {n} numbers for {rotated // 2} rotated pairs: give one for each"


class SwiGLUConfig(Section):
    """Gated feed-forward layer (Shazeer 2020); `model.mlp` is its width."""

    kind: Literal["swiglu"] = setting("swiglu", "gated linear unit")
    activation: Activation = setting("silu", _ACTIVATION)
    bias: bool = setting(False, "biases of the projections")


class MoEConfig(Section):
    """Mixture of experts: many SwiGLU layers, each `model.mlp` wide; every token uses a few of them."""

    kind: Literal["moe"] = setting("moe", "mixture of experts")
    activation: Activation = setting("silu", _ACTIVATION)
    bias: bool = setting(False, "biases of the projections")
    experts: int = size(8, "feed-forward layers to choose from (E)", least=2)
    experts_per_token: int = setting(2, "experts per token (k)", ge=1)
    shared_experts: int = size(0, "more experts, run by every token as one wide layer", least=0)
    router: Literal["softmax", "sigmoid"] = setting("softmax", "scores from the router's logits")
    normalize: bool = setting(True, "make the weights of a token's experts sum to 1")
    scaling: float = setting(1.0, "factor on the weights", gt=0)
    groups: int = setting(1, "groups of experts, such as those on one machine", ge=1)
    groups_per_token: int = setting(1, "groups from which a token's experts come", ge=1)
    router_bias: bool = setting(False, "bias of the router's logits")
    shared_gate: bool = setting(
        False, "multiply the shared experts' output by a sigmoid of the input"
    )
    scale_input: bool = setting(False, "the weights multiply the experts' input, not their output")
    capacity_factor: float | None = setting(
        None, "an expert's slots in even shares of a row; the rest is dropped; null: dropless", gt=0
    )
    balance_loss: float = setting(0.01, "weight of the load-balance loss per layer", ge=0)
    z_loss: float = setting(0.0, "weight of the router's squared logsumexp per layer", ge=0)
    bias_rate: float = setting(0.0, "step size of load-balancing biases; 0: no biases", ge=0)

    def problems(self) -> Iterator[str]:
        """Checks that the numbers of experts and groups are compatible."""
        E, k, G, g = self.experts, self.experts_per_token, self.groups, self.groups_per_token
        if k > E:
            yield f"model.ffn.experts_per_token={k} is more than model.ffn.experts={E}: choose {E} at most"
        if E % G:
            yield (
                f"model.ffn.experts={E} is not divisible by model.ffn.groups={G}: choose "
                f"model.ffn.groups among {divisors(E)}"
            )
        elif g > G:
            yield (
                f"model.ffn.groups_per_token={g} is more than model.ffn.groups={G}: choose {G} at most"
            )
        elif G > 1 and k <= E and g * (E // G) < k:
            yield (
                f"model.ffn.groups_per_token={g} of {E // G} experts each are fewer than "
                f"model.ffn.experts_per_token={k}: choose model.ffn.groups_per_token={-(-k * G // E)} or more"
            )
        if self.shared_gate and not self.shared_experts:
            yield "model.ffn.shared_gate=true has no effect with model.ffn.shared_experts=0: set it to false"


def _flat(value: Any) -> Any:
    """Returns a layer's differences, nested mappings or pairs, as pairs of dotted keys and values."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{value}: it is not a mapping of keys to values")
    pairs = []
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            pairs += [(f"{key}.{name}", leaf) for name, leaf in inner.items()]
        else:
            pairs.append((str(key), tuple(inner) if isinstance(inner, list) else inner))
    return tuple(pairs)


def _nested(pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


# Pairs, because a section must hash.
Pairs = tuple[tuple[str, Any], ...]
Differences = Annotated[Pairs, BeforeValidator(_flat), PlainSerializer(_nested)]


class Stack(NamedTuple):
    """Layers that repeat.

    Attributes:
      repeats: how often.
      layers: the configuration of each layer of one repetition.
    """

    repeats: int
    layers: tuple["ModelConfig", ...]


class ModelConfig(Section):
    """The decoder: its sizes, numerics and how its layers run."""

    vocab: int = size(320, "rows of the embedding table (V)", least=2)
    layers: int = setting(4, "decoder layers (L)", ge=1, le=100_000)
    embed: int = size(192, "width of the residual stream (D)")
    heads: int = size(6, "query heads (N)")
    kv_heads: int | None = size(None, "key and value heads (K); null: as many as heads")
    head_dim: int | None = size(None, "width of a head (H); null: embed / heads", least=2)
    mlp: int = size(512, "width of the feed-forward layer, or of each expert (F)")
    dense_layers: int = setting(0, "first layers that are dense, ahead of the others", ge=0)
    dense_mlp: int | None = size(None, "width of their feed-forward layer; null: mlp")
    period: tuple[Differences, ...] = setting(
        (), "what each layer of a repeating pattern sets for itself: [{}, {attention: {window: 8}}]"
    )
    norms: Literal["before", "after", "both"] = setting(
        "before", "normalise the input of attention and feed-forward layer, their output, or both"
    )
    norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm", gt=0)
    norm_offset: bool = setting(False, "RMSNorm multiplies by 1 + its scale")
    embed_scale: float | None = setting(None, "factor on token vectors; null: 1", gt=0)
    residual_scale: float | None = setting(
        None, "factor on what attention and feed-forward layers add; null: 1", gt=0
    )
    tie_embeddings: bool = setting(False, "use the transposed embedding table as the output layer")
    logit_scale: float | None = setting(
        None, "factor on the logits; null: 1/sqrt(embed) if embeddings are tied, else 1", gt=0
    )
    logit_softcap: float | None = setting(None, "bound of the logits, c tanh(logits / c)", gt=0)
    dtype: Literal["float32", "bfloat16"] = setting("float32", "compute type; parameters: float32")
    value_head: bool = setting(
        False, "a second output: the reward that is still to come (objective.kind=ppo)"
    )
    scan_layers: bool = setting(True, "run layers by lax.scan (compiles once) instead of unrolling")
    remat: Literal["none", "dots", "names", "full"] = setting(
        "none", "recomputed in backward: nothing, all but matmuls, all but remat_save, everything"
    )
    remat_save: tuple[str, ...] = setting(
        (), f"remat=names: a layer's tensors to keep, among {', '.join(REMAT_NAMES)}"
    )
    rope: (
        RopeConfig
        | LinearRopeConfig
        | Llama3RopeConfig
        | YarnRopeConfig
        | LongRopeConfig
        | NoRopeConfig
    ) = setting(RopeConfig(), "rotary positions", discriminator="kind")
    attention: GQAConfig | MLAConfig | DeltaNetConfig = setting(
        GQAConfig(), "attention", discriminator="kind"
    )
    ffn: SwiGLUConfig | MoEConfig = setting(SwiGLUConfig(), "feed-forward", discriminator="kind")
    quantization: tuple[QuantizationRule, ...] = setting(
        (), "rules, the first that matches a module counts: [{module: blocks/ffn/.*, dtype: int8}]"
    )
    storage: tuple[StorageRule, ...] = setting(
        (),
        "rules for stored weights, as `minitext quantize` writes them; trained are only adapters",
    )
    lora: LoraConfig = setting(LoraConfig(), "low-rank adapters")

    @field_validator("attention", "rope", "ffn", mode="before")
    @classmethod
    def _first_kind(cls, value: Any, info: Any) -> Any:
        kind = cls.model_fields[info.field_name].default.kind
        return {"kind": kind} | value if isinstance(value, dict) else value

    @property
    def saved(self) -> tuple[str, ...]:
        """The named tensors that a rematerialised layer keeps for its backward pass."""
        return PRODUCTS if self.remat == "dots" else self.remat_save

    @property
    def K(self) -> int:
        """Key and value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def H(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim or self.embed // self.heads

    @property
    def is_stored(self) -> bool:
        """Whether any weights are stored in fewer bits."""
        return any(rule.dtype != "none" for rule in self.storage)

    @property
    def stacks(self) -> dict[str, Stack]:
        """The model's layers by the name of the module that holds them, in order.

        `prefix` has the dense first layers, `blocks` whole periods, `suffix` the rest of the last one.
        """
        return _stacks(self)

    def with_layer(self, differences: Pairs) -> "ModelConfig":
        """Returns the configuration of a layer that differs from the model's in a few keys.

        Raises:
          ValidationError: for a key or value that doesn't exist.
        """
        tree = self.model_dump() | {"period": (), "dense_layers": 0, "dense_mlp": None}
        for name, value in _nested(differences).items():
            if not isinstance(value, dict):
                tree[name] = value
            elif value.get("kind", tree[name]["kind"]) == tree[name]["kind"]:
                tree[name] = tree[name] | value
            else:
                tree[name] = value
        return ModelConfig.model_validate(tree)

    def _pattern_problems(self) -> Iterator[str]:
        if self.dense_layers and self.dense_layers >= self.layers:
            yield (
                f"model.dense_layers={self.dense_layers} leaves none of model.layers={self.layers}: choose fewer, or "
                "model.ffn.kind=swiglu"
            )
        if self.dense_mlp and not self.dense_layers:
            yield f"model.dense_mlp={self.dense_mlp} has no effect with model.dense_layers=0: set it to null"
        if len(self.period) > self.layers - self.dense_layers:
            yield (
                f"model.period has {len(self.period)} layers for {self.layers - self.dense_layers}: choose more "
                "model.layers"
            )
        for place, differences in enumerate(self.period):
            yield from self._layer_problems(f"model.period[{place}]", differences)

    def _layer_problems(self, where: str, differences: Pairs) -> Iterator[str]:
        for key, value in differences:
            if (first := key.partition(".")[0]) not in LAYER_KEYS:
                hint, known = did_you_mean(first, LAYER_KEYS), ", ".join(LAYER_KEYS)
                yield f"{where}.{key}={value}: a layer cannot set it{hint}: choose among {known}"
                return
        try:
            self.with_layer(differences)
        except ValidationError as error:
            for e in error.errors():
                parts = [str(part) for part in e["loc"]]
                if len(parts) > 1:  # pydantic puts a variant's kind into the path, keys don't
                    del parts[1]
                reason = rule_of(e)
                if e["type"] == "extra_forbidden":
                    section = getattr(self, parts[0], None)
                    known = list(type(section).model_fields) if section is not None else []
                    reason = f"unknown key{did_you_mean(parts[-1], known)}"
                yield ".".join([where, *parts]) + f": {reason}"

    def problems(self) -> Iterator[str]:
        """Checks the rematerialised names, the variants and the pattern of layers."""
        if broken := list(self._pattern_problems()):
            yield from broken
        yield from self.ffn.problems()
        yield from self.rope.problems()
        for number, rule in enumerate(self.quantization):
            for problem in rule.problems():
                yield f"model.quantization[{number}]: {problem}"
        for number, rule in enumerate(self.storage):
            for problem in rule.problems():
                yield f"model.storage[{number}]: {problem}"
        yield from self.lora.problems()
        save = ",".join(self.remat_save)
        if unknown := [name for name in self.remat_save if name not in REMAT_NAMES]:
            yield (
                f"model.remat_save=[{save}]: no tensor of a layer is called {', '.join(unknown)}: choose among "
                f"{', '.join(REMAT_NAMES)}"
            )
        if self.remat == "names" and not self.remat_save:
            yield (
                "model.remat=names keeps what model.remat_save lists, and it is empty: set for instance "
                "model.remat_save=[qkv,gate_up], or model.remat=full"
            )
        if self.remat != "names" and self.remat_save:
            yield f"model.remat_save=[{save}] has no effect with model.remat={self.remat}: set model.remat=names"
        yield from self.attention.problems()
        yield from self.attention.problems_in(self)


@cached
def _stacks(cfg: ModelConfig) -> dict[str, Stack]:
    layers = [cfg.with_layer(differences) for differences in cfg.period or ((),)]
    repeats, rest = divmod(cfg.layers - cfg.dense_layers, len(layers))
    dense = [("mlp", cfg.dense_mlp or cfg.mlp), ("ffn.kind", "swiglu")]
    dense += [(f"ffn.{name}", getattr(cfg.ffn, name)) for name in ("activation", "bias")]
    found = {
        "prefix": Stack(cfg.dense_layers, (cfg.with_layer(tuple(dense)),)),
        "blocks": Stack(repeats, tuple(layers)),
        "suffix": Stack(1, tuple(layers[:rest])),
    }
    return {name: stack for name, stack in found.items() if stack.repeats and stack.layers}
