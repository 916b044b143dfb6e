"""Prompts to answer, from lines of JSON.

A record has `prompt`, a text or a list of messages, and whatever the reward wants to know, such as `answer`.

Chapters: 26.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minitext import files
from minitext.config.config import Config
from minitext.data.placement import Split
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.inference.chat import Chat, Renderer

log = logging.getLogger("minitext.post_training")

LIMIT = 1 << 30  # bytes of a file


@dataclass(frozen=True)
class Prompts:
    """The prompts of one part of the data.

    Attributes:
      records: with `prompt`, and what else the file has.
      tokens: of each prompt.
      seed: of the order, which differs each time that all have been answered.
      digest: identifies them.
      too_long: how many were left out.
    """

    records: list[dict[str, Any]]
    tokens: list[tuple[int, ...]]
    seed: int
    digest: str
    too_long: int

    def __len__(self) -> int:
        return len(self.records)

    def at(self, place: int) -> int:
        """Returns which prompt comes at a place, 0, 1, ..., in the order of all passes."""
        epoch, number = divmod(place, len(self.records))
        return int(self._order(epoch)[number])

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.records))


def open_prompts(cfg: Config, tokenizer: Tokenizer, split: Split, chat: Chat) -> Prompts:
    """Reads the prompts of one part of the data; the others are the other part's.

    Args:
      cfg: `data.path` names the file.
      tokenizer: the model's.
      split: which part.
      chat: renders messages.

    Raises:
      UserError: if the file can't be read, a line of it isn't a record, or no prompt leaves room for an answer.
    """
    if cfg.data.source != "files" or cfg.data.path is None:
        raise UserError(
            f"data.source={cfg.data.source}: objective.kind={cfg.objective.kind} needs prompts: set data.source=files "
            "and data.path to lines of JSON with a field prompt"
        )
    path = Path(cfg.data.path)
    if path.is_file() and path.stat().st_size > LIMIT:
        raise UserError(f"data.path={path} has more than {LIMIT >> 30} GiB: divide it")
    records = list(_read(path))
    if not records:
        raise UserError(f"data.path={path} is empty: write a line of JSON for each prompt")
    mixed = np.random.default_rng(cfg.data.seed).permutation(len(records))
    held_out = min(len(records) - 1, max(1, round(len(records) * cfg.data.validation_fraction)))
    part = mixed[:held_out] if split == "validation" else mixed[held_out:]
    records = [records[i] for i in sorted(part)]
    with contextlib.closing(Renderer()) as renderer:
        tokens = [_tokens(record, tokenizer, chat, renderer) for record in records]
    most = cfg.data.seq_len + 1 - cfg.objective.max_tokens  # pyright: ignore[reportAttributeAccessIssue]
    kept = [i for i, one in enumerate(tokens) if 0 < len(one) <= most]
    if not kept:
        raise UserError(
            f"data.path={path}: none of {len(records)} prompts has at most {most} tokens, which data.seq_len="
            f"{cfg.data.seq_len} leaves beside an answer: raise data.seq_len or lower objective.max_tokens"
        )
    if left := len(records) - len(kept):
        log.warning("%d of %d prompts are too long or empty and are left out", left, len(records))
    records, tokens = [records[i] for i in kept], [tokens[i] for i in kept]
    digest = files.fingerprint(json.dumps(records, sort_keys=True), cfg.data.seed)
    return Prompts(records, tokens, cfg.data.seed, digest, left)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if not isinstance(record, dict) or not isinstance(record.get("prompt"), str | list):
                    raise UserError(
                        f"{path}, line {number}: {files.shorten(line)} is not an object with a field prompt, a text or "
                        "a list of messages"
                    )
                yield record
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"data.path={path} cannot be read ({reason})") from None


def _tokens(
    record: Mapping[str, Any], tokenizer: Tokenizer, chat: Chat, renderer: Renderer
) -> tuple[int, ...]:
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    # The template writes the token at the beginning itself.
    return tuple(tokenizer.encode_batch([chat.render(prompt, renderer)])[0].tolist())
