"""The projection of bfloat16 tokens as XLA's CPU backend computes it fastest.

Chapters: 4.
"""

from typing import Any

import jax
import jax.numpy as jnp

from minitext.kernels.linear.sharded import make_linear
from minitext.kernels.linear.xla import Specs


def supports(x: jax.Array, _w_DF: jax.Array, _specs: Specs) -> str | None:
    """Returns why this isn't for the tokens' type, or None."""
    if x.dtype != jnp.bfloat16:
        return f"it is for bfloat16, and the tokens are {x.dtype}"
    return None


def typed_einsum(subscripts: str, a: jax.Array, b: jax.Array, out_sharding: Any) -> jax.Array:
    """Returns the einsum of two bfloat16 arrays, in bfloat16."""
    # The backend uses the processor's bfloat16 products only for a float32 result. Autodiff would multiply by that
    # result's gradient, in float32: on an AMD EPYC at 165 GFLOP/s in place of 340.
    wide = jnp.float32
    y = jnp.einsum(subscripts, a, b, preferred_element_type=wide, out_sharding=out_sharding)
    return y.astype(a.dtype)


def transpose(x_XD: jax.Array) -> jax.Array:
    """Returns x_DX, transposed before the product and not by it."""
    # XLA would leave the transposition to the product, which the barrier prevents. Its CPU backend would then take a
    # slower product: on an AMD EPYC 320 GFLOP/s in place of 800.
    return jax.lax.optimization_barrier(x_XD.T[None])[0]


linear = make_linear(typed_einsum, transpose)
