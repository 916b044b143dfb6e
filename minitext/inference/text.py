"""Text as it comes: from token ids to characters while a model writes, and strings that end the text.

A character may take several tokens, and a token may change how its neighbours are written, so text is not a sum of
tokens' texts. Decoding all tokens again for each new one is right, and quadratic. Here only the newest are decoded.

Chapters: 24.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from minitext.data.tokenizer import Tokenizer

HALF = "\ufffd"  # how half a character is decoded
CONTEXT = 8  # tokens of the prompt that are decoded with the first ones of the answer
LONGEST_CHARACTER = 4  # bytes, and so tokens, of one character


class Detokenizer:
    """Turns a growing list of token ids into text, piece by piece: the pieces joined are `tokenizer.decode(ids)`.

    Each token is decoded with the few before it and those that still wait for the rest of a character, so that a text
    of any length takes time in proportion. Half a character is never given out.

    Args:
      tokenizer: the model's.
      before: the prompt, if the text goes on from it. SentencePiece's tokenizers drop a space at the beginning of a
        text; with its prompt before it, it isn't the beginning.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._context: list[int] = []  # given out already; decoded with what follows
        self._held: list[int] = []
        self._in_run = False  # of tokens that are bytes, see `Tokenizer.byte_ids`
        context = [i for i in before[-CONTEXT:] if not self._is_nothing(i)]
        if context and not tokenizer.decode(context).endswith(HALF):
            self._context = context

    def push(self, token: int) -> str:
        """Returns the text that is certain now that `token` follows, often "" or a word."""
        if self._is_nothing(token):
            return ""
        self._held.append(token)
        self._in_run = token in self._tokenizer.byte_ids
        if self._in_run:
            return ""
        text = self._decode(self._held)
        if not text.endswith(HALF):
            return self._give(len(self._held), text)
        # A character is at most 4 bytes, so with 4 tokens after it a place between two characters is certain. Among
        # the places with 4 to 7 tokens after them there is one, unless the model writes U+FFFD in words of its own.
        most = len(self._held) - LONGEST_CHARACTER
        for place in range(most, max(most - LONGEST_CHARACTER, 0), -1):
            given = self._decode(self._held[:place])
            if given + self._tokenizer.decode(self._held[place:]) == text:
                return self._give(place, given)
        return ""

    def finish(self) -> str:
        """Returns the rest of the text; half a character at its end becomes U+FFFD."""
        return self._give(len(self._held), self._decode(self._held))

    def _is_nothing(self, token: int) -> bool:
        """Returns whether a token is left out of any text, as the end of a document is.

        Twice, because a space alone, at the beginning, is left out too.
        """
        return self._tokenizer.decode((token, token)) == ""

    def _decode(self, ids: list[int]) -> str:
        """Returns the text of held tokens, as they are written after the context."""
        before = len(self._tokenizer.decode(self._context)) if self._context else 0
        return self._tokenizer.decode([*self._context, *ids])[before:]

    def _give(self, count: int, text: str) -> str:
        self._context, self._held = self._held[:count], self._held[count:]
        return text


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns how a token is written where it isn't at the beginning; U+FFFD for part of a character."""
    return tokenizer.decode((token, token))[len(tokenizer.decode((token,))) :]


class StopStrings:
    """Ends a text at the first of some strings, which is not part of it.

    Characters that may be the beginning of such a string are held back until it's known whether they are.

    Args:
      strings: any number, none of them empty. The one that is complete first counts; of those that are complete with
        the same character, the longest.
    """

    def __init__(self, strings: Sequence[str] = ()):
        self._strings, self._held = tuple(strings), ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the text's next characters; returns those that are certain now, and whether the text ends there."""
        self._held += text
        found = [(at + len(s), at) for s in self._strings if (at := self._held.find(s)) >= 0]
        if found:
            certain, self._held = self._held[: min(found)[1]], ""
            return certain, True
        keep = max((self._open(s) for s in self._strings), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain, False

    def finish(self) -> str:
        """Returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _open(self, string: str) -> int:
        """Returns how many characters of a string the text ends with."""
        most = min(len(string) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(string[:n])), 0)


class TokenText(NamedTuple):
    """A token and where it is in the text.

    Attributes:
      token: its id.
      offset: the character of the text that it begins with, or is part of.
      logprob: its log-probability, in nats, if asked for.
      top: (id, log-probability) of the most likely tokens.
    """

    token: int
    offset: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class TextStream:
    """One text of an answer: token ids in, text out, up to a stop string.

    Args:
      tokenizer: the model's.
      before: the prompt, if the text goes on from it.
      stop: strings that end the text.

    Attributes:
      length: characters given out so far.
      stopped: whether a stop string has ended the text; what is pushed afterwards is ignored.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._detokenizer, self._stop = Detokenizer(tokenizer, before), StopStrings(stop)
        self._tokens: deque[TokenText] = deque()  # whose text isn't given out yet
        self._decoded = 0  # characters that left the detokenizer
        self.length, self.stopped = 0, False

    def push(
        self, token: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()
    ) -> tuple[str, list[TokenText]]:
        """Takes the next token; returns the text that is certain now, and the tokens that it's made of."""
        if self.stopped:
            return "", []
        text, offset = self._detokenizer.push(token), self._decoded
        if text and logprob is not None:  # bytes that are no text may come with it, before its own
            offset += max(len(text) - len(token_text(self._tokenizer, token)), 0)
        self._tokens.append(TokenText(token, offset, logprob, top))
        return self._give(text)

    def finish(self) -> tuple[str, list[TokenText]]:
        """Returns the rest of the text and its tokens."""
        if self.stopped:
            return "", []
        text, tokens = self._give(self._detokenizer.finish())
        if self.stopped:
            return text, tokens
        rest = self._stop.finish()
        self.length += len(rest)
        return text + rest, [*tokens, *self._tokens]

    def _give(self, text: str) -> tuple[str, list[TokenText]]:
        self._decoded += len(text)
        certain, self.stopped = self._stop.push(text)
        self.length += len(certain)
        tokens = []
        while self._tokens and self._tokens[0].offset < self.length:
            tokens.append(self._tokens.popleft())
        return certain, tokens
