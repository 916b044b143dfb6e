"""Grouped-query attention with rotary positions and a key-value cache.

Chapters: 4.
"""

from functools import partial
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


def append_tokens(cache: Any, new: Any) -> Any:
    """Returns a cache with the tokens of another one appended after its first `length` tokens.

    Args:
      cache: a `NamedTuple` of arrays [..., S, features], or tuples of these, whose last field is `length`.
      new: new tokens in the same form; the cache must have room for them.
    """

    def write(old, late):
        start = (*(0 for _ in old.shape[:-2]), cache.length, 0)
        return jax.lax.dynamic_update_slice(old, late.astype(old.dtype), start)

    kept = jax.tree.map(write, cache[:-1], new[:-1])
    return cache._make((*kept, cache.length + new.length))


class KVCache(NamedTuple):
    """Keys and values of tokens, with room for S tokens.

    Layers only read a cache. They return the keys and values of their new tokens, and `append` then writes those of all
    layers at once. If each layer wrote to the cache before reading it, XLA would copy the cache.

    Attributes:
      k: [L, B, K, S, H] keys, rotated; for one layer [B, K, S, H]; for layers in a list a tuple of L of these. K comes
        before S, as the matrix products need it, so the cache is read without a copy.
      v: values, in the same form.
      length: the number of tokens stored.
    """

    k: Any
    v: Any
    length: jax.Array | int

    append = append_tokens


class Counts(NamedTuple):
    """Sizes and costs of one layer's attention, by formula.

    Attributes:
      split: parameters in matrices that are split by head; each multiplies a token once.
      whole: parameters in matrices that all heads share.
      scales: all other parameters.
      per_key: floating-point operations for each token and key that it sees.
      q: features of a token's queries, over all heads.
      k: features of its keys.
      v: features of its values.
      out: features of the heads' outputs.
      latents: features that all heads share.
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
        linear, scale = partial(Linear, rules=rules), (2 * cfg.layers) ** -0.5  # as in SwiGLU
        self.q = linear(D, N * H, ("embed", "heads"), key=rngs.params())
        self.k = linear(D, K * H, ("embed", "kv_heads"), key=rngs.params())
        self.v = linear(D, K * H, ("embed", "kv_heads"), key=rngs.params())
        self.o = linear(N * H, D, ("heads", "embed"), key=rngs.params(), scale=scale)
        self.cfg, self.rules = cfg, rules

    @staticmethod
    def count(cfg: ModelConfig) -> Counts:
        """Counts four projections, and two products of N heads of H features with each key."""
        q, k = cfg.heads * cfg.H, cfg.K * cfg.H
        return Counts(cfg.embed * (2 * q + 2 * k), 0, 0, 4 * q, q, k, k, q, 0)

    @staticmethod
    def make_cache(cfg: ModelConfig, batch: int, length: int, rules: ShardingRules) -> KVCache:
        """Returns an empty cache for `length` tokens of each of `batch` rows, in the compute type."""
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
        """Lets each token attend to itself and the earlier tokens of its segment.

        Args:
          x_XD: [B*T, D] normalised residual stream.
          positions_BT: [B, T] position of each token in its document.
          segment_ids_BT: [B, T] document of each token, or None for one document per row.
          cache: one layer's cache of the tokens before these; each row must then be one document.

        Returns:
          [B*T, D], and a cache of these tokens alone.
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
        if cache is None or not cache.k.shape[2]:  # there are no earlier tokens
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
    """Returns attention's output [B, T, N, H] over these tokens alone; the sequence may be split over devices."""
    qkvs = q_BTNH, k_BTKH, v_BTKH, segment_ids_BT
    if rules.splits("seq"):
        return context_attention(*qkvs, rules=rules, method=cfg.attention.context)
    return kernels.attention(*qkvs, impl=cfg.attention.impl)


def project_out(out_BTNH: jax.Array, o: Linear, rules: ShardingRules) -> jax.Array:
    """Projects the heads' outputs [B, T, N, H] to what they add to the residual stream, [B*T, D]."""
    B, T, N, H = out_BTNH.shape
    where = rules.out("batch", "seq", "heads")
    out_BTF = jax.lax.reshape(out_BTNH, (B, T, N * H), out_sharding=where)
    out_BTF = checkpoint_name(out_BTF, "attention")
    return checkpoint_name(o(flatten_tokens(out_BTF, rules, "heads")), "attention_out")
