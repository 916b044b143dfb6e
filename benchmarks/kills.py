"""Kills processes of a two-process run at random moments, and looks at what was lost: nothing may be.

One command, `minitext launch local --processes 2 --restarts N`, trains a tiny model to its end while the worker or the
coordinator (process 0, which also writes metrics and commits checkpoints) is killed with SIGKILL again and again: when
it starts, when it trains, and while a checkpoint is being written. Nothing helps the run but the launcher. Checked are

  * that the job ends within 60 s of each kill, and that the process that is left says in one line who was lost,
  * that no committed step is ever lost, and of the steps since at most the interval between checkpoints,
  * that the curve (every number of metrics.jsonl that no clock has part in) is that of a run left alone, bit for bit.

    python benchmarks/kills.py --kills 30 --steps 900
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from common import parser, write_record
from rich.progress import track

SAVE_EVERY = 10
SETTINGS = [
    "model.layers=1", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "data.seq_len=32",
    "train.global_batch=8", "train.sample_tokens=0", "data.source=grammar", "train.eval_every=50",
    "train.eval_batches=1", f"train.save_every={SAVE_EVERY}",
]  # fmt: skip
TIMING = {"tokens_per_second", "seconds", "mfu", "host_bytes", "device_bytes"}
LIMIT = 60.0  # seconds from a kill to the end of the job
MOMENTS = ("training", "saving", "training", "saving", "starting")
VICTIMS = {0: "coordinator", 1: "worker"}


class Job:
    """A launched run: its processes, and what it has written."""

    def __init__(self, folder: Path, name: str, steps: int, restarts: int):
        self.run = folder / name
        self.output = folder / f"{name}.txt"
        command = [
            sys.executable, "-m", "minitext", "launch", "local", "--processes", "2", "--devices", "1",
            "--restarts", str(restarts), "--", "train", *SETTINGS, f"train.steps={steps}",
            f"run.dir={folder}", f"run.name={name}",
        ]  # fmt: skip
        env = os.environ | {"JAX_PLATFORMS": "cpu", "MINITEXT_CACHE": str(folder / "cache")}
        env.pop("XLA_FLAGS", None)
        with self.output.open("w") as output:
            self.launcher = psutil.Popen(command, env=env, stdout=output, stderr=output)

    def processes(self) -> dict[int, psutil.Process]:
        """The processes that live, by their number in the job."""
        found = {}
        for child in self.launcher.children():
            try:
                if child.status() != psutil.STATUS_ZOMBIE:
                    found[int(child.environ()["MINITEXT_PROCESS_ID"])] = child
            except (psutil.Error, KeyError):  # it has just ended, or not yet begun
                continue
        return found

    def lines(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def newest(self) -> int:
        """The newest committed step; 0 without one."""
        found = (self.run / "checkpoints").glob("*")
        return max((int(path.name) for path in found if path.name.isdigit()), default=0)

    def unfinished(self) -> list[Path]:
        """Checkpoints that are being written; those that a kill left are marked."""
        found = (self.run / "checkpoints").glob("[0-9]*.tmp")
        return [path for path in found if not (path / "left").exists()]

    def curve(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without what depends on the clock."""
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in line.items() if k not in TIMING} for line in lines]

    def end(self) -> None:
        """Waits until it is done; ends the program if it failed."""
        if code := self.launcher.wait():
            self.fail(f"the run ended with exit code {code}")

    def fail(self, why: str) -> None:
        for process in [*self.processes().values(), self.launcher]:
            process.kill()
        sys.exit(f"{why}; its last lines:\n{self.output.read_text()[-3000:]}")


def wait_until(job: Job, condition: Callable[[], Any], seconds: float = 900) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        if job.launcher.poll() is not None:
            job.fail("the run ended before it could be killed: raise --steps")
        if time.monotonic() > end:
            job.fail(f"waited {seconds} s in vain")
        time.sleep(0.002)
    return found


def kill(job: Job, rng: random.Random, victim: int, moment: str) -> dict[str, Any]:
    """Kills one process and waits until the job has ended; returns what was seen."""
    wait_until(job, lambda: len(job.processes()) == 2)
    processes, before, resumed = job.processes(), job.lines(), job.newest()
    if moment == "starting":
        time.sleep(rng.uniform(0, 6))
    else:
        goal = resumed + rng.randrange(1, 2 * SAVE_EVERY)
        # Resuming rewrites the file: lines count from the step that was resumed.
        wait_until(job, lambda: _steps_since(job, resumed) and job.lines() >= goal)
    if moment == "saving":
        wait_until(job, job.unfinished)
    time.sleep(rng.uniform(0, 0.02))
    in_a_save, killed = bool(job.unfinished()), time.monotonic()
    processes[victim].send_signal(signal.SIGKILL)
    psutil.wait_procs(processes.values(), timeout=LIMIT)
    seconds = time.monotonic() - killed
    if any(process.is_running() for process in processes.values()):
        job.fail(f"the job had not ended {LIMIT} s after process {victim} was killed")
    newest, lines = job.newest(), job.lines()
    began = lines != before or newest != resumed
    lost = lines - newest if began else 0
    for path in job.unfinished():
        (path / "left").touch()
    if newest < resumed:
        job.fail(f"step {resumed} was committed, and {newest} is the newest now")
    if lost > SAVE_EVERY:
        job.fail(f"{lost} steps were lost, more than the interval of {SAVE_EVERY}")
    return {
        "victim": VICTIMS[victim],
        "moment": moment,
        "in_a_save": in_a_save,
        "step": lines,
        "checkpoint": newest,
        "steps_lost": lost,
        "seconds_to_end": round(seconds, 2),
    }


def _steps_since(job: Job, resumed: int) -> bool:
    """Whether this start has written a line: those after the step it resumed are its own."""
    text = job.output.read_text().rpartition("launch: ")[2]
    return resumed == 0 or f"resuming after step {resumed}" in text


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--kills", type=int, default=30)
    options.add_argument("--steps", type=int, default=900, help="of the run that is killed")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    rng, begun = random.Random(args.seed), time.monotonic()
    plan = [(i % 2, MOMENTS[i % len(MOMENTS)]) for i in range(args.kills)]
    rng.shuffle(plan)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alone = Job(folder, "alone", args.steps, 0)
        alone.end()
        job, seen = Job(folder, "killed", args.steps, args.kills), []
        for victim, moment in track(plan, "kills"):
            seen.append(kill(job, rng, victim, moment))
        job.end()
        if (curve := alone.curve()) != job.curve():
            job.fail("the curve is another than that of the run that was left alone")
        said = job.output.read_text()
        told = Counter(" died" in line and "error: " in line for line in said.splitlines())[True]
    figures = {
        "kills": len(seen),
        "steps": args.steps,
        "save_every": SAVE_EVERY,
        "seed": args.seed,
        "curve_equal_bit_for_bit": True,
        "lines_compared": len(curve),
        "by_victim": Counter(one["victim"] for one in seen),
        "by_moment": Counter(one["moment"] for one in seen),
        "caught_in_a_save": sum(one["in_a_save"] for one in seen),
        "told_in_one_line_who_died": told,
        "most_steps_lost": max(one["steps_lost"] for one in seen),
        "longest_seconds_to_end": max(one["seconds_to_end"] for one in seen),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "each": seen,
    }
    write_record(args.output, "kills", f"{args.kills}", figures)


if __name__ == "__main__":
    main()
