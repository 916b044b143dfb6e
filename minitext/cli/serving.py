"""The commands that serve a model or talk to it, and say how fast that would be elsewhere.

Chapters: 24, 26.
"""

import contextlib
import io
import json
import signal
import socket
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from minitext import files
from minitext.cli.arguments import (
    Json,
    MaxModelLen,
    RunDir,
    Settings,
    Temperature,
    TopK,
    TopP,
    answer,
    check_run,
    load,
    refuse_options,
    start,
    take_target,
)
from minitext.config.sections import MeshConfig
from minitext.distributed.devices import simulate_for
from minitext.errors import UserError
from minitext.terminal import of_slow_work, show_bytes

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from minitext.config.config import Config
    from minitext.inference.engine import EngineOptions
    from minitext.inference.server import Served


def _check_key(api_key: str | None) -> str | None:
    if api_key is not None and not api_key.strip():
        raise UserError("the API key is empty: set one, or unset --api-key and MINITEXT_API_KEY")
    return api_key


ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="MINITEXT_API_KEY",
        help="what clients must send; better in the environment",
        callback=_check_key,
    ),
]

KvCacheDtype = Annotated[
    Literal["auto", "int8", "fp8"],
    typer.Option(help="type of what the cache holds; auto: the compute type"),
]
MaxTokensInFlight = Annotated[
    int, typer.Option(min=0, help="tokens of all these together; 0: what memory allows")
]
MaxBatch = Annotated[
    int, typer.Option(min=1, max=4096, help="of artefacts: rows computed together at most")
]
MaxWaitMs = Annotated[
    float,
    typer.Option(
        min=0, max=10_000, help="of artefacts: milliseconds that a request waits for others"
    ),
]
MaxBodyMb = Annotated[
    int, typer.Option(min=1, max=4096, help="of artefacts: MiB of a request at most")
]
ToServe = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN | ARTEFACT...",
        help="a run directory, or folders from export --format stablehlo, or folders of these",
        callback=lambda paths: [check_run(path) for path in paths],
    ),
]
# Options that only one kind of server has.
OF_ARTEFACTS = "max_batch", "max_wait_ms", "max_body_mb"
OF_RUNS = (
    "served_model_name", "adapter", "max_model_len", "max_num_seqs", "max_tokens_in_flight", "kv_cache_dtype",
    "tensor_parallel_size", "data_parallel_size", "speculate", "warm_up",
)  # fmt: skip

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=RUN: a run with adapters for this one's weights, as another model",
        metavar="NAME=RUN",
    ),
]


def _checked_name(name: str | None, longest: int, directory: Path) -> str:
    """Returns the model's name, once it is clear that it has one and that its texts have room for an answer."""
    if name is not None and not name.strip():
        raise UserError("--served-model-name is empty: give a name, or leave it out")
    if longest == 1:
        raise UserError(
            "--max-model-len 1 has no room for a prompt and an answer: choose 2 or more, or 0"
        )
    return name or directory.resolve().name


def serve(
    ctx: typer.Context,
    directories: ToServe,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0: all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one")] = 8000,
    api_key: ApiKey = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="name of the model; by default the run's")
    ] = None,
    adapter: Adapters = None,
    max_model_len: MaxModelLen = 0,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=256, help="texts that a replica continues at once")
    ] = 32,
    max_tokens_in_flight: MaxTokensInFlight = 0,
    kv_cache_dtype: KvCacheDtype = "auto",
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, max=1024, help="devices that share each copy of the model")
    ] = 1,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, max=1024, help="copies of the model (replicas)")
    ] = 1,
    speculate: Annotated[
        int, typer.Option(min=0, max=16, help="tokens guessed ahead by prompt look-up; 0: none")
    ] = 0,
    warm_up: Annotated[
        int, typer.Option(min=0, max=256, help="batch to compile for before the first request")
    ] = 1,
    max_queue: Annotated[int, typer.Option(min=1, help="requests that may wait; then 429")] = 256,
    max_batch: MaxBatch = 32,
    max_wait_ms: MaxWaitMs = 5.0,
    max_body_mb: MaxBodyMb = 16,
    drain_seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="for what runs when SIGTERM comes")
    ] = 30.0,
) -> None:
    """Serve a run to OpenAI's clients, with a web page to try it; or artefacts, by the Open Inference Protocol.

    Options that vLLM has too have its names. Without an accelerator, several devices are simulated.

    Any number of artefacts can be served, without the code of their models, and loaded or unloaded meanwhile.

    Stops on SIGTERM or Ctrl-C, after what runs is done. Needs the extra serve.
    """
    http_server, server = _modules()
    if _are_artefacts(directories):
        refuse_options(ctx, OF_RUNS, "on artefacts")
        limits = max_batch, max_wait_ms / 1000, max_body_mb << 20, max_queue
        return _serve_artefacts(directories, host, port, api_key, limits, drain_seconds)
    refuse_options(ctx, OF_ARTEFACTS, "on a run")
    directory = directories[0]
    listening = http_server.bind(host, port)
    sizes = MeshConfig(data=data_parallel_size, tensor=tensor_parallel_size)
    start(simulate_for(list(sizes.sizes().values()), None))
    from minitext.inference.engine import EngineOptions

    options = EngineOptions(
        max_sequences=max_num_seqs, max_waiting=max_queue, cache_tokens=max_tokens_in_flight,
        max_length=max_model_len, speculate=speculate, cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    name = _checked_name(served_model_name, max_model_len, Path(directory))
    adapters = _adapters(adapter or [], Path(directory), name)
    served, step = _load(Path(directory), name, options, _mesh(sizes), api_key, adapters)
    with of_slow_work(1.0, "compiling") as told:
        served.engine.warm_up(warm_up, lambda done, whole: told(done / max(whole, 1)))
    served.engine.start()
    http_server.listen(listening)
    _say_how(listening, served, step, kv_cache_dtype)
    http_server.serve(server.Server(served, drain_seconds), listening)


def _modules() -> tuple[Any, Any]:
    """Returns the modules `http_server` and `server`.

    Raises:
      UserError: a package is missing.
    """
    try:
        from minitext.inference import http_server, server
    except ImportError as error:
        raise UserError(f"serving needs {error.name}: pip install 'minitext[serve]'") from error
    return http_server, server


def _are_artefacts(directories: list[str]) -> bool:
    """Returns whether folders are artefacts, rather than one run.

    Raises:
      UserError: they are several runs, or both.
    """
    from minitext.training.run_dir import CHECKPOINTS, CONFIG

    runs = [path for path in directories if (Path(path) / CONFIG).is_file()]
    if runs and len(runs) < len(directories):
        other = next(path for path in directories if path not in runs)
        raise UserError(f"{runs[0]} is a run, and {other} isn't: serve runs and artefacts apart")
    if len(runs) > 1:
        raise UserError(f"{runs[0]} and {runs[1]} are runs: serve one, or export them as artefacts")
    # A run that lost its config isn't an artefact either; whatever reads it will say so.
    torn = any((Path(path) / CHECKPOINTS).is_dir() for path in directories)
    return not runs and not torn and any(map(_looks_like_artefacts, directories))


def _looks_like_artefacts(path: str) -> bool:
    from minitext.inference.artefact import MANIFEST

    return any(any(Path(path).glob(f"{depth}{MANIFEST}")) for depth in ("", "*/", "*/*/"))


def _serve_artefacts(
    directories: list[str],
    host: str,
    port: int,
    api_key: str | None,
    limits: tuple[int, float, int, int],
    drain_seconds: float,
) -> None:
    """Serves artefacts; `limits` are rows, seconds to wait for others, bytes of a request and requests under way."""
    from minitext.inference import http_server

    listening = http_server.bind(host, port)
    start()
    from minitext.inference import artefact_server
    from minitext.inference.batching import BatchSizes

    rows, seconds, most_body, most_waiting = limits
    served = artefact_server.Served(
        directories, BatchSizes(rows, seconds), api_key=api_key, most_body=most_body,
        most_waiting=most_waiting, drain_seconds=drain_seconds,
    )  # fmt: skip
    with of_slow_work(1.0, "loading"):
        served.store.load_all()
    http_server.listen(listening)
    found, bound = listening.getsockname()[:2]
    address = f"http://{f'[{found}]' if ':' in found else found}:{bound}"
    names = ", ".join(f"{m.found.name} {m.found.version}" for m in served.store.loaded())
    print(f"served at {address}/v2: {names}", file=sys.stderr)
    print(
        f"ask it: curl -X POST {address}/v2/repository/index; curl {address}/v2/models/NAME says what a model takes",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    http_server.serve(artefact_server.Server(served, drain_seconds), listening)


def chat(
    directory: RunDir,
    system: Annotated[str, typer.Option(help="message that goes before the conversation")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of an answer at most")] = 512,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="the same seed gives the same conversation")
    ] = 0,
) -> None:
    """Talk to a model that has a chat template. Lines from a pipe are answered one by one.

    Ctrl-C ends an answer, /new begins anew, and Ctrl-D or /exit ends the conversation.
    """
    start()
    from minitext.data.chat import read_chat
    from minitext.inference.conversation import Conversation
    from minitext.inference.engine import Engine, EngineOptions, seed_of
    from minitext.inference.generate import Sampling
    from minitext.training.interchange import longest_text
    from minitext.training.run_dir import PUBLISHED, load_run

    sampling = Sampling(temperature, top_k, top_p)
    sampling.check()
    run = Path(directory)
    cfg, params, tokenizer, _ = load_run(run)
    template = read_chat(run / PUBLISHED, tokenizer)
    template.check()
    options = EngineOptions(max_sequences=1, max_length=longest_text(cfg, run / PUBLISHED))
    engine = Engine(cfg.model, params, options)
    conversation = Conversation(engine, template, tokenizer, system)
    with contextlib.closing(conversation):
        for turn, line in enumerate(_lines()):
            if line == "/exit":
                return
            if line == "/new":
                conversation.forget()
                continue
            try:
                _print_answer(conversation.ask(
                    line, max_tokens=max_tokens, sampling=sampling, seed=seed_of(seed, turn)
                ))  # fmt: skip
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
            if conversation.forgotten:
                print(
                    f"(the first {conversation.forgotten} messages are forgotten: the model's texts have at most "
                    f"{engine.max_length:,} tokens)",
                    file=sys.stderr,
                )


def _lines() -> Iterator[str]:
    """Yields what somebody types, or the lines of a pipe, without empty ones."""
    person = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):  # what isn't text is no reason to stop
        sys.stdin.reconfigure(errors="replace")
    if person:
        import readline  # noqa: F401  edits the line and remembers earlier ones
    while True:
        try:
            line = input("> " if person else "").strip()
        except EOFError:
            print(end="\n" if person else "")
            return
        if line:
            yield line


def _print_answer(pieces: Generator[str]) -> None:
    """Prints an answer as it is written; Ctrl-C ends it."""
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                print(piece, end="", flush=True)
                if stopped:
                    break
        print()
    finally:
        signal.signal(signal.SIGINT, before)


def predict(
    settings: Settings = None,
    texts: Annotated[
        int, typer.Option(min=1, max=256, help="texts that a replica continues at once")
    ] = 32,
    context: Annotated[
        int, typer.Option(min=1, max=2**20, help="tokens that each has already")
    ] = 2048,
    prompt: Annotated[
        int, typer.Option(min=2, max=2**20, help="tokens of a new text's prompt")
    ] = 1024,
    kv_cache_dtype: KvCacheDtype = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile", help="compile the engine's programs for the target too")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict how fast `serve` would answer on chips you don't have: llama3-8b target=v5e:2x4.

    All devices share one copy of the model; with mesh.data=2 there are two replicas. Exits with 3 if it does not fit.
    """
    target, settings = take_target(settings)
    if target is None:
        raise UserError("name one target, such as target=v5e:2x4 or target=h100:1x8")
    cfg = load(settings, target)
    start()
    from minitext.perf import serving

    found = serving.predict_serving(
        cfg, target, texts=texts, context=context, prompt=prompt, cache_dtype=kv_cache_dtype, compile=compiled
    )  # fmt: skip
    answer(found, as_json, serving.print_serving)
    if not found.fits:
        raise typer.Exit(3)


def _adapters(given: list[str], run: Path, name: str) -> "dict[str, tuple[Config, Any]]":
    """Returns the configuration and the adapters of each run that is named, by the name of its model.

    Raises:
      UserError: for a name that is none or another model's, or a run that doesn't fit.
    """
    from minitext.training.run_dir import load_adapters, read_config

    found: dict[str, tuple[Config, Any]] = {}
    for text in given:
        called, separator, directory = text.partition("=")
        files.local_path(directory or text)
        if not (called and separator and directory):
            raise UserError(f"--adapter {text}: write NAME=RUN, such as --adapter tuned=runs/tuned")
        if called == name or called in found:
            raise UserError(
                f"--adapter {text}: another model is called {called}: choose another name"
            )
        if read_config(run).model.lora.rank:
            raise UserError(
                f"{run} has adapters of its own: serve the run that they were trained beside"
            )
        found[called] = load_adapters(directory, run)
        first, lora = next(iter(found.values()))[0].model.lora, found[called][0].model.lora
        if lora != first:
            raise UserError(
                f"--adapter {text}: its model.lora ({lora}) differs from the first adapter's ({first}), and an engine "
                "has adapters of one form: serve it by a process of its own, or merge it with minitext export"
            )
    return found


def _load(
    run: Path,
    name: str,
    options: "EngineOptions",
    mesh: "Mesh | None",
    api_key: str | None,
    adapters: "dict[str, tuple[Config, Any]]",
) -> "tuple[Served, int]":
    """Returns a run's model with an engine, and its step; `max_length` 0 is the longest it was trained for."""
    from minitext.data.chat import read_chat
    from minitext.inference.engine import Engine, check_mesh
    from minitext.inference.replicas import divide, make_replicas
    from minitext.inference.server import Served
    from minitext.inference.structured import guides
    from minitext.training.interchange import longest_text
    from minitext.training.run_dir import PUBLISHED, load_run, read_config

    shared = divide(mesh)[0] if mesh else None
    if shared is not None:
        check_mesh(read_config(run).model, shared)
    cfg, params, tokenizer, step = load_run(run, shared)
    chat = read_chat(run / PUBLISHED, tokenizer)
    longest = options.max_length or longest_text(cfg, run / PUBLISHED)
    options = replace(options, max_length=longest, adapters=len(adapters))
    model = cfg.model
    for theirs, _ in adapters.values():
        model = model.model_copy(update={"lora": theirs.model.lora})
    made = model, params, options, guides(tokenizer, cfg.model.vocab, chat.stops)
    engine = make_replicas(*made, mesh) if mesh else Engine(*made)
    for called, (_, weights) in adapters.items():
        engine.load_adapter(called, weights)
    return Served(name, engine, tokenizer, chat, api_key), step


def _mesh(sizes: MeshConfig) -> "Mesh | None":
    """Returns the devices that serve, or None for one device.

    Raises:
      UserError: if there are too few.
    """
    import jax

    from minitext.sharding.mesh import make_mesh

    count = sizes.data * sizes.tensor
    if count == 1:
        return None
    if count > len(jax.devices()):
        raise UserError(
            f"--data-parallel-size {sizes.data} and --tensor-parallel-size {sizes.tensor} need {count} devices, and "
            f"there are {len(jax.devices())}: choose smaller ones"
        )
    return make_mesh(sizes, jax.devices()[:count])


def _say_how(listening: socket.socket, served: "Served", step: int, kv_cache_dtype: str) -> None:
    found, port = listening.getsockname()[:2]
    address = f"http://{f'[{found}]' if ':' in found else found}:{port}"
    print(
        f"step {step} of {served.name} is served at {address}; the page to try it is {address}/",
        file=sys.stderr,
    )
    usage = served.engine.usage()
    print(
        f"its cache ({kv_cache_dtype}) has room for {usage.cache_tokens:,} tokens and takes "
        f"{show_bytes(usage.cache_bytes)}",
        file=sys.stderr,
    )
    chats = served.chat.template is not None
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if chats else {"prompt": "The "}
    key = ' -H "Authorization: Bearer $MINITEXT_API_KEY"' if served.api_key is not None else ""
    path = "chat/completions" if chats else "completions"
    print(
        f"ask it: curl {address}/v1/{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(asked)}'",
        file=sys.stderr, flush=True,
    )  # fmt: skip
