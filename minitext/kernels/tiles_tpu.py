"""Products and positions of tiles in Pallas kernels for TPUs."""

import jax
import jax.numpy as jnp


def dot(a, b, over: tuple[int, int] = (1, 0)) -> jax.Array:
    """Multiplies two tiles over one dimension of each, summing in float32; float32 tiles at full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == b.dtype == jnp.float32 else None
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def positions(shape: tuple[int, ...], axis: int, block):
    """Returns the positions of a tile's elements along an axis of the array that the tile is number `block` of."""
    return block * shape[axis] + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
