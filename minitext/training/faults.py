"""Faults on purpose, for the processes of a running job: what they are, when they come, and how they are made.

None needs a privilege, and none is known to the training code:

    kill    SIGKILL, at any moment: while it trains, while it saves, or while it starts
    freeze  SIGSTOP for some seconds, or for good: then the watchdog has to notice
    slow    SIGSTOP and SIGCONT, twenty times a second, for as many steps as there are between two saves
    tear    the newest checkpoint loses the second half of a file, or has bytes changed; then SIGKILL
    disk    no file can grow any more, for all processes at once, as on a full disk
    nan     the next batch of one process has a NaN among the weights of its tokens

For `disk`, a process's limit of file size (RLIMIT_FSIZE) is set to 0 from outside, with Linux's prlimit(2). Writes then
fail with EFBIG ("File too large") in place of ENOSPC, in the same calls. Filling a real disk would take a small one,
and mounting that takes a privilege or a namespace that many containers refuse.

For `nan`, the job's processes run `python -m minitext.training.faults train ...`. That is `minitext train ...` with a
handler for SIGUSR2, which changes the batch that is taken next. On Linux it also keeps any process from outliving the
supervisor.

Chapters: 21.
"""

import contextlib
import ctypes
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {
    "kill": "SIGKILL",
    "freeze": "SIGSTOP",
    "slow": "stopped half of the time or more",
    "tear": "the newest checkpoint damaged, then SIGKILL",
    "disk": "no file can grow",
    "nan": "a NaN in a batch",
}
PROGRAM = ("-m", "minitext.training.faults")  # Python's arguments, before those of minitext
POISONED = "drill: a NaN is in the batch of the next step"  # the line that says so
SECONDS = (1.0, 4.0)  # of a freeze that ends
FOR_GOOD = float("inf")
STOPPED = (0.5, 0.8)  # share of the time that a slow process is stopped
PERIOD = 0.05  # seconds, of a slow process's stops
CRAWL = 20.0  # seconds after which a process is no longer slow, however few steps were taken
STARTING = (0.5, 8.0)  # seconds after the start of a process that is killed while it starts


class Fault(NamedTuple):
    """A fault to come.

    Attributes:
      kind: one of `KINDS`.
      process: the index of the process that it hits.
      step: it comes once this step has its line in `metrics.jsonl`.
      moment: for `kill`, `training`, `saving` or `starting`.
      seconds: how long a freeze lasts, or how long after its start a process is killed.
      share: of the time for which a slow process is stopped.
    """

    kind: str
    process: int
    step: int
    moment: str = "training"
    seconds: float = 0.0
    share: float = 0.0

    @property
    def ends_the_attempt(self) -> bool:
        """Whether the job has to start again after it."""
        return self.kind not in ("freeze", "slow") or self.seconds == FOR_GOOD

    def allowed(self, save_every: int) -> int:
        """Returns how many steps it may undo: those since the newest whole checkpoint."""
        if not self.ends_the_attempt:
            return 0
        return 2 * save_every if self.kind == "tear" else save_every


def least_steps(count: int, save_every: int) -> int:
    """Returns the steps that a run needs for so many faults: each needs room to be undone, and to go on."""
    return (3 * count + 2) * save_every


def plan(
    kinds: Sequence[str], count: int, *, processes: int, steps: int, save_every: int, seed: int
) -> list[Fault]:
    """Draws faults, spread over a run, each kind equally often.

    Args:
      kinds: of `KINDS`.
      count: of faults.
      processes: of the job.
      steps: of the run, at least `least_steps`.
      save_every: steps between two checkpoints.
      seed: of the drawing.
    """
    rng = random.Random(seed)
    drawn = [kinds[i % len(kinds)] for i in range(count)]
    rng.shuffle(drawn)
    length = (steps - 2 * save_every) // max(1, count)
    faults: list[Fault] = []
    for number, kind in enumerate(drawn):
        step = save_every + number * length + rng.randrange(1, length - 2 * save_every + 1)
        fault = Fault(kind, rng.randrange(processes), step)
        if kind == "kill":
            moments = ["training", "saving"]
            if number == 0 or faults[-1].ends_the_attempt:
                moments.append("starting")
            fault = fault._replace(moment=rng.choice(moments), seconds=rng.uniform(*STARTING))
        elif kind == "freeze":
            # If the only process is frozen, no other is left to notice.
            for_good = processes > 1 and rng.random() < 1 / 3
            fault = fault._replace(seconds=FOR_GOOD if for_good else rng.uniform(*SECONDS))
        elif kind == "slow":
            fault = fault._replace(share=rng.uniform(*STOPPED))
        faults.append(fault)
    return faults


class Slowdown:
    """Stops a process for a share of each `PERIOD`; call `tick` as often as you can, and let it go on at the end."""

    def __init__(self, process: subprocess.Popen, share: float):
        self._process, self._share = process, share
        self._began, self._stopped = time.monotonic(), False

    def tick(self) -> None:
        """Stops the process, or lets it go on, as the clock demands."""
        phase = (time.monotonic() - self._began) % PERIOD / PERIOD
        stop = phase < self._share
        if stop != self._stopped:
            self._process.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)
            self._stopped = stop


def whole_checkpoints(run: Path) -> list[Path]:
    """Returns the committed checkpoints of a run, oldest first."""
    found = [path for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def saving_since(run: Path, after: float) -> float | None:
    """Returns when the save under way began, in seconds since 1970; None without one.

    Args:
      run: the run directory.
      after: what was left behind before that time doesn't count.
    """
    begun = []
    # Such as 20.3.tmp; an old checkpoint that is being deleted is 20.old.tmp.
    for path in (run / "checkpoints").glob("[0-9]*.[0-9]*.tmp"):
        with contextlib.suppress(OSError):  # it has just been committed
            # The oldest file tells a folder's age better than the folder itself, whose time changes.
            times = [one.stat().st_mtime for one in (path, *path.rglob("*"))]
            begun.append(min(times))
    return min((when for when in begun if when > after), default=None)


def tear(checkpoint: Path, rng: random.Random) -> str:
    """Damages one file of a checkpoint; returns what was done."""
    paths = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size)
    path = rng.choice(paths)
    size, name = path.stat().st_size, path.relative_to(checkpoint.parent)
    if rng.random() < 0.5:
        os.truncate(path, size // 2)
        return f"{name} cut to {size // 2:,} of {size:,} bytes"
    count = min(size, 64)
    with path.open("r+b") as file:
        file.seek(rng.randrange(size - count + 1))
        old = file.read(count)
        file.seek(-count, os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in old))
    return f"{count} bytes of {name} changed"


def can_fill_disks() -> bool:
    """Whether this system lets a process change another's limits, as `disk` needs: Linux does."""
    if sys.platform == "win32":
        return False
    import resource

    return hasattr(resource, "prlimit")


def fill_disk(processes: Sequence[subprocess.Popen]) -> None:
    """Keeps these processes' files from growing, until they end."""
    import resource

    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))


def _poison_next(*_: object) -> None:
    """Puts a NaN among the weights of the batch that is taken next, in the part that this process holds."""
    from minitext.data.batches import Batches

    take = Batches.take

    def poisoned(self: Batches, _state: Any) -> Any:
        Batches.take = take
        batch = take(self, _state)
        print(POISONED, file=sys.stderr, flush=True)
        return batch | {"loss_mask": _with_nan(batch["loss_mask"])}

    Batches.take = poisoned


def _with_nan(array: Any) -> Any:
    import jax
    import numpy as np

    pieces = []
    for shard in array.addressable_shards:
        piece = np.array(shard.data)
        piece.flat[0] = np.nan
        pieces.append(jax.device_put(piece, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def _die_with_parent() -> None:
    """Has the system kill this process when the supervisor ends, however it ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    _die_with_parent()
    signal.signal(signal.SIGUSR2, _poison_next)
    runpy.run_module("minitext", run_name="__main__", alter_sys=True)
