"""Rows of whole conversations, and rows of one pair each.

No conversation is divided between rows. Of a conversation of n tokens, the first n - 1 are inputs and the last n - 1
targets; the next one begins at the next position, with positions from 0 and a segment id of its own. So nothing of one
is predicted from another.

Chapters: 26.
"""

from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from minitext.config.data import DataConfig
from minitext.data import conversations
from minitext.data.chat import Chat
from minitext.data.conversation_file import (
    ConversationFile,
    named,
    nothing_left,
    open_conversation_file,
)
from minitext.data.conversations import Fault
from minitext.data.placement import Batch, Split
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.files import fingerprint

LONG = "more tokens than a row of data.seq_len has"
CUT_OFF = "no answer in what a row of data.seq_len has of them"


@dataclass(frozen=True)
class ChatRows:
    """The rows of one split.

    Attributes:
      rows: a sequence of rows, each a dict of [T] arrays; its length is `sys.maxsize` if rows never end.
      digest: identifies the rows and their order; the same on every machine.
      left_out: a line on each kind of conversation that isn't in any row.
      turn_ends: ids that end the assistant's turns.
      used: conversations or pairs in this split.
    """

    rows: Any
    digest: str
    left_out: tuple[str, ...]
    turn_ends: frozenset[int]
    used: int


def open_chat_rows(cfg: DataConfig, tokenizer: Tokenizer, chat: Chat, split: Split) -> ChatRows:
    """Opens one split of `data.source` conversations or preferences.

    A share of the conversations is held out for validation, drawn by data.seed. The order of training rows is another
    in every epoch, and what is in a row stays together.

    Raises:
      UserError: the source can't be read, or has too little that can be trained on.
    """
    text = open_conversation_file(cfg, tokenizer, chat)
    pairs = cfg.source == "preferences"
    kept, sizes, long = (_pairs_that_fit if pairs else _that_fit)(text, cfg)
    left_out = dict(text.left_out)
    for kind, index in long:
        known = kind in left_out
        conversations.count_fault(left_out, Fault(kind), "" if known else text.where(index))
    lines = conversations.fault_lines(left_out)
    if len(kept) < 2:
        why = nothing_left(cfg, lines) if not len(kept) else (
            f"{named(cfg)} has one {'pair' if pairs else 'conversation'}, and two are needed, one to train on and one "
            f"to validate on{': left out ' if lines else ''}{'; '.join(lines)}"
        )  # fmt: skip
        raise UserError(why)
    order = np.random.default_rng(cfg.seed).permutation(len(kept))
    held_out = min(len(kept) - 1, max(1, round(len(kept) * cfg.validation_fraction)))
    mine = order[held_out:] if split == "train" else order[:held_out]
    mine, T = kept[mine if cfg.shuffle else np.sort(mine)], cfg.seq_len
    if pairs:
        packed = [np.array([2 * pair, 2 * pair + 1]) for pair in mine]
    else:
        packed = [np.sort(mine[row]) for row in best_fit(sizes[mine], T)]
        if not cfg.shuffle:
            packed.sort(key=lambda row: row[0])
    rows: Any = PackedRows(text, packed, sizes, T)
    if split == "train":
        rows = grain.MapDataset.source(rows)
        rows = (rows.shuffle(cfg.seed) if cfg.shuffle else rows).repeat(cfg.epochs)
    settings = (T, cfg.seed, cfg.shuffle, cfg.validation_fraction, cfg.too_long, split)
    digest = fingerprint(cfg.source, text.digest, *settings)
    return ChatRows(rows, digest, lines, text.turn_ends, len(mine))


Fitting = tuple[np.ndarray, np.ndarray, list[tuple[str, int]]]


def _that_fit(text: ConversationFile, cfg: DataConfig) -> Fitting:
    """Returns which conversations fit a row, the inputs of every sequence, and what doesn't fit with its fault."""
    sizes, lost = np.diff(text.ends, prepend=0) - 1, []
    for index in map(int, np.flatnonzero(sizes > cfg.seq_len)):
        learned = np.flatnonzero(text.sequence(index)[1][: cfg.seq_len + 1])
        sizes[index] = learned[-1] if cfg.too_long == "cut" and len(learned) else 0
        if not sizes[index]:
            lost.append((LONG if cfg.too_long == "drop" else CUT_OFF, index))
    return np.flatnonzero(sizes), sizes, lost


def _pairs_that_fit(text: ConversationFile, cfg: DataConfig) -> Fitting:
    """Returns the same of pairs; the inputs are still those of every sequence."""
    sizes = np.diff(text.ends, prepend=0) - 1
    fits = sizes.reshape(-1, 2).sum(axis=1) <= cfg.seq_len
    return np.flatnonzero(fits), sizes, [(LONG, int(pair)) for pair in np.flatnonzero(~fits)]


def best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Puts pieces into rows: the longest first, each where it leaves the least room.

    Args:
      lengths: integer [n], each from 1 to `capacity`.
      capacity: of a row.

    Returns:
      The pieces of each row, as indices in `lengths`.

    Source: best-fit decreasing (Johnson 1973); for language models Ding et al. 2024, https://arxiv.org/abs/2404.10830.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room left -> rows
    rooms = 0  # bit r is set where there is a row with room r
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        larger = rooms >> length
        if larger:
            room = length + (larger & -larger).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(int(index))
        if left := room - length:
            by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return [np.array(row) for row in rows]


class PackedRows:
    """Item i is a row: int32 tokens, targets, positions and segment_ids [T], and float32 loss_mask [T]."""

    def __init__(
        self, text: ConversationFile, rows: list[np.ndarray], sizes: np.ndarray, seq_len: int
    ) -> None:
        """Takes the sequences of each row, in order, and the inputs of every sequence of the file."""
        self._text, self._rows, self._sizes, self._seq_len = text, rows, sizes, seq_len

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        row, at = empty_rows(1, self._seq_len), 0
        row = {name: array[0] for name, array in row.items()}
        for segment, sequence in enumerate(map(int, self._rows[index]), 1):
            ids, learned = self._text.sequence(sequence)
            size = int(self._sizes[sequence])
            part = slice(at, at + size)
            row["tokens"][part], row["targets"][part] = ids[:size], ids[1 : size + 1]
            row["positions"][part], row["segment_ids"][part] = np.arange(size), segment
            row["loss_mask"][part] = learned[1 : size + 1]
            at += size
        return row


def empty_rows(count: int, seq_len: int) -> Batch:
    """Returns rows of padding, [count, T]."""
    names = ("tokens", "targets", "positions", "segment_ids")
    found: Batch = {name: np.zeros((count, seq_len), np.int32) for name in names}
    return found | {"loss_mask": np.zeros((count, seq_len), np.float32)}
