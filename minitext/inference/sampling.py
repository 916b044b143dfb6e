"""Drawing the next token of many texts at once, each in its own way.

Every row has its own temperature, filters and seed, which are arrays: one compiled program serves all requests. What a
row draws depends on its logits, its seed and its position alone, not on the rows beside it.

Filters need the tokens in order, but only one number of it: the least logit that stays. It is found by halving the
range of floats 32 times, which reads the logits 32 times and never sorts them.

Chapters: 24.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from minitext.inference.requests import MOST_LOGPROBS

# Divided by a lower temperature, other than 0, several logits would be infinite, and so equal.
COLDEST = 1e-30


class Knobs(NamedTuple):
    """How each of B rows draws; the fields are those of `Request`.

    Attributes:
      seed: [B] int32.
      temperature: [B] float32.
      top_k: [B] int32.
      top_p: [B] float32.
      min_p: [B] float32.
      repetition: [B] float32.
    """

    seed: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array


class Adjustments(NamedTuple):
    """What changes the logits of a row before anything else.

    Attributes:
      bias: [B, V] float32, added; -inf for tokens that may not follow.
      seen: [B, V] whether the row's text has the token already, for the repetition penalty.
    """

    bias: Any
    seen: Any


class Want(NamedTuple):
    """What any of the rows needs. A program that leaves the rest out gives the same tokens.

    Attributes:
      random: a temperature that is not 0.
      filters: top_k, top_p or min_p.
      logprobs: log-probabilities.
      top: of other tokens too.
    """

    random: bool = False
    filters: bool = False
    logprobs: bool = False
    top: bool = False


class Drawn(NamedTuple):
    """Drawn tokens.

    Attributes:
      token: [B] int32.
      logprob: [B] float32 log-probability of the token under the model itself, or None.
      top: [B, 20] the most likely tokens and their log-probabilities, or None.
    """

    token: jax.Array
    logprob: jax.Array | None = None
    top: tuple[jax.Array, jax.Array] | None = None


def draw_tokens(
    logits_BV: jax.Array,
    position_B: jax.Array,
    knobs: Knobs,
    adjustments: Adjustments | None,
    want: Want,
) -> Drawn:
    """Draws a token for each row.

    Args:
      logits_BV: [B, V] float32.
      position_B: [B] position that the token will have in its text; each has its own random numbers.
      knobs: how.
      adjustments: or None for none.
      want: static.
    """
    x_BV = logits_BV if adjustments is None else adjusted(logits_BV, knobs, adjustments)
    token_B = jnp.argmax(x_BV, axis=-1).astype(jnp.int32)
    if want.random:
        greedy_B = knobs.temperature == 0
        divisor_B = jnp.where(greedy_B, 1.0, jnp.maximum(knobs.temperature, COLDEST))
        scaled_BV = x_BV / divisor_B[:, None]
        if want.filters:
            scaled_BV = filtered(scaled_BV, knobs)

        def one(logits_V, seed, position):
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jax.random.categorical(key, logits_V)

        drawn_B = jax.vmap(one)(scaled_BV, knobs.seed, position_B).astype(jnp.int32)
        token_B = jnp.where(greedy_B, token_B, drawn_B)
    if not want.logprobs:
        return Drawn(token_B)
    logprobs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    if not jax.typeof(logprobs_BV).sharding.mesh.empty:
        logprobs_BV = jax.sharding.reshard(
            logprobs_BV, PartitionSpec()
        )  # for what follows, whole rows
    logprob_B = jnp.take_along_axis(logprobs_BV, token_B[:, None], axis=-1)[:, 0]
    if not want.top:
        return Drawn(token_B, logprob_B)
    values, ids = jax.lax.top_k(logprobs_BV, min(MOST_LOGPROBS, logits_BV.shape[-1]))
    return Drawn(token_B, logprob_B, (ids, values))


def adjusted(logits_BV: jax.Array, knobs: Knobs, adjustments: Adjustments) -> jax.Array:
    """Returns the logits with the repetition penalty and the bias."""
    factor_B1 = knobs.repetition[:, None]
    penalised_BV = jnp.where(logits_BV > 0, logits_BV / factor_B1, logits_BV * factor_B1)
    return jnp.where(adjustments.seen, penalised_BV, logits_BV) + adjustments.bias


def filtered(logits_BV: jax.Array, knobs: Knobs) -> jax.Array:
    """Returns the logits with -inf for those that top_k, top_p or min_p leaves out, in this order."""
    ones_BV = jnp.ones_like(logits_BV)
    count_B = jnp.where(knobs.top_k > 0, knobs.top_k.astype(jnp.float32), jnp.inf)
    logits_BV = _keep(logits_BV, ones_BV, count_B)
    probs_BV = jax.nn.softmax(logits_BV, axis=-1)
    logits_BV = _keep(logits_BV, probs_BV, jnp.where(knobs.top_p < 1, knobs.top_p, jnp.inf))
    least_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + jnp.log(knobs.min_p)[:, None]
    return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)


def _keep(logits_BV: jax.Array, weights_BV: jax.Array, limit_B: jax.Array) -> jax.Array:
    """Returns the logits with -inf for those of which greater ones have the weight `limit` already."""
    bits = jax.lax.bitcast_convert_type(logits_BV, jnp.uint32)
    # As unsigned integers, these are in the order of the floats.
    key_BV = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def halve(_, ends):
        low_B, high_B = ends
        middle_B = low_B + (high_B - low_B) // 2
        greater_BV = jnp.where(key_BV > middle_B[:, None], weights_BV, 0)
        enough_B = jnp.sum(greater_BV, axis=-1) < limit_B
        return jnp.where(enough_B, low_B, middle_B + 1), jnp.where(enough_B, middle_B, high_B)

    low_B, high_B = jnp.min(key_BV, axis=-1), jnp.max(key_BV, axis=-1)
    _, least_B = jax.lax.fori_loop(0, 32, halve, (low_B, high_B))
    return jnp.where(key_BV < least_B[:, None], -jnp.inf, logits_BV)
