"""A projection as a plain product, which autodiff and libraries that replace products can see.

Chapters: 4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


class Specs(NamedTuple):
    """How a product wants its factors and its result sharded; None where no mesh is set."""

    x: PartitionSpec | None
    w: PartitionSpec | None
    y: PartitionSpec | None


def linear(x: jax.Array, w_DF: jax.Array, specs: Specs) -> jax.Array:
    """Computes `minitext.kernels.linear`, whose gradients are two more products."""
    if x.dtype == w_DF.dtype and specs.x is None:
        return plain_linear(x, w_DF, specs)
    # Autodiff would keep the factor that it multiplies by, cast and resharded, for the backward pass: in a scan
    # a copy of every layer's weight. Now it keeps what is stored, and makes the factor again. The product isn't
    # repeated: no gradient needs its result.
    return jax.checkpoint(lambda x: plain_linear(x, w_DF, specs), prevent_cse=False)(x)


def plain_linear(x: jax.Array, w_DF: Any, specs: Specs) -> jax.Array:
    """Returns the bare product, of which autodiff keeps both factors; libraries may give it a weight of their own."""
    return jnp.einsum("...D,DF->...F", *gather_factors(x, w_DF, specs), out_sharding=specs.y)


def gather_factors(x: jax.Array, w_DF: jax.Array, specs: Specs) -> tuple[jax.Array, jax.Array]:
    """Returns both factors as the product wants them. The weight is sent in the compute type, not in float32."""
    if w_DF.dtype != x.dtype:
        w_DF = jnp.asarray(w_DF, x.dtype)  # not `astype`, which fails for a weight that Qwix stores
    if specs.x is None:
        return x, w_DF
    return jax.sharding.reshard(x, specs.x), jax.sharding.reshard(w_DF, specs.w)
