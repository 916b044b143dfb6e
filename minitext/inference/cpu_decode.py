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
from minitext.kernels.linear.xla import Specs
from minitext.models.layers import Embedding, Linear, is_qwixed
from minitext.models.quantization import quantize
from minitext.models.quantized_storage import StoredNumbers, StoredWeight
from minitext.models.transformer import PatternCache, Period, Transformer, places


class SplitLinear(nnx.Module):
    """A `Linear` on one device that multiplies a single row in G parts, as a batch of products.

    XLA's CPU backend multiplies a single row with a matrix on one core, and a batch of such products on several. One
    core reads memory at half the rate of two, and reading the weight is most of such a product. So the sum over the
    inputs is cut into G parts, which needs no other storage, and several rows are multiplied as usual. Where the weight
    is also used by head, it is stored by head.
    """

    adapter: Any = None

    def __init__(self, linear: Linear, parts: int):
        w_DF, heads = linear.w.get_value(), linear.heads
        self.w = nnx.Param(jnp.stack(jnp.split(w_DF, heads, axis=1)) if heads else w_DF)
        self.parts, self.heads = math.gcd(parts, w_DF.shape[0]), heads
        _take_rest(self, linear)

    def by_head(self) -> jax.Array:
        """Returns the weight as [N, D, H], which is how it is stored, with what an adapter adds to it."""
        w_NDH = self.w.get_value()
        if self.adapter is None:
            return w_NDH
        return w_NDH + jnp.stack(jnp.split(self.adapter.product(), self.heads or 1, axis=1))

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
        return _with_rest(self, x_XD, y_XF)


def _take_rest(module: Any, linear: Linear) -> None:
    """Gives a projection what a `Linear` has besides its weight."""
    if hasattr(linear, "b"):
        module.b = linear.b
    if linear.adapter is not None:
        module.adapter = linear.adapter


def _with_rest(module: Any, x_XD: jax.Array, y_XF: jax.Array) -> jax.Array:
    """Returns a product with what the adapter and the bias add to it, if there are any."""
    if module.adapter is not None:
        y_XF = y_XF + module.adapter(x_XD, Specs(None, None, None))
    return y_XF + module.b.get_value().astype(y_XF.dtype) if hasattr(module, "b") else y_XF


class StreamedWeight(nnx.Module):
    """A weight of int8 by channel on one device, [F, D], for products of XLA's CPU backend.

    The backend doesn't convert inside a product of float32: it would write the whole weight as float32 and read that.
    It does multiply int8 with int8, but only several rows at a time with the processor's instructions for it. One token
    x is therefore written as two rows of int8, x = s (h + l / 254), which is exact to 2**-15 of its largest number.
    """

    def __init__(self, weight: StoredWeight):
        values, scale_F = weight.channels()
        self.values = StoredNumbers(values if weight.axis == -1 else values.T)
        self.scale = StoredNumbers(scale_F)

    def product(self, x_XD: jax.Array) -> jax.Array:
        """Returns [X, F] in x's type; of several tokens x is rounded to bfloat16, which has 2 bits more than int8."""
        values_FD, scale_F, dtype = self.values.get_value(), self.scale.get_value(), x_XD.dtype
        if len(x_XD) == 1:
            y_XF = _product_of_token(x_XD.astype(jnp.float32), values_FD)
        else:
            x_XD, values_FD = x_XD.astype(jnp.bfloat16), values_FD.astype(jnp.bfloat16)
            wide = jnp.float32
            y_XF = jnp.einsum("XD,FD->XF", x_XD, values_FD, preferred_element_type=wide)
        return (y_XF * scale_F).astype(dtype)

    def rows(self, numbers: jax.Array) -> jax.Array:
        """Returns rows [..., D], in float32."""
        scale = self.scale.get_value()[numbers]
        return self.values.get_value()[numbers] * scale[..., None]


def _product_of_token(x_1D: jax.Array, values_FD: jax.Array) -> jax.Array:
    """Returns the products [1, F] of a token with rows of int8."""
    high = quantize(x_1D, "int8")
    low = quantize(x_1D - high.dequantized(), "int8", scale=high.scale / 254)
    rows_2D = jnp.concatenate([high.values, low.values])
    sums_2F = jnp.einsum("XD,FD->XF", rows_2D, values_FD, preferred_element_type=jnp.int32)
    y_F = (sums_2F[0] + sums_2F[1].astype(jnp.float32) / 254) * high.scale
    return y_F


class StreamedLinear(nnx.Module):
    """A `Linear` whose weight is a `StreamedWeight`."""

    adapter: Any = None

    def __init__(self, linear: Linear):
        self.w = StreamedWeight(linear.w)
        _take_rest(self, linear)

    def __call__(self, x_XD: jax.Array, _out: str = "act") -> jax.Array:
        """Projects x [X, D] to [X, F] in x's type."""
        return _with_rest(self, x_XD, self.w.product(x_XD))


class StreamedEmbedding(nnx.Module):
    """An `Embedding` that serves as the output layer, whose table is a `StreamedWeight` [V, D]."""

    def __init__(self, embed: Embedding):
        self.w = StreamedWeight(embed.table)

    def __call__(self, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Looks up tokens [B, T] and returns [B, T, D] in `dtype`."""
        return self.w.rows(tokens_BT).astype(dtype)

    def attend(self, x_XD: jax.Array) -> jax.Array:
        """Returns the products of x [X, D] with every token vector, [X, V]."""
        return self.w.product(x_XD)


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

    Quantized projections and those that Qwix has taken stay as they are, and so do those with stored weights unless
    they are int8 by channel.
    """
    for _, module in list(nnx.iter_modules(model)):
        for name, child in list(vars(module).items()):
            if not isinstance(child, Linear) or child.quantization or is_qwixed(child):
                continue
            if not isinstance(child.w, StoredWeight):
                setattr(module, name, SplitLinear(child, parts))
            elif _is_streamed(child.w) and child.heads is None:
                setattr(module, name, StreamedLinear(child))
    if model.cfg.tie_embeddings and _is_streamed(model.embed.table):
        model.embed = StreamedEmbedding(model.embed)
    return model


def _is_streamed(weight: Any) -> bool:
    return isinstance(weight, StoredWeight) and weight.kind == "int8" and weight.by_channel
