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

from minitext.kernels import block_shapes
from minitext.kernels.attention.mask import Mask

LANES = 128
# More bits of a step's kind, beside those of `Mask.kinds`: the first and the last step of one sum.
FIRST, LAST = 4, 8
NARROW = 512  # the longest block where queries see few keys
BLOCKS_BYTES = 32 * 2**20  # VMEM for blocks, and for registers that the compiler stores there


class Tile(NamedTuple):
    """A part of a block whose products and exponentials are computed at once.

    Attributes:
      q: queries in the tile.
      kv: keys in the tile.
    """

    q: int
    kv: int


class BlockShape(NamedTuple):
    """How the kernels divide their work.

    One choice of tiles serves all chips. A v6e's matrix units are 256 wide: with smaller tiles they take twice as long
    for the same products.

    Attributes:
      q: queries per block, a multiple of 128.
      kv: keys per block, a multiple of 128.
      forward: tiles of the forward kernel.
      backward: tiles of the kernels for gradients.
      column: keys after which the forward kernel takes a maximum.
      resident: whether the gradients of all keys of a head stay in VMEM, and one kernel computes all gradients.
    """

    q: int = 1024
    kv: int = 1024
    forward: Tile = Tile(256, 256)
    backward: Tile = Tile(256, 256)
    column: int = 512
    resident: bool = True

    def fit(self, T: int, mask: Mask) -> "BlockShape":
        """Shrinks blocks to T in whole lanes and to divisors of the mask's blocks, and tiles to divisors of blocks.

        Where a query sees at most 1,024 keys, larger blocks than 512 would mostly hold what is masked.
        """
        most = -(-T // LANES) * LANES
        if min(T, mask.window or T, mask.chunk or T) <= 2 * NARROW:
            most = min(most, NARROW)
        q, kv = min(self.q, most), min(self.kv, most)
        if mask.blocks is not None:
            q, kv = math.gcd(q, mask.block), math.gcd(kv, mask.block)
        forward, backward = (
            Tile(math.gcd(q, t.q), math.gcd(kv, t.kv)) for t in (self.forward, self.backward)
        )
        return BlockShape(q, kv, forward, backward, math.gcd(kv, self.column), self.resident)


def resident_bytes(S: int, H: int, itemsize: int) -> int:
    """Returns the VMEM for the gradients of a head's keys and values: sums in float32 and two buffers of results."""
    return 2 * S * H * (4 + 2 * itemsize)


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

    def tiles(self, tile: Tile, column: int) -> list[tuple[Any, Any]]:
        """Returns a block's tiles, each as a slice of its keys and a slice of its queries.

        Tiles of the same queries follow each other for `column` keys; then come other queries.
        """
        return [
            (pl.ds(s, tile.kv), pl.ds(t, tile.q))
            for start in range(0, self.shape.kv, column)
            for t in range(0, self.shape.q, tile.q)
            for s in range(start, start + column, tile.kv)
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


def _specs(task: Task, S: int, H: int, group: int, by: str) -> dict[str, pl.BlockSpec]:
    """Returns which block of each kind of array a step reads or writes; `by` is as in `call`."""
    bq, bkv = task.shape[:2]

    def at(b, head, *rest):
        *inner, q, kv, _ = rest
        if by == "q":
            (step,) = inner
            return b, head, jax.lax.div(head, group), q[step], kv[step]
        step, member = inner if by == "kv" else reversed(inner)
        return b, head * group + member, head, q[step], kv[step]

    def spec(shape, index):
        return pl.BlockSpec(shape, lambda *ids: index(*at(*ids)))

    return {
        "q": spec((None, None, bq, H), lambda b, n, k, i, j: (b, n, i, 0)),
        "kv": spec((None, None, bkv, H), lambda b, n, k, i, j: (b, k, j, 0)),
        "all_kv": spec((None, None, S, H), lambda b, n, k, i, j: (b, k, 0, 0)),
        "row": spec((None, None, 1, bq), lambda b, n, k, i, j: (b, n, 0, i)),
        "q_segments": spec((None, 1, bq), lambda b, n, k, i, j: (b, 0, i)),
        "kv_segments": spec((None, bkv, 1), lambda b, n, k, i, j: (b, j, 0)),
    }


def _vmem_limit(sums: int) -> int | None:
    """Returns the VMEM that a kernel may use: the compiler grants 16 MiB by default, all that a v4 has."""
    chip = block_shapes.find_this_chip()
    large = chip is not None and (chip.vmem_bytes or 0) > BLOCKS_BYTES
    return BLOCKS_BYTES + sums if large else None


def call(kernel, task, arrays, segments_BT, *, by, ins, outs, out_shapes, scratch, first=()):
    """Calls a kernel for each step of its plan.

    Args:
      kernel: the kernel.
      task: what it needs at tracing time.
      arrays: its inputs, queries and keys first.
      segments_BT: the tokens' segments, or None.
      by: the grid. "q": (B, N, steps), ordered by blocks of queries. "head": (B, K, N/K, steps), likewise: a key
        head's gradients stay in VMEM while its query heads go by. "kv": (B, K, steps, N/K), ordered by blocks of
        keys: those of one block stay.
      ins: keys of `_specs` for the inputs.
      outs: keys of `_specs` for the results; None is no result.
      out_shapes: shapes and types of the results.
      scratch: shapes of float32 arrays in VMEM.
      first: inputs in scalar memory, which come before the others.
    """
    q, k = arrays[:2]
    (B, N, T, H), (K, S) = q.shape, k.shape[1:3]
    specs = _specs(task, S, H, N // K, by)
    q_segments = kv_segments = None
    if segments_BT is not None:
        padded = jnp.pad(segments_BT, ((0, 0), (0, max(T, S) - task.tokens)), constant_values=-1)
        q_segments = padded[:, None, :T]
        kv_segments = padded[:, :S, None]
    steps = plan(task, by_kv=by == "kv")
    count, members = len(steps.q), N // K
    grids = {"q": (B, N, count), "head": (B, K, members, count), "kv": (B, K, count, members)}
    segments = [None, None] if segments_BT is None else ["q_segments", "kv_segments"]
    inner = ("parallel", "parallel", "arbitrary", "arbitrary")
    sums = resident_bytes(S, H, k.dtype.itemsize) if by == "head" else 0
    return pl.pallas_call(
        partial(kernel, task),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grids[by],
            in_specs=[
                *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in first),
                *(name and specs[name] for name in (*ins, *segments)),
            ],
            out_specs=[name and specs[name] for name in outs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=inner[: len(grids[by])], vmem_limit_bytes=_vmem_limit(sums)
        ),
        name=kernel.__name__.strip("_"),
    )(*steps, *first, *arrays, q_segments, kv_segments)
