"""The command that serves a model.

Chapters: 24.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from minitext.cli.arguments import RunDir, start
from minitext.errors import UserError


def serve(
    directory: RunDir,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0: all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MINITEXT_API_KEY", help="what clients must send; better in the environment"
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="of the model; by default the run's")] = None,
    max_length: Annotated[
        int,
        typer.Option(min=0, help="tokens of a text, prompt included; 0: as the model was trained"),
    ] = 0,
    max_sequences: Annotated[
        int, typer.Option(min=1, max=256, help="texts continued at once")
    ] = 32,
    max_tokens_in_flight: Annotated[
        int, typer.Option(min=0, help="tokens of all these together; 0: what memory allows")
    ] = 0,
    max_queue: Annotated[int, typer.Option(min=1, help="texts that may wait; then 429")] = 256,
    drain_seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="for what runs when SIGTERM comes")
    ] = 30.0,
) -> None:
    """Serve a model to OpenAI's clients, with a web page to try it.

    Stops on SIGTERM or Ctrl-C, after what runs is done. Needs the extra serve.
    """
    try:
        from minitext.inference import server
    except ImportError as error:
        raise UserError(f"serving needs {error.name}: pip install 'minitext[serve]'") from error
    if api_key is not None and not api_key.strip():
        raise UserError(
            "the API key is empty: give one, or leave --api-key and MINITEXT_API_KEY out"
        )
    listening = server.bind(host, port)
    start()
    from minitext.inference.chat import read_chat
    from minitext.inference.engine import Engine, EngineOptions
    from minitext.inference.structured import guides
    from minitext.training import run_dir
    from minitext.training.interchange import longest_text
    from minitext.training.run_dir import PUBLISHED

    cfg, params, tokenizer, step = run_dir.load_run(directory)
    published = Path(directory) / PUBLISHED
    chat = read_chat(published, tokenizer)
    options = EngineOptions(
        max_sequences=max_sequences, max_waiting=max_queue, cache_tokens=max_tokens_in_flight,
        max_length=max_length or longest_text(cfg, published),
    )  # fmt: skip
    engine = Engine(cfg.model, params, options, guides(tokenizer, cfg.model.vocab, chat.stops))
    name = name or Path(directory).resolve().name
    served = server.Served(name, engine, tokenizer, chat, api_key)
    engine.start()
    server.listen(listening)
    found = listening.getsockname()
    address = f"http://{f'[{found[0]}]' if ':' in found[0] else found[0]}:{found[1]}"
    _say_how(address, name, step, chat.template is not None, api_key is not None)
    server.serve(server.Server(served, drain_seconds), listening)


def _say_how(address: str, name: str, step: int, chats: bool, keyed: bool) -> None:
    print(
        f"step {step} of {name} is served at {address}; the page to try it is {address}/",
        file=sys.stderr,
    )
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if chats else {"prompt": "The "}
    key = ' -H "Authorization: Bearer $MINITEXT_API_KEY"' if keyed else ""
    path = "chat/completions" if chats else "completions"
    print(
        f"ask it: curl {address}/v1/{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(asked)}'",
        file=sys.stderr, flush=True,
    )  # fmt: skip
