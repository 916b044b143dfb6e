"""GGUF's names for what a Hugging Face folder says in config.json and tensors' names.

Read and written are files of the architectures `llama` (Llama, SmolLM2, Mistral), `qwen2` and `qwen3`. The first
stores the rows of its queries and keys in pairs, since llama.cpp rotates neighbours there.

Source: llama.cpp's `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py`.

Chapters: 23.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minitext.checkpoint.stored import Stored
from minitext.checkpoint.weights import Weights
from minitext.config.model import ModelConfig
from minitext.errors import UserError
from minitext.files import shorten
from minitext.models import families
from minitext.models.convert import Row, Table, View
from minitext.models.hf_keys import checked, differences, quoted

TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
# Keys of an architecture that say how wide a head is: they must agree.
HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
# Its other keys that are read, or that change nothing in what the model computes.
KNOWN = ("rope.freq_base", "vocab_size", "tensor_data_layout", "pooling_type")
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
DTYPES = {
    "float32": ("F32", 0),
    "float16": ("F16", 1),
    "q8_0": ("Q8_0", 7),
    "q4_0": ("Q4_0", 2),
}  # with general.file_type


def config_json(weights: Weights) -> dict[str, Any]:
    """Returns the config.json that a GGUF file would have.

    Raises:
      UserError: for an architecture that isn't read, or a key that is missing.
    """
    said, path = weights.metadata, weights.path
    architecture = said.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UserError(
            f"{path} has the architecture {str(architecture)[:60]!r}, and {', '.join(ARCHITECTURES)} are read: import "
            "the model's Hugging Face folder"
        )
    further = (f"{architecture}.expert_count", f"{architecture}.rope.scaling.type")
    if any(key in said for key in further) or "rope_freqs.weight" in weights.tensors:
        raise UserError(
            f"{path} has experts or scaled rotary positions, which are read from Hugging Face folders alone: import one"
        )
    values: dict[str, Any] = {"model_type": ARCHITECTURES[architecture]}
    for name, key in KEYS.items():
        if (found := said.get(f"{architecture}.{key}")) is None:
            raise UserError(f"{path} has no {architecture}.{key}: get the file again")
        values[name] = round(found, 12) if isinstance(found, float) else found
    known = {f"{architecture}.{key}" for key in (*KEYS.values(), *HEADS, *KNOWN)}
    for key in said:
        if key.startswith(f"{architecture}.") and key not in known:
            raise UserError(
                f"{path} has the key {shorten(key)}, which isn't read and may change what the model computes: import "
                "the model's Hugging Face folder"
            )
    values["rope_theta"] = said.get(f"{architecture}.rope.freq_base", 10_000.0)
    D, N = (checked(name, values[name], int) for name in ("hidden_size", "num_attention_heads"))
    width = values["head_dim"] = said.get(f"{architecture}.{HEADS[0]}", D // max(N, 1))
    for key in (f"{architecture}.{name}" for name in HEADS):
        if str(found := said.get(key, width)) != str(width):
            raise UserError(
                f"{path} has {key}={quoted(found)} in heads of {quoted(width)}, and heads of one width that rotate "
                "whole are read: import the model's Hugging Face folder"
            )
    table = weights.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise UserError(f"{path} has no token_embd.weight: get the file again")
    values["vocab_size"] = table.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in weights.tensors
    values["hidden_act"] = "silu"
    return values


def described(model: ModelConfig, max_length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a model's config.json and the metadata of its GGUF file, without the tokenizer's.

    Args:
      model: the model.
      max_length: tokens of the longest text.

    Raises:
      UserError: if the reader of such files, and so llama.cpp, would take it for another model.
    """
    values = families.to_hf(model, max_length)
    family = values["model_type"]
    if family not in ARCHITECTURES.values():
        raise UserError(
            f"GGUF files are written of {', '.join(ARCHITECTURES)}, and this model is {family}: use --format hf"
        )
    architecture = next(a for a, name in ARCHITECTURES.items() if name == family)
    H = model.H
    said = {key: values[name] for name, key in KEYS.items()} | {
        "vocab_size": model.vocab, "rope.dimension_count": H, "rope.freq_base": values["rope_theta"],
        "attention.key_length": H, "attention.value_length": H,
    }  # fmt: skip
    fields = {f"{architecture}.{key}": _as_stored(value) for key, value in said.items()}
    fields |= {"general.architecture": architecture, "general.quantization_version": 2}
    path = Path(f"{architecture}.gguf")
    ends = ["token_embd.weight"] + ["output.weight"] * (not model.tie_embeddings)
    shape = model.vocab, model.embed
    file = Weights(path, {name: Stored(shape, "F32", path, 0, 0) for name in ends}, fields)
    back = families.model_of(families.config(config_json(file)))
    if lost := differences(model, back):
        raise UserError(
            f"GGUF files of {architecture} have no place for {', '.join(lost)}: use --format hf"
        )
    return values, fields


def _as_stored(value: Any) -> Any:
    """Returns a number as it is read back: others than whole ones are float32."""
    return float(np.float32(value)) if isinstance(value, float) else value


def renamed(table: Table, values: Mapping[str, Any]) -> Table:
    """Returns the table with GGUF's names.

    Args:
      table: with Hugging Face's.
      values: config.json.
    """
    return Table(tuple(_row(row, values) for row in table.rows))


def _row(row: Row, values: Mapping[str, Any]) -> Row:
    name = row.name
    if name.startswith("model.layers.{layer}."):
        module, _, kind = name.removeprefix("model.layers.{layer}.").rpartition(".")
        name = f"blk.{{layer}}.{TENSORS.get(module, module)}.{kind}"
    else:
        name = TENSORS.get(name, name)
    view = row.view
    if values["model_type"] == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
        D, N = values["hidden_size"], values["num_attention_heads"]
        H = values.get("head_dim") or D // N
        heads = N if name.endswith("attn_q.weight") else values["num_key_value_heads"]
        view = View((heads * H, D), (heads, H // 2, 2, D), order=(3, 0, 2, 1))
    return dataclasses.replace(row, name=name, view=view)
