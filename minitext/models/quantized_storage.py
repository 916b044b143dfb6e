"""Weights stored as narrow numbers with scales beside them, and the products that read them.

A weight is divided into blocks along what a product sums over (its inputs), or one block has all inputs of an output
(by channel). The numbers of a block share a scale, which is that of the largest (`quantization.absmax_scale`).

- int8, fp8 (e4m3): a number is a byte.
- int4: whole numbers from -7 to 7, stored as 1 to 15, two to a byte.
- nf4: 16 levels between -1 and 1 that are about equally frequent in normally distributed numbers (Dettmers et al.
  2023, "QLoRA", appendix E), two to a byte.

The two numbers in a byte are b/2 apart in their block of b, the first in the low four bits. The scales are float32 for
whole channels; for blocks they are bfloat16, which costs half a bit for each number in blocks of 32.

Chapters: 25.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from minitext import kernels
from minitext.config.quantization import StorageRule
from minitext.errors import UserError
from minitext.kernels.linear.xla import Specs
from minitext.models.quantization import FORMATS, Quantized, absmax_scale, match_rules, quantize
from minitext.sharding.rules import ShardingRules

KINDS = {"int8": "int8", "fp8": "e4m3", "int4": "int4"}  # names of rules in `FORMATS`
PACKED = ("int4", "nf4")  # two numbers to a byte
OFFSET = 8  # added to a whole number of four bits
# bitsandbytes has the same sixteen numbers.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def store(w: jax.Array, kind: str, block: int | None = None, axis: int = -2) -> Quantized:
    """Returns a weight as it is stored.

    Args:
      w: float32 [..., D, ...], whose dimension `axis` a product sums over.
      kind: int8, fp8, int4 or nf4.
      block: numbers that share a scale; the last block may be shorter. None: all D.
      axis: -1 or before, counted from the end.

    Returns:
      `values` [..., n, b, ...] with D in n blocks of b numbers, of int4 and nf4 [..., n, ceil(b / 2), ...] as uint8,
      and `scale` [..., n, 1, ...]. An infinity or NaN makes its scale, and so its block, infinite or NaN.
    """
    blocks = in_blocks(w, block, axis)
    scale = scales(blocks, kind, block, axis)
    return Quantized(encode(blocks, kind, scale, axis), scale)


def restore(
    stored: Quantized, kind: str, size: int, block: int | None = None, axis: int = -2
) -> jax.Array:
    """Returns the float32 weight that `store` stored; `size` is D, the other arguments are those of `store`."""
    numbers = decode(stored.values, kind, block_length(size, block), axis)
    return out_of_blocks(numbers * stored.scale.astype(jnp.float32), size, axis)


def block_length(size: int, block: int | None) -> int:
    """Returns how many of `size` numbers share a scale."""
    return min(block or size, size)


def in_blocks(w: jax.Array, block: int | None, axis: int = -2) -> jax.Array:
    """Divides the dimension `axis`, D, into n blocks of b numbers, the last one filled up with zeros."""
    size = w.shape[axis]
    block = block_length(size, block)
    count = -(-size // block)
    padding = [(0, 0)] * w.ndim
    padding[axis] = (0, count * block - size)
    at = w.ndim + axis
    shape = (*w.shape[:at], count, block, *w.shape[at + 1 :])
    return jnp.reshape(jnp.pad(w.astype(jnp.float32), padding), shape)


def out_of_blocks(blocks: jax.Array, size: int, axis: int = -2) -> jax.Array:
    """Joins the dimensions n and b before and at `axis`, and leaves out what fills up the last block."""
    at = blocks.ndim + axis
    joined = jnp.reshape(blocks, (*blocks.shape[: at - 1], -1, *blocks.shape[at + 1 :]))
    return jax.lax.slice_in_dim(joined, 0, size, axis=at - 1)


def scales(blocks: jax.Array, kind: str, block: int | None, axis: int = -2) -> jax.Array:
    """Returns the scales of weights in blocks [..., n, b, ...], [..., n, 1, ...]."""
    limit = 1.0 if kind == "nf4" else FORMATS[KINDS[kind]].limit
    return absmax_scale(blocks, limit, (axis,), jnp.bfloat16 if block else jnp.float32)


def encode(blocks: jax.Array, kind: str, scale: jax.Array, axis: int = -2) -> jax.Array:
    """Returns the nearest stored numbers to weights in blocks, given their scales."""
    scale = scale.astype(jnp.float32)
    if kind == "nf4":
        steps = blocks / scale
        codes = jnp.zeros(steps.shape, jnp.uint8)
        for low, high in itertools.pairwise(NF4):
            codes += steps > (low + high) / 2
        return pack(codes, axis)
    values = quantize(blocks, KINDS[kind], scale=scale).values
    if kind == "int4":
        return pack((values.astype(jnp.int8) + OFFSET).astype(jnp.uint8), axis)
    return values


def decode(values: jax.Array, kind: str, length: int, axis: int = -2) -> jax.Array:
    """Returns stored numbers in float32, without their scales, in blocks of `length` numbers."""
    if kind not in PACKED:
        return values.astype(jnp.float32)
    codes = unpack(values, length, axis)
    if kind == "nf4":
        # Comparisons fuse with what follows, on every mesh; a lookup doesn't.
        numbers = jnp.full_like(codes, NF4[0], jnp.float32)
        for code, level in enumerate(NF4):
            numbers = jnp.where(codes == code, level, numbers)
        return numbers
    return codes.astype(jnp.float32) - OFFSET


def pack(codes: jax.Array, axis: int = -2) -> jax.Array:
    """Puts numbers from 0 to 15 into bytes: number i of b with number i + ceil(b / 2), along a dimension."""
    half = -(-codes.shape[axis] // 2)
    low = jax.lax.slice_in_dim(codes, 0, half, axis=axis)
    high = jax.lax.slice_in_dim(codes, half, codes.shape[axis], axis=axis)
    padding = [(0, 0)] * codes.ndim
    padding[axis] = (0, half - high.shape[axis])
    return low | (jnp.pad(high, padding) << 4)


def unpack(packed: jax.Array, length: int, axis: int = -2) -> jax.Array:
    """Returns the numbers that `pack` put into bytes, `length` of them, as uint8."""
    codes = jnp.concatenate([packed & 15, packed >> 4], axis=axis)
    return jax.lax.slice_in_dim(codes, 0, length, axis=axis)


class StoredNumbers(nnx.Param):
    """A part of a stored weight, which keeps its type wherever other parameters are cast."""


class StoredWeight(nnx.Module):
    """A stored weight, which replaces the parameter of a module.

    Args:
      w: float32 [..., D, ...]; more dimensions before those in `axes` are stacked layers.
      rule: how it is stored.
      axis: of D, counted from the end.
      axes: the names of w's dimensions, without that of stacked layers.
      rules: sharding rules.

    Attributes:
      values, scale: as `store` returns them.
    """

    def __init__(
        self,
        w: jax.Array,
        rule: StorageRule,
        axis: int,
        axes: tuple[str | None, ...],
        rules: ShardingRules,
    ):
        self.kind, self.block, self.axis = rule.dtype, rule.block, axis
        self.axes, self.rules, self.size = axes, rules, w.shape[axis]
        if not jax.sharding.get_abstract_mesh().empty:
            w = jax.sharding.reshard(w, PartitionSpec())
        stored = store(w, self.kind, self.block, axis)
        first, last = axes[:axis], axes[len(axes) + axis + 1 :]
        name = axes[axis]
        # Devices split D by whole blocks; within a block only where every number has its own byte.
        inner = name if not self.block and self.kind not in PACKED else None
        outer = name if self.block else None
        self.values = StoredNumbers(stored.values, axes=(*first, outer, inner, *last))
        self.scale = StoredNumbers(stored.scale, axes=(*first, outer, None, *last))

    @property
    def by_channel(self) -> bool:
        """Whether a product can read the stored numbers as they are, and multiply its result by the scales."""
        return self.values.get_value().shape[self.axis - 1] == 1 and self.kind not in PACKED

    def get_value(self) -> jax.Array:
        """Returns the weight in float32, as a parameter does."""
        stored = Quantized(self.values.get_value(), self.scale.get_value())
        w = self._restored(stored)
        return w if w.ndim > len(self.axes) else self.rules.shard(w, *self.axes)

    def __getitem__(self, where: Any) -> jax.Array:
        """Returns a part of the weight in float32, as a parameter does."""
        return self.get_value()[where]

    def rows(self, numbers: jax.Array) -> jax.Array:
        """Returns rows [..., D] of a table whose `axis` is -1, in float32, whole on each device."""
        rules, first = self.rules, self.axes[0]
        parts = [
            rules.gather(part.get_value(), first, None, None)
            .at[numbers]
            .get(out_sharding=rules.out("batch", "seq", None, None))
            for part in (self.values, self.scale)
        ]
        return self._restored(Quantized(*parts))

    def _restored(self, stored: Quantized) -> jax.Array:
        return restore(stored, self.kind, self.size, self.block, self.axis)

    def channels(self) -> tuple[jax.Array, jax.Array]:
        """Returns the stored numbers of a weight by channel, in its shape, and a scale for each output."""
        values, scale = self.values.get_value(), self.scale.get_value()
        return jnp.squeeze(values, self.axis - 1), jnp.squeeze(scale, (self.axis - 1, self.axis))


def project(x: jax.Array, weight: StoredWeight, specs: Specs) -> jax.Array:
    """Returns `kernels.linear` of tokens with a stored weight [D, F].

    By channel, the product multiplies the stored numbers, and the scales its result. So it reads a byte for each number
    of the weight, where the compiler converts them inside the product.
    """
    if not weight.by_channel:
        return kernels.linear(x, weight.get_value(), specs)
    q_DF, scale_F = weight.channels()
    if specs.w is not None:
        x, q_DF = jax.sharding.reshard(x, specs.x), jax.sharding.reshard(q_DF, specs.w)
        scale_F = jax.sharding.reshard(scale_F, PartitionSpec((specs.y or [None])[-1]))
    return scaled_product("...D,DF->...F", x, q_DF, scale_F, specs.y)


def scaled_product(
    subscripts: str, x: jax.Array, values: jax.Array, scale: jax.Array, out_sharding: Any
) -> jax.Array:
    """Returns an einsum of tokens and stored numbers, times a scale for each number of its last dimension."""
    wide = {"preferred_element_type": jnp.float32, "out_sharding": out_sharding}
    y = jnp.einsum(subscripts, x, values.astype(x.dtype), **wide)
    return (y * scale).astype(x.dtype)


def apply_storage(
    modules: Iterable[tuple[tuple[Any, ...], Any]], rules: Sequence[StorageRule]
) -> None:
    """Stores the weights of each module as the first rule says that its path matches.

    Args:
      modules: paths and modules, as of `nnx.iter_modules`. Those with an attribute `storable`, the dimension that
        products sum over for each of their weights, can be stored.
      rules: of `model.storage`.

    Raises:
      UserError: if a rule matches nothing, or a module whose products are quantized.
    """
    able = {"/".join(map(str, path)): m for path, m in modules if hasattr(m, "storable")}
    for path, number in match_rules(able, rules, "model.storage").items():
        rule, module = rules[number], able[path]
        if rule.dtype == "none":
            continue
        if module.quantization is not None:
            raise UserError(
                f"model.storage[{number}] matches {path}, whose products model.quantization quantizes from float32 "
                "weights: exempt it by an earlier rule with dtype=none in one of them"
            )
        for name, axis in module.storable.items():
            w = getattr(module, name)
            setattr(module, name, StoredWeight(w.get_value(), rule, axis, w.axes, module.rules))


def stored_weights(model: nnx.Module) -> Iterator[tuple[str, StoredWeight]]:
    """Yields the path and the module of each weight that is stored, such as `blocks/ffn/gate/w`."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, StoredWeight):
            yield "/".join(map(str, path)), module
