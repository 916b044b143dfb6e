"""The grid of TPU flash attention: which blocks each step works on, and what it loads and stores.

A grid over all pairs of blocks would also visit those the mask excludes. This one is a list of the others, built with
NumPy while the program is traced. It is copied to scalar memory before the kernel starts ("scalar prefetch"). The
index maps that choose each step's blocks read it there, so the next step's blocks load while this one computes.

Chapters: 17.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.kernels.attention.mask import Mask

LANES = 128
# More bits of a step's kind, beside those of `Mask.kinds`: the first and the last step of one sum.
FIRST, LAST = 4, 8


class Tile(NamedTuple):
    """A part of a block, small enough that its logits stay in registers.

    Attributes:
      q: queries in the tile.
      kv: keys in the tile.
      ahead: how many tiles' products are computed ahead of the tile in use.
    """

    q: int
    kv: int
    ahead: int = 0


class BlockShape(NamedTuple):
    """How the kernels divide their work.

    One choice of tiles serves all chips. With blocks of 512, v5e and v6e keep their matrix units at least as busy as
    JAX's splash attention does, with no more spills; tests/compiler/test_llo.py compares them. With forward tiles of
    (256, 128, 1) a v6e would need a tenth fewer cycles, and spill twice as much.

    Attributes:
      q: queries per block, a multiple of 128.
      kv: keys per block, a multiple of 128.
      forward: tiles of the forward kernel.
      dq: tiles of the kernel for the gradient of queries.
      dkv: tiles of the kernel for the gradients of keys and values.
    """

    q: int = 512
    kv: int = 512
    forward: Tile = Tile(128, 128, ahead=8)
    dq: Tile = Tile(256, 256, ahead=1)
    dkv: Tile = Tile(128, 256, ahead=2)

    def fit(self, T: int, mask: Mask) -> "BlockShape":
        """Shrinks blocks to T in whole lanes and to divisors of the mask's blocks, and tiles to divisors of blocks."""
        whole = -(-T // LANES) * LANES
        q, kv = min(self.q, whole), min(self.kv, whole)
        if mask.blocks is not None:
            q, kv = math.gcd(q, mask.block), math.gcd(kv, mask.block)
        tiles = (Tile(math.gcd(q, t.q), math.gcd(kv, t.kv), t.ahead) for t in self[2:])
        return BlockShape(q, kv, *tiles)


class Task(NamedTuple):
    """What a kernel needs at tracing time, beside the shapes of its arrays.

    Attributes:
      mask: which keys a query sees.
      softcap: the bound on logits, or None.
      tokens: T without padding.
      shape: block and tile sizes.
    """

    mask: Mask
    softcap: float | None
    tokens: int
    shape: BlockShape

    def tiles(self, tile: Tile) -> list[tuple[Any, Any]]:
        """Returns a block's tiles, each as a slice of its keys and a slice of its queries."""
        return [
            (pl.ds(s, tile.kv), pl.ds(t, tile.q))
            for t in range(0, self.shape.q, tile.q)
            for s in range(0, self.shape.kv, tile.kv)
        ]


class Plan(NamedTuple):
    """The steps of a grid, as int32 arrays of equal length.

    Attributes:
      q: each step's block of queries.
      kv: each step's block of keys.
      kind: bits SOME or ALL for what is seen (neither: nothing), plus FIRST and LAST.
    """

    q: Any
    kv: Any
    kind: Any


def plan(task: Task, *, by_kv: bool = False) -> Plan:
    """Returns the steps that the mask leaves, ordered by block of queries or, with `by_kv`, of keys.

    An accumulator whose blocks are all excluded still gets one step, which computes nothing and stores its zeros.
    """
    kinds = task.mask.kinds(task.tokens, task.shape.q, task.shape.kv)
    rows = kinds.T if by_kv else kinds
    steps, other = [], 0
    for row, seen in enumerate(rows):
        # A step without work names the block that's already there, so nothing is loaded for it.
        others = [int(x) for x in np.flatnonzero(seen)] or [other]
        row_kinds = [int(seen[x]) for x in others] if seen.any() else [0]
        row_kinds[0] |= FIRST
        row_kinds[-1] |= LAST
        steps += [(row, x, kind) for x, kind in zip(others, row_kinds, strict=True)]
        other = others[-1]
    row, column, kind = np.array(steps, np.int32).T
    return Plan(column, row, kind) if by_kv else Plan(row, column, kind)


def _specs(task: Task, H: int, group: int, by_kv: bool) -> dict[str, pl.BlockSpec]:
    """Returns which block of each kind of array a step reads or writes.

    The grid is (B, N, steps), or (B, K, steps, N/K) for gradients of keys: a key head's blocks stay in VMEM while its
    query heads go by.
    """
    bq, bkv = task.shape[:2]

    def at(b, head, step, *rest):
        *member, q, kv, _ = rest
        if by_kv:
            return b, head * group + member[0], head, q[step], kv[step]
        return b, head, jax.lax.div(head, group), q[step], kv[step]

    def spec(shape, index):
        return pl.BlockSpec(shape, lambda *ids: index(*at(*ids)))

    return {
        "q": spec((None, None, bq, H), lambda b, n, k, i, j: (b, n, i, 0)),
        "kv": spec((None, None, bkv, H), lambda b, n, k, i, j: (b, k, j, 0)),
        "row": spec((None, None, 1, bq), lambda b, n, k, i, j: (b, n, 0, i)),
        "q_segments": spec((None, 1, bq), lambda b, n, k, i, j: (b, 0, i)),
        "kv_segments": spec((None, bkv, 1), lambda b, n, k, i, j: (b, j, 0)),
    }


def call(kernel, task, arrays, segments_BT, *, by_kv, ins, outs, out_shapes, scratch, first=()):
    """Calls a kernel for each step of its plan. `ins` and `outs` are keys of `_specs`; None is no output."""
    q, k = arrays[:2]
    (B, N, T, H), (K, S) = q.shape, k.shape[1:3]
    specs = _specs(task, H, N // K, by_kv)
    q_segments = kv_segments = None
    if segments_BT is not None:
        padded = jnp.pad(segments_BT, ((0, 0), (0, max(T, S) - task.tokens)), constant_values=-1)
        q_segments = padded[:, None, :T]
        kv_segments = padded[:, :S, None]
    steps = plan(task, by_kv=by_kv)
    segments = [None, None] if segments_BT is None else ["q_segments", "kv_segments"]
    inner = ("parallel", "parallel", "arbitrary", "arbitrary")
    grid = (B, K, len(steps.q), N // K) if by_kv else (B, N, len(steps.q))
    return pl.pallas_call(
        partial(kernel, task),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[
                *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in first),
                *(name and specs[name] for name in (*ins, *segments)),
            ],
            out_specs=[name and specs[name] for name in outs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=inner[: len(grid)]),
        name=kernel.__name__.strip("_"),
    )(*steps, *first, *arrays, q_segments, kv_segments)
