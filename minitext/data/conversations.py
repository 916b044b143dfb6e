"""Conversations, and pairs of a chosen and a rejected answer, read from the schemas that people publish them in.

| keys of a record | what it is |
|---|---|
| `messages`: a list of `role` and `content` | a conversation; every turn of the assistant is learned |
| `conversations`: a list of `from` and `value` (ShareGPT), or the above | the same |
| `prompt` and `completion`: two texts, or two lists of messages | a conversation; only the completion is learned |
| `prompt`, `chosen` and `rejected`: texts, or lists of messages | a pair |
| `chosen` and `rejected`: whole conversations, as lists or as hh-rlhf's texts with `Human:` and `Assistant:` | a pair |

What is wrong with a whole file is refused with its line: broken JSON, or a record of no known schema. What is wrong
with one conversation is counted, reported with the first example, and never trained on: see `Fault`.

A `system` text beside them goes before the first message. `tools` of a record, and `tool_calls` or a `weight` other
than 1 of a message, would change what is to be learned, so these records are counted as faults, and so are completions
with `label: false`. Other keys of a record or of a message are not looked at.

Chapters: 26.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from minitext.config.data import DataConfig
from minitext.data import sources, text_files
from minitext.errors import UserError
from minitext.files import shorten

Messages = tuple[dict[str, str], ...]

ROLES = {
    "system": "system", "user": "user", "assistant": "assistant",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
}  # fmt: skip
SPEAKER = re.compile(r"\n\n(Human|Assistant):[ ]?")  # Bai et al. 2022, hh-rlhf

# Kinds of faults, as the report names them.
ORDER = "roles in the wrong order"
NOT_TEXT = "something other than text as content"
NO_TURN = "no turn of the assistant's"
EMPTY = "an empty answer"
ALIKE = "equal answers, chosen and rejected"
APART = "chosen and rejected conversations that have no question in common"
TOOLS = "tools or tool calls, which are not rendered"
WEIGHED = "a weight on a turn, which is not applied"
BAD = "a completion labelled as one to avoid"


class Fault(NamedTuple):
    """Why a conversation isn't trained on.

    Attributes:
      kind: what the report counts, such as `an empty answer`.
      detail: more about this one, or "".
    """

    kind: str
    detail: str = ""


class Unusable(Exception):
    """Raised for one conversation, whose `fault` is then counted."""

    def __init__(self, kind: str, detail: str = "") -> None:
        """Takes what `Fault` does."""
        super().__init__(kind, detail)
        self.fault = Fault(kind, detail)


class Conversation(NamedTuple):
    """Messages in order: perhaps the system's, then the user's and the assistant's in turn.

    Attributes:
      messages: each with `role` (system, user or assistant) and `content`, a text; the last is the assistant's.
      first: index of the first message that may be learned: turns of the assistant's before it are context.
    """

    messages: Messages
    first: int = 0

    @property
    def learned(self) -> list[int]:
        """Indices of the messages that are learned."""
        turns = range(self.first, len(self.messages))
        return [i for i in turns if self.messages[i]["role"] == "assistant"]


Pair = tuple[Conversation, Conversation]  # chosen and rejected, which are alike up to `first`


def read(cfg: DataConfig) -> Iterator[tuple[Conversation | Pair | Fault, str]]:
    """Yields what each record of `data.source` conversations or preferences holds, and where it is.

    Raises:
      UserError: a file or dataset can't be read, or a record has no known schema; the message says where.
    """
    parse = pair_of if cfg.source == "preferences" else conversation_of
    for record, where in records(cfg):
        try:
            yield parse(record, where), where
        except Unusable as error:
            yield error.fault, where


def records(cfg: DataConfig) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the records of the files or of the dataset of a source, as they are, and where each is."""
    if cfg.hf_name:
        for number, record in enumerate(sources.open_hf(cfg)):
            yield record, f"{cfg.hf_name} {cfg.hf_split}, record {number}"
        return
    for path in text_files.find_files(cfg):
        yield from text_files.read_records(path)


def holds_pairs(record: dict[str, Any]) -> bool:
    """Whether a record is a pair of answers rather than one conversation."""
    return "chosen" in record and "rejected" in record


def conversation_of(record: dict[str, Any], where: str) -> Conversation:
    """Returns the conversation in a record.

    Raises:
      Unusable: if it has a fault.
      UserError: if the record has no known schema.
    """
    _check_tools(record)
    turns = record.get("messages")
    if turns is None:
        turns = record.get("conversations")
    if turns is not None:
        return checked(Conversation(_with_system(record, messages_of(turns))))
    if "prompt" in record and "completion" in record:
        if record.get("label") is False:
            raise Unusable(BAD)
        prompt = _with_system(record, _as_messages(record["prompt"], "user"))
        return checked(
            Conversation(prompt + _as_messages(record["completion"], "assistant"), len(prompt))
        )
    if holds_pairs(record):
        raise UserError(
            f"{where} has a chosen and a rejected answer: set data.source=preferences, as minitext dpo does"
        )
    raise UserError(
        f"{where}: {_keys(record)}: a conversation has messages or conversations, or prompt and completion"
    )


def pair_of(record: dict[str, Any], where: str) -> Pair:
    """Returns the pair in a record.

    Raises:
      Unusable: if it has a fault.
      UserError: if the record has no known schema.
    """
    if not holds_pairs(record):
        raise UserError(
            f"{where}: {_keys(record)}: a pair has chosen and rejected, and perhaps prompt"
        )
    _check_tools(record)
    chosen, rejected = (_with_system(record, _whole(record, key)) for key in ("chosen", "rejected"))
    if _stripped(chosen) == _stripped(rejected):
        raise Unusable(ALIKE)
    common = 0
    for ours, theirs in zip(chosen, rejected, strict=False):
        if ours != theirs:
            break
        common += 1
    pair = checked(Conversation(chosen, common)), checked(Conversation(rejected, common))
    if not common or chosen[common - 1]["role"] != "user":
        raise Unusable(APART)
    return pair


def _stripped(messages: Messages) -> list[str]:
    return [message["content"].strip() for message in messages]


def _whole(record: dict[str, Any], key: str) -> Messages:
    """Returns the conversation that ends in one of a pair's answers."""
    answer, prompt = record[key], record.get("prompt")
    if isinstance(answer, str):
        if prompt is not None:
            return _as_messages(prompt, "user") + _as_messages(answer, "assistant")
        before, *pieces = SPEAKER.split("\n\n" + _text(answer).lstrip())
        if not pieces:
            raise Unusable(NO_TURN, f"{key} is a text, without a prompt")
        if before.strip():
            raise Unusable(ORDER, f"{key} has text before the first speaker")
        roles = {"Human": "user", "Assistant": "assistant"}
        turns = zip(pieces[::2], pieces[1::2], strict=True)
        return tuple({"role": roles[who], "content": text} for who, text in turns)
    turns = messages_of(answer)
    if prompt is None or (
        turns and turns[0]["role"] != "assistant"
    ):  # whole although there is a prompt
        return turns
    return _as_messages(prompt, "user") + turns


def _check_tools(record: dict[str, Any]) -> None:
    if record.get("tools") not in (None, "", [], "[]"):
        raise Unusable(TOOLS, "tools")


def _with_system(record: dict[str, Any], messages: Messages) -> Messages:
    """Returns messages with the record's `system` text before them, unless they begin with one of their own."""
    system = record.get("system")
    if system in (None, "") or (messages and messages[0]["role"] == "system"):
        return messages
    return ({"role": "system", "content": _text(system)}, *messages)


def _as_messages(value: Any, role: str) -> Messages:
    """Returns a text as a message of `role`, or a list of messages as it is."""
    return (
        ({"role": role, "content": _text(value)},) if isinstance(value, str) else messages_of(value)
    )


def messages_of(turns: Any) -> Messages:
    """Returns a list of messages, with the field's names for roles.

    Raises:
      Unusable: if it's no list of messages, a role is unknown, a content is no text, or a message calls a tool or has a
        weight.
    """
    if not isinstance(turns, list) or not turns:
        raise Unusable(NO_TURN, "" if isinstance(turns, list) else "it has no list of messages")
    found = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Unusable(NOT_TEXT, "a message is not an object")
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str) or role not in ROLES:
            raise Unusable(ORDER, f"unknown role {shorten(str(role))}")
        if calls := [key for key in ("tool_calls", "function_call") if turn.get(key)]:
            raise Unusable(TOOLS, calls[0])
        if turn.get("weight") not in (None, 1):
            raise Unusable(WEIGHED, f"weight {shorten(str(turn['weight']))}")
        found.append(
            {"role": ROLES[role], "content": _text(turn.get("content", turn.get("value")))}
        )
    return tuple(found)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unusable(NOT_TEXT, "none" if value is None else type(value).__name__)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unusable(NOT_TEXT, "half a character") from None
    return value


def checked(conversation: Conversation) -> Conversation:
    """Returns a conversation that can be learned, without what the user says last, which nobody answers.

    Raises:
      Unusable: if the roles are in the wrong order, an answer is empty, or nothing is learned.
    """
    messages = conversation.messages
    check_order(messages)
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and not _shows(message["content"]):
            raise Unusable(EMPTY, f"message {number + 1}")
    if messages and messages[-1]["role"] == "user":
        messages = messages[:-1]
    found = conversation._replace(messages=messages)
    if not found.learned:
        raise Unusable(NO_TURN)
    return found


def check_order(messages: Messages) -> None:
    """Raises Unusable unless the user and the assistant speak in turn, perhaps after the system."""
    expected = "user"
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "system" and number == 0:
            continue
        if role != expected:
            said = f"{role} where {expected} should be, message {number + 1}"
            raise Unusable(ORDER, said if number or role == "system" else f"{role} first")
        expected = "assistant" if role == "user" else "user"


def _shows(text: str) -> bool:
    """Whether a text has more than white space, control characters and marks of no width."""
    return any(
        not character.isspace() and unicodedata.category(character) not in ("Cc", "Cf")
        for character in text
    )


def sample(cfg: DataConfig, size: float = sources.SAMPLE_BYTES) -> Iterator[str]:
    """Yields about 16 MiB of what is said, for a BPE tokenizer to learn from."""
    for found, _ in read(cfg):
        for message in said(found):
            if size <= 0:
                return
            yield message["content"]
            size -= len(message["content"])


def _keys(record: dict[str, Any]) -> str:
    return f"the record has {shorten(', '.join(map(str, record))) if record else 'no keys'}"


def fault_lines(counts: dict[str, tuple[int, str, str]]) -> tuple[str, ...]:
    """Returns a line on each kind of fault: kind -> (how many, where the first is, its detail)."""
    return tuple(
        f"{count:,} with {kind}, such as {where}{f' ({detail})' if detail else ''}"
        for kind, (count, where, detail) in counts.items()
    )


def count_fault(counts: dict[str, tuple[int, str, str]], fault: Fault, where: str) -> None:
    """Adds a fault to the counts."""
    many, first, detail = counts.get(fault.kind, (0, where, fault.detail))
    counts[fault.kind] = many + 1, first, detail


def in_lists(
    items: Iterable[tuple[Conversation | Pair | Fault, str]], most: int, characters: int
) -> Iterator[list[tuple[Conversation | Pair | Fault, str]]]:
    """Yields what `read` does in lists: a new one after `most` of them, or once they have so many characters."""
    found, size = [], 0
    for item in items:
        found.append(item)
        size += sum(len(message["content"]) for message in said(item[0]))
        if len(found) == most or size >= characters:
            yield found
            found, size = [], 0
    if found:
        yield found


def each(found: Conversation | Pair | Fault) -> tuple[Conversation, ...]:
    """Returns the conversations in what was read: one, the two of a pair, or none."""
    if isinstance(found, Fault):
        return ()
    return (found,) if isinstance(found, Conversation) else found


def said(found: Conversation | Pair | Fault) -> Iterator[dict[str, str]]:
    """Yields the messages in what was read."""
    for conversation in each(found):
        yield from conversation.messages
