"""Tiny models of transformers for each family, every parameter random, and the same files read by minitext."""

import json
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from minitext.config.model import ModelConfig
from minitext.inference.parity import read_model
from minitext.models import families
from minitext.models.transformer import Transformer

# No two dimensions are equal, so that none can stand for another.
VOCAB = 100
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 56, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
WIDE = {"head_dim": 12}  # where a family has the key: not hidden_size / num_attention_heads
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 12, "qk_nope_head_dim": 7, "v_head_dim": 10,
}  # fmt: skip
ORIGINAL = 16
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
# Of the six pairs of a head of 12, each of the two betas decides about one.
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 100.0,
    "beta_fast": 0.8, "beta_slow": 0.1,
}  # fmt: skip
# The same with the defaults of the betas.
YARN_DEFAULT = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 940, "rope_theta": 1e4,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 10 for i in range(6)],
    "long_factor": [1.0 + i for i in range(6)],
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}
FACTORS = {
    "embedding_multiplier": 3.0, "logits_scaling": 1.7, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
}  # fmt: skip

# Name -> the family and what its configuration sets: windows and chunks of 5, lengths that a text of 24 tokens passes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama3": ("llama", WIDE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("llama", WIDE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": ("llama", WIDE | {"rope_parameters": YARN}),
    "llama-yarn-default": ("llama", WIDE | {"max_position_embeddings": 3760, "rope_parameters": YARN_DEFAULT}),
    "mistral": ("mistral", WIDE | {"sliding_window": 5}),
    "mixtral": ("mixtral", WIDE | {"num_local_experts": 4, "sliding_window": 6}),
    "ministral": ("ministral", WIDE | {
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "cwm": ("cwm", WIDE | {
        "num_hidden_layers": 6, "sliding_window": 5, "mlp_bias": True, "rope_parameters": LLAMA3, "bos_token_id": 1,
    }),
    "gemma": ("gemma", WIDE | {"hidden_act": "gelu"}),  # an old file's name of the approximation
    "gemma2": ("gemma2", WIDE | CAPS | {"num_hidden_layers": 5, "sliding_window": 5}),
    "vaultgemma": ("vaultgemma", WIDE | CAPS | {"num_hidden_layers": 5, "sliding_window": 5}),
    "gemma3": ("gemma3_text", WIDE | CAPS | {  # its cap of attention is in the configuration, and read by nothing
        "num_hidden_layers": 8, "sliding_window": 5, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": PLAIN,
        },
    }),
    "qwen2": ("qwen2", WIDE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", WIDE | {"attention_bias": True}),
    "qwen3-moe": ("qwen3_moe", WIDE | EXPERTS | {
        "num_hidden_layers": 4, "num_experts": 8, "decoder_sparse_step": 2, "norm_topk_prob": True,
    }),
    "qwen2-moe": ("qwen2_moe", WIDE | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 40}),
    "olmo2": ("olmo2", WIDE),
    "olmo3": ("olmo3", WIDE | {
        "num_hidden_layers": 5, "sliding_window": 5,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
    }),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    "flex-olmo": ("flex_olmo", WIDE | {  # its norm undoes what scales all experts alike, but for the epsilon
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "rms_norm_eps": 0.01,
    }),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-long": ("phi3", {
        "num_attention_heads": 2, "num_key_value_heads": 1, "original_max_position_embeddings": ORIGINAL,
        "partial_rotary_factor": 0.75, "rope_parameters": LONG,
    }),
    "seed-oss": ("seed_oss", WIDE | {"attention_out_bias": True, "mlp_bias": True}),
    "granite": ("granite", WIDE | FACTORS | {"attention_bias": True, "mlp_bias": True}),
    "granite-moe": ("granitemoe", FACTORS | {"num_local_experts": 4, "tie_word_embeddings": True}),
    "hyperclovax": ("hyperclovax", WIDE | FACTORS),
    "glm": ("glm", WIDE),
    "glm4": ("glm4", WIDE | {"partial_rotary_factor": 0.34}),
    "helium": ("helium", {"head_dim": 8, "attention_bias": True}),
    "ernie": ("ernie4_5", WIDE | {"use_bias": True}),
    "exaone4": ("exaone4", WIDE | {"num_hidden_layers": 6, "sliding_window": 5, "sliding_window_pattern": 3}),
    "deepseek": ("deepseek_v3", EXPERTS | LATENTS | {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 20,
        "n_shared_experts": 2, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    }),
    "deepseek-lite": ("deepseek_v3", EXPERTS | LATENTS | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": None,
    }),
    "deepseek2": ("deepseek_v2", EXPERTS | LATENTS | {
        "qk_nope_head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": None,
        "routed_scaling_factor": 1.5, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.6},
    }),
    "gpt-oss": ("gpt_oss", WIDE | {
        "num_hidden_layers": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 5,
        "rope_parameters": YARN | {"truncate": False},
    }),
    "glm4-moe": ("glm4_moe", WIDE | EXPERTS | {
        "n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
        "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
    }),
    "dots1": ("dots1", WIDE | EXPERTS | {
        "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 5,
        "max_window_layers": 2,
    }),
    "minimax-m2": ("minimax_m2", WIDE | {
        "num_experts_per_tok": 2, "num_local_experts": 4, "partial_rotary_factor": 0.5,
    }),
    "llama4": ("llama4_text", WIDE | {
        "num_hidden_layers": 6, "intermediate_size_mlp": 40, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.3,
        "rope_parameters": LLAMA3 | {"rope_theta": 5e5},
    }),
    "smollm3": ("smollm3", WIDE | {"num_hidden_layers": 6}),
    # In narrow heads the products of queries with keys nearly cancel, and the norm after them enlarges the rounding.
    "qwen3-next": ("qwen3_next", EXPERTS | {
        "num_hidden_layers": 5, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 20,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 24,
    }),
}  # fmt: skip


_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
# Models of text and images together: their text is a case of `CASES`, and token 7 stands for an image.
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {
        "text_config": SIZES | CASES["gemma3"][1], "vision_config": _VISION | {"vision_use_head": False},
        "mm_tokens_per_image": 4, "image_token_index": 7,
    }),
    "gemma3-untied": ("gemma3", {  # though its text_config has true, the family's default
        "text_config": SIZES | CASES["gemma3"][1], "vision_config": _VISION | {"vision_use_head": False},
        "mm_tokens_per_image": 4, "image_token_index": 7, "tie_word_embeddings": False,
    }),
    "llama4": ("llama4", {
        "text_config": SIZES | CASES["llama4"][1], "image_token_index": 7,
        "vision_config": _VISION | {
            "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
        },
    }),
}  # fmt: skip


class Pair(NamedTuple):
    """One model twice.

    Attributes:
      theirs: the model of transformers, in float32.
      ours: the model that was read from its files.
      cfg: the configuration that was read.
      config: config.json.
      folder: the files.
      name: of the family.
    """

    theirs: Any
    ours: Transformer
    cfg: ModelConfig
    config: dict[str, Any]
    folder: Any
    name: str


def theirs(name: str, more: dict[str, Any]) -> Any:
    """Returns a family's model of transformers with every parameter and buffer random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    wrapped = "text_config" in more
    cfg = AutoConfig.for_model(name, **more if wrapped else SIZES | more)
    auto = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model = auto.from_config(cfg, attn_implementation="eager").float().eval()
    draw = torch.Generator().manual_seed(0)
    adds_one = "gemma" in name or name == "qwen3_next"  # to its scales, which are around 1
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in key or "embed_scale" in key:  # follow from the configuration
                continue
            if not value.is_floating_point():  # positions in an image, which do too
                continue
            random = torch.randn(value.shape, generator=draw)
            if "norm" in key:
                value.copy_((0.0 if adds_one and "linear_attn" not in key else 1.0) + 0.3 * random)
            elif "A_log" in key:  # a state that lasts for a text
                value.copy_(0.3 * random - 4)
            elif value.ndim == 1 or "bias" in key:
                value.copy_(0.3 * random)
            else:
                value.copy_(random * (1.5 if "embed" not in key else 1.0) / value.shape[-1] ** 0.5)
    return model


@cache
def pair(case: str, parent: Any) -> Pair:
    """Makes a model, saves it below `parent` and reads it."""
    return both(*CASES[case], parent / case)


def both(name: str, more: dict[str, Any], folder: Any, edit: dict[str, Any] | None = None) -> Pair:
    """Makes a model, saves it and reads it; both read config.json after an edit, which removes a key by `GONE`."""
    from transformers import AutoModelForCausalLM

    model = theirs(name, more)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if edit:
        config = {key: value for key, value in (config | edit).items() if value is not GONE}
        (folder / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    name = families.family_of(config)
    cfg = families.model_of(families.config(config))
    return Pair(model, read_model(folder, cfg, name), cfg, config, folder, name)


GONE = object()
_NEXT = EXPERTS | {
    "num_hidden_layers": 5, "num_experts": 4, "shared_expert_intermediate_size": 20, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 24, "head_dim": 16,
}  # fmt: skip
_LLAMA4 = WIDE | {
    "num_hidden_layers": 6, "intermediate_size_mlp": 40, "num_local_experts": 4, "attention_chunk_size": 5,
    "floor_scale": 4,
}  # fmt: skip
_GPT_OSS = WIDE | {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 5}
_DEEPSEEK = (
    EXPERTS
    | LATENTS
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
)
_EXAONE = WIDE | {"num_hidden_layers": 6, "sliding_window": 5}
_GEMMA = WIDE | {"num_hidden_layers": 5, "sliding_window": 5}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
_FULL, _LOCAL = "full_attention", "sliding_attention"
_OLD = {"rope_parameters": GONE, "rope_theta": 5e4}

# What families allow and hardly any published model has, and what older files spell in another way.
ODD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one head of keys": ("llama", WIDE | {"num_key_value_heads": 1}, {}),
    "one layer, another epsilon": ("llama", {"num_hidden_layers": 1, "rms_norm_eps": 0.01}, {}),
    "no head_dim": ("llama", {}, {"head_dim": GONE}),
    "null head_dim": ("llama", {}, {"head_dim": None}),
    "head_dim of Qwen3 by default": ("qwen3", {"head_dim": 128}, {"head_dim": GONE}),
    "gelu_new": ("llama", {"hidden_act": "gelu_new"}, {}),
    "old rope": ("llama", {}, _OLD),
    "old rope, linear": ("llama", {}, _OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "no rope keys": ("mixtral", {"num_local_experts": 4}, {"rope_parameters": GONE}),
    "yarn with mscale": ("llama", WIDE | {"rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 0.7}}, {}),
    "yarn with one mscale": ("llama", WIDE | {"rope_parameters": YARN | {"mscale": 0.5}}, {}),
    "yarn with a factor": ("llama", WIDE | {"rope_parameters": YARN | {"attention_factor": 0.7}}, {}),
    "yarn for texts shorter than a turn": ("llama", WIDE | {
        "rope_parameters": YARN | {"original_max_position_embeddings": 4, "beta_slow": 1.0, "truncate": False}}, {}),
    "yarn for other lengths": ("llama", WIDE | {"rope_parameters": YARN, "max_position_embeddings": 128}, {}),
    "llama3 with a steep ramp": ("llama", WIDE | {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.5}}, {}),
    "no window": ("mistral", WIDE | {"sliding_window": None}, {}),
    "a window of one": ("mistral", WIDE | {"sliding_window": 1, "tie_word_embeddings": True}, {}),
    "one expert": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}, {}),
    "every expert": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}, {}),
    "no caps": ("gemma2", _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}, {}),
    "gemma untied": ("gemma2", _GEMMA | {"tie_word_embeddings": False, "attention_bias": True}, {}),
    "gemma, odd layers": ("gemma2", _GEMMA | {"layer_types": [_FULL, _LOCAL, _LOCAL, _FULL, _LOCAL]}, {}),
    "gemma, no window": ("gemma2", _GEMMA | {"layer_types": [_FULL] * 5}, {}),
    "gemma3, a pattern": ("gemma3_text", _GEMMA, {"layer_types": GONE, "sliding_window_pattern": 2}),
    "gemma3, old rope": ("gemma3_text", _GEMMA, {
        "rope_parameters": GONE, "rope_theta": 1e6, "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }),
    "gemma3, yarn in both": ("gemma3_text", _GEMMA | {
        "rope_parameters": {_FULL: YARN, _LOCAL: YARN | {"factor": 2.0}}}, {}),
    "gemma of old": ("gemma", WIDE, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    "qwen2, windows off": ("qwen2", {"sliding_window": 5, "max_window_layers": 1}, {}),
    "qwen2, windows in all": ("qwen2", _WINDOWS | {"max_window_layers": 0}, {}),
    "qwen2, windows in none": ("qwen2", _WINDOWS | {"max_window_layers": 9}, {}),
    "qwen2 by max_window_layers": ("qwen2", _WINDOWS | {"max_window_layers": 2}, {"layer_types": GONE}),
    "qwen2, odd layers": ("qwen2", _WINDOWS | {"layer_types": [_LOCAL, _FULL, _LOCAL]}, {}),
    "qwen3-moe with windows": ("qwen3_moe", EXPERTS | _WINDOWS | {"num_experts": 4, "max_window_layers": 1}, {}),
    "qwen3-moe, some dense": ("qwen3_moe", EXPERTS | {"num_experts": 4, "mlp_only_layers": [1]}, {}),
    "qwen3-moe, period left over": ("qwen3_moe", EXPERTS | {
        "num_experts": 4, "num_hidden_layers": 5, "decoder_sparse_step": 3}, {}),
    "qwen2-moe, no bias": ("qwen2_moe", EXPERTS | _WINDOWS | {
        "num_experts": 4, "shared_expert_intermediate_size": 20, "qkv_bias": False, "norm_topk_prob": True,
        "max_window_layers": 2}, {}),
    "olmo3, old rope": ("olmo3", WIDE | {"num_hidden_layers": 6, "sliding_window": 5}, {
        "rope_parameters": GONE, "rope_theta": 5e5,
        "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"}}),
    "phi3, a share rotates": ("phi3", {"num_attention_heads": 2, "partial_rotary_factor": 0.5}, {}),
    "longrope with a factor": ("phi3", CASES["phi3-long"][1] | {"rope_parameters": LONG | {"factor": 3.0}}, {}),
    "deepseek, one group": ("deepseek_v3", _DEEPSEEK | {"n_group": 1, "topk_group": 1}, {}),
    "deepseek, all groups": ("deepseek_v3", _DEEPSEEK | {"topk_group": 4, "norm_topk_prob": False}, {}),
    "deepseek, no dense layer": ("deepseek_v3", _DEEPSEEK | {"first_k_dense_replace": 0}, {}),
    "deepseek, all dense": ("deepseek_v3", _DEEPSEEK | {"first_k_dense_replace": 9, "q_lora_rank": None}, {}),
    "glm4.5 without norms": ("glm4_moe", WIDE | EXPERTS | {
        "n_routed_experts": 4, "first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": False}, {}),
    "gpt-oss by default": ("gpt_oss", _GPT_OSS, {"rope_parameters": GONE}),
    "gpt-oss, odd layers": ("gpt_oss", _GPT_OSS | {"layer_types": [_FULL, _FULL, _LOCAL]}, {}),
    "gpt-oss without bias": ("gpt_oss", _GPT_OSS | {"attention_bias": False, "num_experts_per_tok": 1}, {}),
    "llama4, experts in all": ("llama4_text", _LLAMA4 | {"interleave_moe_layer_step": 1}, {}),
    "llama4, experts in some": ("llama4_text", _LLAMA4 | {"moe_layers": [0, 4], "num_experts_per_tok": 2}, {}),
    "llama4, rope in some": ("llama4_text", _LLAMA4 | {"no_rope_layers": [1, 0, 1, 1, 0, 0]}, {}),
    "llama4, chunks in others": ("llama4_text", _LLAMA4 | {"layer_types": [_FULL, "chunked_attention"] * 3}, {}),
    "llama4, switches off": ("llama4_text", _LLAMA4 | {
        "use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True}, {}),
    "smollm3 with windows": ("smollm3", WIDE | _WINDOWS | {"num_hidden_layers": 6}, {}),
    "smollm3 by interval": ("smollm3", WIDE | {"num_hidden_layers": 5, "no_rope_layer_interval": 2}, {}),
    "qwen3-next, every second": ("qwen3_next", _NEXT | {"full_attention_interval": 2}, {}),
    "qwen3-next, convolution of two": ("qwen3_next", _NEXT | {"linear_conv_kernel_dim": 2}, {}),
    "qwen3-next, as many heads": ("qwen3_next", _NEXT | {"linear_num_key_heads": 6, "mlp_only_layers": [0, 3]}, {}),
    "ministral by default": ("ministral", WIDE | {"sliding_window": 5}, {}),
    "cwm by default": ("cwm", WIDE | {"num_hidden_layers": 6, "sliding_window": 5, "bos_token_id": 1}, {}),
    "seed-oss without bias": ("seed_oss", WIDE | {"attention_bias": False}, {}),
    "granite of ones": ("granite", {}, {}),
    "granite tied": ("granite", FACTORS | {"tie_word_embeddings": True}, {}),
    "hyperclovax, norms before": ("hyperclovax", FACTORS | {"use_post_norm": False, "attention_bias": True}, {}),
    "glm4, all rotates": ("glm4", WIDE | {"partial_rotary_factor": 1.0, "attention_bias": False}, {}),
    "exaone4 without a window": ("exaone4", _EXAONE | {"sliding_window": None, "layer_types": [_FULL] * 6}, {}),
    "exaone4, nothing rotates": ("exaone4", _EXAONE | {"layer_types": [_FULL] * 6}, {}),
    "exaone4 as published": ("exaone4", _EXAONE, {"sliding_window_pattern": "LLLG"}),
    "olmoe normalised": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True}, {}),
    "dots1 in groups": ("dots1", WIDE | EXPERTS | {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "norm_topk_prob": True,
        "attention_bias": True, "routed_scaling_factor": 2.5}, {}),
    "minimax by rotary_dim": ("minimax_m2", WIDE | {"num_experts_per_tok": 2, "num_local_experts": 4}, {
        "rope_parameters": GONE, "rope_theta": 1e4, "rotary_dim": 8}),
}  # fmt: skip


def tokens(length: int, rows: int = 2) -> np.ndarray:
    """Returns random tokens [rows, length]."""
    return np.random.default_rng(length).integers(1, VOCAB, (rows, length))
