"""What the RMSNorm kernels ask of their operands, and how devices divide them: each takes its own rows.

Chapters: 16.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from minitext.kernels.per_device import on_each_device, split


def by_rows(run: Callable, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Returns `run(x_XD, scale_D)` in the shape of x, computed by each device on its own rows."""

    def local(x, scale_D):
        return jnp.reshape(run(jnp.reshape(x, (-1, x.shape[-1])), scale_D), x.shape)

    return on_each_device(local, x, scale_D)


def reason(x, scale_D) -> str | None:
    """Returns why no kernel can take these arguments, or None."""
    if x.size == 0:
        return f"it needs at least one row and one feature: got x of shape {x.shape}"
    for name, array in (("x", x), ("scale", scale_D)):
        if axes := split(array)[-1]:
            return f"the features of each row must be on one device: those of {name} are split over {axes}"
    return None
