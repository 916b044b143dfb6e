"""Conversations as tokens, and which of the tokens the assistant says.

A chat template makes one text of a conversation, and the tokens are those of the whole text. What the assistant says is
a range of its characters: what the template marks with `{% generation %}`, if it does so, once it is clear that no
other message is in the mark. Else the template is asked what it writes before an answer, with the words that invite one
(`add_generation_prompt`), and what with the answer. Both must be beginnings of the whole text, so what is between them
is what the model would have had to write itself. Of that, the first special token after the words ends the turn and is
the last one that counts, as generation stops there. A token counts if any of its characters does.

A template that has no special token after an answer can't teach a model to stop, and is refused.

Chapters: 26.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minitext.data.chat import Chat, Renderer
from minitext.data.conversations import NO_TURN, Conversation, Fault, Messages, Unusable
from minitext.data.tokenizer import Spelled, Tokenizer
from minitext.errors import UserError
from minitext.files import shorten

REFUSED = "messages that the chat template refuses"
DROPPED = "an answer that the chat template leaves out or changes"
REWRITTEN = "a turn that the chat template writes in another way once others follow, or where none is expected"
MISMARKED = "other generation marks in the chat template than turns of the assistant"
SPELLED = "text that spells a special token"

TOGETHER = 32  # conversations that are rendered in one go


class Masked(NamedTuple):
    """A conversation's tokens, up to the last one that is learned.

    Attributes:
      ids: int64 [n].
      learned: bool [n], which of them the assistant says, in turns that are to be learned.
    """

    ids: np.ndarray
    learned: np.ndarray


def spelled_specials(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Returns a pattern of what spells a special token, the longest first."""
    spellings = sorted(tokenizer.spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, spellings)) or r"(?!)")


def check_spelling(messages: Messages, spelled: re.Pattern[str]) -> None:
    """Raises Unusable if a message spells a special token, which only a template may write."""
    for message in messages:
        if found := spelled.search(message["content"]):
            raise Unusable(SPELLED, shorten(found[0]))


def _check_marks(conversation: Conversation, text: str, spans: Sequence[tuple[int, int]]) -> None:
    """Raises Unusable if a mark around an answer has the words of the message before or after it too.

    Those are in the mark and not outside it; what an answer repeats is in both.
    """
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    for number, (turn, (start, end)) in enumerate(zip(conversation.learned, spans, strict=True)):
        outside = {turn - 1: (edges[2 * number], start), turn + 1: (end, edges[2 * number + 3])}
        for other, (first, last) in outside.items():
            if 0 <= other < len(conversation.messages):
                words = conversation.messages[other]["content"].strip()
                if words not in text[first:last] and words in text[start:end]:
                    raise Unusable(MISMARKED, f"message {other + 1} is in the mark of {turn + 1}")


class ChatEncoder:
    """Makes tokens and masks of conversations, by one template and one tokenizer.

    Attributes:
      turn_ends: ids that have ended an assistant's turn so far.
    """

    def __init__(self, chat: Chat, tokenizer: Tokenizer) -> None:
        """Takes the template, which must not be None, and the tokenizer."""
        assert chat.template is not None, "a plain one, where the model has none"
        self._chat, self._template, self._tokenizer = chat, chat.template, tokenizer
        self._marks = "endgeneration" in chat.template
        self._renderer = Renderer()
        self._special = np.array(sorted({*tokenizer.spellings.values(), *chat.stops}))
        self._spelled = spelled_specials(tokenizer)
        self.turn_ends: set[int] = set()

    def encode(self, conversations: Sequence[Conversation]) -> list[Masked | Fault]:
        """Returns the tokens of each conversation, or why it can't be learned.

        Raises:
          UserError: the template has no special token after an answer.
        """
        found: list[Masked | Fault] = []
        for start in range(0, len(conversations), TOGETHER):
            found += self._encode(conversations[start : start + TOGETHER])
        return found

    def close(self) -> None:
        """Ends the process that renders."""
        self._renderer.close()

    def _encode(self, conversations: Sequence[Conversation]) -> list[Masked | Fault]:
        asked = [values for conversation in conversations for values in self._asked(conversation)]
        answers = iter(self._renderer.render_all(self._template, asked, marks=self._marks))
        found: list[Any] = []
        for conversation in conversations:
            rendered = [next(answers) for _ in self._asked(conversation)]
            try:
                check_spelling(conversation.messages, self._spelled)
                found.append(self._ranges(conversation, rendered))
            except Unusable as error:
                found.append(error.fault)
        texts = [text for text, _ in (one for one in found if not isinstance(one, Fault))]
        spelled = iter(self._tokenizer.encode_spelled(texts))
        for number, one in enumerate(found):
            if not isinstance(one, Fault):
                found[number] = self._masked(conversations[number], next(spelled), *one)
        return found

    def _asked(self, conversation: Conversation) -> Iterator[dict[str, Any]]:
        """Yields the variables of each text that is needed: the whole; without marks, those around each answer."""
        messages = conversation.messages
        yield self._chat.values(messages, ask=False)
        for turn in () if self._marks else conversation.learned:
            yield self._chat.values(messages[:turn])
            yield self._chat.values(messages[: turn + 1], ask=False)

    def _ranges(
        self, conversation: Conversation, rendered: Sequence[dict[str, Any]]
    ) -> tuple[str, list[tuple[int, int, int]]]:
        """Returns the whole text, and for each learned turn where it begins, where its words end, and where it ends."""
        for one in rendered:
            if "error" in one:
                raise Unusable(REFUSED, shorten(" ".join(one["error"].split())))
        text, turns = rendered[0]["text"], conversation.learned
        if self._marks:
            roles = [message["role"] for message in conversation.messages]
            spans = rendered[0]["spans"]
            if len(spans) != roles.count("assistant"):
                raise Unusable(MISMARKED, f"{len(spans)} marks, {roles.count('assistant')} turns")
            spans = spans[len(spans) - len(turns) :]
        else:
            around = [one["text"] for one in rendered[1:]]
            spans = list(zip(around[::2], around[1::2], strict=True))
            for turn, (before, after) in zip(turns, spans, strict=True):
                if not (after.startswith(before) and text.startswith(after)):
                    words = conversation.messages[turn]["content"].strip()
                    raise Unusable(REWRITTEN if words in after else DROPPED, f"message {turn + 1}")
            spans = [(len(before), len(after)) for before, after in spans]
        ranges = []
        for turn, (start, end) in zip(turns, spans, strict=True):
            words = conversation.messages[turn]["content"].strip()
            at = text.find(words, start, end)
            if at < 0:
                raise Unusable(DROPPED, f"message {turn + 1}")
            ranges.append((start, at + len(words), end))
        if self._marks:
            _check_marks(conversation, text, spans)
        return text, ranges

    def _masked(
        self,
        conversation: Conversation,
        spelled: Spelled,
        text: str,
        ranges: Iterable[tuple[int, int, int]],
    ) -> Masked | Fault:
        """Returns the tokens and the mask of a text; a range is one of characters."""
        ids, starts, ends = spelled
        learned = np.zeros(len(ids), bool)
        for start, said, end in ranges:
            stops = np.flatnonzero((starts >= said) & (ends <= end) & np.isin(ids, self._special))
            if not len(stops):
                raise UserError(
                    f"the chat template of {self._chat.where.parent} writes {text[said:end]!r:.60} after an answer, "
                    "without a special token that a model could learn to stop with: end answers with "
                    "{{ eos_token }}, in a file that data.chat_template names"
                )
            self.turn_ends.add(int(ids[stops[0]]))
            if not self._marks:
                end = int(ends[stops[0]])
            # Between the first and the last that overlap: white space in the middle may have an empty range.
            first, last = np.argmax(ends > start), np.flatnonzero(starts < end)[-1]
            learned[first : last + 1] = True
        learned[:1] = False  # nothing is before it to predict it from
        if not learned.any():
            return Fault(NO_TURN)
        length = int(np.flatnonzero(learned)[-1]) + 1
        return Masked(ids[:length], learned[:length])
