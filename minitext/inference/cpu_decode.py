"""One token at a time on a CPU: layers taken apart, and projections divided so that every core reads weights.

Chapters: 6, 24.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from minitext.models.layers import Linear
from minitext.models.transformer import Transformer


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

    def by_head(self) -> jax.Array:
        """Returns the weight as [N, D, H], which is how it is stored."""
        return self.w.get_value()

    def __call__(self, x_XD: jax.Array, _out: str = "act") -> jax.Array:
        """Projects x [X, D] to [X, F] in x's type."""
        w_GDF = self.w.get_value().astype(x_XD.dtype)
        x_GXD = jnp.broadcast_to(x_XD, (w_GDF.shape[0], *x_XD.shape))
        y_GXF = jnp.einsum("GXD,GDF->GXF", x_GXD, w_GDF)
        return jnp.reshape(jnp.swapaxes(y_GXF, 0, 1), (x_XD.shape[0], -1))


def unstack_layers(model: Transformer) -> Transformer:
    """Returns the model with a list of layers in place of the stack, for use with a cache of tuples of layers."""
    graphdef, params = nnx.split(model.blocks)
    layers = [
        nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], params))
        for i in range(model.cfg.layers)
    ]
    rest, others = nnx.split(model)
    apart = nnx.merge(rest, others)
    apart.blocks = nnx.List(layers)
    return apart


def split_projections(model: Transformer, groups: int) -> Transformer:
    """Returns the model with every projection's columns in groups, for reading one token at a time on a CPU."""
    for _, module in list(nnx.iter_modules(model)):
        for name, child in list(vars(module).items()):
            if isinstance(child, Linear):
                setattr(module, name, SplitLinear(child, groups))
    return model
