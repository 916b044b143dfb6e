"""Files of text: which ones a source means, and the documents in them.

A document arrives as one or more `(text, ends_document)` pieces, so memory stays constant whatever a file's size.

The jsonl and parquet readers are our own: `datasets` 5.2 names neither file nor line of bad JSON, reads a missing key
as None, writes locks outside our cache, and reads a 50 MB jsonl at 32 MB/s (ours 177; parquet 21 and 38).

Chapters: 7.
"""

import codecs
import collections
import glob
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minitext import files
from minitext.config.data import CHATS, DataConfig
from minitext.errors import UserError

Piece = tuple[str, bool]

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
RECORDS = (".jsonl", ".parquet")
PIECE_BYTES, LINE_BYTES = 1 << 20, 64 << 20
EXAMPLE = '{"text": "..."}'
LAST_WORD, LAST_SPACE = re.compile(r"(?s).*[^\W_](?=\s)"), re.compile(r"(?s).*\S(?=\s)")
UTF8 = codecs.getincrementaldecoder("utf-8")

# Third-party code, and code written to be odd.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def find_files(cfg: DataConfig) -> list[Path]:
    """Returns the files of `data.source` stdlib or files, or of conversations, sorted.

    Raises:
        UserError: there are none, or one is of a kind that can't be read.
    """
    if cfg.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = _walk(root, SKIPPED, (".py",))
        if not found:
            raise UserError(f"no .py files in Python's library {root}: set data.source=files")
        return found
    assert cfg.path, "checked by the config"
    suffixes = RECORDS if cfg.source in CHATS else SUFFIXES
    path, known = Path(os.path.expanduser(cfg.path)), ", ".join(suffixes)
    try:
        if path.is_dir():
            found, none = (
                _walk(path, {"__pycache__"}, suffixes),
                f"is a folder without a {known} file",
            )
        elif path.exists():
            found, none = [path], ""
        elif glob.has_magic(cfg.path):
            matches = map(Path, glob.glob(str(path), recursive=True))
            found, none = sorted(match for match in matches if match.is_file()), "matches no file"
        else:
            found, none = [], "does not exist: set it to a file, a folder or a glob"
    except OSError as error:
        raise UserError(f"cannot look at data.path={cfg.path}: {error.strerror}") from error
    if not found:
        raise UserError(f"data.path={cfg.path} {none}")
    for path in found:
        if path.suffix not in suffixes:
            raise UserError(f"data.path: cannot read {path}: its name must end in one of {known}")
    return found


def read_file(path: Path, text_key: str) -> Iterator[Piece]:
    """Yields the documents of one file: the whole of a text file, the rows of a .jsonl or .parquet.

    Raises:
        UserError: the file can't be read, isn't UTF-8, or has a row without text; the message says where.
    """
    if path.suffix in (".parquet", ".jsonl"):
        rows = _parquet_rows if path.suffix == ".parquet" else _jsonl_rows
        yield from ((text, True) for text in rows(path, text_key) if text)
    else:
        yield from _text_pieces(path)


def _text_pieces(path: Path) -> Iterator[Piece]:
    """Yields a UTF-8 file in pieces of about a mebibyte; the last one ends the document.

    A piece ends after a letter or digit and before white space where it can: no BPE token spans that point, so the ids
    are those of the whole text. Other characters won't do: Llama 3's and Qwen's tokens may have them and line ends.
    """
    decoder = UTF8()
    text, offset = "", 0
    with files.open_file(path) as file:
        while chunk := file.read(PIECE_BYTES):
            text += _decode(decoder, chunk, path, offset)
            offset += len(chunk)
            word = LAST_WORD.match(text) or LAST_SPACE.match(text)
            end = word.end() if word else len(text)
            if len(text) >= PIECE_BYTES // 4 and end:
                yield text[:end], False
                text = text[end:]
    text += _decode(decoder, b"", path, offset, final=True)
    if offset:
        yield text, True


def _decode(
    decoder: codecs.IncrementalDecoder, data: bytes, path: Path, offset: int, final: bool = False
) -> str:
    held = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte {offset - held + error.start} is "
            f"0x{error.object[error.start]:02x}: convert it, for instance with `iconv -t UTF-8`"
        ) from error


def read_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the records of a .jsonl or .parquet file, each with where it is, such as `a.jsonl:7`.

    Raises:
        UserError: the file can't be read, or has a line that isn't a JSON object of at most 64 MiB, each key once.
    """
    yield from _jsonl_records(path, _object) if path.suffix == ".jsonl" else _parquet_records(path)


def _jsonl_records(
    path: Path, make: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the records; `make` makes an object of its keys and values, which takes half as long again."""
    offset, number = 0, 0
    with files.open_file(path) as file:
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > LINE_BYTES:
                raise UserError(
                    f"{where}: the line has more than {LINE_BYTES >> 20} MiB, the limit"
                )
            text = _decode(UTF8(), line, path, offset, final=True)
            offset += len(line)
            if not text.strip():
                continue
            try:
                row = json.loads(text, object_pairs_hook=make)
            except (ValueError, RecursionError) as error:
                reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
                if isinstance(error, json.JSONDecodeError):
                    reason = f"{error.msg}, column {error.colno}"
                raise UserError(f"{where} is not a JSON object ({reason}): correct it") from error
            if isinstance(row, list):
                raise UserError(f"{where} is a JSON list: write each record in a line of its own")
            if not isinstance(row, dict):
                raise UserError(f"{where} is not a JSON object: write one such as {EXAMPLE}")
            yield row, where


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; Python's own would take the last of two values of a key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        twice = files.shorten(counts.most_common(1)[0][0])
        raise ValueError(f"the key {twice} is there twice")
    return found


def _parquet_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with files.open_file(path) as opened, pyarrow.parquet.ParquetFile(opened) as file:
            rows = (row for batch in file.iter_batches(batch_size=256) for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield row, f"{path}: row {number}"
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a Parquet file ({error}): write it again") from error


def _jsonl_rows(path: Path, text_key: str) -> Iterator[str]:
    for row, where in _jsonl_records(path):
        yield text_of(row, text_key, where)


def _parquet_rows(path: Path, text_key: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with files.open_file(path) as opened, pyarrow.parquet.ParquetFile(opened) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise UserError(_no_key(str(path), text_key, names))
            batches = file.iter_batches(batch_size=256, columns=[text_key])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            for row, text in enumerate(texts):
                yield text_of({text_key: text or ""}, text_key, f"{path}: row {row}")
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a Parquet file ({error}): write it again") from error


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


def _walk(root: Path, skipped: set[str], suffixes: tuple[str, ...]) -> list[Path]:
    """Returns the files below `root`, sorted, leaving out hidden folders and those in `skipped`."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(path for path in found if path.is_file())  # not a dangling link
