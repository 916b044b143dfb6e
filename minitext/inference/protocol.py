"""OpenAI's protocol: requests as their clients send them, checked, and answers as their clients read them.

What OpenAI's servers ignore is ignored. A field that would change the answer and isn't supported is refused by name.
Fields beyond OpenAI's (top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, structured_outputs) are vLLM's.

Source: https://platform.openai.com/docs/api-reference; vllm/entrypoints/openai.

Chapters: 24.
"""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from minitext import files
from minitext.data.tokenizer import Tokenizer
from minitext.errors import rule_of
from minitext.inference.requests import MOST_SAMPLES, Request
from minitext.inference.text import TokenText, token_text

DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions; a chat goes on to the end of the context
MOST_STOPS, LONGEST_STOP = 16, 256  # characters
MOST_TOP_K = 2**31 - 1  # more than any vocabulary; the engine keeps it in 32 bits
LEAST_LOGPROB = -9999.0  # JSON has no infinity

# Field -> values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "audio": (), "modalities": (["text"],), "web_search_options": (), "suffix": ("",), "echo": (False,),
    "prompt_embeds": (), "prompt_logprobs": (), "use_beam_search": (False,), "length_penalty": (1, 1.0),
    "min_tokens": (0,), "bad_words": ([],), "allowed_token_ids": (), "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,), "include_stop_str_in_output": (False,), "chat_template": (),
    "chat_template_kwargs": ({},), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "documents": ([],), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
}  # fmt: skip

T = TypeVar("T", bound=BaseModel)


class Refused(Exception):
    """A request that can't be answered: a status, a line that says why, and what OpenAI's clients read of it."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's servers write it."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """Of a stream: whether its last event says how many tokens were used, and whether each does (vLLM's)."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(_Strict):
    """What both kinds of request have."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_SAMPLES)
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: Any = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    structured_outputs: dict[str, Any] = {}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        given = [] if self.stop is None else self.stop
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list) or not all(isinstance(s, str) for s in given):
            raise Refused(
                f"stop={_short(self.stop)}: give a string or a list of strings", param="stop"
            )
        if len(given) > MOST_STOPS:
            raise Refused(f"stop has {len(given)} strings: give at most {MOST_STOPS}", param="stop")
        if wrong := [s for s in given if not 0 < len(s) <= LONGEST_STOP]:
            raise Refused(
                f"stop has a string of {len(wrong[0])} characters: choose 1 to {LONGEST_STOP}",
                param="stop",
            )
        return tuple(given)

    @property
    def limit(self) -> int | None:
        """How many tokens may follow, if it says so."""
        return self.max_tokens

    @property
    def grammar(self) -> tuple[str, str] | None:
        """What the text must be, for the engine."""
        asked = {k: v for k, v in self.structured_outputs.items() if v is not None}
        if not asked:
            return None
        kind, value = next(iter(asked.items()))
        if len(asked) == 1 and kind == "regex" and isinstance(value, str):
            return "regex", value
        if len(asked) == 1 and kind == "json" and isinstance(value, dict | str):
            return "json_schema", value if isinstance(value, str) else json.dumps(value)
        raise Refused(
            'structured_outputs: give {"json": SCHEMA} or {"regex": PATTERN}',
            param="structured_outputs",
        )

    @property
    def alternatives(self) -> int | None:
        """How many of the most likely tokens to report with each token."""
        return None


class CompletionBody(Body):
    """A request to `/v1/completions`."""

    prompt: Any
    best_of: int | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as texts or as token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if isinstance(given, list) and given:
            if all(isinstance(p, str) for p in given):
                return given
            if _are_ids(given):
                return [given]
            if all(isinstance(p, list) and _are_ids(p) for p in given):
                return given
        raise Refused(
            f"prompt={_short(given)}: give a text, a list of texts, a list of token ids, or a list of such lists",
            param="prompt",
        )

    @property
    def limit(self) -> int | None:
        """How many tokens may follow."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the most likely tokens to report with each token."""
        return self.logprobs


class ResponseFormat(_Strict):
    """What a chat's answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = {}


class ChatBody(Body):
    """A request to `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: ResponseFormat = ResponseFormat(type="text")

    @property
    def limit(self) -> int | None:
        """How many tokens may follow, if it says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the most likely tokens to report with each token."""
        if self.top_logprobs and not self.logprobs:
            raise Refused(
                f"top_logprobs={_short(self.top_logprobs)} needs logprobs=true: set it",
                param="top_logprobs",
            )
        return self.top_logprobs if self.logprobs else None

    @property
    def grammar(self) -> tuple[str, str] | None:
        """What the text must be, for the engine."""
        asked = self.response_format
        if asked.type == "text":
            return super().grammar
        if self.structured_outputs:
            raise Refused("give response_format or structured_outputs, not both")
        if asked.type == "json_object":
            return "json_object", ""
        schema = asked.json_schema.get("schema")
        if not isinstance(schema, dict):
            raise Refused(
                "response_format of type json_schema has no json_schema.schema: give an object",
                param="response_format",
            )
        return "json_schema", json.dumps(schema)

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages with their texts, for a chat template."""
        return [_message(i, message) for i, message in enumerate(self.messages)]


def _message(place: int, message: dict[str, Any]) -> dict[str, str]:
    where = f"messages[{place}]"
    role, content, name = (message.get(key) for key in ("role", "content", "name"))
    for key in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if message.get(key):
            raise Refused(f"{where}.{key} is not supported: leave it out", param="messages")
    if not isinstance(role, str) or not role:
        raise Refused(
            f"{where}.role={_short(role)}: give system, user or assistant", param="messages"
        )
    if isinstance(content, list):
        typed = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in typed if isinstance(part.get("text"), str)]
        if len(texts) < len(content):
            raise Refused(
                f"{where}.content has a part that is not text: give text alone", param="messages"
            )
        content = "".join(texts)
    if not isinstance(content, str):
        raise Refused(f"{where}.content={_short(content)}: give a text", param="messages")
    return {"role": role, "content": content} | ({"name": name} if isinstance(name, str) else {})


def read_body(data: bytes, kind: type[Body]) -> Any:
    """Returns a checked request.

    Args:
      data: the JSON; its size is checked already.
      kind: `CompletionBody` or `ChatBody`.

    Raises:
      Refused: it isn't JSON or nested too deeply, a field has a wrong type, or one is not supported.
    """
    try:
        found = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {files.shorten(str(error))}") from None
    if isinstance(found, dict):
        for name, neutral in REFUSED.items():
            if found.get(name) is not None and found[name] not in neutral:
                raise Refused(
                    f"{name}={_short(found[name])} is not supported: leave it out", param=name
                )
    body = validated(found, kind)
    if isinstance(body, CompletionBody) and body.best_of not in (None, body.n):
        raise Refused(
            f"best_of={_short(body.best_of)} is not supported: leave it out, or make it n={body.n}",
            param="best_of",
        )
    _ = body.stops, body.alternatives, body.grammar  # refused now, before the prompt is looked at
    return body


def validated(found: Any, kind: type[T]) -> T:
    """Returns the fields of a JSON object; those that are null count as left out.

    Raises:
      Refused: it isn't an object, or a field is missing or has a wrong type.
    """
    if not isinstance(found, dict):
        raise Refused(f"the body is {_short(found)}: send a JSON object")
    found = {name: value for name, value in found.items() if value is not None}
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise Refused(f"{name} is missing: give it", param=name) from None
        said = f"{files.shorten(name)}={_short(first['input'])}: {rule_of(first)}"
        raise Refused(said, param=name) from None


def requests_of(
    body: Body,
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    context: int,
    adapter: str | None = None,
) -> list[Request]:
    """Returns what to ask the engine for, a request for each prompt.

    Args:
      body: the checked request.
      prompts: token ids of each prompt.
      stop_ids: tokens that end the model's texts.
      context: tokens that prompt and answer may have together.
      adapter: the engine's that the request names, or None.

    Raises:
      Refused: prompt and answer don't fit.
    """
    if len(prompts) * body.n > MOST_SAMPLES:
        raise Refused(
            f"{len(prompts)} prompts with n={body.n} are {len(prompts) * body.n} texts: ask for at most {MOST_SAMPLES}"
        )
    longest = max(map(len, prompts))
    room = context - longest
    if room < (body.limit or 1):
        asked = f" and max_tokens={_short(body.limit)}" if body.limit else ""
        raise Refused(
            f"a prompt of {longest:,} tokens{asked} is more than the context of {context:,} tokens: shorten it"
            f"{' or ask for less' if asked else ''}",
            code="context_length_exceeded",
        )
    bias = {}
    for token, value in body.logit_bias.items():
        if not re.fullmatch("[0-9]{1,9}", token):
            raise Refused(f"logit_bias names {_short(token)}: give token ids", param="logit_bias")
        bias[int(token)] = value
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return [
        Request(
            prompt=tuple(prompt), max_tokens=room if body.limit is None else body.limit, n=body.n,
            temperature=body.temperature, top_k=min(max(body.top_k, 0), MOST_TOP_K), top_p=body.top_p, min_p=body.min_p,
            presence_penalty=body.presence_penalty, frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty, logit_bias=bias, seed=seed,
            stop_ids=(frozenset() if body.ignore_eos else stop_ids) | set(body.stop_token_ids),
            logprobs=body.alternatives, grammar=body.grammar, adapter=adapter,
        )
        for prompt in prompts
    ]  # fmt: skip


class Piece(NamedTuple):
    """Some of a text, or all of it.

    Attributes:
      index: number of the text.
      text: the characters.
      tokens: whose text they are.
      finish: None, or why the text ends.
    """

    index: int
    text: str = ""
    tokens: Sequence[TokenText] = ()
    finish: str | None = None


class CompletionAnswer:
    """Answers of `/v1/completions`.

    Args:
      model: the served name.
      tokenizer: the model's.
      logprobs: whether they were asked for.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool):
        self.tokenizer, self.logprobs = tokenizer, logprobs
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model,
        }  # fmt: skip

    def whole(self, texts: Sequence[Piece], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer that isn't streamed."""
        choices = [self.choice(text) for text in texts]
        return {**self.head, "object": self.whole_object, "choices": choices, "usage": usage}

    def chunk(self, *choices: dict[str, Any], usage: Any = None) -> dict[str, Any]:
        """Returns one event of a stream."""
        return {**self.head, "object": self.chunk_object, "choices": choices, "usage": usage}

    def first(self, index: int) -> list[dict[str, Any]]:
        """Returns what a text of a stream begins with."""
        return []

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Returns a whole text."""
        return self.delta(piece)

    def delta(self, piece: Piece) -> dict[str, Any]:
        """Returns a part of a text in a stream."""
        return {
            "index": piece.index, "text": piece.text, "finish_reason": piece.finish,
            "logprobs": self.report(piece.tokens) if self.logprobs else None,
        }  # fmt: skip

    def report(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """Returns the tokens' log-probabilities."""
        top = []
        for token in tokens:
            likely: dict[str, float] = {}
            for other, logprob in (*token.top, (token.token, token.logprob)):
                likely.setdefault(token_text(self.tokenizer, other), _finite(logprob))
            top.append(likely)
        return {
            "tokens": [token_text(self.tokenizer, t.token) for t in tokens],
            "token_logprobs": [_finite(t.logprob) for t in tokens],
            "top_logprobs": top, "text_offset": [t.offset for t in tokens],
        }  # fmt: skip


class ChatAnswer(CompletionAnswer):
    """Answers of `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> list[dict[str, Any]]:
        """Returns what a text of a stream begins with: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Returns a whole text."""
        found = self.delta(piece)
        del found["delta"]
        return found | {"message": {"role": "assistant", "content": piece.text, "refusal": None}}

    def delta(self, piece: Piece) -> dict[str, Any]:
        """Returns a part of a text in a stream."""
        return {
            "index": piece.index, "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self.report(piece.tokens) if self.logprobs else None, "finish_reason": piece.finish,
        }  # fmt: skip

    def report(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """Returns the tokens' log-probabilities."""
        content = []
        for token in tokens:
            top = [self._one(other, logprob) for other, logprob in token.top]
            content.append({**self._one(token.token, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = token_text(self.tokenizer, token)
        # A part of a character has bytes of its own, which a tokenizer doesn't tell.
        there = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": there}


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)


def _are_ids(given: list[Any]) -> bool:
    return bool(given) and all(type(i) is int for i in given)


def _short(value: Any) -> str:
    """Returns a value for an error's line."""
    return files.shorten(value if isinstance(value, str) else repr(value))
