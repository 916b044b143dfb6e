"""The decoder-only transformer.

Layers are stacked: every layer parameter has a leading dimension L. The stack can be scanned (one layer is compiled) or
unrolled (the compiler sees all layers) and reads the same checkpoints either way. Generation splits the stack into a
list (`unstack_layers`), because slicing a stack makes a copy as expensive as the product that reads it.

Chapters: 4, 14.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from minitext.config.model import GQAConfig, MLAConfig, ModelConfig, MoEConfig, SwiGLUConfig
from minitext.config.section import Section
from minitext.config.sections import PipelineConfig
from minitext.models.attention import GQA, KVCache
from minitext.models.ffn import SwiGLU
from minitext.models.layers import Embedding, Linear, RMSNorm
from minitext.models.mla import MLA, LatentCache
from minitext.models.moe import MoE, Routing
from minitext.sharding.context_parallel import zigzag
from minitext.sharding.pipeline import pipelined
from minitext.sharding.rules import RULES, ShardingRules, flatten_tokens, unflatten_tokens

# A new variant needs a config, a class and a row here.
VARIANTS: dict[type[Section], Any] = {
    GQAConfig: GQA,
    MLAConfig: MLA,
    SwiGLUConfig: SwiGLU,
    MoEConfig: MoE,
}

Cache = KVCache | LatentCache


def remat(layer: Callable, cfg: ModelConfig) -> Callable:
    """Returns the layer with the rematerialisation that `model.remat` asks for."""
    if cfg.remat == "none":
        return layer
    # JAX's policies for products don't see inside a custom_vjp (`Linear`), but its policies for names do.
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*cfg.saved))


class Block(nnx.Module):
    """One decoder layer: attention and feed-forward, each with a norm before it and added to the residual stream."""

    def __init__(self, cfg: ModelConfig, *, rules: ShardingRules, rngs: nnx.Rngs):
        self.norm_attention = RMSNorm(cfg.embed, eps=cfg.norm_eps, rules=rules)
        self.attention = VARIANTS[type(cfg.attention)](cfg, rules=rules, rngs=rngs)
        self.norm_ffn = RMSNorm(cfg.embed, eps=cfg.norm_eps, rules=rules)
        self.ffn = VARIANTS[type(cfg.ffn)](cfg, rules=rules, rngs=rngs)

    def __call__(
        self,
        x_XD: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache, Routing | None]:
        """Returns the residual stream [B*T, D] after the layer, a cache of these tokens, and the experts' routing."""
        mixed, new = self.attention(self.norm_attention(x_XD), positions_BT, segment_ids_BT, cache)
        x_XD = x_XD + mixed
        y_XD, routing = self.ffn.routed(self.norm_ffn(x_XD), positions_BT.shape[0])
        return x_XD + y_XD, new, routing


class Transformer(nnx.Module):
    """A decoder-only transformer (Vaswani et al. 2017), by default with RMSNorm, RoPE, GQA and SwiGLU as in Llama.

    Args:
      cfg: sizes and numerics.
      rules: sharding rules; they matter only if a mesh is set.
      pipeline: the pipeline's schedule; it matters only if the mesh splits the layers.
      rngs: `nnx.Rngs(seed)`; draws the parameters.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        rules: ShardingRules = RULES["all"],
        pipeline: PipelineConfig | None = None,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.rules, self.pipeline = cfg, rules, pipeline or PipelineConfig()
        self.embed = Embedding(cfg.vocab, cfg.embed, key=rngs.params(), rules=rules)
        stacked = nnx.vmap(lambda r: Block(cfg, rules=rules, rngs=r))
        # Each device draws only the layers that it keeps.
        each = jax.tree.map(lambda keys: rules.shard(keys, "layers"), rngs.split(cfg.layers))
        self.blocks: Any = stacked(each)  # or an nnx.List, made by unstack_layers
        self.norm = RMSNorm(cfg.embed, eps=cfg.norm_eps, rules=rules)
        if not cfg.tie_embeddings:
            # Small initial logits: to an untrained model all V tokens should be about equally likely, ln(V) nats.
            self.unembed = Linear(
                cfg.embed, cfg.vocab, ("embed", "vocab"),
                key=rngs.params(), rules=rules, scale=cfg.embed**-0.5,
            )  # fmt: skip

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """Returns the logits of the next token at every position.

        Args:
          tokens_BT: [B, T] integers below V.
          positions_BT: [B, T]; by default 0 .. T-1, or the positions that follow the cache's.
          segment_ids_BT: [B, T] documents packed into a row, which don't see each other; 0 is padding.
          cache: a cache of the earlier tokens from `make_cache`; for the first tokens its length may be 0.

        Returns:
          Logits [B, T, V] in float32; with a cache, (logits, a cache of the T tokens for `append`).
        """
        x_BTD, new, _ = self.hidden(tokens_BT, positions_BT, segment_ids_BT, cache)
        logits_BTV = self.logits(x_BTD)
        return logits_BTV if cache is None else (logits_BTV, new)

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None, Routing | None]:
        """Returns the normalised input of the output layer [B, T, D], for the arguments of `__call__`.

        Also returns a cache of these tokens if there is a cache, and the experts' routing, stacked over layers.
        """
        rules = self.rules
        B, T = tokens_BT.shape
        if positions_BT is None:
            start = 0 if cache is None else cache.length
            positions_BT = jnp.broadcast_to(jnp.arange(T) + start, (B, T))
            positions_BT = rules.shard(positions_BT, "batch", "seq")
        arrays: Any = tokens_BT, positions_BT, segment_ids_BT
        tokens_BT, positions_BT, segment_ids_BT = self.order_tokens(arrays)
        x_XD = self.embed_tokens(tokens_BT)
        if cache is None and rules.splits("layers"):
            graphdef, params = nnx.split(self.blocks)

            def layers(params, x_XD, seen):
                return self.apply_layers(nnx.merge(graphdef, params), x_XD, *seen)[0]

            seen: Any = positions_BT, segment_ids_BT
            x_XD = pipelined(layers, params, x_XD, seen, cfg=self.pipeline, rules=rules)
            return self.final_norm(x_XD, B), None, None
        x_XD, new, routing = self.apply_layers(
            self.blocks, x_XD, positions_BT, segment_ids_BT, cache
        )
        return self.final_norm(x_XD, B), new, routing

    @property
    def _ring(self) -> bool:
        return self.rules.splits("seq") and self.cfg.attention.context == "ring"

    def order_tokens(self, arrays: Any) -> Any:
        """Reorders arrays [B, T] of tokens, positions and so on to the token order that the layers use."""
        order = partial(zigzag, rules=self.rules)
        return jax.tree.map(lambda x: order(x, "batch", "seq"), arrays) if self._ring else arrays

    def embed_tokens(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the residual stream before the first layer, [B*T, D], for tokens in the layers' order."""
        return flatten_tokens(self.embed(tokens_BT, jnp.dtype(self.cfg.dtype)), self.rules)

    def final_norm(self, x_XD: jax.Array, batch: int) -> jax.Array:
        """Maps the residual stream after the last layer to the input of the output layer, [B, T, D]."""
        if self._ring:
            x_XD = zigzag(x_XD, "batch", "residual", "act", rules=self.rules, back=True)
        shape = (batch, x_XD.size // batch // self.cfg.embed, self.cfg.embed)
        where = self.rules.out("batch", "residual", "act")
        return jax.lax.reshape(self.norm(x_XD), shape, out_sharding=where)

    def output_weight(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the output layer's weight [D, V] in `dtype`, split at most by vocabulary."""
        if self.cfg.tie_embeddings:
            return self.embed.gathered(dtype).T / self.cfg.embed**0.5
        return self.unembed.gathered(dtype)

    @jax.named_scope("logits")
    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V] of hidden states [B, T, D], in float32."""
        cfg, rules = self.cfg, self.rules
        x_XD = flatten_tokens(x_BTD, rules)
        logits_XV = self.embed.attend(x_XD) if cfg.tie_embeddings else self.unembed(x_XD, "vocab")
        # Softmax follows, and bfloat16 logits would lose more accuracy than their memory is worth.
        return unflatten_tokens(
            logits_XV.astype(jnp.float32), len(x_BTD), "vocab", sizes=(cfg.vocab,), rules=rules
        )

    def apply_layers(
        self, blocks: Any, x_XD, positions_BT, segment_ids_BT, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None, Routing | None]:
        """Runs layers: a list one by one, a stack scanned or unrolled.

        Returns x, a cache of these tokens if there is a cache, and the experts' stacked routing (not for a list).
        """
        kept: Any = None if cache is None else cache[:-1]  # all but its length

        def run(block: Any, x, kept: Any):
            """Runs one layer with its part of the cache, and returns the new tokens' part too."""
            one = None if cache is None else cache._make((*kept, cache.length))
            x, new, routing = block(x, positions_BT, segment_ids_BT, one)
            return x, (None if cache is None else new[:-1], routing)

        def together(news: Any) -> Any:
            return None if cache is None else cache._make((*news, positions_BT.shape[1]))

        if isinstance(blocks, nnx.List):
            news = []
            for block, *one in zip(blocks, *kept, strict=True):
                x_XD, (new, _) = run(block, x_XD, one)
                news.append(new)
            return x_XD, together(zip(*news, strict=True)), None
        graphdef, params = nnx.split(blocks)

        def layer(x, inputs):
            params_l, kept_l = inputs
            return run(nnx.merge(graphdef, params_l), x, kept_l)

        layer = remat(layer, self.cfg)
        x_XD, (new, routing) = _run_stack(layer, x_XD, (params, kept), self.cfg.scan_layers)
        return x_XD, together(new), routing


def make_cache(
    cfg: ModelConfig, batch: int, length: int, rules: ShardingRules = RULES["all"]
) -> Cache:
    """Returns an empty cache for `length` tokens of each of `batch` rows, as the model's attention needs it."""
    return VARIANTS[type(cfg.attention)].make_cache(cfg, batch, length, rules)


def _run_stack(layer, carry, inputs: Any, scan: bool) -> Any:
    """Runs `layer(carry, one layer's inputs) -> (carry, output)` over the leading dimension L, like `jax.lax.scan`."""
    if scan:
        return jax.lax.scan(layer, carry, inputs)
    # unstack's gradient is one stack; indexing's would be a sum of L stacks that are zero except in one layer.
    leaves, treedef = jax.tree.flatten(inputs)
    outputs = []
    for slices in zip(*(jnp.unstack(leaf) for leaf in leaves), strict=True):
        carry, output = layer(carry, jax.tree.unflatten(treedef, slices))
        outputs.append(output)
    return carry, jax.tree.map(lambda *xs: jnp.stack(xs), *outputs)
