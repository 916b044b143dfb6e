"""Sampling text from a model with a key-value cache.

Two programs are compiled: one reads the prompts (prefill), one adds a token to each (decode). The cache is donated to
each decode step, which writes one slot of it. A decode step reads every parameter for a handful of tokens, so memory
bounds its speed, and little else is copied.

Chapters: 6, 24.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minitext import hardware
from minitext.config.model import DeltaNetConfig, ModelConfig
from minitext.config.rope import LongRopeConfig
from minitext.config.section import cached
from minitext.errors import DoesNotFit, UserError
from minitext.inference.cpu_decode import (
    row_parts,
    split_projections,
    unstack_cache,
    unstack_layers,
)
from minitext.inference.sampling import COLDEST
from minitext.models.transformer import Cache, Transformer, make_cache
from minitext.terminal import show_bytes

# Prompts are padded to a multiple of this: prompts of similar length then share a compiled prefill.
PROMPT_BUCKET = 64


class Sampling(NamedTuple):
    """How the next token is drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw among this many most likely tokens; 0 means all.
      top_p: draw among the most likely tokens whose probabilities sum to at least this; 1 means all.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """Raises UserError for a value outside its range."""
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature}: choose 0 (greedy) or more")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k}: choose 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: choose more than 0 and at most 1")


DEFAULT_SAMPLING = Sampling()


def sample(logits_BV: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draws one token per row.

    Args:
      logits_BV: [B, V] float32.
      key: PRNG key.
      sampling: static; see `Sampling`.

    Returns:
      [B] int32.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / max(sampling.temperature, COLDEST)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        kth_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        # A token stays while the ones before it sum to less than top_p, so the most likely always stays.
        kept_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV < sampling.top_p
        least_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)


class Programs(NamedTuple):
    """The compiled programs of one model and one way to sample.

    Attributes:
      lay_out: parameters -> arrays as the other two take them.
      prefill: (arrays, prompts [B, T], their length, key, length of the cache) -> (tokens [B], cache).
      decode: (arrays, tokens [B], cache, key) -> (tokens [B], cache); the cache is donated.
    """

    lay_out: Callable[[Any], list[jax.Array]]
    prefill: Callable[..., tuple[jax.Array, Cache]]
    decode: Callable[..., tuple[jax.Array, Cache]]


@cached
def make_programs(cfg: ModelConfig, sampling: Sampling, parts: int = 1) -> Programs:
    """Returns the jitted programs, the same ones for the same arguments; `parts` is that of `split_projections`."""

    def arrange(model: Transformer) -> Transformer:
        if cfg.scan_layers:
            return model
        apart = unstack_layers(model)
        return split_projections(apart, parts) if parts > 1 else apart

    def new_model() -> Transformer:
        return Transformer(cfg, rngs=nnx.Rngs(0))

    stacked = nnx.graphdef(nnx.eval_shape(new_model))
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: arrange(new_model())))
    treedef = jax.tree.structure(abstract)

    def run(arrays, tokens_BT, cache, positions_BT=None, segment_ids_BT=None):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays))
        return model(tokens_BT, positions_BT, segment_ids_BT, cache)

    def empty_cache(batch, length):
        cache = make_cache(cfg, batch, length)
        return cache if cfg.scan_layers else unstack_cache(cache)

    @jax.jit
    def lay_out(params):
        return jax.tree.leaves(nnx.state(arrange(nnx.merge(stacked, params))))

    @partial(jax.jit, static_argnames="length")
    def prefill(arrays, prompt_BT, prompt_length, key, *, length):
        # Padding stays within the prompt's positions: LongRoPE goes by the largest.
        positions_T = jnp.minimum(jnp.arange(prompt_BT.shape[1]), prompt_length - 1)
        positions_BT = jnp.broadcast_to(positions_T, prompt_BT.shape)
        padded_BT = None
        if has_states(cfg):  # padding would stay in them
            padded_BT = (jnp.arange(prompt_BT.shape[1]) < prompt_length).astype(jnp.int32)
            padded_BT = jnp.broadcast_to(padded_BT, prompt_BT.shape)
        cache = empty_cache(prompt_BT.shape[0], 0)
        logits_BTV, new = run(arrays, prompt_BT, cache, positions_BT, padded_BT)
        last_BV = jax.lax.dynamic_index_in_dim(logits_BTV, prompt_length - 1, 1, keepdims=False)
        cache = empty_cache(prompt_BT.shape[0], length).append(new)
        # Slots after the prompt hold padding, which new tokens overwrite before anything reads it.
        return sample(last_BV, key, sampling), cache._replace(length=prompt_length)

    # A step that reads the cache and then writes to it needs no copy of it. XLA's CPU backend sees that only when it
    # compares their order; otherwise a token after 2,000 others took five times as long on an AMD EPYC.
    in_place = {"xla_cpu_copy_insertion_use_region_analysis": True}
    options = in_place if hardware.platform() == "cpu" else None

    # Few arguments of plain types: a step takes a millisecond or two, and so would handing over a module.
    @partial(jax.jit, donate_argnames="cache", compiler_options=options)
    def decode(arrays, token_B, cache, key):
        key = jax.random.fold_in(key, cache.length)  # one for each position
        logits_B1V, new = run(arrays, token_B[:, None], cache)
        return sample(logits_B1V[:, 0], key, sampling), cache.append(new)

    return Programs(lay_out, prefill, decode)


class Generator:
    """A model that is ready to generate. Its parameters are laid out once, and again when one text follows several.

    Args:
      cfg: the model's configuration. With `scan_layers` the programs compile faster and, on a CPU, run slower.
      params: `nnx.State` of its parameters, on one device.
      sampling: temperature, top-k and top-p.

    Raises:
      UserError: for a setting outside its range.
    """

    def __init__(self, cfg: ModelConfig, params: Any, sampling: Sampling = DEFAULT_SAMPLING):
        sampling.check()
        self.cfg, self.params, self.sampling = cfg, params, sampling
        self.programs: Programs | None = None

    def tokens(
        self, prompt_BT: np.ndarray, *, max_tokens: int, seed: int = 0
    ) -> Iterator[np.ndarray]:
        """Yields the tokens [B] that follow each of B prompts of one length, `max_tokens` times.

        Args:
          prompt_BT: [B, T] token ids, T at least 1.
          max_tokens: how many tokens follow, at least 1.
          seed: of the draws; the same seed gives the same tokens.

        Raises:
          UserError: for an empty prompt or a token outside the vocabulary.
          DoesNotFit: for more tokens than the device has memory for.
        """
        prompt_BT = np.asarray(prompt_BT, np.int32)
        T = prompt_BT.shape[1]
        if not prompt_BT.size:
            raise UserError("the prompt is empty: give at least one character")
        outside = prompt_BT[(prompt_BT < 0) | (prompt_BT >= self.cfg.vocab)]
        if outside.size:
            raise UserError(
                f"the prompt holds token {outside[0]}, and the model's vocabulary has {self.cfg.vocab}"
            )
        check_length(self.cfg, len(prompt_BT), T, max_tokens, "max_tokens")
        programs = self._prepare()
        key, arrays = jax.random.key(seed), self.arrays

        def read(text_BT: np.ndarray, key: jax.Array) -> tuple[jax.Array, Cache]:
            padded_BT = np.pad(text_BT, ((0, 0), (0, -text_BT.shape[1] % PROMPT_BUCKET)))
            length = padded_BT.shape[1] + T + max_tokens - text_BT.shape[1]
            return programs.prefill(arrays, padded_BT, text_BT.shape[1], key, length=length)

        switches, text_BT = switch_lengths(self.cfg), prompt_BT
        token_B, cache = read(prompt_BT, key)
        for place in range(T, T + max_tokens - 1):
            if any(place <= switch for switch in switches):
                text_BT = np.concatenate([text_BT, np.asarray(token_B)[:, None]], axis=1)
            if place in switches:  # the keys in the cache have other rotations than this text's
                next_B, cache = read(text_BT, jax.random.fold_in(key, place))
            else:
                # The next step is dispatched before this one's tokens are waited for.
                next_B, cache = programs.decode(arrays, token_B, cache, key)
            yield np.asarray(token_B)
            token_B = next_B
        yield np.asarray(token_B)

    def _prepare(self) -> Programs:
        """Returns the programs; lays the parameters out as they want them, if they aren't yet."""
        programs = make_programs(self.cfg, self.sampling, row_parts())
        if self.programs is not programs:
            self.programs, self.arrays = programs, programs.lay_out(self.params)
        return programs


def has_states(cfg: ModelConfig) -> bool:
    """Returns whether any layer keeps a state of the text, from which no token can be taken again."""
    layers = [layer for stack in cfg.stacks.values() for layer in stack.layers]
    return any(isinstance(layer.attention, DeltaNetConfig) for layer in layers)


def switch_lengths(cfg: ModelConfig) -> set[int]:
    """Returns the lengths beyond which the rotary positions of a whole text are others (LongRoPE)."""
    ropes = [layer.rope for stack in cfg.stacks.values() for layer in stack.layers]
    return {rope.original_length for rope in ropes if isinstance(rope, LongRopeConfig)}


def check_length(cfg: ModelConfig, batch: int, prompt: int, max_tokens: int, key: str) -> None:
    """Refuses texts whose cache, or whose attention in prefill, the first device can't hold, before memory is taken.

    Args:
      cfg: the model.
      batch: texts.
      prompt: tokens in each prompt.
      max_tokens: that follow each.
      key: what sets `max_tokens`, for the message.

    Raises:
      DoesNotFit: if so.
    """
    limit = hardware.memory_bytes(jax.local_devices()[0])
    if limit is None:
        return
    # A part of it grows with the text.
    fixed, one = (_cache_bytes(cfg, length) for length in (0, 1))
    cache = batch * (fixed + (prompt + max_tokens) * (one - fixed))
    # On CPUs a quarter of the queries (`blocked_attention`) meets all keys at once, in float32.
    scores = batch * cfg.heads * prompt**2 if hardware.platform() == "cpu" else 0
    if cache + scores > limit:
        long, much = (f"a prompt of {prompt:,} tokens", scores) if scores > cache else (
            f"{key}={max_tokens:,} after a prompt of {prompt:,}", cache
        )  # fmt: skip
        raise DoesNotFit(
            f"{long} needs {'attention scores' if scores > cache else 'a key-value cache'} of {show_bytes(much)}, and "
            f"the device has {show_bytes(limit)}: ask for less"
        )


def _cache_bytes(cfg: ModelConfig, length: int) -> int:
    cache = jax.eval_shape(lambda: make_cache(cfg, 1, length))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def generate(
    cfg: ModelConfig,
    params: Any,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling = DEFAULT_SAMPLING,
    seed: int = 0,
    stop_id: int | Collection[int] | None = None,
) -> Iterator[int]:
    """Yields the tokens that follow one prompt, up to `max_tokens` or `stop_id`, one or several (which is not yielded).

    The arguments are those of `Generator` and its `tokens`, and so are the errors.
    """
    generator = Generator(cfg, params, sampling)
    stops = stop_id if isinstance(stop_id, Collection) else (stop_id,)
    for token_B in generator.tokens(np.asarray([prompt]), max_tokens=max_tokens, seed=seed):
        if int(token_B[0]) in stops:
            return
        yield int(token_B[0])
