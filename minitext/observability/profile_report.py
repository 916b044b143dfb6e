"""What a trace says, offline: where a step's time went on each device, by operation and by part of the model.

Chapters: 20.
"""

import itertools
import re
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from minitext.errors import UserError
from minitext.observability import xplane
from minitext.observability.device_time import (
    HOST,
    NS,
    Device,
    Interval,
    account,
    find_devices,
    find_steps,
    length,
    self_times,
    union,
)
from minitext.observability.xplane import Plane

# The `jax.named_scope`s of the model and the step. They are names alone, which the compiled program carries.
SCOPES = ("embed", "norm", "attention", "ffn", "moe", "logits", "loss", "optimizer")
_SCOPE = re.compile(rf"(?<![\w.,>-])({'|'.join(SCOPES)})(?=[/)])")


@dataclass(frozen=True)
class Operation:
    """An operation of the traced program, over all devices and steps.

    Attributes:
      name: such as `fusion.5`.
      scope: the part of the model that it belongs to (`SCOPES`), or "".
      source: where it comes from in the program, such as `jit(step)/ffn/dot`.
      seconds: its self time, without what it calls.
      share: of all operations' self time.
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
      path: the trace.
      program: the program that took the most time, whose runs are the steps.
      steps: how many are in the trace.
      step_seconds: the median time from the start of one to the start of the next; of a single one its length.
      seconds: from the start of the first step to the end of the last.
      devices: what each did in that time.
      operations: by self time, the longest first.
      scopes: self time of each part of the model, in seconds over all devices; "" is what belongs to none.
      data_wait: seconds for which the loop waited for a batch, or None if the trace does not say.
      memory: bytes by name: `program` (its buffers on one device), and what allocators reported at their peak.
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
        """Returns everything for json.dumps, with the idle share of each device."""
        found = asdict(self)
        for device, one in zip(self.devices, found["devices"], strict=True):
            one["idle_share"] = device.idle_share
        return found


def summarise(directory: Path | str) -> Profile:
    """Reads the newest trace of a run, or of any folder that has one.

    Raises:
      UserError: if there is none, or nothing of a device in it.
    """
    path = xplane.find(directory)
    planes = xplane.read(path)
    devices = find_devices(planes)
    if not devices:
        raise UserError(f"{path} holds no operation of a device: trace steps of training")
    program, steps = find_steps(planes, devices)
    known = [p for p in xplane.programs(path) if p.name == program]
    op_names = {op: name for p in known for op, name in p.op_names.items()}
    opcodes = {op: opcode for p in known for op, opcode in p.opcodes.items()}
    window = min(a for a, _ in steps), max(b for _, b in steps)
    times, counts = self_times(devices, window)
    total = sum(times.values())
    operations, scopes = [], defaultdict(float)
    for op, ns in sorted(times.items(), key=lambda item: -item[1]):
        source = op_names.get(op, "")
        scope = find_scope(source)
        operations.append(Operation(op, scope, source, ns * NS, ns / total, counts[op]))
        scopes[scope] += ns * NS
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(steps)]
    return Profile(
        path=str(path),
        program=program,
        steps=len(steps),
        step_seconds=(statistics.median(gaps) if gaps else window[1] - window[0]) * NS,
        seconds=(window[1] - window[0]) * NS,
        devices=[account(device, window, opcodes) for device in devices],
        operations=operations,
        scopes=dict(sorted(scopes.items(), key=lambda item: -item[1])),
        data_wait=_data_wait(planes, window),
        memory=_memory(planes, max((p.bytes for p in known), default=0)),
    )


def find_scope(op_name: str) -> str:
    """Returns the part of the model in an operation's name, such as `attention` of `.../transpose(jvp(attention))/dot`.

    Of nested ones it is the innermost; "" where there is none.
    """
    found = _SCOPE.findall(op_name)
    return found[-1] if found else ""


def _data_wait(planes: list[Plane], window: Interval) -> float | None:
    lines = [line for plane in planes if plane.name == HOST for line in plane.lines]
    found = [(e.start, e.end) for line in lines for e in line.events if e.name == "data_wait"]
    return length(union(found, window)) * NS if found else None


def _memory(planes: list[Plane], program: int) -> dict[str, int]:
    peaks = {"program": program} if program else {}
    for event in (e for plane in planes for line in plane.lines for e in line.events):
        if peak := event.stats.get("peak_bytes_in_use"):
            name = str(event.stats.get("allocator_name", "allocator"))
            peaks[name] = max(peaks.get(name, 0), int(peak))
    return peaks


def print_profile(profile: Profile, rows: int = 15) -> None:
    """Prints a trace's summary: devices, parts of the model, and the longest operations."""
    console = Console()
    waited = profile.data_wait
    lines = [
        f"[bold]{profile.path}[/]",
        f"{profile.program}: {profile.steps} steps of {1e3 * profile.step_seconds:,.2f} ms",
        "data wait: " + ("not in the trace" if waited is None else f"{1e3 * waited:,.2f} ms"),
    ]
    lines += [f"memory, {name}: {size / 2**20:,.1f} MiB" for name, size in profile.memory.items()]
    console.print("\n".join(lines), highlight=False)
    table = Table("device", "idle", "compute ms", "collectives hidden ms", "exposed ms", "idle ms")
    for d in profile.devices:
        times = (f"{1e3 * t:,.2f}" for t in (d.compute, d.hidden, d.exposed, d.idle))
        table.add_row(d.name, f"{d.idle_share:.1%}", *times)
    console.print(table)
    total = sum(profile.scopes.values())
    table = Table("part of the model", "ms", "share")
    for scope, seconds in profile.scopes.items():
        table.add_row(scope or "(none)", f"{1e3 * seconds:,.2f}", f"{seconds / total:.1%}")
    console.print(table)
    table = Table("operation", "part", "runs", "self ms", "share", "source")
    for op in profile.operations[:rows]:
        source = op.source.rpartition("/")[2]
        table.add_row(
            op.name, op.scope, str(op.count), f"{1e3 * op.seconds:,.2f}", f"{op.share:.1%}", source
        )
    console.print(table)
