import itertools
import json
import re
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.book.grading import Exercise, peers
from minitext.book.grading.trial import Failure

# --------------------------------------------------------------------------------- process_rows

process_rows = Exercise(
    "21.process_rows",
    title="The rows of this process",
    function="global_rows",
    minutes=25,
    points=10,
    devices=8,
    processes=2,
    statement="""
Write `global_rows(read, sharding, shape)`. Every process of a job calls it with the same sharding and shape. Together
they make one global array [B, T], and each reads only the rows that its own devices hold.

- Call `read(rows)` **once**, with those row numbers in increasing order and without duplicates. It returns the rows as
  [len(rows), T]. Reading is slow, so don't ask for a row that no device of this process holds.
- The sharding may divide rows, columns, both or neither, by one axis or two. If it divides columns, several devices
  hold a row, perhaps in several processes. Each of these processes reads the whole row.
- The mesh may have the devices in any order, so a process's rows need not be neighbours.
- Processes don't send anything to each other.

The last check starts two real processes with four devices each, where `jax.devices()` has all eight.
""",
    hints=(
        "The sharding knows which device holds what. Which of its methods covers only this process's devices?",
        "`sharding.addressable_devices_indices_map(shape)` gives a pair of slices for each device of this process. "
        "`slice.indices(B)` turns None into numbers. `jax.make_array_from_callback` asks for pieces by such pairs.",
        "Collect the rows of all pairs in a set, sort it, read. In the callback, look up where each row of "
        "`index[0]` lies in what you have read, then cut the columns `index[1]`.",
    ),
)

# Shapes of the mesh, and what it divides: rows and columns.
LAYOUTS = (
    ((8,), P("a")),
    ((4, 2), P("a", "b")),
    ((2, 4), P("b", "a")),
    ((2, 4), P(None, "b")),
    ((4, 2), P(("b", "a"), None)),
)


def layout_cases(t, orders):
    cases = []
    for (sizes, spec), order in itertools.product(LAYOUTS, orders):
        shape = (8 * int(t.rng.integers(1, 3)), 8 * int(t.rng.integers(1, 4)))
        dtype = ["int32", "float32", "int8"][int(t.rng.integers(3))]
        data = t.rng.integers(-100, 100, size=shape).astype(dtype)
        cases.append((sizes, spec, tuple(int(n) for n in order), data))
    return cases


def build_all(fn, cases, note):
    """Builds each case's array; returns what was asked of `read`, and this process's pieces."""
    found = []
    for sizes, spec, order, data in cases:
        devices = np.array([jax.devices()[n] for n in order]).reshape(sizes)
        sharding = NamedSharding(Mesh(devices, tuple("ab"[: len(sizes)])), spec)
        asked = []

        def read(rows, asked=asked, data=data):
            rows = [int(row) for row in rows]
            asked.append(rows)
            return data[rows]

        array = fn(read, sharding, data.shape)
        note(len(found))
        want = {
            d.id: data[i] for d, i in sharding.addressable_devices_indices_map(data.shape).items()
        }
        got = {s.device.id: np.asarray(s.data) for s in array.addressable_shards}
        found.append(
            (asked, tuple(array.shape), str(array.dtype), array.sharding == sharding, got, want)
        )
    return found


def built_well(t, found, cases, where):
    held = []
    for (asked, *_), (sizes, spec, *_) in zip(found, cases, strict=True):
        t.equal(len(asked), 1, why=f"calls of read, mesh {sizes}, {spec}, {where}")
        held.append(asked[0])
    for k, (_, shape, dtype, sharded, got, want) in enumerate(found):
        sizes, spec, order, data = cases[k]
        why = f"mesh {sizes} of devices {order}, {spec}, B = {len(data)}, {where}"
        t.equal(shape, data.shape, why=f"shape: {why}")
        t.equal(dtype, str(data.dtype), why=f"dtype: {why}")
        t.true(sharded, why=f"the array has another sharding than asked: {why}")
        t.true(got.keys() == want.keys() and all(np.array_equal(got[d], want[d]) for d in want),
               why=f"a device holds other values than it should: {why}",
               observed=[got[d] for d in sorted(got)])  # fmt: skip
    return held


@process_rows.check("one process with eight devices")
def _(fn, t):
    cases = layout_cases(t, [range(8)])
    found = build_all(fn, cases, lambda k: None)
    held = built_well(t, found, cases, "one process")
    t.equal(
        held, [list(range(len(data))) for *_, data in cases], why="rows read by the only process"
    )


def in_peer(say, fn, cases):
    return build_all(fn, cases, say)


@process_rows.check("two processes with four devices each")
def _(fn, t):
    cases = layout_cases(t, [range(8), (0, 4, 1, 5, 2, 6, 3, 7), t.rng.permutation(8)])
    outcomes = peers.returned(peers.run_in_processes(in_peer, fn, cases, devices=4))
    rows, want = [], []
    for index, found in enumerate(outcomes):
        rows.append([asked[0] if len(asked) == 1 else asked for asked, *_ in found])
        mine = []
        for sizes, spec, order, data in cases:
            # The same question asked of this process's simulated devices, divided as the two divide theirs.
            devices = np.array([jax.devices()[n] for n in order]).reshape(sizes)
            whole = NamedSharding(
                Mesh(devices, tuple("ab"[: len(sizes)])), spec
            ).devices_indices_map(data.shape)
            parts = [i for d, i in whole.items() if jax.devices().index(d) // 4 == index]
            mine.append(sorted({row for i in parts for row in range(*i[0].indices(len(data)))}))
        want.append(mine)
    for index in (0, 1):
        t.equal(
            rows[index],
            want[index],
            why=f"rows read by process {index} for {len(cases)} arrays, one after the other",
        )
    for index, found in enumerate(outcomes):
        built_well(t, found, cases, f"process {index} of 2")


def right_rows(
    read, sharding, shape, own=True, each=False, twice=False, columns=True, local=True, dealt=None
):
    B = shape[0]
    held = list(sharding.addressable_devices_indices_map(tuple(shape)).values())
    rows = [row for index in held for row in range(*index[0].indices(B))]
    rows = sorted(rows) if twice else sorted(set(rows))
    if not own:
        rows = list(range(B))
    if dealt is not None:
        n, p = jax.process_count(), jax.process_index()
        rows = list(range(p, B, n)) if dealt else list(range(p * B // n, (p + 1) * B // n))
    if each:
        data = {}
        for index in held:
            span = list(range(*index[0].indices(B)))
            data.update(zip(span, read(span), strict=True))
        dtype = next(iter(data.values())).dtype
        return jax.make_array_from_callback(
            shape,
            sharding,
            lambda i: np.stack([data[r] for r in range(*i[0].indices(B))])[:, i[1]],
            dtype=dtype,
        )
    data = read(rows)
    place = {row: number for number, row in enumerate(rows)}

    def piece(index):
        span = range(*index[0].indices(B))
        mine = [place[row] for row in span] if local else [row % len(data) for row in span]
        return data[mine][:, index[1]] if columns else data[mine]

    return jax.make_array_from_callback(shape, sharding, piece, dtype=data.dtype)


@process_rows.mutant(
    "You read the whole batch in every process. On 1,000 hosts each row would be read 1,000 times."
)
def everything(read, sharding, shape):
    return right_rows(read, sharding, shape, own=False)


@process_rows.mutant(
    "You take the process's block of neighbouring rows. The mesh decides which rows it holds: ask the sharding."
)
def own_block(read, sharding, shape):
    return right_rows(read, sharding, shape, dealt=False)


@process_rows.mutant(
    "You deal rows to processes in turn. The mesh decides which rows a process holds: ask the sharding."
)
def dealt_rows(read, sharding, shape):
    return right_rows(read, sharding, shape, dealt=True)


@process_rows.mutant(
    "You read once for each device. Collect the rows of all devices first, then read once."
)
def device_by_device(read, sharding, shape):
    return right_rows(read, sharding, shape, each=True)


@process_rows.mutant(
    "You read rows that several devices hold several times: put the row numbers into a set first."
)
def rows_twice(read, sharding, shape):
    return right_rows(read, sharding, shape, twice=True)


@process_rows.mutant("A device that holds some columns gets whole rows: apply `index[1]` too.")
def whole_rows(read, sharding, shape):
    return right_rows(read, sharding, shape, columns=False)


@process_rows.mutant(
    "JAX asks by row numbers of the whole array, but your rows begin with this process's first row: look up the "
    "position of each row among those you read."
)
def global_numbers(read, sharding, shape):
    return right_rows(read, sharding, shape, local=False)


# ----------------------------------------------------------------------------- find_coordinator

find_coordinator = Exercise(
    "21.find_coordinator",
    title="Who am I, and whom do I call?",
    function="find_job",
    minutes=25,
    points=10,
    statement="""
Write `find_job(env)`, the start-up decision of one process. From the environment it returns `(address, processes,
index)`, or None if the process is alone. It's a pure function, so every row can be tested without a cluster. The first
row that applies decides.

| who set it | applies if | address | processes | index |
|---|---|---|---|---|
| you | **any** of E is set | `COORDINATOR` | `PROCESSES` | `PROCESS_INDEX` |
| Slurm | **all** of S are set | first node : port | `SLURM_NTASKS` | `SLURM_PROCID` |
| a JobSet's manifest | **all** of J are set | `NAME-REPLICATED-0-0.NAME:8476` | `JOBS` times `PODS` | see below |
| none of these | else | None | | |

- E is `COORDINATOR`, `PROCESSES`, `PROCESS_INDEX`. S is `SLURM_JOB_ID`, `SLURM_STEP_NODELIST`, `SLURM_NTASKS`,
  `SLURM_PROCID`. J is `JOBSET_NAME`, `REPLICATED_JOB_NAME`, `JOBS`, `JOB_INDEX`, `PODS`, `POD_INDEX`. In its address,
  `NAME` and `REPLICATED` are the values of the first two.
- The first row needs all three. If some are missing, raise a `ValueError` that names each of them.
- Slurm's port is 61440 plus the job's id modulo 4096, so two jobs on one node seldom collide. Slurm abbreviates its
  list of nodes: the first node of `gpu[012-014,20],cpu3` is `gpu012`, of `a1,b2` it is `a1`, and of
  `rack[1-2]n[08,10]` it is `rack1n08`.
- A JobSet is several jobs that Kubernetes starts together: `JOBS` jobs of `PODS` pods each, both numbered from 0. (A
  pod of Kubernetes runs one process here. It isn't a pod of accelerators.) Number the processes job by job.
- Return None for a job of one process, whichever row found it.
- If a value isn't a number, or the index isn't one of the processes, raise a `ValueError` that names the variable.
""",
    hints=(
        "Begin with the table: four branches in its order, each giving three values. Then check those values "
        "once, for all branches.",
        "The first row applies if any is set, but needs all three. For the node list, find the first comma outside "
        "brackets, then take the first entry of each bracket, as text: `012` is not 12.",
        r"`re.match(r'(?:[^,\[]|\[[^\]]*\])+', nodes)[0]` is the list up to that comma, and "
        r"`re.sub(r'\[([^,\-\]]+)[^\]]*\]', r'\1', first)` replaces each bracket by its first entry.",
    ),
)

EXPLICIT = ("COORDINATOR", "PROCESSES", "PROCESS_INDEX")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
JOBSET = ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOBS", "JOB_INDEX", "PODS", "POD_INDEX")


def first_host(nodes, brackets=True, zeros=True):
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)[0] if brackets else nodes.split(",")[0]
    host = re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first)
    return host if zeros else re.sub(r"0+(?=\d)", "", host)


def right_job(
    env,
    any_of=True,
    order="esj",
    per_task=True,
    port=True,
    within=False,
    alone=True,
    ranges=True,
    base=61440,
    modulo=4096,
    by_pod=False,
    domain=True,
    last=-1,
    named=True,
    **host,
):
    def number(name):
        if not named:
            return int(env[name])
        try:
            return int(env[name])
        except ValueError:
            raise ValueError(f"{name}={env[name]!r} is not a number") from None

    applies = {
        "e": any(n in env for n in EXPLICIT) if any_of else all(n in env for n in EXPLICIT),
        "s": all(n in env for n in SLURM) if per_task else all(n in env for n in SLURM[:3]),
        "j": all(n in env for n in JOBSET),
    }
    row = next((r for r in order if applies[r]), None)
    if row is None:
        return None
    if row == "e":
        missing = [n for n in EXPLICIT if n not in env]
        if missing:
            raise ValueError(f"{' and '.join(missing)} must be set too")
        address, told = env["COORDINATOR"], "PROCESS_INDEX"
        processes, index = number("PROCESSES"), number("PROCESS_INDEX")
    elif row == "s":
        offset = number("SLURM_JOB_ID") % modulo if port else 0
        address = f"{first_host(env['SLURM_STEP_NODELIST'], **host)}:{base + offset}"
        processes, told = number("SLURM_NTASKS"), "SLURM_PROCID"
        index = number("SLURM_PROCID") if "SLURM_PROCID" in env else 0
    else:
        name = env["JOBSET_NAME"]
        address = f"{name}-{env['REPLICATED_JOB_NAME']}-0-0{f'.{name}' if domain else ''}:8476"
        processes, told = number("JOBS") * number("PODS"), "POD_INDEX"
        index = (0 if within else number("JOB_INDEX") * number("PODS")) + number("POD_INDEX")
        if by_pod:
            index = number("POD_INDEX") * number("JOBS") + number("JOB_INDEX")
    if ranges and not 0 <= index <= processes + last:
        raise ValueError(f"{told}={env[told]} is not one of {processes} processes")
    return (address, processes, index) if processes > 1 or not alone else None


def env_of(t, row, processes=None):
    n = processes or int(t.rng.integers(2, 9))
    i = int(t.rng.integers(n))
    if row == "explicit":
        return {"COORDINATOR": f"10.0.0.{t.rng.integers(2, 99)}:{t.rng.integers(2000, 9000)}", "PROCESSES": str(n),
                "PROCESS_INDEX": str(i)}  # fmt: skip
    if row == "slurm":
        return {"SLURM_JOB_ID": str(t.rng.integers(5000, 10**7)), "SLURM_STEP_NODELIST": "node3,node4",
                "SLURM_NTASKS": str(n), "SLURM_PROCID": str(i)}  # fmt: skip
    jobs = 1 if n == 1 else int(t.rng.integers(2, 5))
    names = f"llama-{t.rng.integers(2, 99)}", f"slice-{t.rng.integers(2, 99)}"
    return {"JOBSET_NAME": names[0], "REPLICATED_JOB_NAME": names[1], "JOBS": str(jobs),
            "JOB_INDEX": str(jobs - 1), "PODS": str(n), "POD_INDEX": str(i)}  # fmt: skip


def decides(fn, t, env, why):
    want = right_job(dict(env))
    shown = ", ".join(f"{k}={v}" for k, v in env.items()) or "an empty environment"
    try:
        got = fn(dict(env))
    except ValueError as error:
        told = f"nothing is wrong here, want {want}, but you raise ValueError: {error}"
        raise Failure(f"{told}: {why}: {shown}", ("refused", why)) from None
    if isinstance(got, tuple) and want is not None and len(got) == 3:
        parts = "the address", "how many processes there are", "which one this is"
        off = [part for part, g, w in zip(parts, got, want, strict=True) if g != w]
        if off == [parts[0]] and isinstance(got[0], str):
            host = want[0].rpartition(":")[0]
            off = ["the port"] if got[0].startswith(f"{host}:") else ["the host"]
        shown = f"{' and '.join(off)}, with {shown}"
    t.equal(got, want, why=f"{why}: {shown}")


@find_coordinator.check("nobody has set anything")
def _(fn, t):
    decides(fn, t, {"HOME": "/home/me", "PATH": "/bin"}, "alone")


for each_row in ("explicit", "slurm", "jobset"):

    @find_coordinator.check(f"one row alone: {each_row}")
    def _(fn, t, row=each_row):
        for _ in range(3):
            decides(fn, t, env_of(t, row), row)
        if row == "jobset":
            numbers = {"JOBS": "3", "JOB_INDEX": "1", "PODS": "4", "POD_INDEX": "2"}
            decides(fn, t, env_of(t, row) | numbers, row)


@find_coordinator.check("which row comes first")
def _(fn, t):
    for rows in (("slurm", "explicit"), ("jobset", "slurm"), ("jobset", "slurm", "explicit")):
        env = {}
        for row in rows:
            env |= env_of(t, row)
        decides(fn, t, env, f"{' and '.join(rows)} at once")


@find_coordinator.check("half of the explicit row")
def _(fn, t):
    for kept in (("PROCESSES",), ("COORDINATOR", "PROCESS_INDEX"), ("PROCESS_INDEX", "PROCESSES")):
        env = env_of(t, "slurm") | {k: v for k, v in env_of(t, "explicit").items() if k in kept}
        for missing in set(EXPLICIT) - set(kept):
            why = f"only {' and '.join(kept)} of the three"
            t.raises(ValueError, fn, dict(env), match=rf"\b{missing}\b", why=why)


@find_coordinator.check("a Slurm shell that is no task")
def _(fn, t):
    env = env_of(t, "slurm")
    del env["SLURM_PROCID"]
    decides(fn, t, env, "without SLURM_PROCID")
    decides(fn, t, env | env_of(t, "jobset"), "without SLURM_PROCID, in a JobSet")


@find_coordinator.check("lists of nodes")
def _(fn, t):
    a, b = (int(x) for x in t.rng.integers(2, 99, 2))
    lists = (
        f"node{a}",
        f"tpu-{a},x{b}",
        f"gpu[0{a}-1{b}]",
        f"gpu[00{a},1{b}-200],cpu3",
        f"rack[{a}-99]n[0{b},99],z",
    )
    for nodes in lists:
        decides(fn, t, env_of(t, "slurm") | {"SLURM_STEP_NODELIST": nodes}, "first of the list")


@find_coordinator.check("a job of one process")
def _(fn, t):
    for row in ("explicit", "slurm", "jobset"):
        decides(fn, t, env_of(t, row, processes=1), row)


@find_coordinator.check("values that cannot be")
def _(fn, t):
    for row, name in (
        ("explicit", "PROCESS_INDEX"),
        ("slurm", "SLURM_PROCID"),
        ("jobset", "POD_INDEX"),
    ):
        for value in ("99", "-1", "two", "their number"):
            env = env_of(t, row) | ({"JOB_INDEX": "0"} if row == "jobset" else {})
            # Of n processes the last one is n - 1.
            env[name] = value = str(right_job(env)[1]) if value == "their number" else value
            t.raises(ValueError, fn, env, match=rf"\b{name}\b", why=f"{name}={value}")
    t.raises(
        ValueError,
        fn,
        env_of(t, "explicit") | {"PROCESSES": ""},
        match=r"\bPROCESSES\b",
        why="an empty number",
    )


@find_coordinator.mutant(
    "You skip an explicit row that is only partly set. Each process would start alone, and all would train the same "
    "run."
)
def all_or_nothing(env):
    return right_job(env, any_of=False)


@find_coordinator.mutant(
    "Your rows are in another order: values that a person sets must win over the scheduler's."
)
def scheduler_first(env):
    return right_job(env, order="sej")


@find_coordinator.mutant(
    "You look at the JobSet before Slurm. The first row of the table that applies decides."
)
def jobset_first(env):
    return right_job(env, order="ejs")


@find_coordinator.mutant(
    "A shell inside a Slurm allocation has no SLURM_PROCID. It isn't a task, so the row doesn't apply."
)
def shell_is_task(env):
    return right_job(env, per_task=False)


@find_coordinator.mutant(
    "Your port is the same for every job, so two jobs on one node would answer each other's processes."
)
def one_port(env):
    return right_job(env, port=False)


@find_coordinator.mutant(
    "You split the node list at every comma. Those inside brackets belong to one name: `gpu[012,20]`."
)
def every_comma(env):
    return right_job(env, brackets=False)


@find_coordinator.mutant(
    "The first entry of a bracket is text: `gpu[012-014]` begins with gpu012, not with gpu12."
)
def no_zeros(env):
    return right_job(env, zeros=False)


@find_coordinator.mutant(
    "Your index counts within one job, so two pods of different jobs get the same one: add JOB_INDEX times PODS."
)
def within_a_job(env):
    return right_job(env, within=True)


@find_coordinator.mutant("You leave out 61440. It's added to the job's id modulo 4096.")
def low_ports(env):
    return right_job(env, base=0)


@find_coordinator.mutant("You take the job's id modulo 4095. It is modulo 4096, from 0 to 4095.")
def modulo_one_less(env):
    return right_job(env, modulo=4095)


@find_coordinator.mutant(
    "You number the processes pod by pod: pod 0 of every job, then pod 1. They are numbered job by job."
)
def pod_by_pod(env):
    return right_job(env, by_pod=True)


@find_coordinator.mutant("The JobSet's address ends in a dot and JOBSET_NAME, before the port.")
def without_domain(env):
    return right_job(env, domain=False)


@find_coordinator.mutant(
    "You accept an index that equals the number of processes. They are numbered from 0."
)
def one_index_too_many(env):
    return right_job(env, last=0)


@find_coordinator.mutant(
    "The message of int() doesn't say which variable is wrong. Catch its ValueError and raise one that does."
)
def nameless_number(env):
    return right_job(env, named=False)


@find_coordinator.mutant("You return a job of one process. It has no one to call: return None.")
def job_of_one(env):
    return right_job(env, alone=False)


@find_coordinator.mutant(
    "You accept an index that isn't one of the processes. The job would wait forever for the one that is missing."
)
def any_index(env):
    return right_job(env, ranges=False)


# ------------------------------------------------------------------------------------- deadlock

deadlock = Exercise(
    "21.deadlock",
    title="Fix a deadlock",
    function="run_job",
    minutes=30,
    points=15,
    processes=2,
    statement="""
This job hangs at its first save, and again when a signal comes. Write `run_job(job, steps, save_every)`, which doesn't.

```python
def hanging_job(job, steps, save_every):
    losses = []
    for step in range(1, steps + 1):
        losses.append(job.sum(job.step(step)))
        if job.index == 0 and step % save_every == 0:
            job.write(step, job.gather())
            job.barrier(f"step {step} is saved")
        if job.told_to_stop():
            break
    return losses, job.read(len(losses))
```

| member of `job` | what it is |
|---|---|
| `index`, `count` | which process this is, and of how many |
| `step(s)` | takes step s on this process's part of the batch; returns its part of the loss |
| `sum(x)` | **collective**: the sum of every process's number x, in every process |
| `gather()` | **collective**: the whole state, in every process; it moves all of it |
| `barrier(name)` | **collective**: returns when every process is in the barrier of that name |
| `write(s, state)` | writes the file of step s; slow; only process 0 may call it |
| `read(s)` | reads that file; `FileNotFoundError` while it is not complete |
| `told_to_stop()` | whether *this* process has received SIGTERM; the others may get it later or never |

- A collective returns when every process has made the same call. All processes must make the same collective calls in
  the same order. The checks give up after a few seconds and say who is waiting where.
- Save every step that is a multiple of `save_every`, and the last step taken. Gather a state only to save it, and only
  once. In each step, one `sum` for the loss and one to agree are enough.
- When a process has been told to stop after step s, **all** stop after step s.
- Every process returns the same: the sums of all steps taken, and the state saved for the last one.

The checks start two real processes that exchange numbers through gloo.
""",
    hints=(
        "For each of the three conditions, ask whether all processes get the same answer. Which calls depend on a "
        "condition that can differ between processes?",
        "Only `write` belongs under `job.index == 0`. `told_to_stop()` differs between processes: turn "
        "all their answers into one number before any process acts on it.",
        "`stop = job.sum(int(job.told_to_stop())) > 0 or step == steps` is the same everywhere. If `stop` or the step "
        "is a multiple: all gather, process 0 writes, all meet in the barrier; then leave the loop if `stop`.",
    ),
)

WAIT_SECONDS = (
    8.0  # from one process's arrival at a collective to the other's; milliseconds where all is well
)


class Stuck(Exception):
    """A collective that the others did not join."""


class Job:
    """A process's part of a job with a state of two numbers, and a record of its collectives."""

    def __init__(self, folder, told, say):
        self.index, self.count = jax.process_index(), jax.process_count()
        self.folder, self.told, self.say = Path(folder), told, say
        self.state, self.steps, self.calls = 10 * (self.index + 1), 0, []

    def step(self, step):
        self.steps += 1
        assert step == self.steps, f"step({step}) after {self.steps - 1} steps"
        self.state += step * (self.index + 2)
        return step * 100 + self.index

    def sum(self, x):
        return int(sum(self._exchange("sum", int(x))))

    def gather(self):
        return self._exchange("gather", self.state)

    def barrier(self, name):
        self._meet(f"barrier({name!r})")

    def write(self, step, state):
        if self.index:
            raise PermissionError(f"process {self.index} must not write: two would write one file")
        time.sleep(0.3)
        draft = self.folder / f"{step}.tmp"
        draft.write_text(json.dumps(state))
        draft.rename(self.folder / str(step))

    def read(self, step):
        return json.loads((self.folder / str(step)).read_text())

    def told_to_stop(self):
        return self.told is not None and self.steps >= self.told

    def _exchange(self, kind, x):
        self._meet(f"{kind}()")
        if self.count == 1:
            return [x]
        from jax.experimental import multihost_utils

        return [int(y) for y in multihost_utils.process_allgather(np.int32(x))]

    def _meet(self, what):
        self.calls.append(what)
        if self.count == 1:
            return
        from jax._src.distributed import global_state

        # As in real collectives, what meets is the n-th call of each process.
        self.say(f"{what} after step {self.steps}")
        try:
            global_state.client.wait_at_barrier(
                f"{len(self.calls)} {what}", int(1000 * WAIT_SECONDS)
            )
        except jax.errors.JaxRuntimeError:
            raise Stuck(what) from None


def works(say, fn, folder, told, steps, save_every):
    job = Job(folder, told[jax.process_index()], say)
    outcome = fn(job, steps, save_every)
    return outcome, job.calls


def expected_of(n, steps, save_every, told):
    last = min([steps, *(s for s in told if s is not None)])
    losses = [sum(s * 100 + i for i in range(n)) for s in range(1, last + 1)]
    saved = sorted({s for s in range(1, last + 1) if s % save_every == 0} | {last})
    states = {s: [10 * (i + 1) + (i + 2) * s * (s + 1) // 2 for i in range(n)] for s in saved}
    return losses, states


def judged(t, outcomes, folder, n, steps, save_every, told, why):
    losses, states = expected_of(n, steps, save_every, told)
    last = len(losses)
    for index, (returned, calls) in enumerate(outcomes):
        t.true(isinstance(returned, tuple) and len(returned) == 2, why="want (losses, state)")
        t.equal(list(returned[0]), losses, why=f"losses of process {index}, {why}")
        t.equal(
            returned[1], states[last], why=f"state of step {last} as read by process {index}, {why}"
        )
        gathers = sum(call == "gather()" for call in calls)
        t.equal(
            gathers,
            len(states),
            why=f"calls of gather by process {index} for {len(states)} saves, {why}",
        )
        sums = sum(call == "sum()" for call in calls)
        t.true(
            sums <= 2 * last,
            why=f"{sums} sums for {last} steps: one for the loss, one to agree",
            observed=sums,
        )
    found = {int(p.name): json.loads(p.read_text()) for p in Path(folder).iterdir()}
    t.equal(sorted(found), sorted(states), why=f"steps saved, {why}")
    t.equal(found, states, why=f"what was saved, {why}")


def together(fn, t, steps, save_every, told, why):
    with tempfile.TemporaryDirectory() as folder:
        found = peers.run_in_processes(
            works, fn, folder, told, steps, save_every, seconds=4 * WAIT_SECONDS
        )
        stuck = [peer.error is not None and peer.error[0] == "Stuck" for peer in found]
        if any(stuck):
            # One that has left the job, or died, is not waiting; the other waits for it.
            told_where = [
                f"process {i} waits in {p.said[-1]}" if s else
                f"process {i} raised {p.error[0]}" if p.error else f"process {i} has returned"
                for i, (p, s) in enumerate(zip(found, stuck, strict=True))
            ]  # fmt: skip
            raise Failure(
                f"after {WAIT_SECONDS:.0f} s {', '.join(told_where)}: {why}",
                ("deadlock", told_where),
            )
        judged(t, peers.returned(found), folder, 2, steps, save_every, told, why)


@deadlock.check("a job of one process")
def _(fn, t):
    for steps, every, told in ((7, 3, None), (6, 2, None), (9, 4, int(t.rng.integers(2, 8)))):
        with tempfile.TemporaryDirectory() as folder:
            outcome = works(lambda x: None, fn, folder, [told], steps, every)
            why = f"{steps} steps, saves every {every}, told to stop after {told}"
            judged(t, [outcome], folder, 1, steps, every, [told], why)


@deadlock.check("two processes that save")
def _(fn, t):
    together(fn, t, 7, 3, (None, None), "7 steps, saves every 3")


@deadlock.check("one of two is told to stop")
def _(fn, t):
    told = int(t.rng.choice([4, 5, 7]))
    together(
        fn, t, 12, 3, (None, told), f"saves every 3, process 1 is told to stop after step {told}"
    )


def right_work(
    job,
    steps,
    save_every,
    gather="all",
    barrier="all",
    writer="first",
    agree="sum",
    often=False,
    end=True,
):
    losses = []
    for step in range(1, steps + 1):
        losses.append(job.sum(job.step(step)))
        saving = step % save_every == 0
        told = job.told_to_stop()
        if agree == "first":
            told = job.sum(int(told and job.index == 0)) > 0
        elif agree == "sum" or (agree == "at saves" and saving):
            told = job.sum(int(told)) > 0
        elif agree == "at saves":
            told = False
        stop = told or (end and step == steps)
        save = saving or (stop and end)
        if often and not save:
            job.gather()
        if save:
            state = job.gather() if gather == "all" or job.index == 0 else None
            if job.index == 0 or writer == "all":
                job.write(step, state)
            if barrier == "all" or (barrier == "first" and job.index == 0):
                job.barrier(f"step {step} is saved")
        if stop:
            break
    return losses, job.read(len(losses))


@deadlock.mutant(
    "Only process 0 calls gather. The others hold parts of the state, so they must call it too."
)
def lonely_gather(job, steps, save_every):
    return right_work(job, steps, save_every, gather="first", barrier="first")


@deadlock.mutant(
    "All gather now, but only process 0 reaches the barrier. It waits forever for the others."
)
def lonely_barrier(job, steps, save_every):
    return right_work(job, steps, save_every, barrier="first")


@deadlock.mutant(
    "Without the barrier the others read before process 0 has written: the file is missing or incomplete."
)
def no_barrier(job, steps, save_every):
    return right_work(job, steps, save_every, barrier="none")


@deadlock.mutant(
    "Every process writes the same file. Put the write, and nothing else, under `if job.index == 0`."
)
def all_write(job, steps, save_every):
    return right_work(job, steps, save_every, writer="all")


@deadlock.mutant(
    "The process that was told to stop leaves, and the others wait for it in the next collective. Sum everyone's "
    "answers before any process acts."
)
def leaves_alone(job, steps, save_every):
    return right_work(job, steps, save_every, agree="none")


@deadlock.mutant(
    "You ask only process 0 whether to stop. The signal may reach any process: sum the answers of all."
)
def asks_the_first(job, steps, save_every):
    return right_work(job, steps, save_every, agree="first")


@deadlock.mutant(
    "You agree on stopping only at saves. A machine that is about to be taken away leaves you seconds: ask after "
    "every step."
)
def asks_at_saves(job, steps, save_every):
    return right_work(job, steps, save_every, agree="at saves")


@deadlock.mutant("You gather the state in every step. That moves all of it: gather only to save.")
def always_gathers(job, steps, save_every):
    return right_work(job, steps, save_every, often=True)


@deadlock.mutant(
    "You don't save the last step unless it is a multiple. The steps since the last save are lost."
)
def forgets_the_end(job, steps, save_every):
    return right_work(job, steps, save_every, end=False)


# -------------------------------------------------------------------------------------- elastic

elastic = Exercise(
    "21.elastic",
    title="Restart on a different number of processes",
    function="resume",
    minutes=40,
    points=15,
    processes=2,
    statement="""
Four hosts saved a checkpoint. One of them is gone, and the job continues with three. Write `resume(folder, wanted,
index, count, batch)`, which each of the new processes calls.

`folder` has a folder for each step, such as `step-900`, in which each of the n processes that saved has left a file
such as `process-0-of-4.npz`. A file has, for each array of the state,

- `NAME`: the rows that the process held. If processes held copies, the same rows are in several files. Pieces may
  differ in length.
- `NAME:start`: the number of the first of these rows in the whole array.

It also has `rows_read`: how many rows of data *this process* has trained on since the run began.

- Use the newest step that is **whole**, which means that all its n files are there. (n is the same in all files of a
  step, and may differ between steps.) A killed process may have left files with other names; ignore them. If no step is
  whole, raise `FileNotFoundError`.
- All processes together read the data in order, `batch` rows at a time, and each batch begins with the first row that
  no process has read yet. Each of `count` processes reads a block of `batch / count` neighbouring rows of a batch,
  process 0 the first block. Before the restart it was the same with n instead of `count`, and perhaps a different
  `batch`, so only `rows_read` says how far the job has got.
- Return `(step, state, batches)`: `state` has the rows `wanted[name] = (start, stop)` of each array, bit for bit in its
  dtype; `batches` is an endless iterator of the lists of row numbers that this process reads from here on.

The last check resumes in two real processes from the files of three, and compares with an undisturbed run.
""",
    hints=(
        "Answer three questions in turn: Which step? Which file has each wanted row? How far has the whole job read, "
        "not just this process?",
        "A step is whole if as many files match `process-(i)-of-(n).npz` as n says; compare steps as numbers. The next "
        "row of the job is the *sum* of `rows_read` over all files.",
        "For each file and name: low = max(start, first), high = min(stop, first + len(piece)); if low < high, copy "
        "`piece[low - first : high - first]` to `[low - start : high - start]`. Batches begin at "
        "done + index * share, and each starts `batch` rows after the one before.",
    ),
)


def divided(rows, n, ragged=None):
    """Begin and end of each of n pieces; `ragged` draws unequal ones."""
    if ragged is None:
        return [(i * rows // n, (i + 1) * rows // n) for i in range(n)]
    cuts = sorted(int(c) for c in ragged.choice(np.arange(1, rows), n - 1, replace=False))
    return list(itertools.pairwise([0, *cuts, rows]))


def save_as(folder, step, n, state, done, copied=(), ragged=None, missing=(), paired=()):
    """Writes the files that n processes leave after `done` rows in all; two each hold the pieces of what is paired."""
    place = Path(folder) / f"step-{step}"
    place.mkdir()
    for i in range(n):
        arrays = {"rows_read": np.int64(done // n)}
        for name, array in state.items():
            start, stop = 0, len(array)
            if name in paired:
                start, stop = divided(len(array), n // 2)[i // 2]
            elif name not in copied:
                start, stop = divided(len(array), n, ragged and ragged(name))[i]
            arrays |= {name: array[start:stop], f"{name}:start": np.int64(start)}
        if i not in missing:
            np.savez(place / f"process-{i}-of-{n}.npz", **arrays)
    for i, m in [(n, n + 1), *((i, n) for i in missing)]:
        (place / f"process-{i}-of-{m}.npz.tmp").write_bytes(b"cut short")


def some_state(t, R=24):
    return {
        "weights": t.rng.normal(size=(R, 3)).astype(np.float32),
        "scale": t.rng.integers(-9, 9, size=(R // 2,)).astype(np.int16),
        "table": t.rng.normal(size=(R // 4, 2, 2)),
    }


def share_of(state, m, copied=()):
    return [
        {k: (0, len(a)) if k in copied else divided(len(a), m)[i] for k, a in state.items()}
        for i in range(m)
    ]


def goes_on(fn, t, folder, step, state, done, m, batch, copied, why):
    """Resumes as each of m processes in turn."""
    for index, wanted in enumerate(share_of(state, m, copied)):
        told = f"{why}, new process {index} of {m}"
        got_step, got, batches = fn(Path(folder), dict(wanted), index, m, batch)
        t.equal(int(got_step), step, why=f"step: {told}")
        found = [next(batches, None) for _ in range(3)]
        ended = f"the iterator ends after {3 - found.count(None)} batches, and should be endless: {told}"
        t.true(None not in found, ended, "ended")
        rows = [[int(row) for row in batch_rows] for batch_rows in found]
        share = batch // m
        first = done + index * share
        want = [list(range(first + k * batch, first + k * batch + share)) for k in range(3)]
        t.equal(
            rows,
            want,
            why=f"rows of the next three batches of {batch}; all files' rows_read sum to {done}: {told}",
        )
        for name, (start, stop) in wanted.items():
            t.equal(
                np.asarray(got[name]),
                state[name][start:stop],
                why=f"rows {start} to {stop} of {name}, by what each file's {name}:start says: {told}",
            )
            t.equal(str(got[name].dtype), str(state[name].dtype), why=f"dtype of {name}: {told}")


def resumes(fn, t, n, m, why, step=9, copied=(), ragged=False, others=(), paired=()):
    state, batch = some_state(t), 24 * int(t.rng.integers(1, 3))
    done = step * batch + 36  # batches had another size once: a new one begins within
    with tempfile.TemporaryDirectory() as folder:
        for number, processes, missing in others:
            save_as(folder, number, processes, some_state(t), number * batch, missing=missing)
        draws = {name: int(t.rng.integers(10**6)) for name in state}
        draw = (lambda name: np.random.default_rng(draws[name])) if ragged else None
        save_as(folder, step, n, state, done, copied, draw, paired=paired)
        goes_on(fn, t, folder, step, state, done, m, batch, copied, f"saved by {n}, {why}")


@elastic.check("as many processes as before")
def _(fn, t):
    resumes(fn, t, 2, 2, "divided evenly")
    resumes(fn, t, 1, 1, "one process")


@elastic.check("fewer, more, and pieces that don't match")
def _(fn, t):
    resumes(fn, t, 4, 3, "divided evenly")
    resumes(fn, t, 2, 6, "divided evenly")
    resumes(fn, t, 3, 4, "divided unevenly", ragged=True)


@elastic.check("arrays of which every process has a copy")
def _(fn, t):
    resumes(fn, t, 4, 2, "a copy of scale in each", copied=("scale",))
    resumes(fn, t, 2, 3, "a copy of everything in each", copied=("weights", "scale", "table"))


@elastic.check("pieces of which two processes have a copy")
def _(fn, t):
    resumes(fn, t, 4, 3, "two by two processes hold the same", paired=("weights", "table"))


@elastic.check("the newest step, by number")
def _(fn, t):
    resumes(fn, t, 2, 3, "with older steps beside it", step=100, others=((9, 4, ()), (98, 3, ())))


@elastic.check("steps that are not whole")
def _(fn, t):
    resumes(
        fn,
        t,
        4,
        2,
        "a newer step lacks a file",
        step=20,
        others=((30, 3, (1,)), (25, 4, (0, 1, 2)), (10, 2, ())),
    )
    with tempfile.TemporaryDirectory() as folder:
        save_as(folder, 5, 2, some_state(t), 60, missing=(0,))
        t.raises(
            FileNotFoundError,
            lambda: fn(Path(folder), {"scale": (0, 3)}, 0, 1, 12),
            why="no step is whole",
        )


def train_on(say, fn, folder, wanted, batch, data, steps):
    """The rest of a run whose arithmetic is exact: integers in float32."""
    from jax.experimental import multihost_utils

    index, count = jax.process_index(), jax.process_count()
    _, state, batches = fn(Path(folder), wanted[index], index, count, batch)
    w, seen = np.asarray(state["w"]), []
    for _ in range(steps):
        rows = [int(row) for row in next(batches)]
        seen.append(rows)
        part = data[rows].sum(axis=0)
        total = np.asarray(multihost_utils.process_allgather(part)).sum(axis=0)
        start, stop = wanted[index]["w"]
        w = w + total[start:stop]
    return w, seen


@elastic.check("two real processes go on with what three have saved")
def _(fn, t):
    batch, steps, half = 12, 6, 3
    data = t.rng.integers(-8, 9, size=(batch * steps, 10)).astype(np.float32)
    w = [np.zeros(10, np.float32)]
    for k in range(steps):
        w.append(w[-1] + data[k * batch : (k + 1) * batch].sum(axis=0))
    with tempfile.TemporaryDirectory() as folder:
        save_as(folder, half, 3, {"w": w[half]}, half * batch)
        wanted = share_of({"w": w[0]}, 2)
        found = peers.run_in_processes(train_on, fn, folder, wanted, batch, data, steps - half)
        outcomes = peers.returned(found)
    whole = np.concatenate([piece for piece, _ in outcomes])
    order = [
        row
        for rows in zip(*(seen for _, seen in outcomes), strict=True)
        for part in rows
        for row in part
    ]
    t.equal(
        order,
        list(range(half * batch, steps * batch)),
        why="rows in the order in which both processes read them",
    )
    t.equal(whole, w[steps], why="the state at the end, against the undisturbed run")


def right_resume(folder, wanted, index, count, batch, own=False, begin=False, mine=False, whole=True, by_name=False,
                 old=False, stack=False, dealt=False, last=False, placed=True, by_step=False, rounded=False,
                 onward="batch"):  # fmt: skip
    steps = {}
    for path in Path(folder).glob("step-*"):
        found = [re.fullmatch(r"process-(\d+)-of-(\d+)\.npz", p.name) for p in path.iterdir()]
        found = sorted((int(m[1]), int(m[2])) for m in found if m)
        if found and (not whole or len(found) == found[0][1]):
            steps[path.name] = found
    if not steps:
        raise FileNotFoundError("no step is whole")
    name = max(steps) if by_name else max(steps, key=lambda s: int(s[5:]))
    n = steps[name][0][1]
    files = [np.load(Path(folder) / name / f"process-{i}-of-{n}.npz") for i, _ in steps[name]]
    used = [np.load(Path(folder) / name / f"process-{index}-of-{n}.npz")] if own else files
    state = {}
    for key, (start, stop) in wanted.items():
        if own:
            state[key] = used[0][key]
        elif stack:
            state[key] = np.concatenate([file[key] for file in files])[start:stop]
        else:
            state[key] = np.empty((stop - start, *files[0][key].shape[1:]), files[0][key].dtype)
            for file in files:
                first = int(file[f"{key}:start"]) if placed else 0
                low, high = max(start, first), min(stop, first + len(file[key]))
                if low < high:
                    state[key][low - start : high - start] = file[key][low - first : high - first]
    done = sum(int(file["rows_read"]) for file in files)
    if mine:
        done = int(files[0]["rows_read"]) * count
    if last:
        done = int(files[-1]["rows_read"])
    if by_step:
        done = int(name[5:]) * batch
    if rounded:
        done -= done % batch
    if begin:
        done = 0
    share = batch // (n if old else count)

    def batches():
        for k in itertools.count():
            at = done + k * (share if onward == "share" else batch)
            yield (
                list(range(at + index, at + batch, count))
                if dealt
                else list(range(at + index * share, at + (index + 1) * share))
            )

    return int(name[5:]), state, batches()


@elastic.mutant(
    "Each new process reads the one old file with its own number. With another number of processes, rows are lost."
)
def own_file(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, own=True)


@elastic.mutant(
    "Your data start from the beginning. Rows are trained on a second time, and the loss looks better than it is."
)
def from_the_beginning(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, begin=True)


@elastic.mutant(
    "You take one process's `rows_read` times the *new* number of processes. The sum over all old files is how far the "
    "job has come."
)
def times_the_new(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, mine=True)


@elastic.mutant(
    "You take the `rows_read` of one file. Each process counted its own rows: the job has read the sum over all files."
)
def rows_of_one(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, last=True)


@elastic.mutant(
    "You compute from the step's number how far the job has come. Batches may have had another size: add up "
    "`rows_read`."
)
def steps_times_batch(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, by_step=True)


@elastic.mutant(
    "You begin at a multiple of `batch`, so rows are read twice. Batches may have had another size: begin with the "
    "first row that no process has read."
)
def whole_batches(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, rounded=True)


@elastic.mutant(
    "You put every file's rows at the beginning. `NAME:start` says where in the whole array they belong."
)
def all_at_the_beginning(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, placed=False)


@elastic.mutant(
    "From one batch to the next you advance by your own block. All processes together read a batch: advance by "
    "`batch`."
)
def onward_by_a_share(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, onward="share")


@elastic.mutant("You resume from a step with a missing file. Count them: all n must be there.")
def not_whole(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, whole=False)


@elastic.mutant("You compare the steps' names as text, in which step-98 comes after step-100.")
def newest_name(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, by_name=True)


@elastic.mutant(
    "Your blocks have the size for the old number of processes. Now it is batch / count."
)
def old_share(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, old=True)


@elastic.mutant(
    "You concatenate the pieces of all files, so copies appear several times. Put each piece at its `start`."
)
def one_after_another(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, stack=True)


@elastic.mutant(
    "You deal rows out in turn. Here a process reads a block of neighbouring rows of each batch."
)
def dealt(folder, wanted, index, count, batch):
    return right_resume(folder, wanted, index, count, batch, dealt=True)


# -------------------------------------------------------------------------------------- account

CAUSES = ("start-up", "step", "slow", "lost", "detect", "restart", "end")

account = Exercise(
    "21.account",
    title="What each fault cost",
    function="bill",
    minutes=35,
    points=15,
    statement="""
Faults were injected into a job on purpose, and it was restarted each time it ended. Write `bill(attempts, faults)`,
which gives every second of the run a cause and every fault its bill. It returns `(seconds, bills)`: a dict of seconds
by cause, which sum to the time from the first start to the last end; and for each fault a tuple
`(seconds it cost, steps repeated)`.

`attempts` has a dict for each start of the job, in order. Times are in seconds.

- `start` and `end`: when its processes were started, and when the last of them was gone.
- `resumed`: the step of the checkpoint that it resumed from, 0 if there was none; None if it ended before reading one.
- `first`: when its first step began; None if it completed none.
- `steps`: a list with the duration of each completed step. The first is step `resumed` + 1, and each begins where the
  one before ends.

`faults` has a dict for each fault, in order of `at`, when it came. A fault that **ends** its attempt has `noticed`,
when the job noticed; its `over` is None. One that **passes** has `over`, when it ended; its `noticed` is None. A fault
belongs to the attempt with `start` <= `at` <= `end`. Every attempt but the last is ended by one fault, the last by
none, and the last completes a step. A passing fault comes and ends while steps are taken, and no two passing faults
touch the same step.

Each second has one of seven causes:

- `"start-up"`: from `start` to `first`; in an attempt without a step, to the fault that ended it. The fault that ended
  the attempt *before* pays; no fault pays for the start-up of the first attempt.
- `"lost"`: the whole time of a completed step, if any later attempt resumed from a lower step. To find the fault that
  pays, go back from the *first* such attempt to the nearest attempt before it whose `resumed` isn't None. (The attempt
  that took the step is one of these, so you never go back beyond it.) That attempt still had the step, so the fault
  that ended it pays. An attempt whose `resumed` is None undoes nothing and keeps nothing; any other counts, even if it
  completed no step. A checkpoint may be damaged, so an attempt may go back further than the one before it, and undo
  steps of several attempts.
- `"lost"` too: in an attempt with a step, the time from the end of its last completed step to the fault that ended it.
  That fault pays.
- `"slow"`: if a passing fault overlaps a step that counts, the time that the step took beyond the usual, at least 0.
  That fault pays. The usual time is the median over all completed steps that no passing fault overlaps, lost ones
  included.
- `"step"`: steps that count, without what is `"slow"`. No fault pays.
- `"detect"`: from `at` to `noticed` of the fault that ended the attempt, and `"restart"`: from there to the next
  attempt's `start`. That fault pays for both.
- `"end"`: after the last step of the last attempt, to its `end`. No fault pays.

The repeated steps of a fault are the completed steps whose lost time it pays for.
""",
    hints=(
        "Three passes. First list all completed steps with attempt, number, begin and end, and find which fault ended "
        "each attempt. Then decide whether each step counts. Then add what is between the steps of one attempt and the "
        "next.",
        "For a step of attempt i, look for the first j > i whose `resumed` is not None and below the step's number. "
        "If there is one, the step is lost. Go back from j - 1 over attempts whose `resumed` is None, at most to i: "
        "the fault that ended that one pays. Without such a j the step counts.",
        "A passing fault overlaps a step if `at` < the step's end and `over` > its begin. For each attempt: "
        "start-up (the fault before pays), the cut-off step up to `at`, `noticed` - `at`, next `start` - `noticed`.",
    ),
)


def faulty_run(t, plan):
    """Draws a run: `plan` has (resumed, steps, passing, ends) for each attempt.

    Undisturbed steps of one attempt all differ, with a few long ones, and later attempts are slower.

    `passing` has (number of a step in the attempt, how many steps it lasts); `ends` says whether a fault ends it.
    """

    def draw(low, high):
        return int(t.rng.integers(low, high)) / 8

    now, attempts, faults = 1000.0 * int(t.rng.integers(1, 9)), [], []
    base = int(t.rng.integers(8, 40))
    for index, (resumed, count, passing, ends) in enumerate(plan):
        jitter = t.rng.permutation(count) ** 2 / 64
        attempt = {"start": now, "first": None, "end": 0.0, "resumed": resumed, "steps": []}
        now += draw(40, 90)
        if count:
            attempt["first"] = now
        slow = {k + i: n for n, (k, many) in enumerate(passing) for i in range(many)}
        opened = {}
        for k in range(count):
            usual = base / 8 + 2 * index + float(jitter[k])
            extra = draw(48, 90) if k in slow else 0.0
            if k in slow and slow[k] not in opened:
                opened[slow[k]] = now + usual / 4  # it comes during its first step
            now += usual + extra
            attempt["steps"].append(usual + extra)
            if k in slow and slow.get(k + 1) != slow[k]:
                over = now - 1 / 16
                faults.append({"at": opened[slow[k]], "noticed": None, "over": over})
        if ends:
            now += draw(1, 12)
            noticed = now + draw(3, 80)
            faults.append({"at": now, "noticed": noticed, "over": None})
            attempt["end"] = noticed + draw(1, 40)
            now = attempt["end"] + draw(1, 20)
        else:
            attempt["end"] = now = now + draw(2, 30)
        attempts.append(attempt)
    return attempts, faults


def right_bill(attempts, faults, later="any", payer="resumed", usual="median", of="calm", lost_slow=False,
               overlap="any", cut=True, startup="before", none="nothing", detect=True, negative=False,
               counts="paid", restart="noticed", number=1, inclusive=False, whole_slow=False, as_spans=False,
               detect_until="noticed"):  # fmt: skip
    """The bill, or one with a mistake."""
    spans = []  # (cause, seconds, fault)
    ender = [
        next((n for n, f in enumerate(faults)
              if f["noticed"] is not None and a["start"] <= f["at"] <= a["end"]), None)
        for a in attempts
    ]  # fmt: skip
    lows = [0 if a["resumed"] is None and none == "zero" else a["resumed"] for a in attempts]
    if none == "steps":
        lows = [a["resumed"] if a["steps"] else None for a in attempts]
    steps = []
    for i, a in enumerate(attempts):
        ends = list(itertools.accumulate(a["steps"], initial=a["first"] or 0.0))
        for k, (begin, end) in enumerate(itertools.pairwise(ends)):
            touches = [
                n for n, f in enumerate(faults)
                if f["over"] is not None
                and (f["at"] < end and f["over"] > begin if overlap == "any" else f["at"] <= begin < f["over"])
            ]  # fmt: skip
            steps.append(
                (i, a["resumed"] + number + k, end - begin, touches[0] if touches else None)
            )
    calm = [s for _, _, s, n in steps if n is None or of == "all"]
    if of == "kept":
        calm = [
            s for i, number, s, n in steps
            if n is None and not any(low is not None and low < number for low in lows[i + 1 :])
        ]  # fmt: skip
    typical = float(np.median(calm) if usual == "median" else np.mean(calm))
    repeated = [0] * len(faults)
    for i, number, s, passing in steps:
        candidates = range(i + 1, len(attempts))[: 1 if later == "next" else None]
        again = [j for j in candidates if lows[j] is not None and lows[j] < number + inclusive]
        if again:
            stop = again[-1] if payer == "last" else again[0]
            known = [
                k for k in range(i, stop) if k == i or payer == "before" or lows[k] is not None
            ]
            who = ender[i] if payer == "own" else ender[known[-1]]
            extra = max(0.0, s - typical) if lost_slow and passing is not None else 0.0
            spans += [("lost", s - extra, who), ("slow", extra, passing if extra else None)]
            repeated[who] += 1
        else:
            extra = 0.0 if passing is None else s - typical if negative else max(0.0, s - typical)
            extra = s if whole_slow and passing is not None else extra
            spans += [("slow", extra, passing), ("step", s - extra, None)]
    for i, a in enumerate(attempts):
        before, n = (ender[i - 1] if i else None), ender[i]
        before = {"before": before, "own": n, "nobody": None}[startup]
        last = (a["first"] or 0.0) + sum(a["steps"]) if a["steps"] else a["start"]
        if a["steps"]:
            spans.append(("start-up", a["first"] - a["start"], before))
        if n is None:
            spans.append(("end", a["end"] - last, None))
            continue
        f = faults[n]
        if cut and a["steps"]:
            spans.append(("lost", f["at"] - last, n))
            repeated[n] += counts == "cut"
        elif not a["steps"]:
            spans.append(("start-up", f["at"] - last, before))
        since = f["noticed"] if restart == "noticed" else a["end"]
        spans += [
            (
                "detect" if detect else "restart",
                (f if detect_until == "noticed" else a)[detect_until] - f["at"],
                n,
            ),
            ("restart", attempts[i + 1]["start"] - since, n),
        ]
    if counts == "newest":
        for i, n in enumerate(ender[:-1]):
            reached = (attempts[i]["resumed"] or 0) + len(attempts[i]["steps"])
            low = next((x for x in lows[i + 1 :] if x is not None), 0)
            repeated[n] = max(0, reached - low) if attempts[i]["steps"] else 0
    if as_spans:
        return spans, repeated
    seconds = {cause: sum(s for c, s, _ in spans if c == cause) for cause in CAUSES}
    costs = [sum(s for _, s, who in spans if who == n) for n in range(len(faults))]
    return seconds, list(zip(costs, repeated, strict=True))


def named_bills(seconds, bills):
    """Every number of an answer, under a name that a message can show."""
    costs = {f"fault {n} {what}": float(x) for n, one in enumerate(bills)
             for what, x in zip(("cost", "repeated"), one, strict=True)}  # fmt: skip
    return {c: float(seconds[c]) for c in CAUSES} | costs


def wrong_bill(got, want, attempts, faults):
    """What a wrong answer has in the wrong place: seconds under another cause, or a part that a fault doesn't pay."""
    more = {c: got[c] - want[c] for c in CAUSES}
    off = sorted((c for c in CAUSES if abs(more[c]) > 1e-6), key=lambda c: more[c])
    if len(off) == 2 and abs(sum(more.values())) < 1e-6:
        return f"{more[off[1]]:g} s are under {off[1]!r} and belong to {off[0]!r}"
    if off and abs(sum(more.values())) > 1e-6:
        told = ", ".join(
            f"{c!r} has {abs(more[c]):g} s too {'many' if more[c] > 0 else 'few'}" for c in off
        )
        return f"they don't sum to the wall time: {told}"
    if off:
        return f"they sum to the wall time, but {', '.join(map(repr, off))} are not right"
    spans, _ = right_bill(attempts, faults, as_spans=True)
    for n in range(len(faults)):
        if abs(got[f"fault {n} cost"] - want[f"fault {n} cost"]) > 1e-6:
            parts = {c: sum(s for cause, s, who in spans if (cause, who) == (c, n)) for c in CAUSES}
            told = ", ".join(f"{s:g} s {c!r}" for c, s in parts.items() if s)
            told = f"all seconds are right, and fault {n} pays for {told}"
            more = got[f"fault {n} cost"] - want[f"fault {n} cost"]
            pieces = [*parts.items(), *((c, s) for c, s, who in spans if (who == n) == (more < 0))]
            same = [c for c, s in pieces if s and abs(s - abs(more)) < 1e-6]
            if same:
                told += f"; yours {'lacks' if more < 0 else 'has too'} {abs(more):g} s {same[0]!r}"
            return told
    return "seconds and costs are right, but not how many steps were repeated"


def bills_well(fn, t, plan, why):
    attempts, faults = faulty_run(t, plan)
    want_seconds, want_bills = right_bill(attempts, faults)
    seconds, bills = fn(
        [dict(a, steps=list(a["steps"])) for a in attempts], [dict(f) for f in faults]
    )
    t.equal(sorted(seconds), sorted(CAUSES), why="the keys of the seconds")
    t.equal(len(bills), len(faults), why="one bill for each fault")
    pairs = all(isinstance(one, (tuple, list)) and len(one) == 2 for one in bills)
    t.true(
        pairs, f"a bill is (seconds, steps), got {bills[:1]}: {why}", [str(one) for one in bills]
    )
    # In one comparison, so that a wrong answer is known by all of its numbers.
    got, want = named_bills(seconds, bills), named_bills(want_seconds, want_bills)
    t.close(got, want, rtol=0, atol=1e-6, why=f"{wrong_bill(got, want, attempts, faults)}: {why}")


@account.check("nothing happens")
def _(fn, t):
    bills_well(fn, t, [(0, int(t.rng.integers(3, 9)), [], False)], "one attempt, no fault")


@account.check("one fault ends the job")
def _(fn, t):
    n, save = int(t.rng.integers(7, 12)), int(t.rng.integers(2, 6))
    bills_well(fn, t, [(0, n, [], True), (save, n - save + 4, [], False)], "killed once")
    bills_well(fn, t, [(0, n, [], True), (0, n + 2, [], False)], "killed before the first save")
    bills_well(fn, t, [(0, n, [], True), (n, 4, [], False)], "killed just after a save")


@account.check("faults that pass")
def _(fn, t):
    k = int(t.rng.integers(1, 5))
    bills_well(fn, t, [(0, 14, [(k, 2), (k + 5, 1)], False)], "slow twice")
    bills_well(fn, t, [(0, 9, [(2, 5)], False)], "slow for most of the steps")


@account.check("slow steps that are lost, and some that are kept")
def _(fn, t):
    save = int(t.rng.integers(4, 7))
    plan = [(0, 11, [(1, 2), (8, 2)], True), (save, 9, [(2, 1)], False)]
    bills_well(fn, t, plan, "slow before and after a save, then killed")


@account.check("killed while it starts")
def _(fn, t):
    plan = [(0, 8, [], True), (None, 0, [], True), (6, 0, [], True), (6, 5, [], False)]
    bills_well(fn, t, plan, "killed before and after it had read its checkpoint")
    bills_well(fn, t, [(None, 0, [], True), (0, 5, [], False)], "the first start killed")
    bills_well(
        fn, t, [(0, 8, [], True), (6, 0, [], True), (8, 5, [], False)],
        "an attempt that read an old checkpoint and took no step",
    )  # fmt: skip


@account.check("several faults, each further on")
def _(fn, t):
    plan, at = [], 0
    for _ in range(int(t.rng.integers(3, 6))):
        save = at + int(t.rng.integers(0, 6))
        extra = int(t.rng.integers(2, 5))
        plan.append((at, save - at + extra, [(0, 1)] if t.rng.random() < 0.5 else [], True))
        at = save
    bills_well(fn, t, [*plan, (at, 6, [(2, 2)], False)], "killed several times")


@account.check("a damaged checkpoint")
def _(fn, t):
    k = int(t.rng.integers(1, 4))
    plan = [(0, 13, [(k, 1)], True), (10, 5, [], True), (5, 8, [(1, 2)], True), (10, 7, [], False)]
    bills_well(fn, t, plan, "the third attempt goes back further than the second")
    plan = [(0, 13, [], True), (10, 0, [], True), (None, 0, [], True), (5, 4, [], True), (5, 9, [], False)]  # fmt: skip
    bills_well(fn, t, plan, "it goes back further after two attempts without a step")


@account.check("faster than usual while a fault lasted")
def _(fn, t):
    attempts, faults = faulty_run(t, [(0, 9, [(4, 1)], False)])
    # That step took less than the median: nothing was slow.
    attempts[0]["steps"][4] = min(attempts[0]["steps"]) / 2
    begin = attempts[0]["first"] + sum(attempts[0]["steps"][:4])
    faults[0] = {"at": begin + 0.01, "noticed": None, "over": begin + 0.02}
    attempts[0]["end"] = attempts[0]["first"] + sum(attempts[0]["steps"]) + 1
    seconds, bills = fn([dict(a) for a in attempts], [dict(f) for f in faults])
    t.close([seconds["slow"], float(bills[0][0])], [0.0, 0.0], atol=1e-6, why="slow, and the bill")
    t.close(seconds["step"], sum(attempts[0]["steps"]), atol=1e-6, why="steps that count")


@account.mutant(
    "You look at the next attempt alone. A damaged checkpoint sends a later one back further: a step is lost if *any* "
    "later attempt resumed below it."
)
def next_attempt_only(attempts, faults):
    return right_bill(attempts, faults, later="next")


@account.mutant(
    "You charge a lost step to the fault that ended its own attempt. If the next attempt resumed at it or above, the "
    "step survived that fault: the fault that sent the job back behind it pays."
)
def own_fault_pays(attempts, faults):
    return right_bill(attempts, faults, payer="own")


@account.mutant(
    "You charge a lost step to whatever ended the attempt just before the one that went back. An attempt that was "
    "ended before it had read a checkpoint undid nothing: go back to the last one that had."
)
def just_before_pays(attempts, faults):
    return right_bill(attempts, faults, payer="before")


@account.mutant(
    "You charge a lost step to the last fault after which it was taken again. The first one undid it; later ones undid "
    "its repetitions."
)
def last_fault_pays(attempts, faults):
    return right_bill(attempts, faults, payer="last")


@account.mutant(
    "Your usual time is a mean. One long step moves it, and then every slow step looks less slow: take the median."
)
def mean_pace(attempts, faults):
    return right_bill(attempts, faults, usual="mean")


@account.mutant(
    "Your median includes the steps during which a fault lasted. Take it over the undisturbed ones."
)
def pace_of_all(attempts, faults):
    return right_bill(attempts, faults, of="all")


@account.mutant(
    "Your median leaves out the lost steps. They were undone, but they took the usual time like others: include them."
)
def pace_of_kept(attempts, faults):
    return right_bill(attempts, faults, of="kept")


@account.mutant(
    "You divide a lost step's time into `lost` and `slow`. A step that was undone is lost whole, however slow it was."
)
def lost_and_slow(attempts, faults):
    return right_bill(attempts, faults, lost_slow=True)


@account.mutant(
    "You count a step as slowed only if it began while the fault lasted. The fault comes in the middle of a step: look "
    "for an overlap."
)
def began_slow(attempts, faults):
    return right_bill(attempts, faults, overlap="begin")


@account.mutant(
    "You give the step that was under way when the fault came no cause, so the seconds don't sum to the wall time. The "
    "time from the end of the last completed step to `at` is lost too."
)
def without_the_cut(attempts, faults):
    return right_bill(attempts, faults, cut=False)


@account.mutant(
    "You count the step that was cut off as repeated. It never completed, and only completed steps count."
)
def counts_the_cut(attempts, faults):
    return right_bill(attempts, faults, counts="cut")


@account.mutant(
    "You charge an attempt's start-up to the fault that ended it. It was started because of the fault before, so that "
    "one pays, and no fault pays for the first start."
)
def own_startup(attempts, faults):
    return right_bill(attempts, faults, startup="own")


@account.mutant(
    "Your bills lack the time from the last completed step to the fault. Nothing came of it, and the fault pays."
)
def free_unfinished_step(attempts, faults):
    seconds, bills = right_bill(attempts, faults)
    bills = [list(one) for one in bills]
    for a in attempts:
        for n, f in enumerate(faults):
            if f["noticed"] is not None and a["steps"] and a["start"] <= f["at"] <= a["end"]:
                bills[n][0] -= f["at"] - a["first"] - sum(a["steps"])
    return seconds, [tuple(one) for one in bills]


@account.mutant(
    "Your bills lack the start-up after the restart. Often it's the largest part of what a fault costs."
)
def free_startup(attempts, faults):
    return right_bill(attempts, faults, startup="nobody")


@account.mutant(
    "You treat an attempt whose `resumed` is None as if it went back to step 0. It hadn't read a checkpoint, so it "
    "undoes nothing."
)
def none_is_zero(attempts, faults):
    return right_bill(attempts, faults, none="zero")


@account.mutant(
    "You look only at attempts that completed a step. One that read a checkpoint went back to it, even if it was ended "
    "before its first step: `resumed` decides."
)
def only_with_steps(attempts, faults):
    return right_bill(attempts, faults, none="steps")


@account.mutant(
    "You include the time until the job noticed in `restart`. From `at` to `noticed` it is `detect`, which has a "
    "different cure."
)
def no_detect(attempts, faults):
    return right_bill(attempts, faults, detect=False)


@account.mutant(
    "Your `restart` begins when the last process was gone. It begins when the job noticed: between the two, processes "
    "are ending."
)
def restart_from_the_end(attempts, faults):
    return right_bill(attempts, faults, restart="end")


@account.mutant(
    "You number an attempt's first step like the checkpoint it resumed from. The checkpoint has that step: the first "
    "one taken is the next."
)
def numbered_from_the_checkpoint(attempts, faults):
    return right_bill(attempts, faults, number=0)


@account.mutant(
    "You count the step of the checkpoint itself as lost. An attempt that resumed from step 5 repeats step 6, not 5."
)
def checkpoint_lost_too(attempts, faults):
    return right_bill(attempts, faults, inclusive=True)


@account.mutant(
    "You count a slow step whole as `slow`. Only what it took beyond the usual time is; the rest is `step`."
)
def slow_steps_whole(attempts, faults):
    return right_bill(attempts, faults, whole_slow=True)


@account.mutant("Your `detect` goes on until the attempt ended. It ends when the job noticed.")
def detect_to_the_end(attempts, faults):
    return right_bill(attempts, faults, detect_until="end")


@account.mutant(
    "A step that was faster than usual while a fault lasted gives a negative `slow`. What it took beyond the usual "
    "time is at least 0."
)
def negative_slow(attempts, faults):
    return right_bill(attempts, faults, negative=True)


@account.mutant(
    "You count the steps between the step reached and the checkpoint as repeated. A damaged checkpoint undoes steps of "
    "several attempts, and each is charged on its own: count the steps whose lost time a fault pays for."
)
def reached_minus_resumed(attempts, faults):
    return right_bill(attempts, faults, counts="newest")
