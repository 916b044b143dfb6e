"""The rows of any source but a stream, in the order of training or validation.

Row i is a function of the settings and of i, so resuming and dealing rows to processes are
arithmetic. An epoch is one pass over the training rows in an order of its own. A mixture deals its
rows to its n parts so that after any number of rows each part's share is exact to less than n - 1
rows (weights are rounded to a hundredth of the smallest); a part that ends starts its next epoch
whatever the others do. Held-out rows are mixed by the same weights until one part runs out, so the
validation loss is that of the mixture.

Chapters: 7.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np

from minitext.config.data import CHATS, DataConfig
from minitext.data import (
    array_record,
    conversations,
    grammar,
    packing,
    sources,
    text_files,
    token_file,
)
from minitext.data.placement import Split
from minitext.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from minitext.errors import UserError
from minitext.files import cache_dir, fingerprint, local_path, new_cache_entry


@dataclass(frozen=True)
class Rows:
    """The rows of one split.

    Attributes:
        windows: a sequence of int32 [T + 1]; its length is `sys.maxsize` if rows never end.
        digest: identifies the rows and their order; the same on every machine.
        floor: the source's entropy rate in nats per token, where known.
    """

    windows: Any
    digest: str
    floor: float | None = None


def open_rows(cfg: DataConfig, tokenizer: Tokenizer, split: Split) -> Rows:
    """Opens one split of any source but hf.

    Raises:
        UserError: the source can't be read or doesn't fit the tokenizer, or two parts of a mixture
            share text.
    """
    if cfg.source == "mixture":
        _check_disjoint(cfg)
        parts = [open_rows(cfg.of_part(part), tokenizer, split) for part in cfg.mixture]
        weights = [part.weight for part in cfg.mixture]
        windows = grain.MapDataset.mix(
            [grain.MapDataset.source(part.windows) for part in parts], weights
        )
        return Rows(windows, fingerprint([part.digest for part in parts], weights))
    floor = None
    if cfg.source == "grammar":
        if not isinstance(tokenizer, ByteTokenizer):
            raise UserError(
                "data.source=grammar is a language of bytes and the tokenizer is another: leave out "
                "the grammar, or the packed folder that brings the tokenizer"
            )
        windows, digest = grammar.Windows(cfg.seq_len, cfg.seed, split), grammar.DIGEST
        floor = grammar.grammar_entropy_rate()
    else:
        windows, digest = _text_windows(cfg, tokenizer, split)
        if split == "train":
            windows = grain.MapDataset.source(windows)
            windows = (windows.shuffle(cfg.seed) if cfg.shuffle else windows).repeat(cfg.epochs)
    settings = (cfg.seq_len, cfg.seed, cfg.shuffle, cfg.validation_fraction, split)
    return Rows(windows, fingerprint(digest, *settings), floor)


def _check_disjoint(cfg: DataConfig) -> None:
    """Raises if two parts read the same text: one would train on what the other holds out."""
    owner: dict[Any, int] = {}
    for number, part in enumerate(cfg.mixture):
        for name in _texts(cfg.of_part(part)):
            if (other := owner.setdefault(name, number)) != number:
                raise UserError(
                    f"data.mixture: parts {other} and {number} both read {name}, so one would train on what "
                    "the other holds out: leave it to one of them"
                )


def _texts(cfg: DataConfig) -> list[str]:
    """Names of the texts a source reads: files, or whole splits of a TensorFlow dataset."""
    if cfg.source in ("stdlib", "files"):
        return [str(path.resolve()) for path in text_files.find_files(cfg)]
    if cfg.source == "tfds":
        return [f"{cfg.tfds_name} {split}" for split in re.findall(r"[A-Za-z_]\w*", cfg.tfds_split)]
    return [cfg.path or cfg.source]


def pack_source(
    cfg: DataConfig,
    target: str | os.PathLike[str],
    *,
    vocab: int,
    shards: int,
    tokenizer: Tokenizer | None = None,
) -> dict[str, int]:
    """Tokenises the configured text and writes its rows as a folder for `data.source=arrayrecord`.

    Args:
        cfg: the data section of a config, with source stdlib, files or tfds.
        target: the folder to make.
        vocab: the model's vocabulary.
        shards: files of training rows.
        tokenizer: by default the one that cfg asks for.

    Returns:
        The number of rows in each split.

    Raises:
        UserError: the text can't be read, or the folder exists or can't be written.
    """
    if cfg.source not in ("stdlib", "files", "tfds"):
        raise UserError(f"data.source={cfg.source} cannot be packed: choose stdlib, files or tfds")
    tokenizer = tokenizer or make_tokenizer(cfg, vocab)
    rows, digest = _text_windows(cfg, tokenizer, "train")
    held_out, _ = _text_windows(cfg, tokenizer, "validation")
    digest = fingerprint(digest, cfg.seq_len, cfg.seed, cfg.shuffle, cfg.validation_fraction)
    splits = {"train": rows, "validation": held_out}
    return array_record.write_rows(
        Path(local_path(target)), cfg.seq_len, tokenizer, splits, digest, shards
    )


def _text_windows(cfg: DataConfig, tokenizer: Tokenizer, split: Split) -> tuple[Any, str]:
    """Returns the rows of one split of local text, and the text's digest.

    Documents are shuffled by data.seed before rows are cut, so the last rows, which are held out,
    are a fair sample of the documents.
    """
    if cfg.source == "arrayrecord":
        if array_record.load_packed_tokenizer(cfg).to_json() != tokenizer.to_json():
            raise UserError(
                f"{cfg.path} was packed with another tokenizer than this run's: pack its text again, "
                "or begin a new run with it alone"
            )
        return array_record.open_rows(cfg, split)
    text = token_file.open_token_file(cfg, tokenizer)
    total = len(text.tokens)
    if total <= 2 * cfg.seq_len:
        raise UserError(
            f"data.seq_len={cfg.seq_len} is too long for the data, whose {total:,} tokens must "
            f"fill two rows, one to train on and one to validate on: "
            + (f"set it to {(total - 1) // 2} or less" if total > 4 else "give more text")
        )
    order = np.random.default_rng(cfg.seed).permutation(len(text.ends)) if cfg.shuffle else None
    stream = packing.TokenStream(text.tokens, text.ends, order)
    rows = packing.row_count(total, cfg.seq_len)
    held_out = min(rows - 1, max(1, round(rows * cfg.validation_fraction)))
    if split == "train":
        return packing.Windows(stream, cfg.seq_len, 0, rows - held_out), text.digest
    # Neighbouring rows share documents; shuffled, the first few batches are a fair sample of all.
    mixed = np.random.default_rng(cfg.seed + 1).permutation(held_out)
    windows = packing.Windows(stream, cfg.seq_len, rows - held_out, rows, mixed)
    return windows, text.digest


def make_tokenizer(cfg: DataConfig, vocab: int) -> Tokenizer:
    """Makes the tokenizer that a data config asks for.

    A BPE tokenizer is trained once, on a bounded sample of the config's own source, and kept in the
    cache directory (`$MINITEXT_CACHE`, or `~/.cache/minitext`).

    Args:
        cfg: the data section of a config.
        vocab: the model's vocabulary; the tokenizer uses at most that many ids.

    Raises:
        UserError: `vocab` is too small, or the source can't be read.
    """
    packed = [p for p in (cfg, *map(cfg.of_part, cfg.mixture)) if p.source == "arrayrecord"]
    if packed:  # its text is already encoded
        return array_record.load_packed_tokenizer(packed[0])
    if cfg.tokenizer == "byte":
        if vocab < ByteTokenizer.vocab_size:
            raise UserError(
                f"model.vocab={vocab} is too small for data.tokenizer=byte: set model.vocab to "
                f"{ByteTokenizer.vocab_size} or more"
            )
        return ByteTokenizer()
    key = fingerprint(sources.identity_of_sample(cfg), vocab)
    path = cache_dir() / f"bpe-{key}" / "tokenizer.json"
    if not path.exists():
        texts = conversations.sample(cfg) if cfg.source in CHATS else sources.sample(cfg)
        with new_cache_entry(path.parent) as directory:
            train_bpe(texts, vocab).save(directory / path.name)
    return load_tokenizer(path)
