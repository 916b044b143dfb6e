"""Tiles of a matrix product in a Pallas kernel for GPUs: their sizes, order, loads and stores.

A reference is the whole array, and a program takes its own tiles. Only one that may reach past an end is masked.

Chapters: 19.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MIN_TILE = 16  # a matrix product of Triton's has no smaller side
# Programs next to each other in the grid run at the same time. In bands so high they read each other's tiles from
# the cache.
BAND = 8


class Tile(NamedTuple):
    """A kernel's tile: rows and columns of its result, the contraction's step, warps, and loads under way."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


def fitted(tile: Tile, rows: int, columns: int, step: int) -> Tile:
    """Makes a tile no larger than what it is a tile of."""

    def fit(size: int, whole: int) -> int:
        return min(size, max(MIN_TILE, pl.next_power_of_2(whole)))

    return tile._replace(
        rows=fit(tile.rows, rows), columns=fit(tile.columns, columns), step=fit(tile.step, step)
    )


def place(program, tall: int, wide: int):
    """The tile of a program, (row, column): down a band of rows, then to the next column."""
    band = program // (BAND * wide)
    high = jnp.minimum(tall - band * BAND, BAND)
    within = program - band * BAND * wide
    return band * BAND + within % high, within // high


class Side(NamedTuple):
    """One side of a tile: `size` places from `start`; those from `end` on are outside. None: all are inside."""

    start: Any
    size: int
    end: Any


def side(block, size: int, whole: int) -> Side:
    """The side of tile number `block` of those that `whole` places are cut into."""
    return Side(block * size, size, whole if whole % size else None)


def _part(index: tuple, sides: tuple[Side, ...]):
    """Returns the index of a tile of the last two dimensions, and what of it is inside, or None for all."""
    shape, inside = tuple(side.size for side in sides), None
    for axis, side in enumerate(sides):
        if side.end is not None:
            places = side.start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            inside = places < side.end if inside is None else inside & (places < side.end)
    return (*index, *(pl.ds(side.start, side.size) for side in sides)), inside


def load(ref, index: tuple, *sides: Side):
    """Loads a tile of a matrix; what is outside is 0."""
    part, inside = _part(index, sides)
    return plgpu.load(ref.at[part], mask=inside, other=None if inside is None else 0)


def store(ref, index: tuple, value, *sides: Side):
    """Stores what of a tile is inside."""
    part, inside = _part(index, sides)
    plgpu.store(ref.at[part], value.astype(ref.dtype), mask=inside)


def dot(a, b):
    """Multiplies two tiles, summing in float32; float32 is not rounded to what the matrix units take."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
