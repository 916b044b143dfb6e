"""Batches of tokens from any source, in an order that a seed fixes and that resumes exactly.

`make_batches` is the only door. Behind it, `sources` reads text, `token_file` keeps it tokenised in
a cache, `array_record` in files of its own, `packing` cuts rows and numbers documents, `grammar`
writes a language of known entropy, `streaming` reads Hugging Face. Grain gives the order of rows
and reads ahead in a background thread.

Chapters: 7.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from minitext import cache
from minitext.config import DataConfig
from minitext.data import packing
from minitext.errors import UserError
from minitext.tokenizer import Tokenizer, make_tokenizer

if TYPE_CHECKING:
    import jax

Split = Literal["train", "validation"]
Batch = dict[str, Any]

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
        split: "train" goes on for ever, in a new order each epoch; "validation" is one pass over
            the rows held out, in a fixed order. No target is in both.
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
    make = _streamed if cfg.source == "hf" else _indexed
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
    """

    def __init__(
        self,
        iterator: Any,
        placement: "Placement",
        split: Split,
        digest: str,
        floor: float | None = None,
    ) -> None:
        """Wraps a Grain iterator of batches over the data that `digest` stands for."""
        self.tokens_per_batch = placement.shape[0] * placement.shape[1]
        self.floor = floor
        self._iterator = iterator
        self._start = iterator.get_state()
        self._split = split
        self._about = {"data": digest, "global_batch": placement.shape[0]}

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
            rows = place.get("next_index", 0) * saved
            if "next_index" not in place or rows % batch:
                raise UserError(
                    f"train.global_batch={batch} cannot take up a run at row {rows:,} of batches "
                    f"of {saved}: set train.global_batch={saved}"
                )
            place["next_index"] = rows // batch
        self._iterator.set_state(place)

    def close(self) -> None:
        """Stops reading ahead. A closed iterator gives no more batches."""
        self._iterator.close()


class Placement:
    """Which rows of a global batch this process reads, and how they become global arrays.

    Attributes:
        shape: (B, T).
        rows: the places in the global batch of the rows this process reads, rising.
    """

    def __init__(self, mesh: "jax.sharding.Mesh | None", global_batch: int, seq_len: int) -> None:
        """Asks the mesh's sharding which rows belong to this process's devices."""
        self.shape = (global_batch, seq_len)
        self.rows: Sequence[int] = range(global_batch)
        self.sharding = None
        if mesh is None:
            return
        from jax.sharding import NamedSharding, PartitionSpec

        self.sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
        ways = mesh.shape["data"] * mesh.shape["fsdp"]
        if global_batch % ways:
            raise UserError(
                f"train.global_batch={global_batch} is not divisible by "
                f"mesh.data x mesh.fsdp={ways}: choose a multiple of {ways}"
            )
        # Processes along a tensor or context axis hold the same rows, so each of them reads them.
        held = self.sharding.addressable_devices_indices_map(self.shape).values()
        slices = {index[0].indices(global_batch) for index in held if index is not None}
        self.rows = sorted({row for bounds in slices for row in range(*bounds)})

    def __call__(self, batch: Batch) -> Batch:
        """Turns this process's rows [len(rows), T] into global arrays [B, T]."""
        if self.sharding is None:
            return batch
        import jax

        return {
            name: jax.make_array_from_process_local_data(self.sharding, array, self.shape)
            for name, array in batch.items()
        }


class LocalWindows:
    """Item k is this process's rows of global batch k: int32 [len(rows), T + 1].

    Batch k is rows k B ... (k + 1) B - 1 of the data's order whatever the number of processes.
    """

    def __init__(self, windows: Any, placement: Placement, batches: int) -> None:
        """Groups `windows`, any random-access sequence of rows, in `batches` batches."""
        self._windows = windows
        self._placement = placement
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, index: int) -> np.ndarray:
        first = int(index) * self._placement.shape[0]
        return np.stack([self._windows[first + row] for row in self._placement.rows])


def _indexed(cfg: DataConfig, tokenizer: Tokenizer, placement: Placement, split: Split) -> Batches:
    """Batches of a source whose row i can be had at once: text in the cache, and the grammar."""
    import grain

    floor = None
    if cfg.source == "grammar":
        from minitext.data import grammar

        windows = grammar.Windows(cfg.seq_len, cfg.seed, split)
        digest, endless = grammar.DIGEST, split == "train"
        floor = grammar.grammar_entropy_rate()
    else:
        windows, digest = _text_windows(cfg, tokenizer, split)
        endless = split == "train"
        if endless:
            dataset = grain.MapDataset.source(windows)
            windows = (dataset.shuffle(cfg.seed) if cfg.shuffle else dataset).repeat()
    B = placement.shape[0]
    batches = sys.maxsize // B if endless else -(-len(windows) // B)
    iterator = iter(
        grain.MapDataset.source(LocalWindows(windows, placement, batches))
        .map(lambda rows: placement(packing.pack(rows, tokenizer.eod_id)))
        # One thread: rows are in memory or in the page cache, so more would only share the GIL.
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD))
    )
    digest = cache.fingerprint(
        digest, cfg.seq_len, cfg.seed, cfg.shuffle, cfg.validation_fraction, split
    )
    return Batches(iterator, placement, split, digest, floor)


def pack_source(
    cfg: DataConfig, target: str | os.PathLike[str], *, vocab: int, shards: int
) -> dict[str, int]:
    """Tokenises the configured text and writes its rows as a folder for `data.source=arrayrecord`.

    Args:
        cfg: the data section of a config, with source stdlib or files.
        target: the folder to make.
        vocab: the model's vocabulary.
        shards: files of training rows.

    Returns:
        The rows of each split.

    Raises:
        UserError: the text cannot be read, or the folder exists or cannot be written.
    """
    from minitext.data import array_record

    if cfg.source not in ("stdlib", "files"):
        raise UserError(f"data.source={cfg.source} cannot be packed: choose stdlib or files")
    tokenizer = make_tokenizer(cfg, vocab)
    rows, digest = _text_windows(cfg, tokenizer, "train")
    held_out, _ = _text_windows(cfg, tokenizer, "validation")
    about = cache.fingerprint(digest, cfg.seq_len, cfg.seed, cfg.shuffle, cfg.validation_fraction)
    splits = {"train": rows, "validation": held_out}
    return array_record.write_rows(Path(target), cfg, tokenizer, splits, about, shards)


def _text_windows(cfg: DataConfig, tokenizer: Tokenizer, split: Split) -> tuple[Any, str]:
    """The rows of one split of local text, and what stands for that text.

    Documents come in an order drawn from data.seed before rows are cut, so that the last rows,
    which are held out, are a fair sample of the documents.
    """
    from minitext.data import array_record, token_file

    if cfg.source == "arrayrecord":
        return array_record.open_rows(cfg, split)
    text = token_file.open_token_file(cfg, tokenizer, cache.fingerprint(tokenizer.to_json()))
    total = len(text.tokens)
    if total <= 2 * cfg.seq_len:
        raise UserError(
            f"data.seq_len={cfg.seq_len} is too long for the data, whose {total:,} tokens must "
            f"fill two rows, one to train on and one to validate on: "
            + (f"set it to {(total - 1) // 2} or less" if total > 4 else "give more text")
        )
    order = np.random.default_rng(cfg.seed).permutation(len(text.ends)) if cfg.shuffle else None
    stream = packing.TokenStream(text.tokens, text.ends, tokenizer.eod_id, order)
    rows = packing.row_count(total, cfg.seq_len)
    held_out = min(rows - 1, max(1, round(rows * cfg.validation_fraction)))
    if split == "train":
        return packing.Windows(stream, cfg.seq_len, 0, rows - held_out), text.digest
    # Neighbouring rows are of one document: in this order the first few batches are a fair sample of all.
    mixed = np.random.default_rng(cfg.seed + 1).permutation(held_out)
    windows = packing.Windows(stream, cfg.seq_len, rows - held_out, rows, mixed)
    return windows, text.digest


def _streamed(cfg: DataConfig, tokenizer: Tokenizer, placement: Placement, split: Split) -> Batches:
    """Batches of Hugging Face records, tokenised as they arrive."""
    from minitext.data import streaming

    iterator = streaming.read_ahead(cfg, tokenizer, placement, split, READ_AHEAD)
    digest = cache.fingerprint(
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
