"""Summarises a trace offline: where a step's time went on each device, by operation and by part of the model.

Chapters: 20.
"""

import itertools
import re
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from minitext.errors import UserError
from minitext.observability import device_time, xplane
from minitext.observability.device_time import NS, Device, Interval
from minitext.observability.gpu_launches import assign_kernels
from minitext.observability.xplane import Launch, Plane
from minitext.terminal import print_tables, table

# The `jax.named_scope`s of the model and the step: labels that the compiled program carries.
SCOPES = ("embed", "norm", "attention", "ffn", "moe", "logits", "loss", "optimizer")
_SCOPE = re.compile(rf"(?<![\w.,>-])({'|'.join(SCOPES)})(?=[/)])")


@dataclass(frozen=True)
class Operation:
    """An operation of the traced program, over all devices and steps.

    Attributes:
      name: such as `fusion.5`. In a GPU's command buffers, the kernel's name: operations with the same kernel and the
        same source count as one.
      scope: the part of the model it belongs to (`SCOPES`), or "".
      source: where it comes from in the program, such as `jit(step)/ffn/dot`.
      seconds: its self time, without the operations inside it.
      share: its share of all operations' self time, 0 to 1.
      count: how often it ran.
    """

    name: str
    scope: str
    source: str
    seconds: float
    share: float
    count: int


@dataclass(frozen=True)
class Profile:
    """A trace, summarised.

    Attributes:
      path: the trace's file.
      program: the program that took the most time; its runs are the steps.
      steps: number of steps in the trace.
      step_seconds: the median time from the start of one step to the start of the next; with a single step, its length.
      seconds: from the start of the first step to the end of the last.
      devices: what each device did in that time.
      operations: sorted by self time, the longest first.
      scopes: self time of each part of the model, in seconds over all devices; "" for operations outside any part.
      data_wait: seconds the loop waited for batches, or None if the trace doesn't say.
      memory: bytes by name: `program` (its buffers on one device), and the peak that each allocator reported.
    """

    path: str
    program: str
    steps: int
    step_seconds: float
    seconds: float
    devices: list[Device]
    operations: list[Operation]
    scopes: dict[str, float]
    data_wait: float | None
    memory: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Returns everything, plus each device's idle share, for json.dumps."""
        found = asdict(self)
        for device, one in zip(self.devices, found["devices"], strict=True):
            one["idle_share"] = device.idle_share
        return found


def summarise(directory: Path | str) -> Profile:
    """Reads the newest trace of a run, or of any folder that has one.

    Raises:
      UserError: if there is no trace, or no device's operations in it.
    """
    path = xplane.find(directory)
    planes = xplane.read(path)
    devices = device_time.find_devices(planes)
    if not devices:
        raise UserError(f"{path} holds no operation of a device: trace steps of training")
    program, steps = device_time.find_steps(planes, devices)
    known = [p for p in xplane.programs(path) if p.name == program]
    op_names = {op: name for p in known for op, name in p.op_names.items()}
    schedules = [schedule for p in known for schedule in p.schedules]
    kernels: dict[str, str] = {}
    for number, device in enumerate(devices):
        devices[number], more = assign_kernels(device, schedules)
        kernels |= more
    # The names of a GPU's kernels have no dots.
    op_names = {op.replace(".", "_"): name for op, name in op_names.items()} | op_names
    op_names = _kernel_sources(schedules, op_names) | op_names
    opcodes = {op: opcode for p in known for op, opcode in p.opcodes.items()}
    window = min(a for a, _ in steps), max(b for _, b in steps)
    times, counts = device_time.self_times(devices, window)
    total = sum(times.values())
    rows: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    scopes: dict[str, float] = defaultdict(float)
    for op, ns in times.items():
        source = op_names.get(op, "")
        rows[kernels.get(op, op), source].append((ns, counts[op]))
        scopes[find_scope(source)] += ns * NS
    operations = []
    for (name, source), found in rows.items():
        ns, count = (sum(column) for column in zip(*found, strict=True))
        scope = find_scope(source)
        operations.append(Operation(name, scope, source, ns * NS, ns / total, count))
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(steps)]
    return Profile(
        path=str(path),
        program=program,
        steps=len(steps),
        step_seconds=(statistics.median(gaps) if gaps else window[1] - window[0]) * NS,
        seconds=(window[1] - window[0]) * NS,
        devices=[device_time.account(device, window, opcodes) for device in devices],
        operations=sorted(operations, key=lambda operation: -operation.seconds),
        scopes=dict(sorted(scopes.items(), key=lambda item: -item[1])),
        data_wait=_data_wait(planes, window),
        memory=_memory(planes, max((p.bytes for p in known), default=0)),
    )


def find_scope(op_name: str) -> str:
    """Returns the innermost part of the model in an operation's name, or "".

    For example `attention` in `.../transpose(jvp(attention))/dot`.
    """
    found = _SCOPE.findall(op_name)
    return found[-1] if found else ""


def _kernel_sources(schedules: list[list[Launch]], op_names: dict[str, str]) -> dict[str, str]:
    """Returns where each Triton kernel comes from, if all operations that run it come from one line of the model."""
    sources: dict[str, set[str]] = defaultdict(set)
    for launch in itertools.chain(*schedules):
        sources[launch.kernel].add(op_names.get(launch.op, ""))
    return {name: min(found) for name, found in sources.items() if name and len(found) == 1}


def _data_wait(planes: list[Plane], window: Interval) -> float | None:
    events = [e for line in xplane.host_lines(planes) for e in line.events]
    found = [(e.start, e.end) for e in events if e.name == "data_wait"]
    return device_time.length(device_time.union(found, window)) * NS if found else None


def _memory(planes: list[Plane], program: int) -> dict[str, int]:
    peaks = {"program": program} if program else {}
    for event in (e for plane in planes for line in plane.lines for e in line.events):
        if peak := event.stats.get("peak_bytes_in_use"):
            name = str(event.stats.get("allocator_name", "allocator"))
            peaks[name] = max(peaks.get(name, 0), int(peak))
    return peaks


def print_profile(profile: Profile, rows: int = 15) -> None:
    """Prints a trace's summary: devices, parts of the model, and the longest operations."""
    waited = profile.data_wait
    lines = [
        f"[bold]{escape(profile.path)}[/]",
        f"{profile.program}: {profile.steps} steps of {_ms(profile.step_seconds)} ms",
        "data wait: " + ("not in the trace" if waited is None else f"{_ms(waited)} ms"),
    ]
    lines += [f"memory, {name}: {size / 2**20:,.1f} MiB" for name, size in profile.memory.items()]
    devices = [
        (d.name, f"{d.idle_share:.1%}", *map(_ms, (d.compute, d.hidden, d.exposed, d.idle)))
        for d in profile.devices
    ]
    heads = ("device", "idle", "compute ms", "collectives hidden ms", "exposed ms", "idle ms")
    total = sum(profile.scopes.values())
    scopes = [(s or "(none)", _ms(t), f"{t / total:.1%}") for s, t in profile.scopes.items()]
    operations = [
        (
            o.name,
            o.scope,
            str(o.count),
            _ms(o.seconds),
            f"{o.share:.1%}",
            o.source.rpartition("/")[2],
        )
        for o in profile.operations[:rows]
    ]
    print_tables(
        "\n".join(lines),
        table(heads, devices, (1, 2, 3, 4, 5)),
        table(("part of the model", "ms", "share"), scopes, (1, 2)),
        table(("operation", "part", "runs", "self ms", "share", "source"), operations, (2, 3, 4)),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
