"""Several processes as one job: joining it, agreeing in it, and leaving it together.

`start` joins the job that `cluster.find_cluster` finds. From then on a heartbeat runs: when a process is lost, every
other one ends with one line on stderr and exit code 1. `finish` leaves: a process that is done waits for the others,
one that fails tells them why. In between, `barrier`, `share` and `agree` use JAX's coordination service and give the
devices no work. A process on its own agrees with itself.

Chapters: 21.
"""

import atexit
import contextlib
import ctypes
import json
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from minitext.distributed import heartbeat
from minitext.distributed.cluster import Cluster, find_cluster
from minitext.errors import UserError

PROXY = "grpc_proxy"  # the variable that gRPC reads first; empty: none
START_SECONDS = 300  # for all processes to come up
_SETTLE = 1.0  # seconds for everything else to be printed before our line


class JobFailed(UserError):
    """The job can't go on because of another process: the message is one line that names it."""

    exit_code = 1


@dataclass
class _Job:
    index: int
    processes: int
    client: Any  # of JAX's coordination service
    heart: heartbeat.Heartbeat
    hosts: list[str] = field(default_factory=list)
    rounds: Counter = field(default_factory=Counter)  # how often each name was used
    advice: str = ""
    folder: Path | None = None


_job: _Job | None = None


def start(cluster: Cluster | None = None, seconds: int = START_SECONDS) -> None:
    """Joins the job this process belongs to, if any; must come before JAX starts its backends.

    Calling it again does nothing.

    Args:
      cluster: the job; by default the one that the environment describes.
      seconds: how long to wait for the other processes.

    Raises:
      UserError: if the environment contradicts itself, or the coordinator can't have its port.
      JobFailed: if the coordinator doesn't answer or a process doesn't come.
    """
    global _job
    if _job is not None or (cluster := cluster or find_cluster()) is None:
        return
    if cluster.index == 0 and cluster.coordinator is not None:
        _check_port(cluster.coordinator)
    import jax
    from jax._src import distributed as service  # the client has no public name

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # accelerators ignore it
    jax.config.update("jax_check_proxy_envs", False)  # `_without_proxy` sees to it
    _delay_aborts()
    me = f"process {cluster.index} of {cluster.processes}" if cluster.processes else "this process"
    failed = (
        f"{me} could not join the job at {cluster.coordinator or 'the address JAX found'} within {seconds} s: check "
        "that every process was started and can reach that address"
    )
    # When its own time is over, JAX aborts without saying so.
    timer = threading.Timer(seconds, _end, [failed])
    timer.daemon = True
    timer.start()
    try:
        with _without_proxy():
            jax.distributed.initialize(**_arguments(cluster, seconds + 60))
    except (RuntimeError, ValueError) as error:
        raise JobFailed(f"{failed} ({heartbeat.one_line(str(error))})") from error
    finally:
        timer.cancel()
    state = service.global_state
    if state.num_processes == 1:
        return
    _job = _Job(
        state.process_id, state.num_processes, state.client, _start_heartbeat(state, seconds)
    )
    _job.hosts = share("host", os.uname().nodename, seconds)
    # A script may end without `finish`; the interpreter keeps the error that ended it.
    atexit.register(lambda: finish(getattr(sys, "last_value", None)))


def joined() -> bool:
    """Returns whether this process is one of several."""
    return _job is not None


def is_first() -> bool:
    """Returns whether this is process 0, or the only one: it writes what must be written once."""
    return _job is None or _job.index == 0


def name_of(index: int) -> str:
    """Returns a process's name for messages: `process 1 of 4 (node02)`."""
    if _job is None:
        return "process 0 of 1"
    host = f" ({_job.hosts[index]})" if _job.hosts else ""
    return f"process {index} of {_job.processes}{host}"


def advise(advice: str, folder: Path) -> None:
    """Prepares for the loss of a process.

    Args:
      advice: the end of the line that is printed then, such as `resume with: ...`.
      folder: where what JAX prints then goes.
    """
    if _job is not None:
        _job.advice, _job.folder = advice, folder


def barrier(name: str, seconds: float = START_SECONDS) -> None:
    """Waits until every process is here: a `share` of nothing."""
    share(name, "", seconds)


def agree(name: str, value: int, seconds: float = START_SECONDS) -> list[int]:
    """Returns the numbers of all processes, by index: a `share` of numbers."""
    return [int(text) for text in share(name, str(value), seconds)]


def share(name: str, text: str, seconds: float = START_SECONDS) -> list[str]:
    """Returns the texts of all processes, by index, once all have called it: it's a barrier too.

    All processes must make the same calls in the same order.

    Raises:
      JobFailed: if some processes don't come in time: it names them.
    """
    job = _job
    if job is None:
        return [text]
    import jax

    def shared() -> dict[int, str]:
        found = job.client.key_value_dir_get(key)
        return {int(path.rpartition("/")[2]): json.loads(text) for path, text in found}

    turn = job.rounds[name]
    job.rounds[name] += 1
    key = f"minitext/{name}/{turn}"
    job.client.key_value_set(f"{key}/{job.index}", json.dumps(text))
    try:
        job.client.wait_at_barrier(key, int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        missing = sorted(set(range(job.processes)) - shared().keys())
        names = ", ".join(name_of(index) for index in missing) or heartbeat.one_line(str(error))
        raise JobFailed(f"waited {seconds:g} s at {name!r} in vain for {names}{_tail()}") from error
    texts = shared()
    if turn:  # all processes are here, so none still reads the round before
        job.client.key_value_delete(f"minitext/{name}/{turn - 1}/{job.index}")
    return [texts[index] for index in range(job.processes)]


class Board:
    """Holds one word that any process may write once and all can read without waiting."""

    def __init__(self, client: Any, key: str):
        self._client, self._key = client, key

    def put(self, word: str) -> None:
        """Writes the word unless one is there; every process can read it when this returns."""
        import jax

        with contextlib.suppress(jax.errors.JaxRuntimeError):  # one is there
            self._client.key_value_set(f"{self._key}/word", word)

    def get(self) -> str | None:
        """Returns the word, or None while there is none. It takes about a tenth of a millisecond."""
        return next((word for _, word in self._client.key_value_dir_get(self._key)), None)


def board(name: str) -> Board | None:
    """Returns a new board that all processes share, or None alone. All make the same calls in the same order."""
    if _job is None:
        return None
    _job.rounds[name] += 1
    return Board(_job.client, f"minitext/{name}/{_job.rounds[name]}")


def finish(error: BaseException | None = None) -> None:
    """Leaves the job; does nothing alone.

    Without an error it waits until all processes are done. With one it tells the others why and exits at once with
    the error's exit code, because returning would wait for processes that wait for this one. If the error only follows
    from the loss of another process, the heartbeat prints the last line instead.

    Args:
      error: what ends this process; a `SystemExit` with code 0 isn't an error.
    """
    global _job
    if _job is None:
        return
    code, why = 1, f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        why = f"exit code {code}"
    if error is None or code == 0:
        if not _job.heart.leave():
            time.sleep(60)  # the heartbeat is about to end this process
        import jax

        jax.distributed.shutdown()
        _job = None
        return
    if isinstance(error, UserError):
        code = error.exit_code
    elif not isinstance(error, SystemExit):
        time.sleep(_SETTLE + heartbeat.GRACE)  # if another process is lost, this one ends here
        traceback.print_exception(error)
    _job.heart.fail(why)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def abort(why: str) -> NoReturn:
    """Ends this process with one line and exit code 1, after telling the rest of its job why, from any thread."""
    if _job is not None:
        _job.heart.fail(why)
    _end(why)


def _check_port(coordinator: str) -> None:
    """Opens the coordinator's port and closes it again: where that fails, JAX's C++ server crashes (SIGSEGV)."""
    host, _, port = coordinator.rpartition(":")
    try:
        heartbeat.open_server(host, int(port)).close()
    except OSError as error:
        raise UserError(
            f"process 0 cannot open port {port} for the coordinator {coordinator} ({error.strerror}): end what has "
            "the port, or give all processes another one"
        ) from error


def _arguments(cluster: Cluster, seconds: int) -> dict[str, Any]:
    """Returns the arguments of `jax.distributed.initialize`, whose own heartbeat stays slower than ours."""
    common = {"initialization_timeout": seconds, "shutdown_timeout_seconds": 60}
    if cluster.coordinator is None:
        return common
    host, _, port = cluster.coordinator.rpartition(":")
    return common | {
        "coordinator_address": cluster.coordinator,
        "coordinator_bind_address": f"{host if host in heartbeat.LOCAL else '[::]'}:{port}",
        "num_processes": cluster.processes,
        "process_id": cluster.index,
        "local_device_ids": cluster.local_device_ids,
        "cluster_detection_method": "deactivate",
    }


@contextlib.contextmanager
def _without_proxy() -> Iterator[None]:
    """Has gRPC reach the coordinator directly: it would ask the proxy in http_proxy or https_proxy."""
    before = os.environ.get(PROXY)
    os.environ[PROXY] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[PROXY]
        else:
            os.environ[PROXY] = before


def _start_heartbeat(state: Any, seconds: int) -> heartbeat.Heartbeat:
    """Connects this process to process 0, which leaves its port and a secret in the coordination service."""
    key, host = "minitext/heartbeat", state.coordinator_address.rpartition(":")[0].strip("[]")
    rest = state.process_id, state.num_processes, os.uname().nodename, _lost
    if state.process_id == 0:
        server, token = heartbeat.open_server(host), secrets.token_hex(16)
        state.client.key_value_set(key, f"{server.getsockname()[1]} {token}")
        heart = heartbeat.Hub(server, token, *rest)
    else:
        port, token = state.client.blocking_key_value_get(key, seconds * 1000).split()
        try:
            heart = heartbeat.Member((host, int(port)), token, *rest)
        except OSError as error:
            raise JobFailed(
                f"process {state.process_id} of {state.num_processes} cannot reach port {port} of {host} ({error}): "
                "let the processes of a job connect to each other on all ports"
            ) from error
    heart.start()
    return heart


def _lost(line: str) -> NoReturn:
    """Ends this process because another was lost; called by the heartbeat's thread.

    JAX's C++ client notices at the same moment, and prints a dozen lines before it aborts. They go into a file, so that
    ours stay together; those that it has printed already are between them.
    """
    os.write(2, f"{line}; this process ends too\n".encode())
    stderr, aside = os.dup(2), ""
    if _job is not None and _job.folder is not None:
        path = _job.folder / f"{_job.index}-lost.txt"
        with contextlib.suppress(OSError):  # there may be no run directory yet, or no disk any more
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                os.dup2(file.fileno(), 2)
            aside = f"; what JAX says of it is in {path}"
    time.sleep(_SETTLE)
    os.dup2(stderr, 2)
    _end(f"{line}{aside}")


def _end(line: str) -> NoReturn:
    """Ends this process with one line, from any thread."""
    shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
    # Not through sys.stderr, which the main thread may hold.
    os.write(2, f"{shown}error: {line}{_tail()}\n".encode())
    os._exit(1)


def _delay_aborts() -> None:
    """Gives the heartbeat time to say who was lost.

    When the coordinator's connection breaks, JAX's C++ client prints a long log and aborts. (In JAX 0.10.2 a Python
    callback in its place dies of std::bad_cast.) So SIGABRT gets a new handler: sleep(3) of the C library, which signal
    handlers may call. It takes the signal's number, 6, for its seconds, and then the abort goes on.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library: the abort comes first
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _tail() -> str:
    return f"; {_job.advice}" if _job is not None and _job.advice else ""
