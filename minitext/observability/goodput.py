"""Where a run's wall time goes: a ledger of events that the training loop appends to, and each kind's share.

Goodput is the time of the steps that count, divided by the wall time from the start of the first job to the last
event. A job is one start of `minitext train`; a run that is killed and restarted has several. The steps that a kill
undid are repeated by the next job: the time of their first execution is lost.

    RUN/events.jsonl    {"event": "step", "start": 1760000000.25, "seconds": 0.125, "step": 7}

`start` is in seconds since 1970. A job's events are contiguous: whatever the loop's thread does between two of them
belongs to the later one. Only process 0 writes: once a second, and before each save, so a kill can't lose the events of
a step that is in a checkpoint.

Chapters: 20.
"""

import math
import os
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from minitext.errors import UserError
from minitext.observability import metrics
from minitext.terminal import print_tables, table

EVENTS = "events.jsonl"
# Every kind of time, in the tables' order. `lost`, `other` and `idle` are never written: `account` derives them.
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
# Shorter events, except steps, aren't written: their time counts toward the next event.
SHORTEST = 1e-3
FLUSH_SECONDS = 1.0


class Ledger(AbstractContextManager):
    """Appends a run's events to its `events.jsonl`.

    An event costs a clock reading and a list entry. About once a second the lines go to the operating system, in one
    call, but they are never flushed to the disk: a killed process loses up to a second of events, and a power failure
    a few more. The time of lost events counts as idle.

    Args:
      directory: the run directory.
      began: when the job began, in seconds since 1970; by default now.
      writes: False in processes other than 0, which keep no ledger.
    """

    def __init__(self, directory: Path | str, began: float | None = None, writes: bool = True):
        # Durations come from a monotonic clock; only the job's start is the time of day.
        self._offset = time.time() - time.perf_counter()
        self._last = time.perf_counter() if began is None else began - self._offset
        self._lines: list[str] = []
        self._file = None
        if writes:
            path = Path(directory) / EVENTS
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._lines.append("")  # ends a line that a kill cut off
        self._flushed = self._last
        self._write("job_start", time.perf_counter(), None)
        self.flush()

    def lap(self, event: str, step: int | None = None, running: Any = None) -> None:
        """Records that the time since the last event went into this one.

        Args:
          event: one of `KINDS`.
          step: the step it belongs to.
          running: an array that the device was computing meanwhile. If it isn't ready yet, the device didn't have to
            wait, so nothing is recorded and the time counts toward the step that ends next.
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
        """Hands the collected lines to the operating system."""
        self._flushed = time.perf_counter()
        lines, self._lines = self._lines, []
        if self._file is not None and lines:
            os.write(self._file, ("\n".join(lines) + "\n").encode())

    def close(self) -> None:
        """Records the end of the job and closes the file."""
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

    def __exit__(self, *_: object) -> None:
        self.close()


class Event(NamedTuple):
    """One line of a ledger: times in seconds, `start` since 1970; `step` is None outside the loop."""

    event: str
    start: float
    seconds: float
    step: int | None = None


def read_events(directory: Path | str) -> list[Event]:
    """Reads a run's ledger, skipping lines that aren't an event of a known kind."""
    found = []
    for record in metrics.read_json_lines(Path(directory) / EVENTS):
        try:
            step = record.get("step")
            times = float(record["start"]), float(record["seconds"])
            event = Event(record["event"], *times, step if isinstance(step, int) else None)
            known = event.event in KINDS
        except (ValueError, KeyError, TypeError):
            continue
        if known and math.isfinite(event.start) and 0 <= event.seconds < math.inf:
            found.append(event)
    return found


@dataclass(frozen=True)
class Goodput:
    """Where a run's wall time went.

    Attributes:
      seconds: by kind (`KINDS`); they sum to `wall`.
      wall: seconds from the start of the first job to the last event; no interval is negative, even if the clock was
        set back.
      jobs: how often the run was started.
      steps: number of steps that count.
      lost_steps: number of steps that had to be repeated.
      mfu: model FLOPs utilisation (`minitext.observability.metrics.mfu`) during the steps that count, or None.
      spans: what happened when, sorted by time; neighbours of one kind are merged.
    """

    seconds: dict[str, float]
    wall: float
    jobs: int
    steps: int
    lost_steps: int
    mfu: float | None = None
    spans: tuple[Event, ...] = field(default=(), repr=False)

    def share(self, kind: str) -> float:
        """Returns a kind's share of the wall time, 0 to 1."""
        return self.seconds[kind] / self.wall if self.wall else 0.0

    @property
    def goodput(self) -> float:
        """The share of the steps that count."""
        return self.share("step")

    @property
    def mfu_of_wall(self) -> float | None:
        """The utilisation over the whole wall time: MFU times goodput."""
        return None if self.mfu is None else self.mfu * self.goodput

    def to_json(self) -> dict[str, Any]:
        """Returns everything except the spans, plus each kind's share, for json.dumps."""
        found = asdict(self)
        del found["spans"]
        shares = {kind: self.share(kind) for kind in self.seconds}
        more = {"goodput": self.goodput, "mfu_of_wall": self.mfu_of_wall, "shares": shares}
        return found | more


def read_ledger(directory: Path | str) -> list[Event]:
    """Like `read_events`, for a directory that must have a ledger.

    Raises:
      UserError: if it has none.
    """
    events = read_events(directory)
    if not events:
        found = "no event that can be read in" if (Path(directory) / EVENTS).exists() else "no"
        raise UserError(
            f"{directory} has {found} {EVENTS}: name a run directory, such as runs/NAME"
        )
    return events


def measure(directory: Path | str) -> Goodput:
    """Measures a run's goodput, also while it trains; raises what `read_ledger` raises."""
    return account(read_ledger(directory), metrics.read_metrics(directory))


def account(events: list[Event], lines: list[dict[str, Any]] | None = None) -> Goodput:
    """Divides the wall time among the kinds of event.

    A job's time is swept from the start of its first event to the end of its last. A moment that two events claim
    belongs to the earlier one; a moment that none claims is `other`. Jobs don't overlap: a job that seems to begin
    before the previous one ended, because the clock was set back, counts as its immediate successor.

    Args:
      events: in the order in which they were written.
      lines: the records of `metrics.jsonl`, for the MFU.
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
    """For each job, the last of its steps that no later job repeated."""
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
        spans[-1] = spans[-1]._replace(seconds=spans[-1].seconds + end - start)
    elif end > start:
        spans.append(Event(kind, start, end - start))


def _mfu(steps: int, seconds: float, lines: list[dict[str, Any]]) -> float | None:
    """The utilisation of this many steps, which took this many seconds.

    A line's time may include a compilation. Its product with the line's utilisation doesn't: that is the time of one
    step at peak speed, so this function uses only the product.
    """
    at_peak = [
        r["mfu"] * r["seconds"]
        for r in lines
        if isinstance(r.get("mfu"), float) and isinstance(r.get("seconds"), float)
    ]
    return steps * sum(at_peak) / len(at_peak) / seconds if at_peak and seconds else None


def print_goodput(found: Goodput, width: int = 40) -> None:
    """Prints the share of each kind of time as a table with bars."""
    text = (
        f"[bold]goodput {found.goodput:.1%}[/]: {found.steps:,} steps that count took {found.seconds['step']:,.1f} of "
        f"{found.wall:,.1f} s, in {found.jobs} job{'s' * (found.jobs > 1)}; {found.lost_steps:,} steps were lost"
    )
    if found.mfu is not None:
        text += f"\nMFU {found.mfu:.1%} in these steps, {found.mfu_of_wall:.1%} of the wall time\n{metrics.MFU}"
    shares = {kind: (s, found.share(kind)) for kind, s in found.seconds.items() if s >= SHORTEST}
    rows = [
        (kind, f"{seconds:,.2f}", f"{share:.1%}", "█" * round(width * share), KINDS[kind])
        for kind, (seconds, share) in shares.items()
    ]
    print_tables(text, table(("time", "seconds", "share", "", "what it is"), rows, (1, 2)))
