"""Which keys a query may see, described so that a kernel can plan its work before anything runs.

A mask of T x T booleans has to be read. This description says of a whole block whether all, some or none of it is
seen. Segments of packed rows are known only at run time and aren't part of it.

Chapters: 4, 17.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitext.errors import UserError

NONE, SOME, ALL = 0, 1, 2


@dataclass(frozen=True)
class Mask:
    """The conditions for query t to see key s. All of them must hold.

    Attributes:
      causal: whether s <= t is required.
      window: requires s > t - window: a token sees itself and the window-1 before it (Beltagy et al. 2020). None means
        no limit.
      chunk: requires t and s to lie in the same chunk of that many positions, t // chunk == s // chunk (Llama 4, 2025).
        None means no limit.
      blocks: [T/block][T/block] booleans: which squares of `block` x `block` tokens are seen at all (Child et al.
        2019). None means all.
      block: tokens along the side of such a square.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    blocks: tuple[tuple[bool, ...], ...] | None = None
    block: int = 128

    def problem(self, T: int) -> str | None:
        """Returns why this can't be a mask for T tokens, or None."""
        if self.window is not None and self.window < 1:
            return f"window={self.window}: a token sees at least itself; choose 1 or more"
        if self.chunk is not None and self.chunk < 1:
            return f"chunk={self.chunk}: a chunk holds at least one token; choose 1 or more"
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

    def __str__(self) -> str:
        """Names what tells this mask from a causal one: `window=7`."""
        given = {"window": self.window, "chunk": self.chunk}
        words = [f"{name}={x}" for name, x in given.items() if x is not None]
        words += [] if self.causal else ["causal=False"]
        words += [] if self.blocks is None else [f"blocks of {self.block}"]
        return ", ".join(words) or "causal"

    def within(self, T: int) -> "Mask":
        """Returns the same mask of T tokens without a window or a chunk that holds them all.

        With a symbolic T (`jax.export`) nothing is known to hold them all.
        """
        if not isinstance(T, int):
            return self
        limits = {"window": self.window, "chunk": self.chunk}
        reached = {name: x if x is not None and x < T else None for name, x in limits.items()}
        return dataclasses.replace(self, **reached)

    def sees(self, t: Any, s: Any) -> Any:
        """Returns which positions t of queries see which s of keys (arrays that broadcast), regardless of `blocks`."""
        seen = (s <= t) if self.causal else (s == s) & (t == t)
        if self.window is not None:
            seen = seen & (s > t - self.window)
        if self.chunk is not None:
            # Kernels have few queries' positions in a register and many keys': only the former are divided.
            start = t - t % self.chunk
            seen = seen & (s >= start)
            if not self.causal:
                seen = seen & (s < start + self.chunk)
        return seen

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
        every = (least >= low) & (most <= high) & (first_kv + block_kv <= T)
        some = np.maximum(least, low) <= np.minimum(most, high)
        if self.chunk is not None:
            first, last = np.minimum(first_q, first_kv), np.maximum(last_q, last_kv)
            every &= first // self.chunk == last // self.chunk
            # If any token is seen, then one of the first chunk that queries and keys share: where they share more, both
            # reach its end.
            start = np.maximum(first_q, first_kv) // self.chunk * self.chunk
            end = start + self.chunk - 1
            first_q, first_kv = np.maximum(first_q, start), np.maximum(first_kv, start)
            last_q, last_kv = np.minimum(last_q, end), np.minimum(last_kv, end)
            least, most = first_q - last_kv, last_q - first_kv
            some = np.maximum(least, low) <= np.minimum(most, high)
            some &= (first_q <= last_q) & (first_kv <= last_kv)
        kinds = some.astype(np.int32) + (some & every)
        if self.blocks is not None:
            assert self.block % block_q == 0 and self.block % block_kv == 0
            open_ = np.array(self.blocks, bool)
            kinds *= open_[first_q // self.block, first_kv // self.block]
        return kinds


CAUSAL = Mask()


def check_options(op: str, T: int, mask: Mask, softcap: float | None, *, causal: bool = False):
    """Checks what attention is asked for, beside its arrays.

    Args:
      op: the function that is asked, to be named in an error.
      T: number of tokens.
      mask: which keys a query sees.
      softcap: the bound on logits, or None.
      causal: whether the function needs a causal mask without `blocks`.

    Raises:
      UserError: for a mask that isn't one for T tokens or that the function doesn't take, and a soft-cap not above 0.
    """
    if reason := mask.problem(T):
        raise UserError(f"{op}'s mask: {reason}")
    if causal and (not mask.causal or mask.blocks is not None):
        raise UserError(
            f"{op} computes causal attention, perhaps with a window or a chunk: the mask has {mask}"
        )
    if softcap is not None and not softcap > 0:
        raise UserError(f"{op}'s softcap={softcap}: choose a positive number, or None")
