"""The schedule of a compiled TPU step, read back from XLA's dump `*.after_codegen.txt`.

In that text the order of the lines is the order in which the core starts them. Fusions, copies, broadcasts and the like
carry the compiler's own estimate of their cycles. Transfers come in pairs of a start and a done, or block; those that a
v5e fuses with compute are a chain of fusions with a number. Pallas kernels are custom calls without an estimate.

Chapters: 22.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from minitext.compiler import hlo

COMPUTE, KERNEL, ICI, DCN, DMA, HOST = "compute", "kernels", "ici", "dcn", "dma", "host"
QUEUES: tuple[str, ...] = (COMPUTE, KERNEL, ICI, DCN, DMA, HOST)
VMEM, HOST_MEMORY, SCALAR = 1, 5, {2, 4, 6, 8, 10, 11, 12}  # XLA's numbers of memory spaces
SCALAR_BYTES = 64  # what is no larger is the scalar core's
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_CALLED = re.compile(r"\b(calls|to_apply|body)=%([\w.\-]+)")
_BRANCHES = re.compile(
    r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%([\w.\-]+))"
)
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*\[[\d,]*\])(?:\{([^}]*)\})?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_PAIR = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


class Operation(NamedTuple):
    """One line of the schedule, or of what it calls.

    Attributes:
      name: its name.
      kind: `run` (the core is busy with it), `block` (the core waits for it), `start` and `done` of a transfer, `loop`
        or `branch`.
      queue: what does it, one of `QUEUES`.
      cycles: the compiler's estimate (of `run` only).
      bytes: what is transferred; of a `run` without estimate, what goes through HBM.
      opcode: of a collective, such as `all-gather`; of a kernel, its custom call's text; of a host transfer, `to host`
        or `from host`: PCIe carries both at once.
      members: the devices of one group of a collective.
      token: names a transfer, the same for its start and its done.
      trips: how often a loop's body runs.
      bodies: of a loop its body, of a branch all its computations.
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
    """Reads the entry computation's schedule, loops and branches inside it.

    Args:
      text: an `*.after_codegen.txt`, or an optimized module's text, which has no estimates.

    Returns:
      The operations that take time, in order; none if the text has no entry computation.
    """
    return _Reader(text).operations() if "ENTRY" in text else ()


def operations(schedule: tuple[Operation, ...]) -> Iterator[Operation]:
    """Yields every operation of a schedule once, those in loops and branches too."""
    for operation in schedule:
        yield operation
        for body in operation.bodies:
            yield from operations(body)


class _Reader:
    def __init__(self, text: str):
        self.module = hlo.Module(text)
        self.trips = {loop.name: loop.trips for loop in self.module.loops()}
        self.collectives = {c.name: c for c in self.module.collectives()}
        # A collective in pieces counts once, under the name of one: all its pieces have the chain's number.
        self.pieces: dict[str, list[hlo.Instruction]] = {}
        self.lines: dict[str, str] = {}
        for found in self.module.computations.values():
            for i in found:
                self.lines[i.name] = i.line
                if chain := _CHAIN.search(i.line):
                    self.pieces.setdefault(chain[1], []).append(i)

    def operations(self) -> tuple[Operation, ...]:
        return tuple(self._walk(self.module.entry or ""))

    def _walk(self, computation: str) -> Iterator[Operation]:
        for i in self.module.computations.get(computation, []):
            if i.opcode in hlo.FREE:
                continue
            called = dict(_CALLED.findall(i.line))
            if i.opcode == "while":
                body = tuple(self._walk(called.get("body", "")))
                yield Operation(i.name, "loop", trips=self.trips.get(i.name, 1), bodies=(body,))
            elif i.opcode == "conditional":
                yield Operation(i.name, "branch", bodies=tuple(self._branches(i)))
            elif i.opcode == "call":
                yield from self._walk(called.get("to_apply", ""))
            elif i.opcode.endswith("-done"):
                yield Operation(i.name, "done", token=self._first(i))
            elif i.opcode.endswith("-start") or i.opcode in ("send", "recv"):
                yield from self._start(i, called)
            elif i.opcode in hlo.COLLECTIVES:
                if i.name in self.collectives:
                    yield self._transfer(i, "block")
            elif i.opcode == "fusion":
                yield from self._fusion(i, called.get("calls", ""))
            elif i.opcode == "custom-call":
                if 'custom_call_target="tpu_custom_call"' in i.line:
                    yield Operation(i.name, "run", KERNEL, opcode=i.line)
            elif not i.opcode.endswith("-update"):
                yield from self._run(i)

    def _branches(self, i: hlo.Instruction) -> Iterator[tuple[Operation, ...]]:
        for several, one in _BRANCHES.findall(i.line):
            for name in re.findall(r"[\w.\-]+", several or one):
                yield tuple(self._walk(name))

    def _first(self, i: hlo.Instruction) -> str:
        """The name of the start that a done, or an update between, goes back to."""
        name = i.operands[0] if i.operands else ""
        while before := re.search(r" [a-z\-]+-update\([^%]*%([\w.\-]+)", self.lines.get(name, "")):
            name = before[1]
        return name

    def _run(self, i: hlo.Instruction) -> Iterator[Operation]:
        if estimate := _CYCLES.search(i.line):
            yield Operation(i.name, "run", cycles=int(estimate[1]))
            return
        size = sum(size for size, space in _arrays(_type(i)) if space not in (VMEM, *SCALAR))
        if size > SCALAR_BYTES:
            yield Operation(i.name, "run", bytes=size)

    def _fusion(self, i: hlo.Instruction, computation: str) -> Iterator[Operation]:
        inside = self.module.computations.get(computation, [])
        line = next((j for j in inside if j.opcode in hlo.COLLECTIVES), None)
        if line is None:
            yield from self._run(i)
            return
        chain = _CHAIN.search(line.line)
        said = {word for j in inside for word in re.findall(r'"AsyncCollective(\w+)"', j.line)}
        if chain is None:
            if line.name in self.collectives:
                yield self._transfer(line, "block")
        elif "Start" in said:
            yield self._transfer(self._whole(chain[1]), "start", f"chain {chain[1]}")
        yield from (run for run in self._run(i) if run.cycles)
        if chain is not None and "Done" in said:
            yield Operation(i.name, "done", token=f"chain {chain[1]}")

    def _whole(self, chain: str) -> hlo.Instruction:
        pieces = self.pieces[chain]
        return next((i for i in pieces if i.name in self.collectives), pieces[0])

    def _transfer(self, i: hlo.Instruction, kind: str, token: str = "") -> Operation:
        found = self.collectives.get(i.name)
        opcode = i.opcode.removesuffix("-start")
        members = _members(i.line, self.module.devices)
        size = float(found.bytes) if found else float(i.bytes)
        return Operation(
            i.name, kind, ICI, bytes=size, opcode=opcode, members=members, token=token or i.name
        )

    def _start(self, i: hlo.Instruction, called: dict[str, str]) -> Iterator[Operation]:
        if i.name in self.collectives:
            found = self.collectives[i.name]
            start = self._transfer(i, "start")
            if found.kind.endswith("(dcn)"):
                start = start._replace(queue=DCN, bytes=found.moved)
            yield start
        elif i.opcode == "async-start":
            inside = self.module.computations.get(called.get("calls", ""), [])
            root = inside[-1] if inside else i
            if root.opcode in hlo.COLLECTIVES and root.name in self.collectives:
                yield self._transfer(root, "start", i.name)
            else:
                yield self._copy(i, root)
        elif i.opcode not in ("send", "recv"):
            yield self._copy(i, i)

    def _copy(self, i: hlo.Instruction, moved: hlo.Instruction) -> Operation:
        """A copy between memories: what it moves goes over PCIe if a side is the host's, else through HBM."""
        arrays = [a for a in _arrays(_type(i)) if a[1] not in SCALAR]
        spaces = {space for _, space in arrays}
        results = [a for a in _arrays(_type(moved)) if a[1] not in SCALAR]
        # An update writes its second operand into an array that stays.
        of = moved.operands[1:2] if moved.opcode.startswith("dynamic-update-slice") else ()
        sizes = [
            hlo.type_bytes(self.lines[name].split("(")[0]) for name in of if name in self.lines
        ]
        size = sizes[0] if sizes else min((s for s, _ in results), default=0)
        if HOST_MEMORY in spaces:
            written = next((space for _, space in results), 0)
            way = "to host" if written == HOST_MEMORY else "from host"
            return Operation(i.name, "start", HOST, bytes=size, opcode=way, token=i.name)
        return Operation(
            i.name, "start", DMA, bytes=size * (1 if VMEM in spaces else 2), token=i.name
        )


def _type(i: hlo.Instruction) -> str:
    return i.line.split(f" {i.opcode}(")[0]


def _arrays(text: str) -> list[tuple[int, int]]:
    """Bytes and memory space of each array of a type; 0 is HBM."""
    found = []
    for array, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        found.append((hlo.type_bytes(array), int(space[1]) if space else 0))
    return found


def _members(line: str, devices: int) -> tuple[int, ...]:
    """The devices of a collective's first group, by the numbers of their partitions."""
    if pair := _PAIR.search(line):
        return (int(pair[1]), int(pair[2]))
    if listed := _LISTED.search(line):
        return tuple(int(n) for n in listed[1].split(",") if n)
    if iota := _IOTA.search(line):
        dims = [int(n) for n in iota[3].split(",")]
        ids = np.arange(np.prod(dims)).reshape(dims)
        if iota[4]:
            ids = ids.transpose([int(n) for n in iota[4].split(",")])
        return tuple(ids.reshape(-1, int(iota[2]))[0].tolist())
    if mesh := _MESH.search(line):
        return _along(mesh[1], mesh[2])
    return tuple(range(devices))


def _along(axes: str, names: str) -> tuple[int, ...]:
    """The first group of `mesh['a'=2,'b'=4] {'b'}`; of `'a':(2)4` an axis is 4 apart from its first factor of 2."""
    strides, stride = {}, 1
    for name, size in reversed(re.findall(r"(\w+)'?=(\d+)", axes)):
        strides[name] = (int(size), stride)
        stride *= int(size)
    group = [0]
    for name, before, part in re.findall(r"(\w+)'?(?::\((\d+)\)(\d+))?", names):
        if name not in strides:
            continue
        size, step = strides[name]
        count = int(part or size)
        step *= size // (int(before or 1) * count)
        group = [g + step * n for g in group for n in range(count)]
    return tuple(sorted(group))
