"""Hugging Face datasets: records streamed, tokenised and cut into rows as they arrive.

Nothing is downloaded in advance or kept on disk, so rows have no index. The position is instead the
record reached, as `datasets` counts it, and the tokens of earlier records that aren't used yet.

Chapters: 7.
"""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from minitext.config.data import DataConfig
from minitext.data import packing, sources, text_files
from minitext.data.placement import Placement, Split
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.files import fingerprint

RECORDS_AT_ONCE = 16  # tokenised together, on all cores; more would make saved positions larger


def part_of_stream(placement: Placement) -> tuple[int, int]:
    """Returns which part of a stream a process reads, and how many parts there are: one for all that hold other rows.

    Raises:
        UserError: the processes' rows aren't equal, contiguous parts of a batch.
    """
    rows, count = placement.rows, placement.shape[0]
    if count % len(rows) or rows[0] % len(rows) or rows[-1] - rows[0] != len(rows) - 1:
        raise UserError(
            "data.source=hf needs processes that hold equal, contiguous parts of the batch: "
            "put mesh.data and mesh.fsdp outermost"
        )
    return rows[0] // len(rows), count // len(rows)


class StreamedWindows(grain.IterDataset):
    """This process's rows of each global batch: int32 [rows, T + 1].

    The dataset's shards are dealt to the processes, or its records if there are fewer shards than
    processes; processes that hold the same rows of a batch read the same records. With data.shuffle
    each epoch draws a new order of shards, while the records in a shard keep theirs: the contents
    of a shuffle buffer could not be saved with the position.

    A record is held out for validation if the hash of its text says so. That doesn't depend on the
    order or on the number of processes, and keeps copies of a text on the same side.

    Attributes:
        digest: identifies the records and their order.
    """

    def __init__(
        self, cfg: DataConfig, tokenizer: Tokenizer, placement: Placement, split: Split
    ) -> None:
        """Opens the dataset, without reading records."""
        super().__init__()
        self.cfg, self.tokenizer, self.placement, self.split = cfg, tokenizer, placement, split
        self.records = sources.open_hf(cfg)
        self.digest = fingerprint(
            *sources.identity(cfg), tokenizer.to_json(),
            cfg.seq_len, cfg.seed, cfg.shuffle, cfg.validation_fraction, split,
        )  # fmt: skip

    def __iter__(self) -> "StreamIterator":
        return StreamIterator(self)


class StreamIterator(grain.DatasetIterator):
    """Iterates over `StreamedWindows`; its state holds the leftover tokens as an array."""

    def __init__(self, dataset: StreamedWindows) -> None:
        """Starts at the first record."""
        super().__init__()
        self._of = dataset
        self._part, self._parts = part_of_stream(dataset.placement)
        self.set_state({"epoch": 0, "shard": 0, "records": None, "record": 0, "left": []})

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the next batch."""
        return {
            "epoch": self._epoch,
            "shard": self._shard,
            # Leftover tokens may delay the first read; until then the position is the one that was set.
            "records": self._stream.state_dict() if self._stream else self._position,
            "record": self._record,
            "left": self._left,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position from `get_state`."""
        self._epoch, self._shard, self._record = state["epoch"], state["shard"], state["record"]
        self._left = np.array(state["left"], np.int32)
        self._position, self._stream, self._ended = state["records"], None, False
        self._texts = self._read(self._position)

    def __next__(self) -> np.ndarray:
        self._assert_not_closed()
        rows, T = len(self._of.placement.rows), self._of.cfg.seq_len
        wanted = rows * T + 1
        while len(self._left) < wanted and not self._ended:
            texts = list(itertools.islice(self._texts, RECORDS_AT_ONCE))
            self._ended = not texts
            pieces = [self._left]
            for ids in self._of.tokenizer.encode_batch(texts):
                pieces += [ids.astype(np.int32), np.array([self._of.tokenizer.eod_id], np.int32)]
            self._left = np.concatenate(pieces)
        if len(self._left) < 2:  # nothing is left to predict
            raise StopIteration
        tokens = np.full(wanted, packing.PAD, np.int32)
        tokens[: len(self._left)] = self._left[:wanted]
        self._left = self._left[rows * T :]
        return np.lib.stride_tricks.sliding_window_view(tokens, T + 1)[::T].copy()

    def close(self) -> None:
        """Stops reading."""
        super().close()
        self._texts = iter(())

    def _read(self, position: dict[str, Any] | None) -> Iterator[str]:
        """Yields the texts of this part and split from a position on; training texts never end."""
        cfg, dataset = self._of.cfg, self._of.records
        training = self._of.split == "train"
        found = position is not None
        while True:
            shards = np.arange(dataset.num_shards)
            by_shard = len(shards) >= self._parts
            if by_shard:
                shards = shards[self._part :: self._parts]
            if cfg.shuffle and training:
                shards = np.random.default_rng([cfg.seed, self._epoch]).permutation(shards)
            while self._shard < len(shards):
                self._stream = dataset.shard(dataset.num_shards, int(shards[self._shard]))
                if position is not None:
                    self._stream.load_state_dict(position)
                    position = None
                for record in self._stream:
                    self._record += 1
                    where = f"{cfg.hf_name}, epoch {self._epoch}, record {self._record}"
                    text = text_files.text_of(record, cfg.text_key, where)
                    mine = by_shard or self._record % self._parts == self._part
                    if text and mine and _held_out(text, cfg.validation_fraction) != training:
                        found = True
                        yield text
                self._shard += 1
            if not training:
                return
            if not found:
                raise UserError(
                    f"data.hf_name={cfg.hf_name} has no text in {cfg.text_key!r} to train on: set "
                    "data.text_key or data.hf_split"
                )
            self._epoch, self._shard, self._record, found = self._epoch + 1, 0, 0, False


def _held_out(text: str, fraction: float) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
