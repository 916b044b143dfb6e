"""Grouped-query attention with rotary positions and a key-value cache.

Chapters: 4.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from minitext import kernels
from minitext.config.model import DeltaNetConfig, GQAConfig, MLAConfig, ModelConfig
from minitext.kernels.attention.mask import Mask
from minitext.models.layers import Linear, RMSNorm, rms_norm
from minitext.models.paged import PagedKVCache, page_dtype, stored_features
from minitext.models.rope import rope
from minitext.sharding.context_parallel import context_attention
from minitext.sharding.rules import ShardingRules, flatten_tokens, unflatten_tokens


def append_tokens(cache: Any, new: Any) -> Any:
    """Returns a cache with the tokens of another one appended after its first `length` tokens.

    Args:
      cache: a `NamedTuple` of arrays [..., S, features], or tuples of these, whose last field is `length`, [B] if rows
        differ.
      new: new tokens in the same form; the cache must have room for them.
    """

    def write(old, late, length):
        start = (*(0 for _ in old.shape[:-2]), length, 0)
        return jax.lax.dynamic_update_slice(old, late.astype(old.dtype), start)

    if jnp.ndim(
        cache.length
    ):  # each row has its own; layers come before rows, unless these are in a tuple
        row = 0 if isinstance(cache[0], tuple) else 1
        write = jax.vmap(write, (row, row, 0), row)
    kept = jax.tree.map(lambda old, late: write(old, late, cache.length), cache[:-1], new[:-1])
    return cache._make((*kept, cache.length + new.length))


class KVCache(NamedTuple):
    """Keys and values of tokens, with room for S tokens.

    Layers only read a cache. They return the keys and values of their new tokens, and `append` then writes those of all
    layers at once. If each layer wrote to the cache before reading it, XLA would copy the cache.

    Attributes:
      k: [L, B, K, S, H] keys, rotated; for one layer [B, K, S, H]; for layers in a list a tuple of L of these. K comes
        before S, as the matrix products need it, so the cache is read without a copy.
      v: values, in the same form.
      length: the number of tokens stored, [B] if rows differ.
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
      per_token: floating-point operations for each token, besides products with weights.
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
    per_token: int = 0

    @property
    def weights(self) -> int:
        """Parameters in matrices."""
        return self.split + self.whole


class GQA(nnx.Module):
    """Causal self-attention whose N query heads share K key and value heads (Ainslie et al. 2023)."""

    def __init__(self, cfg: ModelConfig, *, rules: ShardingRules, rngs: nnx.Rngs):
        assert isinstance(cfg.attention, GQAConfig)
        a, D, N, K, H = cfg.attention, cfg.embed, cfg.heads, cfg.K, cfg.H
        linear, scale = partial(Linear, rules=rules), (2 * cfg.layers) ** -0.5  # as in SwiGLU
        bias = a.qkv_bias
        self.q = linear(D, N * H, ("embed", "heads"), key=rngs.params(), bias=bias)
        self.k = linear(D, K * H, ("embed", "kv_heads"), key=rngs.params(), bias=bias)
        self.v = linear(D, K * H, ("embed", "kv_heads"), key=rngs.params(), bias=bias)
        self.o = linear(
            N * H, D, ("heads", "embed"), key=rngs.params(), scale=scale, bias=a.out_bias
        )
        if a.gate:
            self.gate = linear(D, N * H, ("embed", "heads"), key=rngs.params())
        if a.qk_norm in ("head", "whole"):
            whole = a.qk_norm == "whole"
            norm = partial(RMSNorm, eps=cfg.norm_eps, rules=rules, offset=cfg.norm_offset)
            self.q_norm = norm(N * H if whole else H, axis="heads" if whole else "head_dim")
            self.k_norm = norm(K * H if whole else H, axis="kv_heads" if whole else "head_dim")
        if a.sinks:
            self.sinks = nnx.Param(jnp.zeros((N,), jnp.float32), axes=("heads",))
        self.cfg, self.options, self.rules = cfg, a, rules

    @staticmethod
    def count(cfg: ModelConfig) -> Counts:
        """Counts four projections (a fifth for the gate), and two products of N heads of H features with each key."""
        assert isinstance(cfg.attention, GQAConfig)
        a, q, k = cfg.attention, cfg.heads * cfg.H, cfg.K * cfg.H
        scales = (q + 2 * k if a.qkv_bias else 0) + (cfg.embed if a.out_bias else 0)
        scales += {"head": 2 * cfg.H, "whole": q + k}.get(a.qk_norm, 0)
        scales += cfg.heads if a.sinks else 0
        split = cfg.embed * ((3 if a.gate else 2) * q + 2 * k)
        return Counts(split, 0, scales, 4 * q, q, k, k, q, 0)

    @staticmethod
    def make_cache(
        cfg: ModelConfig, layers: int, batch: int, length: int, rules: ShardingRules
    ) -> KVCache:
        """Returns an empty cache for `length` tokens of each of `batch` rows in some layers, in the compute type."""
        empty = jnp.zeros((layers, batch, cfg.K, length, cfg.H), cfg.dtype)
        k, v = (rules.shard(empty, "layers", "batch", "kv_heads", None, "head_dim") for _ in "kv")
        return KVCache(k, v, jnp.zeros((), jnp.int32))

    @staticmethod
    def make_pages(
        cfg: ModelConfig,
        pages: int,
        tokens: int,
        slots: int,
        rules: ShardingRules,
        cache_dtype: str,
    ) -> PagedKVCache:
        """Returns one layer's empty cache of so many pages of so many tokens."""
        shape, dtype = (
            (cfg.K, pages, tokens, stored_features(cfg.H)),
            page_dtype(cache_dtype, cfg.dtype),
        )
        k, v = (
            rules.shard(jnp.zeros(shape, dtype), "kv_heads", None, None, "head_dim") for _ in "kv"
        )
        scales = None
        if cache_dtype != "auto":
            empty = jnp.zeros((cfg.K, pages, 2, tokens), jnp.float32)
            scales = rules.shard(empty, "kv_heads", None, None, None)
        return PagedKVCache(k, v, scales, None)

    @jax.named_scope("attention")
    def __call__(
        self,
        x_XD: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        cache: KVCache | PagedKVCache | None = None,
    ) -> tuple[jax.Array, KVCache | PagedKVCache]:
        """Lets each token attend to itself and the earlier tokens of its segment.

        Args:
          x_XD: [B*T, D] normalised residual stream.
          positions_BT: [B, T] position of each token in its document.
          segment_ids_BT: [B, T] document of each token, or None for one document per row.
          cache: one layer's cache of the tokens before these; each row must then be one document, but for prompts
            that begin in a cache in pages.

        Returns:
          [B*T, D], and a cache of these tokens alone; of a cache in pages, the pages with these tokens in them.
        """
        q_BTNH, k_BTKH, v_BTKH = checkpoint_name(self._projections(x_XD, positions_BT), "qkv")
        new = KVCache(jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2), positions_BT.shape[1])
        sinks = self.sinks.get_value() if self.options.sinks else None
        more: Any = attention_options(self.options) | ({} if sinks is None else {"sinks_N": sinks})
        if isinstance(cache, PagedKVCache):
            out_BTNH, new = cache.attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, **more)
        elif cache is None or not cache.k.shape[2]:  # there are no earlier tokens
            qkvs = q_BTNH, k_BTKH, v_BTKH, segment_ids_BT
            out_BTNH = attend(*qkvs, self.cfg, self.rules, sinks_N=sinks)
        else:
            out_BTNH = kernels.cached_attention(q_BTNH, new.k, new.v, *cache, **more)
        if self.options.gate:
            sizes = self.cfg.heads, self.cfg.H
            gate = self._by_head(self.gate(x_XD, "heads"), positions_BT.shape[0], "heads", sizes)
            out_BTNH = out_BTNH * jax.nn.sigmoid(checkpoint_name(gate, "qkv"))
        return project_out(out_BTNH, self.o, self.rules), new

    def _by_head(self, x: jax.Array, batch: int, name: str, sizes: tuple[int, int]) -> jax.Array:
        return unflatten_tokens(x, batch, name, "head_dim", sizes=sizes, rules=self.rules)

    def _projections(
        self, x_XD: jax.Array, positions_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [B, T, N, H] and keys [B, T, K, H], normalised and rotated, and values [B, T, K, H]."""
        cfg, a, B = self.cfg, self.options, positions_BT.shape[0]
        q, k, v = self.q(x_XD, "heads"), self.k(x_XD, "kv_heads"), self.v(x_XD, "kv_heads")
        if a.qk_norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTNH = self._by_head(q, B, "heads", (cfg.heads, cfg.H))
        k_BTKH = self._by_head(k, B, "kv_heads", (cfg.K, cfg.H))
        v_BTKH = self._by_head(v, B, "kv_heads", (cfg.K, cfg.H))
        if a.qk_norm == "head":
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        # The kernels divide logits by sqrt(H); for any other scale, the queries carry the factor.
        scale = 1.0 if a.scale is None else a.scale * math.sqrt(cfg.H)
        q_BTNH = rope(q_BTNH, positions_BT, cfg.rope, scale=scale)
        k_BTKH = rope(k_BTKH, positions_BT, cfg.rope)
        if a.qk_norm == "l2":
            ones = jnp.ones(cfg.H, jnp.float32)
            q_BTNH = rms_norm(q_BTNH, scale * ones, cfg.norm_eps)
            k_BTKH = rms_norm(k_BTKH, ones, cfg.norm_eps)
        if a.temperature_length is not None:
            q_BTNH = q_BTNH * _temperature(a, positions_BT).astype(q_BTNH.dtype)
        return q_BTNH, k_BTKH, v_BTKH


def _temperature(a: GQAConfig, positions_BT: jax.Array) -> jax.Array:
    """Returns the factors [B, T, 1, 1] by which queries grow, against attention that fades in long texts (Llama 4)."""
    lengths = jnp.floor((positions_BT + 1.0) / (a.temperature_length or 1))
    return (1 + a.temperature_scale * jnp.log1p(lengths))[:, :, None, None]


def attention_options(options: GQAConfig | MLAConfig | DeltaNetConfig) -> dict[str, Any]:
    """Returns the keyword arguments of attention's implementations that tell a layer from plain causal attention."""
    if not isinstance(options, GQAConfig):
        return {}
    more: dict[str, Any] = {}
    if options.window is not None or options.chunk is not None:
        more["mask"] = Mask(window=options.window, chunk=options.chunk)
    return more | ({} if options.softcap is None else {"softcap": options.softcap})


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    cfg: ModelConfig,
    rules: ShardingRules,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Returns attention's output [B, T, N, H] over these tokens alone; the sequence may be split over devices."""
    qkvs, more = (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT), attention_options(cfg.attention)
    more |= {} if sinks_N is None else {"sinks_N": sinks_N}
    if rules.splits("seq"):
        return context_attention(*qkvs, rules=rules, method=cfg.attention.context, **more)
    return kernels.attention(*qkvs, impl=cfg.attention.impl, **more)


def project_out(out_BTNH: jax.Array, o: Linear, rules: ShardingRules) -> jax.Array:
    """Projects the heads' outputs [B, T, N, H] to what they add to the residual stream, [B*T, D]."""
    B, T, N, H = out_BTNH.shape
    where = rules.out("batch", "seq", "heads")
    out_BTF = jax.lax.reshape(out_BTNH, (B, T, N * H), out_sharding=where)
    out_BTF = checkpoint_name(out_BTF, "attention")
    return checkpoint_name(o(flatten_tokens(out_BTF, rules, "heads")), "attention_out")
