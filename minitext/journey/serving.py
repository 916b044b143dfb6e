"""Serving a run in a process of its own, and asking it as a client would: over HTTP, with OpenAI's library."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minitext.errors import UserError

START_SECONDS, STOP_SECONDS = 600.0, 60.0
LONGEST = 64  # tokens of a question and its answer
# `minitext serve`, which ends as if by SIGTERM when its stdin closes. However this process ends, the server follows
# within moments.
PROGRAM = """
import os, runpy, signal, sys, threading
def watch():
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
runpy.run_module("minitext", run_name="__main__")
"""


@contextlib.contextmanager
def served(directory: Path, name: str) -> Iterator[str]:
    """Serves a run on a free port, and yields its address; the server is shut down at the end of the block.

    Raises:
      UserError: if the server doesn't start, or fails to end.
    """
    # GRPO's rows, the last that the model was trained on, have no room for other questions than sums.
    words = [
        "serve", str(directory), "--port", "0", "--served-model-name", name, "--max-num-seqs", "4",
        "--max-model-len", str(LONGEST),
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    lines: list[str] = []
    try:
        yield _address(process, lines)
        assert process.stdin is not None
        process.stdin.close()
        if code := process.wait(STOP_SECONDS):
            raise UserError(f"minitext serve ended with exit code {code}: {_last(lines)}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _address(process: "subprocess.Popen[str]", lines: list[str]) -> str:
    """Returns the address that a server prints when it is ready, and goes on reading what it prints."""
    found, ready = [], threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip())
            if match := re.search(r"is served at (http://\S+?);", line):
                found.append(match[1])
                ready.set()
        ready.set()  # it ended

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(START_SECONDS) or not found:
        raise UserError(f"minitext serve did not start: {_last(lines)}")
    return found[0]


def _last(lines: Sequence[str]) -> str:
    return lines[-1] if lines else "it printed nothing"


def ask_client(address: str, name: str, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Asks questions one after another, and takes greedy answers.

    Args:
      address: of the server.
      name: of its model.
      prompts: what the user says.

    Returns:
      For each `question`, `answer`, and `seconds` until it was there.
    """
    from openai import DefaultHttpxClient, OpenAI

    found, direct = [], DefaultHttpxClient(trust_env=False)  # a proxy doesn't reach this machine
    with OpenAI(base_url=f"{address}/v1", api_key="none", http_client=direct) as client:
        for prompt in prompts:
            began = time.perf_counter()
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=16
            )  # fmt: skip
            seconds = time.perf_counter() - began
            text = answer.choices[0].message.content or ""
            found.append({"question": prompt, "answer": text.strip(), "seconds": seconds})
    return found
