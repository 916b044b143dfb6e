"""A model's parameters and floating-point operations, counted by formula.

Chapters: 4.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from flax import nnx

from minitext.config.model import ModelConfig
from minitext.config.section import cached
from minitext.models.attention import Counts
from minitext.models.lora import Adapter
from minitext.models.transformer import VARIANTS, Transformer


def count_params(cfg: ModelConfig, *, active: bool = False) -> int:
    """Returns the number of parameters by formula.

    Each layer has those of attention (D*H*(2N + 2K) for plain GQA), of its feed-forward layer (3*D*F, or `MoE.count`)
    and of two norms, 2*D, or four. Outside the layers are the embedding V*D, the output layer V*D unless tied, the last
    norm D, and perhaps a value head D + 1. Adapters are counted too.

    Args:
      cfg: the model.
      active: whether to count only the experts that a token uses.
    """
    D, V = cfg.embed, cfg.vocab
    norms = (4 if cfg.norms == "both" else 2) * D
    layers = 0
    for repeats, layer in all_layers(cfg):
        attention, ffn = count_attention(layer), VARIANTS[type(layer.ffn)]
        scales = attention.scales + norms
        layers += repeats * (attention.weights + scales + ffn.count(layer, active=active))
    head = D + 1 if cfg.value_head else 0
    table = V * D * (1 if cfg.tie_embeddings else 2)
    return layers + table + D + head + count_adapters(cfg)


def count_adapters(cfg: ModelConfig) -> int:
    """Returns the number of parameters of adapters, r * (D + F) for each projection that has one."""
    return sum(one.layers * cfg.lora.rank * (one.inputs + one.outputs) for one in adapted(cfg))


class Adapted(NamedTuple):
    """A projection with an adapter.

    Attributes:
      layers: that have it.
      inputs: its inputs D.
      outputs: its outputs F.
      axes: the names of D and F in the sharding rules.
    """

    layers: int
    inputs: int
    outputs: int
    axes: tuple[str, str]


@cached
def adapted(cfg: ModelConfig) -> tuple[Adapted, ...]:
    """Returns the projections that have adapters, those of stacked layers once."""
    if not cfg.lora.rank:
        return ()
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    adapters = [one for _, one in nnx.iter_modules(model) if isinstance(one, Adapter)]
    shapes = [(one.a.get_value().shape, one.b.get_value().shape, one.axes) for one in adapters]
    return tuple(Adapted(math.prod(a[:-2]), a[-2], b[-1], axes) for a, b, axes in shapes)


def count_flops(cfg: ModelConfig, tokens: int, seq_len: int, *, causal: bool = True) -> int:
    """Returns the floating-point operations of one training step: forward, and backward at twice the forward.

    A token's matrix product with P weights takes 2*P operations; only the experts that the token uses count. The two
    products of GQA take 4*N*H*S per token for S keys, and a causal token sees half of the keys on average, or what its
    window or chunk leaves. A token of DeltaNet takes three products with each head's state, as in generation. Norms,
    convolutions, rotations, softmax and rematerialisation are not counted, so a utilisation computed from this is MFU
    (Chowdhery et al. 2022). Weights beside adapters need no gradient: their backward pass takes as much as the forward.

    Args:
      cfg: the model.
      tokens: tokens in the step.
      seq_len: length of a row.
      causal: count only the half of the attention square that is used.
    """
    weights_used, others = 1.0 * cfg.vocab * cfg.embed, 0.0
    for repeats, layer in all_layers(cfg):
        attention = count_attention(layer)
        weights = attention.weights + VARIANTS[type(layer.ffn)].count(layer, active=True)
        keys = keys_seen(layer, seq_len) if causal else seq_len
        weights_used += repeats * weights
        others += repeats * (attention.per_token + attention.per_key * keys)
    # Forward, and backward for the inputs; for the weights only if they are trained.
    passes = 2 if cfg.lora.rank else 3
    adapters = 3 * 2 * count_adapters(cfg)
    return int(tokens * (passes * 2 * weights_used + 3 * others + adapters))


def all_layers(cfg: ModelConfig) -> Iterator[tuple[int, ModelConfig]]:
    """Yields how often a layer occurs in the model, and its configuration, for each kind of layer in order."""
    for stack in cfg.stacks.values():
        for layer in stack.layers:
            yield stack.repeats, layer


def keys_seen(cfg: ModelConfig, seq_len: int) -> float:
    """Returns how many keys one token of a row sees in this layer, on average."""
    window = getattr(cfg.attention, "window", None)
    chunk = min(getattr(cfg.attention, "chunk", None) or seq_len, seq_len)
    if window is not None and window < seq_len:
        return window - window**2 / (2 * seq_len)
    whole, rest = divmod(seq_len, chunk)
    return (whole * chunk**2 + rest**2) / (2 * seq_len)


def count_attention(cfg: ModelConfig) -> Counts:
    """Returns the sizes and costs of one layer's attention."""
    return VARIANTS[type(cfg.attention)].count(cfg)
