"""Which blocks a flash attention kernel on a GPU visits, and how it loads and stores them.

Blocks that a mask excludes aren't visited. Causality, windows and chunks leave an interval of blocks, whose bounds a
program computes. It compares positions only at the ends of the interval, as the blocks between are seen whole. A
block-sparse mask leaves a list of blocks, which a program reads.

Chapters: 17.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from minitext.kernels.attention.mask import ALL, NONE, SOME, Mask


class Tile(NamedTuple):
    """A kernel's block: its queries and keys, the warps that share it, and how many loads its loop keeps in flight."""

    q: int
    k: int
    warps: int
    stages: int


class Walk(NamedTuple):
    """The blocks that a program visits, as ranges of steps.

    Attributes:
      ranges: (low, high, masked): steps from low up to high, and whether they must compare positions.
      at: returns the block of a step.
    """

    ranges: list[tuple[Any, Any, bool]]
    at: Callable[[Any], Any]

    def run(self, visit: Callable, carry):
        """Returns `carry` after `carry = visit(block, carry, masked)` at every step."""
        for low, high, masked in self.ranges:
            carry = jax.lax.fori_loop(
                low, high, lambda i, carry, masked=masked: visit(self.at(i), carry, masked), carry
            )
        return carry


def keys_of(i, tile: Tile, T: int, mask: Mask, table=None) -> Walk:
    """Returns the blocks of keys that queries [i * q, (i + 1) * q) see."""
    if table is not None:
        return _listed(i, table)
    first, last = i * tile.q, (i + 1) * tile.q - 1
    low, whole_low, whole_high, high = 0, 0, T // tile.k, pl.cdiv(T, tile.k)
    if mask.causal:
        whole_high, high = (first + 1) // tile.k, jnp.minimum(high, last // tile.k + 1)
    if mask.window is not None:
        low = jnp.maximum(first - mask.window + 1, 0) // tile.k
        whole_low = pl.cdiv(jnp.maximum(last - mask.window + 1, 0), tile.k)
    if mask.chunk is not None:
        start, last_start = (t // mask.chunk * mask.chunk for t in (first, last))
        low = jnp.maximum(low, start // tile.k)
        whole_low = jnp.maximum(whole_low, pl.cdiv(last_start, tile.k))
        high = jnp.minimum(high, pl.cdiv(last_start + mask.chunk, tile.k))
        whole_high = jnp.minimum(whole_high, (start + mask.chunk) // tile.k)
    limited = mask.window is not None or mask.chunk is not None
    ends = limited, mask.causal or mask.chunk is not None or T % tile.k > 0
    return _interval(low, whole_low, whole_high, high, *ends)


def queries_of(j, tile: Tile, T: int, mask: Mask, table=None) -> Walk:
    """Returns the blocks of queries that see keys [j * k, (j + 1) * k)."""
    if table is not None:
        return _listed(j, table)
    first, last = j * tile.k, (j + 1) * tile.k - 1
    low, whole_low, whole_high, high = 0, 0, T // tile.q, pl.cdiv(T, tile.q)
    if mask.causal:
        low, whole_low = first // tile.q, pl.cdiv(last, tile.q)
    if mask.window is not None:
        high = jnp.minimum(high, (last + mask.window - 1) // tile.q + 1)
        whole_high = jnp.minimum(whole_high, (first + mask.window) // tile.q)
    if mask.chunk is not None:
        start, last_start = (s // mask.chunk * mask.chunk for s in (first, last))
        low = jnp.maximum(low, start // tile.q)
        whole_low = jnp.maximum(whole_low, pl.cdiv(last_start, tile.q))
        high = jnp.minimum(high, pl.cdiv(last_start + mask.chunk, tile.q))
        whole_high = jnp.minimum(whole_high, (start + mask.chunk) // tile.q)
    limited = mask.window is not None or mask.chunk is not None
    ends = mask.causal or mask.chunk is not None, limited or T % tile.q > 0
    return _interval(low, whole_low, whole_high, high, *ends)


def _interval(low, whole_low, whole_high, high, first_masked: bool, last_masked: bool) -> Walk:
    ranges = []
    if first_masked:
        whole_low = jnp.minimum(whole_low, high)
        ranges.append((low, whole_low, True))
        low = whole_low
    if last_masked:
        whole_high = jnp.maximum(jnp.minimum(whole_high, high), low)
        ranges.append((low, whole_high, False))
        low = whole_high
    return Walk([*ranges, (low, high, last_masked)], lambda step: step)


def _listed(i, table) -> Walk:
    blocks_ref, whole_ref, count_ref = table
    whole, count = whole_ref[i], count_ref[i]
    return Walk([(0, whole, False), (whole, count, True)], lambda step: blocks_ref[i, step])


def sparse_table(tile: Tile, T: int, mask: Mask, of_keys: bool = False):
    """Returns the table that programs read for a block-sparse mask, or None for other masks.

    Returns:
      The blocks of keys that each block of queries visits [n, most], with those it sees whole first; the number of
      whole ones [n]; the number of all [n]. With `of_keys`, the blocks of queries for each block of keys.
    """
    if mask.blocks is None:
        return None
    kinds = mask.kinds(T, tile.q, tile.k)
    if of_keys:
        kinds = kinds.T
        if T % tile.q:
            kinds[:, -1] = np.minimum(kinds[:, -1], SOME)  # because its load must be masked
    whole, count = np.sum(kinds == ALL, axis=1), np.sum(kinds != NONE, axis=1)
    order = np.argsort(-kinds, axis=1, kind="stable")[:, : max(1, count.max())]
    return tuple(jnp.asarray(x, jnp.int32) for x in (order, whole, count))


def visible(t, s, T: int, mask: Mask, masked: bool, t_segments, s_segments):
    """Returns which keys at positions s the queries at positions t see, as booleans that broadcast; None if all."""
    conditions = []
    if masked and (mask.causal or mask.window is not None or mask.chunk is not None):
        conditions.append(mask.sees(t, s))
    if masked and not mask.causal:
        conditions.append(s < T)
    if t_segments is not None:
        conditions.append(t_segments == s_segments)
    return functools.reduce(operator.and_, conditions) if conditions else None


def load_rows(ref, block, size: int, T: int, masked: bool = True, head=None) -> Any:
    """Loads a block of T rows; those past the end are 0.

    Args:
      ref: [T, H] or [T], with `head` [T, heads, H] or [heads, T]; None gives None.
      block: the number of the block.
      size: rows per block.
      T: the number of rows in all.
      masked: whether the block may reach past the end.
      head: which head to load.
    """
    if ref is None:
        return None
    rows = pl.ds(block * size, size)
    index: Any = rows
    if head is not None:
        index = (head, rows) if len(ref.shape) == 2 else (rows, head)
    part = ref.at[index]
    if not masked or T % size == 0:
        return plgpu.load(part)
    return plgpu.load(part, mask=_inside(block, part.shape, T), other=0)


def store_rows(ref, block, value, T: int):
    """Stores a block of T rows, except those past the end."""
    size, value = value.shape[0], value.astype(ref.dtype)
    mask = _inside(block, value.shape, T) if T % size else None
    plgpu.store(ref.at[pl.ds(block * size, size)], value, mask=mask)


def _inside(block, shape: tuple[int, ...], T: int):
    rows = block * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return rows < T
