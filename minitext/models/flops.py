"""A model's parameters and floating-point operations, counted by formula.

Chapters: 4.
"""

from minitext.config.model import ModelConfig
from minitext.models.attention import Counts
from minitext.models.transformer import VARIANTS


def count_params(cfg: ModelConfig, *, active: bool = False) -> int:
    """Returns the number of parameters by formula.

    Each layer has those of attention (D*H*(2N + 2K) for GQA), of its feed-forward layer (3*D*F, or `MoE.count`) and of
    two norms, 2*D. Outside the layers are the embedding V*D, the output layer V*D unless tied, and the last norm D.

    Args:
      cfg: the model.
      active: whether to count only the experts that a token uses.
    """
    D, V, attention = cfg.embed, cfg.vocab, count_attention(cfg)
    ffn = VARIANTS[type(cfg.ffn)].count(cfg, active=active)
    layer = attention.weights + attention.scales + ffn + 2 * D
    return cfg.layers * layer + V * D * (1 if cfg.tie_embeddings else 2) + D


def count_flops(cfg: ModelConfig, tokens: int, seq_len: int, *, causal: bool = True) -> int:
    """Returns the floating-point operations of one training step: forward, and backward at twice the forward.

    A token's matrix product with P weights takes 2*P operations; only the experts that the token uses count. The two
    products of GQA take 4*N*H*S per token for S keys, and a causal token sees half of the keys on average. Norms,
    rotations, softmax and rematerialisation are not counted, so a utilisation computed from this is MFU (Chowdhery et
    al. 2022).

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
    """Returns the sizes and costs of one layer's attention."""
    return VARIANTS[type(cfg.attention)].count(cfg)
