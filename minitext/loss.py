"""Cross-entropy, summed and counted per token.

A loss is kept as a sum and a count until the very end: microbatches, devices and processes hold different numbers of
target tokens, and a mean of their means would weight the tokens unequally.

Chapters: 6.
"""

import jax
import jax.numpy as jnp


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, *, z_loss: float = 0.0
) -> jax.Array:
    """Returns the negative log-likelihood of every target, in nats.

    Args:
      logits_BTV: [B, T, V] float32.
      targets_BT: [B, T] integers below V.
      z_loss: weight of the squared log-normalizer, which keeps logits near zero (Chowdhery et al. 2022).

    Returns:
      [B, T] float32.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    # A masked sum, not a gather: it stays local when the vocabulary is sharded, and fuses with the logsumexp.
    hit_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[:, :, None]
    target_BT = jnp.sum(jnp.where(hit_BTV, logits_BTV, 0.0), axis=-1)
    return normalizer_BT - target_BT + z_loss * jnp.square(normalizer_BT)


def masked_sum(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Returns the sum of the values where the mask is not 0, as a float32 scalar."""
    return jnp.sum(jnp.where(mask_BT != 0, values_BT, 0.0))
