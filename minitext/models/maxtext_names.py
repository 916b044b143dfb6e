"""MaxText's parameters and ours: one table of names for both directions, as for published weights.

MaxText keeps heads as a dimension of their own, [D, N, H] for queries and [N, H, D] for the output, and experts and
features as we do, so most rows need no more than another shape. Where it rotates neighbouring features (Llama 3.1,
DeepSeek), the features of a head change places. No number changes: what its blocks do with weights that others scale
is in the model's settings (`minitext.config.maxtext_model`, `exact`).

Sources: MaxText's models and `checkpoint_conversion` of 22 August 2026, and the trees that its own models have.

Chapters: 27.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from minitext.config.model import MLAConfig, ModelConfig
from minitext.errors import UserError
from minitext.models.convert import KEEP, Row, Table, View
from minitext.models.families import parameter_paths
from minitext.models.hf_keys import Stacked, stacked

ALL = slice(None)


class Naming(NamedTuple):
    """What one of MaxText's blocks calls its parts.

    Attributes:
      norms: our norm -> its name; the layer's own scales.
      moe: the mixture of experts.
      shared: the shared experts.
      paired: whether a layer there is two of ours, of which the names end in _local and _global.
      split: whether dense layers and layers with experts are apart.
    """

    norms: dict[str, str]
    moe: str = ""
    shared: str = ""
    paired: bool = False
    split: bool = False


LLAMA = {
    "norm_attention": "pre_self_attention_layer_norm",
    "norm_ffn": "post_self_attention_layer_norm",
}
GEMMA = {"norm_attention": "pre_self_attention_norm", "norm_ffn": "pre_ffw_norm"}
BOTH = GEMMA | {"norm_attention_out": "post_self_attention_norm", "norm_ffn_out": "post_ffw_norm"}
NAMES: dict[str, Naming] = {
    "llama2": Naming(LLAMA),
    "mistral": Naming(LLAMA),
    "mixtral": Naming(LLAMA, moe="MoeBlock_0"),
    "gemma": Naming(GEMMA),
    "gemma2": Naming(BOTH, paired=True),
    "gemma3": Naming(BOTH),
    "qwen2": Naming(LLAMA),
    "qwen3": Naming(LLAMA),
    "qwen3_moe": Naming(LLAMA, moe="moe_block"),
    "deepseek": Naming(
        LLAMA,
        moe="DeepSeekMoeBlock_0/MoeBlock_0",
        shared="DeepSeekMoeBlock_0/shared_experts",
        split=True,
    ),
}
GEMMA3_CYCLE = 6


class Tensor(NamedTuple):
    """One of theirs and the part of ours that it is, both below their layer."""

    name: str
    ours: str
    view: View = KEEP
    into: View = KEEP


def table(model: ModelConfig, block: str, interleaves: bool) -> Table:
    """Returns the names of a model's parameters in a checkpoint of MaxText whose layers aren't stacked.

    Args:
      model: the model.
      block: MaxText's decoder_block.
      interleaves: whether neighbouring features rotate together.

    Raises:
      UserError: if the block's names aren't known, or it has none for one of the model's parameters.
    """
    if block not in NAMES:
        raise UserError(
            f"decoder_block={block}: checkpoints are read and written of {', '.join(NAMES)}"
        )
    naming, shapes = NAMES[block], parameter_paths(model)
    ends = {
        "embed.table": "token_embedder/embedding",
        "norm.scale": "decoder/decoder_norm/scale",
        "unembed.w": "decoder/logits_dense/kernel",
    }
    rows = [Row(name, path) for path, name in ends.items() if path in shapes]
    for stack in stacked(model):
        prefix, numbers, suffix = _place(stack, naming, model)
        for tensor in _layer(stack.cfg, naming, suffix, interleaves):
            if (path := f"{stack.path}.{tensor.ours}") in shapes:
                name = prefix + tensor.name
                rows.append(Row(name, path, tensor.view, layers=numbers, into=tensor.into))
    if missing := sorted(shapes - {row.path for row in rows}):
        raise UserError(
            f"decoder_block={block}: MaxText has no tensor for the parameter {missing[0]}"
        )
    return Table(tuple(rows))


def scan(model: ModelConfig, block: str) -> tuple[tuple[str, ...], int]:
    """Returns the stacks of a scanned checkpoint, and how many layers each cycle of the scan has (1: no cycle)."""
    if NAMES[block].split:
        return ("dense_layers", "moe_layers"), 1
    return ("layers",), GEMMA3_CYCLE if block == "gemma3" else 1


def _place(stack: Stacked, naming: Naming, model: ModelConfig) -> tuple[str, Sequence[int], str]:
    """Returns what the names of a stack begin with, its layers' numbers, and what names of modules end in."""
    if naming.paired:
        which = "_global" if stack.layers[0] % 2 else "_local"
        return "decoder/layers_{layer}/", [layer // 2 for layer in stack.layers], which
    if not naming.split:
        return "decoder/layers_{layer}/", list(stack.layers), ""
    if stack.path.startswith("prefix"):
        return "decoder/dense_layers_{layer}/", list(stack.layers), ""
    return "decoder/moe_layers_{layer}/", [n - model.dense_layers for n in stack.layers], ""


def _layer(cfg: ModelConfig, naming: Naming, suffix: str, interleaves: bool) -> list[Tensor]:
    """Returns the tensors of one layer; those that the layer doesn't have are left out later."""
    attention = f"self_attention{suffix}"
    heads = _latent if isinstance(cfg.attention, MLAConfig) else _grouped
    tensors = heads(cfg, attention, interleaves)
    tensors += [
        Tensor(f"{name}{suffix}/scale", f"{ours}.scale") for ours, name in naming.norms.items()
    ]
    if cfg.ffn.kind == "swiglu":
        tensors += _gated(f"mlp{suffix}", "ffn")
    else:
        tensors += [
            Tensor(f"{naming.moe}/gate/kernel", "ffn.router"),
            Tensor(f"{naming.moe}/gate/bias", "ffn.bias"),
            *(Tensor(f"{naming.moe}/{theirs}", f"ffn.{ours}") for theirs, ours in _GATED.items()),
            *_gated(naming.shared, "ffn.shared"),
        ]
    return tensors


_GATED = {"wi_0": "gate", "wi_1": "up", "wo": "down"}


def _gated(theirs: str, ours: str) -> list[Tensor]:
    return [Tensor(f"{theirs}/{x}/kernel", f"{ours}.{y}.w") for x, y in _GATED.items()]


def _grouped(cfg: ModelConfig, name: str, interleaves: bool) -> list[Tensor]:
    """Returns grouped-query attention, with its biases and norms."""
    D, H, found = cfg.embed, cfg.H, list[Tensor]()
    for theirs, ours, N in (("query", "q", cfg.heads), ("key", "k", cfg.K), ("value", "v", cfg.K)):
        weight, bias = View((D, N, H)), View((N, H))
        if interleaves and ours != "v":
            weight = View((D, N, H), (D, N, H // 2, 2), order=(0, 1, 3, 2))
            bias = View((N, H), (N, H // 2, 2), order=(0, 2, 1))
        found += [
            Tensor(f"{name}/{theirs}/kernel", f"attention.{ours}.w", weight),
            Tensor(f"{name}/{theirs}/bias", f"attention.{ours}.b", bias),
        ]
    return [
        *found,
        Tensor(f"{name}/out/kernel", "attention.o.w", View((cfg.heads, H, D))),
        Tensor(f"{name}/query_norm/scale", "attention.q_norm.scale"),
        Tensor(f"{name}/key_norm/scale", "attention.k_norm.scale"),
    ]


def _latent(cfg: ModelConfig, name: str, interleaves: bool) -> list[Tensor]:
    """Returns multi-head latent attention; U, P, R and W as in `minitext.models.mla`."""
    a = cfg.attention
    assert isinstance(a, MLAConfig)
    D, N, U, P, R, W = cfg.embed, cfg.heads, a.nope_dim, a.rope_dim, a.kv_rank, a.v_dim
    rank, query = a.q_rank or D, "wq_b" if a.q_rank else "query"
    found = [
        Tensor(f"{name}/wq_a/kernel", "attention.q_down.w"),
        Tensor(f"{name}/q_norm/scale", "attention.q_norm.scale"),
        Tensor(f"{name}/kv_norm/scale", "attention.kv_norm.scale"),
        Tensor(f"{name}/out/kernel", "attention.o.w", View((N, W, D))),
        Tensor(
            f"{name}/wkv_b/kernel",
            "attention.k_up.w",
            View((R, N, U + W), part=(ALL, ALL, slice(0, U))),
        ),
        Tensor(
            f"{name}/wkv_b/kernel",
            "attention.v_up.w",
            View((R, N, U + W), part=(ALL, ALL, slice(U, None))),
        ),
    ]
    found += _rotated(f"{name}/{query}/kernel", "attention.q.w", (rank, N), U, P, interleaves)
    found += _rotated(f"{name}/wkv_a/kernel", "attention.kv_down.w", (D,), R, P, interleaves)
    return found


def _rotated(
    name: str, ours: str, leading: tuple[int, ...], before: int, rotary: int, interleaves: bool
) -> list[Tensor]:
    """Returns rows for a tensor whose last dimension has `before` features as they are, and then the rotary ones."""
    theirs = (*leading, before + rotary)
    joined = (leading[0], math.prod(theirs[1:]))
    if not interleaves:
        return [Tensor(name, ours, View(theirs))]

    def row(taken: slice, put: slice) -> Tensor:
        keep = (ALL,) * len(leading)
        return Tensor(
            name, ours, View(theirs, part=(*keep, taken)), View(joined, theirs, (*keep, put))
        )

    half = before + rotary // 2
    return [
        row(slice(0, before), slice(0, before)),
        row(slice(before, None, 2), slice(before, half)),
        row(slice(before + 1, None, 2), slice(half, None)),
    ]
