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
from typing import IO, Protocol

from minitext.errors import UserError

PATIENCE = 45.0  # seconds for the others to end by themselves, saying why, after one has failed
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FINAL = (0, 2, 3, 130)  # exit codes after which nothing is restarted: done, refused, interrupted


class Lines(Protocol):
    """Takes lines: a stream, or any object with these two of its methods."""

    def write(self, text: str, /) -> object:
        """Takes one line with its end."""
        ...

    def flush(self) -> object:
        """Passes on what it has taken."""
        ...


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
    job = Job()
    with job.forwarding_signals():
        for attempt in range(restarts + 1):
            job.start(command, processes, devices)
            while (ended := job.poll()) is None:
                time.sleep(0.05)
            code, index = ended
            end = f"process {index} of {processes} ended first, with {explain(code)}"
            if code in FINAL or job.asked_to_stop or attempt == restarts:
                break
            _say(f"{end}; restart {attempt + 1} of {restarts}")
    if code:
        _say(end)
    return code


class Job:
    """The processes of the current attempt. Whoever starts it calls `poll` many times a second until it has ended.

    Args:
      out, err: where the processes' lines go, each in one call of `write`; by default this process's own streams.
      patience: seconds for the others to end by themselves after one has failed; by default `PATIENCE`.
      program: what runs the command: arguments of Python.

    Attributes:
      running: the processes, by index.
      asked_to_stop: whether a signal has asked for the end, under `forwarding_signals`.
    """

    def __init__(
        self,
        out: Lines | None = None,
        err: Lines | None = None,
        patience: float | None = None,
        program: Sequence[str] = ("-m", "minitext"),
    ):
        self.running: list[subprocess.Popen] = []
        self.asked_to_stop = False
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._patience = PATIENCE if patience is None else patience
        self._program = program
        self._signals: list[int] = []  # to pass on once every process has started
        self._readers: list[threading.Thread] = []
        self._left: set[int] = set()
        self._failed: tuple[int, int] | None = None
        self._deadline = float("inf")

    def start(self, command: Sequence[str], processes: int, devices: int | None) -> None:
        """Starts all processes; the attempt before must have ended.

        Raises:
          UserError: if the system refuses one; those before it are killed.
        """
        port = free_port()
        self._left, self._failed, self._deadline = set(), None, float("inf")
        for index in range(processes):
            try:
                process = subprocess.Popen(
                    [sys.executable, *self._program, *command],
                    env=environment_of(os.environ, index, processes, port, devices),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # a terminal's Ctrl-C comes through this process alone
                )
            except OSError as error:
                self.end()
                raise UserError(
                    f"process {index} of {processes} cannot be started ({error.strerror}): choose fewer"
                ) from error
            self.running.append(process)
            self._left.add(index)
            for source, target in ((process.stdout, self._out), (process.stderr, self._err)):
                reader = threading.Thread(target=_copy, args=(source, target, f"[{index}] "))
                reader.start()
                self._readers.append(reader)

    def poll(self) -> tuple[int, int] | None:
        """Returns exit code and index of the first process to fail, or 0 and the last index; None while any runs."""
        while self._signals:
            number = self._signals.pop()
            for process in self.running:
                process.send_signal(number)
        for index in sorted(self._left):
            code = self.running[index].poll()
            if code is None:
                continue
            self._left.remove(index)
            if code and self._failed is None:
                self._failed = (code if code > 0 else 128 - code), index
                self._deadline = time.monotonic() + self._patience
        if time.monotonic() > self._deadline:
            self.kill()
        if self._left:
            return None
        ended = self._failed or (0, len(self.running) - 1)
        self._forget()
        return ended

    def kill(self) -> None:
        """Kills every process that still runs, a stopped one too."""
        for index in self._left:
            self.running[index].kill()

    def end(self) -> None:
        """Kills all processes and waits until they are gone; does nothing after the end."""
        self.kill()
        for process in self.running:
            process.wait()
        self._left = set()
        self._forget()

    def _forget(self) -> None:
        for reader in self._readers:
            reader.join()
        self.running, self._readers, self._signals = [], [], []

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Passes the signals of `FORWARDED` on to every process."""

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


def _copy(source: IO[bytes], target: Lines, prefix: str) -> None:
    for line in source:
        target.write(prefix + line.decode(errors="replace"))
        target.flush()


def explain(code: int) -> str:
    """Returns an exit code for messages, with the name of the signal that it stands for."""
    with contextlib.suppress(ValueError):  # not a signal
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
