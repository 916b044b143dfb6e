import itertools

import numpy as np


# EXERCISE 07.bpe_merge
def merge_step(words, counts, new_id):
    """One step of byte-pair encoding: find the most frequent pair and merge it.

    Args:
      words: list of lists of ints, the ids of each different word; a word may
        be empty.
      counts: list of ints of at least 1, how often each of these words occurs
        in the text.
      new_id: int, the id that replaces the pair.

    Returns:
      (pair, words): the tuple of two ids that was merged, and the words after
      the merge, in new lists; pair is None if no word has two ids.
    """
    # BEGIN SOLUTION
    pairs = {}
    for word, count in zip(words, counts, strict=True):
        for pair in itertools.pairwise(word):
            pairs[pair] = pairs.get(pair, 0) + count
    if not pairs:
        return None, [list(word) for word in words]
    best = min(pairs, key=lambda pair: (-pairs[pair], pair))
    merged = []
    for word in words:
        new, i = [], 0
        while i < len(word):
            if tuple(word[i : i + 2]) == best:
                new.append(new_id)
                i += 2
            else:
                new.append(word[i])
                i += 1
        merged.append(new)
    return best, merged
    # END SOLUTION


# EXERCISE 07.packing
def pack_documents(documents, rows, T, eod):
    """The first rows of some documents' stream, as the five arrays of a batch.

    Args:
      documents: list of lists of ints, none of them eod; a document may be
        empty.
      rows: R, how many rows to make, whether or not the stream fills them.
      T: slots in a row.
      eod: int, the id that ends each document.

    Returns:
      dict of arrays [R, T]: tokens, targets, positions and segment_ids in
      int32, loss_mask in float32. Where there is padding all five are 0.
    """
    # BEGIN SOLUTION
    stream = np.array(
        [token for document in documents for token in [*document, eod]],
        np.int32,
    )
    real = np.zeros((rows, T), bool)
    # the last token is a target only
    inputs = min(max(len(stream) - 1, 0), rows * T)
    real.reshape(-1)[:inputs] = True
    tokens, targets = np.zeros((2, rows, T), np.int32)
    tokens[real], targets[real] = stream[:inputs], stream[1 : inputs + 1]

    # A piece of a document begins at the start of a row, and after each end of
    # document.
    ended = real & (tokens == eod)
    begins = np.zeros((rows, T), bool)
    begins[:, :1] = True
    begins[:, 1:] = ended[:, :-1]
    slot = np.broadcast_to(np.arange(T), (rows, T))
    began = np.maximum.accumulate(np.where(begins, slot, 0), axis=1)
    return {
        "tokens": tokens,
        "targets": targets,
        "positions": np.where(real, slot - began, 0).astype(np.int32),
        "segment_ids": np.where(real, np.cumsum(begins, axis=1), 0).astype(
            np.int32
        ),
        "loss_mask": (real & ~ended).astype(np.float32),
    }
    # END SOLUTION


# EXERCISE 07.process_shard
def rows_of_process(k, B, process, count, total):
    """The rows of global batch k that one process reads.

    Args:
      k: number of the batch, from 0.
      B: rows in a global batch.
      process: number of this process, from 0.
      count: how many processes there are; it need not divide B, and may be
        larger.
      total: how many rows the data has. Python ints, all of them, and k may be
        large.

    Returns:
      int64 [rows of this process]: the numbers of its rows, rising; -1 in a
      slot of the batch for which the data has no row left.
    """
    # BEGIN SOLUTION
    share, more = divmod(B, count)
    first = process * share + min(process, more)
    last = first + share + (process < more)
    rows = k * B + np.arange(first, last, dtype=np.int64)
    return np.where(rows < total, rows, -1)
    # END SOLUTION


# EXERCISE 07.resume
class ShuffledRows:
    """An endless iterator over row numbers; each epoch has a new order.

    Epoch e is `np.random.default_rng([seed, e]).permutation(rows)`.
    """

    def __init__(self, rows, seed):
        """Starts at the first row of epoch 0.

        Args:
          rows: number of rows, at least 1.
          seed: int.
        """
        # BEGIN SOLUTION
        self.rows, self.seed = rows, seed
        self.taken, self.epoch, self.order = 0, None, None
        # END SOLUTION

    def __iter__(self):
        return self

    def __next__(self):
        """Returns the number of the next row, a Python int."""
        # BEGIN SOLUTION
        epoch, index = divmod(self.taken, self.rows)
        if epoch != self.epoch:
            self.order = np.random.default_rng([self.seed, epoch]).permutation(
                self.rows
            )
            self.epoch = epoch
        self.taken += 1
        return int(self.order[index])
        # END SOLUTION

    def get_state(self):
        """Returns the resume point, as values that JSON can hold."""
        # BEGIN SOLUTION
        return {"taken": self.taken}
        # END SOLUTION

    def set_state(self, state):
        """Goes to a resume point from any such iterator's `get_state`."""
        # BEGIN SOLUTION
        self.taken = state["taken"]
        # END SOLUTION


# EXERCISE 07.mixture
def row_of_mixture(weights, i):
    """Which part of a mixture row i comes from, and which row of it that is.

    Args:
      weights: list of P ints of at least 1.
      i: number of the row in the mixture, a Python int from 0, perhaps above
        10**18.

    Returns:
      (part, row): Python ints; part is below P.
    """
    # BEGIN SOLUTION
    W = sum(weights)
    # after W rows every part has had its weight: a new round begins
    rounds, slot = divmod(i, W)
    taken, part = [0] * len(weights), 0
    for n in range(slot + 1):
        may_come = [p for p, w in enumerate(weights) if taken[p] * W // w <= n]
        # The part with the earliest deadline for its next row: (row + 1) W / w,
        # rounded up.
        part = min(may_come, key=lambda p: -(-(taken[p] + 1) * W // weights[p]))
        taken[part] += 1
    return part, rounds * weights[part] + taken[part] - 1
    # END SOLUTION
