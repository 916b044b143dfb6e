"""An HTTP server for artefacts: any functions of arrays, without the code that made them.

A request is read within limits and compared with the function's inputs. `batching` computes it, together with others
if it may, and `model_store` has the models, which come and go while requests run. Clients of KServe and Triton know the
protocol, which is the Open Inference Protocol.

Chapters: 27.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Path, Request
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from minitext.files import shorten
from minitext.inference import http_server
from minitext.inference.batching import DEFAULT_SIZES, Arrays, BatchSizes, Call
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
from minitext.inference.model_store import Function, Store
from minitext.inference.open_inference import Asked, read_request, write_answer
from minitext.inference.protocol import Refused, validated
from minitext.inference.server_metrics import ModelMetrics

BYTES = "application/octet-stream"
JSON_BYTES = "Inference-Header-Content-Length"
EXTENSIONS = ["model_repository", "binary_tensor_data"]
MOST_BODY = 16 << 20  # bytes; JSON takes 20 times as much when it's read
LITTLE_BODY = 64 << 10  # of load and unload
BODIES = 8  # of the largest size may be held at once

T = TypeVar("T")
Name = Annotated[str, Path()]


class _Change(BaseModel):
    """What load and unload may have; the parameter `version` is ours."""

    model_config = ConfigDict(strict=True, extra="ignore")
    parameters: dict[str, Any] = {}
    ready: bool = False


class Served:
    """The models and how they are served.

    Args:
      places: folders of artefacts.
      sizes: how requests are joined.
      api_key: what clients must send, or None.
      most_body: bytes that a request may have.
      most_waiting: requests that may be under way.
      drain_seconds: how long models may go on answering when they are unloaded, or at the end.

    Attributes:
      store: the models.
      metrics: of the server.
      draining: whether new requests are refused because the server is shutting down.
    """

    def __init__(
        self,
        places: Sequence[Any],
        sizes: BatchSizes = DEFAULT_SIZES,
        *,
        api_key: str | None = None,
        most_body: int = MOST_BODY,
        most_waiting: int = 256,
        drain_seconds: float = 30.0,
    ):
        self.store = Store(places, sizes, self._watch, drain_seconds)
        self.api_key, self.most_body, self.most_waiting = api_key, most_body, most_waiting
        self.metrics, self.draining = ModelMetrics(self._running), False
        self.under_way = self.bytes_held = 0
        self.threads = ThreadPoolExecutor(os.cpu_count() or 1, "tensors")
        # Loading takes long, and may not keep others waiting.
        self.changes = ThreadPoolExecutor(2, "models")

    def _watch(self, name: str, version: str, calls: Sequence[Call], rows: int) -> None:
        now = time.perf_counter()
        self.metrics.together.labels(name, version).observe(len(calls))
        self.metrics.rows.labels(name, version).observe(rows)
        for call in calls:
            self.metrics.waited.labels(name, version).observe(now - call.arrived)

    def _running(self) -> list[tuple[str, str, int, int]]:
        return [
            (name, model.found.version, batcher.waiting, batcher.program.shapes)
            for model in self.store.loaded()
            for name, batcher in model.called.items()
        ]  # fmt: skip

    def close(self, drain_seconds: float = 0.0) -> None:
        """Answers what was asked, and frees everything."""
        self.store.close(drain_seconds)
        self.threads.shutdown(cancel_futures=True)
        self.changes.shutdown(cancel_futures=True)


def make_app(served: Served) -> FastAPI:
    """Returns the application: the protocol under /v2, and /metrics."""
    app = FastAPI(title="minitext", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Counted, answers=served.metrics.answers)

    async def with_key(request: Request) -> None:
        check_key(served.api_key, request)

    open_to_all, api = APIRouter(), APIRouter(dependencies=[Depends(with_key)])
    _add_health(open_to_all, served)
    _add_models(api, served)
    _add_repository(api, served)
    app.include_router(open_to_all)
    app.include_router(api)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    return app


def _add_health(api: APIRouter, served: Served) -> None:
    @api.get("/v2/health/live", response_model=None)
    async def live() -> Response:
        return JSONResponse({"live": True})

    @api.get("/v2/health/ready", response_model=None)
    async def ready() -> Response:
        return JSONResponse({"ready": not served.draining}, 503 if served.draining else 200)

    @api.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(*served.metrics.text())


def _add_models(api: APIRouter, served: Served) -> None:
    @api.get("/v2", response_model=None)
    async def about() -> Response:
        version = metadata.version("minitext")
        return JSONResponse({"name": "minitext", "version": version, "extensions": EXTENSIONS})

    def described(name: str, version: str | None) -> Response:
        function = served.store.find(name, version)
        program = function.batcher.program
        return JSONResponse({
            "name": name, "versions": served.store.versions(name), "platform": "jax_stablehlo",
            "inputs": [spec.metadata for spec in program.inputs.values()],
            "outputs": [spec.metadata for spec in program.outputs.values()],
        })  # fmt: skip

    def ready(name: str, version: str | None) -> Response:
        found = served.store.has(name, version) and not served.draining
        return JSONResponse({"name": name, "ready": found}, 200 if found else 503)

    @api.get("/v2/models/{name}", response_model=None)
    async def latest(name: Name) -> Response:
        return described(name, None)

    @api.get("/v2/models/{name}/versions/{version}", response_model=None)
    async def one(name: Name, version: Name) -> Response:
        return described(name, version)

    @api.get("/v2/models/{name}/ready", response_model=None)
    async def latest_ready(name: Name) -> Response:
        return ready(name, None)

    @api.get("/v2/models/{name}/versions/{version}/ready", response_model=None)
    async def one_ready(name: Name, version: Name) -> Response:
        return ready(name, version)

    @api.post("/v2/models/{name}/infer", response_model=None)
    async def infer(name: Name, request: Request) -> Response:
        return await _infer(served, request, name, None)

    @api.post("/v2/models/{name}/versions/{version}/infer", response_model=None)
    async def infer_one(name: Name, version: Name, request: Request) -> Response:
        return await _infer(served, request, name, version)


def _add_repository(api: APIRouter, served: Served) -> None:
    async def change(
        request: Request, work: Callable[[str, str | None], None], name: str
    ) -> Response:
        said = await _small(request)
        version = said.parameters.get("version")
        if version is not None and not isinstance(version, str):
            raise Refused(f"version={shorten(repr(version))}: give a string")
        if served.draining:
            raise Refused("the server is shutting down", 503)
        await asyncio.get_running_loop().run_in_executor(served.changes, work, name, version)
        return JSONResponse({})

    @api.post("/v2/repository/index", response_model=None)
    async def index(request: Request) -> Response:
        ready = (await _small(request)).ready
        loop = asyncio.get_running_loop()
        every = await loop.run_in_executor(served.threads, served.store.index)
        return JSONResponse([one for one in every if one["state"] == "READY" or not ready])

    @api.post("/v2/repository/models/{name}/load", response_model=None)
    async def load(name: Name, request: Request) -> Response:
        return await change(request, served.store.load, name)

    @api.post("/v2/repository/models/{name}/unload", response_model=None)
    async def unload(name: Name, request: Request) -> Response:
        return await change(request, served.store.unload, name)


async def _small(request: Request) -> _Change:
    """Returns the body of a request about the repository, which may be empty."""
    body = await read(request, LITTLE_BODY)
    if not body:
        return _Change()
    _type(request)
    try:
        return validated(from_json(body), _Change)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {shorten(str(error))}") from None


def _type(request: Request) -> str:
    """Returns a body's type. Triton's client declares none; browsers say where they come from, and have to."""
    if "content-type" not in request.headers and "origin" not in request.headers:
        return JSON
    return need_type(request, JSON, BYTES)


# --- inference


async def _infer(served: Served, request: Request, name: str, version: str | None) -> Response:
    began, function, status = time.perf_counter(), None, 500
    if served.draining:
        raise Refused("the server is shutting down: ask again later", 503)
    if served.under_way >= served.most_waiting:
        raise Refused("too many requests are under way: ask again later", 429)
    served.under_way += 1
    try:
        function = served.store.find(name, version)
        response = await _answer(served, request, function, version)
        status = response.status_code
    except (ClientDisconnect, Gone):
        response, status = gone(), 499
    except Refused as error:
        status = error.status
        raise
    finally:
        served.under_way -= 1
        if function is not None:  # only names that exist become labels
            known = function.name, function.model.found.version
            served.metrics.requests.labels(*known, str(status)).inc()
            served.metrics.whole.labels(*known).observe(time.perf_counter() - began)
    return response


async def _answer(
    served: Served, request: Request, function: Function, version: str | None
) -> Response:
    kind = _type(request)
    json_bytes = request.headers.get(JSON_BYTES)
    if kind == BYTES and json_bytes is None:
        raise Refused(
            f"the body is bytes: send the header {JSON_BYTES}, or Content-Type: {JSON}", 400
        )
    held = _size(request, served.most_body)
    if served.bytes_held + held > BODIES * served.most_body:
        raise Refused("too many large requests are under way: ask again later", 429)
    served.bytes_held += held
    try:
        body = await read(request, served.most_body)
        program = function.batcher.program
        asked: Asked = await _in_a_thread(
            served, read_request, body, json_bytes, program.inputs, program.outputs
        )
        del body
        arrays = await unless_gone(request.receive, _compute(served, function, version, asked))
    finally:
        served.bytes_held -= held
    said: dict[str, Any] = {
        "model_name": function.name, "model_version": function.model.found.version
    }  # fmt: skip
    if asked.id is not None:
        said["id"] = asked.id
    parts, head = await _in_a_thread(
        served, write_answer, said, asked.outputs, arrays, program.outputs
    )
    headers = {} if head is None else {JSON_BYTES: str(head)}
    return Response(b"".join(parts), 200, headers, JSON if head is None else BYTES)


def _size(request: Request, limit: int) -> int:
    """Returns how many bytes a body may come to hold; one of unknown or too great a length as many as are kept."""
    said = request.headers.get("content-length", "")
    return min(int(said), limit) if said.isascii() and said.isdigit() and len(said) < 19 else limit


async def _compute(served: Served, function: Function, version: str | None, asked: Asked) -> Arrays:
    """Returns what the batcher answers; if the client hangs up, the call is cancelled."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Arrays] = loop.create_future()

    def told(found: Arrays | BaseException) -> None:  # in the batcher's thread
        loop.call_soon_threadsafe(_set, answered, found)

    try:
        call = function.batcher.submit(asked.inputs, told)
    except Refused as error:
        again = served.store.find(function.name, version) if error.status == 503 else function
        if again.model is function.model:
            raise
        call = again.batcher.submit(asked.inputs, told)  # loaded anew meanwhile
    try:
        return await answered
    finally:
        call.cancelled = True


def _set(answered: asyncio.Future[Any], found: Any) -> None:
    if answered.done():  # cancelled
        return
    if isinstance(found, BaseException):
        answered.set_exception(found)
    else:
        answered.set_result(found)


async def _in_a_thread(served: Served, function: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(served.threads, function, *args)


# --- errors


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse({"error": error.message}, error.status, headers_of(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {shorten(request.url.path)}: {str(error.detail).lower()}"
    return JSONResponse({"error": said}, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed: its log says how"}, 500)


class Server(http_server.Server):
    """An HTTP server whose models are closed at the end.

    Args:
      served: the models.
      drain_seconds: how long what runs may go on after SIGTERM or Ctrl-C.
    """

    def __init__(self, served: Served, drain_seconds: float = 30.0):
        super().__init__(make_app(served), lambda: self._drain(drain_seconds), drain_seconds)
        self.served = served

    def _drain(self, seconds: float) -> None:
        """Waits until what runs is answered, or the time is over; later calls are refused."""
        end = time.monotonic() + seconds
        while self.served.under_way and time.monotonic() < end:
            time.sleep(0.01)
        self.served.store.close(0.0)

    async def shutdown(self, sockets: Any = None) -> None:
        """Stops accepting; what runs is finished or, when the time is over, refused."""
        self.served.draining = True
        await super().shutdown(sockets)
        await asyncio.to_thread(self.served.close)
