"""Which operation of the program launched each kernel of a GPU's command buffers.

A command buffer (a CUDA graph) launches many kernels with one call. In a trace these kernels carry the buffer's name
where others carry their operation's. Some have names that are in the program: a fusion's kernel is named after it
(equal fusions share one kernel), and a Triton kernel has the name that its call gives it. A cuBLAS kernel, such as
`nvjet_sm90_...`, doesn't.

A buffer's kernels run in the order of the program's schedule. So we look in the schedule for the kernels with known
names, one after another. If they fit in exactly one position, each belongs to the operation there. The kernels between
two of them belong to the library calls between their operations, if there are as many kernels as calls. If not, for
example because cuBLAS split a product into two kernels, we don't guess.

Source: an H100's trace with JAX 0.11, November 2026.

Chapters: 20.
"""

import itertools
import re
from collections import defaultdict

from minitext.observability.device_time import Ops, is_collective
from minitext.observability.xplane import Event, Launch

_NUMBER = re.compile(r"[._]+\d+$")
_MEMORY = re.compile(r"^mem(set|cpy)", re.IGNORECASE)


def assign_kernels(device: Ops, schedules: list[list[Launch]]) -> tuple[Ops, dict[str, str]]:
    """Finds the operations of the kernels in command buffers.

    Args:
      device: what ran.
      schedules: what each computation of the program launches, in order.

    Returns:
      The device, with `hlo_op` set to the operation in each event whose operation was found; and operation -> kernel
      for these operations.
    """
    lines = [list(line) for line in device.lines]
    buffers: dict[int | None, list[tuple[list[Event], int]]] = defaultdict(list)
    for line in lines:
        for at, event in enumerate(line):
            if str(event.stats.get("hlo_op")).startswith("command_buffer"):
                buffers[event.stats.get("correlation_id")].append((line, at))
    kernels: dict[str, str] = {}
    for places in buffers.values():
        places.sort(key=lambda place: place[0][place[1]].start)
        names = [line[at].name for line, at in places]
        for number, op in _find_ops(names, schedules).items():
            line, at = places[number]
            line[at] = line[at]._replace(stats=line[at].stats | {"hlo_op": op})
            kernels[op] = names[number]
    return device._replace(lines=lines), kernels


def _find_ops(names: list[str], schedules: list[list[Launch]]) -> dict[int, str]:
    """Returns the operations of one buffer's kernels, by their index in the buffer."""
    expected = {_stem(launch.kernel) for s in schedules for launch in s if launch.kernel}
    known = [i for i, name in enumerate(names) if _stem(name) in expected]
    # Copies and collectives have no call of a library.
    unknown = [
        i
        for i, name in enumerate(names)
        if _stem(name) not in expected and not _MEMORY.match(name) and not is_collective(name)
    ]
    order = [_stem(names[i]) for i in known]
    fits = [(s, places) for s in schedules for places in _fit(order, s)]
    if len(fits) != 1:
        return {}
    ((schedule, places),) = fits
    found = {i: schedule[at].op for i, at in zip(known, places[1:-1], strict=True)}
    kernel_gaps = itertools.pairwise([-1, *known, len(names)])
    call_gaps = itertools.pairwise(places)
    for (before, after), (first, last) in zip(kernel_gaps, call_gaps, strict=True):
        between = [i for i in unknown if before < i < after]
        calls = schedule[first + 1 : last]
        if len(between) == len(calls):
            found |= {i: call.op for i, call in zip(between, calls, strict=True)}
    return found


def _fit(order: list[str], schedule: list[Launch]) -> list[list[int]]:
    """Returns where the schedule has these kernels one after another, with the known ones before and after them."""
    known = [at for at, launch in enumerate(schedule) if launch.kernel]
    names = [_stem(schedule[at].kernel) for at in known]
    ends = [-1, *known, len(schedule)]
    count = len(order)
    starts = [at for at in range(len(names) - count + 1) if names[at : at + count] == order]
    return [ends[at : at + count + 2] for at in starts if order]


def _stem(name: str) -> str:
    """A name without its number: `loop_add_fusion` of both `loop_add_fusion_5` and `loop_add_fusion.7`."""
    return _NUMBER.sub("", name)
