"""Starts a worker process, watches the time and memory of it and its children, and kills them all."""

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import psutil

from minitext.book.grading.registry import PACKAGE

POLL_SECONDS = 0.05
STARTUP_SECONDS = 120.0  # for imports, on a machine that is busy with other answers
PATIENCE = 3.0  # wall time allowed, in multiples of the limit, while CPU time stays below it
OUTPUT_BYTES = 2_000  # kept of an answer's output; all of it is read, so the answer never blocks
GIB = 2**30


class Worker:
    """One child process and its messages.

    The arguments are its job, the number of devices it simulates, its limits, and a folder for compiled programs (""
    for none).

    Attributes:
        messages: its messages, in order.
        output: the last part of what it printed.
        death: why it ended before it was done, worded for the learner; "" if it finished.
    """

    def __init__(
        self, job: dict[str, Any], devices: int, seconds: float, memory_gib: float, cache: str
    ):
        self.messages: list[dict[str, Any]] = []
        self.output = ""
        self.death = ""
        self._job = job
        self._devices, self._seconds, self._memory = devices, seconds, memory_gib
        self._cache = cache
        self._reply = b""
        self._stage_began = time.monotonic()
        self._stage_cpu: float | None = None

    def run(self, stop: threading.Event) -> "Worker":
        """Starts the process, waits for it to end, and kills whatever is left of it."""
        read, write = os.pipe()
        with tempfile.TemporaryDirectory(prefix="minitext-grade-") as folder:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "minitext.book.grading.worker", str(write)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=_environment(self._devices, self._cache) | {"TMPDIR": folder},
                cwd=folder,
                start_new_session=True,
            )
            os.close(write)
            try:
                self._give_job(process)
                self._watch(process, read, stop)
            finally:
                _kill(process)
                os.close(read)
        return self

    def _give_job(self, process: subprocess.Popen) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died immediately; _watch will report why
            process.stdin.write(json.dumps(self._job).encode())
            process.stdin.close()

    def _watch(self, process: subprocess.Popen, read: int, stop: threading.Event) -> None:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            os.set_blocking(read, False)
            os.set_blocking(process.stdout.fileno(), False)
            selector.register(read, selectors.EVENT_READ)
            selector.register(process.stdout, selectors.EVENT_READ)
            looked = 0.0
            while not self.death:
                for key, _ in selector.select(POLL_SECONDS):
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fd == read:
                        self._hear(data)
                    else:
                        self._overhear(data)
                if self._last() == "done":
                    return
                if process.poll() is not None:
                    self._hear(_rest(read))
                    self._overhear(_rest(process.stdout.fileno()))
                    if self._last() != "done":
                        self.death = how_it_ended(process.returncode)
                    return
                if stop.is_set():
                    self.death = "interrupted"
                if time.monotonic() - looked >= POLL_SECONDS:
                    looked = time.monotonic()
                    self._check_limits(process.pid)

    def _last(self) -> str:
        return self.messages[-1]["kind"] if self.messages else ""

    def _hear(self, data: bytes) -> None:
        *lines, self._reply = (self._reply + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.messages.append(message)
            if message["kind"] != "check":  # each stage gets the full time
                self._stage_began, self._stage_cpu = time.monotonic(), None

    def _overhear(self, data: bytes) -> None:
        self.output = (self.output + data.decode("utf-8", "replace"))[-OUTPUT_BYTES:]

    def _check_limits(self, pid: int) -> None:
        limit = self._seconds if self.messages else STARTUP_SECONDS
        resident = cpu = 0.0
        family = _family(pid)
        for process in family:
            with contextlib.suppress(psutil.Error):
                resident += process.memory_info().rss
                cpu += sum(process.cpu_times()[:2])
        if self._stage_cpu is None:
            self._stage_cpu = cpu
        wall = time.monotonic() - self._stage_began
        # An answer that had to share the cores with others gets extra time.
        if wall > limit and (cpu - self._stage_cpu > limit or wall > PATIENCE * limit):
            self.death = f"took longer than {limit:.0f} s"
        # Resident memory counts shared pages in each process; dividing them halts a process for milliseconds.
        if resident > self._memory * GIB and _own_memory(family) > self._memory * GIB:
            self.death = f"used more than {self._memory:g} GiB of memory"


def _own_memory(family: list[psutil.Process]) -> float:
    """Bytes of the memory of processes; what they share is divided between them, where the system tells."""
    total = 0.0
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                total += process.memory_full_info().pss  # Linux
            except (psutil.AccessDenied, AttributeError):
                total += process.memory_info().rss
    return total


def _environment(devices: int, cache: str) -> dict[str, str]:
    """The worker's environment: CPU only, with `devices` simulated devices, and minitext importable."""
    env = dict(os.environ)
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # what one answer leaves there could affect another
    if cache:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", env.get("XLA_FLAGS", ""))
    if devices > 1:
        flags += f" --xla_force_host_platform_device_count={devices}"
    paths = [str(PACKAGE.parent), *filter(None, [env.get("PYTHONPATH")])]
    return env | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONIOENCODING": "utf-8:replace",
        "XLA_FLAGS": flags.strip(),
    }


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def children() -> list[psutil.Process]:
    """The calling process's children and theirs, also those adopted."""
    return _family(os.getpid())[1:]


def _kill(process: subprocess.Popen) -> None:
    """Kills the worker and all that it and its children started, in whatever group or session they are."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(
            process.pid, signal.SIGSTOP
        )  # it adopts orphans as long as it lives, so they can be found
    while len(family := _family(process.pid)) > 1 and any(end(member) for member in family[1:]):
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def end(process: psutil.Process) -> bool:
    """Kills a process; False if it has ended and only waits to be collected."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        process.kill()
        return True
    except psutil.Error:
        return False


def _rest(fd: int) -> bytes:
    """What is left in the pipe of a worker that has ended."""
    data = b""
    while True:
        try:
            more = os.read(fd, 65536)
        except BlockingIOError:
            return data
        if not more:
            return data
        data += more


def how_it_ended(code: int) -> str:
    """A sentence for the learner; a negative code is a signal's number."""
    if code >= 0:
        return f"the process ended with exit code {code} before it was graded"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"the process was killed by {name} before it was graded"
