"""An HTTP server that OpenAI's clients can use: one model, one engine, and the web page to chat with it.

A request is read within limits, checked, turned into tokens and handed to the engine, whose thread answers token by
token. Here an event loop turns these into text, and into events if the client wants a stream. A client that hangs up,
streaming or not, is noticed at once, and the engine is told.

Chapters: 24.
"""

import asyncio
import contextlib
import json
import logging
import os
import queue
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response

from minitext.data.chat import Chat, Renderer
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.files import shorten
from minitext.inference import http_server, requests
from minitext.inference.http_server import (
    JSON,
    Counted,
    Gone,
    check_key,
    gone,
    headers_of,
    need_type,
    read,
    unless_gone,
)
from minitext.inference.protocol import (
    Body,
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    Piece,
    Refused,
    StreamOptions,
    read_body,
    requests_of,
)  # fmt: skip
from minitext.inference.requests import Busy, Event
from minitext.inference.server_metrics import Metrics
from minitext.inference.text import TextStream

if TYPE_CHECKING:  # nothing is computed here
    from minitext.inference.engine import Engine
    from minitext.inference.replicas import Replicas

log = logging.getLogger("minitext.server")

LEAST_BODY, BYTES_A_TOKEN = (
    1 << 20,
    32,
)  # a body may have this many bytes, or so many for each token of the context
STALL_SECONDS = 60.0  # for a client to take what it asked for
MOST_PREPARING = 256  # requests being turned into tokens
LONG_TEXT = 20_000  # characters; longer prompts are tokenized in a thread
PAGE = Path(__file__).with_name("chat.html")
# The page is ours alone: nothing may be loaded, from here or elsewhere, and it may ask this server only.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:"
)

T = TypeVar("T")


@dataclass
class Served:
    """A model and how it's served.

    Attributes:
      name: of the model, for clients.
      engine: started.
      tokenizer: the model's.
      chat: its template, and the tokens that end its texts.
      api_key: what clients must send, or None.
      draining: whether new requests are refused because the server is shutting down.
    """

    name: str
    engine: "Engine | Replicas"
    tokenizer: Tokenizer
    chat: Chat
    api_key: str | None = None
    draining: bool = False
    preparing: int = 0
    metrics: Metrics = field(init=False)
    threads: ThreadPoolExecutor = field(init=False)
    renderers: "queue.SimpleQueue[Renderer]" = field(init=False, default_factory=queue.SimpleQueue)

    def __post_init__(self):
        self.metrics = Metrics(self.engine.usage)
        count = os.cpu_count() or 1
        self.threads = ThreadPoolExecutor(count, "prepare")
        for _ in range(count):
            self.renderers.put(Renderer())

    def close(self) -> None:
        """Ends threads and processes."""
        self.threads.shutdown(cancel_futures=True)
        while not self.renderers.empty():
            self.renderers.get().close()

    @property
    def most_bytes(self) -> int:
        """Bytes that a request's body may have."""
        return max(LEAST_BODY, BYTES_A_TOKEN * self.engine.max_length)


def make_app(served: Served) -> FastAPI:
    """Returns the application: OpenAI's addresses under /v1, the page at /, /health and /metrics."""
    # No pages about the API: FastAPI's load their scripts from another host.
    app = FastAPI(title="minitext", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Counted, answers=served.metrics.answers)

    async def with_key(request: Request) -> None:
        check_key(served.api_key, request)

    api = APIRouter(prefix="/v1", dependencies=[Depends(with_key)])
    common = {
        "object": "model", "created": int(time.time()), "owned_by": "minitext",
        "max_model_len": served.engine.max_length,
    }  # fmt: skip

    def described() -> dict[str, dict[str, Any]]:
        """Returns the model and its adapters, by name."""
        others = {n: {"id": n, **common, "parent": served.name} for n in served.engine.adapters}
        return {served.name: {"id": served.name, **common}} | others

    @api.post("/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await _serve(served, request, CompletionBody)

    @api.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await _serve(served, request, ChatBody)

    @api.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [*described().values()]}

    @api.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(served, name)
        return described()[name]

    @app.get("/health", response_model=None)
    async def health() -> Response:
        state = served.engine.failed or ("draining" if served.draining else "ok")
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(*served.metrics.text())

    @app.get("/", response_model=None)
    async def page() -> Response:
        headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(_page(served), headers=headers)

    app.include_router(api)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    return app


# --- one request, from its bytes to its answer


async def _serve(served: Served, request: Request, kind: type[Body]) -> Response:
    began = time.perf_counter()
    try:
        need_type(request, JSON)
        body = read_body(await read(request, served.most_bytes), kind)
        if body.model is not None:
            _check_model(served, body.model)
        asked = await _prepare(served, body)
    except ClientDisconnect:
        return gone()
    make = ChatAnswer if kind is ChatBody else CompletionAnswer
    answer = make(body.model or served.name, served.tokenizer, body.alternatives is not None)
    texts = Texts(served, asked, body, began, goes_on=kind is CompletionBody)
    await texts.submit()
    if body.stream:
        return EventStream(_events(texts, answer, body.stream_options), texts.cancel)
    try:
        pieces = await unless_gone(request.receive, _all_of(texts))
    except Gone:
        return gone()
    finally:
        texts.cancel()
    return Response(to_json(answer.whole(pieces, texts.usage)), media_type="application/json")


async def _prepare(served: Served, body: Body) -> list[requests.Request]:
    """Returns what to ask the engine for."""
    if served.draining:
        raise Refused("the server is shutting down: ask again later", 503)
    if served.preparing >= MOST_PREPARING:
        raise _busy()
    served.preparing += 1
    try:
        if isinstance(body, ChatBody):
            if served.chat.template is None:
                raise Refused(
                    f"{served.name} has no chat template, so it wasn't trained for conversations: use /v1/completions"
                )
            prompts = [await _in_a_thread(served, _render, served, body.conversation)]
        else:
            assert isinstance(body, CompletionBody)
            prompts = [
                await _encode(served, text) if isinstance(text, str) else text
                for text in body.prompts
            ]
    except UserError as error:
        raise Refused(str(error)) from None
    finally:
        served.preparing -= 1
    adapter = None if body.model in (None, served.name) else body.model
    return requests_of(body, prompts, served.chat.stops, served.engine.max_length, adapter)


def _render(served: Served, messages: Sequence[dict[str, str]]) -> list[int]:
    renderer = served.renderers.get()
    try:
        text = served.chat.render(messages, renderer)
    except UserError as error:  # names a folder, which is nobody else's business
        said = str(error).rpartition("cannot be rendered: ")[2]
        raise Refused(
            f"the model's chat template refuses the messages: {said}", param="messages"
        ) from None
    finally:
        served.renderers.put(renderer)
    # The template writes the token at the beginning itself.
    return served.tokenizer.encode_chat(text)


async def _encode(served: Served, text: str) -> list[int]:
    if len(text) < LONG_TEXT:
        return served.tokenizer.encode(text)
    return await _in_a_thread(served, served.tokenizer.encode, text)


async def _in_a_thread(served: Served, function: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(served.threads, function, *args)


class Texts:
    """The texts that answer one HTTP request: from the engine's events to pieces of text.

    Args:
      served: the model.
      asked: a request for each prompt.
      body: what the client sent.
      began: when it came, by `time.perf_counter`.
      goes_on: whether the texts go on from their prompts.
    """

    def __init__(
        self,
        served: Served,
        asked: list[requests.Request],
        body: Body,
        began: float,
        *,
        goes_on: bool,
    ):
        self._served, self._asked, self._began = served, asked, began
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._numbers: dict[int, int] = {}  # place of a prompt -> its number in the engine
        self._open = {
            place * body.n + i: TextStream(
                served.tokenizer, one.prompt if goes_on else (), body.stops
            )
            for place, one in enumerate(asked)
            for i in range(body.n)
        }
        self._n, self._generated = body.n, 0
        self._left = [body.n] * len(asked)  # texts of each prompt that the engine hasn't ended
        self._last: dict[int, float] = {}

    async def submit(self) -> None:
        """Hands the requests to the engine: all or none.

        Raises:
          Refused: one is not possible, or the queue is full.
        """
        loop = asyncio.get_running_loop()

        def sink(place: int, event: Event) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(self._events.put_nowait, (place, event))

        submit = self._served.engine.submit
        try:
            for place, one in enumerate(self._asked):
                if one.grammar:  # may take a while to read
                    number = await _in_a_thread(self._served, submit, one, partial(sink, place))
                else:
                    number = submit(one, partial(sink, place))
                self._numbers[place] = number
        except Busy:
            self.cancel()
            if self._served.engine.failed:
                raise Refused(self._served.engine.failed, 503) from None
            raise _busy() from None
        except UserError as error:
            self.cancel()
            raise Refused(str(error)) from None

    def cancel(self) -> None:
        """Tells the engine that nobody waits any more for what isn't done."""
        for number in self._numbers.values():
            self._served.engine.cancel(number)
        self._numbers.clear()

    @property
    def indices(self) -> list[int]:
        """Numbers of the texts that aren't done."""
        return list(self._open)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, and of the texts so far."""
        prompt = sum(len(one.prompt) for one in self._asked)
        return {
            "prompt_tokens": prompt, "completion_tokens": self._generated,
            "total_tokens": prompt + self._generated,
        }  # fmt: skip

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields the texts as they come; the last piece of each says why it ends.

        Raises:
          Refused: the engine failed.
        """
        while self._open:
            place, event = await self._events.get()
            if event.finish:
                self._left[place] -= 1
                if not self._left[place]:
                    self._numbers.pop(place, None)
            index = place * self._n + event.sample
            text = self._open.get(index)
            if text is None:  # ended by a stop string; the engine may not know yet
                continue
            if event.finish in ("error", "cancelled"):
                said = event.error or "the request was cancelled"
                ended = self._served.draining or self._served.engine.failed
                raise Refused(said, 503 if ended else 400)
            if event.token is not None:
                self._time(index)
                more, tokens = text.push(event.token, event.logprob, event.top)
                finish = "stop" if text.stopped else None
            else:
                more, tokens = text.finish()
                finish = "stop" if text.stopped else event.finish
            if finish:
                self._end(place, index, finish)
                if not event.finish:  # a stop string, behind which the engine goes on
                    self._served.engine.cancel(self._numbers[place], event.sample)
            if more or tokens or finish:
                yield Piece(index, more, tokens, finish)

    def _time(self, index: int) -> None:
        now = time.perf_counter()
        self._generated += 1
        if index in self._last:
            self._served.metrics.between_tokens.observe(now - self._last[index])
        else:
            self._served.metrics.first_token.observe(now - self._began)
        self._last[index] = now

    def _end(self, place: int, index: int, finish: str) -> None:
        del self._open[index]
        self._served.metrics.texts.labels(finish).inc()
        self._served.metrics.whole.observe(time.perf_counter() - self._began)


async def _all_of(texts: Texts) -> list[Piece]:
    """Returns each text whole."""
    found: dict[int, list[Piece]] = {index: [] for index in texts.indices}
    async for piece in texts.pieces():
        found[piece.index].append(piece)
    return [
        Piece(
            index,
            "".join(p.text for p in parts),
            [t for p in parts for t in p.tokens],
            parts[-1].finish,
        )
        for index, parts in found.items()
    ]


async def _events(
    texts: Texts, answer: CompletionAnswer, options: StreamOptions
) -> AsyncIterator[bytes]:
    """Yields server-sent events."""

    def event(data: Any) -> bytes:
        return b"data: " + to_json(data) + b"\n\n"

    try:
        for index in texts.indices:
            if first := answer.first(index):
                yield event(answer.chunk(*first))
        async for piece in texts.pieces():
            now = texts.usage if options.continuous_usage_stats else None
            yield event(answer.chunk(answer.delta(piece), usage=now))
        if options.include_usage:
            yield event(answer.chunk(usage=texts.usage))
    except Refused as error:  # too late for a status
        yield event(error.body)
    yield b"data: [DONE]\n\n"


class EventStream(Response):
    """A stream of server-sent events that ends at once when the client hangs up, or takes nothing for a while.

    Args:
      events: what to send.
      close: called at the end, whatever ends it.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the events."""

        async def push(message: dict[str, Any]) -> None:
            async with asyncio.timeout(STALL_SECONDS):
                await send(message)

        async def work() -> None:
            await push({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self._events:
                await push({"type": "http.response.body", "body": part, "more_body": True})
            await push({"type": "http.response.body", "body": b"", "more_body": False})

        with contextlib.suppress(Gone):
            try:
                await unless_gone(receive, work())
            except TimeoutError:
                log.warning(
                    "a client took nothing for %.0f seconds: its stream ends", STALL_SECONDS
                )
                raise Gone from None
            finally:
                self._close()


# --- keys, names and errors


def _check_model(served: Served, name: str) -> None:
    if name not in (known := [served.name, *served.engine.adapters]):
        raise Refused(
            f"there is no model {shorten(name)} here: name {' or '.join(known)}", 404,
            param="model", code="model_not_found",
        )  # fmt: skip


def _busy() -> Refused:
    return Refused(
        "too many requests are waiting: ask again later", 429, code="rate_limit_exceeded"
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.body, error.status, headers_of(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers a wrong address or method as OpenAI's servers do."""
    assert isinstance(error, HTTPException)
    said = f"{request.method} {shorten(request.url.path)}: {str(error.detail).lower()}"
    return JSONResponse(Refused(said, error.status_code).body, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse(Refused("the server failed: its log says how", 500).body, 500)


def _page(served: Served) -> str:
    """Returns the page, with what it must know of the model in place of a mark."""
    known = {
        "model": served.name, "chat": served.chat.template is not None, "key": served.api_key is not None,
        "context": served.engine.max_length,
    }  # fmt: skip
    return PAGE.read_text(encoding="utf-8").replace(
        "{/*known*/}", json.dumps(known).replace("<", "\\u003c")
    )


# --- a process that serves


class Server(http_server.Server):
    """An HTTP server that closes the engine when it shuts down.

    Args:
      served: the model; its engine is closed at the end.
      drain_seconds: how long what runs may go on after SIGTERM or Ctrl-C.
    """

    def __init__(self, served: Served, drain_seconds: float = 30.0):
        super().__init__(
            make_app(served),
            lambda: served.engine.close(drain_seconds=drain_seconds),
            drain_seconds,
        )
        self.served, self.drain_seconds = served, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting; what runs is finished or, when the time is over, told that it failed."""
        self.served.draining = True
        await super().shutdown(sockets)
        await asyncio.to_thread(self.served.close)
