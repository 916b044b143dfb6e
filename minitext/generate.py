"""Sampling text from a model with a key-value cache.

Two programs are compiled, whatever is generated: one reads the prompt (prefill), one adds a token (decode). The cache
is donated to each step, so a step writes one place of it and copies nothing.

Chapters: 6, 25.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minitext.attention import KVCache, make_cache
from minitext.config import ModelConfig
from minitext.errors import UserError
from minitext.model import Transformer

# Prompts are padded to a multiple of this, so that prompts of similar length share a compiled prefill.
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


def sample(logits_BV: jax.Array, key: jax.Array, how: Sampling) -> jax.Array:
    """Draws one token per row.

    Args:
      logits_BV: [B, V] float32.
      key: PRNG key.
      how: static; see `Sampling`.

    Returns:
      [B] int32.
    """
    if how.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / how.temperature
    if 0 < how.top_k < logits_BV.shape[-1]:
        kth_B1 = jax.lax.top_k(logits_BV, how.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
    if how.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        # A token stays while the ones before it sum to less than top_p, so the most likely always stays.
        kept_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV < how.top_p
        least_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnames=("graphdef", "length", "how"))
def prefill(graphdef, params, prompt_BT, prompt_length, key, *, length: int, how: Sampling):
    """Reads a padded prompt [B, T] into a new cache of `length` places; returns the next token [B] and the cache."""
    model: Transformer = nnx.merge(graphdef, params)
    cache = make_cache(model.cfg, prompt_BT.shape[0], length, model.rules)
    logits_BTV, cache = model(prompt_BT, cache=cache)
    last_BV = jax.lax.dynamic_index_in_dim(logits_BTV, prompt_length - 1, axis=1, keepdims=False)
    # Places beyond the prompt hold padding; the tokens to come overwrite them before anything sees them.
    return sample(last_BV, key, how), KVCache(cache.k, cache.v, prompt_length)


@partial(jax.jit, static_argnames=("graphdef", "how"), donate_argnames=("cache",))
def decode(graphdef, params, token_B, cache, key, *, how: Sampling):
    """Adds one token [B] to the cache; returns the next token [B] and the cache."""
    model: Transformer = nnx.merge(graphdef, params)
    logits_B1V, cache = model(token_B[:, None], cache=cache)
    return sample(logits_B1V[:, 0], key, how), cache


def generate(
    cfg: ModelConfig,
    params: Any,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    how: Sampling = DEFAULT_SAMPLING,
    seed: int = 0,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Yields tokens that follow the prompt, one by one.

    Args:
      cfg: the model's configuration.
      params: `nnx.State` of its parameters, on one device.
      prompt: token ids, at least one.
      max_tokens: tokens to generate at most.
      how: temperature, top-k and top-p.
      seed: of the draws; the same seed gives the same tokens.
      stop_id: a token that ends the text (it is not yielded).

    Raises:
      UserError: for an empty prompt, a token outside the vocabulary, or a setting outside its range.
    """
    how.check()
    if not len(prompt):
        raise UserError("the prompt is empty: give at least one character")
    if max(prompt) >= cfg.vocab:
        raise UserError(
            f"the prompt holds token {max(prompt)}, and the model's vocabulary has {cfg.vocab}"
        )
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))))
    padded = -len(prompt) % PROMPT_BUCKET + len(prompt)
    tokens = np.zeros((1, padded), np.int32)
    tokens[0, : len(prompt)] = prompt
    keys = jax.random.split(jax.random.key(seed), max_tokens)
    length = padded + max_tokens
    token, cache = prefill(graphdef, params, tokens, len(prompt), keys[0], length=length, how=how)
    for i in range(1, max_tokens + 1):
        value = int(token[0])
        if value == stop_id:
            return
        yield value
        if i < max_tokens:
            token, cache = decode(graphdef, params, token, cache, keys[i], how=how)
