"""A projection on a mesh: an einsum, and two more for its gradients, each with the sharding of its result.

Autodiff would give the weight's gradient the sharding of the gathered weight, so that devices sum all of it and then
keep a part. A TPU's compiler doesn't undo that: it sends twice the bytes of the reduce-scatter that it makes of these.

Chapters: 4.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from minitext.kernels.linear.xla import Specs, gather_factors


def supports(_x: jax.Array, _w_DF: jax.Array, _specs: Specs) -> str | None:
    """Returns why this isn't for the current mesh, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return "it is for a mesh of several devices" if mesh.empty or mesh.size == 1 else None


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


def sharding_of(x: jax.Array) -> Any:
    """Returns how x is sharded, or None where no mesh is set."""
    return None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding


def typed_einsum(subscripts: str, a: jax.Array, b: jax.Array, out_sharding: Any) -> jax.Array:
    """Returns the einsum of two arrays of one type, in that type, which is also what devices send when they add up."""
    return jnp.einsum(subscripts, a, b, out_sharding=out_sharding)


linear = make_linear(typed_einsum, jnp.transpose)
