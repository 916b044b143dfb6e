"""One token at a time on a CPU: layers taken apart, and projections divided so that every core reads weights.

Chapters: 6, 24.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from minitext.models.layers import Linear, is_qwixed
from minitext.models.transformer import PatternCache, Period, Transformer, places


class SplitLinear(nnx.Module):
    """A `Linear` on one device whose columns are in G groups, multiplied as a batch of G products.

    XLA's CPU backend multiplies a single row with a matrix on one core, and a batch of such products on several. One
    core reads memory at half the rate of two, and reading the weight is most of such a product. Where the weight is
    also used by head, the groups are the heads.
    """

    def __init__(self, linear: Linear, groups: int):
        w_DF = linear.w.get_value()
        groups = linear.heads or math.gcd(groups, w_DF.shape[1])
        self.w = nnx.Param(jnp.stack(jnp.split(w_DF, groups, axis=1)))
        if hasattr(linear, "b"):
            self.b = linear.b

    def by_head(self) -> jax.Array:
        """Returns the weight as [N, D, H], which is how it is stored."""
        return self.w.get_value()

    def __call__(self, x_XD: jax.Array, _out: str = "act") -> jax.Array:
        """Projects x [X, D] to [X, F] in x's type."""
        w_GDF = self.w.get_value().astype(x_XD.dtype)
        x_GXD = jnp.broadcast_to(x_XD, (w_GDF.shape[0], *x_XD.shape))
        y_GXF = jnp.einsum("GXD,GDF->GXF", x_GXD, w_GDF)
        y_XF = jnp.reshape(jnp.swapaxes(y_GXF, 0, 1), (x_XD.shape[0], -1))
        return y_XF + self.b.get_value().astype(y_XF.dtype) if hasattr(self, "b") else y_XF


def unstack_layers(model: Transformer) -> Transformer:
    """Returns the model with lists of layers in place of its stacks, for use with `unstack_cache`."""

    def unstacked(stack: Any, repeats: int) -> nnx.List:
        graphdef, params = nnx.split(stack)
        return nnx.List(
            nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], params)) for i in range(repeats)
        )

    rest, others = nnx.split(model)
    apart = nnx.merge(rest, others)
    for name, stack in model.cfg.stacks.items():
        blocks = getattr(model, name)
        lists = [unstacked(one, stack.repeats) for one in places(blocks)]
        setattr(apart, name, Period(lists) if isinstance(blocks, Period) else lists[0])
    return apart


def unstack_cache(cache: Any) -> Any:
    """Returns a cache with tuples of layers in place of stacks."""
    if isinstance(cache, PatternCache):
        parts = tuple(tuple(map(unstack_cache, part)) for part in cache.parts)
        return cache._replace(parts=parts)
    return cache._make((*map(tuple, cache[:-1]), cache.length))


def split_projections(model: Transformer, groups: int) -> Transformer:
    """Returns the model with every projection's columns in groups, for reading one token at a time on a CPU.

    Quantized projections stay as they are, and those that Qwix has taken.
    """
    for _, module in list(nnx.iter_modules(model)):
        for name, child in list(vars(module).items()):
            if isinstance(child, Linear) and not (child.quantization or is_qwixed(child)):
                setattr(module, name, SplitLinear(child, groups))
    return model
