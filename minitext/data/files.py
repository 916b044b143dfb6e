"""Files of text: which ones a source means, and the documents in them.

Text is read in pieces, in constant memory. A document reaches its reader as one or more `(text,
ends_document)` pieces, so that a file of a gigabyte need not fit in memory.

Chapters: 7.
"""

import codecs
import glob
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minitext.config.data import DataConfig
from minitext.errors import UserError

Piece = tuple[str, bool]

TEXT = (".txt", ".md", ".py")
SUFFIXES = (*TEXT, ".jsonl", ".parquet")
PIECE_BYTES = 1 << 20

# Not the library's own code, or written to be odd.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def find_files(cfg: DataConfig) -> list[Path]:
    """Returns the files of `data.source` stdlib or files, sorted.

    Raises:
        UserError: there are none, or one is of a kind that cannot be read.
    """
    if cfg.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = _walk(root, SKIPPED, (".py",))
        if not found:
            raise UserError(f"no .py files in Python's library {root}: set data.source=files")
        return found
    try:
        return _find_path(cfg)
    except OSError as error:
        raise UserError(f"cannot look at data.path={cfg.path}: {error.strerror}") from error


def _find_path(cfg: DataConfig) -> list[Path]:
    assert cfg.path, "the config has seen to it"
    path = Path(os.path.expanduser(cfg.path))
    if path.is_dir():
        found = _walk(path, {"__pycache__"}, SUFFIXES)
        if not found:
            raise UserError(
                f"data.path={cfg.path} is a folder without a {', '.join(SUFFIXES)} file"
            )
    elif path.exists():
        found = [path]
    elif glob.has_magic(cfg.path):
        found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not found:
            raise UserError(f"data.path={cfg.path} matches no file")
    else:
        raise UserError(
            f"data.path={cfg.path} does not exist: set it to a file, a folder or a glob"
        )
    for path in found:
        if path.suffix not in SUFFIXES:
            raise UserError(
                f"data.path: cannot read {path}: its name must end in one of {', '.join(SUFFIXES)}"
            )
    return found


def read_file(path: Path, text_key: str) -> Iterator[Piece]:
    """Yields the documents of one file: the whole of a text file, the rows of a .jsonl or .parquet.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or has a row without text; the message
            says where.
    """
    if path.suffix == ".parquet":
        rows = _parquet_rows(path, text_key)
    elif path.suffix == ".jsonl":
        rows = _jsonl_rows(path, text_key)
    else:
        yield from _text_pieces(path)
        return
    for text in rows:
        if text:
            yield text, True


def _text_pieces(path: Path) -> Iterator[Piece]:
    """Yields a UTF-8 file in pieces of about a mebibyte; the last one ends the document.

    A piece ends before white space where it can: a BPE tokenizer never joins across that place, so
    it gives the same ids as for the whole text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, offset = "", 0
    with _open(path) as file:
        while chunk := file.read(PIECE_BYTES):
            text += _decode(decoder, chunk, path, offset)
            offset += len(chunk)
            word = re.match(r"(?s).*\S(?=\s)", text)
            end = word.end() if word else len(text)
            if len(text) >= PIECE_BYTES // 4 and end:
                yield text[:end], False
                text = text[end:]
    text += _decode(decoder, b"", path, offset)
    if offset:
        yield text, True


def _decode(decoder: codecs.IncrementalDecoder, chunk: bytes, path: Path, offset: int) -> str:
    held = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut
    try:
        return decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte {offset - held + error.start} is "
            f"0x{error.object[error.start]:02x}: convert it, for instance with `iconv -t UTF-8`"
        ) from error


def _jsonl_rows(path: Path, text_key: str) -> Iterator[str]:
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            decoder = codecs.getincrementaldecoder("utf-8")()
            text = _decode(decoder, line, path, offset) + _decode(
                decoder, b"", path, offset + len(line)
            )
            offset += len(line)
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise UserError(f"{path}:{number}: not a JSON object: {error}") from error
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}:{number}: a {type(row).__name__} where a JSON object should be"
                )
            yield text_of(row, text_key, f"{path}:{number}")


def _parquet_rows(path: Path, text_key: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise UserError(_no_key(str(path), text_key, names))
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    yield text_of({text_key: text or ""}, text_key, f"{path}: row {row}")
                    row += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path} as parquet: {error}") from error


def text_of(record: dict[str, Any], text_key: str, where: str) -> str:
    """Returns the text of one record.

    Raises:
        UserError: it has no `text_key`, or something other than text there.
    """
    if text_key not in record:
        raise UserError(_no_key(where, text_key, list(record)))
    text = record[text_key]
    if not isinstance(text, str):
        raise UserError(
            f"{where}: {text_key!r} holds {type(text).__name__}, not text: set data.text_key"
        )
    return text


def _no_key(where: str, text_key: str, keys: list[str]) -> str:
    found = ", ".join(keys) or "no keys"
    return f"{where}: no {text_key!r} among {found}: set data.text_key to one of them"


def _open(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _walk(root: Path, skipped: set[str], suffixes: tuple[str, ...]) -> list[Path]:
    """Returns the files below `root`, sorted, without hidden folders and those in `skipped`."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in files if name.endswith(suffixes)]
    return sorted(path for path in found if path.is_file())  # not a link to nowhere
