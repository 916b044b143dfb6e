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
    # YOUR CODE HERE
    raise NotImplementedError("07.bpe_merge")


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
    # YOUR CODE HERE
    raise NotImplementedError("07.packing")


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
    # YOUR CODE HERE
    raise NotImplementedError("07.process_shard")


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
        # YOUR CODE HERE
        raise NotImplementedError("07.resume")

    def __iter__(self):
        return self

    def __next__(self):
        """Returns the number of the next row, a Python int."""
        # YOUR CODE HERE
        raise NotImplementedError("07.resume")

    def get_state(self):
        """Returns the resume point, as values that JSON can hold."""
        # YOUR CODE HERE
        raise NotImplementedError("07.resume")

    def set_state(self, state):
        """Goes to a resume point from any such iterator's `get_state`."""
        # YOUR CODE HERE
        raise NotImplementedError("07.resume")


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
    # YOUR CODE HERE
    raise NotImplementedError("07.mixture")
