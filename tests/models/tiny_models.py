"""Tiny models of transformers for each family, every parameter random, and the same files read by minitext."""

import json
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from minitext.config.model import ModelConfig
from minitext.inference.parity import read_model
from minitext.models import families
from minitext.models.transformer import Transformer

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 6, "qk_nope_head_dim": 7, "v_head_dim": 10,
}  # fmt: skip
ORIGINAL = 16
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 1e4,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 10 for i in range(6)],
    "long_factor": [1.0 + i for i in range(6)],
}  # fmt: skip

# Name -> the family and what its configuration sets: windows and chunks of 5, lengths that a text of 24 tokens passes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 12}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 6}),
    "gemma2": ("gemma2", {
        "num_hidden_layers": 5, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }),
    "gemma3": ("gemma3_text", {
        "num_hidden_layers": 8, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,  # in its configuration, and read by nothing
        "final_logit_softcapping": 3.0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": PLAIN,
        },
    }),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {
        "num_hidden_layers": 4, "head_dim": 12, "num_experts": 8, "decoder_sparse_step": 2, "norm_topk_prob": True,
    }),
    "qwen2-moe": ("qwen2_moe", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 48}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {
        "num_hidden_layers": 5, "sliding_window": 5,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
    }),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-long": ("phi3", {
        "num_attention_heads": 2, "num_key_value_heads": 1, "original_max_position_embeddings": ORIGINAL,
        "partial_rotary_factor": 0.75, "rope_parameters": LONG,
    }),
    "deepseek": ("deepseek_v3", EXPERTS | LATENTS | {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 20,
        "n_shared_experts": 2, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    }),
    "deepseek-lite": ("deepseek_v3", EXPERTS | LATENTS | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": None,
    }),
    "gpt-oss": ("gpt_oss", {
        "num_hidden_layers": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 12, "sliding_window": 5,
        "rope_parameters": YARN | {"truncate": False, "rope_theta": 15e4},
    }),
    "glm4-moe": ("glm4_moe", EXPERTS | {
        "head_dim": 12, "n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
        "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
    }),
    "llama4": ("llama4_text", {
        "num_hidden_layers": 6, "head_dim": 12, "intermediate_size_mlp": 40, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.3,
        "rope_parameters": LLAMA3 | {"rope_theta": 5e5},
    }),
    "smollm3": ("smollm3", {"num_hidden_layers": 6}),
    # In narrow heads the products of queries with keys nearly cancel, and the norm after them enlarges the rounding.
    "qwen3-next": ("qwen3_next", EXPERTS | {
        "num_hidden_layers": 5, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 24,
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


def theirs(case: str) -> Any:
    """Returns a model of transformers with every parameter and buffer random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name, more = CASES[case]
    cfg = AutoConfig.for_model(name, **SIZES | more)
    model = AutoModelForCausalLM.from_config(cfg, attn_implementation="eager").float().eval()
    draw = torch.Generator().manual_seed(0)
    adds_one = name.startswith("gemma") or name == "qwen3_next"  # to its scales, which are around 1
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in key or "embed_scale" in key:  # follow from the configuration
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
    model, folder = theirs(case), parent / case
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    name = families.family_of(config)
    cfg = families.model_of(families.config(config))
    return Pair(model, read_model(folder, cfg, name), cfg, config, folder, name)


def tokens(length: int, rows: int = 2) -> np.ndarray:
    """Returns random tokens [rows, length]."""
    return np.random.default_rng(length).integers(1, VOCAB, (rows, length))
