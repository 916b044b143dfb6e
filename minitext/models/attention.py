"""Grouped-query attention with rotary positions and a key-value cache.

Chapters: 4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from minitext import kernels
from minitext.config.model import ModelConfig
from minitext.models.layers import Linear, rope
from minitext.sharding.context_parallel import context_attention
from minitext.sharding.rules import ShardingRules, flatten_tokens, unflatten_tokens


class KVCache(NamedTuple):
    """Keys and values of tokens.

    A cache is only read by the layers, which return the keys and values of their new tokens; `append` then writes
    those of all layers at once. Were each layer to write and to read what it wrote, XLA would copy the cache.

    Attributes:
      k: [L, B, K, S, H] keys, rotated; in one layer's hands [B, K, S, H]; for layers in a list a tuple of L of these.
        The head comes before the place, as the matrix products want it: the cache is read where it lies.
      v: values, likewise.
      length: how many of the S places are filled.
    """

    k: Any
    v: Any
    length: jax.Array | int

    def append(self, new: "KVCache") -> "KVCache":
        """Returns the cache with `new` in the places that follow `length`; there must be room for it."""
        return append_tokens(self, new)


def append_tokens(cache: Any, new: Any) -> Any:
    """Returns a cache with the tokens of another one in the places that follow its `length`.

    Args:
      cache: a `NamedTuple` of arrays (or tuples of them) whose last dimension but one is the place, and then `length`.
      new: the same of new tokens; there must be room for them.
    """

    def write(old, late):
        start = (*(0 for _ in old.shape[:-2]), cache.length, 0)
        return jax.lax.dynamic_update_slice(old, late.astype(old.dtype), start)

    kept = jax.tree.map(write, cache[:-1], new[:-1])
    return cache._make((*kept, cache.length + new.length))


class Counts(NamedTuple):
    """What one layer's attention holds, computes and makes of a token, by formula.

    Attributes:
      split: parameters in matrices of which each head has its part; a token is multiplied with each once.
      whole: parameters in matrices that all heads share.
      scales: parameters besides.
      per_key: floating-point operations of a token for each key that it sees.
      q: features of a token's queries, over all heads.
      k: of its keys.
      v: of its values.
      out: of the heads' outputs.
      latents: of what all heads share.
    """

    split: int
    whole: int
    scales: int
    per_key: int
    q: int
    k: int
    v: int
    out: int
    latents: int

    @property
    def weights(self) -> int:
        """Parameters in matrices."""
        return self.split + self.whole


class GQA(nnx.Module):
    """Causal self-attention whose N query heads share K key and value heads (Ainslie et al. 2023)."""

    def __init__(self, cfg: ModelConfig, *, rules: ShardingRules, rngs: nnx.Rngs):
        D, N, K, H = cfg.embed, cfg.heads, cfg.K, cfg.H
        self.q = Linear(D, N * H, ("embed", "heads"), key=rngs.params(), rules=rules)
        self.k = Linear(D, K * H, ("embed", "kv_heads"), key=rngs.params(), rules=rules)
        self.v = Linear(D, K * H, ("embed", "kv_heads"), key=rngs.params(), rules=rules)
        self.o = Linear(
            N * H,
            D,
            ("heads", "embed"),
            key=rngs.params(),
            rules=rules,
            scale=(2 * cfg.layers) ** -0.5,
        )
        self.cfg, self.rules = cfg, rules

    @staticmethod
    def count(cfg: ModelConfig) -> Counts:
        """Counts four projections, and two products of N heads of H features with each key."""
        q, k = cfg.heads * cfg.H, cfg.K * cfg.H
        return Counts(cfg.embed * (2 * q + 2 * k), 0, 0, 4 * q, q, k, k, q, 0)

    @staticmethod
    def make_cache(cfg: ModelConfig, batch: int, length: int, rules: ShardingRules) -> KVCache:
        """Returns an empty cache for `length` tokens: keys and values [L, B, K, S, H] in the compute type."""
        empty = jnp.zeros((cfg.layers, batch, cfg.K, length, cfg.H), cfg.dtype)
        k, v = (rules.shard(empty, "layers", "batch", "kv_heads", None, "head_dim") for _ in "kv")
        return KVCache(k, v, jnp.zeros((), jnp.int32))

    @jax.named_scope("attention")
    def __call__(
        self,
        x_XD: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        cache: KVCache | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Attends within each segment to the positions before and at each token.

        Args:
          x_XD: [B*T, D] normalised residual stream.
          positions_BT: [B, T] position of each token in its document.
          segment_ids_BT: [B, T] document of each token, or None for one document per row.
          cache: one layer's cache of the tokens before these, which are then of one document per row.

        Returns:
          [B*T, D], and the keys and values of these tokens alone.
        """
        cfg, rules, B = self.cfg, self.rules, positions_BT.shape[0]
        heads = {"rules": rules, "sizes": (cfg.heads, cfg.H)}
        kv_heads = {"rules": rules, "sizes": (cfg.K, cfg.H)}
        q_BTNH = unflatten_tokens(self.q(x_XD, "heads"), B, "heads", "head_dim", **heads)
        k_BTKH = unflatten_tokens(self.k(x_XD, "kv_heads"), B, "kv_heads", "head_dim", **kv_heads)
        v_BTKH = unflatten_tokens(self.v(x_XD, "kv_heads"), B, "kv_heads", "head_dim", **kv_heads)
        q_BTNH = rope(q_BTNH, positions_BT, cfg.rope_theta)
        k_BTKH = rope(k_BTKH, positions_BT, cfg.rope_theta)
        q_BTNH, k_BTKH, v_BTKH = checkpoint_name((q_BTNH, k_BTKH, v_BTKH), "qkv")
        new = KVCache(jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2), positions_BT.shape[1])
        if cache is None or not cache.k.shape[2]:  # nothing came before
            out_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, cfg, rules)
        else:
            out_BTNH = kernels.cached_attention(q_BTNH, new.k, new.v, *cache)
        return project_out(out_BTNH, self.o, rules), new


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    cfg: ModelConfig,
    rules: ShardingRules,
) -> jax.Array:
    """Returns attention's output [B, T, N, H] over these tokens alone, whose sequence may be split over devices."""
    qkvs = q_BTNH, k_BTKH, v_BTKH, segment_ids_BT
    if rules.splits("seq"):
        return context_attention(*qkvs, rules=rules, method=cfg.attention.context)
    return kernels.attention(*qkvs, impl=cfg.attention.impl)


def project_out(out_BTNH: jax.Array, o: Linear, rules: ShardingRules) -> jax.Array:
    """Returns what the heads' outputs [B, T, N, H] add to the residual stream, [B*T, D]."""
    B, T, N, H = out_BTNH.shape
    where = rules.out("batch", "seq", "heads")
    out_BTF = jax.lax.reshape(out_BTNH, (B, T, N * H), out_sharding=where)
    out_BTF = checkpoint_name(out_BTF, "attention")
    return checkpoint_name(o(flatten_tokens(out_BTF, rules, "heads")), "attention_out")
