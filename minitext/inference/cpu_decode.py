"""One token at a time on a CPU: layers taken apart, and products divided so that every core reads weights.

Chapters: 6, 24.
"""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from minitext import hardware
from minitext.models.layers import Linear
from minitext.models.transformer import PatternCache, Period, Transformer, places


class SplitLinear(nnx.Module):
    """A `Linear` on one device that multiplies a single row in G parts, as a batch of products.

    XLA's CPU backend multiplies a single row with a matrix on one core, and a batch of such products on several. One
    core reads memory at half the rate of two, and reading the weight is most of such a product. So the sum over the
    inputs is cut into G parts, which needs no other storage, and several rows are multiplied as usual. Where the weight
    is also used by head, it is stored by head.
    """

    def __init__(self, linear: Linear, parts: int):
        w_DF, heads = linear.w.get_value(), linear.heads
        self.w = nnx.Param(jnp.stack(jnp.split(w_DF, heads, axis=1)) if heads else w_DF)
        self.parts = math.gcd(parts, w_DF.shape[0])
        if hasattr(linear, "b"):
            self.b = linear.b

    def by_head(self) -> jax.Array:
        """Returns the weight as [N, D, H], which is how it is stored."""
        return self.w.get_value()

    def __call__(self, x_XD: jax.Array, _out: str = "act") -> jax.Array:
        """Projects x [X, D] to [X, F] in x's type."""
        w = self.w.get_value().astype(x_XD.dtype)
        (X, D), G = x_XD.shape, self.parts
        if w.ndim == 3:
            y_XNH = jnp.einsum("XD,NDH->XNH", x_XD, w)
            y_XF = jnp.reshape(y_XNH, (X, -1))
        elif X == 1:
            x_G1C = jnp.reshape(x_XD, (G, 1, D // G))
            w_GCF = jnp.reshape(w, (G, D // G, -1))
            y_XF = jnp.sum(jnp.einsum("GXC,GCF->GXF", x_G1C, w_GCF), axis=0)
        else:
            y_XF = x_XD @ w
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


def row_parts() -> int:
    """Returns into how many parts `SplitLinear` cuts a row's products on this machine; 1: none, for it isn't a CPU."""
    if hardware.platform() != "cpu":
        return 1
    return 4 if (os.cpu_count() or 1) >= 4 else 2


def split_projections(model: Transformer, parts: int) -> Transformer:
    """Returns the model with `SplitLinear` for every projection, for reading one token at a time on a CPU.

    Quantized projections stay as they are.
    """
    for _, module in list(nnx.iter_modules(model)):
        for name, child in list(vars(module).items()):
            if isinstance(child, Linear) and child.quantization is None:
                setattr(module, name, SplitLinear(child, parts))
    return model
