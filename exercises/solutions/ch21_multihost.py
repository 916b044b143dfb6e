import re
from pathlib import Path

import jax
import numpy as np


# EXERCISE 21.process_rows
def global_rows(read, sharding, shape):
    """Make a global array of which this process reads only its own rows.

    Args:
      read: function of a list of row numbers, increasing, -> NumPy [len(rows),
        T]. It reads data.
      sharding: `jax.sharding.NamedSharding` of the array; its mesh has devices
        of every process.
      shape: (B, T), two Python ints.

    Returns:
      jax.Array [B, T] with the sharding and the dtype of what was read.
    """
    # BEGIN SOLUTION
    held = sharding.addressable_devices_indices_map(tuple(shape)).values()
    rows = sorted(
        {row for index in held for row in range(*index[0].indices(shape[0]))}
    )
    local = read(rows)
    place = {row: number for number, row in enumerate(rows)}

    def piece(index):
        # JAX asks for each of this process's pieces, in numbers of the whole
        # array.
        mine = [place[row] for row in range(*index[0].indices(shape[0]))]
        return local[mine][:, index[1]]

    return jax.make_array_from_callback(
        tuple(shape), sharding, piece, dtype=local.dtype
    )
    # END SOLUTION


# EXERCISE 21.find_coordinator
def find_job(env):
    """Decide from the environment how this process starts.

    Args:
      env: dict of environment variables, str -> str.

    Returns:
      (address, processes, index): the coordinator's "host:port", how many
      processes there are, and which one this is; or None if the process is
      alone.

    Raises:
      ValueError: naming the variable that is missing or whose value is wrong.
    """
    # BEGIN SOLUTION
    explicit = ("COORDINATOR", "PROCESSES", "PROCESS_INDEX")
    hosts = "SLURM_STEP_NODELIST"
    slurm = "SLURM_JOB_ID", hosts, "SLURM_NTASKS", "SLURM_PROCID"
    names = "JOBSET_NAME", "REPLICATED_JOB_NAME"
    jobset = *names, "JOBS", "JOB_INDEX", "PODS", "POD_INDEX"

    def number(name):
        try:
            return int(env[name])
        except ValueError:
            raise ValueError(f"{name}={env[name]!r} is not a number") from None

    if any(name in env for name in explicit):
        missing = [name for name in explicit if name not in env]
        if missing:  # starting alone would train the same run several times
            raise ValueError(f"{' and '.join(missing)} must be set too")
        told, address = "PROCESS_INDEX", env["COORDINATOR"]
        processes, index = number("PROCESSES"), number(told)
    elif all(name in env for name in slurm):
        # The first name, up to a comma outside brackets, with the first entry
        # of each bracket.
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", env[hosts])[0]
        host = re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first)
        told, port = "SLURM_PROCID", 61440 + number("SLURM_JOB_ID") % 4096
        address = f"{host}:{port}"
        processes, index = number("SLURM_NTASKS"), number(told)
    elif all(name in env for name in jobset):
        name = env["JOBSET_NAME"]
        address = f"{name}-{env['REPLICATED_JOB_NAME']}-0-0.{name}:8476"
        told, pods = "POD_INDEX", number("PODS")
        processes = number("JOBS") * pods
        index = number("JOB_INDEX") * pods + number(told)
    else:
        return None
    if not 0 <= index < processes:
        wrong = f"{told}={env[told]}"
        raise ValueError(f"{wrong} is not one of {processes} processes")
    return (address, processes, index) if processes > 1 else None
    # END SOLUTION


# EXERCISE 21.deadlock
def run_job(job, steps, save_every):
    """Train, save and stop without waiting for a process that never comes.

    Args:
      job: this process's part of the job, with the members of the statement.
      steps: how many steps to take, an int of at least 1, the same in every
        process.
      save_every: steps from one save to the next, the same in every process.

    Returns:
      (losses, state): the list of the sums of all steps taken, and what
      `job.read` returns for the last of them.
    """
    # BEGIN SOLUTION
    losses = []
    for step in range(1, steps + 1):
        losses.append(job.sum(job.step(step)))
        # A signal reaches one process before another. All decide alike from the
        # sum, which all have.
        stop = job.sum(int(job.told_to_stop())) > 0 or step == steps
        if stop or step % save_every == 0:
            state = job.gather()
            if job.index == 0:
                job.write(step, state)
            job.barrier(f"step {step} is saved")
        if stop:
            break
    return losses, job.read(len(losses))
    # END SOLUTION


# EXERCISE 21.elastic
def resume(folder, wanted, index, count, batch):
    """Go on from a checkpoint that a different number of processes wrote.

    Args:
      folder: `pathlib.Path` with a folder for each step, as in the statement.
      wanted: dict from the name of each array to (start, stop), the rows that
        this process holds from now on.
      index: which of the new processes this is.
      count: how many there are now.
      batch: rows in a batch over all processes, a multiple of `count`.

    Returns:
      (step, state, batches): the step of the checkpoint; a dict from each name
      to the NumPy array of the rows wanted; and an endless iterator with, for
      each batch from here on, the list of the rows that this process reads.

    Raises:
      FileNotFoundError: no step is whole.
    """
    # BEGIN SOLUTION
    files, step = [], None
    for path in Path(folder).glob("step-*"):
        named = re.compile(r"process-(\d+)-of-(\d+)\.npz")
        found = [named.fullmatch(p.name) for p in path.iterdir()]
        found = sorted((int(m[1]), int(m[2])) for m in found if m)
        number = int(path.name.removeprefix("step-"))
        # Whole only if every process that saved left its file.
        whole = bool(found) and len(found) == found[0][1]
        if whole and (step is None or number > step):
            step = number
            files = [path / f"process-{i}-of-{n}.npz" for i, n in found]
    if step is None:
        raise FileNotFoundError(f"{folder} has no whole step")

    state, done = {}, 0
    for file in files:
        with np.load(file) as saved:
            done += int(saved["rows_read"])
            for name, (start, stop) in wanted.items():
                piece, first = saved[name], int(saved[f"{name}:start"])
                if name not in state:
                    shape = stop - start, *piece.shape[1:]
                    state[name] = np.empty(shape, piece.dtype)
                low, high = max(start, first), min(stop, first + len(piece))
                if low < high:
                    held = piece[low - first : high - first]
                    state[name][low - start : high - start] = held

    def batches():
        share = batch // count
        # the rows that any process has read come before
        begin = done + index * share
        while True:
            yield list(range(begin, begin + share))
            begin += batch

    return step, state, batches()
    # END SOLUTION


# EXERCISE 21.account
def bill(attempts, faults):
    """Give every second under faults its cause, and each fault its bill.

    Args:
      attempts: list of dicts, one for each start of the job, in order: `start`,
        `first`, `end`, `resumed` and `steps`, as in the statement.
      faults: list of dicts in the order of their times: `at`, and either
        `noticed` or `over`; the other is None.

    Returns:
      (seconds, bills): a dict of the seconds of "start-up", "step", "slow",
      "lost", "detect", "restart" and "end", which sum to the wall time; and for
      each fault a tuple (seconds that it cost, steps that were repeated because
      of it).
    """
    # BEGIN SOLUTION
    causes = "start-up", "step", "slow", "lost", "detect", "restart", "end"
    seconds = dict.fromkeys(causes, 0.0)
    costs, repeated = [0.0] * len(faults), [0] * len(faults)

    def charge(cause, amount, fault):
        seconds[cause] += amount
        if fault is not None:
            costs[fault] += amount

    def lasting(begin, end):
        found = [
            n for n, f in enumerate(faults)
            if f["over"] is not None and f["at"] < end and f["over"] > begin
        ]  # fmt: skip
        return found[0] if found else None

    taken, ended_by = [], []
    for index, attempt in enumerate(attempts):
        at = attempt["first"]
        for k, duration in enumerate(attempt["steps"]):
            taken.append((index, attempt["resumed"] + 1 + k, at, at + duration))
            at += duration
        begin, end = attempt["start"], attempt["end"]
        inside = [
            n for n, f in enumerate(faults)
            if f["noticed"] is not None and begin <= f["at"] <= end
        ]  # fmt: skip
        ended_by.append(inside[0] if inside else None)
    spans = [(begin, end) for _, _, begin, end in taken]
    usual = np.median([e - b for b, e in spans if lasting(b, e) is None])

    for index, number, begin, end in taken:
        # The step was there until the first later attempt that resumed from
        # below it.
        payer, is_lost = ended_by[index], False
        for later in range(index + 1, len(attempts)):
            low = attempts[later]["resumed"]
            if low is not None and low < number:
                is_lost = True
                break
            if low is not None:
                payer = ended_by[later]
        if is_lost:
            charge("lost", end - begin, payer)
            repeated[payer] += 1
            continue
        passing = lasting(begin, end)
        extra = 0.0 if passing is None else max(0.0, end - begin - usual)
        charge("slow", extra, passing)
        charge("step", end - begin - extra, None)

    for index, attempt in enumerate(attempts):
        fault, before = ended_by[index], ended_by[index - 1] if index else None
        last = attempt["start"]
        if attempt["steps"]:
            charge("start-up", attempt["first"] - attempt["start"], before)
            last = attempt["first"] + sum(attempt["steps"])
        if fault is None:
            charge("end", attempt["end"] - last, None)
            continue
        at, noticed = faults[fault]["at"], faults[fault]["noticed"]
        if attempt["steps"]:  # a step was under way
            charge("lost", at - last, fault)
        else:
            charge("start-up", at - last, before)
        charge("detect", noticed - at, fault)
        charge("restart", attempts[index + 1]["start"] - noticed, fault)
    return seconds, list(zip(costs, repeated, strict=True))
    # END SOLUTION
