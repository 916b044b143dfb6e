"""A job of several processes on this machine, each with simulated devices or its own GPU.

Chapters: 21.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

PATIENCE = 45.0  # seconds for the others to end by themselves, saying why, after one has failed
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FINAL = (0, 2, 3, 130)  # exit codes after which nothing is restarted: done, refused, interrupted


def launch(
    command: Sequence[str], *, processes: int, devices: int | None = None, restarts: int = 0
) -> int:
    """Runs `minitext COMMAND` as several processes until all have ended.

    Their lines appear as `[0] ...` on the stream they were written to. SIGTERM, SIGINT and SIGUSR1 go to all of them.
    When one fails, the others have `PATIENCE` to end before they are killed.

    Args:
      command: words after `minitext`.
      processes: to start.
      devices: CPU devices that each simulates; None: the GPU with its index if there are GPUs, else one CPU device.
      restarts: how often the job may be started again after a failure; a run with a name then resumes.

    Returns:
      The exit code of the process that failed first, 128 plus the signal's number if it was killed; or 0.
    """
    job = _Job()
    with job.forwarding_signals():
        for attempt in range(restarts + 1):
            code, index = job.run(command, processes, devices)
            end = f"process {index} of {processes} ended first, with {_explain(code)}"
            if code in FINAL or job.asked_to_stop or attempt == restarts:
                break
            _say(f"{end}; restart {attempt + 1} of {restarts}")
    if code:
        _say(end)
    return code


class _Job:
    """The processes of the current attempt."""

    def __init__(self):
        self.running: list[subprocess.Popen] = []
        self.asked_to_stop = False
        self._signals: list[int] = []  # to pass on once every process has started

    def run(self, command: Sequence[str], processes: int, devices: int | None) -> tuple[int, int]:
        """Runs all processes; returns the exit code and index of the first that failed, or 0 and the last index."""
        port, readers = free_port(), []
        for index in range(processes):
            process = subprocess.Popen(
                [sys.executable, "-m", "minitext", *command],
                env=environment_of(os.environ, index, processes, port, devices),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C comes through this process alone
            )
            self.running.append(process)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                reader = threading.Thread(target=_copy, args=(source, target, f"[{index}] "))
                reader.start()
                readers.append(reader)
        failed, index = self._wait()
        for reader in readers:
            reader.join()
        self.running, self._signals = [], []
        return failed, index

    def _wait(self) -> tuple[int, int]:
        left, failed, deadline = set(range(len(self.running))), None, float("inf")
        while left:
            while self._signals:
                number = self._signals.pop()
                for process in self.running:
                    process.send_signal(number)
            for index in sorted(left):
                code = self.running[index].poll()
                if code is None:
                    continue
                left.remove(index)
                if code and failed is None:
                    failed = (code if code > 0 else 128 - code), index
                    deadline = time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                for index in left:
                    self.running[index].kill()
            time.sleep(0.05)
        return failed or (0, len(self.running) - 1)

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        def forward(number: int, _):
            self.asked_to_stop |= number != signal.SIGUSR1
            self._signals.append(number)

        before = {number: signal.signal(number, forward) for number in FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def environment_of(
    env: Mapping[str, str], index: int, processes: int, port: int, devices: int | None
) -> dict[str, str]:
    """Returns the environment of process `index`, for the explicit row of `cluster`'s table.

    Args:
      env: this process's environment.
      index: of the process.
      processes: in the job.
      port: of the coordinator, on this machine.
      devices: CPU devices it simulates; None: it takes the GPU with its index.
    """
    old = ("MINITEXT_CLUSTER", "MINITEXT_LOCAL_", "MINITEXT_PROCESS")
    kept = {name: value for name, value in env.items() if not name.startswith(old)}
    own = {"MINITEXT_LOCAL_DEVICE_IDS": str(index)}
    if devices is not None:
        own = {"MINITEXT_LOCAL_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    return kept | own | {
        "MINITEXT_COORDINATOR": f"127.0.0.1:{port}",
        "MINITEXT_PROCESSES": str(processes),
        "MINITEXT_PROCESS_ID": str(index),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def free_port() -> int:
    """Returns a port of this machine that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _copy(source: IO[bytes], target: IO[str], prefix: str) -> None:
    for line in source:
        target.write(prefix + line.decode(errors="replace"))
        target.flush()


def _explain(code: int) -> str:
    with contextlib.suppress(ValueError):  # not a signal
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
