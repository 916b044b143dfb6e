"""GGUF's names for what a Hugging Face folder says in config.json, tensors' names and tokenizer.json.

Read are files of the architectures `llama` (Llama, SmolLM2, Mistral), `qwen2` and `qwen3`. The first stores the rows of
its queries and keys in pairs, since llama.cpp rotates neighbours there.

Source: llama.cpp's `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py`.

Chapters: 23.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from minitext.checkpoint.weights import Weights
from minitext.errors import UserError
from minitext.models.convert import Row, Table, View

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
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
CONTROL = 3  # a token's type: special


def config_json(weights: Weights) -> dict[str, Any]:
    """Returns the config.json that a GGUF file would have.

    Raises:
      UserError: for an architecture that isn't read, or a key that is missing.
    """
    said, path = weights.metadata, weights.path
    architecture = said.get("general.architecture")
    if architecture not in ARCHITECTURES:
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
    values["rope_theta"] = float(said.get(f"{architecture}.rope.freq_base", 10_000.0))
    if (width := said.get(f"{architecture}.attention.key_length")) is not None:
        values["head_dim"] = width
    table = weights.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise UserError(f"{path} has no token_embd.weight: get the file again")
    values["vocab_size"] = table.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in weights.tensors
    values["hidden_act"] = "silu"
    return values


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


def tokenizer_json(weights: Weights) -> tuple[str, int]:
    """Returns the tokenizer in the format of the `tokenizers` library, and the id that ends a text.

    Raises:
      UserError: if it isn't byte-level byte-pair encoding with a way to split words that is known here.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    said, path = weights.metadata, weights.path
    kind, split = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre", "default")
    numbers = {"llama-bpe": "{1,3}", "qwen2": ""}
    if kind != "gpt2" or split not in ("default", "gpt-2", "smollm", *numbers):
        raise UserError(
            f"{path} has the tokenizer {str(kind)[:40]}/{str(split)[:40]}, which isn't read: import the model's "
            "Hugging Face folder"
        )
    tokens, merges = said.get("tokenizer.ggml.tokens"), said.get("tokenizer.ggml.merges")
    eod = said.get("tokenizer.ggml.eos_token_id")
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(eod, int):
        raise UserError(f"{path} has no vocabulary, merges or end of text: get the file again")
    pairs: list[Any] = [tuple(str(merge).split(" ")) for merge in merges]
    try:
        model = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    except Exception as error:  # a bare Exception for merges that make no token
        raise UserError(f"{path} has merges that don't fit its vocabulary: {error}") from error
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if split == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif split in numbers:
        words = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + numbers[split]
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )  # fmt: skip
        steps = [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    model.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore
    model.decoder = decoders.ByteLevel()  # pyright: ignore
    kinds = said.get("tokenizer.ggml.token_type", ())
    special = [t for t, k in zip(tokens, kinds, strict=False) if k == CONTROL]
    model.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return json.dumps(json.loads(model.to_str())), eod


def special_tokens(weights: Weights) -> dict[str, str]:
    """Returns the tokens with a meaning of their own that templates name, as in tokenizer_config.json."""
    said = weights.metadata
    tokens, found = said.get("tokenizer.ggml.tokens"), {}
    for theirs, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        number = said.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(tokens, list) and isinstance(number, int) and 0 <= number < len(tokens):
            found[name] = str(tokens[number])
    return found


def ends_of_turn(weights: Weights) -> list[int]:
    """Returns the ids of tokens that end a model's turn."""
    numbers = (weights.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return [number for number in dict.fromkeys(numbers) if isinstance(number, int)]
