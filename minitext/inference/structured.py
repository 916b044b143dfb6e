"""Answers that are held to a JSON schema or a regular expression, by leaving out the tokens that would break it.

The library llguidance keeps a parser for each text and says which tokens may follow. A token is a few bytes that can
cross the borders of a grammar's words, so this is more than a look at the next character; the library needs well under
a millisecond for it.

Some grammars take it hours, or gigabytes. So each one is first read in another process (see `grammar_check`), and a
text ends if the library takes too long over its next token.

Chapters: 24.
"""

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import numpy as np

from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError

GRAMMAR_LIMIT = 64 << 10  # characters
READ_SECONDS, STEP_SECONDS = 3, 0.25  # of the processor, to read a grammar and for a token
WALL_SECONDS = 60.0  # to read a grammar on a machine that is busy

T = TypeVar("T")


class Guide:
    """Which tokens may follow in one text.

    Attributes:
      done: whether the answer is complete and nothing may follow.
    """

    def __init__(self, matcher, vocab: int):
        self._matcher, self._vocab, self.done = matcher, vocab, False

    def copy(self) -> "Guide":
        """Returns a guide for another text that begins with the same tokens."""
        return Guide(self._matcher.deep_copy(), self._vocab)

    def allowed(self) -> np.ndarray:
        """Returns [V] booleans: the tokens that may follow, those that end the text among them where it may end.

        Raises:
          UserError: if the grammar turns out too complex.
        """
        words = np.frombuffer(self._checked(self._matcher.compute_bitmask), np.uint8)
        return np.unpackbits(words, bitorder="little", count=self._vocab).astype(bool)

    def accept(self, token: int) -> None:
        """Takes the token that follows.

        Raises:
          UserError: if the grammar turns out too complex.
        """
        self._checked(lambda: self._matcher.consume_token(token))
        self.done = self._matcher.is_stopped()

    def _checked(self, step: Callable[[], T]) -> T:
        began = time.thread_time()
        found = step()
        if self._matcher.is_error():
            said = _line(self._matcher.get_error())
            said = "no text fits it" if "NoExtensionBias" in said else said
            raise UserError(f"the grammar can't be followed: {said}")
        if time.thread_time() - began > STEP_SECONDS:
            raise UserError(
                f"the grammar can't be followed: a token takes more than {STEP_SECONDS} seconds: make it simpler"
            )
        return found


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
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    except ImportError as error:
        raise UserError(
            "answers in a format need llguidance: pip install 'minitext[serve]'"
        ) from error
    known = LLTokenizer(json.dumps(tokenizer.published()), n_vocab=vocab, eos_token=sorted(ends))
    limits = LLParserLimits(verbose_errors=False)

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
        if not _can_be_read(compiled):
            raise UserError(
                f"the {kind} can't be used: it takes too much time or memory to read: make it simpler"
            )
        if wrong := LLMatcher.validate_grammar(compiled, known, limits=limits):
            raise UserError(f"the {kind} can't be used: {_line(wrong)}")
        guide = Guide(LLMatcher(known, compiled, log_level=0, limits=limits), vocab)
        guide.allowed()  # a schema that nothing fits is found here
        return guide

    return make


@functools.lru_cache(maxsize=256)
def _can_be_read(compiled: str) -> bool:
    """Returns whether reading a grammar takes little time and memory."""
    program = Path(__file__).with_name("grammar_check.py")
    try:
        ended = subprocess.run(
            [sys.executable, "-P", str(program), str(READ_SECONDS)],
            input=compiled, text=True, timeout=WALL_SECONDS, capture_output=True,
            start_new_session=True,  # Ctrl-C is for the server, which finishes what runs
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    if ended.returncode > 0:  # not the grammar's doing
        raise RuntimeError(f"grammar_check.py failed: {ended.stderr}")
    return ended.stdout == "fine"  # otherwise a limit has ended it


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
