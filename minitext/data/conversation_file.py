"""Conversations, rendered and tokenized once into a memory-mapped file in the cache.

An entry holds `tokens.bin` (uint16 or uint32), `learned.bin` (uint8, 1 where the assistant says the token and it is to
be learned), `ends.npy` (int64, one past each sequence's last token), `wheres.jsonl` (of each record, where it is in the
source) and `about.json`. Of a pair, the chosen and the rejected conversation are two sequences in a row.

Chapters: 26.
"""

import hashlib
import itertools
import json
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minitext import terminal
from minitext.config.data import DataConfig
from minitext.data import conversations, sources
from minitext.data.chat import Chat
from minitext.data.chat_mask import ChatEncoder, Masked
from minitext.data.conversations import Fault
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.files import cache_dir, fingerprint, new_cache_entry

AT_ONCE, CHARACTERS = (
    512,
    4 << 20,
)  # records in memory with their texts and tokens: whichever comes first


RULES = 2  # raised when other records or tokens count, so that no entry of older rules is used


@dataclass(frozen=True)
class ConversationFile:
    """The tokens of a source of conversations.

    Attributes:
      tokens: uint16 or uint32 [N], memory-mapped.
      learned: uint8 [N], memory-mapped.
      ends: int64 [sequences], one past the last token of each.
      left_out: kind of fault -> (how many, where the first is, its detail).
      turn_ends: ids that end the assistant's turns.
      digest: hash of tokens and masks, the same on every machine.
      path: the entry's folder.
    """

    tokens: np.ndarray
    learned: np.ndarray
    ends: np.ndarray
    left_out: dict[str, tuple[int, str, str]]
    turn_ends: frozenset[int]
    digest: str
    path: Path

    def where(self, record: int) -> str:
        """Returns where a record that is used was read, such as `a.jsonl:7`; reads the list up to it."""
        with (self.path / "wheres.jsonl").open(encoding="utf-8") as file:
            return json.loads(next(itertools.islice(file, record, None)))

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a sequence's tokens and which of them are learned."""
        start = int(self.ends[index - 1]) if index else 0
        part = slice(start, int(self.ends[index]))
        return self.tokens[part], self.learned[part]


def open_conversation_file(cfg: DataConfig, tokenizer: Tokenizer, chat: Chat) -> ConversationFile:
    """Opens the tokens of `data.source` conversations or preferences, making them if the cache has none.

    The key is made of the files' paths, sizes and modification times (of a dataset of the Hub, its name), the
    tokenizer and the template. A few hundred conversations are in memory at a time.

    Raises:
      UserError: the source can't be read, has nothing to train on, or the cache can't be written.
    """
    # A run notes what ended its turns as stops, which are more of them when it resumes, but no other special tokens.
    special_ids = sorted({*tokenizer.spellings.values(), *chat.stops})
    key = fingerprint(
        RULES, cfg.source, sources.identity(cfg), fingerprint(tokenizer.to_json()), chat.template, chat.special,
        special_ids,
    )  # fmt: skip
    path = cache_dir() / f"conversations-{key}"
    was_there, found = path.exists(), _read(path)
    if found is None:
        # Not what another process has finished since: only an entry cut short by a crash of the machine.
        if was_there:
            shutil.rmtree(path, ignore_errors=True)
        with new_cache_entry(path) as directory:
            _write(directory, cfg, tokenizer, chat)
        found = _read(path)
    if found is None:
        raise UserError(f"the cache entry {path} is damaged: delete it")
    return found


def _read(path: Path) -> ConversationFile | None:
    """Returns the entry at `path`, or None if it's missing or incomplete."""
    try:
        about = json.loads((path / "about.json").read_text())
        tokens = np.memmap(path / "tokens.bin", about["dtype"], mode="r")
        learned = np.memmap(path / "learned.bin", np.uint8, mode="r")
        ends = np.load(path / "ends.npy")
    except (OSError, EOFError, ValueError, KeyError):
        return None
    if not len(tokens) == len(learned) == about["tokens"] == ends[-1]:
        return None
    left_out = {kind: tuple(about["left_out"][kind]) for kind in about["left_out"]}
    ends_of_turns = frozenset(about["turn_ends"])
    return ConversationFile(tokens, learned, ends, left_out, ends_of_turns, about["digest"], path)


def _write(directory: Path, cfg: DataConfig, tokenizer: Tokenizer, chat: Chat) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    digest, ends, length = hashlib.blake2b(digest_size=16), array("q"), 0
    left_out: dict[str, tuple[int, str, str]] = {}
    encoder = ChatEncoder(chat, tokenizer)
    try:
        with (
            (directory / "tokens.bin").open("wb") as tokens,
            (directory / "learned.bin").open("wb") as learned,
            (directory / "wheres.jsonl").open("w", encoding="utf-8") as wheres,
        ):
            for sequences, where in _encoded(cfg, encoder, left_out):
                for ids, said in sequences:
                    for file, values in ((tokens, ids.astype(dtype)), (learned, said)):
                        file.write(values.tobytes())
                        digest.update(values.tobytes())
                    length += len(ids)
                    ends.append(length)
                wheres.write(json.dumps(where) + "\n")
    finally:
        encoder.close()
    if not length:
        raise UserError(nothing_left(cfg, conversations.fault_lines(left_out)))
    found = np.frombuffer(ends, np.int64)
    digest.update(found.tobytes())
    np.save(directory / "ends.npy", found)
    about = {
        "dtype": dtype.name, "tokens": length, "digest": digest.hexdigest(), "left_out": left_out,
        "turn_ends": sorted(encoder.turn_ends),
    }  # fmt: skip
    (directory / "about.json").write_text(json.dumps(about))


def _encoded(
    cfg: DataConfig, encoder: ChatEncoder, left_out: dict[str, tuple[int, str, str]]
) -> Iterator[tuple[list[Masked], str]]:
    """Yields the sequences of each record that can be learned and where it is, and counts the others in `left_out`."""
    done = 0
    with terminal.of_slow_work(0, f"rendering and tokenising {named(cfg)}") as advance_to:
        for records in conversations.in_lists(conversations.read(cfg), AT_ONCE, CHARACTERS):
            # A pair is two conversations, of which neither is used without the other.
            groups = [conversations.each(found) for found, _ in records]
            masked = iter(encoder.encode([one for group in groups for one in group]))
            for (found, where), group in zip(records, groups, strict=True):
                made: list[Any] = [next(masked) for _ in group]
                faults = [one for one in (found, *made) if isinstance(one, Fault)]
                if faults:
                    conversations.count_fault(left_out, faults[0], where)
                else:
                    yield made, where
            done += len(records)
            advance_to(done)


def named(cfg: DataConfig) -> str:
    """Returns how messages name a source of conversations."""
    return f"data.hf_name={cfg.hf_name}" if cfg.hf_name else f"data.path={cfg.path}"


def nothing_left(cfg: DataConfig, left_out: tuple[str, ...]) -> str:
    """Returns the message for a source of which nothing can be trained on."""
    what = "pair" if cfg.source == "preferences" else "conversation"
    why = "; ".join(left_out) if left_out else "it is empty"
    return f"{named(cfg)} has no {what} to train on: {why}"
