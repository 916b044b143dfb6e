"""A drill: faults on purpose for a job of several processes, which is started again as often as it takes.

The same command trains twice. Nothing disturbs the first run. The second is hit by fault after fault; each time it
ends, the same command is given again, as a cluster would do. Three questions are answered: where did the time go, down
to the second? Was anything lost beyond the steps since the last checkpoint? And is the final state, bit for bit, that
of the run that was left alone?

Chapters: 21.
"""

import contextlib
import json
import random
import re
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from minitext import files
from minitext.distributed.launch.local import Job, explain
from minitext.errors import DoesNotFit, UserError
from minitext.observability.downtime import CAUSES, Attempt, Bill, Downtime, Strike, account
from minitext.observability.goodput import read_events
from minitext.observability.metrics import FILE, read_metrics
from minitext.terminal import print_tables, table
from minitext.training import faults
from minitext.training.faults import FOR_GOOD, Fault

ALONE, DRILLED = "undisturbed", "drilled"  # the two runs
RECORD = "drill.json"
PATIENCE = 12.0  # seconds for the others to end by themselves
POLL = 0.005
UNPLANNED = 5  # ends that no fault explains, after which the drill gives up
REFUSED = (UserError.exit_code, DoesNotFit.exit_code)
ACCOUNTED = 0.98  # share of the wall time that must have a cause
# Numbers of metrics.jsonl that depend on the clock or the machine.
TIMING = {"tokens_per_second", "seconds", "mfu", "host_bytes", "device_bytes"}
_NOTICED = re.compile(r"^\[\d+\] (?:error: .*|.*; this process ends too)$")


class SettingsRefused(UserError):
    """The job was refused before it began: nothing is kept."""


@dataclass(frozen=True)
class Drill:
    """What a drill found.

    Attributes:
      directory: of both runs, and of their output.
      command: the words after `minitext`.
      save_every: steps between checkpoints.
      planned: how many faults were to come.
      downtime: where the time went.
      alone: seconds that the undisturbed run took.
      curve_equal: whether each number of `metrics.jsonl` is the undisturbed run's, bit for bit, but for times.
      state_equal: the same of every array of the last checkpoint.
    """

    directory: str
    command: tuple[str, ...]
    save_every: int
    planned: int
    downtime: Downtime
    alone: float
    curve_equal: bool
    state_equal: bool

    @property
    def failures(self) -> list[str]:
        """What didn't hold, a line each."""
        found, bills = [], self.downtime.bills
        came = sum(bill.strike.kind != "unplanned" for bill in bills)
        if came < self.planned:
            found.append(f"{came} of {self.planned} faults came before the run ended")
        for bill in bills:
            if bill.repeated > bill.strike.allowed:
                found.append(
                    f"{bill.strike.kind} at step {bill.strike.step}: {bill.repeated} steps were repeated, and "
                    f"{bill.strike.allowed} are allowed"
                )
        if self.downtime.accounted < ACCOUNTED:
            found.append(f"only {self.downtime.accounted:.1%} of the wall time has a cause")
        if not (self.curve_equal and self.state_equal):
            what = "state" if self.curve_equal else "curve"
            found.append(f"the final {what} is not that of the undisturbed run")
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns everything, for json.dumps."""
        return {
            "directory": self.directory, "command": list(self.command), "save_every": self.save_every,
            "planned": self.planned, "seconds_undisturbed": self.alone,
            "curve_equal": self.curve_equal, "state_equal": self.state_equal,
            "failures": self.failures, **self.downtime.to_json(),
        }  # fmt: skip


class _Output:
    """Takes the processes' lines, from several threads: into a file, and with their times into a list."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> None:
        with self._lock:
            # A bar that is drawn again and again begins each time with a carriage return.
            self.lines.append((time.time(), text.rstrip("\n").rpartition("\r")[2]))
            self._file.write(text)

    def flush(self) -> None:
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def after(self, when: float) -> Iterator[tuple[float, str]]:
        for at, text in reversed(self.lines[:]):
            if at < when:
                return
            yield at, text


class _Lines:
    """Follows `metrics.jsonl` of one attempt. An attempt that resumes writes the file anew."""

    def __init__(self, path: Path):
        self._path = path
        self._before = self._inode()
        self._current, self._offset, self._rest = self._before, 0, b""
        self.found: list[tuple[int, float]] = []  # (step, seconds)

    def look(self) -> None:
        inode = self._inode()
        if inode in (None, self._before):
            return
        if inode != self._current:
            self._current, self._offset, self._rest = inode, 0, b""
            self.found.clear()
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
            self._offset += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    self.found.append((int(record["step"]), float(record["seconds"])))

    @property
    def step(self) -> int:
        """The newest step with a line; 0 before the first of this attempt."""
        return self.found[-1][0] if self.found else 0

    def _inode(self) -> int | None:
        try:
            return self._path.stat().st_ino
        except OSError:
            return None


class _Supervisor:
    """Starts a job, hits it with faults, and starts it again until it is done."""

    def __init__(
        self,
        words: Sequence[str],
        run: Path,
        processes: int,
        devices: int | None,
        save_every: int,
        seed: int = 0,
    ):
        self._words = [*words, f"run.dir={run.parent}", f"run.name={run.name}"]
        self._run, self._processes, self._devices = run, processes, devices
        self._save_every, self._rng = save_every, random.Random(seed)
        self._output = _Output(run.parent / f"{run.name}.txt")
        self._job = Job(self._output, self._output, PATIENCE, faults.PROGRAM)
        self._lasting: tuple[Strike, Fault, faults.Slowdown | None] | None = None
        self.attempts: list[Attempt] = []

    def run(self, plan: Sequence[Fault], say: Callable[[Strike], None]) -> None:
        """Trains to the end; `say` is given each fault when it comes.

        Raises:
          SettingsRefused: if the settings are.
          UserError: if the job ends again and again without a fault of ours.
        """
        left, unplanned = deque(plan), 0
        try:
            while True:
                code, index = self._attempt(left, say)
                if code == 0:
                    return
                if self._planned_end():
                    continue
                unplanned += 1
                last = f"process {index} ended with {explain(code)}: {self._last_error()}"
                seen = self._run.with_suffix(".txt")
                # Training keeps no run directory that never began.
                if code in REFUSED and not self._run.exists():
                    raise SettingsRefused(self._last_error())
                if unplanned > UNPLANNED or len(self.attempts) == 1:
                    raise UserError(f"the job fails without a fault: {last}; see {seen}")
                say(self._unplanned(last))
        finally:
            self._let_go()
            self._job.end()
            self._output.close()

    def _attempt(self, left: deque[Fault], say: Callable[[Strike], None]) -> tuple[int, int]:
        lines = _Lines(self._run / FILE)
        attempt = Attempt(time.time())
        self.attempts.append(attempt)
        self._job.start(self._words, self._processes, self._devices)
        struck = False
        while (ended := self._job.poll()) is None:
            lines.look()
            self._go_on(lines.step)
            if struck:
                self._notice(attempt.strikes[-1])
            elif left and self._lasting is None and self._is_due(left[0], attempt, lines):
                fault = left.popleft()
                attempt.strikes.append(strike := self._strike(fault, attempt, lines))
                struck = fault.ends_the_attempt
                say(strike)
            time.sleep(POLL)
        self._let_go()
        lines.look()
        attempt.end, attempt.failed = time.time(), ended[0] != 0
        if struck:
            self._notice(attempt.strikes[-1])
        self._read_attempt(attempt, lines)
        return ended

    def _is_due(self, fault: Fault, attempt: Attempt, lines: _Lines) -> bool:
        if fault.moment == "starting" and not lines.found:
            return time.time() > attempt.start + fault.seconds
        if lines.step < fault.step or len(self._job.running) < self._processes:
            return False
        if fault.kind == "tear":
            return len(faults.whole_checkpoints(self._run)) > 1
        if fault.moment == "saving":
            return faults.saving_since(self._run, attempt.start) is not None
        return True

    def _strike(self, fault: Fault, attempt: Attempt, lines: _Lines) -> Strike:
        """Makes a fault happen."""
        process = self._job.running[fault.process]
        since, detail = faults.saving_since(self._run, attempt.start), ""
        if fault.kind == "tear":
            detail = faults.tear(faults.whole_checkpoints(self._run)[-1], self._rng)
        at = time.time()
        if fault.kind in ("kill", "tear"):
            process.kill()
        elif fault.kind == "freeze":
            process.send_signal(signal.SIGSTOP)
        elif fault.kind == "disk":
            faults.fill_disk(self._job.running)
        elif fault.kind == "nan":
            process.send_signal(signal.SIGUSR2)
        strike = Strike(
            fault.kind, at, fault.process, detail or self._detail(fault, since, lines), lines.step,
            fault.allowed(self._save_every), saving_since=since,
        )  # fmt: skip
        if not fault.ends_the_attempt:
            slow = faults.Slowdown(process, fault.share) if fault.kind == "slow" else None
            self._lasting = strike, fault, slow
        return strike

    def _detail(self, fault: Fault, since: float | None, lines: _Lines) -> str:
        if fault.kind == "kill" and not lines.found:
            return "while it started"
        if fault.kind == "kill":
            return "while it saved" if since else "while it trained"
        if fault.kind == "slow":
            return f"stopped {fault.share:.0%} of the time, for {self._save_every} steps"
        if fault.kind == "freeze":
            return "for good" if fault.seconds == FOR_GOOD else f"for {fault.seconds:.1f} s"
        return faults.KINDS[fault.kind]

    def _go_on(self, step: int) -> None:
        """Continues a fault that lasts, and ends it when it is time."""
        if self._lasting is None:
            return
        strike, fault, slow = self._lasting
        seconds = time.time() - strike.at
        if slow is None:
            is_over = seconds > fault.seconds
        else:
            slow.tick()
            is_over = step >= strike.step + self._save_every or seconds > faults.CRAWL
        if is_over:
            self._let_go()

    def _let_go(self) -> None:
        """Ends a fault that lasts."""
        if self._lasting is None:
            return
        strike, _, _ = self._lasting
        self._lasting, strike.over = None, time.time()
        if strike.process < len(self._job.running):
            self._job.running[strike.process].send_signal(signal.SIGCONT)

    def _notice(self, strike: Strike) -> None:
        """Records when, and in what words, the job noticed a fault."""
        if strike.kind == "nan" and strike.noticed is None:
            for at, text in self._output.after(strike.at):
                if text.endswith(faults.POISONED):  # it came with the batch, not with the signal
                    strike.at = at
                    break
        if strike.noticed_by.startswith("["):
            return
        found = [(at, t) for at, t in self._output.after(strike.at) if _NOTICED.match(t)]
        if found:
            strike.noticed, strike.noticed_by = min(found)
            return
        if strike.noticed is None:
            # A process that we killed says nothing; the launcher sees the end of any.
            hit = {strike.process} if strike.kind in ("kill", "tear") else set()
            if self._processes == 1:
                hit = set()
            for index, process in enumerate(self._job.running):
                if index not in hit and process.returncode is not None:
                    strike.noticed, strike.noticed_by = time.time(), f"the end of process {index}"
            if not self._job.running:
                strike.noticed, strike.noticed_by = time.time(), "the end of the job"

    def _read_attempt(self, attempt: Attempt, lines: _Lines) -> None:
        said = [text for _, text in self._output.after(attempt.start)]
        found = [int(m[1]) for t in said if (m := re.search(r"\] resuming after step (\d+)$", t))]
        attempt.resumed = found[0] if found else 0 if lines.found else None
        attempt.lines = [line for line in lines.found if line[0] > (attempt.resumed or 0)]

    def _planned_end(self) -> bool:
        """Whether a fault of ours ended the last attempt."""
        attempt = self.attempts[-1]
        return bool(attempt.strikes) and attempt.strikes[-1].over is None

    def _unplanned(self, why: str) -> Strike:
        """Records an end that no fault of ours explains."""
        attempt = self.attempts[-1]
        noticed = [at for at, text in self._output.after(attempt.start) if _NOTICED.match(text)]
        at = min(noticed, default=attempt.end)
        step = max((step for step, _ in attempt.lines), default=0)
        strike = Strike("unplanned", at, 0, why, step, self._save_every, noticed=at)
        attempt.strikes.append(strike)
        return strike

    def _last_error(self) -> str:
        found = [t for _, t in self._output.after(self.attempts[-1].start) if "error: " in t]
        return found[0].partition("error: ")[2] if found else "it said nothing"


def drill(
    words: Sequence[str],
    directory: Path,
    plan: Sequence[Fault],
    *,
    processes: int,
    devices: int | None = None,
    save_every: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Drill:
    """Trains twice, once undisturbed and once under faults, and compares.

    Args:
      words: preset and settings.
      directory: a new one, for both runs.
      plan: the faults, from `faults.plan`.
      processes: of the job.
      devices: CPU devices that each simulates; None: see `launch.local`.
      save_every: steps between two checkpoints, as in the settings.
      seed: of what is damaged in a checkpoint.
      say: given a line for each thing that happens.

    Raises:
      SettingsRefused: if training refuses the settings; no folder is left behind.
      UserError: if the job fails without a fault.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"cannot make {directory}: {error.strerror}: choose another run.dir"
        ) from error
    command = ["train", *words]
    say(f"undisturbed: {' '.join(command)}")
    alone = _Supervisor(command, directory / ALONE, processes, devices, save_every)
    try:
        alone.run([], lambda strike: say(f"  {strike.detail}"))
    except SettingsRefused:
        shutil.rmtree(directory)
        for path in made[1:]:
            with contextlib.suppress(OSError):  # somebody else's folders may be in it by now
                path.rmdir()
        raise
    seconds = alone.attempts[-1].end - alone.attempts[-1].start
    say(f"undisturbed: done in {seconds:.1f} s; now with {len(plan)} faults")
    hit = _Supervisor(command, directory / DRILLED, processes, devices, save_every, seed)
    hit.run(plan, _announcer(say, hit, len(plan)))
    events = read_events(directory / DRILLED)
    found = account(hit.attempts, events)
    made = Drill(
        str(directory), tuple(command), save_every, len(plan), found, seconds,
        _curve(directory / ALONE) == _curve(directory / DRILLED),
        _same_state(directory / ALONE, directory / DRILLED),
    )  # fmt: skip
    files.write(directory / RECORD, json.dumps(made.to_json(), indent=1) + "\n")
    return made


def _announcer(
    say: Callable[[str], None], run: _Supervisor, count: int
) -> Callable[[Strike], None]:
    done = 0

    def announce(strike: Strike) -> None:
        nonlocal done
        if strike.kind == "unplanned":
            say(f"the job ended without a fault: {strike.detail}")
            return
        done += 1
        say(
            f"fault {done} of {count}, start {len(run.attempts)}, step {strike.step}: {strike.kind} process "
            f"{strike.process}, {strike.detail}"
        )

    return announce


def _curve(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMING} for line in read_metrics(run)]


def _same_state(run: Path, other: Path) -> bool:
    """Whether every array of two runs' last checkpoints is equal, bit for bit."""
    import numpy as np

    first, second = _state(run), _state(other)
    return first.keys() == second.keys() and all(
        np.asarray(first[n]).tobytes() == np.asarray(second[n]).tobytes() for n in first
    )


def _state(run: Path) -> dict[str, Any]:
    import numpy as np

    from minitext.checkpoint.checkpointer import Checkpointer

    with Checkpointer(run / "checkpoints") as checkpointer:
        step = checkpointer.latest()
        assert step is not None
        leaves = checkpointer.facts(step)["layout"]["leaves"]
        wanted = {name: np.zeros(leaf["shape"], leaf["dtype"]) for name, leaf in leaves.items()}
        restored = checkpointer.restore(wanted, step=step)
    assert restored is not None
    return {"step": np.array(step), **restored.state}


def print_drill(found: Drill, width: int = 40) -> None:
    """Prints where the time went, what each fault cost, and what held, on stdout."""
    time_ = found.downtime
    causes = [
        (cause, f"{n:,.2f}", f"{time_.share(cause):.1%}", "█" * round(width * time_.share(cause)), what)
        for cause, what in CAUSES.items()
        if (n := time_.seconds[cause]) > 0
    ]  # fmt: skip
    head = (
        f"[bold]goodput {time_.goodput:.1%}[/]: {time_.steps:,} steps that count took {time_.seconds['step']:,.1f} of "
        f"{time_.wall:,.1f} s; the undisturbed run took {found.alone:,.1f} s in all\n"
        f"{time_.accounted:.2%} of the wall time has a cause"
    )
    faults_ = [_row(number, bill) for number, bill in enumerate(time_.bills, 1)]
    heads = (
        "",
        "fault",
        "process",
        "at step",
        "noticed, s",
        "repeated",
        "allowed",
        "lost, s",
        "what",
    )
    print_tables(
        head,
        table(("time", "seconds", "share", "", "what it is"), causes, (1, 2)),
        table(heads, faults_, (0, 2, 3, 4, 5, 6, 7)),
        "\n".join(_verdict(found)),
    )


def _row(number: int, bill: Bill) -> tuple[str, ...]:
    strike = bill.strike
    noticed = "" if bill.detect is None else f"{bill.detect:.1f}"
    return (
        str(number), strike.kind, str(strike.process), str(strike.step), noticed, str(bill.repeated),
        str(strike.allowed), f"{bill.lost:.1f}", strike.detail[:60],
    )  # fmt: skip


def _verdict(found: Drill) -> list[str]:
    if found.failures:
        return [f"FAILED: {line}" for line in found.failures]
    return [
        "nothing was lost beyond the steps since a checkpoint; curve and final state are those of the undisturbed run, "
        f"bit for bit; see {escape(found.directory)}"
    ]
