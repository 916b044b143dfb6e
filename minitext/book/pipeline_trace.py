"""What the stages of a pipeline did, read from a profile of a step on CPU devices, simulated ones too.

Each stage works in a branch of a `cond` that it takes once a tick. The profile says when each device took it and which
operations ran; a slot is busy if any of the layers' matrix products ran on the device before it took the next. So idle
*slots* are counted, not seconds: simulated devices share a machine's cores, and their seconds say nothing of a chip's.

Chapters: 13.
"""

import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax

from minitext.compiler.buffers import op_names
from minitext.compiler.hlo import Instruction, computations
from minitext.distributed.devices import check_profiler


class Branches(NamedTuple):
    """A `conditional` of the compiled program: its name, and those of the products in its branches."""

    name: str
    products: frozenset[str]


def measure_slots(compiled: Any, *args: Any) -> list[list[bool]]:
    """Runs a compiled train step once, in the profiler, and returns which devices worked when.

    Args:
      compiled: a `jax.stages.Compiled` for a mesh of CPU devices whose only axis above 1 is `stage`.
      args: its arguments.

    Returns:
      A row for each half of a tick in which any device worked, forward before backward where they are separate passes;
      in it for each device whether it did.

    Raises:
      UserError: in a process that has compiled for TPUs.
    """
    check_profiler()
    rows = []
    found = stage_branches(compiled.as_text())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(*args))
        (path,) = Path(folder).rglob("*.xplane.pb")
        events = _starts(jax.profiler.ProfileData.from_file(str(path)))
    for branches in found:
        columns = [_busy(branches, starts) for _, starts in sorted(events.items())]
        rows += [list(row) for row in zip(*columns, strict=True) if any(row)]
    return rows


def stage_branches(text: str) -> list[Branches]:
    """Returns, of a compiled program's text, the conditionals in which stages do their work or wait."""
    found, names = computations(text)[0], op_names(text)
    inside: dict[
        str, set[str]
    ] = {}  # the instructions in the branches of each, and in what they call
    for body in found.values():
        for i in body:
            if i.opcode == "conditional" and "shard_map" in names.get(i.name, ""):
                inside[i.name] = {j.name for j in _called(i, found)}
    nested = set().union(*inside.values())
    return [
        Branches(name, frozenset(i for i in within if "dot_general" in names.get(i, "")))
        for name, within in inside.items()
        if name not in nested
    ]


def _called(instruction: Instruction, found: dict[str, list[Instruction]]) -> list[Instruction]:
    """The instructions of all computations that an instruction names, and of those that these name."""
    inside = []
    for name in set(re.findall(r"%([\w.\-]+)", instruction.line.partition("metadata=")[0])):
        for i in found.get(name, ()):
            inside += [i, *_called(i, found)]
    return inside


def _starts(profile: Any) -> dict[int, dict[str, list[float]]]:
    """The starts of every operation, by device and by the operation's name."""
    starts: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    starts[stats["device_ordinal"]][stats["hlo_op"]].append(event.start_ns)
    return starts


def _busy(branches: Branches, starts: dict[str, list[float]]) -> list[bool]:
    """Whether a device ran any product between one time it took the conditional and the next."""
    ticks = sorted(starts[branches.name])
    ran = [start for name in branches.products for start in starts.get(name, ())]
    ends = [*ticks[1:], float("inf")]
    return [any(a <= t < b for t in ran) for a, b in zip(ticks, ends, strict=True)]
