"""What faults cost a run of several processes: each second of its wall time has a cause, and each fault its bill.

`goodput` reads the ledger that training writes. Whatever supervises a job sees more: when it started processes, when a
fault came, when the job noticed, when the last process was gone. `account` joins both records. Each cause is measured
from a record of its own and never taken as what is left of the wall time, so the seconds that no record covers are
known too: `unexplained`.

Chapters: 21.
"""

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from minitext.observability.goodput import Event

# In the tables' order.
CAUSES = {
    "step": "steps that count, at their usual pace",
    "slow": "what a slow or frozen process added",
    "lost": "steps that a fault undid, and that were repeated",
    "detect": "from a fault until the job noticed",
    "restart": "from then until the next processes started",
    "start-up": "imports, joining the job, opening data, reading a checkpoint",
    "compile": "tracing and compiling the step",
    "checkpoint": "held up by a checkpoint",
    "other": "data, logs, evaluation, samples",
    "end": "closing files, leaving the job",
    "unexplained": "no record covers it",
}
_CAUSE_OF = {
    "step": "step", "compile": "compile", "save": "checkpoint", "job_end": "end",
    "job_start": "start-up", "init": "start-up", "restore": "start-up",
}  # fmt: skip
IN_FLIGHT = 2  # steps that may be under way when a fault comes, without a line yet


@dataclass
class Strike:
    """A fault, as the supervisor saw it. Times in seconds since 1970.

    Attributes:
      kind: such as `kill`; `unplanned` for an end that no fault of ours explains.
      at: when it came.
      process: the index of the process that it hit.
      detail: what exactly was done.
      step: the newest step of which there was a line.
      allowed: steps that may have to be repeated.
      over: when it ended by itself; None for one that ends the attempt.
      noticed: when the job said so, or a process ended because of it; None for a fault that passes.
      noticed_by: the line, or who noticed.
      saving_since: when the save that it interrupted began; None without one.
    """

    kind: str
    at: float
    process: int
    detail: str = ""
    step: int = 0
    allowed: int = 0
    over: float | None = None
    noticed: float | None = None
    noticed_by: str = ""
    saving_since: float | None = None


@dataclass
class Attempt:
    """One start of the job.

    Attributes:
      start: when its processes were started.
      end: when the last of them was gone.
      resumed: the step of the checkpoint that it began from; None if it ended before it had one.
      lines: (step, seconds) of each line that it wrote to `metrics.jsonl`.
      strikes: the faults that hit it; if it failed, the last of them ended it.
      failed: whether a fault ended it.
    """

    start: float
    end: float = 0.0
    resumed: int | None = None
    lines: list[tuple[int, float]] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    failed: bool = False


@dataclass(frozen=True)
class Bill:
    """What one fault cost.

    Attributes:
      strike: the fault.
      resumed: the step from which the job went on; None if it didn't have to start again.
      repeated: steps that were taken again because of it.
      seconds: by cause, without `step`.
    """

    strike: Strike
    resumed: int | None
    repeated: int
    seconds: dict[str, float]

    @property
    def detect(self) -> float | None:
        """Seconds until the job noticed."""
        return None if self.strike.noticed is None else self.strike.noticed - self.strike.at

    @property
    def lost(self) -> float:
        """Seconds that it cost in all."""
        return sum(self.seconds.values())


class _Record(NamedTuple):
    start: float
    end: float
    cause: str
    strike: int | None = None  # number of the fault that it is due to
    step: int | None = None  # of a step that was lost


@dataclass(frozen=True)
class Downtime:
    """Where the wall time of a supervised run went.

    Attributes:
      seconds: by cause (`CAUSES`); they sum to `wall`.
      wall: seconds from the start of the first process to the end of the last.
      claimed_twice: seconds that two records claim; they count once, for the earlier one.
      steps: how many count.
      lost_steps: how many had to be repeated.
      bills: one for each fault, in order.
      spans: what happened when, sorted; `event` is a cause.
    """

    seconds: dict[str, float]
    wall: float
    claimed_twice: float
    steps: int
    lost_steps: int
    bills: tuple[Bill, ...]
    spans: tuple[Event, ...] = field(default=(), repr=False)

    def share(self, cause: str) -> float:
        """Returns a cause's share of the wall time, 0 to 1."""
        return self.seconds[cause] / self.wall if self.wall else 0.0

    @property
    def goodput(self) -> float:
        """The share of the steps that count, at their usual pace."""
        return self.share("step")

    @property
    def accounted(self) -> float:
        """The share of the wall time that exactly one record covers."""
        return 1 - (self.seconds["unexplained"] + self.claimed_twice) / self.wall

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the spans, for json.dumps; times of faults count from the start of the run."""
        began = self.spans[0].start if self.spans else 0.0
        bills = []
        for bill in self.bills:
            strike = asdict(bill.strike)
            for name in ("at", "over", "noticed", "saving_since"):
                strike[name] = None if strike[name] is None else round(strike[name] - began, 3)
            costs = {cause: round(n, 3) for cause, n in bill.seconds.items()}
            bills.append(strike | {
                "resumed": bill.resumed, "repeated": bill.repeated,
                "seconds_to_notice": None if bill.detect is None else round(bill.detect, 3),
                "seconds_lost": round(bill.lost, 3), "seconds": costs,
            })  # fmt: skip
        return {
            "goodput": self.goodput, "accounted": self.accounted, "wall": self.wall,
            "seconds": self.seconds, "claimed_twice": self.claimed_twice,
            "steps": self.steps, "lost_steps": self.lost_steps, "faults": bills,
        }  # fmt: skip


def account(attempts: Sequence[Attempt], events: Sequence[Event]) -> Downtime:
    """Gives each second of a supervised run its cause.

    A step counts unless a later attempt resumed from a lower step. A fault is charged for the steps that it undid, for
    the time until it was noticed, for the restart with its start-up and compilation, and for what it added to steps
    while it lasted. The fault that undid a step is the one that ended the last attempt that still had it. An attempt
    that is killed before it has read a checkpoint undoes nothing.

    Args:
      attempts: in order.
      events: of the run's ledger, whose job k is the attempt in whose time it began.
    """
    strikes = [strike for attempt in attempts for strike in attempt.strikes]
    jobs = _by_attempt(attempts, events)
    usual = _usual_pace(jobs, strikes)
    records: list[_Record] = []
    blamed: int | None = None  # the fault because of which this attempt was started
    for index, attempt in enumerate(attempts):
        after = attempts[index + 1].start if index + 1 < len(attempts) else attempt.end
        for record in _records(attempt, jobs[index], usual, after, strikes):
            if record.cause == "step" and _is_undone(attempts, index, record.step):
                payer = _undone_by(attempts, index, record.step, strikes)
                record = record._replace(cause="lost", strike=payer)
            elif record.cause in ("start-up", "compile"):
                record = record._replace(strike=blamed)
            records.append(record)
        blamed = _number(strikes, attempt.strikes[-1]) if attempt.failed else None
    taken = [
        (index, event.step or 0)
        for index, job in enumerate(jobs)
        for event in job
        if event.event == "step"
    ]
    useful = {step for index, step in taken if not _is_undone(attempts, index, step)}
    repeated = [0] * len(strikes)
    for index, attempt in enumerate(attempts):
        for step, _ in attempt.lines:
            if _is_undone(attempts, index, step):
                repeated[_undone_by(attempts, index, step, strikes)] += 1
    return _sweep(records, attempts, strikes, repeated, len(useful))


def _is_undone(attempts: Sequence[Attempt], index: int, step: int | None) -> bool:
    """Whether a later attempt resumed from below this step."""
    lows = [a.resumed for a in attempts[index + 1 :] if a.resumed is not None]
    return min(lows, default=step or 0) < (step or 0)


def _undone_by(
    attempts: Sequence[Attempt], index: int, step: int | None, strikes: Sequence[Strike]
) -> int:
    """The fault that undid a step of an attempt."""
    ended = index
    for later in range(index + 1, len(attempts)):
        resumed = attempts[later].resumed
        if resumed is not None and resumed < (step or 0):
            break
        if resumed is not None:
            ended = later
    return _number(strikes, attempts[ended].strikes[-1])


def _number(strikes: Sequence[Strike], strike: Strike) -> int:
    return next(i for i, one in enumerate(strikes) if one is strike)


def _by_attempt(attempts: Sequence[Attempt], events: Sequence[Event]) -> list[list[Event]]:
    jobs: list[list[Event]] = [[] for _ in attempts]
    starts = [attempt.start for attempt in attempts]
    for event in sorted(events, key=lambda event: event.start):
        jobs[max(0, bisect.bisect_right(starts, event.start) - 1)].append(event)
    return jobs


def _usual_pace(
    jobs: Sequence[Sequence[Event]], strikes: Sequence[Strike]
) -> dict[str, list[float]]:
    """The sorted durations of each kind of event while no fault lasted."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in (event for job in jobs for event in job):
        if _lasting(event, strikes) is None:
            found[event.event].append(event.seconds)
    return {kind: sorted(seconds) for kind, seconds in found.items()}


def _lasting(event: Event, strikes: Sequence[Strike]) -> int | None:
    """The number of the fault that lasted during an event, if one did."""
    for number, strike in enumerate(strikes):
        over = strike.over
        if over is not None and event.start < over and event.start + event.seconds > strike.at:
            return number
    return None


def _records(
    attempt: Attempt,
    job: Sequence[Event],
    usual: dict[str, list[float]],
    after: float,
    strikes: Sequence[Strike],
) -> Iterator[_Record]:
    """What is known of the time from an attempt's start to the next attempt's."""
    last = job[0].start if job else attempt.start
    yield _Record(attempt.start, last, "start-up")
    for event in job:
        end, cause = event.start + event.seconds, _CAUSE_OF.get(event.event, "other")
        last = max(last, end)
        number, normal = _lasting(event, strikes), usual.get(event.event)
        if number is None or not normal:
            yield _Record(event.start, end, cause, step=event.step)
            continue
        part = event.start + min(event.seconds, statistics.median(normal))
        yield _Record(event.start, part, cause, step=event.step)
        yield _Record(part, end, "slow", number)
    if not attempt.failed:
        yield _Record(last, attempt.end, "end")
        return
    fault = attempt.strikes[-1]
    number, noticed = _number(strikes, fault), max(fault.noticed or 0.0, fault.at)
    for record in _tail(attempt, job, usual, last, fault):
        last = record.end
        yield record._replace(strike=number)
    if noticed > last:
        yield _Record(max(last, fault.at), noticed, "detect", number)
    yield _Record(max(last, noticed), after, "restart", number)


def _tail(
    attempt: Attempt,
    job: Sequence[Event],
    usual: dict[str, list[float]],
    last: float,
    fault: Strike,
) -> Iterator[_Record]:
    """What a killed job did after the last event in its ledger, which loses up to a second.

    Before each save the ledger is written, so all of it was undone: steps that have a line, those under way, and the
    save that the fault interrupted.
    """
    if last >= fault.at:
        return
    known = max((event.step or 0 for event in job if event.event == "step"), default=0)
    if not known and not attempt.lines:  # it never came to a step
        yield _Record(last, fault.at, "start-up")
        return
    seconds = sum(seconds for step, seconds in attempt.lines if step > known)
    paces = usual.get("step") or [0.0]
    seconds += IN_FLIGHT * paces[int(0.9 * (len(paces) - 1))]
    until = fault.at if fault.saving_since is None else min(fault.saving_since, fault.at)
    end = max(last, min(last + seconds, until))
    yield _Record(last, end, "lost")
    if fault.saving_since is not None:
        yield _Record(max(end, fault.saving_since), fault.at, "checkpoint")


def _sweep(
    records: list[_Record],
    attempts: Sequence[Attempt],
    strikes: Sequence[Strike],
    repeated: Sequence[int],
    useful: int,
) -> Downtime:
    seconds, twice = dict.fromkeys(CAUSES, 0.0), 0.0
    costs = [dict.fromkeys(CAUSES, 0.0) for _ in strikes]
    spans: list[Event] = []
    cursor = attempts[0].start

    def add(cause: str, start: float, end: float) -> None:
        seconds[cause] += end - start
        if spans and spans[-1].event == cause:
            spans[-1] = spans[-1]._replace(seconds=end - spans[-1].start)
        else:
            spans.append(Event(cause, start, end - start))

    for record in sorted(records, key=lambda record: record.start):
        if record.end <= record.start:
            continue
        if record.start > cursor:
            add("unexplained", cursor, record.start)
        twice += max(0.0, min(cursor, record.end) - record.start)
        begin, cursor = max(cursor, record.start), max(cursor, record.end)
        if cursor > begin:
            add(record.cause, begin, cursor)
            if record.strike is not None:
                costs[record.strike][record.cause] += cursor - begin
    bills = tuple(
        Bill(strike, _resumed(attempts, strike), n, {c: s for c, s in cost.items() if s > 0})
        for strike, n, cost in zip(strikes, repeated, costs, strict=True)
    )
    wall = sum(seconds.values())
    return Downtime(seconds, wall, twice, useful, sum(repeated), bills, tuple(spans))


def _resumed(attempts: Sequence[Attempt], strike: Strike) -> int | None:
    """The step from which the job went on after a fault; None if it didn't end the attempt."""
    for index, attempt in enumerate(attempts):
        if attempt.failed and attempt.strikes[-1] is strike:
            later = (a.resumed for a in attempts[index + 1 :])
            return next((step for step in later if step is not None), None)
    return None
