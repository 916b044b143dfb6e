"""Prompts to answer, and what a reward wants to know about them.

A record has `prompt`, what a user says or a list of messages, and whatever else the reward reads, such as `answer`. It
comes from the same files and datasets as conversations (`minitext.data.conversations`), and the chat template makes a
text of its prompt.

Chapters: 26.
"""

import contextlib
import functools
import json
import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitext.config.config import Config
from minitext.config.data import DataConfig
from minitext.data.chat import Chat, Renderer
from minitext.data.chat_mask import check_spelling, spelled_specials
from minitext.data.conversation_file import AT_ONCE, named
from minitext.data.conversations import ORDER, Unusable, check_order, messages_of, records
from minitext.data.placement import Split
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.files import fingerprint, shorten
from minitext.post_training.policy_objective import rollout_config

log = logging.getLogger("minitext.post_training")

Record = dict[str, Any]
MOST = 1_000_000  # records, which are kept in memory


@dataclass(frozen=True)
class Prompts:
    """The prompts of one part of the data.

    Attributes:
      records: with `prompt`, and what else the data have.
      tokens: of each prompt.
      seed: of the order, which differs each time that all have been answered.
      digest: identifies them.
    """

    records: list[Record]
    tokens: list[tuple[int, ...]]
    seed: int
    digest: str

    def __len__(self) -> int:
        return len(self.records)

    def at(self, place: int) -> int:
        """Returns which prompt comes at a place, 0, 1, ..., in the order of all passes."""
        epoch, number = divmod(place, len(self.records))
        return int(_order(self.seed, epoch, len(self.records))[number])


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def open_prompts(cfg: Config, tokenizer: Tokenizer, chat: Chat, split: Split) -> Prompts:
    """Reads the prompts of one part of the data; the others are the other part's.

    Args:
      cfg: `data` names them, and `objective.max_tokens` is the room that they must leave in a row.
      tokenizer: the model's.
      chat: renders messages.
      split: which part.

    Raises:
      UserError: if the data can't be read, a record has no prompt or one that can't be answered, or no prompt leaves
        room for an answer.
    """
    found = _read(cfg.data, spelled_specials(tokenizer))
    if len(found) < 2:
        raise UserError(
            f"{named(cfg.data)} has {len(found)} prompts: give two or more, since some are held out"
        )
    mixed = np.random.default_rng(cfg.data.seed).permutation(len(found))
    held_out = min(len(found) - 1, max(1, round(len(found) * cfg.data.validation_fraction)))
    part = mixed[:held_out] if split == "validation" else mixed[held_out:]
    chosen = [found[i] for i in sorted(part)]
    tokens = _tokens([messages for _, messages in chosen], tokenizer, chat)
    most = cfg.data.seq_len + 1 - rollout_config(cfg).max_tokens
    kept = [i for i, one in enumerate(tokens) if 0 < len(one) <= most]
    if not kept:
        raise UserError(
            f"{named(cfg.data)}: none of {len(chosen)} prompts for {split} has at most {most} tokens, which "
            f"data.seq_len={cfg.data.seq_len} leaves beside an answer: raise data.seq_len or lower objective.max_tokens"
        )
    if left := len(chosen) - len(kept):
        log.warning("%d of %d prompts for %s leave no room for an answer", left, len(chosen), split)
    kept_records = [chosen[i][0] for i in kept]
    digest = fingerprint(kept_records, cfg.data.seed)
    return Prompts(kept_records, [tokens[i] for i in kept], cfg.data.seed, digest)


def _read(cfg: DataConfig, spelled: re.Pattern[str]) -> list[tuple[Record, Any]]:
    """Returns the records with their messages."""
    found = []
    for record, where in records(cfg):
        if "prompt" not in record:
            keys = shorten(", ".join(map(str, record))) if record else "no keys"
            raise UserError(f"{where}: the record has {keys}, and needs prompt")
        prompt = record["prompt"]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            messages = messages_of(turns)
            check_order(messages)
            if messages[-1]["role"] != "user":
                raise Unusable(
                    ORDER, f"{messages[-1]['role']} last, which leaves nothing to answer"
                )
            check_spelling(messages, spelled)
            _check_values(record, where)
            found.append((record, messages))
        except Unusable as error:
            kind, detail = error.fault
            more = f" ({detail})" if detail else ""
            raise UserError(f"{where}: its prompt has {kind}{more}: correct it") from None
        if len(found) > MOST:
            raise UserError(f"{named(cfg)} has more than {MOST:,} prompts: divide it")
    return found


def _check_values(record: Record, where: str) -> None:
    """Raises UserError for what can't be given to the processes that compute rewards, such as a column of dates."""
    for key, value in record.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{where}: {shorten(key)} cannot be given to a reward ({error}): leave this key out, or make it a text"
            ) from None


def _tokens(conversations: list[Any], tokenizer: Tokenizer, chat: Chat) -> list[tuple[int, ...]]:
    texts: list[dict[str, Any]] = []
    with contextlib.closing(Renderer()) as renderer:
        for start in range(0, len(conversations), AT_ONCE):
            some = conversations[start : start + AT_ONCE]
            values = [chat.values(messages) for messages in some]
            texts += renderer.render_all(chat.template or "", values, marks=False)
    if wrong := next((one for one in texts if "text" not in one), None):
        raise UserError(
            f"the chat template of {chat.where.parent} cannot be rendered: {shorten(' '.join(wrong['error'].split()))}"
        )
    # The template writes the token at the beginning itself.
    encoded = tokenizer.encode_batch([one["text"] for one in texts])
    return [tuple(ids.tolist()) for ids in encoded]
