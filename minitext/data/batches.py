"""Batches of tokens from any source, in an order that a seed fixes and that resumes exactly.

`make_batches` is the only door. Behind it, `sources` and `files` read text, `token_file` keeps it
tokenised in a cache, `array_record` in files of its own, `packing` cuts rows and numbers documents,
`grammar` writes a language of known entropy, `rows` orders and mixes them, `streaming` reads
Hugging Face. Grain gives the order of rows and reads ahead in a background thread.

Chapters: 7.
"""

import atexit
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from minitext import files
from minitext.config.data import DataConfig
from minitext.data import packing
from minitext.data.placement import Batch, Placement, Split
from minitext.data.rows import make_tokenizer, open_rows
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError

if TYPE_CHECKING:
    import jax


READ_AHEAD = 4  # batches made before they are asked for


def make_batches(
    cfg: DataConfig,
    mesh: "jax.sharding.Mesh | None" = None,
    *,
    vocab: int,
    global_batch: int,
    split: Split = "train",
    tokenizer: Tokenizer | None = None,
) -> "Batches":
    """Makes the batches of one split of the configured source.

    Args:
        cfg: the data section of a config.
        mesh: where batches are placed. Each process reads only the rows its devices hold. Without
            a mesh batches are numpy arrays.
        vocab: the model's vocabulary, at least the tokenizer's.
        global_batch: B, rows in a batch over all processes.
        split: "train" goes on for ever, or for `data.epochs` passes, in a new order in each;
            "validation" is one pass over the rows held out, in a fixed order. No target is in both.
        tokenizer: the one of an earlier run, so that its model reads the same ids; by default the
            one that `cfg` asks for.

    Returns:
        An iterator of batches, see `Batches`.

    Raises:
        UserError: the source cannot be read, is too small for seq_len, or does not go with
            `vocab` or `mesh`.
    """
    if split not in ("train", "validation"):
        raise UserError(f"split={split!r}: choose train or validation")
    tokenizer = tokenizer or make_tokenizer(cfg, vocab)
    if tokenizer.vocab_size > vocab:
        raise UserError(
            f"model.vocab={vocab} is too small for a tokenizer of {tokenizer.vocab_size} ids: set "
            f"model.vocab to {tokenizer.vocab_size} or more"
        )
    placement = Placement(mesh, global_batch, cfg.seq_len)
    make = _streamed if cfg.source == "hf" else _counted
    return make(cfg, tokenizer, placement, split)


class Batches:
    """An iterator of batches whose place can be saved.

    A batch is a dict of [B, T] arrays: tokens, targets, positions, segment_ids (int32) and
    loss_mask (float32); `packing.pack` says what they hold. With a mesh they are global
    `jax.Array`s, sharded over the batch.

    `iter()` of validation batches begins the pass anew; training batches just go on.

    Attributes:
        tokens_per_batch: B x T.
        floor: nats per target token that no model can beat on average, where it is known
            (`grammar`); else None.
        count: batches from the first to the last, the last one filled up with padding; None where
            they never end.
    """

    def __init__(
        self,
        iterator: Any,
        placement: "Placement",
        split: Split,
        digest: str,
        floor: float | None = None,
        count: int | None = None,
    ) -> None:
        """Wraps a Grain iterator of batches over the data that `digest` stands for."""
        self.tokens_per_batch = placement.shape[0] * placement.shape[1]
        self.floor = floor
        self.count = count
        self._iterator = iterator
        self._start = iterator.get_state()
        self._split = split
        self._about = {"data": digest, "global_batch": placement.shape[0]}
        # A reader still at work when Python ends prints a traceback.
        still_there = weakref.ref(iterator)
        atexit.register(lambda: (it := still_there()) and it.close())

    def __iter__(self) -> Iterator[Batch]:
        if self._split == "validation":
            self._iterator.set_state(self._start)
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the place of the next batch, as JSON-able values."""
        return {**self._about, "iterator": _jsonable(self._iterator.get_state())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a place that `get_state` returned: the batches from there on are bit-equal.

        Where rows can be counted (all sources but hf) the number of processes may differ, and so
        may global_batch: the next row is the same.

        Raises:
            UserError: the place is in other data, or global_batch cannot take it up.
        """
        if state.get("data") != self._about["data"]:
            raise UserError(
                "the saved place is in other data: the text, data.seq_len, data.seed, data.shuffle "
                "or data.validation_fraction has changed since: restore it, or begin a new run"
            )
        place = dict(state["iterator"])
        saved, batch = state["global_batch"], self._about["global_batch"]
        if saved != batch:
            rows = place["next_index"] * saved if "next_index" in place else None
            if rows is None or rows % batch:
                where = "in a stream" if rows is None else f"at row {rows:,}"
                raise UserError(
                    f"train.global_batch={batch} cannot take up a run {where} of batches of {saved}: "
                    f"set train.global_batch={saved}"
                )
            place["next_index"] = rows // batch
        self._iterator.set_state(place)

    def left(self) -> int | None:
        """Returns the number of batches from here to the end; None where they never end."""
        if self.count is None:
            return None
        return self.count - self._iterator.get_state()["next_index"]

    def close(self) -> None:
        """Stops reading ahead. A closed iterator gives no more batches."""
        self._iterator.close()


class LocalWindows:
    """Item k is this process's rows of global batch k: int32 [len(rows), T + 1].

    Batch k is rows k B ... (k + 1) B - 1 of the data's order whatever the number of processes. The
    last batch is completed with rows of PAD.
    """

    def __init__(self, windows: Any, placement: Placement) -> None:
        """Groups `windows`, any random-access sequence of rows, in batches."""
        self._windows = windows
        self._placement = placement

    def __len__(self) -> int:
        rows, batch = len(self._windows), self._placement.shape[0]
        return rows // batch if rows == sys.maxsize else -(-rows // batch)

    def __getitem__(self, index: int) -> np.ndarray:
        batch, seq_len = self._placement.shape
        windows = np.full((len(self._placement.rows), seq_len + 1), packing.PAD, np.int32)
        for local, row in enumerate(self._placement.rows):
            if (number := int(index) * batch + row) < len(self._windows):
                windows[local] = self._windows[number]
        return windows


def _counted(cfg: DataConfig, tokenizer: Tokenizer, placement: Placement, split: Split) -> Batches:
    """Batches of a source whose row i can be had at once: all but streams."""
    found = open_rows(cfg, tokenizer, split)
    local = LocalWindows(found.windows, placement)
    iterator = iter(
        grain.MapDataset.source(local)
        .map(lambda windows: placement(packing.pack(windows, tokenizer.eod_id)))
        # One thread: rows are in memory or in the page cache, so more would only share the GIL.
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD))
    )
    count = len(local) if len(found.windows) < sys.maxsize else None
    return Batches(iterator, placement, split, found.digest, found.floor, count)


def _streamed(cfg: DataConfig, tokenizer: Tokenizer, placement: Placement, split: Split) -> Batches:
    """Batches of Hugging Face records, tokenised as they arrive."""
    from minitext.data import streaming

    iterator = streaming.read_ahead(cfg, tokenizer, placement, split, READ_AHEAD)
    digest = files.fingerprint(
        cfg.hf_name, cfg.hf_subset, cfg.hf_split, cfg.path, cfg.text_key, tokenizer.to_json(),
        cfg.seq_len, cfg.seed, cfg.shuffle, cfg.validation_fraction, split,
    )  # fmt: skip
    return Batches(iterator, placement, split, digest)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
