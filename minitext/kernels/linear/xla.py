"""A projection as an einsum and its gradients as two more, each with the sharding of its result.

Autodiff would keep gathered tokens and weights for the backward pass. These gradients keep what is stored and gather it
again.

Chapters: 4.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


class Specs(NamedTuple):
    """How a product wants its factors and its result sharded; None where no mesh is set."""

    x: PartitionSpec | None
    w: PartitionSpec | None
    y: PartitionSpec | None


def make_linear(einsum: Callable[..., jax.Array], transpose: Callable[..., jax.Array]) -> Callable:
    """Returns `linear(x, w_DF, specs)` made of `einsum(subscripts, a, b, out_sharding)` and `transpose`."""

    @partial(jax.custom_vjp, nondiff_argnums=(2,))
    def linear(x, w_DF, specs):
        return einsum("...D,DF->...F", *gather_factors(x, w_DF, specs), specs.y)

    def forward(x, w_DF, specs):
        return linear(x, w_DF, specs), (x, w_DF)

    def backward(specs, kept, grad):
        x, w_DF = kept
        x_whole, w_whole = gather_factors(x, w_DF, specs)
        if x.ndim == 3:
            grad_w = einsum("BTD,BTF->DF", x_whole, grad, sharding_of(w_DF))
        else:
            grad_w = einsum("DX,XF->DF", transpose(x_whole), grad, sharding_of(w_DF))
        grad_x = einsum("...F,DF->...D", grad, w_whole, sharding_of(x))
        return grad_x, grad_w.astype(w_DF.dtype)

    linear.defvjp(forward, backward)
    return linear


def gather_factors(x: jax.Array, w_DF: jax.Array, specs: Specs) -> tuple[jax.Array, jax.Array]:
    """Returns both factors as the product wants them. The weight is sent in the compute type, not in float32."""
    w_DF = w_DF.astype(x.dtype)
    if specs.x is None:
        return x, w_DF
    return jax.sharding.reshard(x, specs.x), jax.sharding.reshard(w_DF, specs.w)


def sharding_of(x: jax.Array) -> Any:
    """Returns how x is sharded, or None where no mesh is set."""
    return None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding


def typed_einsum(subscripts: str, a: jax.Array, b: jax.Array, out_sharding: Any) -> jax.Array:
    """Returns the einsum of two arrays of one type, in that type, which is also what devices send when they add up."""
    return jnp.einsum(subscripts, a, b, out_sharding=out_sharding)


linear = make_linear(typed_einsum, jnp.transpose)
