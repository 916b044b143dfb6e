"""Real processes for exercises about several processes: a check starts them, joins them into one JAX job and ends them.

Each is a pair like the one that grades any answer: a process that runs the check's body, and one that runs the answer
for it. The deciding processes are one JAX job, the answering ones another, so a sharding means the same in both.
"""

import base64
import contextlib
import dataclasses
import functools
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from minitext.book.grading import answering, confine
from minitext.book.grading.registry import PACKAGE
from minitext.book.grading.remote import End, Remote
from minitext.book.grading.trial import Failure
from minitext.book.grading.watch import Watched
from minitext.distributed.devices import compile_quickly

STARTUP_SECONDS = 90.0  # for imports and connecting, on a busy machine
GRACE_SECONDS = 1.5  # after one has failed, for the others to end by themselves


@dataclasses.dataclass
class Peer:
    """What one process did.

    Attributes:
        said: what it passed to `say`, in order.
        value: what it returned, if it did.
        done: whether it returned.
        error: the exception that ended it, as (name of its type, message), or None.
    """

    said: list[Any] = dataclasses.field(default_factory=list)
    value: Any = None
    done: bool = False
    error: tuple[str, str] | None = None


_COMMAND = [sys.executable, "-P", "-m", "minitext.book.grading.peers"]
# The job whose answer the processes run; None where the answer is trusted and travels with the body.
answer: dict[str, Any] | None = None


def _environment() -> dict[str, str]:
    """CPU only, and without a proxy, which gRPC would ask for the others; the job sets the number of devices."""
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "TF_CPP_MIN_LOG_LEVEL": "3",  # or the others' C++ code logs a page when a process dies
        "XLA_FLAGS": flags.strip(),
    }


def run_in_processes(
    body: Callable, fn: Any, *args: Any, processes: int = 2, devices: int = 1, seconds: float = 20
) -> list[Peer]:
    """Runs `body(say, fn, *args)` in each of several new processes that are one JAX job.

    Args:
        body: a check's own function. `say(x)` sends x to the check immediately, in case the process is killed later.
        fn: the answer.
        *args: arguments, which must be picklable.
        processes: number of processes.
        devices: number of simulated CPU devices of each process.
        seconds: wall-clock time for the body, without start-up; after that all processes are ended.

    Returns:
        What each process did. One that was ended before it returned is not `done` and has no error.

    Raises:
        NotImplementedError: the stub's own.
    """
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is not None and not hasattr(module, "__file__") and module.__name__ != "__main__":
        # The other processes can't import a learner's file.
        cloudpickle.register_pickle_by_value(module)
    far = isinstance(getattr(fn, "_fn", fn), Remote)
    job = cloudpickle.dumps((body, None if far else fn, args, answer if far else None))
    started = [_start() for _ in range(processes)]
    try:
        ports = [_port(process) for process in started]
        if processes == 1:
            ports += [0]
        for index, process in enumerate(started):
            head = f"{ports[0]} {ports[1]} {processes} {index} {devices} {len(job)}\n"
            with contextlib.suppress(BrokenPipeError):
                _write(process, head.encode() + job)
        peers = _listen(started, seconds)
    finally:
        for process in started:
            with contextlib.suppress(BrokenPipeError):
                _end(process)
    for peer in peers:
        if peer.error and peer.error[0] == "NotImplementedError":
            raise NotImplementedError(peer.error[1])
    return peers


def returned(peers: Sequence[Peer]) -> list[Any]:
    """The return values of all processes.

    Raises:
        Failure: if one raised or didn't return in time; the message says which.
    """
    for index, peer in enumerate(peers):
        if peer.error:
            kind, text = peer.error
            told = f"process {index} of {len(peers)} raised {kind}: {text}"
            raise Failure(told, ("raised", kind, text))
    waiting = [index for index, peer in enumerate(peers) if not peer.done]
    if waiting:
        named = " and ".join(map(str, waiting))
        told = (
            f"of {len(peers)} processes, {named} did not return in time: they wait for each other"
        )
        raise Failure(told, ("waiting", waiting))
    return [peer.value for peer in peers]


def _start() -> subprocess.Popen:
    return subprocess.Popen(
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
    )


def _port(process: subprocess.Popen) -> int:
    """A port that was free a moment ago, reported by a process at its start."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def _write(process: subprocess.Popen, data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()


def _end(process: subprocess.Popen) -> None:
    """Closes the pipe that the process watches, so it exits."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _listen(started: list[subprocess.Popen], seconds: float) -> list[Peer]:
    """Listens to all processes until each has ended, one has failed, or time is up."""
    peers = [Peer() for _ in started]
    heard: queue.Queue = queue.Queue()
    for index, process in enumerate(started):
        threading.Thread(target=_hear, args=(index, process, heard), daemon=True).start()
    running, ready = set(range(len(started))), 0
    deadline = time.monotonic() + STARTUP_SECONDS
    while running:
        try:
            index, kind, value = heard.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if kind == "ready":
            ready += 1
            if ready == len(started):
                deadline = time.monotonic() + seconds
        elif kind == "say":
            peers[index].said.append(value)
        else:
            running.discard(index)
            if kind == "return":
                peers[index].value, peers[index].done = value, True
            elif kind == "raise":
                peers[index].error = value
            if not peers[index].done:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return peers


def _hear(index: int, process: subprocess.Popen, heard: queue.Queue) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        heard.put((index, *cloudpickle.loads(base64.b64decode(line))))
    heard.put((index, "end", None))


def main() -> None:
    """The new process: reports a free port, gets its job, joins the others, runs the job and reports the outcome."""
    pipe = os.fdopen(os.dup(1), "wb")
    # What an answer prints is passed on; the output of gloo and gRPC would only confuse its author.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        pipe.write(b"%d\n" % probe.getsockname()[1])
        pipe.flush()
    port, other, processes, index, devices, size = map(int, sys.stdin.buffer.readline().split())
    body, fn, args, far = cloudpickle.loads(sys.stdin.buffer.read(size))
    compile_quickly()
    connection = None
    if far is not None:
        join = functools.partial(_join, other, processes, index, devices)
        _, connection = answering.start(far, join)
        confine.adopt_orphans()
    threading.Thread(target=_until_closed, daemon=True).start()
    _join(port, processes, index, devices)
    if far is not None and connection is not None:
        fn = remote_function(far, connection)
    lock = threading.Lock()

    def send(kind: str, value: Any = None) -> None:
        with lock:
            pipe.write(base64.b64encode(cloudpickle.dumps((kind, value))) + b"\n")
            pipe.flush()

    send("ready")
    try:
        send("return", body(lambda x: send("say", x), fn, *args))
    except BaseException as error:
        send("raise", (type(error).__name__, _first_line(error)))
    threading.Event().wait()  # until all have said what they did: the first to leave would end the others


def remote_function(job: dict[str, Any], connection: socket.socket) -> Any:
    """The function of an answering process, watched as the exercise asks."""
    words = frozenset(job["words"])
    fn = End(connection, trusted=True, readable=words.__contains__).loaded()
    return Watched(fn)


def _until_closed() -> None:
    sys.stdin.buffer.read(1)
    os._exit(0)


def _join(port: int, processes: int, index: int, devices: int) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, processes, index, coordinator_bind_address=address)
    assert len(jax.devices()) == processes * devices


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


if __name__ == "__main__":
    main()
