"""Which job a process belongs to: a decision table over the environment that its launcher left.

The first row that applies decides:

    row        told by                                     coordinator
    none       MINITEXT_CLUSTER=none                       this process is alone
    explicit   MINITEXT_COORDINATOR, MINITEXT_PROCESSES,   as told; the last two may be left to a launcher below
               MINITEXT_PROCESS_ID
    file       MINITEXT_CLUSTER_FILE, polled               as the file says
    tpu        MINITEXT_CLUSTER=tpu, several hosts in      JAX finds it by itself
               TPU_WORKER_HOSTNAMES, MEGASCALE_NUM_SLICES
    mpi        OMPI_COMM_WORLD_SIZE                        the host of mpirun
    slurm      SLURM_STEP_NODELIST and more than one task  the first node of the step
    mpi        PMI_SIZE                                    this host, if all processes are on it
    jobset     JOBSET_NAME, REPLICATED_JOB_NAME            the DNS name of pod 0

Open MPI stands before SLURM because mpirun starts its daemons with srun, whose variables its processes inherit;
PMI stands after it because srun sets those too. A job of one process is no cluster, nor is a shell in an allocation.
Nothing here imports JAX or opens a connection, so each row is a test. MINITEXT_LOCAL_DEVICE_IDS says which of a host's
accelerators are a process's; how many CPU devices it simulates, MINITEXT_LOCAL_DEVICES, is the concern of `devices`.

Chapters: 21.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minitext.errors import UserError

PORT = 8476  # of the coordinator, where nothing says another


def number(env: Mapping[str, str], name: str, least: int, default: int | None = None) -> int:
    """Reads a whole number.

    Args:
      env: environment variables.
      name: of the variable.
      least: the smallest number it may be.
      default: what it is where the variable is not set; None: it must be set.

    Raises:
      UserError: if it is not set, no whole number, or too small.
    """
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UserError(f"{name} is not set: set it to a whole number, {least} or more")
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < least:
        raise UserError(f"{name}={text!r} is not a whole number, {least} or more: mend or unset it")
    return int(text)


def numbers(env: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    """Reads whole numbers with commas between them, None where the variable is not set.

    Raises:
      UserError: if it is anything else.
    """
    text = env.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise UserError(f"{name}={text!r}: expected numbers such as 0,1")
    return tuple(int(part) for part in text.split(","))


def check_index(index: int, count: int, index_name: str, count_name: str) -> None:
    """Checks that there is an `index` among `count`.

    Raises:
      UserError: with both names and values, if there is not.
    """
    if not 0 <= index < count:
        raise UserError(
            f"{index_name}={index} and {count_name}={count} contradict each other: they are numbered from 0 to "
            f"{count - 1}"
        )


def address(text: str, name: str) -> str:
    """Checks `host`, `host:port` or `[address]:port`, and adds the port if it is missing.

    Raises:
      UserError: if it is none of these.
    """
    found = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?", text.strip())
    if not found or not 0 < int(found[2] or PORT) < 65_536:
        raise UserError(f"{name}={text!r} is no address: expected HOST:PORT, such as node01:{PORT}")
    return f"{found[1]}:{found[2] or PORT}"


def nodes(text: str) -> list[str]:
    """Expands SLURM's short form of node names: `a[01-03,7],b` is a01, a02, a03, a7, b.

    Raises:
      UserError: if it is no list of nodes.
    """
    names = []
    for part in _split_outside_brackets(text):
        pieces = re.findall(r"\[([^\[\]]*)\]|([^\[\]]+)", part)
        if "".join(f"[{a}]" if a else b for a, b in pieces) != part or not part:
            raise UserError(f"{text!r} is no list of nodes: expected one like node[01-04,7],login2")
        found = [""]
        for ranges, plain in pieces:
            ends = _expand_ranges(ranges, text) if ranges else [plain]
            found = [name + end for name in found for end in ends]
        names += found
    return names


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text.strip())


def _expand_ranges(ranges: str, text: str) -> list[str]:
    ends = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        low, high = (bounds[1], bounds[2] or bounds[1]) if bounds else ("1", "0")
        if int(high) < int(low) or int(high) - int(low) > 1_000_000:
            raise UserError(f"{text!r} is no list of nodes: {part!r} in it is no range of numbers")
        ends += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return ends


FILE_SECONDS = 300  # how long an orchestrator may take to write its file
FILE_FORM = (
    'expected {"coordinator": "host:port", "processes": 4, "process_id": 0}, or "hosts" in place of '
    "the last two"
)
COORDINATOR = "MINITEXT_COORDINATOR"
EXPLICIT = (COORDINATOR, "MINITEXT_PROCESSES", "MINITEXT_PROCESS_ID")
_JOB_PORTS = (
    61_440,
    4_096,
)  # JAX's own: the first, and how many, from which a job's number chooses one


@dataclass(frozen=True)
class Cluster:
    """A job of several processes, and which of them this one is.

    Attributes:
      kind: the row of the table: explicit, file, tpu, mpi, slurm or jobset.
      coordinator: `host:port` of process 0; None where JAX finds it (`tpu`).
      processes: in the job, at least 2; None where JAX finds it.
      index: of this process, from 0; None where JAX finds it.
      local_device_ids: the host's accelerators that are this process's; None: all of them.
    """

    kind: str
    coordinator: str | None = None
    processes: int | None = None
    index: int | None = None
    local_device_ids: tuple[int, ...] | None = None


def find_cluster(
    env: Mapping[str, str] | None = None,
    *,
    hostname: Callable[[], str] = lambda: os.uname().nodename,
    read: Callable[[str], str | None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Cluster | None:
    """Returns the job that the environment tells of, or None where this process is alone.

    Args:
      env: environment variables; by default the process's own.
      hostname: returns this host's name, looked up in the `hosts` of a cluster file.
      read: returns a file's text, or None while it is not there.
      sleep: waits so many seconds between two looks at a cluster file.
      clock: seconds, of which only differences count.

    Raises:
      UserError: if variables are missing, malformed, or contradict each other, or the cluster file never comes.
    """
    env = dict(os.environ if env is None else env)
    asked = env.get("MINITEXT_CLUSTER", "")
    if asked not in ("", "none", "tpu"):
        raise UserError(f"MINITEXT_CLUSTER={asked}: choose none or tpu, or unset it")
    if asked == "none":
        return None
    # A file may leave it to the process's own environment which process it is.
    by_file = "MINITEXT_CLUSTER_FILE" in env
    explicit = [name for name in EXPLICIT[: 2 if by_file else 3] if name in env]
    if by_file and explicit:
        raise UserError(f"{explicit[0]} and MINITEXT_CLUSTER_FILE are both set: unset one of them")
    if explicit:
        found = _explicit(env)
    elif by_file:
        found = _from_file(env, hostname, read or _read, sleep, clock)
    elif asked == "tpu" or _several_tpu_hosts(env):
        return Cluster("tpu")
    else:
        found = _launched(env)
    return None if found is None or found.processes == 1 else found


def _explicit(env: Mapping[str, str]) -> Cluster:
    """What MINITEXT_* say, with the numbers of a launcher where they name a coordinator alone."""
    missing = [name for name in EXPLICIT if name not in env]
    if missing == list(EXPLICIT[1:]) and (launched := _launched(env)) is not None:
        coordinator = address(env[EXPLICIT[0]], EXPLICIT[0])
        return replace(launched, kind="explicit", coordinator=coordinator)
    if missing:
        raise UserError(
            f"of {', '.join(EXPLICIT)} there is no {' and no '.join(missing)}: set all, or none"
        )
    coordinator, processes, index = EXPLICIT
    count, here = number(env, processes, 1), number(env, index, 0)
    check_index(here, count, index, processes)
    return _cluster(env, "explicit", address(env[coordinator], coordinator), count, here)


def _from_file(
    env: Mapping[str, str],
    hostname: Callable[[], str],
    read: Callable[[str], str | None],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> Cluster:
    """What a file says that an orchestrator writes, once it is there."""
    path = env["MINITEXT_CLUSTER_FILE"]
    limit = number(env, "MINITEXT_CLUSTER_SECONDS", 0, FILE_SECONDS)
    end = clock() + limit
    while (text := read(path)) is None:
        if clock() >= end:
            raise UserError(
                f"MINITEXT_CLUSTER_FILE={path} did not come in {limit} s: look at what should write it, or set "
                "MINITEXT_CLUSTER_SECONDS higher"
            )
        sleep(1.0)
    told = _parse_file(path, text)
    hosts, processes, index = told.get("hosts"), told["processes"], told.get("process_id")
    if "MINITEXT_PROCESS_ID" in env:
        index = number(env, "MINITEXT_PROCESS_ID", 0)
    elif index is None and hosts is not None:
        times = hosts.count(hostname())
        if times != 1:
            raise UserError(
                f"MINITEXT_CLUSTER_FILE={path} has this host, {hostname()}, {times} times among its hosts: name it "
                "once, or set MINITEXT_PROCESS_ID"
            )
        index = hosts.index(hostname())
    if index is None:
        raise UserError(f"MINITEXT_CLUSTER_FILE={path} has no process_id and no hosts: {FILE_FORM}")
    check_index(index, processes, "process_id", f"processes in {path}")
    return _cluster(env, "file", told["coordinator"], processes, index)


def _parse_file(path: str, text: str) -> dict[str, Any]:
    """Checks a cluster file; fills in `processes`, and the port of `coordinator`."""

    def fault(what: str) -> UserError:
        return UserError(f"MINITEXT_CLUSTER_FILE={path} {what}: {FILE_FORM}")

    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise fault(f"is not JSON ({error})") from error
    if not isinstance(told, dict) or not isinstance(told.get("coordinator"), str):
        raise fault("names no coordinator")
    hosts = told.get("hosts")
    if hosts is not None and not isinstance(hosts, list):
        raise fault(f"has hosts={hosts!r}")
    told.setdefault("processes", len(hosts) if hosts else None)
    if type(told["processes"]) is not int or told["processes"] < 1:
        raise fault(f"has processes={told['processes']!r}")
    if hosts is not None and len(hosts) != told["processes"]:
        raise fault(f"has {len(hosts)} hosts and processes={told['processes']}")
    if type(told.get("process_id", 0)) is not int:
        raise fault(f"has process_id={told['process_id']!r}")
    return told | {"coordinator": address(told["coordinator"], f"coordinator in {path}")}


def _several_tpu_hosts(env: Mapping[str, str]) -> bool:
    hosts = env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES", ""))
    slices = number(env, "MEGASCALE_NUM_SLICES", 1, 1)
    return slices > 1 or len([host for host in hosts.split(",") if host.strip()]) > 1


def _launched(env: Mapping[str, str]) -> Cluster | None:
    """The rows of what starts processes: Open MPI, SLURM, other MPIs, Kubernetes JobSet."""
    if "OMPI_COMM_WORLD_SIZE" in env:
        names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
        return _mpi(env, *(f"OMPI_COMM_WORLD_{name}" for name in names))
    if _is_slurm_step(env):
        return _slurm(env)
    if "PMI_SIZE" in env:
        return _mpi(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _jobset(env) if "JOBSET_NAME" in env else None


def _is_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this as one of several; sbatch's script and a shell in an allocation are neither."""
    if "SLURM_STEP_NODELIST" not in env or "SLURM_PTY_PORT" in env:
        return False
    return number(env, "SLURM_NTASKS", 1, 1) > 1


def _slurm(env: Mapping[str, str]) -> Cluster:
    tasks = number(env, "SLURM_NTASKS", 1)
    index = number(env, "SLURM_PROCID", 0)
    check_index(index, tasks, "SLURM_PROCID", "SLURM_NTASKS")
    if number(env, "PMI_SIZE", 1, tasks) != tasks:
        raise UserError(
            f"PMI_SIZE={env['PMI_SIZE']} and SLURM_NTASKS={tasks} contradict each other: start the processes with "
            f"srun alone, or set {', '.join(EXPLICIT)}"
        )
    hosts = nodes(env["SLURM_STEP_NODELIST"])
    ids = _own_device(env, "SLURM_LOCALID") if tasks > len(hosts) else None
    first, count = _JOB_PORTS
    port = first + number(env, "SLURM_JOB_ID", 0) % count
    return _cluster(env, "slurm", f"{hosts[0]}:{port}", tasks, index, ids)


def _mpi(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> Cluster:
    processes, index = number(env, size, 1), number(env, rank, 0)
    check_index(index, processes, rank, size)
    here = number(env, local_size, 1, 1)
    # Where mpirun runs, as Open MPI writes it: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    uri = re.match(r"([0-9]+)\.[0-9]+;tcp6?://\[?([^,\]:]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if COORDINATOR in env:
        coordinator = env[COORDINATOR]
    elif here == processes:
        coordinator = f"127.0.0.1:{PORT}"
    elif uri:
        first, count = _JOB_PORTS
        coordinator = f"{uri[2]}:{first + (int(uri[1]) >> 12) % count}"
    else:
        raise UserError(
            f"{size}={processes} and MPI does not say where process 0 is: set {COORDINATOR}=HOST:"
            f"{PORT}"
        )
    ids = _own_device(env, local_rank) if here > 1 else None
    return _cluster(env, "mpi", coordinator, processes, index, ids)


def _jobset(env: Mapping[str, str]) -> Cluster:
    if "REPLICATED_JOB_NAME" not in env:
        raise UserError("JOBSET_NAME is set and REPLICATED_JOB_NAME is not: set both, or neither")
    pods, pod = (
        number(env, "PROCESSES_IN_JOB", 1),
        number(env, "JOB_COMPLETION_INDEX", 0),
    )
    jobs, job = number(env, "JOBS", 1, 1), number(env, "JOB_INDEX", 0, 0)
    check_index(pod, pods, "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB")
    check_index(job, jobs, "JOB_INDEX", "JOBS")
    # Of pod 0 of job 0; JobSet makes the domain, which has the set's own name.
    pod_0 = f"{env['JOBSET_NAME']}-{env['REPLICATED_JOB_NAME']}-0-0.{env['JOBSET_NAME']}"
    address = f"{pod_0}:{PORT}"
    return _cluster(env, "jobset", address, pods * jobs, job * pods + pod)


def _own_device(env: Mapping[str, str], local_rank: str) -> tuple[int, ...] | None:
    """Of several processes on a host, each takes the GPU of its number, unless the launcher shows it only one."""
    visible = env.get("CUDA_VISIBLE_DEVICES", env.get("ROCR_VISIBLE_DEVICES"))
    if local_rank not in env or (visible is not None and visible.count(",") == 0):
        return None
    here = number(env, local_rank, 0)
    count = here + 1 if visible is None else visible.count(",") + 1
    check_index(here, count, local_rank, "the number of visible GPUs")
    return (here,)


def _cluster(
    env: Mapping[str, str],
    kind: str,
    coordinator: str,
    processes: int,
    index: int,
    ids: tuple[int, ...] | None = None,
) -> Cluster:
    """Adds which devices are this process's: as MINITEXT_* say, or else `ids`."""
    told = numbers(env, "MINITEXT_LOCAL_DEVICE_IDS")
    return Cluster(kind, coordinator, processes, index, ids if told is None else told)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"MINITEXT_CLUSTER_FILE={path} cannot be read: {error}: name a file this process can read"
        ) from error
