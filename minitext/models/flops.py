"""A model's parameters and floating-point operations, counted by formula.

Chapters: 4.
"""

from minitext.config.model import ModelConfig
from minitext.models.attention import Counts
from minitext.models.transformer import VARIANTS


def count_params(cfg: ModelConfig, *, active: bool = False) -> int:
    """Returns the number of parameters by formula.

    Per layer: attention's, such as D*H*(2N + 2K) of GQA, feed-forward 3*D*F or what `MoE.count` says,
    two norms 2*D; outside the layers: the embedding V*D, the output layer V*D unless tied, the last norm D.

    Args:
      cfg: the model.
      active: count of a mixture of experts only the parameters that a token meets.
    """
    D, V, attention = cfg.embed, cfg.vocab, count_attention(cfg)
    ffn = VARIANTS[type(cfg.ffn)].count(cfg, active=active)
    layer = attention.weights + attention.scales + ffn + 2 * D
    return cfg.layers * layer + V * D * (1 if cfg.tie_embeddings else 2) + D


def count_flops(cfg: ModelConfig, tokens: int, seq_len: int, *, causal: bool = True) -> int:
    """Returns the floating-point operations of one training step: forward, and backward at twice the forward.

    A matrix product of a token with P weights takes 2*P operations, and of experts those count that a token meets;
    attention's two products take 4*N*H*S per token for S keys of GQA, and a causal token sees half of them on average.
    Norms, rotations and softmax are not counted, nor is what rematerialisation computes again (so that a utilisation
    made of this is MFU, Chowdhery et al. 2022).

    Args:
      cfg: the model.
      tokens: tokens in the step.
      seq_len: length of a row.
      causal: count only the half of the attention square that is used.
    """
    D, V, attention = cfg.embed, cfg.vocab, count_attention(cfg)
    ffn = VARIANTS[type(cfg.ffn)].count(cfg, active=True)
    weights = cfg.layers * (attention.weights + ffn) + V * D
    keys = seq_len / (2 if causal else 1)
    return int(3 * tokens * (2 * weights + cfg.layers * attention.per_key * keys))


def count_attention(cfg: ModelConfig) -> Counts:
    """Returns what one layer's attention holds and computes, by the formula of its kind."""
    return VARIANTS[type(cfg.attention)].count(cfg)
