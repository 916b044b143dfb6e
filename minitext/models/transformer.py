"""The decoder-only transformer.

Layers are stacked: every layer parameter has a leading dimension L. The stack can be scanned (one layer is compiled) or
unrolled (the compiler sees all layers) and reads the same checkpoints either way. Generation splits the stack into a
list (`unstack_layers`), because slicing a stack makes a copy as expensive as the product that reads it.

Layers may differ in a repeating pattern, such as five that see a window and one that sees everything. Each place in the
period then has a stack of its own, and one scan runs over the periods (`ModelConfig.stacks`).

Chapters: 4, 14, 23.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from minitext.config.model import (
    DeltaNetConfig,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    Stack,
    SwiGLUConfig,
)
from minitext.config.section import Section
from minitext.config.sections import PipelineConfig
from minitext.errors import UserError
from minitext.kernels.per_device import on_each_device
from minitext.models.attention import GQA, KVCache
from minitext.models.deltanet import DeltaNet, StateCache
from minitext.models.ffn import SwiGLU
from minitext.models.layers import Embedding, Linear, RMSNorm, is_qwixed, keys_of
from minitext.models.lora import apply_lora
from minitext.models.mla import MLA, LatentCache
from minitext.models.moe import MoE, Routing
from minitext.models.paged import Paging
from minitext.models.quantization import apply_rules
from minitext.models.quantized_storage import apply_storage
from minitext.sharding.context_parallel import zigzag
from minitext.sharding.pipeline import pipelined
from minitext.sharding.rules import RULES, ShardingRules, flatten_tokens, unflatten_tokens

# A new variant needs a config, a class and a row here.
VARIANTS: dict[type[Section], Any] = {
    GQAConfig: GQA,
    MLAConfig: MLA,
    DeltaNetConfig: DeltaNet,
    SwiGLUConfig: SwiGLU,
    MoEConfig: MoE,
}

LayerCache = KVCache | LatentCache | StateCache


class PatternCache(NamedTuple):
    """The caches of a model whose layers differ.

    Attributes:
      parts: for each of `ModelConfig.stacks`, and in it for each place in the period, a cache of its layers, whose own
        length doesn't count.
      length: the number of tokens stored; of caches in pages, the tokens that a program adds (`Paging`).
    """

    parts: tuple[tuple[LayerCache, ...], ...]
    length: jax.Array | int

    def append(self, new: "PatternCache") -> "PatternCache":
        """Returns a cache with the tokens of another one appended after its first `length` tokens."""
        parts = tuple(
            tuple(
                old._replace(length=self.length).append(late)
                for old, late in zip(*both, strict=True)
            )
            for both in zip(self.parts, new.parts, strict=True)
        )
        return PatternCache(parts, self.length + new.length)


Cache = LayerCache | PatternCache


def remat(layer: Callable, cfg: ModelConfig) -> Callable:
    """Returns the layer with the rematerialisation that `model.remat` asks for."""
    if cfg.remat == "none":
        return layer
    # By name, since JAX's policies for products don't see inside a custom_vjp, which `Linear` is on a mesh.
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*cfg.saved))


def one_at_a_time(layer: Callable) -> Callable:
    """Makes the backward pass of a rematerialised layer wait for that of the next, and finish before it goes on.

    What a layer recomputes depends on its input alone, and nobody waits for its weights' gradients. So where several
    layers stand in one loop, the TPU compiler, which drops barriers before it orders operations, recomputes them early
    and multiplies late, and holds what several layers make. Here the layer's input depends on the gradient that comes
    in, and the gradient that goes out on those of the weights. Values do not change.

    Args:
      layer: maps (x, inputs) to (x, output).
    """

    @jax.custom_vjp
    def run(x, inputs):
        return layer(x, inputs)

    def forward(x, inputs):
        return jax.vjp(layer, x, inputs)

    def backward(transposed, grads):
        leaves, treedef = jax.tree.flatten(transposed)
        like = jax.typeof(grads[0])
        leaves = [after(leaf, grads[:1]) if jax.typeof(leaf) == like else leaf for leaf in leaves]
        grad_x, rest = jax.tree.unflatten(treedef, leaves)(grads)
        whole = [g for g in jax.tree.leaves(rest) if jnp.issubdtype(g.dtype, jnp.inexact)]
        return after(grad_x, whole), rest

    run.defvjp(forward, backward)
    return run


def after(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Returns x, which no compiler can compute before other arrays are there; NaN if one of them begins with NaN."""

    def here(x, *others):
        # The part of each that a device has: nothing is sent.
        firsts = [y[(0,) * y.ndim].astype(jnp.float32) for y in others]
        return jnp.where(jnp.isnan(sum(firsts)), jnp.nan, x).astype(x.dtype)

    return on_each_device(here, x, *others)


class Block(nnx.Module):
    """One decoder layer: attention and feed-forward, each added to the residual stream.

    The input of each, or its output, or both are normalised (`model.norms`).
    """

    def __init__(self, cfg: ModelConfig, *, rules: ShardingRules, rngs: nnx.Rngs):
        norm = partial(RMSNorm, cfg.embed, eps=cfg.norm_eps, rules=rules, offset=cfg.norm_offset)
        self.before, self.after = cfg.norms != "after", cfg.norms != "before"
        if self.before:
            self.norm_attention, self.norm_ffn = norm(), norm()
        if self.after:
            self.norm_attention_out, self.norm_ffn_out = norm(), norm()
        self.attention = VARIANTS[type(cfg.attention)](cfg, rules=rules, rngs=rngs)
        self.ffn = VARIANTS[type(cfg.ffn)](cfg, rules=rules, rngs=rngs)
        self.scale = cfg.residual_scale

    def __call__(
        self,
        x_XD: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache, Routing | None]:
        """Returns the residual stream [B*T, D] after the layer, a cache of these tokens, and the experts' routing."""
        into = self.norm_attention(x_XD) if self.before else x_XD
        mixed, new = self.attention(into, positions_BT, segment_ids_BT, cache)
        x_XD = x_XD + self._scaled(self.norm_attention_out(mixed) if self.after else mixed)
        into = self.norm_ffn(x_XD) if self.before else x_XD
        y_XD, routing = self.ffn.routed(into, positions_BT.shape[0])
        y_XD = self._scaled(self.norm_ffn_out(y_XD) if self.after else y_XD)
        return x_XD + y_XD, new, routing

    def _scaled(self, y_XD: jax.Array) -> jax.Array:
        """Multiplies what is added to the residual stream by `model.residual_scale`."""
        return y_XD if self.scale is None else y_XD * jnp.asarray(self.scale, y_XD.dtype)


class Period(nnx.Module):
    """The stacks of layers that repeat together: the first layer of every period, the second of every period, ..."""

    def __init__(self, layers: Sequence[Any]):
        self.layers = nnx.List(layers)


def places(blocks: Any) -> Sequence[Any]:
    """Returns the stack of each place in the period: those of a `Period`, or the one stack of equal layers."""
    return blocks.layers if isinstance(blocks, Period) else (blocks,)


class Lift:
    """Takes the layers of a stack one by one, and what a layer's call changes in the layer back to the stack.

    Our own layers change nothing. Qwix does: in a model's first call it puts quantized weights or adapters in the
    modules, and later it may keep statistics there.
    """

    def __init__(self, stack: Any):
        if getattr(stack, "qwix_rngs", None) is not None:  # Qwix draws each layer's adapters
            count = len(jax.tree.leaves(nnx.state(stack, nnx.Param))[0])
            stack.set_attributes(qwix_rngs=stack.qwix_rngs.split(count))
        self.stack = stack
        self.graphdef, self.params = nnx.split(stack)

    def layer(self, run: Callable) -> Callable:
        """Returns (x, (one layer's parameters, more)) -> (x, (output, changes)) of `run(layer, x, more)`."""

        def one(x, inputs):
            params, more = inputs
            # Copied, since statistics are dicts, which Qwix changes.
            layer = nnx.merge(self.graphdef, jax.tree.map(lambda leaf: leaf, params))
            x, output = run(layer, x, more)
            return x, (output, self.changes(layer, params))

        return one

    def changes(self, layer: Any, params: Any) -> dict[tuple[Any, ...], Any]:
        """Returns the variables that a call of the layer made or changed, by path."""
        self.called, after = nnx.split(layer)
        before, after = (dict(nnx.to_flat_state(state)) for state in (params, after))

        def same(path: tuple[Any, ...], variable: Any) -> bool:
            old = jax.tree.leaves(before.get(path))
            return [id(x) for x in old] == [id(x) for x in jax.tree.leaves(variable)]

        changed = {path: x for path, x in after.items() if not same(path, x)}
        self.unchanged = after.keys() - changed.keys()
        return changed

    def apply(self, changes: dict[tuple[Any, ...], Any]) -> None:
        """Gives the stack what its layers' calls have changed, stacked."""
        if not changes and self.called == self.graphdef:
            return
        before = dict(nnx.to_flat_state(self.params))
        state = {path: before[path] for path in self.unchanged} | changes
        for name, child in vars(nnx.merge(self.called, nnx.from_flat_state(state))).items():
            setattr(self.stack, name, child)


class Transformer(nnx.Module):
    """A decoder-only transformer (Vaswani et al. 2017), by default with RMSNorm, RoPE, GQA and SwiGLU as in Llama.

    Args:
      cfg: sizes and numerics.
      rules: sharding rules; they matter only if a mesh is set.
      pipeline: the pipeline's schedule; it matters only if the mesh splits the layers.
      rngs: `nnx.Rngs(seed)`; draws the parameters.

    Attributes:
      blocks: the stack of layers, or a `Period` of stacks; `unstack_layers` makes lists of them. `prefix` and `suffix`
        are like it, where `ModelConfig.stacks` has them.
    """

    blocks: Any
    embed: Any

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
        for name, stack in cfg.stacks.items():
            setattr(self, name, self._draw(stack, rngs))
        self.norm = RMSNorm(cfg.embed, eps=cfg.norm_eps, rules=rules, offset=cfg.norm_offset)
        if not cfg.tie_embeddings:
            # Small initial logits: to an untrained model all V tokens should be about equally likely, ln(V) nats.
            self.unembed = Linear(
                cfg.embed, cfg.vocab, ("embed", "vocab"),
                key=rngs.params(), rules=rules, scale=cfg.embed**-0.5,
            )  # fmt: skip
        if cfg.value_head:  # it expects nothing at first
            self.value = Linear(
                cfg.embed, 1, ("embed", "one"), key=rngs.params(), rules=rules, scale=0.0, bias=True
            )
        modules = list(nnx.iter_modules(self))
        # Without tied embeddings the table is only looked up.
        apply_rules(
            [(path, m) for path, m in modules if cfg.tie_embeddings or m is not self.embed],
            cfg.quantization,
        )
        apply_lora(modules, cfg.lora, rngs)
        apply_storage(modules, cfg.storage)

    def _draw(self, stack: Stack, rngs: nnx.Rngs) -> Any:
        """Returns a stack of layers, or a `Period` of stacks if the layers of a repetition differ."""

        def draw(layer: ModelConfig) -> Any:
            stacked = nnx.vmap(lambda r: Block(layer, rules=self.rules, rngs=keys_of(r)))
            # Each device draws only the layers that it keeps.
            keys = rngs.split(stack.repeats)
            return stacked(jax.tree.map(lambda keys: self.rules.shard(keys, "layers"), keys))

        drawn = [draw(layer) for layer in stack.layers]
        return (
            Period(drawn)
            if len(self.cfg.period) > 1 and stack is not self.cfg.stacks.get("prefix")
            else drawn[0]
        )

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
        parts, news, routings = _parts(cache), [], []
        for number, name in enumerate(self.cfg.stacks):
            old = None if parts is None else parts[number]
            x_XD, new, routing = self.apply_layers(
                getattr(self, name), x_XD, positions_BT, segment_ids_BT, old
            )
            news.append(new)
            routings += [] if routing is None else [routing]
        new = None
        if cache is not None:
            whole = isinstance(cache, PatternCache)
            new = PatternCache(tuple(news), T) if whole else news[0][0]
        return self.final_norm(x_XD, B), new, _joined(routings)

    @property
    def _ring(self) -> bool:
        return self.rules.splits("seq") and self.cfg.attention.context == "ring"

    def order_tokens(self, arrays: Any) -> Any:
        """Reorders arrays [B, T] of tokens, positions and so on to the token order that the layers use."""
        order = partial(zigzag, rules=self.rules)
        return jax.tree.map(lambda x: order(x, "batch", "seq"), arrays) if self._ring else arrays

    def embed_tokens(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the residual stream before the first layer, [B*T, D], for tokens in the layers' order."""
        x_BTD = self.embed(tokens_BT, jnp.dtype(self.cfg.dtype))
        if self.cfg.embed_scale is not None:
            x_BTD = x_BTD * jnp.asarray(self.cfg.embed_scale, x_BTD.dtype)
        return flatten_tokens(x_BTD, self.rules)

    def final_norm(self, x_XD: jax.Array, batch: int) -> jax.Array:
        """Maps the residual stream after the last layer to the input of the output layer, [B, T, D]."""
        if self._ring:
            x_XD = zigzag(x_XD, "batch", "residual", "act", rules=self.rules, back=True)
        shape = (batch, x_XD.size // batch // self.cfg.embed, self.cfg.embed)
        where = self.rules.out("batch", "residual", "act")
        return jax.lax.reshape(self.norm(x_XD), shape, out_sharding=where)

    def output_weight(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the output layer's weight [D, V] in `dtype`, split at most by vocabulary, for a loss of its own.

        Raises:
          UserError: if the output layer is quantized.
        """
        tied = self.cfg.tie_embeddings
        name, layer = ("embed", self.embed) if tied else ("unembed", self.unembed)
        if layer.quantization is not None:
            raise UserError(
                f"model.quantization names {name}, and a train.loss_impl of its own multiplies without quantization: "
                f"set train.loss_impl=xla, or exempt {name} by an earlier rule with dtype=none"
            )
        return self._scaled(self.embed.gathered(dtype).T if tied else self.unembed.gathered(dtype))

    def _scaled(self, x: jax.Array) -> jax.Array:
        """Multiplies logits, or the weight that makes them, by `model.logit_scale`."""
        cfg = self.cfg
        if cfg.logit_scale is not None:
            return x if cfg.logit_scale == 1 else x * jnp.asarray(cfg.logit_scale, x.dtype)
        return x / cfg.embed**0.5 if cfg.tie_embeddings else x

    @jax.named_scope("logits")
    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V] of hidden states [B, T, D], in float32."""
        cfg, rules = self.cfg, self.rules
        x_XD = flatten_tokens(x_BTD, rules)
        logits_XV = self.embed.attend(x_XD) if cfg.tie_embeddings else self.unembed(x_XD, "vocab")
        # Softmax follows, and bfloat16 logits would lose more accuracy than their memory is worth.
        logits_XV = self._scaled(logits_XV).astype(jnp.float32)
        if cfg.logit_softcap is not None:
            logits_XV = cfg.logit_softcap * jnp.tanh(logits_XV / cfg.logit_softcap)
        return unflatten_tokens(logits_XV, x_BTD.shape[0], "vocab", sizes=(cfg.vocab,), rules=rules)

    def values(self, x_BTD: jax.Array) -> jax.Array:
        """Returns what the value head expects at every hidden state [B, T, D], as [B, T] float32."""
        x_XD = flatten_tokens(x_BTD, self.rules).astype(jnp.float32)
        return unflatten_tokens(
            self.value(x_XD)[..., 0], x_BTD.shape[0], sizes=(), rules=self.rules
        )

    def apply_layers(
        self,
        blocks: Any,
        x_XD,
        positions_BT,
        segment_ids_BT,
        caches: Sequence[LayerCache] | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None, Routing | None]:
        """Runs a stack of layers, or a period of stacks: lists of layers one by one, stacks scanned or unrolled.

        Args:
          blocks: the stack, or a `Period`.
          x_XD: residual stream.
          positions_BT: as in `Block`.
          segment_ids_BT: as in `Block`.
          caches: the layers' caches of earlier tokens, for each place in the period.

        Returns:
          x, caches of these tokens if there are caches, and the experts' stacked routing (not for lists).
        """
        stacks = places(blocks)
        # All but their lengths, which no layer has for itself.
        kept: Any = [None] * len(stacks) if caches is None else [cache[:-1] for cache in caches]

        def run(place: int, block: Any, x, kept: Any):
            """Runs one layer with its part of the cache, and returns the new tokens' part too."""
            one = None if caches is None else caches[place]._make((*kept, caches[place][-1]))
            x, new, routing = block(x, positions_BT, segment_ids_BT, one)
            return x, (None if caches is None else new[:-1], routing)

        def together(news: Any) -> Any:
            if caches is None:
                return None
            T = positions_BT.shape[1]
            return tuple(c._make((*new, T)) for c, new in zip(caches, news, strict=True))

        if isinstance(stacks[0], nnx.List):
            lists: list[Any] = [[] for _ in stacks]
            for number in range(len(stacks[0])):
                for place, stack in enumerate(stacks):
                    one = None if caches is None else [x[number] for x in kept[place]]
                    x_XD, (new, _) = run(place, stack[number], x_XD, one)
                    lists[place].append(new)
            news = None if caches is None else [tuple(zip(*each, strict=True)) for each in lists]
            return x_XD, together(news), None
        lifts = [Lift(stack) for stack in stacks]

        def layer(place: int):
            one = remat(lifts[place].layer(partial(run, place)), self.cfg)
            if is_qwixed(stacks[place]):
                one = jax.jit(one)  # Qwix finds out which arrays are weights by how they are traced
            alone = len(stacks) == 1 or self.cfg.remat == "none" or self.rules.splits("layers")
            return one if alone else one_at_a_time(one)

        layers = [layer(place) for place in range(len(stacks))]

        def period(x, inputs):
            outputs = []
            for one, its in zip(layers, inputs, strict=True):
                x, output = one(x, its)
                outputs.append(output)
            return x, outputs

        inputs = [(lift.params, old) for lift, old in zip(lifts, kept, strict=True)]
        x_XD, results = _run_stack(period, x_XD, inputs, self.cfg.scan_layers)
        for lift, (_, changes) in zip(lifts, results, strict=True):
            lift.apply(changes)
        outputs = [output for output, _ in results]
        return x_XD, together([new for new, _ in outputs]), _interleaved([r for _, r in outputs])


def make_cache(
    cfg: ModelConfig, batch: int, length: int, rules: ShardingRules = RULES["all"]
) -> Cache:
    """Returns an empty cache for `length` tokens of each of `batch` rows, as the model's attention needs it."""

    def empty(stack: Stack) -> tuple[LayerCache, ...]:
        sizes = stack.repeats, batch, length, rules
        return tuple(VARIANTS[type(one.attention)].make_cache(one, *sizes) for one in stack.layers)

    parts: Any = tuple(empty(stack) for stack in cfg.stacks.values())
    whole = len(parts) > 1 or len(parts[0]) > 1
    return PatternCache(parts, jnp.zeros((), jnp.int32)) if whole else parts[0][0]


def make_pages(
    cfg: ModelConfig,
    pages: int,
    tokens: int,
    slots: int,
    rules: ShardingRules = RULES["all"],
    cache_dtype: str = "auto",
) -> Any:
    """Returns an empty cache in pages for a model of `unstack_layers`; `with_paging` says what a program adds.

    Args:
      cfg: the model.
      pages: of all texts together; page 0 takes padding.
      tokens: in a page.
      slots: texts that can have a recurrent state at a time, and one for padding; no other layers use them.
      rules: sharding rules.
      cache_dtype: `auto`, the compute type, or one of `paged.CACHE_DTYPES`; recurrent states stay as they are.
    """

    def empty(stack: Stack) -> tuple[Any, ...]:
        def layers(one: ModelConfig) -> Any:
            make = VARIANTS[type(one.attention)].make_pages
            drawn = [
                make(one, pages, tokens, slots, rules, cache_dtype) for _ in range(stack.repeats)
            ]
            return drawn[0]._make((*zip(*(x[:-1] for x in drawn), strict=True), None))

        return tuple(layers(one) for one in stack.layers)

    parts: Any = tuple(empty(stack) for stack in cfg.stacks.values())
    whole = len(parts) > 1 or len(parts[0]) > 1
    return PatternCache(parts, 0) if whole else parts[0][0]


def copy_pages(cache: Any, pages: Any, states: Any) -> Any:
    """Returns a cache in pages with pages and slots of states copied.

    Args:
      cache: of `make_pages`.
      pages: ([X] from, [X] to); page 0 to page 0 does nothing.
      states: ([Y] from, [Y] to) slots.
    """

    def layers(one: Any) -> Any:
        each = zip(*one[:-1], strict=True)
        copied = [one._make((*parts, None)).copied(pages, states)[:-1] for parts in each]
        return one._make((*zip(*copied, strict=True), None))

    if isinstance(cache, PatternCache):
        return cache._replace(parts=tuple(tuple(map(layers, part)) for part in cache.parts))
    return layers(cache)


def with_paging(cache: Any, paging: Paging | None) -> Any:
    """Returns a cache in pages for a program that adds these tokens, or, with None, as it is between programs."""
    if isinstance(cache, PatternCache):  # whose parts a model returns with a length of their own
        cache = cache._replace(
            parts=tuple(tuple(one._make((*one[:-1], None)) for one in part) for part in cache.parts)
        )
    return cache._make((*cache[:-1], paging))


def _parts(cache: Cache | None) -> Any:
    """Returns the caches of each stack and place in the period, with the length that they share."""
    if isinstance(cache, PatternCache):
        return [[one._make((*one[:-1], cache.length)) for one in part] for part in cache.parts]
    return None if cache is None else [[cache]]


def _interleaved(routings: Sequence[Routing | None]) -> Routing | None:
    """Returns the routing of a stack's layers in their order, from that of each place in the period, or None."""
    found = [routing for routing in routings if routing is not None]
    if len(found) < 2:
        return found[0] if found else None
    return jax.tree.map(lambda *xs: jnp.concatenate(jnp.stack(xs, axis=1)), *found)


def _joined(routings: Sequence[Routing]) -> Routing | None:
    if len(routings) < 2:
        return routings[0] if routings else None
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *routings)


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
