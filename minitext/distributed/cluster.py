"""Which job a process belongs to: a decision table over the environment variables that its launcher set.

The first row that applies decides:

    row        applies if                                  coordinator
    none       MINITEXT_CLUSTER=none                       this process is alone
    explicit   MINITEXT_COORDINATOR, MINITEXT_PROCESSES,   as given; a launcher below may supply the last two
               MINITEXT_PROCESS_ID
    file       MINITEXT_CLUSTER_FILE, polled               as the file says
    tpu        MINITEXT_CLUSTER=tpu, several hosts in      JAX finds it
               TPU_WORKER_HOSTNAMES, MEGASCALE_NUM_SLICES
    mpi        OMPI_COMM_WORLD_SIZE                        the host of mpirun
    slurm      SLURM_STEP_NODELIST and more than one task  the first node of the step
    mpi        PMI_SIZE                                    this host, if all processes run on it
    jobset     JOBSET_NAME, REPLICATED_JOB_NAME            the DNS name of pod 0

Open MPI comes before SLURM because mpirun starts its daemons with srun, whose variables its processes inherit; PMI
comes after it because srun sets those too. One process alone isn't a cluster, nor is a shell in an allocation.

JAX detects clusters too, and does it for TPUs. The other rows stay here because of what JAX 0.10.2 made of the tests'
environments. On SLURM it takes a shell (`srun --pty`) for a process of the job, `rack[1-2]n[08,10]` for the node
`rack1`, and gives one process per node one GPU of eight; Open MPI needs a variable of mpirun's, other MPIs need mpi4py,
and Kubernetes its API and client. No contradiction is an error.

Nothing here imports JAX or opens a connection, so each row can be tested. MINITEXT_LOCAL_DEVICE_IDS chooses among a
host's accelerators for a process; `devices` reads MINITEXT_LOCAL_DEVICES, the number of CPU devices to simulate.

Chapters: 21.
"""

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minitext.errors import UserError

Env = Mapping[str, str]

PORT = 8476  # of the coordinator, by default
FILE_SECONDS = 300  # for an orchestrator to write its file
FILE_FORM = (
    'expected {"coordinator": "host:port", "processes": 4, "process_id": 0}, or "hosts" in place of '
    "the last two"
)
COORDINATOR = "MINITEXT_COORDINATOR"
EXPLICIT = (COORDINATOR, "MINITEXT_PROCESSES", "MINITEXT_PROCESS_ID")


@dataclass(frozen=True)
class Cluster:
    """A job of several processes, and which of them this one is.

    Attributes:
      kind: the row of the table: explicit, file, tpu, mpi, slurm or jobset.
      coordinator: `host:port` of process 0; None where JAX finds it (`tpu`).
      processes: in the job, at least 2; None where JAX finds it.
      index: of this process, from 0; None where JAX finds it.
      local_device_ids: which of the host's accelerators this process uses; None: all.
    """

    kind: str
    coordinator: str | None = None
    processes: int | None = None
    index: int | None = None
    local_device_ids: tuple[int, ...] | None = None


def find_cluster(
    env: Env | None = None,
    *,
    hostname: Callable[[], str] = lambda: os.uname().nodename,
    read: Callable[[str], str | None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Cluster | None:
    """Returns the job that the environment describes, or None where this process is alone.

    Args:
      env: environment variables; by default the process's own.
      hostname: returns this host's name, looked up in the `hosts` of a cluster file.
      read: returns a file's text, or None while there is no file.
      sleep: waits some seconds between two looks at a cluster file.
      clock: returns seconds; only differences count.

    Raises:
      UserError: if variables are missing, malformed, or contradict each other, or the cluster file never appears.
    """
    env = dict(os.environ if env is None else env)
    asked = env.get("MINITEXT_CLUSTER", "")
    if asked not in ("", "none", "tpu"):
        raise UserError(f"MINITEXT_CLUSTER={asked}: choose none or tpu, or unset it")
    if asked == "none":
        return None
    by_file = "MINITEXT_CLUSTER_FILE" in env
    # Beside a file, a process's own environment may still give its index.
    explicit = [name for name in EXPLICIT[: 2 if by_file else 3] if name in env]
    if by_file and explicit:
        raise UserError(f"{explicit[0]} and MINITEXT_CLUSTER_FILE are both set: unset one of them")
    if explicit:
        found = _explicit(env)
    elif by_file:
        path = env["MINITEXT_CLUSTER_FILE"]
        found = _from_file(env, path, _wait_for(env, path, read or _read, sleep, clock), hostname)
    elif asked == "tpu" or _several_tpu_hosts(env):
        return Cluster("tpu")
    else:
        found = _launched(env)
    ids = None if found is None else numbers(env, "MINITEXT_LOCAL_DEVICE_IDS")
    if found is None or found.processes == 1:
        return None
    return found if ids is None else replace(found, local_device_ids=ids)


def _explicit(env: Env) -> Cluster:
    """Reads MINITEXT_*; if these give a coordinator alone, a launcher may supply the numbers."""
    missing = [name for name in EXPLICIT if name not in env]
    if missing == list(EXPLICIT[1:]) and (launched := _launched(env)) is not None:
        coordinator = address(env[COORDINATOR], COORDINATOR)
        return replace(launched, kind="explicit", coordinator=coordinator)
    if missing:
        raise UserError(
            f"of {', '.join(EXPLICIT)} there is no {' and no '.join(missing)}: set all, or none"
        )
    processes, index = _position(env, EXPLICIT[2], EXPLICIT[1])
    return Cluster("explicit", address(env[COORDINATOR], COORDINATOR), processes, index)


def _wait_for(env: Env, path: str, read, sleep, clock) -> str:
    """Returns the text of the cluster file once an orchestrator has written it; arguments as of `find_cluster`."""
    limit = number(env, "MINITEXT_CLUSTER_SECONDS", 0, FILE_SECONDS)
    end = clock() + limit
    while not (text := (read(path) or "").strip()):  # an empty file is about to be written
        if clock() >= end:
            raise UserError(
                f"MINITEXT_CLUSTER_FILE={path} did not appear in {limit} s, or is empty: check what should write it, "
                "or raise MINITEXT_CLUSTER_SECONDS"
            )
        sleep(1.0)
    return text


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"MINITEXT_CLUSTER_FILE={path} cannot be read: {error}: name a file this process can read"
        ) from error


def _from_file(env: Env, path: str, text: str, hostname: Callable[[], str]) -> Cluster:
    content = _parse_file(path, text)
    hosts, processes, index = content["hosts"], content["processes"], content.get("process_id")
    if EXPLICIT[2] in env:
        index = number(env, EXPLICIT[2], 0)
    elif index is None and hosts is not None:
        if (times := hosts.count(hostname())) != 1:
            raise UserError(
                f"MINITEXT_CLUSTER_FILE={path} has this host, {hostname()}, {times} times among its hosts: name it "
                f"once, or set {EXPLICIT[2]}"
            )
        index = hosts.index(hostname())
    if index is None:
        raise UserError(f"MINITEXT_CLUSTER_FILE={path} has no process_id and no hosts: {FILE_FORM}")
    check_index(index, processes, "process_id", f"processes in {path}")
    coordinator = address(content["coordinator"], f"coordinator in {path}")
    return Cluster("file", coordinator, processes, index)


def _parse_file(path: str, text: str) -> dict[str, Any]:
    """Checks the types in a cluster file; fills in `hosts` and `processes`."""

    def fault(what: str) -> UserError:
        return UserError(f"MINITEXT_CLUSTER_FILE={path} {what}: {FILE_FORM}")

    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise fault(f"is not JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("coordinator"), str):
        raise fault("names no coordinator")
    hosts = content.setdefault("hosts", None)
    if not isinstance(hosts, list | None):
        raise fault(f"has hosts={hosts!r}")
    processes = content.setdefault("processes", len(hosts) if hosts else None)
    if type(processes) is not int or processes < 1:
        raise fault(f"has processes={processes!r}")
    if hosts is not None and len(hosts) != processes:
        raise fault(f"has {len(hosts)} hosts and processes={processes}")
    if type(content.get("process_id", 0)) is not int:
        raise fault(f"has process_id={content['process_id']!r}")
    return content


def _several_tpu_hosts(env: Env) -> bool:
    hosts = env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES", ""))
    slices = number(env, "MEGASCALE_NUM_SLICES", 1, 1)
    return slices > 1 or len([host for host in hosts.split(",") if host.strip()]) > 1


def _launched(env: Env) -> Cluster | None:
    """The rows of the programs that start processes: Open MPI, SLURM, other MPIs, Kubernetes JobSet."""
    if "OMPI_COMM_WORLD_SIZE" in env:
        names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
        return _mpi(env, *(f"OMPI_COMM_WORLD_{name}" for name in names))
    # srun started this process as one of several; sbatch's script and a shell in an allocation aren't.
    step = "SLURM_STEP_NODELIST" in env and "SLURM_PTY_PORT" not in env
    if step and number(env, "SLURM_NTASKS", 1, 1) > 1:
        return _slurm(env)
    if "PMI_SIZE" in env:
        return _mpi(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _jobset(env) if "JOBSET_NAME" in env else None


def _slurm(env: Env) -> Cluster:
    tasks, index = _position(env, "SLURM_PROCID", "SLURM_NTASKS")
    if number(env, "PMI_SIZE", 1, tasks) != tasks:
        raise UserError(
            f"PMI_SIZE={env['PMI_SIZE']} and SLURM_NTASKS={tasks} contradict each other: start the processes with "
            f"srun alone, or set {', '.join(EXPLICIT)}"
        )
    hosts = nodes(env["SLURM_STEP_NODELIST"])
    ids = _own_device(env, "SLURM_LOCALID") if tasks > len(hosts) else None
    port = _port_of_job(number(env, "SLURM_JOB_ID", 0))
    return Cluster("slurm", f"{hosts[0]}:{port}", tasks, index, ids)


def _mpi(env: Env, rank: str, size: str, local_rank: str, local_size: str) -> Cluster:
    processes, index = _position(env, rank, size)
    here = number(env, local_size, 1, 1)
    # Where mpirun runs, as Open MPI writes it: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    uri = re.match(r"([0-9]+)\.[0-9]+;tcp6?://\[?([^,\]:]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if COORDINATOR in env:
        coordinator = env[COORDINATOR]
    elif here == processes:
        coordinator = f"127.0.0.1:{PORT}"
    elif uri:
        coordinator = f"{uri[2]}:{_port_of_job(int(uri[1]) >> 12)}"
    else:
        raise UserError(
            f"{size}={processes} and MPI does not say where process 0 is: set {COORDINATOR}=HOST:{PORT}"
        )
    ids = _own_device(env, local_rank) if here > 1 else None
    return Cluster("mpi", coordinator, processes, index, ids)


def _jobset(env: Env) -> Cluster:
    if "REPLICATED_JOB_NAME" not in env:
        raise UserError("JOBSET_NAME is set and REPLICATED_JOB_NAME is not: set both, or neither")
    pods, pod = _position(env, "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB")
    jobs, job = _position({"JOBS": "1", "JOB_INDEX": "0"} | dict(env), "JOB_INDEX", "JOBS")
    # Pod 0 of job 0; JobSet names the DNS domain after the set.
    pod_0 = f"{env['JOBSET_NAME']}-{env['REPLICATED_JOB_NAME']}-0-0.{env['JOBSET_NAME']}"
    return Cluster("jobset", f"{pod_0}:{PORT}", pods * jobs, job * pods + pod)


def _port_of_job(job: int) -> int:
    """Returns the port that JAX would choose too; two jobs on one node seldom have the same."""
    return 61_440 + job % 4096


def _own_device(env: Env, local_rank: str) -> tuple[int, ...] | None:
    """Gives a process the GPU of its rank on its host, unless the launcher shows it only one."""
    visible = env.get("CUDA_VISIBLE_DEVICES", env.get("ROCR_VISIBLE_DEVICES"))
    if local_rank not in env or (visible is not None and visible.count(",") == 0):
        return None
    here = number(env, local_rank, 0)
    if visible is not None:
        check_index(here, visible.count(",") + 1, local_rank, "the number of visible GPUs")
    return (here,)


def _position(env: Env, index_name: str, count_name: str) -> tuple[int, int]:
    """Reads how many processes there are and which of them this one is."""
    count, index = number(env, count_name, 1), number(env, index_name, 0)
    check_index(index, count, index_name, count_name)
    return count, index


def number(env: Env, name: str, least: int, default: int | None = None) -> int:
    """Reads a whole number.

    Args:
      env: environment variables.
      name: of the variable.
      least: the smallest number it may be.
      default: its value where the variable isn't set; None: it must be set.

    Raises:
      UserError: if it isn't set, isn't a whole number, or is too small.
    """
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UserError(f"{name} is not set: set it to a whole number, {least} or more")
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < least:
        raise UserError(f"{name}={text!r} is not a whole number, {least} or more: fix or unset it")
    return int(text)


def numbers(env: Env, name: str) -> tuple[int, ...] | None:
    """Reads whole numbers separated by commas; None where the variable isn't set.

    Raises:
      UserError: if it is anything else.
    """
    text = env.get(name)
    if text is not None and not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise UserError(f"{name}={text!r}: expected numbers such as 0,1")
    return None if text is None else tuple(map(int, text.split(",")))


def check_index(index: int, count: int, index_name: str, count_name: str) -> None:
    """Checks that `index` is one of `count`.

    Raises:
      UserError: with both names and values, if it isn't.
    """
    if not 0 <= index < count:
        raise UserError(
            f"{index_name}={index} and {count_name}={count} contradict each other: indices go from 0 to {count - 1}"
        )


def address(text: str, name: str) -> str:
    """Checks `host`, `host:port` or `[address]:port`, and adds the port if it is missing.

    Raises:
      UserError: if it is none of these.
    """
    found = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?", text.strip())
    if not found or not 0 < int(found[2] or PORT) < 65_536:
        raise UserError(
            f"{name}={text!r} is not an address: write HOST:PORT, such as node01:{PORT}"
        )
    return f"{found[1]}:{found[2] or PORT}"


def nodes(text: str) -> list[str]:
    """Expands SLURM's short form of node names: `a[01-03,7],b` is a01, a02, a03, a7, b.

    Raises:
      UserError: if it isn't a list of nodes.
    """
    names = []
    for part in re.split(r",(?![^\[]*\])", text.strip()):
        pieces = re.findall(r"\[([^\[\]]*)\]|([^\[\]]+)", part)
        if "".join(f"[{a}]" if a else b for a, b in pieces) != part or not part:
            raise UserError(f"{text!r} is not a list of nodes: write one like node[01-04,7],login2")
        endings = [_in_ranges(ranges, text) if ranges else [plain] for ranges, plain in pieces]
        names += map("".join, itertools.product(*endings))
    return names


def _in_ranges(ranges: str, text: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        low, high = (bounds[1], bounds[2] or bounds[1]) if bounds else ("1", "0")
        if not 0 <= int(high) - int(low) <= 1_000_000:
            raise UserError(f"{text!r} is not a list of nodes: {part!r} in it is not a range")
        found += [str(i).zfill(len(low)) for i in range(int(low), int(high) + 1)]
    return found
