"""RMSNorm for XLA: what the fused kernel must agree with, and what the model runs.

Chapters: 16.
"""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float = 1e-6) -> jax.Array:
    """RMSNorm as `minitext.kernels.rms_norm` defines it; XLA fuses it with what stands around it."""
    x_f32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + eps)
    return (x_f32 * inverse * scale_D).astype(x.dtype)
