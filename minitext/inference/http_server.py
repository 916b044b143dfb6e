"""The part of an HTTP server that doesn't depend on what is served: sockets, slow clients, keys, limits and shutdown.

Two servers use it: `server`, for a language model and OpenAI's clients, and `artefact_server`, for any functions.

Chapters: 24, 27.
"""

import asyncio
import hashlib
import hmac
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import h11
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from minitext.errors import UserError
from minitext.inference.protocol import Refused

HEAD_SECONDS = 60.0  # for a request's first lines to arrive
READ_SECONDS = 60.0  # for its body
RETRY_SECONDS = 1
JSON = "application/json"

T = TypeVar("T")


class Gone(Exception):
    """The client has hung up."""


def need_type(request: Request, *kinds: str) -> str:
    """Returns the type that a body is declared to have, which no other site's page can send unasked.

    Raises:
      Refused: it isn't among `kinds`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        named = "JSON" if kinds == (JSON,) else " or ".join(kinds)
        raise Refused(f"the body is not declared as {named}: send Content-Type: {kinds[0]}", 415)
    return kind


async def read(request: Request, limit: int) -> bytes:
    """Returns the body, of at most `limit` bytes; one that is longer is read to its end, but not kept.

    Raises:
      Refused: the body is too long, or too slow.
    """
    size, parts = 0, []
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif size > 16 * limit:
                    break
                else:
                    parts.clear()
    except TimeoutError:
        raise Refused(
            f"the body did not arrive within {READ_SECONDS:.0f} seconds: send it at once", 408
        ) from None
    if size > limit:
        raise Refused(f"the body has more than {limit:,} bytes: send less", 413)
    return b"".join(parts)


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Awaitable[T]) -> T:
    """Returns what `work` returns; if the client hangs up first, the work is cancelled.

    Raises:
      Gone: the client hung up.
    """

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, listening = asyncio.ensure_future(work), asyncio.ensure_future(listen())
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, listening):
            task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


def check_key(api_key: str | None, request: Request) -> None:
    """Refuses a request without the key that the server wants, in a time that says nothing about the key."""
    if api_key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    digests = [hashlib.sha256(key.encode()).digest() for key in (given.strip(), api_key)]
    if scheme.lower() != "bearer" or not hmac.compare_digest(*digests):
        raise Refused(
            "this server wants its API key: send Authorization: Bearer KEY",
            401,
            code="invalid_api_key",
        )


def gone() -> Response:
    """Returns the answer to a client that has hung up: it isn't read, but it's counted."""
    return Response(status_code=499)


def headers_of(error: Refused) -> dict[str, str]:
    """Returns the headers of a refusal: how to identify oneself, when to come back, or that the connection ends."""
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if error.status in (429, 503):
        return {"Retry-After": str(RETRY_SECONDS)}
    if error.status in (408, 413):  # the rest of the body may still come
        return {"Connection": "close"}
    return {}


class Counted:
    """Counts answers by address and status.

    Args:
      app: what answers.
      answers: a counter of prometheus_client with the labels path and status.
    """

    def __init__(self, app: Any, answers: Any):
        self.app, self.answers = app, answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers, and counts."""

        async def counted(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                known = getattr(scope.get("route"), "path", "other")
                self.answers.labels(known, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counted if scope["type"] == "http" else send)


# --- a process that serves


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that has the address, before anything is loaded for it; it doesn't listen yet.

    Raises:
      UserError: the address is in use, or isn't one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"cannot listen on {host}:{port}: {said.lower()}: choose another --port, 0 for a free one, or --host"
        ) from None
    return found


class Connection(H11Protocol):
    """A connection that is closed when a request's first lines don't arrive in time, which uvicorn would wait for."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Goes on waiting, or stops."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """uvicorn, which calls `close` when it shuts down.

    Args:
      app: the application.
      close: called in a thread when the server stops accepting; it may take `drain_seconds` to finish what runs.
      drain_seconds: how long what runs may go on after SIGTERM or Ctrl-C.
    """

    def __init__(self, app: Any, close: Callable[[], None], drain_seconds: float = 30.0):
        config = uvicorn.Config(
            app, http=Connection, ws="none", lifespan="off", log_level="warning", access_log=False,
            timeout_graceful_shutdown=int(drain_seconds) + 5, server_header=False,
        )  # fmt: skip
        super().__init__(config)
        self._close = close

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting; what runs is finished or, when the time is over, given up by `close`."""
        closing = asyncio.create_task(asyncio.to_thread(self._close))
        await super().shutdown(sockets)
        await closing


def listen(bound: socket.socket) -> None:
    """Lets clients in: those who come before `serve` wait.

    Raises:
      UserError: another process has begun to listen on the address meanwhile.
    """
    try:
        bound.listen(2048)
    except OSError as error:
        raise UserError(
            f"cannot listen: {str(error.strerror).lower()}: choose another --port"
        ) from None


def serve(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serves until SIGTERM or Ctrl-C, and then finishes what runs."""

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn has handlers of its own while it runs, and raises what it caught for these afterwards.
    before = {kind: signal.signal(kind, stop) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listening])
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
