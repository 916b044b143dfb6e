"""Which keys a query may see, described so that a kernel can plan its work before anything runs.

A mask of T x T booleans has to be read. This description says of a whole block whether all, some or none of it is
seen. Segments of packed rows are known only at run time and aren't part of it.

Chapters: 4, 17.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

NONE, SOME, ALL = 0, 1, 2


@dataclass(frozen=True)
class Mask:
    """The conditions for query t to see key s. All of them must hold.

    Attributes:
      causal: whether s <= t is required.
      window: requires s > t - window: a token sees itself and the window-1 before it (Beltagy et al. 2020). None means
        no limit.
      blocks: [T/block][T/block] booleans: which squares of `block` x `block` tokens are seen at all (Child et al.
        2019). None means all.
      block: tokens along the side of such a square.
    """

    causal: bool = True
    window: int | None = None
    blocks: tuple[tuple[bool, ...], ...] | None = None
    block: int = 128

    def problem(self, T: int) -> str | None:
        """Returns why this can't be a mask for T tokens, or None."""
        if self.window is not None and self.window < 1:
            return f"window={self.window}: a token sees at least itself; choose 1 or more"
        if self.blocks is None:
            return None
        if self.block < 1:
            return f"block={self.block}: choose 1 or more"
        if len({len(self.blocks), *map(len, self.blocks)}) > 1:
            return f"blocks has {len(self.blocks)} rows, and not as many columns in each"
        if len(self.blocks) * self.block < T:
            covered = f"{len(self.blocks)} blocks of {self.block}"
            return f"{covered} tokens don't cover T={T}: give {-(-T // self.block)}"
        return None

    def sees(self, t: Any, s: Any) -> Any:
        """Returns which positions t of queries see which s of keys (arrays that broadcast), regardless of `blocks`."""
        seen = (s <= t) if self.causal else (s == s) & (t == t)
        return seen if self.window is None else seen & (s > t - self.window)

    def of_blocks(self, T: int) -> np.ndarray:
        """Returns [T, T] booleans for `blocks` alone."""
        if self.blocks is None:
            return np.ones((T, T), bool)
        return np.kron(np.array(self.blocks, bool), np.ones((self.block,) * 2, bool))[:T, :T]

    def kinds(self, T: int, block_q: int, block_kv: int) -> np.ndarray:
        """Classifies the blocks of the T x T square by how much of each is seen, without building the square.

        Args:
          T: number of queries and of keys.
          block_q: queries per block; the last block may reach beyond T.
          block_kv: keys per block, likewise. With `blocks`, both must divide `block`.

        Returns:
          [ceil(T/block_q), ceil(T/block_kv)] of NONE, SOME or ALL. Keys beyond T are never seen, so a block that
          reaches past T isn't ALL; queries beyond T don't count.
        """
        first_q = np.arange(0, T, block_q)[:, None]
        first_kv = np.arange(0, T, block_kv)[None]
        last_q = np.minimum(first_q + block_q, T) - 1
        last_kv = np.minimum(first_kv + block_kv, T) - 1
        # Within a block t - s takes every value between these two, and the mask allows an interval of them.
        least, most = first_q - last_kv, last_q - first_kv
        low = 0 if self.causal else -T
        high = T if self.window is None else self.window - 1
        some = np.maximum(least, low) <= np.minimum(most, high)
        every = (least >= low) & (most <= high) & (first_kv + block_kv <= T)
        kinds = some.astype(np.int32) + (some & every)
        if self.blocks is not None:
            assert self.block % block_q == 0 and self.block % block_kv == 0
            open_ = np.array(self.blocks, bool)
            kinds *= open_[first_q // self.block, first_kv // self.block]
        return kinds


CAUSAL = Mask()
