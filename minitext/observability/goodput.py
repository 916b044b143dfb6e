"""Where a run's time goes: a ledger of events that the loop appends to, and the share of each kind in the wall time.

Goodput is the time of steps that still count, divided by the wall time from the start of the first job to the last
event. A job is one start of `minitext train`; a run that is killed and started again has several. Steps that a kill
undid are done again by the next job: their first time is lost, not useful.

    RUN/events.jsonl    {"event": "step", "start": 1760000000.25, "seconds": 0.125, "step": 7}

`start` is in seconds since 1970. Within a job the events lie end to end: what the loop's thread does between two of
them belongs to the later one. Only process 0 writes: once a second, and before each save, so that a kill takes no step
from the ledger that a checkpoint has.

Chapters: 20.
"""

import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from minitext.errors import UserError
from minitext.observability import metrics

EVENTS = "events.jsonl"
# Every kind of time, in the order of the tables. The last three are never written: they are found by `measure`.
KINDS = {
    "step": "steps that count",
    "lost": "steps that a kill undid",
    "data_wait": "waiting for data",
    "compile": "tracing and compiling the step",
    "log": "metrics.jsonl, TensorBoard, progress bar",
    "evaluation": "validation loss",
    "sample": "text samples",
    "save": "held up by a checkpoint",
    "restore": "reading a checkpoint",
    "init": "drawing parameters, preparing the loop",
    "job_start": "imports, devices, opening data",
    "profile": "writing a trace",
    "job_end": "closing files",
    "other": "no event covers it",
    "idle": "no job ran",
}
# Shorter events, but for steps, are not written: they count to what follows them.
SHORTEST = 1e-3
FLUSH_SECONDS = 1.0


class Ledger:
    """Appends a run's events to its `events.jsonl`.

    An event is a clock reading and an entry in a list. Lines are handed to the operating system about once a second,
    whole and in one call, and never flushed to the disk: a killed process loses a second of events, a machine that
    loses its power a few more, and what is lost counts as idle time.

    Args:
      directory: the run directory.
      began: when the job began, in seconds since 1970; by default now.
      writes: False in processes other than 0, which keep no ledger.
    """

    def __init__(self, directory: Path | str, began: float | None = None, writes: bool = True):
        # Differences are taken of a clock that is never set; only the job's start is the time of day.
        self._offset = time.time() - time.perf_counter()
        self._last = time.perf_counter() if began is None else began - self._offset
        self._lines: list[str] = []
        self._file = None
        if writes:
            path = Path(directory) / EVENTS
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._lines.append("")  # ends the line that a kill cut off
        self._flushed = self._last
        self._write("job_start", time.perf_counter(), None)
        self.flush()

    def lap(self, event: str, step: int | None = None, running: Any = None) -> None:
        """Writes that the time since the last event went into this one.

        Args:
          event: one of `KINDS`.
          step: the step it belongs to.
          running: an array that the device was computing meanwhile. If it still is, the device did not wait, and the
            time counts to the step that comes to its end next.
        """
        if running is not None and not running.is_ready():
            return
        now = time.perf_counter()
        if now - self._last < SHORTEST and event != "step":
            return
        self._write(event, now, step)
        if now - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hands what is kept back to the operating system."""
        self._flushed = time.perf_counter()
        lines, self._lines = self._lines, []
        if self._file is not None and lines:
            os.write(self._file, ("\n".join(lines) + "\n").encode())

    def close(self) -> None:
        """Writes that the job ended, and closes the file."""
        if self._file is None:
            return
        self._write("job_end", time.perf_counter(), None)
        self.flush()
        os.close(self._file)
        self._file = None

    def _write(self, event: str, now: float, step: int | None) -> None:
        start, seconds, self._last = self._last + self._offset, max(0.0, now - self._last), now
        at = "" if step is None else f', "step": {step}'
        line = f'{{"event": "{event}", "start": {start:.6f}, "seconds": {seconds:.6f}{at}}}'
        self._lines.append(line)

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Event(NamedTuple):
    """One line of a ledger: times in seconds, `start` since 1970; `step` is None outside of the loop."""

    event: str
    start: float
    seconds: float
    step: int | None = None


def read_events(directory: Path | str) -> list[Event]:
    """Reads a run's ledger; lines that a kill cut off, and events of unknown kinds, are left out."""
    path = Path(directory) / EVENTS
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            step = record.get("step")
            times = float(record["start"]), float(record["seconds"])
            event = Event(record["event"], *times, step if isinstance(step, int) else None)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if event.event in KINDS and math.isfinite(event.start) and 0 <= event.seconds < math.inf:
            found.append(event)
    return found


@dataclass(frozen=True)
class Goodput:
    """Where a run's wall time went.

    Attributes:
      seconds: by kind (`KINDS`); they sum to `wall`.
      wall: seconds from the start of the first job to the last event, less what a clock that was set back would make
        negative.
      jobs: how often the run was started.
      steps: steps that count.
      lost_steps: steps that were done and done again.
      mfu: model FLOPs utilisation (`minitext.observability.metrics.mfu`) during the steps that count, or None.
      spans: what was done when, in order of time; neighbours of one kind are one.
    """

    seconds: dict[str, float]
    wall: float
    jobs: int
    steps: int
    lost_steps: int
    mfu: float | None = None
    spans: tuple[Event, ...] = field(default=(), repr=False)

    def share(self, kind: str) -> float:
        """Returns the part of the wall time that went into a kind, 0 to 1."""
        return self.seconds[kind] / self.wall if self.wall else 0.0

    @property
    def goodput(self) -> float:
        """The time of steps that count, divided by the wall time."""
        return self.share("step")

    @property
    def mfu_of_wall(self) -> float | None:
        """The utilisation if all of the wall time counted: MFU times goodput."""
        return None if self.mfu is None else self.mfu * self.goodput

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the spans, and the share of each kind, for json.dumps."""
        found = asdict(self)
        del found["spans"]
        shares = {kind: self.share(kind) for kind in self.seconds}
        return found | {
            "goodput": self.goodput, "mfu_of_wall": self.mfu_of_wall, "shares": shares,
        }  # fmt: skip


def measure(directory: Path | str) -> Goodput:
    """Measures a run's goodput, also while it trains.

    Raises:
      UserError: if the directory holds no ledger.
    """
    events = read_events(directory)
    if not events:
        fault = "no event that can be read in" if (Path(directory) / EVENTS).exists() else "no"
        raise UserError(
            f"{directory} has {fault} {EVENTS}: name a run directory, such as runs/NAME"
        )
    return account(events, metrics.read_metrics(directory))


def account(events: list[Event], lines: list[dict[str, Any]] | None = None) -> Goodput:
    """Divides the wall time among the kinds of event.

    A job's time is swept from its first event to its last one's end: where two events claim a moment the earlier has
    it, and what none claims is `other`. Jobs do not overlap: a job that seems to begin before the last one ended, as
    after a clock was set back, follows on it.

    Args:
      events: in the order in which they were written.
      lines: the lines of `metrics.jsonl`, for the MFU.
    """
    jobs = _split(events)
    seconds = dict.fromkeys(KINDS, 0.0)
    spans: list[Event] = []
    useful: set[int] = set()
    lost = 0
    end = None
    for job, undone in zip(jobs, _undone(jobs), strict=True):
        job = sorted(job, key=lambda event: event.start)
        cursor = job[0].start
        if end is not None and cursor > end:
            _add(spans, seconds, "idle", end, cursor)
        steps = {e.step for e in job if e.event == "step" and e.step is not None}
        lost += len({step for step in steps if step > undone})
        useful |= {step for step in steps if step <= undone}
        for event in job:
            if event.start > cursor:
                _add(spans, seconds, "other", cursor, event.start)
            begin, cursor = max(cursor, event.start), max(cursor, event.start + event.seconds)
            is_lost = event.event == "step" and (event.step or 0) > undone
            _add(spans, seconds, "lost" if is_lost else event.event, begin, cursor)
        end = cursor
    mfu = _mfu(len(useful), seconds["step"], lines or [])
    wall = sum(seconds.values())
    return Goodput(seconds, wall, len(jobs), len(useful), lost, mfu, tuple(spans))


def _split(events: list[Event]) -> list[list[Event]]:
    """The events of each job."""
    jobs: list[list[Event]] = []
    for event in events:
        if event.event == "job_start" or not jobs:
            jobs.append([])
        jobs[-1].append(event)
    return jobs


def _undone(jobs: list[list[Event]]) -> list[float]:
    """For each job the last of its steps that no later job did again."""
    found, first = [], math.inf
    for job in reversed(jobs):
        found.append(first - 1)
        steps = [e.step for e in job if e.event in ("step", "compile") and e.step is not None]
        first = min([first, *steps])
    return found[::-1]


def _add(
    spans: list[Event], seconds: dict[str, float], kind: str, start: float, end: float
) -> None:
    seconds[kind] += end - start
    if spans and spans[-1].event == kind:
        last = spans.pop()
        spans.append(last._replace(seconds=last.seconds + end - start))
    elif end > start:
        spans.append(Event(kind, start, end - start))


def _mfu(steps: int, seconds: float, lines: list[dict[str, Any]]) -> float | None:
    """The utilisation in steps that took so many seconds.

    A line's time may hold a compilation, so only what is the same in every line is taken of it: the product of its
    time and its utilisation, which is what a step takes at the peak.
    """
    at_peak = [
        r["mfu"] * r["seconds"]
        for r in lines
        if isinstance(r.get("mfu"), float) and isinstance(r.get("seconds"), float)
    ]
    return steps * sum(at_peak) / len(at_peak) / seconds if at_peak and seconds else None


def print_goodput(found: Goodput, width: int = 40) -> None:
    """Prints the share of each kind of time as a table with bars."""
    console = Console()
    restarts = f"{found.jobs} job{'s' if found.jobs > 1 else ''}"
    console.print(
        f"[bold]goodput {found.goodput:.1%}[/]: {found.steps:,} steps that count took "
        f"{found.seconds['step']:,.1f} of {found.wall:,.1f} s, in {restarts}; {found.lost_steps:,} steps were lost",
        highlight=False,
    )
    if found.mfu is not None and found.mfu_of_wall is not None:
        console.print(
            f"MFU {found.mfu:.1%} in these steps, {found.mfu_of_wall:.1%} of the wall time\n{metrics.MFU}",
            highlight=False,
        )
    table = Table("time", "seconds", "share", "", "what it is")
    for kind, seconds in found.seconds.items():
        if seconds >= SHORTEST:
            share = found.share(kind)
            bar = "█" * round(width * share)
            table.add_row(kind, f"{seconds:,.2f}", f"{share:.1%}", bar, KINDS[kind])
    console.print(table)
