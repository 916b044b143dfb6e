"""Output layer and cross-entropy in XLA, with all logits at once: the reference for the fused kernels.

Chapters: 16.
"""

import jax
import jax.numpy as jnp


def linear_cross_entropy(x_XD, w_DV, targets_X) -> tuple[jax.Array, jax.Array]:
    """Computes `minitext.kernels.linear_cross_entropy`."""
    logits_XV = jnp.einsum("XD,DV->XV", x_XD, w_DV, preferred_element_type=jnp.float32)
    normalizer_X = jax.nn.logsumexp(logits_XV, axis=-1)
    # As in `minitext.training.loss.cross_entropy`: a masked sum stays local where the vocabulary is split.
    sharding = jax.typeof(logits_XV).sharding
    id_XV = jax.lax.broadcasted_iota(
        jnp.int32, logits_XV.shape, 1, out_sharding=None if sharding.mesh.empty else sharding
    )
    target_X = jnp.sum(jnp.where(id_XV == targets_X[:, None], logits_XV, 0.0), axis=-1)
    return normalizer_X - target_X, normalizer_X
