"""Batches of tokens from any source, in an order fixed by a seed, that resume exactly.

`make_batches` is the entry point. Behind it, `sources` and `text_files` read text, `token_file` and
`array_record` store it tokenised, `packing` cuts rows and numbers documents, `grammar` generates a
language of known entropy, `rows` orders and mixes rows, `streaming` reads Hugging Face, and
`conversation_rows` makes rows of what users and assistants say. Grain shuffles rows by index and
reads ahead in a background thread.

Chapters: 7, 26.
"""

import atexit
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from minitext.config.data import CHATS, DataConfig
from minitext.data import packing
from minitext.data.chat import Chat, open_template
from minitext.data.conversation_rows import ChatRows, empty_rows, open_chat_rows
from minitext.data.placement import Batch, Placement, Split
from minitext.data.rows import make_tokenizer, open_rows
from minitext.data.streaming import StreamedWindows, part_of_stream
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.sharding.transfer import share_bytes

if TYPE_CHECKING:
    import jax


READ_AHEAD = 4  # batches


def make_batches(
    cfg: DataConfig,
    mesh: "jax.sharding.Mesh | None" = None,
    *,
    vocab: int,
    global_batch: int,
    split: Split = "train",
    tokenizer: Tokenizer | None = None,
    chat: Chat | None = None,
) -> "Batches":
    """Makes the batches of one split of the configured source.

    Args:
        cfg: the data section of a config.
        mesh: where batches are placed; each process reads only the rows its devices hold. Without a
            mesh, batches are numpy arrays.
        vocab: the model's vocabulary, at least the tokenizer's.
        global_batch: B, rows in a batch over all processes.
        split: "train" never ends, or ends after `data.epochs` passes, each in a new order;
            "validation" is one pass over the held-out rows in a fixed order. No target is in both.
        tokenizer: an earlier run's, so that its model reads the same ids; by default, the one in `cfg`.
        chat: how conversations are rendered; by default, with the template in `cfg` or a plain one.

    Raises:
        UserError: the source can't be read, is too small for seq_len, or doesn't fit `vocab` or `mesh`.
    """
    if split not in ("train", "validation"):
        raise UserError(f"split={split!r}: choose train or validation")
    tokenizer = tokenizer or make_tokenizer(cfg, vocab)
    if tokenizer.vocab_size > vocab:
        raise UserError(
            f"model.vocab={vocab} is too small for a tokenizer of {tokenizer.vocab_size} ids: set "
            f"model.vocab to {tokenizer.vocab_size} or more"
        )
    placement, eod_id = Placement(mesh, global_batch, cfg.seq_len), tokenizer.eod_id

    def finish(windows: np.ndarray) -> Batch:
        return placement(packing.pack(windows, eod_id))

    if cfg.source in CHATS:
        chat = chat or open_template(cfg, tokenizer)
        return _chat_batches(open_chat_rows(cfg, tokenizer, chat, split), placement, split)
    if cfg.source == "hf":
        stream = StreamedWindows(cfg, tokenizer, placement, split)
        ahead = grain.experimental.ThreadPrefetchIterDataset(
            stream.map(finish), prefetch_buffer_size=READ_AHEAD
        )
        padding = np.full((len(placement.rows), cfg.seq_len + 1), packing.PAD, np.int32)
        return StreamedBatches(
            iter(ahead), placement, split, stream.digest, lambda: finish(padding), named=cfg.hf_name
        )
    rows = open_rows(cfg, tokenizer, split)
    local = LocalWindows(rows.windows, placement)
    # One thread: rows are in memory or in the page cache, so more would only share the GIL.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    iterator = iter(grain.MapDataset.source(local).map(finish).to_iter_dataset(options))
    count = len(local) if len(rows.windows) < sys.maxsize else None
    return Batches(iterator, placement, split, rows.digest, rows.floor, count)


def _chat_batches(found: ChatRows, placement: Placement, split: Split) -> "Batches":
    local = LocalRows(found.rows, placement)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    iterator = iter(grain.MapDataset.source(local).map(placement).to_iter_dataset(options))
    count = len(local) if len(found.rows) < sys.maxsize else None
    batches = Batches(iterator, placement, split, found.digest, None, count)
    batches.left_out, batches.turn_ends = found.left_out, found.turn_ends
    return batches


class Batches:
    """An iterator of batches whose position can be saved.

    A batch is a dict of [B, T] arrays: tokens, targets, positions, segment_ids (int32) and
    loss_mask (float32); `packing.pack` defines them. With a mesh they are global `jax.Array`s,
    sharded over the batch.

    `iter()` restarts a validation pass; training batches just go on.

    Attributes:
        tokens_per_batch: B x T.
        floor: nats per target token that no model can beat on average, where known (`grammar`).
        count: batches from first to last, the last one padded; None if they never end.
        left_out: of conversations: a line on each kind that isn't trained on, with how many and where the first is.
        turn_ends: of conversations: ids that end the assistant's turns.
        about: numbers about the batch last taken, which go into its step's line.
    """

    left_out: tuple[str, ...] = ()
    turn_ends: frozenset[int] = frozenset()
    about: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        iterator: Any,
        placement: Placement,
        split: Split,
        digest: str,
        floor: float | None = None,
        count: int | None = None,
    ) -> None:
        """Wraps a Grain iterator of batches; `digest` identifies their data."""
        self.tokens_per_batch = placement.shape[0] * placement.shape[1]
        self.floor = floor
        self.count = count
        self._iterator = iterator
        self._start = iterator.get_state()
        self._split = split
        self._about = {"data": digest, "global_batch": placement.shape[0]}
        # A reader still at work when Python exits prints a traceback.
        alive = weakref.ref(iterator)
        atexit.register(lambda: (it := alive()) and it.close())

    def __iter__(self) -> Iterator[Batch]:
        if self._split == "validation":
            self._iterator.set_state(self._start)
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def take(self, _state: Any) -> Batch:
        """Returns the next batch. The training state matters to batches that the model writes itself: not to these."""
        return next(self)

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the next batch, as JSON-able values."""
        state = json.dumps(self._iterator.get_state(), default=lambda array: array.tolist())
        return {**self._about, "iterator": json.loads(state)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position from `get_state`: the batches from there on are bit-equal.

        Unless rows are streamed (hf), the number of processes may differ, and so may global_batch:
        the next row is the same.

        Raises:
            UserError: the position is in other data, or global_batch can't continue from it.
        """
        if state.get("data") != self._about["data"]:
            raise UserError(
                "the saved position is in other data: the text, data.seq_len, data.seed, data.shuffle "
                "or data.validation_fraction has changed: undo the change, or start a new run"
            )
        position = dict(state["iterator"])
        saved, batch = state["global_batch"], self._about["global_batch"]
        if saved != batch:
            rows = position["next_index"] * saved if "next_index" in position else None
            if rows is None or rows % batch:
                where = "in a stream" if rows is None else f"at row {rows:,}"
                raise UserError(
                    f"train.global_batch={batch} cannot continue a run {where} of batches of {saved}: "
                    f"set train.global_batch={saved}"
                )
            position["next_index"] = rows // batch
        self._iterator.set_state(position)

    def left(self) -> int | None:
        """Returns the number of batches from here to the end; None if they never end."""
        if self.count is None:
            return None
        return self.count - self._iterator.get_state()["next_index"]

    def close(self) -> None:
        """Stops reading ahead. A closed iterator gives no more batches."""
        self._iterator.close()


class StreamedBatches(Batches):
    """Batches of a stream, of which each process may read a part of its own.

    The positions in all parts are saved together. A validation pass ends when all parts have ended: a process whose
    part is done gives padding until then, since a step that it leaves out would never end for the others.

    All processes take the batches of a validation pass together, and so they call `get_state`.
    """

    def __init__(
        self,
        iterator: Any,
        placement: Placement,
        split: Split,
        digest: str,
        padding: Callable[[], Batch],
        named: str | None,
    ) -> None:
        """Wraps an iterator as `Batches` does; `padding` makes a batch without targets."""
        super().__init__(iterator, placement, split, digest)
        self._padding, self._named = padding, named
        self._part, self._parts = part_of_stream(placement)
        self._taken = 0

    def __iter__(self) -> Iterator[Batch]:
        self._taken = 0
        return super().__iter__()

    def __next__(self) -> Batch:
        if self._split == "train":  # it never ends
            return super().__next__()
        batch = next(self._iterator, None)
        going_on = b"0" if batch is None else b"1"
        if b"1" in (share_bytes(going_on) if self._parts > 1 else [going_on]):
            self._taken += 1
            return self._padding() if batch is None else batch
        if self._taken:
            raise StopIteration
        raise UserError(
            f"data.hf_name={self._named} has so little text that none of it is held out for validation: raise "
            "data.validation_fraction"
        )

    def get_state(self) -> dict[str, Any]:
        """Returns the positions of the next batch in all parts, as JSON-able values."""
        state = super().get_state()
        if self._parts > 1:
            mine = json.dumps([self._part, state["iterator"]])
            found = [json.loads(data) for data in share_bytes(mine.encode())]
            state["iterator"] = {"parts": {str(part): position for part, position in found}}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position from `get_state`, of as many parts.

        Raises:
            UserError: also if the stream was divided among more or fewer processes.
        """
        parts = state.get("iterator", {}).get("parts", {"0": state.get("iterator")})
        if len(parts) != self._parts:
            raise UserError(
                f"the saved position is in a stream in parts, {len(parts)} of them, and here they would be "
                f"{self._parts}: start as many processes as before"
            )
        super().set_state({**state, "iterator": parts[str(self._part)]})


class LocalWindows:
    """Item k is this process's rows of global batch k: int32 [len(rows), T + 1].

    Batch k is rows k B ... (k + 1) B - 1 of the data's order, however many processes there are.
    Rows of PAD fill up the last batch.
    """

    def __init__(self, windows: Any, placement: Placement) -> None:
        """Groups `windows`, any random-access sequence of rows, into batches."""
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


class LocalRows(LocalWindows):
    """Item k is this process's rows of global batch k, as a dict of [len(rows), T] arrays: rows of conversations."""

    def __getitem__(self, index: int) -> Batch:
        batch, seq_len = self._placement.shape
        found = empty_rows(len(self._placement.rows), seq_len)
        for local, row in enumerate(self._placement.rows):
            if (number := int(index) * batch + row) < len(self._windows):
                for name, values in self._windows[number].items():
                    found[name][local] = values
        return found
