"""Answers that are held to a JSON schema or a regular expression, by leaving out the tokens that would break it.

The library llguidance keeps a parser for each text and says which tokens may follow. A token is a few bytes that can
cross the borders of a grammar's words, so this is more than a look at the next character; the library needs well under
a millisecond for it.

Chapters: 24.
"""

import json
from collections.abc import Callable, Collection

import numpy as np

from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError

GRAMMAR_LIMIT = 64 << 10  # characters


class Guide:
    """Which tokens may follow in one text.

    Attributes:
      done: whether the answer is complete and nothing may follow.
    """

    def __init__(self, matcher, vocab: int):
        self._matcher, self._vocab, self.done = matcher, vocab, False

    def allowed(self) -> np.ndarray:
        """Returns [V] booleans: the tokens that may follow, those that end the text among them where it may end.

        Raises:
          UserError: if the grammar turns out too complex.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(words, bitorder="little", count=self._vocab).astype(bool)

    def accept(self, token: int) -> None:
        """Takes the token that follows."""
        self._matcher.consume_token(token)
        self._check()
        self.done = self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"the grammar can't be followed: {_line(self._matcher.get_error())}")


def guides(
    tokenizer: Tokenizer, vocab: int, ends: Collection[int]
) -> Callable[[tuple[str, str]], Guide]:
    """Returns what makes a guide for a grammar of `Request`.

    Args:
      tokenizer: the model's.
      vocab: the model's vocabulary, at least the tokenizer's.
      ends: tokens that end a text.

    Raises:
      UserError: if llguidance is not installed; later, for a grammar that isn't one.
    """
    try:
        from llguidance import LLMatcher, LLTokenizer
    except ImportError as error:
        raise UserError(
            "answers in a format need llguidance: pip install 'minitext[serve]'"
        ) from error
    known = LLTokenizer(json.dumps(tokenizer.published()), n_vocab=vocab, eos_token=sorted(ends))

    def make(grammar: tuple[str, str]) -> Guide:
        kind, text = grammar
        if len(text) > GRAMMAR_LIMIT:
            raise UserError(
                f"a {kind} may have {GRAMMAR_LIMIT:,} characters: this has {len(text):,}"
            )
        try:
            if kind == "regex":
                compiled = LLMatcher.grammar_from_regex(text)
            else:
                schema = text if kind == "json_schema" else '{"type": "object"}'
                compiled = LLMatcher.grammar_from_json_schema(schema)
        except ValueError as error:
            raise UserError(f"the {kind} can't be used: {_line(str(error))}") from error
        if wrong := LLMatcher.validate_grammar(compiled, known):
            raise UserError(f"the {kind} can't be used: {_line(wrong)}")
        guide = Guide(LLMatcher(known, compiled, log_level=0), vocab)
        guide.allowed()  # a schema that nothing fits is found here
        return guide

    return make


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
