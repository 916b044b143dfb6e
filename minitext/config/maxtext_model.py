"""MaxText's keys of the model, and the model of ours that they describe.

MaxText has a decoder layer for each family and picks it by `decoder_block`; some of what a model computes is written
in that layer, not in a key. The functions here know these blocks. Whatever minitext's model lacks is refused by name.

Sources: MaxText's layers and models of 22 August 2026, whose own logits the tests' figures were compared with.

Chapters: 27.
"""

import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from minitext.config.model import GQAConfig, MLAConfig, ModelConfig, MoEConfig
from minitext.errors import UserError, did_you_mean

FACTS = resources.files("minitext.config").joinpath("maxtext_models.yml")
BASE = (
    "emb_dim",
    "num_query_heads",
    "num_kv_heads",
    "mlp_dim",
    "moe_mlp_dim",
    "num_decoder_layers",
)
MOST_LAYERS = 10_000  # more is a slip, and would only take memory

# decoder_block -> what minitext's model lacks.
LACKING = {
    "gpt3": "LayerNorm with biases, learned positions and a feed-forward layer without a gate",
    "gemma4": "keys that serve as values, normalized values and dense layers beside the experts",
    "gemma4_small": "embeddings for each layer and layers that share keys and values",
    "deepseek4": "compressed attention and hyper-connections",
    "qwen3_5": "Qwen 3.5's rotary sections and its projections of gated DeltaNet",
    "qwen3_custom_moe": "attention whose output is narrower than the residual stream",
    "envy": "a norm of what the feed-forward layer adds without one of what attention adds",
    "simple": "the block simple, which has no attention",
    "simple_mlp": "the block simple_mlp, which has no attention",
    "default": "the block default",
}
# Blocks that have no scale in attention: it is part of the queries' weights from their first value on.
FOLDED = ("llama2", "mistral", "mixtral", "gemma", "gemma2", "llama4")
BLOCKS = (
    *FOLDED,
    "gemma3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "deepseek",
    "gpt_oss",
    "olmo3",
)


class Lacking(UserError):
    """What minitext's model doesn't have."""


@cache
def facts() -> dict[str, dict[str, Any]]:
    """Returns MaxText's `defaults`, and its `models` by name with what they set."""
    return yaml.safe_load(FACTS.read_text(encoding="utf-8"))


def named_model(name: str) -> dict[str, Any]:
    """Returns what MaxText sets for a model_name.

    Raises:
      UserError: if it has no such model.
    """
    models = facts()["models"]
    if name not in models:
        hint = did_you_mean(name, models)
        raise UserError(
            f"model_name={ascii(name)[1:-1][:60]}: MaxText of August 2026 has no such model{hint}: name one of "
            f"{len(models)}, such as llama3.1-8b, or give the file of its sizes"
        )
    found = dict(models[name])
    like = found.pop("like", None)
    return (named_model(like) if like else {}) | found


def scaled_sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns MaxText's sizes without `base_`, multiplied as global_parameter_scale says.

    Raises:
      UserError: if that isn't a power of two, or a size isn't positive.
    """
    scale = whole(values, "global_parameter_scale")
    if scale < 1 or scale & (scale - 1):
        raise UserError(
            f"global_parameter_scale={scale} is not a power of two: choose 1, 2, 4, ..."
        )
    third, rest = divmod(scale.bit_length() - 1, 3)
    wide, heads = third + (rest > 1), third + (rest > 0)
    shift = dict.fromkeys(BASE, heads) | {"emb_dim": wide, "num_decoder_layers": third}
    sizes = {name: whole(values, f"base_{name}") for name in BASE}
    if sizes["moe_mlp_dim"] < 1:
        sizes["moe_mlp_dim"] = sizes["mlp_dim"]
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"base_{name}={size} is not a size: choose 1 or more")
        sizes[name] = size << shift[name]
    if sizes["num_decoder_layers"] > MOST_LAYERS:
        raise UserError(
            f"base_num_decoder_layers={sizes['num_decoder_layers']}: choose {MOST_LAYERS:,} at most"
        )
    return sizes


def model_keys(values: Mapping[str, Any], exact: bool = False) -> dict[str, Any]:
    """Returns our keys, such as `model.embed`, of the model that MaxText's describe.

    Args:
      values: all of MaxText's keys, defaults included.
      exact: whether the model is to take MaxText's weights as they are. Some of its blocks have the scale of attention
        in the queries' weights, and then the model has no other; for training from the beginning, the usual scale with
        the usual first weights is the same model.

    Raises:
      Lacking: for what minitext's model doesn't have, naming it.
      UserError: for a value of the wrong type.
    """
    block = str(values["decoder_block"])
    _refuse(values, block)
    sizes, width = scaled_sizes(values), whole(values, "head_dim")
    keys: dict[str, Any] = {
        "model.vocab": whole(values, "vocab_size"),
        "model.layers": sizes["num_decoder_layers"],
        "model.embed": sizes["emb_dim"],
        "model.heads": sizes["num_query_heads"],
        "model.norm_eps": number(values, "normalization_layer_epsilon"),
        "model.tie_embeddings": truth(values, "logits_via_embedding"),
        "model.mlp": sizes["mlp_dim"],
        "model.ffn.activation": _activation(values, block),
    }
    if keys["model.tie_embeddings"] and not truth(values, "normalize_embedding_logits"):
        keys["model.logit_scale"] = 1.0
    if cap := number(values, "final_logits_soft_cap"):
        keys["model.logit_softcap"] = cap
    if block == "deepseek":
        keys |= _latent(values)
    else:
        keys |= {"model.kv_heads": sizes["num_kv_heads"], "model.head_dim": width}
        keys |= _attention(values, block, sizes, exact)
    keys |= _rope(values, block)
    if block in ("mixtral", "qwen3_moe", "qwen3_next", "deepseek", "gpt_oss", "llama4"):
        keys |= _experts(values, block, sizes)
    return keys | _pattern(values, block, keys)


def interleaves(values: Mapping[str, Any]) -> bool:
    """Whether neighbouring features rotate together in MaxText's weights, not the halves of a head."""
    if _is_llama31(values):
        return True
    return str(values["rope_type"]).startswith("yarn") and truth(values, "rope_interleave")


def _refuse(values: Mapping[str, Any], block: str) -> None:
    name = values["model_name"]
    if block in LACKING or block not in BLOCKS:
        what = LACKING.get(block, f"the block {ascii(block)[1:-1][:40]}")
        raise Lacking(f"{name} (decoder_block={ascii(block)[1:-1][:40]}): minitext lacks {what}")
    lacks = {
        "vision or audio input": truth(values, "use_multimodal") or truth(values, "use_audio"),
        "sparse attention by an indexer": truth(values, "use_indexer"),
        "hyper-connections": number(values, "mhc_expansion_rate") > 1,
        "engram layers": bool(values.get("engram_layers")),
        "attention to blocks that a router chooses (moba)": truth(values, "moba"),
        "scores sqrtsoftplus of a router": values["routed_score_func"] == "sqrtsoftplus",
        "a wider attention output (attention_output_dim)": number(values, "attention_output_dim")
        > 0,
        "keys that serve as values": truth(values, "share_kv_projections"),
        "projections fused into one tensor (fused_qkv)": truth(values, "fused_qkv"),
        "projections fused into one tensor (fused_mlp)": truth(values, "fused_mlp"),
    }
    for what, is_there in lacks.items():
        if is_there:
            raise Lacking(f"{name} (decoder_block={block}): minitext lacks {what}")
    if (
        block == "deepseek"
        and number(values, "n_routing_groups") > 1
        and values["routed_score_func"] != "sigmoid"
    ):
        raise Lacking(
            f"{name} (decoder_block={block}): minitext lacks groups of experts with a softmax router"
        )


def _activation(values: Mapping[str, Any], block: str) -> str:
    given = values["mlp_activations"]
    given = [given] if isinstance(given, str) else given
    known: dict[tuple[str, ...], str] = {
        ("silu", "linear"): "silu",
        ("gelu", "linear"): "gelu_tanh",
    }
    if block == "gpt_oss":
        known = {("sigmoid", "linear"): "clamped"}
        if (limit := number(values, "mlp_activations_limit")) != 7:
            raise Lacking(f"mlp_activations_limit={limit}: minitext has gpt-oss's limit of 7 alone")
    found = known.get(tuple(map(str, given)) if isinstance(given, list) else ())
    if found is None:
        raise Lacking(
            f"mlp_activations={ascii(given)[:40]} with decoder_block={block}: minitext has a gated layer with silu or "
            "gelu, which MaxText writes [silu,linear] or [gelu,linear]"
        )
    return found


def _attention(
    values: Mapping[str, Any], block: str, sizes: Mapping[str, int], exact: bool
) -> dict[str, Any]:
    """Returns the keys of grouped-query attention and of norms."""
    a: dict[str, Any] = {}
    if cap := number(values, "attn_logits_soft_cap"):
        a["softcap"] = cap
    if truth(values, "attention_bias"):
        a |= {"qkv_bias": True} | ({"out_bias": True} if block == "gpt_oss" else {})
    norm = {"gemma3": "head", "olmo3": "whole", "qwen3_next": "head"}.get(block, "none")
    if block in ("qwen2", "qwen3", "qwen3_moe") and truth(values, "use_qk_norm"):
        norm = "head"
    if block == "llama4" and truth(values, "use_qk_norm"):
        norm = "l2"
    if norm != "none":
        a["qk_norm"] = norm
    if exact and block in FOLDED:
        a["scale"] = 1.0
    if block == "gemma3" and values["model_name"] == "gemma3-27b":
        a["scale"] = (sizes["emb_dim"] // sizes["num_query_heads"]) ** -0.5
    if block == "gpt_oss":
        a["sinks"] = truth(values, "attention_sink")
    if block == "qwen3_next":
        a["gate"] = True
    if block == "llama4" and truth(values, "temperature_tuning"):
        a["temperature_length"] = 8192
    keys = {f"model.attention.{name}": value for name, value in a.items()}
    if block in ("gemma2", "gemma3"):
        keys["model.norms"] = "both"
        for key in ("use_post_attn_norm", "use_post_ffw_norm"):
            if not truth(values, key):
                raise Lacking(
                    f"{key}=false with decoder_block={block}: minitext has norms after both layers or neither"
                )
    if block == "olmo3":
        keys["model.norms"] = "after"
    if block == "qwen3_next":
        keys["model.norm_offset"] = True
    return keys


def _latent(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of DeepSeek's attention."""
    if str(values["attention_type"]) != "mla":
        raise Lacking(
            f"attention_type={ascii(values['attention_type'])[1:-1][:40]} with decoder_block=deepseek: minitext has "
            "mla there"
        )
    names = {
        "kv_rank": "kv_lora_rank", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim",
        "v_dim": "v_head_dim",
    }  # fmt: skip
    keys: dict[str, Any] = {
        f"model.attention.{ours}": whole(values, theirs) for ours, theirs in names.items()
    }
    eps = number(values, "normalization_layer_epsilon")
    keys |= {"model.attention.kind": "mla", "model.attention.latent_eps": eps}
    if rank := whole(values, "q_lora_rank"):
        keys["model.attention.q_rank"] = rank
    return keys


def _is_llama31(values: Mapping[str, Any]) -> bool:
    return str(values["model_name"]).startswith("llama3.1") or str(values["rope_type"]).startswith(
        "llama3.1"
    )


def _rope(values: Mapping[str, Any], block: str) -> dict[str, Any]:
    """Returns the keys of rotary positions, of layers that have no other."""
    theta = number(values, "rope_max_timescale")
    rope: dict[str, Any] = {"theta": theta}
    kind = str(values["rope_type"])
    if number(values, "rope_min_timescale") != 1:
        raise Lacking(
            f"rope_min_timescale={values['rope_min_timescale']}: minitext's fastest pair turns by 1 a token"
        )
    if _is_llama31(values):
        if truth(values, "rope_use_scale"):
            rope |= {"kind": "llama3", "factor": 8.0, "original_length": 8192}
    elif kind.startswith("yarn"):
        rope |= _yarn(values)
    elif kind != "default":
        raise UserError(
            f"rope_type={ascii(kind)[1:-1][:40]}: MaxText has default, llama3.1 and yarn"
        )
    elif (factor := number(values, "rope_linear_scaling_factor")) != 1 and block != "gemma3":
        rope |= {"kind": "linear", "factor": factor}
    if (part := number(values, "partial_rotary_factor")) != 1:
        rope["fraction"] = part
    if (local := number(values, "local_rope_max_timescale")) > 0:
        if block in ("gemma2", "olmo3") and kind == "default":
            raise Lacking(
                f"local_rope_max_timescale={local:g} with decoder_block={block}: minitext has it with gemma3 alone"
            )
        if block == "gemma3":
            rope["theta"] = local
    return {f"model.rope.{name}": value for name, value in rope.items()}


def _yarn(values: Mapping[str, Any]) -> dict[str, Any]:
    original = whole(values, "original_max_position_embeddings")
    found: dict[str, Any] = {
        "kind": "yarn", "factor": number(values, "rope_factor"), "original_length": original,
        "beta_fast": number(values, "beta_fast"), "beta_slow": number(values, "beta_slow"),
        "truncate": truth(values, "rope_truncate"),
    }  # fmt: skip
    longer = whole(values, "max_position_embeddings") > original
    if not truth(values, "rope_attention_scaling"):
        mla = str(values["attention_type"]) == "mla"
        mscale = number(values, "mscale")
        # Multi-head latent attention scales its logits by the square of the factor, and nothing else.
        found |= (
            {"mscale": mscale, "mscale_all_dim": mscale}
            if mla and longer
            else {"attention_factor": 1.0}
        )
    return found


def _experts(values: Mapping[str, Any], block: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the keys of mixtures of experts."""
    count = whole(values, "num_experts")
    if count < 2:
        raise UserError(f"num_experts={count} with decoder_block={block}: choose 2 or more")
    moe: dict[str, Any] = {
        "kind": "moe", "experts": count, "experts_per_token": whole(values, "num_experts_per_tok"),
        "balance_loss": number(values, "load_balance_loss_weight"),
        # The weights of a token's experts are a softmax over them alone, normalized with or without norm_topk_prob.
        "normalize": True,
    }  # fmt: skip
    if (capacity := number(values, "capacity_factor")) > 0:
        moe["capacity_factor"] = capacity
    if block in ("deepseek", "llama4", "qwen3_next"):
        moe["shared_experts"] = whole(values, "shared_experts")
    if block == "qwen3_next":
        moe["shared_gate"] = True
    if block == "llama4":
        moe |= {"router": "sigmoid", "normalize": False, "scale_input": True}
    if block == "gpt_oss":
        moe |= {"bias": True, "router_bias": True}
    keys: dict[str, Any] = {"model.mlp": sizes["moe_mlp_dim"]}
    if block == "deepseek":
        sigmoid = values["routed_score_func"] == "sigmoid"
        moe |= {"normalize": sigmoid, "scaling": number(values, "routed_scaling_factor")}
        if sigmoid:
            moe["router"] = "sigmoid"
        if truth(values, "routed_bias"):
            # Where MaxText leaves the biases as they are, ours still exist only if they may move.
            moe["bias_rate"] = number(values, "routed_bias_update_rate") or 0.001
        if (groups := whole(values, "n_routing_groups")) > 1:
            moe |= {"groups": groups, "groups_per_token": whole(values, "topk_routing_group")}
        if dense := whole(values, "first_num_dense_layers"):
            keys |= {"model.dense_layers": dense, "model.dense_mlp": sizes["mlp_dim"]}
    return keys | {f"model.ffn.{name}": value for name, value in moe.items()}


def _pattern(values: Mapping[str, Any], block: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of layers that repeat in a pattern."""
    layers, window = keys["model.layers"], whole(values, "sliding_window_size")
    everything = {"attention": {"window": None}}
    period: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    if block in ("gemma2", "gpt_oss", "olmo3", "gemma3") and window:
        found["model.attention.window"] = window
    match block:
        case "gemma2":  # a layer there is a local and a global one
            found["model.layers"] = 2 * layers
            layers, period = 2 * layers, [{}, everything]
        case "gpt_oss":
            period = [{}, everything]
        case "olmo3":
            plain = {"rope": {"kind": "default", "theta": keys["model.rope.theta"]}}
            yarn = keys.get("model.rope.kind") == "yarn"
            period = [*[plain if yarn else {}] * 3, everything]
        case "gemma3":
            rope: dict[str, Any] = {"theta": number(values, "rope_max_timescale")}
            if (factor := number(values, "rope_linear_scaling_factor")) != 1:
                rope |= {"kind": "linear", "factor": factor}
            period = [*[{}] * 5, everything | {"rope": rope}]
        case "qwen3_next":
            period = _qwen3_next(values)
        case "llama4":
            found |= {"model.attention.chunk": whole(values, "chunk_attn_window_size") or None}
            period = _llama4(values, found)
    if period:
        found["model.period"] = period[:layers]
    return found


def _qwen3_next(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = {
        "conv": "gdn_conv_kernel_dim", "key_dim": "gdn_key_head_dim", "value_dim": "gdn_value_head_dim",
        "key_heads": "gdn_num_key_heads", "value_heads": "gdn_num_value_heads",
    }  # fmt: skip
    linear = {"kind": "deltanet"} | {ours: whole(values, theirs) for ours, theirs in names.items()}
    every = whole(values, "inhomogeneous_layer_cycle_interval")
    return [*[{"attention": linear}] * (every - 1), {}] if every > 1 else []


def _llama4(values: Mapping[str, Any], keys: dict[str, Any]) -> list[dict[str, Any]]:
    unrotated, sparse = (
        whole(values, "nope_layer_interval"),
        whole(values, "interleave_moe_layer_step"),
    )
    length = math.lcm(max(1, unrotated), max(1, sparse))
    tuned = truth(values, "temperature_tuning")
    period: list[dict[str, Any]] = []
    for i in range(1, min(length, 64) + 1):
        layer: dict[str, Any] = {}
        if unrotated > 0 and i % unrotated == 0:
            layer |= {"rope": {"kind": "none"}}
            layer["attention"] = {"chunk": None, "qk_norm": "none"}
        elif tuned:
            layer["attention"] = {"temperature_length": None}
        if sparse > 1 and i % sparse:
            layer |= {"ffn": {"kind": "swiglu"}, "mlp": scaled_sizes(values)["mlp_dim"]}
        period.append(layer)
    return period


# Values, as a command or a file has them.


def _given(values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key)
    return 0 if value is None or value == "" else value


def number(values: Mapping[str, Any], key: str) -> float:
    """Returns a key's value as a finite number; 0 where it is empty or missing."""
    value = _given(values, key)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _wrong(key, value, "a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(key, value, "a number")
    return float(value)


def whole(values: Mapping[str, Any], key: str) -> int:
    """Returns a key's value as a whole number."""
    value = number(values, key)
    if value != int(value) or abs(value) > 2**53:
        raise _wrong(key, values.get(key), "a whole number")
    return int(value)


def truth(values: Mapping[str, Any], key: str) -> bool:
    """Returns a key's value as true or false."""
    value = _given(values, key)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value in (0, 1):
        return bool(value)
    raise _wrong(key, value, "true or false")


def _wrong(key: str, value: Any, wanted: str) -> UserError:
    return UserError(
        f"{key}={ascii(value)[:60]} is not {wanted}: correct it in the command or file"
    )


# The other way: MaxText's keys for a model of ours.


def likely_blocks(model: ModelConfig) -> list[str]:
    """Returns the blocks, of those whose checkpoints are read and written, that a model could be, likeliest first."""
    moe = model.ffn.kind == "moe"
    if model.attention.kind != "gqa":
        return ["deepseek"]
    if moe:
        return (
            ["qwen3_moe", "mixtral"]
            if model.attention.qk_norm == "head"
            else ["mixtral", "qwen3_moe"]
        )
    if model.norms == "both":
        return ["gemma3", "gemma2"] if model.attention.qk_norm == "head" else ["gemma2", "gemma3"]
    if model.attention.qk_norm == "head":
        return ["qwen3"]
    return ["qwen2", "llama2"] if model.attention.qkv_bias else ["llama2", "gemma", "qwen2"]


def values_of(model: ModelConfig, block: str) -> dict[str, Any]:
    """Returns MaxText's keys of a model with a block, those that the block has; the caller compares `model_keys`.

    Args:
      model: the model, with the scales that MaxText's weights have.
      block: the decoder_block.
    """
    a, moe = model.attention, model.ffn
    values: dict[str, Any] = {
        "decoder_block": block, "base_emb_dim": model.embed, "base_num_query_heads": model.heads,
        "base_num_kv_heads": model.K, "head_dim": model.H, "base_mlp_dim": model.mlp,
        "base_num_decoder_layers": model.layers // (2 if block == "gemma2" else 1), "vocab_size": model.vocab,
        "normalization_layer_epsilon": model.norm_eps, "logits_via_embedding": model.tie_embeddings,
        "normalize_embedding_logits": model.logit_scale is None, "final_logits_soft_cap": model.logit_softcap or 0.0,
        "mlp_activations": ["silu" if moe.activation == "silu" else "gelu", "linear"],
    }  # fmt: skip
    if isinstance(a, GQAConfig):
        values |= {
            "attention_bias": a.qkv_bias, "use_qk_norm": a.qk_norm == "head" and block != "gemma3",
            "attn_logits_soft_cap": a.softcap or 0.0, "sliding_window_size": a.window or 0,
        }  # fmt: skip
    if model.norms == "both":
        values |= {"use_post_attn_norm": True, "use_post_ffw_norm": True}
    if isinstance(a, MLAConfig):
        values |= {
            "attention_type": "mla", "q_lora_rank": a.q_rank or 0, "kv_lora_rank": a.kv_rank,
            "qk_nope_head_dim": a.nope_dim, "qk_rope_head_dim": a.rope_dim, "v_head_dim": a.v_dim,
        }  # fmt: skip
    if block == "gemma3":
        values["model_name"] = "gemma3-27b" if _is_27b(model) else "gemma3-4b"
    if isinstance(moe, MoEConfig):
        values |= _values_of_experts(model, moe)
    return values | _values_of_rope(model, block)


def _is_27b(model: ModelConfig) -> bool:
    scale = getattr(model.attention, "scale", None)
    return scale is not None and scale != model.H**-0.5


def _values_of_experts(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    return {
        "base_mlp_dim": model.dense_mlp or model.mlp, "base_moe_mlp_dim": model.mlp, "num_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token, "shared_experts": moe.shared_experts,
        "load_balance_loss_weight": moe.balance_loss, "capacity_factor": moe.capacity_factor or -1.0,
        "first_num_dense_layers": model.dense_layers, "routed_scaling_factor": moe.scaling,
        "routed_score_func": moe.router, "routed_bias": moe.bias_rate > 0, "routed_bias_update_rate": moe.bias_rate,
        "n_routing_groups": moe.groups if moe.groups > 1 else -1,
        "topk_routing_group": moe.groups_per_token if moe.groups > 1 else -1,
        # Which of MaxText's two ways to route a block of DeepSeek takes hangs on the model's name.
        **({"model_name": "deepseek3-671b"} if moe.router == "sigmoid" else {}),
    }  # fmt: skip


def _values_of_rope(model: ModelConfig, block: str) -> dict[str, Any]:
    rope: Any = model.rope
    values: dict[str, Any] = {
        "rope_type": "default",
        "rope_max_timescale": getattr(rope, "theta", 1e4),
    }
    if block == "gemma3":
        last: Any = model.with_layer(model.period[5]).rope if len(model.period) > 5 else rope
        return {
            "rope_type": "default", "local_rope_max_timescale": rope.theta, "rope_max_timescale": last.theta,
            "rope_linear_scaling_factor": getattr(last, "factor", 1.0),
        }  # fmt: skip
    match rope.kind:
        case "linear":
            values["rope_linear_scaling_factor"] = rope.factor
        case "llama3":
            values |= {"rope_type": "llama3.1", "rope_use_scale": True}
        case "yarn":
            values |= {
                "rope_type": "yarn", "rope_factor": rope.factor, "beta_fast": rope.beta_fast,
                "beta_slow": rope.beta_slow, "rope_truncate": rope.truncate, "mscale": rope.mscale or 1.0,
                "original_max_position_embeddings": rope.original_length,
                "max_position_embeddings": round(rope.original_length * max(1.0, rope.factor)),
                "rope_interleave": model.attention.kind == "mla",
                "rope_attention_scaling": rope.attention_factor is None and rope.mscale is None,
            }  # fmt: skip
    return values
