"""The text of a compiled program, read back: computations, fusions, loops, collectives, names.

All functions take text and return what they recognise; text that is cut off or of another version
gives fewer entries, never an exception.

Chapters: 2, 10, 22.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id",
}  # fmt: skip
_TYPE = re.compile(r"\b(pred|token|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.+)$")
_OPCODE = re.compile(r" ([a-z][a-z\-]*)\(([^()]*)")
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|(?:true|false)_computation)=%([\w.\-]+)")
_CALLED_SETS = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_ELEMENT = re.compile(r" get-tuple-element\(.*index=(\d+)")


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      name: its name, without `%`.
      opcode: such as `fusion` or `all-gather`.
      bytes: size of its result.
      operands: names of its operands.
      line: the text after the equals sign.
    """

    name: str
    opcode: str
    bytes: int
    operands: tuple[str, ...]
    line: str


def type_bytes(text: str) -> int:
    """Returns the size of an HLO type in bytes, tuples summed, padding not counted.

    The text is such as `bf16[8,128]{1,0}` or `(f32[4], s4[3])`; other text counts nothing.
    """
    total = 0
    for name, bits, dims in _TYPE.findall(text):
        count = math.prod(int(dim or 1) for dim in dims.split(","))
        total += -(-count * int(bits or (8 if name == "pred" else 0)) // 8)
    return total


def computations(text: str) -> tuple[dict[str, list[Instruction]], str | None]:
    """Splits a module's text into computations.

    Returns the instructions of every computation by its name, and the entry computation's name (None if there is none).
    """
    found: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = found.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            rest = match["rest"]
            if opcode := _OPCODE.search(" " + rest):
                operands = tuple(re.findall(r"%([\w.\-]+)", opcode[2]))
                size = type_bytes(rest[: opcode.start()])
                current.append(Instruction(match["name"], opcode[1], size, operands, rest))
    return found, entry


class Fusion(NamedTuple):
    """Operations that the compiler makes one kernel of: what is between them is never in memory.

    Attributes:
      name: its name.
      kind: the compiler's word, such as `kLoop`, `kOutput` or `kCustom`.
      inside: the instructions of its computation.
      read: bytes of its operands, each once.
      written: bytes of its result.
      runs: how often one run of the module executes it.
    """

    name: str
    kind: str
    inside: tuple[Instruction, ...]
    read: int
    written: int
    runs: int


class Loop(NamedTuple):
    """A `while`: its name and body, how often that runs each time (1 if not known), and its own runs."""

    name: str
    body: str
    trips: int
    runs: int


class Collective(NamedTuple):
    """A collective as it stands in the program.

    Attributes:
      kind: such as `all-gather`; what goes between slices over the data-centre network has ` (dcn)` behind it.
      name: its name; of an asynchronous one, that of its start.
      group: devices of a group; of what goes between slices, slices.
      bytes: the whole side on one device: the gathered result of an all-gather, the operand of a reduce-scatter,
        the array of an all-reduce.
      runs: how often one run of the module executes it.
      overlapped: names of the instructions between its start and its done; None if it blocks.
      arrays: type and bytes of each array in it: compilers combine collectives.
    """

    kind: str
    name: str
    group: int
    bytes: int
    runs: int
    overlapped: tuple[str, ...] | None
    arrays: tuple[tuple[str, int], ...]

    @property
    def moved(self) -> float:
        """Bytes that each device sends in one run, by the ring algorithms (Thakur et al. 2005)."""
        kind = self.kind.removesuffix(" (dcn)")
        if kind.startswith("collective-"):  # permute, broadcast
            return float(self.bytes)
        return (1 + (kind == "all-reduce")) * self.bytes * (self.group - 1) / self.group


class Module:
    """A compiled module, read back from its text.

    Attributes:
      computations: the instructions of every computation by its name.
      entry: the entry computation's name, None where there is none.
      devices: how many devices it is for.
    """

    def __init__(self, text: str):
        self.computations, self.entry = computations(text)
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text[:10_000])
        self.devices = math.prod(int(n) for n in counts)
        self._runs = _executions(self.computations, self.entry)
        self._sizes = {
            c: {i.name: i.bytes for i in self.computations[c]} for c in self.computations
        }

    def _executed(self) -> Iterator[tuple[str, Instruction, int]]:
        """Yields computation, instruction and number of runs of everything that runs."""
        for name, runs in self._runs.items():
            for instruction in self.computations.get(name, []):
                yield name, instruction, runs

    def fusions(self) -> list[Fusion]:
        """The fusions that run."""
        found = []
        for name, i, runs in self._executed():
            if i.opcode == "fusion":
                sizes = self._sizes[name]
                called = dict(_CALLED.findall(i.line)).get("calls", "")
                kind = re.search(r"\bkind=(\w+)", i.line)
                inside = tuple(self.computations.get(called, ()))
                read = sum(sizes.get(operand, 0) for operand in set(i.operands))
                found.append(Fusion(i.name, kind[1] if kind else "", inside, read, i.bytes, runs))
        return found

    def loops(self) -> list[Loop]:
        """The loops that run."""
        found = []
        for name, i, runs in self._executed():
            if i.opcode == "while":
                body = dict(_CALLED.findall(i.line)).get("body", "")
                found.append(Loop(i.name, body, _trip_count(i, name, self.computations), runs))
        return found

    def collectives(self) -> list[Collective]:
        """The collectives that run.

        The pieces of one that a TPU splits to overlap it with compute are a chain with a number, and count once. An
        all-reduce that it fuses with the slice that follows is the reduce-scatter it becomes. Groups of one device
        send nothing and don't count.
        """
        found, seen = [], set()
        for name, i, runs in self._executed():
            kind = i.opcode.removesuffix("-start")
            if kind == "send" and (slices := _BETWEEN_SLICES.search(i.line)):
                kind = f"{slices[1].lower().replace('_', '-')} (dcn)"
            elif kind not in COLLECTIVES:
                continue
            chain, group = _CHAIN.search(i.line), group_size(i.line, self.devices)
            if (chain and chain[1] in seen) or group == 1 < self.devices:
                continue
            seen.add(chain and chain[1])
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            between = _between(i, self.computations[name]) if "-start" in i.opcode else None
            if chain and between is None:
                between = self._along(chain[0])
            arrays = _whole_side(i, self._sizes[name])
            size = sum(size for _, size in arrays)
            found.append(Collective(kind, i.name, group, size, runs, between, arrays))
        return found

    def _along(self, chain: str) -> tuple[str, ...] | None:
        """Names of what the schedule has between the pieces of a split collective, a TPU's fusions, and of these."""
        pieces = {
            c for c, found in self.computations.items() if any(chain in i.line for i in found)
        }
        for found in self.computations.values():
            # Few instructions call any: the pattern is slow on the many others' long lines.
            calls = [i.opcode == "fusion" and _callee(i) in pieces for i in found]
            if sum(calls) > 1:
                first, last = calls.index(True), len(calls) - 1 - calls[::-1].index(True)
                return tuple(i.name for i in found[first + 1 : last] if i.opcode not in FREE)
        return None


def _callee(fusion: Instruction) -> str:
    before, _, name = fusion.line.partition(", calls=%")
    return name.partition(",")[0] if before else ""


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Counts the collectives that one run of an optimized module executes, and their bytes.

    A loop's body counts from the counter's first value to the constant that its condition compares it with; a loop
    without one counts once, and so does each branch of a conditional. What is counted and whose bytes they are:
    `Module.collectives` and `Collective`.

    Returns kind -> (count, bytes), kinds that don't occur left out.
    """
    totals: dict[str, tuple[int, int]] = {}
    for found in Module(text).collectives():
        count, total = totals.get(found.kind, (0, 0))
        totals[found.kind] = (count + found.runs, total + found.runs * found.bytes)
    return {kind: totals[kind] for kind in sorted(totals)}


def _whole_side(collective: Instruction, sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    operands = [sizes.get(operand, 0) for operand in collective.operands]
    written = collective.line.partition(f" {collective.opcode}(")[0]
    results = [(match[1], type_bytes(match[0])) for match in _TYPE.finditer(written)]
    if collective.opcode == "send":  # of one array, after a token
        return ((results[0][0], sum(operands)),) if results else ()
    if collective.opcode.startswith("ragged"):
        # Of one array; operands are also where it is written, which has room for more or for less, and integers.
        return ((results[0][0], max(operands + [size for _, size in results])),)
    # The type of a start is a tuple of the operands, the results and, of a permute, two counters.
    if collective.opcode.endswith("-start") and len(results) >= 2 * len(operands):
        results = results[len(operands) :]
    return tuple((kind, max(n, size)) for n, (kind, size) in zip(operands, results, strict=False))


def _between(start: Instruction, computation: list[Instruction]) -> tuple[str, ...]:
    """Names of what the schedule has between a start and its done, things that take no time left out."""
    names = []
    for instruction in computation[computation.index(start) + 1 :]:
        if start.name in instruction.operands and instruction.opcode.endswith("-done"):
            return tuple(names)
        names += [instruction.name] * (instruction.opcode not in FREE)
    return ()


def _executions(found: dict[str, list[Instruction]], entry: str | None) -> dict[str, int]:
    """Returns how often each computation runs in one run of the entry."""
    times = {entry: 1} if entry is not None else {}
    # A module's text has every computation after those that it calls.
    for name in reversed(found):
        for instruction in found[name]:
            # A -done names the computation that its -start already ran.
            if name not in times or instruction.opcode.endswith(("-done", "-update")):
                continue
            called = dict(_CALLED.findall(instruction.line))
            for names in _CALLED_SETS.findall(instruction.line):
                called |= {name: name for name in re.findall(r"[\w.\-]+", names)}
            for role, callee in called.items():
                # A to_apply adds two numbers or the like, except in a plain call.
                if role == "condition" or (role == "to_apply" and instruction.opcode != "call"):
                    continue
                runs = times[name]
                if role == "body":
                    runs *= _trip_count(instruction, name, found)
                times[callee] = times.get(callee, 0) + runs
    return times


def _trip_count(loop: Instruction, around: str, found: dict[str, list[Instruction]]) -> int:
    """Returns a counted loop's turns: noted by the compiler, or up to the condition's one constant."""
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(noted[1])
    condition = found.get(dict(_CALLED.findall(loop.line)).get("condition", ""), [])
    bounds = [n for i in condition if (n := _integer(i)) is not None]
    counters = [int(n) for i in condition for n in _ELEMENT.findall(i.line)]
    if len(bounds) != 1:
        return 1
    first = _first(loop, counters[0], found[around]) if len(counters) == 1 else 0
    return max(0, bounds[0] - first)


def _first(loop: Instruction, counter: int, around: list[Instruction]) -> int:
    """Where a counter begins, 0 if not known: later where the compiler took the first turns out of the loop."""
    made = {i.name: i for i in around}
    carried = made.pop("".join(loop.operands[:1]), loop)
    begin = made.pop("".join(carried.operands[counter : counter + 1]), loop)
    while begin.opcode == "copy":
        begin = made.pop("".join(begin.operands), loop)
    return _integer(begin) or 0


def _integer(i: Instruction) -> int | None:
    written = re.match(r"[su](?:32|64)\[\]\S* constant\((\d+)\)", i.line)
    return int(written[1]) if written else None


_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]*)\}')

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")

_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]")

_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")

_AXIS = re.compile(r"(\w+)'?(?::\(\d+\)(\d+))?")


def group_size(line: str, devices: int) -> int:
    """Returns how many devices form a group; without a word of it, all.

    Compilers list the groups, count them, or name axes of a mesh, whose sizes are multiplied. Of a transfer between
    slices it is how many slices.

    Args:
      line: the collective's instruction.
      devices: how many the program is for.
    """
    if listed := _SLICES.search(line) or _LISTED.search(line):
        return listed[1].count(",") + 1
    if counted := _COUNTED.search(line):
        return max(1, int(counted[1]))
    if named := _NAMED.search(line):
        sizes = dict(re.findall(r"(\w+)'?=(\d+)", named[1]))
        # Of `'a':(2)4` it is 4 of axis a's devices, in steps that don't matter here.
        return max(1, math.prod(int(n or sizes.get(a, 1)) for a, n in _AXIS.findall(named[2])))
    return max(1, devices)
