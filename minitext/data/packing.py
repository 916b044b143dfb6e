"""One long stream of tokens, its rows, and the five arrays that a model is trained on.

The stream is all documents in a row, each followed by the end-of-document id. With T = seq_len, row
i has the stream's tokens [i T, (i + 1) T) as inputs and the tokens one position later as targets. So
rows share no input, no token is lost, and every token of the stream is a target exactly once, except
the first of each document: nothing before it belongs to the same document, so the position that
would predict it (the previous document's end) has loss_mask 0. An end of document is a target like
any other.

Chapters: 7.
"""

from dataclasses import dataclass

import numpy as np

PAD = -1  # in a window, past the end of the stream


class TokenStream:
    """The documents of a token file in some order, as one sequence that can be read from any point."""

    def __init__(
        self, tokens: np.ndarray, ends: np.ndarray, order: np.ndarray | None = None
    ) -> None:
        """Lays the documents end to end.

        Args:
            tokens: integer [N], usually memory-mapped; every document ends in the end-of-document id.
            ends: int64 [documents], one past the last token of each document.
            order: int64 [documents], which document comes first, second, ...; None: the given order.
        """
        order = np.arange(len(ends)) if order is None else order
        self._tokens = tokens
        self._ends_in_file = ends[order]
        self._ends = np.cumsum(np.diff(ends, prepend=0)[order])

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) of the stream, int32; the cost doesn't depend on `start`."""
        stop = min(stop, len(self))
        document = int(np.searchsorted(self._ends, start, side="right"))
        pieces = [np.empty(0, np.int32)]
        while start < stop:
            end = int(self._ends[document])
            at = int(self._ends_in_file[document]) - (end - start)
            take = min(stop, end) - start
            pieces.append(self._tokens[at : at + take].astype(np.int32))
            start += take
            document += 1
        return np.concatenate(pieces)


@dataclass(frozen=True)
class Windows:
    """Rows [first, last) of a stream, permuted by `order`: int32 [T + 1], PAD past the end of the stream."""

    stream: TokenStream
    seq_len: int
    first: int
    last: int
    order: np.ndarray | None = None

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> np.ndarray:
        window = np.full(self.seq_len + 1, PAD, np.int32)
        row = index if self.order is None else int(self.order[index])
        start = (self.first + row) * self.seq_len
        tokens = self.stream.read(start, start + self.seq_len + 1)
        window[: len(tokens)] = tokens
        return window


def row_count(tokens: int, seq_len: int) -> int:
    """Returns the number of rows that hold every target of a stream of `tokens` tokens."""
    return -(-(tokens - 1) // seq_len)


def pack(windows: np.ndarray, eod_id: int) -> dict[str, np.ndarray]:
    """Turns windows of the stream into what the model and its loss take.

    Args:
        windows: int32 [..., T + 1], consecutive tokens of the stream, PAD after its end.
        eod_id: the id that ends each document.

    Returns:
        Arrays [..., T], int32 except the mask. `tokens`: the inputs; 0 at padding. `targets`: the token
        that follows each input in the stream; 0 at padding. `positions`: 0, 1, ... from the start of
        each document's piece in the row. `segment_ids`: 1, 2, ... for each document's piece in the
        row; 0 is padding; the end of a document belongs to it. `loss_mask`: float32, 1 where the
        target belongs to the input's document; 0 at ends of document and at padding.
    """
    tokens, targets = windows[..., :-1], windows[..., 1:]
    real = targets != PAD
    ended = tokens == eod_id
    # A new piece starts one position after an end of document.
    starts = np.concatenate([np.ones_like(ended[..., :1]), ended[..., :-1]], axis=-1)
    index = np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int32), tokens.shape)
    started = np.maximum.accumulate(np.where(starts, index, 0), axis=-1)
    segments = np.cumsum(starts, axis=-1, dtype=np.int32)
    return {
        "tokens": np.where(real, tokens, 0),
        "targets": np.where(real, targets, 0),
        "positions": np.where(real, index - started, 0).astype(np.int32),
        "segment_ids": np.where(real, segments, 0),
        "loss_mask": (real & ~ended).astype(np.float32),
    }
