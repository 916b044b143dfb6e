"""Tiles of a matrix product in a Pallas kernel for GPUs: their sizes, order, loads and stores.

A kernel's reference is to the whole array, and each program takes its own tiles from it. Only tiles that may reach
past an array's end are masked.

Chapters: 19.
"""

import math
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.pallas.triton import lowering as triton_lowering  # for `scaled_exp2`'s rule
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

LOG2_E = math.log2(math.e)  # a GPU computes powers of 2
MIN_TILE = 16  # the smallest side of a matrix product in Triton
# Neighbours in the grid run at the same time. In bands this many tiles high, they find each other's tiles in the cache.
BAND = 8


class Tile(NamedTuple):
    """A tile of a kernel's result: its rows and columns, the contraction's step, warps, and loads in flight."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


def fitted(tile: Tile, rows: int, columns: int, step: int) -> Tile:
    """Shrinks a tile to the array it is part of."""

    def fit(size: int, whole: int) -> int:
        return min(size, max(MIN_TILE, pl.next_power_of_2(whole)))

    return tile._replace(
        rows=fit(tile.rows, rows), columns=fit(tile.columns, columns), step=fit(tile.step, step)
    )


def place(program, tall: int, wide: int):
    """Returns a program's tile as (row, column): programs go down a band of rows, then to the next column."""
    band = program // (BAND * wide)
    high = jnp.minimum(tall - band * BAND, BAND)
    within = program - band * BAND * wide
    return band * BAND + within % high, within // high


class Side(NamedTuple):
    """One side of a tile: `size` positions from `start`. Those from `end` on are outside; with None, all are inside."""

    start: Any
    size: int
    end: Any


def side(block, size: int, length: int) -> Side:
    """Returns the side of tile number `block`, when `length` positions are cut into tiles of `size`."""
    return Side(block * size, size, length if length % size else None)


def _part(index: tuple, sides: tuple[Side, ...]):
    """Returns the index of a tile of the last dimensions, and which of its elements are inside; None for all."""
    shape, inside = tuple(side.size for side in sides), None
    for axis, side in enumerate(sides):
        if side.end is not None:
            position = side.start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            inside = position < side.end if inside is None else inside & (position < side.end)
    return (*index, *(pl.ds(side.start, side.size) for side in sides)), inside


def load(ref, index: tuple, *sides: Side):
    """Loads a tile; elements outside the array are 0."""
    part, inside = _part(index, sides)
    return plgpu.load(ref.at[part], mask=inside, other=None if inside is None else 0)


def store(ref, index: tuple, value, *sides: Side):
    """Stores the part of a tile that is inside the array."""
    part, inside = _part(index, sides)
    plgpu.store(ref.at[part], value.astype(ref.dtype), mask=inside)


def dot(a, b):
    """Multiplies two tiles, summing in float32; float32 tiles aren't rounded to what the matrix units take."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def scaled_exp2(x, scale: float, shift) -> jax.Array:
    """Returns 2^(scale x + shift) for float32 arrays of one shape, in the two instructions that a GPU has for it.

    From `jnp.exp2(scale * x + shift)` the compiler makes seven: it rounds the product before it adds, and keeps results
    below 2^-126, which become 0 here.
    """
    return _scaled_exp2.bind(x, jnp.broadcast_to(shift, x.shape), scale=float(scale))


_scaled_exp2 = Primitive("scaled_exp2")
_scaled_exp2.def_abstract_eval(lambda x, shift, *, scale: x)


def _by_jnp(x, shift, *, scale: float):
    return jnp.exp2(scale * x + shift)


def _by_instructions(x, shift, *, scale: float):
    number = struct.pack(">f", scale).hex()  # as PTX writes a float32
    [result] = plgpu.elementwise_inline_asm(
        f"{{ .reg .f32 y; fma.rn.f32 y, $1, 0f{number}, $2; ex2.approx.ftz.f32 $0, y; }}",
        args=[x, shift], constraints="=f,f,f", pack=1, result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )  # fmt: skip
    return result


mlir.register_lowering(_scaled_exp2, mlir.lower_fun(_by_jnp, multiple_results=False))
triton_lowering.register_lowering(_scaled_exp2)(
    triton_lowering.lower_fun(_by_instructions, multiple_results=False)
)


def whole(x) -> pl.BlockSpec:
    """Gives every program the whole array."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def params(tile) -> plgpu.CompilerParams:
    """Returns the compiler's settings for a tile with `warps` and `stages`."""
    return plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)


def call(kernel, args, out, grid: tuple[int, ...], tile: Tile, name: str):
    """Calls a kernel whose programs find their own parts of the arrays."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole(x) for x in args],
        out_specs=jax.tree.map(whole, out),
        out_shape=out,
        compiler_params=params(tile),
        name=name,
    )(*args)
