"""FSDP's all-gather of weights in 8 bits: half the bytes of bfloat16 (ZeRO++'s qwZ, Wang et al. 2023).

Each row of a weight, which one device stores whole or shares with those that compute other features, is rounded to int8
with the scale of its largest number. Devices send the rounded numbers and the scales, and restore the weight where they
multiply by it. The optimizer updates what is stored, in float32. The gradient takes no notice of the rounding, and is
summed in the compute type as without it. A weight is rounded even where there is nothing to gather, so that results
don't depend on the mesh.

Chapters: 25.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from minitext.models.quantization import FORMATS, absmax_scale, quantize


def gather(
    w: jax.Array, dimension: int, spec: PartitionSpec | None, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns a weight rounded to int8, gathered and restored.

    Args:
      w: float32, of any shape.
      dimension: the one whose entries have a scale each, and which is stored in parts.
      spec: how the result is sharded; None where no mesh is set.
      dtype: of the result.
    """
    q = quantize(w, "int8", [axis for axis in range(w.ndim) if axis != dimension])
    if spec is not None:
        rows = [entry if axis == dimension else None for axis, entry in enumerate(spec)]
        values = jax.sharding.reshard(q.values, spec)
        q = q._replace(values=values, scale=jax.sharding.reshard(q.scale, PartitionSpec(*rows)))
    return q.dequantized().astype(dtype)


def multiply(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    w: jax.Array,
    dimension: int,
    spec: PartitionSpec | None,
) -> jax.Array:
    """Returns a product with a rounded weight, which the backward pass gathers again.

    The weight's gradient is that of the product with the weight as it is stored: so devices sum the parts that they
    store, and don't first sum the whole.

    Args:
      product: of x and a weight.
      x: tokens.
      w: float32.
      dimension: see `gather`.
      spec: see `gather`.
    """

    def sent(x, w):
        return gather(w, dimension, spec, x.dtype)

    @jax.custom_vjp
    def rounded(x, w):
        return product(x, sent(x, w))

    def backward(kept, grad):
        x, w = kept
        (grad_x,) = jax.vjp(lambda x: product(x, sent(x, w)), x)[1](grad)
        (grad_w,) = jax.vjp(lambda w: product(x, w), w)[1](grad)
        return grad_x, grad_w

    rounded.defvjp(lambda x, w: (rounded(x, w), (x, w)), backward)
    return rounded(x, w)


def gather_part(
    whole: Callable[[jax.Array], jax.Array],
    w: jax.Array,
    axes: tuple[str, ...],
    *,
    features: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Does what `gather` does within a `shard_map`, for experts' weights, of which each has scales of its own.

    Args:
      whole: gathers an array of w's rank from the parts that devices store; it is linear.
      w: the part that this device stores, float32.
      axes: mesh axes that split the features.
      features: the dimension of the features, which share a scale.
      dtype: of the result.
    """

    @jax.custom_vjp
    def sent(w):
        scale = absmax_scale(w, FORMATS["int8"].limit, [features])
        q = quantize(w, "int8", scale=jax.lax.pmax(scale, axes) if axes else scale)
        q = q._replace(values=whole(q.values), scale=whole(q.scale))
        return q.dequantized().astype(dtype)

    def backward(w, grad):
        return jax.vjp(lambda w: whole(w.astype(dtype)), w)[1](grad)

    sent.defvjp(lambda w: (sent(w), w), backward)
    return sent(w)
