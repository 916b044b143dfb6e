"""Hugging Face datasets: records streamed, tokenised and cut into rows as they arrive.

Nothing is downloaded beforehand and nothing is kept on disk, so there is no row i to ask for. The
place in the stream is instead the record reached, as `datasets` counts it, and the tokens that were
made from earlier records but not yet used.

Chapters: 7.
"""

import hashlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from minitext.config.data import DataConfig
from minitext.data import files, packing, sources
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError

if TYPE_CHECKING:
    from minitext.data.placement import Placement

RECORDS_AT_ONCE = 16  # tokenised together, on all cores; more would make saved places larger


def read_ahead(
    cfg: DataConfig, tokenizer: Tokenizer, placement: "Placement", split: str, batches: int
) -> grain.DatasetIterator:
    """Returns an iterator of batches that a background thread keeps so many batches ahead."""
    dataset = StreamedWindows(cfg, tokenizer, placement, split).map(
        lambda rows: placement(packing.pack(rows, tokenizer.eod_id))
    )
    ahead = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=batches)
    return iter(ahead)


class StreamedWindows(grain.IterDataset):
    """This process's rows of each global batch: int32 [rows, T + 1].

    The dataset's shards are dealt out to the processes, or its records where there are fewer shards
    than processes; processes that hold the same rows of a batch read the same records. With
    data.shuffle the order of shards is drawn anew in each epoch, and the records of a shard keep
    theirs: the contents of a shuffle buffer could not be saved with the place.

    A record is held out for validation if the hash of its text says so. That doesn't depend on the
    order or on the number of processes, and keeps copies of a text on the same side.
    """

    def __init__(
        self, cfg: DataConfig, tokenizer: Tokenizer, placement: "Placement", split: str
    ) -> None:
        """Opens the dataset, without reading records."""
        super().__init__()
        self.cfg, self.tokenizer, self.placement, self.split = cfg, tokenizer, placement, split
        self.records = sources.open_hf(cfg)

    def __iter__(self) -> "StreamIterator":
        return StreamIterator(self)


class StreamIterator(grain.DatasetIterator):
    """Iterates over `StreamedWindows`; its state holds the leftover tokens as an array."""

    def __init__(self, dataset: StreamedWindows) -> None:
        """Stands at the first record."""
        super().__init__()
        self._of = dataset
        rows, count = dataset.placement.rows, dataset.placement.shape[0]
        if count % len(rows) or rows[0] % len(rows) or rows[-1] - rows[0] != len(rows) - 1:
            raise UserError(
                "data.source=hf needs processes that hold equal, unbroken parts of the batch: "
                "put mesh.data and mesh.fsdp outermost"
            )
        self._part, self._parts = rows[0] // len(rows), count // len(rows)
        self.set_state({"epoch": 0, "shard": 0, "records": None, "record": 0, "left": []})

    def get_state(self) -> dict[str, Any]:
        """Returns the place of the next batch."""
        return {
            "epoch": self._epoch,
            "shard": self._shard,
            # Until a record is read, which leftover tokens may put off, the place is as it was set.
            "records": self._stream.state_dict() if self._stream else self._place,
            "record": self._record,
            "left": self._left,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a place that `get_state` returned."""
        self._epoch, self._shard, self._record = state["epoch"], state["shard"], state["record"]
        self._left = np.array(state["left"], np.int32)
        self._place, self._stream, self._ended = state["records"], None, False
        self._texts = self._read(self._place)

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

    def _read(self, place: dict[str, Any] | None) -> Iterator[str]:
        """Yields the texts of this part and split from a place on; those of training for ever."""
        cfg, dataset = self._of.cfg, self._of.records
        training = self._of.split == "train"
        found = place is not None
        while True:
            shards = np.arange(dataset.num_shards)
            by_shard = len(shards) >= self._parts
            if by_shard:
                shards = shards[self._part :: self._parts]
            if cfg.shuffle and training:
                shards = np.random.default_rng([cfg.seed, self._epoch]).permutation(shards)
            while self._shard < len(shards):
                self._stream = dataset.shard(dataset.num_shards, int(shards[self._shard]))
                if place is not None:
                    self._stream.load_state_dict(place)
                    place = None
                for record in self._stream:
                    self._record += 1
                    where = f"{cfg.hf_name}, epoch {self._epoch}, record {self._record}"
                    text = files.text_of(record, cfg.text_key, where)
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
