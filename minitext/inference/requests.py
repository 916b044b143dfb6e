"""What is asked of the engine, and what it answers, token by token.

Chapters: 24.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from minitext import files
from minitext.errors import UserError

Finish = Literal["stop", "length", "cancelled", "error"]
MOST_LOGPROBS = 20  # alternatives for each token
MOST_SAMPLES = 128


@dataclass(frozen=True)
class Request:
    """A prompt, and how to go on from it.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: how many tokens may follow, at least 1.
      n: texts to sample from the prompt; they share its cache.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw among this many most likely tokens; 0 means all.
      top_p: draw among the most likely tokens whose probabilities sum to at least this; 1 means all.
      min_p: draw among the tokens at least this times as likely as the most likely one; 0 means all.
      presence_penalty: taken from the logit of a token that the answer has already, -2 to 2.
      frequency_penalty: taken from a token's logit for each time the answer has it, -2 to 2.
      repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens that prompt or answer
        have already (Keskar et al. 2019), 1e-6 to 1e6; 1 does nothing.
      logit_bias: added to the logits of tokens, -100 to 100.
      seed: of the draws. The same seed gives the same text, whatever else the engine does at the time. Text number i of
        n has a seed of its own.
      stop_ids: tokens that end the text; they aren't part of it.
      keep_stop: whether such a token is reported as part of the text nevertheless.
      logprobs: None, or how many of the most likely tokens to report with each token, 0 to 20.
      adapter: None, or the name of one that the engine has.
      grammar: None, or what the text must be: `("json_schema", SCHEMA)`, `("json_object", "")` or `("regex", PATTERN)`.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    keep_stop: bool = False
    logprobs: int | None = None
    grammar: tuple[str, str] | None = None
    adapter: str | None = None

    def check(self, vocab: int) -> None:
        """Raises UserError, naming the value, for one outside its range; `vocab` is the model's."""
        if not self.prompt:
            raise UserError("the prompt is empty: give at least one token")
        if wrong := [i for i in (*self.prompt, *self.logit_bias) if not 0 <= i < vocab]:
            raise UserError(f"token {_said(wrong[0])} is not in the model's vocabulary of {vocab}")
        ranges = {
            "max_tokens": (1, math.inf), "n": (1, MOST_SAMPLES), "temperature": (0, 1e6), "top_k": (0, 2**31 - 1),
            "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "seed": (-(2**63), 2**63 - 1),
            "repetition_penalty": (1e-6, 1e6),  # beyond, some float32 logits would be infinite
        }  # fmt: skip
        values = {name: getattr(self, name) for name in ranges}
        if self.logprobs is not None:
            ranges["logprobs"], values["logprobs"] = (0, MOST_LOGPROBS), self.logprobs
        for token, bias in self.logit_bias.items():
            name = f"logit_bias of token {token}"
            ranges[name], values[name] = (-100, 100), bias
        for name, (low, high) in ranges.items():
            if not low <= values[name] <= high or values[name] == math.inf:  # NaN is in no range
                least = f"{low} or more" if high == math.inf else f"{low} to {high}"
                raise UserError(f"{name}={_said(values[name])}: choose {least}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: choose more than 0 and at most 1")


def _said(number: float) -> str:
    """Returns a number for an error's line: a client may send thousands of digits."""
    return files.shorten(str(number))


class Event(NamedTuple):
    """One token of one of a request's texts, or its end.

    Attributes:
      sample: number of the text, from 0 to n - 1.
      token: its id, or None with `finish`.
      logprob: its log-probability under the model, in nats, before temperature and filters, if asked for.
      top: (id, log-probability) of the most likely tokens, most likely first, if asked for.
      finish: None, or why the text ends: `stop`, `length`, `cancelled` or `error`.
      error: with finish `error`, what went wrong, in a line.
    """

    sample: int
    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    error: str = ""


class Busy(Exception):
    """The engine's queue is full: ask again later."""


class Usage(NamedTuple):
    """What the engine is doing, for `/metrics` and `/health`.

    Attributes:
      running: texts that are being continued.
      waiting: texts that wait to be admitted.
      pages: pages of the cache.
      pages_used: pages that hold tokens of running texts.
      pages_kept: other pages that hold tokens, for prompts that begin alike.
      cache_tokens: tokens that the pages have room for.
      cache_bytes: memory that the cache takes on all devices, used or not.
      prompt_tokens: tokens of all prompts so far.
      reused_tokens: of these, tokens found in the cache.
      generated_tokens: tokens of all answers so far.
      steps: programs run so far.
      preemptions: texts that lost their pages and were computed again.
    """

    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_kept: int
    cache_tokens: int
    cache_bytes: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    steps: int
    preemptions: int
