"""Multi-head latent attention, which makes a token's keys and values from one short vector and caches only that.

This vector, the latent, has R features whatever the number of heads. Training makes every head's keys and values from
it and attends as usual. Generation doesn't need them: a query's product with a key W c is the product of W^T q with the
latent c, and the weighted sum of values W c is W times the weighted sum of latents. So it applies the two matrices to
the new token's queries and outputs and reads the cache as it is, as if all heads shared one key ("absorbed" matrices;
DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A rotation between the two products would have to be undone for each pair of positions. So positions have features of
their own: P in each head's query, and one key of P features for all heads, which is cached with the latent.

Further letters: R features of the latent; in each head U features without positions and P with positions, H = U + P;
W features of its values. Unlike DeepSeek's published weights, feature i of P is rotated with i + P/2, as everywhere in
this package.

Chapters: 17.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from minitext.config.model import MLAConfig, ModelConfig
from minitext.kernels.attention.xla import MASKED
from minitext.models.attention import Counts, append_tokens, attend, project_out
from minitext.models.layers import Linear, RMSNorm
from minitext.models.paged import PagedLatentCache, page_dtype
from minitext.models.rope import logits_factor, rope
from minitext.sharding.rules import ShardingRules, flatten_tokens, unflatten_tokens


class LatentCache(NamedTuple):
    """Latents and rotated keys of tokens: R + P numbers for each token and layer; used like `KVCache`.

    Attributes:
      latent: [L, B, S, R], normalised; for one layer [B, S, R]; for layers in a list a tuple of L of these.
      rope_key: [L, B, S, P], rotated, in the same form.
      length: the number of tokens stored; [B] if rows differ.
    """

    latent: Any
    rope_key: Any
    length: jax.Array | int

    append = append_tokens


class MLA(nnx.Module):
    """Causal self-attention whose heads make their keys and values from one latent (DeepSeek-AI 2024)."""

    def __init__(self, cfg: ModelConfig, *, rules: ShardingRules, rngs: nnx.Rngs):
        assert isinstance(cfg.attention, MLAConfig)
        a, D, N = cfg.attention, cfg.embed, cfg.heads

        def linear(inputs: int, outputs: int, axes: tuple[str, str], **more: Any) -> Linear:
            return Linear(inputs, outputs, axes, key=rngs.params(), rules=rules, **more)

        # A matrix with latents as its rows calls them `embed`, since fsdp splits these for storage only.
        if a.q_rank is not None:
            self.q_down = linear(D, a.q_rank, ("embed", "rank"))
            self.q_norm = RMSNorm(a.q_rank, eps=a.latent_eps, rules=rules)
        self.q = linear(a.q_rank or D, N * (a.nope_dim + a.rope_dim), ("embed", "heads"))
        self.kv_down = linear(D, a.kv_rank + a.rope_dim, ("embed", "rank"))
        self.kv_norm = RMSNorm(a.kv_rank, eps=a.latent_eps, rules=rules)
        self.k_up = linear(a.kv_rank, N * a.nope_dim, ("embed", "heads"), heads=N)
        self.v_up = linear(a.kv_rank, N * a.v_dim, ("embed", "heads"), heads=N)
        self.o = linear(N * a.v_dim, D, ("heads", "embed"), scale=(2 * cfg.layers) ** -0.5)
        self.cfg, self.widths, self.rules = cfg, a, rules

    @staticmethod
    def count(cfg: ModelConfig) -> Counts:
        """Counts training's parameters and products: each head has a key of U + P features and a value of W."""
        a: Any = cfg.attention
        D, N, R, U, P, W = cfg.embed, cfg.heads, a.kv_rank, a.nope_dim, a.rope_dim, a.v_dim
        q_rank, keys, values = a.q_rank or 0, N * (U + P), N * W
        split = keys * (q_rank or D) + R * (N * U + values) + values * D
        latents = q_rank + R + P
        return Counts(
            split, D * latents, q_rank + R, 2 * (keys + values), keys, keys, values, values, latents
        )

    @staticmethod
    def make_cache(
        cfg: ModelConfig, layers: int, batch: int, length: int, rules: ShardingRules
    ) -> LatentCache:
        """Returns an empty cache for `length` tokens of each of `batch` rows in some layers, in the compute type."""

        def empty(width: int) -> jax.Array:
            zeros = jnp.zeros((layers, batch, length, width), cfg.dtype)
            return rules.shard(zeros, "layers", "batch", None, "rank")

        a: Any = cfg.attention
        return LatentCache(empty(a.kv_rank), empty(a.rope_dim), jnp.zeros((), jnp.int32))

    @staticmethod
    def make_pages(
        cfg: ModelConfig,
        pages: int,
        tokens: int,
        slots: int,
        rules: ShardingRules,
        cache_dtype: str,
    ) -> PagedLatentCache:
        """Returns one layer's empty cache of so many pages of so many tokens."""

        def empty(width: int) -> jax.Array:
            zeros = jnp.zeros((pages, tokens, width), page_dtype(cache_dtype, cfg.dtype))
            return rules.shard(zeros, None, None, "rank")

        scales = None
        if cache_dtype != "auto":
            scales = rules.shard(jnp.zeros((pages, 2, tokens), jnp.float32), None, None, None)
        a: Any = cfg.attention
        return PagedLatentCache(empty(a.kv_rank), empty(a.rope_dim), scales, None)

    @jax.named_scope("attention")
    def __call__(
        self,
        x_XD: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        cache: LatentCache | PagedLatentCache | None = None,
    ) -> tuple[jax.Array, LatentCache | PagedLatentCache]:
        """Attends with the arguments and results of `GQA.__call__`, and another kind of cache."""
        queries_X, latent_BTR, key_BTP = self._compress(x_XD, positions_BT)
        q_BTNH = self._queries(queries_X, positions_BT)
        new: Any = None
        earlier: Any = cache
        if isinstance(cache, PagedLatentCache):
            new, latent_BTR, key_BTP = cache.write(latent_BTR, key_BTP)
            earlier = LatentCache(*new.earlier(x_XD.dtype))
        now = LatentCache(latent_BTR, key_BTP, positions_BT.shape[1])
        new = now if new is None else new
        if earlier is None or not earlier.latent.shape[1]:  # there are no earlier tokens
            k_BTNH, v_BTNW = self._keys_and_values(latent_BTR, key_BTP)
            q_BTNH, k_BTNH, v_BTNW = checkpoint_name((q_BTNH, k_BTNH, v_BTNW), "qkv")
            out_BTNW = attend(q_BTNH, k_BTNH, v_BTNW, segment_ids_BT, self.cfg, self.rules)
        else:
            texts = segment_ids_BT if isinstance(cache, PagedLatentCache) else None
            out_BTNW = self._attend_to_latents(q_BTNH, earlier, now, texts)
        return project_out(out_BTNW, self.o, self.rules), new

    def _compress(self, x_XD, positions_BT) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the input of the queries, the normalised latent [B, T, R], and the rotated key [B, T, P]."""
        a, rules = self.widths, self.rules
        queries = x_XD if a.q_rank is None else self.q_down(x_XD, "rank")
        both = self.kv_down(x_XD, "rank")
        if a.q_rank is None:
            both = checkpoint_name(both, "latents")
        else:
            queries, both = checkpoint_name((queries, both), "latents")
            queries = self.q_norm(queries)
        sizes = (a.kv_rank + a.rope_dim,)
        both = unflatten_tokens(both, positions_BT.shape[0], "rank", sizes=sizes, rules=rules)
        latent_BTR, key_BTP = jnp.split(both, [a.kv_rank], axis=-1)
        key_BT1P = rope(key_BTP[:, :, None], positions_BT, self.cfg.rope)
        return queries, self.kv_norm(latent_BTR), key_BT1P[:, :, 0]

    def _queries(self, x, positions_BT: jax.Array) -> jax.Array:
        """Returns queries [B, T, N, U + P], the last P features rotated."""
        q_BTNH = self._by_head(self.q(x, "heads"), positions_BT.shape[0], self.cfg.heads)
        q_BTNU, q_BTNP = jnp.split(q_BTNH, [self.widths.nope_dim], axis=-1)
        if (factor := logits_factor(self.cfg.rope)) != 1.0:
            q_BTNU = (q_BTNU * factor).astype(q_BTNU.dtype)
        q_BTNP = rope(q_BTNP, positions_BT, self.cfg.rope, scale=factor)
        return jnp.concatenate([q_BTNU, q_BTNP], axis=-1)

    def _keys_and_values(self, latent_BTR, key_BTP) -> tuple[jax.Array, jax.Array]:
        """Returns keys [B, T, N, U + P], with the last P features equal in all heads, and values [B, T, N, W]."""
        rules, (B, T, P), N = self.rules, key_BTP.shape, self.cfg.heads
        latent_XR = flatten_tokens(latent_BTR, rules, "rank")
        k_BTNU = self._by_head(self.k_up(latent_XR, "heads"), B, N)
        v_BTNW = self._by_head(self.v_up(latent_XR, "heads"), B, N)
        # Every device has the key already and broadcasts it to its own heads; the gradient is summed over heads.
        where = rules.out("batch", "seq", "heads", "head_dim")
        key_BTNP = jnp.broadcast_to(key_BTP[:, :, None], (B, T, N, P), out_sharding=where)
        return jnp.concatenate([k_BTNU, key_BTNP], axis=-1), v_BTNW

    def _by_head(self, x, batch: int, heads: int) -> jax.Array:
        sizes = heads, x.shape[-1] // heads
        return unflatten_tokens(x, batch, "heads", "head_dim", sizes=sizes, rules=self.rules)

    def _attend_to_latents(
        self, q_BTNH, cache: LatentCache, new: LatentCache, segment_ids_BT: jax.Array | None
    ) -> jax.Array:
        """Returns the heads' outputs [B, T, N, W] for T tokens after the cached ones, reading the cache in place.

        Tokens of several segments all follow the cached ones, and don't see each other.
        """
        a, T, S = self.widths, q_BTNH.shape[1], cache.latent.shape[1]
        q_BTNU, q_BTNP = jnp.split(q_BTNH, [a.nope_dim], axis=-1)
        k_up_NRU, v_up_NRW = (w.by_head().astype(q_BTNH.dtype) for w in (self.k_up, self.v_up))
        q_BNTR = jnp.einsum("BTNU,NRU->BNTR", q_BTNU, k_up_NRU)
        q_BNTP = jnp.swapaxes(q_BTNP, 1, 2)

        def logits(kept: LatentCache) -> jax.Array:
            # The cache is the first factor, since XLA's CPU backend makes a transposed copy of the second.
            wide = {"preferred_element_type": jnp.float32}
            content = jnp.einsum("BSR,BNTR->BSNT", kept.latent, q_BNTR, **wide)
            position = jnp.einsum("BSP,BNTP->BSNT", kept.rope_key, q_BNTP, **wide)
            return jnp.moveaxis(content + position, 1, 3)

        both = jnp.concatenate([logits(cache), logits(new)], axis=-1)
        both = both / math.sqrt(a.nope_dim + a.rope_dim)
        # One length for all rows, or one for each.
        filled_B1S = jnp.arange(S) < jnp.reshape(cache.length, (-1, 1, 1))
        rows = filled_B1S.shape[0]
        filled_BTS = jnp.broadcast_to(filled_B1S, (rows, T, S))
        new_BTT = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (rows, T, T))
        if segment_ids_BT is not None:
            new_BTT &= segment_ids_BT[:, :, None] == segment_ids_BT[:, None]
        mask_B1TS = jnp.concatenate([filled_BTS, new_BTT], axis=-1)[:, None]
        probs = jax.nn.softmax(jnp.where(mask_B1TS, both, MASKED), axis=-1).astype(q_BTNH.dtype)
        mixed_BNTR = jnp.einsum("BNTS,BSR->BNTR", probs[..., :S], cache.latent)
        mixed_BNTR += jnp.einsum("BNTS,BSR->BNTR", probs[..., S:], new.latent)
        return jnp.einsum("BNTR,NRW->BTNW", mixed_BNTR, v_up_NRW)
