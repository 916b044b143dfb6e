"""Local text, tokenised once into one memory-mapped file in the cache.

An entry holds `tokens.bin` (uint16, or uint32 for vocabularies above 65,536; every document is
followed by the end-of-document id), `ends.npy` (int64, one past each document's last token) and
`about.json`.

Chapters: 7.
"""

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minitext import terminal
from minitext.config.data import DataConfig
from minitext.data import sources, text_files
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.files import cache_dir, fingerprint, new_cache_entry

BATCH_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a source.

    Attributes:
        tokens: uint16 or uint32 [N], memory-mapped.
        ends: int64 [documents], one past the last token of each document.
        digest: hash of `tokens`, the same on every machine.
    """

    tokens: np.ndarray
    ends: np.ndarray
    digest: str


def open_token_file(cfg: DataConfig, tokenizer: Tokenizer) -> TokenFile:
    """Opens the token file of a local source (stdlib, files or tfds), making it if the cache has none.

    The key is made of the files' paths, sizes and modification times and of the tokenizer. Text is
    tokenised in pieces, so its size is bounded by the disk, not by memory.

    Raises:
        UserError: the text can't be read or is empty, or the cache can't be written.
    """
    key = fingerprint("tokens", sources.identity(cfg), fingerprint(tokenizer.to_json()))
    path = cache_dir() / f"tokens-{key}"
    was_there, found = path.exists(), _read(path)
    if found is None:
        # Not what another process has finished since: only an entry cut short by a crash of the machine.
        if was_there:
            shutil.rmtree(path, ignore_errors=True)
        with new_cache_entry(path) as directory:
            _write(directory, cfg, tokenizer)
        found = _read(path)
    if found is None:
        raise UserError(f"the cache entry {path} is damaged: delete it")
    return found


def _read(path: Path) -> TokenFile | None:
    """Returns the entry at `path`, or None if it's missing or incomplete."""
    try:
        about = json.loads((path / "about.json").read_text())
        tokens = np.memmap(path / "tokens.bin", about["dtype"], mode="r")
        ends = np.load(path / "ends.npy")
    except (OSError, EOFError, ValueError, KeyError):
        return None
    whole = len(tokens) == about["tokens"] == ends[-1]
    return TokenFile(tokens, ends, about["digest"]) if whole else None


def _write(directory: Path, cfg: DataConfig, tokenizer: Tokenizer) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    digest = hashlib.blake2b(digest_size=16)
    ends = array("q")
    length, begins = 0, True
    with (directory / "tokens.bin").open("wb") as file:
        for pieces in _batches(cfg):
            first = [begins, *(ends_document for _, ends_document in pieces)]
            begins = first.pop()
            encoded = _encode(tokenizer, [text for text, _ in pieces], first)
            for ids, (_, ends_document) in zip(encoded, pieces, strict=True):
                data = ids.astype(dtype).tobytes()
                length += len(ids)
                if ends_document:
                    data += dtype.type(tokenizer.eod_id).tobytes()
                    length += 1
                    ends.append(length)
                file.write(data)
                digest.update(data)
    if not length:
        named = {"files": f"data.path={cfg.path}", "tfds": f"data.tfds_name={cfg.tfds_name}"}
        where = named.get(cfg.source, f"data.source={cfg.source}")
        raise UserError(f"{where} has no text in it: nothing to train on")
    np.save(directory / "ends.npy", np.frombuffer(ends, np.int64))
    about = {"dtype": dtype.name, "tokens": length, "digest": digest.hexdigest()}
    (directory / "about.json").write_text(json.dumps(about))


def _encode(tokenizer: Tokenizer, texts: list[str], first: list[bool]) -> Iterator[np.ndarray]:
    """Yields the ids of texts, each the first piece of a document or one that goes on with it."""
    starts, rest = (
        [text for text, is_first in zip(texts, first, strict=True) if is_first == which]
        for which in (True, False)
    )
    found = {
        True: iter(tokenizer.encode_batch(starts)),
        False: iter(tokenizer.encode_rest(rest) if rest else ()),
    }
    return (next(found[is_first]) for is_first in first)


def _batches(cfg: DataConfig) -> Iterator[list[text_files.Piece]]:
    """Yields the source's pieces in lists of a few mebibytes: enough work for all cores."""
    total, what, found = sources.read(cfg)
    with terminal.of_slow_work(total, f"tokenising {what}") as advance_to:
        pieces, characters = [], 0
        for piece, done in found:
            pieces.append(piece)
            characters += len(piece[0])
            if characters >= BATCH_CHARACTERS:
                yield pieces
                pieces, characters = [], 0
                advance_to(done)
        if pieces:
            yield pieces
