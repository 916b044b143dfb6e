"""RMSNorm in XLA: the reference for the fused kernels, and what the model runs.

Chapters: 16.
"""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Computes `minitext.kernels.rms_norm`. XLA fuses it with the operations around it."""
    x_f32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + eps)
    return (x_f32 * inverse * scale_D).astype(x.dtype)
