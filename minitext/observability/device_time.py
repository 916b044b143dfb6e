"""What each device did during a trace's steps: operations' self time, idle time, hidden and exposed collectives.

It reads traces of CPUs, TPUs and GPUs:

    CPU    operations on the threads of `/host:CPU`, marked with `hlo_op` and the device
    TPU    `/device:TPU:N`: the line `XLA Ops`, and `Async XLA Ops` for what runs alongside
    GPU    `/device:GPU:N`: a line for each stream

The names of TPU planes and lines are the ones XProf documents. No TPU's trace was available: the reader is tested with
traces built from that documentation. A GPU's are those of an H100's trace, in November 2026.

Times are in nanoseconds from the start of the trace, except those of `Device`, which are in seconds.

Chapters: 20.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from minitext.compiler.hlo import COLLECTIVES
from minitext.observability.xplane import Event, Plane, host_lines

_COLLECTIVE = re.compile(rf"^({'|'.join(COLLECTIVES)}|async-collective|nccl)", re.IGNORECASE)
_CONTROL = re.compile(r"^(while|conditional|call)(\.|$)")  # the operations inside them do the work
NS = 1e-9

Interval = tuple[float, float]


@dataclass(frozen=True)
class Device:
    """How one device spent the traced time, in seconds.

    Attributes:
      name: such as `TPU:0`.
      busy: some operation was running.
      idle: none was.
      compute: an operation that isn't a collective was running.
      hidden: a collective was in flight while another operation computed.
      exposed: a collective was in flight and nothing computed: its cost.
    """

    name: str
    busy: float
    idle: float
    compute: float
    hidden: float
    exposed: float

    @property
    def idle_share(self) -> float:
        """The fraction of the traced time in which nothing ran, 0 to 1."""
        total = self.busy + self.idle
        return self.idle / total if total else 0.0


class Ops(NamedTuple):
    """What ran on one device.

    Attributes:
      name: such as `TPU:0`.
      lines: operations; those of one line follow or enclose each other.
      aside: asynchronous operations, which run alongside those.
      programs: runs of whole programs; empty if the trace has no such line.
    """

    name: str
    lines: list[list[Event]]
    aside: list[list[Event]]
    programs: list[Event]


def is_collective(op: str) -> bool:
    """Whether an operation exchanges data with other devices, or waits for such an exchange."""
    return bool(_COLLECTIVE.match(op))


def find_devices(planes: list[Plane]) -> list[Ops]:
    """Returns what ran on each device of a trace; the host's CPU devices if there are no others."""
    found = []
    for plane in planes:
        if not re.match(r"/device:(TPU|GPU):\d+", plane.name):
            continue
        lines = {line.name: line.events for line in plane.lines}
        if "XLA Ops" in lines:
            main = [lines["XLA Ops"]]
        else:
            main = [events for name, events in lines.items() if name.startswith("Stream")]
        if any(main):
            name, aside = plane.name.removeprefix("/device:"), lines.get("Async XLA Ops", [])
            found.append(Ops(name, main, [aside], lines.get("XLA Modules", [])))
    return found or _cpu_devices(planes)


def _cpu_devices(planes: list[Plane]) -> list[Ops]:
    by_device: dict[int, list[list[Event]]] = defaultdict(list)
    for line in host_lines(planes):
        parts: dict[int, list[Event]] = defaultdict(list)
        for event in line.events:
            if "hlo_op" in event.stats:
                parts[int(event.stats.get("device_ordinal", 0))].append(event)
        for device, events in parts.items():
            by_device[device].append(events)
    return [Ops(f"CPU:{n}", lines, [], []) for n, lines in sorted(by_device.items())]


def find_steps(planes: list[Plane], devices: list[Ops]) -> tuple[str, list[Interval]]:
    """Returns the name of the program that took the most time, and when it ran on the first device.

    A GPU's kernels don't say which run they belong to. But each has the number of the call on the host that launched
    it, and the host made that call within one run of the program.
    """
    first, runs, launched = devices[0], defaultdict(list), _launched(planes)
    for event in first.programs or [e for line in first.lines for e in line]:
        if first.programs:  # `jit_train_step(1234567)`
            program, run = event.name.partition("(")[0], event.start
        else:
            program, run = event.stats.get("hlo_module", ""), event.stats.get("run_id")
            run = launched.get(event.stats.get("correlation_id")) if run is None else run
        runs[program, run].append(event)
    times: dict[str, float] = defaultdict(float)
    for (program, _), events in runs.items():
        times[program] += sum(e.end - e.start for e in events)
    main = max(times, key=lambda program: times[program])
    known = {run: events for (program, run), events in runs.items() if program == main}
    if len(known) > 1:
        known.pop(None, None)  # launched before the trace began
    found = ((min(e.start for e in run), max(e.end for e in run)) for run in known.values())
    return main, sorted(found)


def _launched(planes: list[Plane]) -> dict[Any, int]:
    """Returns, for each call that launched kernels, the run that made it, both by number."""
    found, runs = {}, itertools.count()
    for line in host_lines(planes):
        run, end = 0, 0.0
        for event in line.events:
            if event.name.endswith("GpuExecutable::ExecuteThunks"):
                run, end = next(runs), event.end
            elif event.start < end and "correlation_id" in event.stats:
                found[event.stats["correlation_id"]] = run
    return found


def _inside(events: Iterable[Event], window: Interval) -> list[Event]:
    return [e for e in events if e.end > window[0] and e.start < window[1]]


def _segments(events: list[Event]) -> Iterable[tuple[Event, float, float]]:
    """Divides one line's time among its events: each moment belongs to the innermost event around it."""
    stack: list[Event] = []
    cursor = 0.0
    for event in [*events, None]:
        start = float("inf") if event is None else event.start
        while stack and stack[-1].end <= start:
            if stack[-1].end > cursor:
                yield stack[-1], cursor, stack[-1].end
                cursor = stack[-1].end
            stack.pop()
        if event is None:
            return
        if stack and start > cursor:
            yield stack[-1], cursor, start
        stack.append(event)
        cursor = max(cursor, start)


def self_times(devices: list[Ops], window: Interval) -> tuple[dict[str, float], Counter[str]]:
    """Returns each operation's self time in nanoseconds and how often it ran, summed over all devices."""
    times: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for line in (line for device in devices for line in device.lines):
        inside = _inside(line, window)
        counts.update(event.op for event in inside)
        for event, start, end in _segments(inside):
            times[event.op] += end - start
    return times, counts


def account(device: Ops, window: Interval, opcodes: Mapping[str, str] | None = None) -> Device:
    """Returns where a device's time went inside the window.

    Args:
      device: what ran.
      window: its start and end.
      opcodes: operation -> opcode, since a name may hide a collective: a `psum` in a `shard_map` is an all-reduce
        called `psum_invariant.7`.
    """
    opcodes = opcodes or {}
    compute, sending, running = [], [], []
    for line in device.lines:
        inside = _inside(line, window)
        running += [(e.start, e.end) for e in inside]
        sending += _transfers(inside, opcodes)
        for event, start, end in _segments(inside):
            if not is_collective(_kind(event, opcodes)) and not _CONTROL.match(event.op):
                compute.append((start, end))
    for line in device.aside:
        sending += [(e.start, e.end) for e in _inside(line, window) if is_collective(e.op)]
    compute, sending, running = (union(x, window) for x in (compute, sending, running))
    total, busy = window[1] - window[0], length(running)
    either = length(union([*compute, *sending], window))
    hidden = length(compute) + length(sending) - either
    exposed = length(sending) - hidden
    values = busy, total - busy, length(compute), hidden, exposed
    return Device(device.name, *(value * NS for value in values))


def _kind(event: Event, opcodes: Mapping[str, str]) -> str:
    """An operation's opcode if that names a collective, otherwise the operation's name."""
    opcode = opcodes.get(event.op, "")
    return opcode if is_collective(opcode) else event.op


def _transfers(events: list[Event], opcodes: Mapping[str, str]) -> list[Interval]:
    """When collectives are in flight: an asynchronous one from its `-start` to the end of its `-done`."""
    found: list[Interval] = []
    waiting: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if not is_collective(_kind(event, opcodes)):
            continue
        kind, start, number = event.op.partition("-start")
        if start:
            waiting[kind + number].append(event)
        kind, done, number = event.op.partition("-done")
        if done and waiting[kind + number]:
            found.append((waiting[kind + number].pop(0).start, event.end))
        else:
            found.append((event.start, event.end))
    return found


def union(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Returns the union of the intervals inside the window, as sorted disjoint intervals."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, window[0]), min(end, window[1])
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(intervals: list[Interval]) -> float:
    """Returns the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
