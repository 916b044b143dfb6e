"""Several processes as one job: joining it, agreeing in it, and leaving it together.

`start` joins the job that `cluster.find_cluster` finds. From then on a heartbeat runs: when a process is lost, every
other one ends with one line on stderr and exit code 1. `finish` leaves: a process that is done waits for the others,
one that fails tells them why. In between, `barrier`, `share` and `agree` go through JAX's coordination service, without
work for the devices. Alone, a process agrees with itself.

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
from dataclasses import dataclass, field
from typing import Any

from minitext.distributed import heartbeat
from minitext.distributed.cluster import Cluster, find_cluster
from minitext.errors import UserError

START_SECONDS = 300  # for all processes to come up
_SETTLE = 1.0  # seconds in which everybody else may say the last word but one


class JobFailed(UserError):
    """The job cannot go on, because of another process: the message is one line that names it."""

    exit_code = 1


@dataclass
class _Job:
    cluster: Cluster
    index: int
    processes: int
    client: Any  # JAX's, of its coordination service
    heart: heartbeat.Heartbeat
    hosts: list[str] = field(default_factory=list)
    rounds: Counter = field(default_factory=Counter)
    advice: str = ""


_job: _Job | None = None


def start(cluster: Cluster | None = None, seconds: int = START_SECONDS) -> Cluster | None:
    """Joins the job this process belongs to, if any; must come before JAX starts its backends.

    Args:
      cluster: the job; by default the one that the environment tells of.
      seconds: how long to wait for the other processes.

    Returns:
      The job, or None where this process is alone. Calling it again returns the same.

    Raises:
      UserError: if the environment contradicts itself.
      JobFailed: if the coordinator does not answer or a process does not come.
    """
    global _job
    if _job is not None:
        return _job.cluster
    cluster = cluster or find_cluster()
    if cluster is None:
        return None
    import jax
    from jax._src import distributed as service  # the client has no public name

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # no accelerator's concern
    _delay_aborts()
    failed = (
        f"{_of(cluster)} could not join the job at {cluster.coordinator or 'the address JAX found'} "
        f"within {seconds} s: look whether every process was started and can reach that address"
    )
    # JAX would abort without a word of it when its own time is over.
    timer = threading.Timer(seconds, _end, [failed])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(**_arguments(cluster, seconds + 60))
    except (RuntimeError, ValueError) as error:
        raise JobFailed(f"{failed} ({heartbeat.one_line(str(error))})") from error
    finally:
        timer.cancel()
    state = service.global_state
    index, processes = state.process_id, state.num_processes
    if processes == 1:
        return None
    heart = _begin_to_beat(state.client, str(state.coordinator_address), index, processes, seconds)
    _job = _Job(cluster, index, processes, state.client, heart)
    _job.hosts = share("host", _host(), seconds)
    atexit.register(_at_exit)
    return cluster


def joined() -> bool:
    """Returns whether this process is one of several."""
    return _job is not None


def is_first() -> bool:
    """Returns whether this process is the one that writes what is written once: process 0, or the only one."""
    return _job is None or _job.index == 0


def name_of(index: int) -> str:
    """Returns what people call a process of the job: `process 1 of 4 (node02)`."""
    if _job is None:
        return "process 0 of 1"
    host = f" ({_job.hosts[index]})" if _job.hosts else ""
    return f"process {index} of {_job.processes}{host}"


def advise(advice: str) -> None:
    """Sets how the line ends that is printed when a process is lost, such as `resume with: ...`."""
    if _job is not None:
        _job.advice = advice


def barrier(name: str, seconds: float = START_SECONDS) -> None:
    """Waits until every process is here. All processes make the same calls in the same order.

    Raises:
      JobFailed: if some are not here in time: it names them.
    """
    share(name, "", seconds)


def agree(name: str, value: int, seconds: float = START_SECONDS) -> list[int]:
    """Returns the values of all processes, by index; a barrier too.

    Raises:
      JobFailed: if some processes have told no value in time: it names them.
    """
    return [int(text) for text in share(name, str(value), seconds)]


def share(name: str, text: str, seconds: float = START_SECONDS) -> list[str]:
    """Returns the texts of all processes, by index; a barrier too.

    Raises:
      JobFailed: if some processes have told no text in time: it names them.
    """
    job = _job
    if job is None:
        return [text]
    import jax

    key = f"minitext/{name}/{job.rounds[name]}"
    job.rounds[name] += 1
    job.client.key_value_set(f"{key}/{job.index}", json.dumps(text))
    try:
        job.client.wait_at_barrier(key, int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        missing = sorted(set(range(job.processes)) - _told(job, key).keys())
        names = ", ".join(name_of(index) for index in missing) or heartbeat.one_line(str(error))
        raise JobFailed(f"waited {seconds:g} s at {name!r} in vain for {names}{_tail()}") from error
    told = _told(job, key)
    if job.rounds[name] > 1:  # all have come here, so nobody still reads the round before
        old = f"minitext/{name}/{job.rounds[name] - 2}/{job.index}"
        job.client.key_value_delete(old)
    return [told[index] for index in range(job.processes)]


class Board:
    """A place where one word is left for all processes. It is never waited for."""

    def __init__(self, client: Any, key: str):
        self._client, self._key = client, key

    def put(self, word: str) -> None:
        """Leaves a word, unless there is one; every process can read it when this returns."""
        import jax

        with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is one
            self._client.key_value_set(f"{self._key}/word", word)

    def get(self) -> str | None:
        """Returns the first word that a process left, or None. It takes about a tenth of a millisecond."""
        return next((word for _, word in self._client.key_value_dir_get(self._key)), None)


def board(name: str) -> Board | None:
    """Returns a new board that all processes share, None alone. All make the same calls in the same order."""
    if _job is None:
        return None
    _job.rounds[name] += 1
    return Board(_job.client, f"minitext/{name}/{_job.rounds[name]}")


def finish(error: BaseException | None = None) -> None:
    """Leaves the job; does nothing alone.

    Without an error it waits until all processes are done. After one it tells the others why and ends the process,
    with the error's exit code: to return would be to wait for processes that wait for this one. An error that came of
    another process's end leaves the last line to that.

    Args:
      error: what ends this process; a `SystemExit` of code 0 is none.
    """
    global _job
    if _job is None:
        return
    job, code = _job, 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        error = error if code else None
    if error is None:
        if not job.heart.leave():
            time.sleep(60)  # the heartbeat is about to end this process
        import jax

        jax.distributed.shutdown()
        _job = None
        return
    if isinstance(error, UserError):
        code = error.exit_code
    elif not isinstance(error, SystemExit):
        time.sleep(_SETTLE + heartbeat.GRACE)  # a lost process ends this one meanwhile
        traceback.print_exception(error)
    why = (
        f"exit code {code}" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    )
    job.heart.fail(why)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _at_exit() -> None:
    """Leaves the job of a script that ends without `finish`; the interpreter keeps what ended it."""
    finish(getattr(sys, "last_value", None))


def _arguments(cluster: Cluster, seconds: int) -> dict[str, Any]:
    """What `jax.distributed.initialize` is to be told."""
    # JAX's own heartbeat stays slower than ours, which says more.
    common = {"initialization_timeout": seconds, "shutdown_timeout_seconds": 60}
    if cluster.coordinator is None:
        return common
    port = cluster.coordinator.rpartition(":")[2]
    local = _is_local(cluster.coordinator)
    return common | {
        "coordinator_address": cluster.coordinator,
        "coordinator_bind_address": cluster.coordinator if local else f"[::]:{port}",
        "num_processes": cluster.processes,
        "process_id": cluster.index,
        "local_device_ids": cluster.local_device_ids,
        "cluster_detection_method": "deactivate",
    }


def _begin_to_beat(
    client: Any, coordinator: str, index: int, processes: int, seconds: int
) -> heartbeat.Heartbeat:
    key, host = "minitext/heartbeat", coordinator.rpartition(":")[0].strip("[]")
    about = index, processes, _host(), _end
    if index == 0:
        server, token = heartbeat.open_server(host), secrets.token_hex(16)
        client.key_value_set(key, f"{server.getsockname()[1]} {token}")
        heart = heartbeat.Hub(server, token, *about)
    else:
        port, token = client.blocking_key_value_get(key, seconds * 1000).split()
        try:
            heart = heartbeat.Member((host, int(port)), token, *about)
        except OSError as error:
            raise JobFailed(
                f"process {index} of {processes} cannot reach port {port} of {host} ({error}): let processes of a job "
                "connect to each other on all ports"
            ) from error
    heart.start()
    return heart


def _end(line: str) -> None:
    """Ends this process because another was lost; called by the heartbeat's thread."""
    time.sleep(_SETTLE)
    shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
    # Not through sys.stderr, which the main thread may hold.
    os.write(2, f"{shown}error: {line}{_tail()}\n".encode())
    os._exit(1)


def _delay_aborts() -> None:
    """Gives the heartbeat time to say who was lost.

    When the coordinator's connection breaks, JAX's C++ client logs that at length and aborts, and no callback can
    be given in its place. The handler of SIGABRT becomes sleep(3) of the C library, which safely can be one, and takes
    the signal's number, 6, for the seconds. After them the abort goes on, if nothing else has ended the process.
    """
    with contextlib.suppress(
        OSError, AttributeError
    ):  # no such library: then the abort has the last word
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _told(job: _Job, key: str) -> dict[int, str]:
    found = job.client.key_value_dir_get(key)
    return {int(name.rpartition("/")[2]): json.loads(text) for name, text in found}


def _tail() -> str:
    return f"; {_job.advice}" if _job is not None and _job.advice else ""


def _host() -> str:
    return os.uname().nodename


def _of(cluster: Cluster) -> str:
    return (
        f"process {cluster.index} of {cluster.processes}" if cluster.processes else "this process"
    )


def _is_local(address: str) -> bool:
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost")
