"""What PPO and GRPO minimise, token by token: clipped ratios, a penalty for leaving the reference, and value errors.

Everything here is [B, T]; `token_weights` says how tokens are summed. Both algorithms share the clipped ratio, and
differ in where the advantages come from (`minitext.post_training.advantages`).

Chapters: 26.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Clipped(NamedTuple):
    """The clipped objective, to be minimised.

    Attributes:
      loss: [B, T].
      ratio: [B, T] how much likelier the token is now than when it was drawn.
      clipped: [B, T] bool, where clipping takes the gradient away.
    """

    loss: jax.Array
    ratio: jax.Array
    clipped: jax.Array


def clipped_ratio_loss(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantages_BT: jax.Array,
    *,
    clip: float,
    clip_high: float | None = None,
) -> Clipped:
    """Returns -min(r A, clip(r, 1 - clip, 1 + clip_high) A) with the ratio r = exp(logp - old_logp).

    A token isn't pushed further once it has become likelier than `1 + clip_high` times what it was, or less likely than
    `1 - clip` times. Sources: Schulman et al. 2017, equation 7 (https://arxiv.org/abs/1707.06347); a wider upper bound,
    so that unlikely tokens can grow: Yu et al. 2025 (DAPO, https://arxiv.org/abs/2503.14476), equation 10.

    Args:
      logp_BT: [B, T] log-probability of each token under the parameters in training.
      old_logp_BT: [B, T] the same under those with which it was drawn.
      advantages_BT: [B, T].
      clip: below 1.
      clip_high: None: as `clip`.
    """
    ratio_BT = jnp.exp(logp_BT - old_logp_BT)
    bounded_BT = jnp.clip(ratio_BT, 1 - clip, 1 + (clip if clip_high is None else clip_high))
    free_BT, bound_BT = ratio_BT * advantages_BT, bounded_BT * advantages_BT
    return Clipped(-jnp.minimum(free_BT, bound_BT), ratio_BT, bound_BT < free_BT)


def kl_estimate(logp_BT: jax.Array, ref_logp_BT: jax.Array) -> jax.Array:
    """Returns an estimate of the divergence KL(model || reference) from the tokens that the model drew, in nats.

    It is exp(x) - x - 1 with x = ref_logp - logp: without bias, and unlike -x never negative (k3 in Schulman 2020,
    http://joschu.net/blog/kl-approx.html; equation 4 of Shao et al. 2024).
    """
    apart_BT = ref_logp_BT - logp_BT
    return jnp.exp(apart_BT) - apart_BT - 1


def entropy(logits_BTV: jax.Array) -> jax.Array:
    """Returns the entropy of the next token's distribution, [B, T] in nats, from logits [B, T, V] in float32."""
    logp_BTV = logits_BTV - jax.nn.logsumexp(logits_BTV, axis=-1, keepdims=True)
    return -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)


def clipped_value_loss(
    values_BT: jax.Array, old_values_BT: jax.Array, returns_BT: jax.Array, *, clip: float
) -> jax.Array:
    """Returns half the squared error of the values, the larger of two: as they are, and moved by at most `clip`.

    A value so isn't pushed further once it has moved by `clip` towards its return. Source: the implementation of PPO by
    its authors; Huang et al. 2022, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/, detail 9.
    """
    near_BT = old_values_BT + jnp.clip(values_BT - old_values_BT, -clip, clip)
    free_BT, bound_BT = (jnp.square(x - returns_BT) for x in (values_BT, near_BT))
    return 0.5 * jnp.maximum(free_BT, bound_BT)


Weighting = Literal["token", "sequence", "constant"]


def token_weights(mask_BT: np.ndarray, how: Weighting, most: int) -> np.ndarray:
    """Returns how much each token of an answer counts; the loss is sum(weight * loss) / (what `how` divides by).

    Args:
      mask_BT: [B, T], not 0 at the tokens of answers.
      how: `token`: all tokens of the batch alike (DAPO, Yu et al. 2025, equation 8). `sequence`: every answer alike,
        whatever its length (GRPO, Shao et al. 2024, equation 3). `constant`: all tokens alike, each 1 / `most` of an
        answer, so that a long answer isn't pushed less per token than a short one (Dr. GRPO, Liu et al. 2025).
      most: tokens that an answer may have.

    Returns:
      [B, T] float32. Their sum is the number of tokens for `token` and of answers for `sequence`; for `constant` it is
      less than that of answers, by which the loss is divided.
    """
    real_BT = (mask_BT != 0).astype(np.float32)
    if how == "constant":
        return real_BT / np.float32(most)
    if how == "sequence":
        return real_BT / np.maximum(real_BT.sum(axis=1, keepdims=True), 1)
    return real_BT


def overlong_penalty(length_N: np.ndarray, most: int, soft: int) -> np.ndarray:
    """Returns what is added to the rewards of long answers: 0 up to `most - soft` tokens, then down to -1 at `most`.

    Source: soft overlong punishment, Yu et al. 2025, equation 13.

    Args:
      length_N: [N] tokens of each answer.
      most: tokens that an answer may have.
      soft: tokens before `most` from which on it pays; 0: nothing is added.
    """
    if not soft:
        return np.zeros(np.shape(length_N))
    return -np.clip((np.asarray(length_N, np.float64) - (most - soft)) / soft, 0.0, 1.0)
