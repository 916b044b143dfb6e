"""The schedule of a compiled TPU step, parsed from XLA's dump `*.after_codegen.txt`.

The core starts instructions in the order of that text. Fusions, copies, broadcasts and the like carry the compiler's
own estimate of their cycles. Transfers block, or come as a start and a done; those that a v5e fuses with compute are a
chain of fusions that share a number. Pallas kernels are custom calls without an estimate.

Chapters: 22.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from minitext.compiler import hlo

COMPUTE, KERNEL, ICI, DCN, DMA, HOST = "compute", "kernels", "ici", "dcn", "dma", "host"
QUEUES: tuple[str, ...] = (COMPUTE, KERNEL, ICI, DCN, DMA, HOST)
VMEM, HOST_MEMORY, SCALAR = 1, 5, {2, 4, 6, 8, 10, 11, 12}  # XLA's numbers of memory spaces
SCALAR_BYTES = 64  # the scalar core handles what is no larger
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*\[[\d,]*\])(?:\{([^}]*)\})?")
_PAIR = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


class Operation(NamedTuple):
    """One instruction of the schedule.

    Attributes:
      name: its name.
      kind: `run` (the core is busy with it), `block` (the core waits for it), `start` and `done` of a transfer, `loop`
        or `branch`.
      queue: what executes it, one of `QUEUES`.
      cycles: the compiler's estimate (`run` only).
      bytes: what a transfer moves; what a `run` without an estimate reads and writes in HBM.
      opcode: a collective's, such as `all-gather`; a kernel's custom call; `to host` or `from host` for a host
        transfer, as PCIe carries both at once.
      members: the devices of a collective's first replica group.
      token: the transfer that a start and its done belong to.
      trips: how often a loop's body runs.
      bodies: a loop's body, or all branches of a conditional.
    """

    name: str
    kind: str
    queue: str = COMPUTE
    cycles: int = 0
    bytes: float = 0.0
    opcode: str = ""
    members: tuple[int, ...] = ()
    token: str = ""
    trips: int = 1
    bodies: tuple[tuple["Operation", ...], ...] = ()


def read_schedule(text: str) -> tuple[Operation, ...]:
    """Parses the schedule of the entry computation, with its loops and branches.

    Args:
      text: an `*.after_codegen.txt`, or an optimized module's text, which has no estimates.

    Returns:
      The operations that take time, in order; empty if the text has no entry computation.
    """
    reader = _Reader(text)
    return tuple(reader.walk(reader.module.entry or ""))


def operations(schedule: tuple[Operation, ...]) -> Iterator[Operation]:
    """Yields each operation of a schedule once, including those in loops and branches."""
    for operation in schedule:
        yield operation
        for body in operation.bodies:
            yield from operations(body)


class _Reader:
    def __init__(self, text: str):
        self.module = hlo.Module(text)
        self.trips = {loop.name: loop.trips for loop in self.module.loops()}
        self.collectives = {c.name: c for c in self.module.collectives()}
        # `module.collectives` names only one piece of a chain; any piece leads to it by the chain's number.
        self.pieces: dict[str, list[hlo.Instruction]] = {}
        self.lines: dict[str, str] = {}
        for found in self.module.computations.values():
            for i in found:
                self.lines[i.name] = i.line
                if chain := hlo.CHAIN.search(i.line):
                    self.pieces.setdefault(chain[1], []).append(i)

    def walk(self, computation: str) -> Iterator[Operation]:
        for i in self.module.computations.get(computation, []):
            if i.opcode in hlo.FREE:
                continue
            if i.opcode == "while":
                body = tuple(self.walk(i.called.get("body", "")))
                yield Operation(i.name, "loop", trips=self.trips.get(i.name, 1), bodies=(body,))
            elif i.opcode == "conditional":
                bodies = tuple(tuple(self.walk(branch)) for branch in i.called.values())
                yield Operation(i.name, "branch", bodies=bodies)
            elif i.opcode == "call":
                yield from self.walk(i.called.get("to_apply", ""))
            elif i.opcode.endswith("-done"):
                yield Operation(i.name, "done", token=self._first(i))
            elif i.opcode.endswith("-start") or i.opcode in ("send", "recv"):
                yield from self._start(i)
            elif i.opcode in hlo.COLLECTIVES:
                if i.name in self.collectives:
                    yield self._transfer(i, "block")
            elif i.opcode == "fusion":
                yield from self._fusion(i)
            elif i.opcode == "custom-call":
                if 'custom_call_target="tpu_custom_call"' in i.line:
                    yield Operation(i.name, "run", KERNEL, opcode=i.line)
            elif not i.opcode.endswith("-update"):
                yield from self._run(i)

    def _first(self, i: hlo.Instruction) -> str:
        """Returns the name of the start that a done belongs to, through the updates between them."""
        name = i.operands[0] if i.operands else ""
        while before := re.search(r" [a-z\-]+-update\([^%]*%([\w.\-]+)", self.lines.get(name, "")):
            name = before[1]
        return name

    def _run(self, i: hlo.Instruction) -> Iterator[Operation]:
        if estimate := _CYCLES.search(i.line):
            yield Operation(i.name, "run", cycles=int(estimate[1]))
            return
        size = sum(size for size, space in _arrays(i.type) if space not in (VMEM, *SCALAR))
        if size > SCALAR_BYTES:
            yield Operation(i.name, "run", bytes=size)

    def _fusion(self, i: hlo.Instruction) -> Iterator[Operation]:
        inside = self.module.computations.get(i.called.get("calls", ""), [])
        line = next((j for j in inside if j.opcode in hlo.COLLECTIVES), None)
        if line is None:
            yield from self._run(i)
            return
        chain = hlo.CHAIN.search(line.line)
        marks = {mark for j in inside for mark in re.findall(r'"AsyncCollective(\w+)"', j.line)}
        if chain is None:
            if line.name in self.collectives:
                yield self._transfer(line, "block")
        elif "Start" in marks:
            yield self._transfer(self._whole(chain[1]), "start", f"chain {chain[1]}")
        yield from (run for run in self._run(i) if run.cycles)
        if chain is not None and "Done" in marks:
            yield Operation(i.name, "done", token=f"chain {chain[1]}")

    def _whole(self, chain: str) -> hlo.Instruction:
        pieces = self.pieces[chain]
        return next((i for i in pieces if i.name in self.collectives), pieces[0])

    def _transfer(self, i: hlo.Instruction, kind: str, token: str = "") -> Operation:
        found = self.collectives.get(i.name)
        opcode = i.opcode.removesuffix("-start")
        members = hlo.replica_group(i.line, self.module.devices)
        if pair := _PAIR.search(i.line):
            members = int(pair[1]), int(pair[2])
        size, token = float((found or i).bytes), token or i.name
        return Operation(i.name, kind, ICI, 0, size, opcode, members, token)

    def _start(self, i: hlo.Instruction) -> Iterator[Operation]:
        if i.name in self.collectives:
            found = self.collectives[i.name]
            start = self._transfer(i, "start")
            if found.kind.endswith("(dcn)"):
                start = start._replace(queue=DCN, bytes=found.moved)
            yield start
        elif i.opcode == "async-start":
            root = self._innermost(i)
            if root.opcode in hlo.COLLECTIVES and root.name in self.collectives:
                yield self._transfer(root, "start", i.name)
            else:
                yield self._copy(i, root)
        elif i.opcode not in ("send", "recv"):
            yield self._copy(i, i)

    def _innermost(self, i: hlo.Instruction) -> hlo.Instruction:
        """Returns the root of what an instruction calls; for tpu7x a custom call is between, for a SparseCore."""
        called = next(iter(i.called.values()), "")
        if i.opcode in ("async-start", "custom-call") and self.module.computations.get(called):
            return self._innermost(self.module.computations[called][-1])
        return i

    def _copy(self, i: hlo.Instruction, moved: hlo.Instruction) -> Operation:
        """Returns a copy between memories: over PCIe if one side is the host's, otherwise through HBM."""
        arrays = [a for a in _arrays(i.type) if a[1] not in SCALAR]
        spaces = {space for _, space in arrays}
        results = [a for a in _arrays(moved.type) if a[1] not in SCALAR]
        # An update writes only its second operand.
        of = moved.operands[1:2] if moved.opcode.startswith("dynamic-update-slice") else ()
        sizes = [
            hlo.type_bytes(self.lines[name].split("(")[0]) for name in of if name in self.lines
        ]
        size = sizes[0] if sizes else min((s for s, _ in results), default=0)
        if HOST_MEMORY in spaces:
            written = next((space for _, space in results), 0)
            way = "to host" if written == HOST_MEMORY else "from host"
            return Operation(i.name, "start", HOST, bytes=size, opcode=way, token=i.name)
        size *= 1 if VMEM in spaces else 2
        return Operation(i.name, "start", DMA, bytes=size, token=i.name)


def _arrays(text: str) -> list[tuple[int, int]]:
    """Returns bytes and memory space of each array of a type; 0 is HBM."""
    found = []
    for array, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        found.append((hlo.type_bytes(array), int(space[1]) if space else 0))
    return found
