"""Which slots of a pipeline's schedule each stage used, read from a profile of a step on CPU devices.

Once a tick, each stage executes a `cond` and works in one of its branches. The profile says when each device executed
it and which operations ran. A slot is busy if any of the layers' matrix products ran on the device before the next
tick. This counts idle *slots*, not seconds: simulated devices share a machine's cores, so their timing says nothing
about a chip's.

Chapters: 13.
"""

import itertools
import re
import tempfile
from collections import defaultdict
from typing import Any

import jax

from minitext.compiler.buffers import op_names
from minitext.compiler.hlo import Instruction, computations
from minitext.distributed.devices import check_profiler
from minitext.observability import xplane
from minitext.observability.device_time import Ops, find_devices


def measure_slots(compiled: Any, *args: Any) -> list[list[bool]]:
    """Profiles one run of a compiled train step and returns which devices worked in which slot.

    Args:
      compiled: a `jax.stages.Compiled` for a mesh of CPU devices whose only axis larger than 1 is `stage`.
      args: its arguments.

    Returns:
      A row for each half of a tick in which any device worked, with a bool for each device. If forward and backward
      are separate passes, forward comes first.

    Raises:
      UserError: in a process that has compiled for TPUs.
    """
    check_profiler()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(*args))
        starts = [_starts(device) for device in find_devices(xplane.read(xplane.find(folder)))]
    rows = []
    for cond, products in _stage_conditionals(compiled.as_text()).items():
        columns = [_busy(cond, products, times) for times in starts]
        rows += [list(row) for row in zip(*columns, strict=True) if any(row)]
    return rows


def _stage_conditionals(text: str) -> dict[str, set[str]]:
    """The conditionals in which stages work or wait, each with the matrix products in its branches, by name."""
    found, names = computations(text)[0], op_names(text)
    # For each conditional: the instructions in its branches, and in the computations those call.
    inside: dict[str, set[str]] = {}
    for body in found.values():
        for i in body:
            if i.opcode == "conditional" and "shard_map" in names.get(i.name, ""):
                inside[i.name] = {j.name for j in _called(i, found)}
    nested = set().union(*inside.values())
    return {
        cond: {i for i in within if "dot_general" in names.get(i, "")}
        for cond, within in inside.items()
        if cond not in nested
    }


def _called(instruction: Instruction, found: dict[str, list[Instruction]]) -> list[Instruction]:
    """The instructions of all computations that an instruction refers to, directly or indirectly."""
    inside = []
    for name in set(re.findall(r"%([\w.\-]+)", instruction.line.partition("metadata=")[0])):
        for i in found.get(name, ()):
            inside += [i, *_called(i, found)]
    return inside


def _starts(device: Ops) -> dict[str, list[float]]:
    """When each of a device's operations started, by the operation's name."""
    starts: dict[str, list[float]] = defaultdict(list)
    for event in itertools.chain(*device.lines):
        starts[event.op].append(event.start)
    return starts


def _busy(cond: str, products: set[str], starts: dict[str, list[float]]) -> list[bool]:
    """For each tick, whether the device ran any matrix product before the next tick."""
    ticks = sorted(starts[cond])
    ran = [start for name in products for start in starts.get(name, ())]
    ends = [*ticks[1:], float("inf")]
    return [any(a <= t < b for t in ran) for a, b in zip(ticks, ends, strict=True)]
