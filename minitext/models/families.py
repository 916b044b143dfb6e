"""The published families of models, each as data: what its config.json means, and what its tensors are called.

One decoder computes them all. A family is two lists of rows. Those of `keys` go between config.json and our settings;
`minitext.models.hf_keys` has their kinds. Those of `tensors` go between the names in a checkpoint and our parameters.
Each row serves both directions, so what comes in goes out as it was.

Sources: the configurations and models in transformers 5.23, read and compared number by number (`minitext parity`).

Chapters: 23.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from minitext.config.model import MLAConfig, ModelConfig
from minitext.errors import UserError, did_you_mean
from minitext.models.hf_keys import (
    EmbedScale,
    Experts,
    Fixed,
    HeadDim,
    Implied,
    L2Norm,
    Only,
    QueryScalar,
    Rope,
    Row,
    Same,
    SharedWidth,
    Temperature,
    TypedRope,
    Types,
    Unrotated,
    Window,
    differences,
    every,
    every_step,
    first_dense,
    listed,
    read,
    short,
    write,
)

LAYER = "model.layers.{layer}."
# Frequencies that older files hold, which follow from config.json.
FREQUENCIES = r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


class Tensor(NamedTuple):
    """One tensor of a checkpoint, or the part of it that is one parameter of ours.

    Attributes:
      theirs: its name; `{layer}` and `{expert}` stand for numbers. Rows with the same name fill it together.
      ours: the parameter, of a layer if `theirs` has `{layer}`. The row holds for the layers that have it.
      transpose: whether its last two dimensions are swapped: theirs [out, in], ours [in, out].
      part: (layer's configuration, size of the axis) -> indices of theirs along `axis`, in our order; None: all.
      axis: the axis of theirs that `part` is about.
      reshape: whether theirs has a dimension of 1 in front, [1, D] for our [D].
    """

    theirs: str
    ours: str
    transpose: bool = False
    part: Callable[[ModelConfig, int], np.ndarray] | None = None
    axis: int = 0
    reshape: bool = False


class Family(NamedTuple):
    """A family.

    Attributes:
      architecture: the class of transformers that config.json names.
      keys: rows between config.json and our keys.
      tensors: rows between the checkpoint and our parameters.
      unread: pattern of the names of tensors that aren't part of the model.
    """

    architecture: str
    keys: tuple[Row, ...]
    tensors: tuple[Tensor, ...]
    unread: str = FREQUENCIES


# Parts of tensors.


def _halves(width: int) -> np.ndarray:
    """Returns where the features of our two halves are in a layout of neighbouring pairs."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def _by_head(heads: int, width: int, features: np.ndarray) -> np.ndarray:
    """Returns the indices of some features of each head of `width`."""
    return (np.arange(heads)[:, None] * width + features).reshape(-1)


def _paired_heads(cfg: ModelConfig, size: int) -> np.ndarray:
    """All features of each head, from neighbouring pairs to halves."""
    return _by_head(size // cfg.H, cfg.H, _halves(cfg.H))


def _mla(cfg: ModelConfig) -> MLAConfig:
    assert isinstance(cfg.attention, MLAConfig)
    return cfg.attention


def _paired_queries(cfg: ModelConfig, _: int) -> np.ndarray:
    a = _mla(cfg)
    features = np.concatenate([np.arange(a.nope_dim), a.nope_dim + _halves(a.rope_dim)])
    return _by_head(cfg.heads, a.nope_dim + a.rope_dim, features)


def _paired_key(cfg: ModelConfig, _: int) -> np.ndarray:
    a = _mla(cfg)
    return np.concatenate([np.arange(a.kv_rank), a.kv_rank + _halves(a.rope_dim)])


def _latent_keys(cfg: ModelConfig, _: int) -> np.ndarray:
    a = _mla(cfg)
    return _by_head(cfg.heads, a.nope_dim + a.v_dim, np.arange(a.nope_dim))


def _latent_values(cfg: ModelConfig, _: int) -> np.ndarray:
    a = _mla(cfg)
    return _by_head(cfg.heads, a.nope_dim + a.v_dim, a.nope_dim + np.arange(a.v_dim))


def _queries(cfg: ModelConfig, _: int) -> np.ndarray:
    return np.arange(cfg.heads * cfg.H)


def _keys(cfg: ModelConfig, _: int) -> np.ndarray:
    return cfg.heads * cfg.H + np.arange(cfg.K * cfg.H)


def _values(cfg: ModelConfig, _: int) -> np.ndarray:
    return (cfg.heads + cfg.K) * cfg.H + np.arange(cfg.K * cfg.H)


def _first_half(_: ModelConfig, size: int) -> np.ndarray:
    return np.arange(size // 2)


def _second_half(_: ModelConfig, size: int) -> np.ndarray:
    return np.arange(size // 2, size)


def _even(_: ModelConfig, size: int) -> np.ndarray:
    return np.arange(0, size, 2)


def _odd(_: ModelConfig, size: int) -> np.ndarray:
    return np.arange(1, size, 2)


# Rows of tensors that several families share.


def _weight(theirs: str, ours: str, **more: Any) -> tuple[Tensor, ...]:
    """A projection, with its bias where the layer has one."""
    return (
        Tensor(f"{LAYER}{theirs}.weight", f"{ours}.w", transpose=True, **more),
        Tensor(f"{LAYER}{theirs}.bias", f"{ours}.b", **more),
    )


def _norm(theirs: str, ours: str) -> Tensor:
    return Tensor(f"{LAYER}{theirs}.weight", f"{ours}.scale")


ENDS = (
    Tensor("model.embed_tokens.weight", "embed.table"),
    Tensor("model.norm.weight", "norm.scale"),
    Tensor("lm_head.weight", "unembed.w", transpose=True),
)
QKV = tuple(row for x in "qkv" for row in _weight(f"self_attn.{x}_proj", f"attention.{x}"))
OUT = _weight("self_attn.o_proj", "attention.o")
QK_NORM = (
    _norm("self_attn.q_norm", "attention.q_norm"),
    _norm("self_attn.k_norm", "attention.k_norm"),
)
BEFORE = (_norm("input_layernorm", "norm_attention"), _norm("post_attention_layernorm", "norm_ffn"))
AFTER = (
    _norm("post_attention_layernorm", "norm_attention_out"),
    _norm("post_feedforward_layernorm", "norm_ffn_out"),
)
BOTH = (
    _norm("input_layernorm", "norm_attention"),
    _norm("pre_feedforward_layernorm", "norm_ffn"),
    *AFTER,
)


def _gated(theirs: str, ours: str) -> tuple[Tensor, ...]:
    return tuple(r for x in ("gate", "up", "down") for r in _weight(f"{theirs}.{x}_proj", f"{ours}.{x}"))


MLP = _gated("mlp", "ffn")


def _experts(theirs: str, **names: str) -> tuple[Tensor, ...]:
    """A tensor for each matrix of each expert."""
    return tuple(
        Tensor(f"{LAYER}{theirs}.experts.{{expert}}.{name}.weight", f"ffn.{ours}", transpose=True)
        for ours, name in names.items()
    )


def _router(theirs: str) -> Tensor:
    return Tensor(f"{LAYER}{theirs}.weight", "ffn.router", transpose=True)


EXPERTS = (
    _router("mlp.gate"),
    *_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
)
CHOICE_BIAS = Tensor(f"{LAYER}mlp.gate.e_score_correction_bias", "ffn.bias")
LLAMA = (*ENDS, *QKV, *OUT, *BEFORE, *MLP)

# Rows of keys that several families share.

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
BIASES = ("attention.qkv_bias", "attention.out_bias")


def _same_float(hf: str, ours: str, default: Any) -> Same:
    return Same(hf, ours, kind=float, default=default)


def _switch(hf: str, *ours: str, default: bool = False) -> Same:
    return Same(hf, *ours, kind=bool, default=default)


def _base(
    *,
    eps: float = 1e-6,
    tied: bool = False,
    activation: str = "hidden_act",
    first: str = "silu",
    norms: str = "before",
    offset: bool = False,
) -> tuple[Row, ...]:
    """Sizes, activation and norms, with transformers' values where config.json has none."""
    return (
        Same("vocab_size", "vocab"),
        Same("hidden_size", "embed"),
        Same("num_attention_heads", "heads"),
        _same_float("rms_norm_eps", "norm_eps", eps),
        _switch("tie_word_embeddings", "tie_embeddings", default=tied),
        Same(activation, "ffn.activation", kind=str, default=first, codes=ACTIVATIONS),
        Fixed(norms=norms, norm_offset=offset, logit_scale=1.0),
    )


def _gqa(head_dim: Row = HeadDim(), **ours: Any) -> tuple[Row, ...]:
    """Grouped-query attention, with settings of ours that the family always has."""
    return (
        Fixed(**{"attention__kind": "gqa", "ffn__kind": "swiglu"} | ours),
        Same("num_key_value_heads", "kv_heads", default=None),
        head_dim,
    )


def _dense() -> Row:
    return Same("intermediate_size", "mlp")


def _moe(experts: str = "num_experts", per_token: int | object = 8, **ours: Any) -> tuple[Row, ...]:
    return (
        Same(experts, "ffn.experts"),
        Same("num_experts_per_tok", "ffn.experts_per_token", default=per_token),
        Fixed(**{f"ffn__{key}": value for key, value in ours.items()}),
    )


SPARSE = Fixed(ffn__kind="moe")
QWEN_WINDOWS = Types(
    lambda source, layers: [
        "sliding_attention"
        if source.values.get("use_sliding_window") and i >= source.take("max_window_layers", int, 28)
        else "full_attention"
        for i in range(len(layers))
    ],
    switch="use_sliding_window",
)
# Sigmoid scores in groups, with a bias that only chooses (DeepSeek-V3, GLM-4.5).
GROUPED = (
    Same("n_group", "ffn.groups", default=1),
    Same("topk_group", "ffn.groups_per_token", default=1),
    _same_float("routed_scaling_factor", "ffn.scaling", 1.0),
    _switch("norm_topk_prob", "ffn.normalize", default=True),
    Same("n_shared_experts", "ffn.shared_experts", default=1),
    Only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1),
    # Their biases exist, and move by this much in DeepSeek-V3's training.
    Fixed(ffn__router="sigmoid", ffn__bias_rate=0.001),
)
SOFTCAPS = (
    Same("attn_logit_softcapping", "attention.softcap", kind=float, default=None),
    Same("final_logit_softcapping", "logit_softcap", kind=float, default=None),
)
GEMMA = (
    EmbedScale(),
    QueryScalar(),
    _switch("attention_bias", *BIASES),
    _dense(),
    Only(hidden_act=("gelu_pytorch_tanh", "gelu"), use_bidirectional_attention=False),
)


FAMILIES: dict[str, Family] = {
    # Llama 2, 3, 3.1, 3.2; SmolLM2.
    "llama": Family(
        "LlamaForCausalLM",
        (
            *_base(),
            *_gqa(),
            _dense(),
            _switch("attention_bias", *BIASES),
            _switch("mlp_bias", "ffn.bias"),
            Rope(),
            Only(rope_interleaved=False),
        ),
        LLAMA,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        (*_base(), *_gqa(), _dense(), Window(4096), Rope()),
        LLAMA,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(),
            SPARSE,
            _dense(),
            *_moe("num_local_experts", 2),
            Window(),
            Rope(1e6),
        ),
        (
            *ENDS,
            *QKV,
            *OUT,
            *BEFORE,
            _router("block_sparse_moe.gate"),
            *_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        ),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        (*_base(), *_gqa(attention__qkv_bias=True), _dense(), QWEN_WINDOWS, Rope()),
        LLAMA,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        (
            *_base(),
            *_gqa(HeadDim(128), attention__qk_norm="head"),
            _dense(),
            _switch("attention_bias", *BIASES),
            QWEN_WINDOWS,
            Rope(),
        ),
        (*LLAMA, *QK_NORM),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (
            *_base(),
            *_gqa(attention__qk_norm="head"),
            every_step(),
            *_moe(),
            _switch("norm_topk_prob", "ffn.normalize"),
            _switch("attention_bias", *BIASES),
            Window(4096, "use_sliding_window"),
            Rope(),
        ),
        (*LLAMA, *QK_NORM, *EXPERTS),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        (
            *_base(),
            *_gqa(),
            every_step(),
            *_moe(per_token=4, shared_gate=True),
            SharedWidth(),
            _switch("norm_topk_prob", "ffn.normalize"),
            _switch("qkv_bias", "attention.qkv_bias", default=True),
            Types(
                lambda source, layers: [
                    "sliding_attention"
                    if source.values.get("use_sliding_window")
                    and i % 2 == 0
                    and i < source.take("max_window_layers", int, 28)
                    else "full_attention"
                    for i in range(len(layers))
                ],
                switch="use_sliding_window",
            ),
            Rope(),
        ),
        (
            *LLAMA,
            *EXPERTS,
            *_gated("mlp.shared_expert", "ffn.shared"),
            Tensor(f"{LAYER}mlp.shared_expert_gate.weight", "ffn.shared_gate", reshape=True),
        ),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        (
            *_base(
                tied=True, activation="hidden_activation", first="gelu_pytorch_tanh",
                norms="both", offset=True,
            ),  # fmt: skip
            *_gqa(HeadDim(256)),
            *GEMMA,
            *SOFTCAPS,
            Types(every(2)),
            Rope(),
        ),
        (*ENDS, *QKV, *OUT, *BOTH, *MLP),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        (
            *_base(
                tied=True, activation="hidden_activation", first="gelu_pytorch_tanh",
                norms="both", offset=True,
            ),  # fmt: skip
            *_gqa(HeadDim(256), attention__qk_norm="head"),
            *GEMMA,
            *SOFTCAPS,
            Types(lambda s, layers: every(s.take("sliding_window_pattern", int, 6))(s, layers)),
            TypedRope(1e6, 1e4, "rope_local_base_freq"),
        ),
        (*ENDS, *QKV, *OUT, *QK_NORM, *BOTH, *MLP),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        (
            *_base(eps=1e-5, norms="after"),
            *_gqa(attention__qk_norm="whole"),
            _dense(),
            _switch("attention_bias", *BIASES),
            Rope(),
        ),
        (*ENDS, *QKV, *OUT, *QK_NORM, *AFTER, *MLP),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        (
            *_base(eps=1e-5, norms="after"),
            *_gqa(attention__qk_norm="whole"),
            _dense(),
            _switch("attention_bias", *BIASES),
            Types(every(4)),
            TypedRope(5e5, 5e5),
        ),
        (*ENDS, *QKV, *OUT, *QK_NORM, *AFTER, *MLP),
    ),
    # Phi-3, Phi-3.5, Phi-4 and Phi-4-mini.
    "phi3": Family(
        "Phi3ForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(HeadDim(written=False)),
            _dense(),
            Window(),
            Rope(kinds=("default", "longrope"), fraction=1.0, original=4096, old={"su": "longrope"}),
            Only(attention_bias=False),
        ),
        (
            *ENDS,
            *BEFORE,
            *OUT,
            Tensor(f"{LAYER}self_attn.qkv_proj.weight", "attention.q.w", True, _queries),
            Tensor(f"{LAYER}self_attn.qkv_proj.weight", "attention.k.w", True, _keys),
            Tensor(f"{LAYER}self_attn.qkv_proj.weight", "attention.v.w", True, _values),
            Tensor(f"{LAYER}mlp.gate_up_proj.weight", "ffn.gate.w", True, _first_half),
            Tensor(f"{LAYER}mlp.gate_up_proj.weight", "ffn.up.w", True, _second_half),
            *_weight("mlp.down_proj", "ffn.down"),
        ),
    ),
    # DeepSeek-V3 and R1; Kimi K2.
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (
            *_base(),
            Fixed(attention__kind="mla", attention__latent_eps=1e-6),
            Same("q_lora_rank", "attention.q_rank", default=None),
            Same("kv_lora_rank", "attention.kv_rank", default=512),
            Same("qk_nope_head_dim", "attention.nope_dim", default=128),
            Same("qk_rope_head_dim", "attention.rope_dim", default=64),
            Same("v_head_dim", "attention.v_dim", default=128),
            first_dense(3),
            *_moe("n_routed_experts", 8),
            *GROUPED,
            Rope(),
            Implied("num_key_value_heads", lambda layer: layer["heads"]),
            Implied("head_dim", lambda layer: layer["attention.rope_dim"]),
            Implied(
                "qk_head_dim",
                lambda layer: layer["attention.nope_dim"] + layer["attention.rope_dim"],
            ),
            Only(attention_bias=False, rope_interleave=True),
        ),
        (
            *ENDS,
            *BEFORE,
            *OUT,
            Tensor(f"{LAYER}self_attn.q_proj.weight", "attention.q.w", True, _paired_queries),
            *_weight("self_attn.q_a_proj", "attention.q_down"),
            _norm("self_attn.q_a_layernorm", "attention.q_norm"),
            Tensor(f"{LAYER}self_attn.q_b_proj.weight", "attention.q.w", True, _paired_queries),
            Tensor(
                f"{LAYER}self_attn.kv_a_proj_with_mqa.weight", "attention.kv_down.w", True, _paired_key
            ),
            _norm("self_attn.kv_a_layernorm", "attention.kv_norm"),
            Tensor(f"{LAYER}self_attn.kv_b_proj.weight", "attention.k_up.w", True, _latent_keys),
            Tensor(f"{LAYER}self_attn.kv_b_proj.weight", "attention.v_up.w", True, _latent_values),
            *MLP,
            *EXPERTS,
            CHOICE_BIAS,
            *_gated("mlp.shared_experts", "ffn.shared"),
        ),
    ),
    # GLM-4.5, GLM-4.6 and GLM-4.5-Air.
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(),
            Same(
                "use_qk_norm", "attention.qk_norm", kind=bool, default=False,
                codes={True: "head", False: "none"},
            ),  # fmt: skip
            _switch("attention_bias", "attention.qkv_bias"),
            first_dense(1),
            *_moe("n_routed_experts", 8),
            *GROUPED,
            Rope(fraction=0.5),
        ),
        (
            *LLAMA,
            *QK_NORM,
            *EXPERTS,
            CHOICE_BIAS,
            *_gated("mlp.shared_experts", "ffn.shared"),
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        (
            Same("vocab_size", "vocab"),
            Same("hidden_size", "embed"),
            Same("num_attention_heads", "heads"),
            _same_float("rms_norm_eps", "norm_eps", 1e-5),
            _switch("tie_word_embeddings", "tie_embeddings"),
            Only(hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0),
            Fixed(norms="before", norm_offset=False, logit_scale=1.0),
            *_gqa(HeadDim(64), attention__sinks=True),
            _switch("attention_bias", *BIASES, default=True),
            SPARSE,
            _dense(),
            *_moe("num_local_experts", 4, activation="clamped", bias=True, router_bias=True),
            Types(every(2), 128),
            Rope(
                150_000.0,
                default={
                    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                    "truncate": False, "original_max_position_embeddings": 4096,
                },
            ),
        ),
        (
            *ENDS,
            *QKV,
            *OUT,
            Tensor(f"{LAYER}self_attn.sinks", "attention.sinks"),
            *BEFORE,
            Tensor(f"{LAYER}mlp.router.weight", "ffn.router", transpose=True),
            Tensor(f"{LAYER}mlp.router.bias", "ffn.router_bias"),
            Tensor(f"{LAYER}mlp.experts.gate_up_proj", "ffn.gate", part=_even, axis=2),
            Tensor(f"{LAYER}mlp.experts.gate_up_proj", "ffn.up", part=_odd, axis=2),
            Tensor(f"{LAYER}mlp.experts.gate_up_proj_bias", "ffn.gate_bias", part=_even, axis=1),
            Tensor(f"{LAYER}mlp.experts.gate_up_proj_bias", "ffn.up_bias", part=_odd, axis=1),
            Tensor(f"{LAYER}mlp.experts.down_proj", "ffn.down"),
            Tensor(f"{LAYER}mlp.experts.down_proj_bias", "ffn.down_bias"),
        ),
    ),
    # Llama 4 Scout and Maverick, their language model.
    "llama4_text": Family(
        "Llama4ForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(HeadDim(128)),
            _switch("attention_bias", *BIASES),
            Rope(5e5),
            Unrotated(),
            L2Norm(),
            Temperature(),
            Types(
                lambda _, layers: [
                    "full_attention" if layer["rope.kind"] == "none" else "chunked_attention"
                    for layer in layers
                ],
                8192,
                known=("full_attention", "chunked_attention"),
            ),
            listed(),
            *_moe(
                "num_local_experts", 1,
                router="sigmoid", normalize=False, scale_input=True, shared_experts=1,
            ),
        ),
        (
            *ENDS,
            *(
                row
                for x, part in (("q", _paired_heads), ("k", _paired_heads), ("v", None))
                for row in _weight(f"self_attn.{x}_proj", f"attention.{x}", part=part)
            ),
            *OUT,
            *BEFORE,
            *_gated("feed_forward", "ffn"),
            Tensor(f"{LAYER}feed_forward.router.weight", "ffn.router", transpose=True),
            Tensor(f"{LAYER}feed_forward.experts.gate_up_proj", "ffn.gate", part=_first_half, axis=2),
            Tensor(f"{LAYER}feed_forward.experts.gate_up_proj", "ffn.up", part=_second_half, axis=2),
            Tensor(f"{LAYER}feed_forward.experts.down_proj", "ffn.down"),
            *_gated("feed_forward.shared_expert", "ffn.shared"),
        ),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        (
            *_base(tied=True),
            *_gqa(),
            _dense(),
            _switch("attention_bias", *BIASES),
            _switch("mlp_bias", "ffn.bias"),
            Rope(2e6),
            Unrotated(),
            Types(
                lambda source, layers: [
                    "sliding_attention"
                    if layer["rope.kind"] == "none" and source.values.get("use_sliding_window")
                    else "full_attention"
                    for layer in layers
                ],
                None,
                switch="use_sliding_window",
            ),
        ),
        LLAMA,
    ),
}  # fmt: skip

# The same models under another name.
ALIASES = {"kimi_k2": "deepseek_v3"}
# Layers that predict further tokens, after the model's own.
FURTHER_LAYERS = ("num_mtp_layers", "num_nextn_predict_layers")


def family_of(config: Mapping[str, Any]) -> str:
    """Returns the family, a key of `FAMILIES`, of a config.json.

    Raises:
      UserError: if minitext doesn't have it.
    """
    name = config.get("model_type")
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES) if isinstance(name, str) else ""
        known = ", ".join([*FAMILIES, *ALIASES])
        raise UserError(f"config.json: model_type={short(name)} isn't known{hint}: minitext has {known}")
    return name


def from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our keys for a model, such as `model.embed`, from its config.json.

    Args:
      config: config.json, parsed.

    Returns:
      Dotted keys with values for `minitext.config.config.resolve`.

    Raises:
      UserError: for a family, a key or a value that minitext doesn't have, naming it.
    """
    name = family_of(config)
    return read(FAMILIES[name].keys, config, name)


def to_hf(model: ModelConfig, max_length: int, first: str = "llama") -> dict[str, Any]:
    """Returns the config.json of a model: that of the first family that has all its settings.

    Args:
      model: the model. Factors on its logits or token vectors that the family lacks are folded into parameters
        (`folded`).
      max_length: tokens of the longest text, unless the rotary positions say it.
      first: the family to try first, such as the one that the model came from.

    Raises:
      UserError: if no family has them all; names the settings that are in the way of the closest one.
    """
    closest: tuple[int, str, str] | None = None
    for name in dict.fromkeys([first, *FAMILIES]):
        family = FAMILIES[name]
        try:
            values = write(family.keys, model, max_length)
            back = model_of(read(family.keys, values, name))
        except UserError as error:
            wrong = [str(error)]
            far = 1000
        else:
            wrong = differences(model, back)
            far = len(wrong)
            if not wrong:
                return {"architectures": [family.architecture], "model_type": name} | values
        if closest is None or far < closest[0]:
            closest = far, name, ", ".join(wrong)
    assert closest is not None
    raise UserError(f"no family of Hugging Face's has this model: {closest[1]} lacks {closest[2]}")


def model_of(keys: Mapping[str, Any]) -> ModelConfig:
    """Returns the model that `from_hf`'s keys describe, with defaults for all others.

    Raises:
      ConfigError: for values that don't go together.
    """
    from minitext.config.config import resolve

    return resolve([("config.json", dict(keys))]).model


def is_unread(name: str, config: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint's tensor isn't part of the model, so that it may stay unread.

    Such are stored frequencies, the output layer of a model that ties it, and layers that predict further tokens.
    """
    family = FAMILIES[family_of(config)]
    if re.fullmatch(family.unread, name):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    further = sum(int(config.get(key) or 0) for key in FURTHER_LAYERS)
    first = int(config["num_hidden_layers"])
    return layer is not None and first <= int(layer[1]) < first + further
