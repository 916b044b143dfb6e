"""Rows packed once into ArrayRecord files, which any number of processes read without tokenising again.

`minitext data pack` makes a folder:

    about.json                                seq_len, rows of each split, digest of the text
    tokenizer.json
    train-00000-of-00004.array_record, ...    records are rows: T + 1 ids, fewer at the text's end
    validation-00000-of-00001.array_record

Rows have an index, so order, sharding and resuming work as for text in the cache.

Chapters: 7.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from minitext import files, terminal
from minitext.config.data import DataConfig
from minitext.data import packing
from minitext.data.tokenizer import Tokenizer, load_tokenizer
from minitext.errors import UserError

ABOUT, TOKENIZER = "about.json", "tokenizer.json"
DTYPE = np.dtype("<u4")


def write_rows(
    target: Path,
    seq_len: int,
    tokenizer: Tokenizer,
    splits: dict[str, Any],
    digest: str,
    shards: int,
) -> dict[str, int]:
    """Writes the rows of every split, whole or not at all.

    Args:
        target: the folder to make.
        seq_len: T.
        tokenizer: what the text was encoded with.
        splits: split -> sequence of rows [T + 1].
        digest: identifies the text.
        shards: files of the training split; the others are one file each.

    Returns:
        The number of rows in each split.

    Raises:
        UserError: the target exists or can't be written.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    fix = "name a folder where one can be made"
    if target.exists():
        raise UserError(f"{target} exists: name a folder that does not")
    counts = {split: len(rows) for split, rows in splits.items()}
    about = {"seq_len": seq_len, "rows": counts, "shards": shards, "digest": digest}
    total, done = sum(counts.values()), 0
    try:
        with (
            files.new_folder(target) as new,
            terminal.of_slow_work(total, f"packing into {target}") as advance_to,
        ):
            for split, rows in splits.items():
                paths = _paths(new, split, shards)
                bounds = np.linspace(0, len(rows), len(paths) + 1).astype(int)
                for part, path in enumerate(paths):
                    writer = ArrayRecordWriter(str(path), "group_size:1")
                    for i in range(bounds[part], bounds[part + 1]):
                        row = rows[i]
                        writer.write(row[row != packing.PAD].astype(DTYPE).tobytes())
                        done += 1
                        advance_to(done)
                    writer.close()
            tokenizer.save(new / TOKENIZER)
            files.write(new / ABOUT, json.dumps(about, indent=1))
    except OSError as error:
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error
    return counts


def open_rows(cfg: DataConfig, split: str) -> tuple[Any, str]:
    """Opens the rows of one split: a sequence of int32 [T + 1], PAD past the text's end; and the text's digest.

    Raises:
        UserError: `data.path` isn't a packed folder, lacks a file, or was packed for another seq_len.
    """
    import grain

    folder = _packed_folder(cfg)
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    if about["seq_len"] != cfg.seq_len:
        raise UserError(
            f"{folder} was packed with data.seq_len={about['seq_len']}, not {cfg.seq_len}: set "
            f"data.seq_len={about['seq_len']}, or pack the text again"
        )
    paths = _paths(folder, split, about["shards"])
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is missing: copy it from where the folder was packed")
    try:
        source: Any = grain.sources.ArrayRecordDataSource([str(path) for path in paths])
        found = len(source)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"cannot read {folder}: {reason}: pack the text again") from error
    if found != about["rows"][split]:
        raise UserError(
            f"{folder} has {found:,} {split} rows and should have {about['rows'][split]:,}: a file is "
            "damaged or from another folder: pack the text again"
        )

    def unpack(record: bytes) -> np.ndarray:
        ids = np.frombuffer(record, DTYPE).astype(np.int32)
        return np.pad(ids, (0, cfg.seq_len + 1 - len(ids)), constant_values=packing.PAD)

    return grain.MapDataset.source(source).map(unpack), about["digest"]


def load_packed_tokenizer(cfg: DataConfig) -> Tokenizer:
    """Reads the tokenizer of the packed folder `data.path`.

    Raises:
        UserError: it isn't a packed folder, or its tokenizer can't be read.
    """
    return load_tokenizer(_packed_folder(cfg) / TOKENIZER)


def _packed_folder(cfg: DataConfig) -> Path:
    assert cfg.path, "checked by the config"
    folder = Path(os.path.expanduser(cfg.path))
    if not (folder / ABOUT).is_file():
        raise UserError(
            f"data.path={cfg.path} is not a packed folder (it has no {ABOUT}): make one with "
            "minitext data pack FOLDER data.source=files data.path=TEXT"
        )
    return folder


def _paths(folder: Path, split: str, shards: int) -> list[Path]:
    parts = shards if split == "train" else 1
    return [folder / f"{split}-{part:05}-of-{parts:05}.array_record" for part in range(parts)]
