"""What training sees of conversations: rows of tokens, which of them are learned, and what was left out.

Chapters: 26.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from minitext.config.data import DataConfig
from minitext.data import conversations
from minitext.data.chat import Chat
from minitext.data.conversation_rows import open_chat_rows
from minitext.data.placement import Batch
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError


class Segment(NamedTuple):
    """A conversation in a row.

    Attributes:
      ids: its tokens.
      texts: of each; of several that make one character, the last has it.
      learned: which of them the model is to predict.
    """

    ids: list[int]
    texts: list[str]
    learned: list[bool]


class Preview(NamedTuple):
    """Some rows of the training data.

    Attributes:
      rows: each a list of segments.
      total: rows in an epoch.
      used: conversations or pairs in them.
      seq_len: T.
      pairs: whether each row is a pair.
      left_out: a line on each kind of conversation that isn't in any row.
    """

    rows: list[list[Segment]]
    total: int
    used: int
    seq_len: int
    pairs: bool
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the rows and counts as JSON-able values."""
        rows = [[segment._asdict() for segment in row] for row in self.rows]
        return {**self._asdict(), "rows": rows, "left_out": list(self.left_out)}


def with_kind(cfg: DataConfig) -> DataConfig:
    """Returns the settings with the source that the first record asks for: conversations or preferences.

    Raises:
      UserError: the data can't be read or is empty.
    """
    for record, _ in conversations.records(cfg):
        pairs = conversations.holds_pairs(record)
        return cfg.model_copy(update={"source": "preferences" if pairs else "conversations"})
    raise UserError(f"{cfg.hf_name or cfg.path} has no records")


def preview(cfg: DataConfig, tokenizer: Tokenizer, chat: Chat, rows: int) -> Preview:
    """Returns the first rows of the first epoch.

    Args:
      cfg: the data section, with source conversations or preferences.
      tokenizer: the model's.
      chat: how conversations are rendered.
      rows: how many.

    Raises:
      UserError: the data can't be read, or nothing of it is left.
    """
    found = open_chat_rows(cfg.model_copy(update={"epochs": 1}), tokenizer, chat, "train")
    shown = [_segments(found.rows[i], tokenizer) for i in range(min(rows, len(found.rows)))]
    return Preview(
        shown, len(found.rows), found.used, cfg.seq_len, cfg.source == "preferences", found.left_out
    )


def _segments(row: Batch, tokenizer: Tokenizer) -> list[Segment]:
    found = []
    for segment in range(1, int(row["segment_ids"].max()) + 1):
        at = np.flatnonzero(row["segment_ids"] == segment)
        ids = [int(row["tokens"][at[0]]), *row["targets"][at].tolist()]
        learned = [False, *(row["loss_mask"][at] != 0).tolist()]
        found.append(Segment(ids, spell(tokenizer, ids), learned))
    return found


def spell(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token, special ones as they are spelled.

    A token may mean part of a character, or need the one before it to know its spaces: so they are decoded a few at a
    time, and each gets what it adds. Of several tokens that make one character, the last gets it.
    """
    special = {i: text for text, i in tokenizer.spellings.items()}
    texts: list[str] = []
    before: list[int] = []
    for i in ids:
        if i in special:
            texts.append(special[i])
            before = []
            continue
        said = tokenizer.decode(before).rstrip("\ufffd")
        whole = tokenizer.decode([*before, i])
        incomplete = whole.endswith("\ufffd") and len(before) < 16
        texts.append("" if incomplete else whole[len(said) :])
        before = [*before, i] if incomplete or not before else [*before[-4:], i]
    return texts


def shown(found: Preview) -> list[Text]:
    """Returns a preview for a terminal: learned tokens are green, and in double brackets where there is no colour."""
    made = []
    for number, row in enumerate(found.rows, 1):
        size = sum(len(segment.ids) - 1 for segment in row)
        made.append(
            Text(
                f"row {number} of {found.total:,}: {size:,} of {found.seq_len:,} positions", "bold"
            )
        )
        for index, segment in enumerate(row, 1):
            count = f"{len(segment.ids):,} tokens, {sum(segment.learned):,} learned"
            made.append(Text(f"segment {index}: {count}", "cyan"))
            made.append(_colored(segment))
    made += [Text(f"left out: {line}", "yellow") for line in found.left_out]
    return made


def _colored(segment: Segment) -> Text:
    text, inside = Text(), False
    for number, (token, learned) in enumerate(zip(segment.texts, segment.learned, strict=True)):
        if learned != inside:
            text.append("⟦" if learned else "⟧", "dim")
            inside = learned
        style = ("green", "bold green") if learned else ("", "dim")
        # The escapes of a terminal are shown, not obeyed.
        plain = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in token)
        text.append(plain, style[number % 2])
    return text.append("⟧", "dim") if inside else text
