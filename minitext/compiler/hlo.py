"""The text of a compiled program, parsed: computations, fusions, loops, collectives, names.

Text that is truncated or comes from another version gives fewer entries, never an exception.

Chapters: 2, 10, 22.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

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
_OPERAND = re.compile(r"%(([\w.\-]+)(?:#(\d+))?)")
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|(?:true|false)_computation)=%([\w.\-]+)")
_CALLED_SETS = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# Either all slices, or groups of devices that are each in another slice.
_MEGASCALE = re.compile(r'_xla_megascale_target=(?:"\{|\{\{)([\d,]*)\}')
CHAIN = re.compile(r'\bchain_id="(\d+)"')  # the pieces of a split collective share it
_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:matmul|gemm)')
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

    @property
    def called(self) -> dict[str, str]:
        """The computations that it calls by their role, such as `body`; branches that are listed, by their names."""
        found = dict(_CALLED.findall(self.line))
        for names in _CALLED_SETS.findall(self.line):
            found |= {name: name for name in re.findall(r"[\w.\-]+", names)}
        return found

    @property
    def type(self) -> str:
        """The text of its result's type."""
        return self.line.partition(f" {self.opcode}(")[0]


def type_bytes(text: str) -> int:
    """Returns the bytes of an HLO type such as `bf16[8,128]{1,0}` or `(f32[4], s4[3])`, without padding."""
    total = 0
    for name, bits, dims in _TYPE.findall(text):
        count = math.prod(int(dim or 1) for dim in dims.split(","))
        total += -(-count * int(bits or (8 if name == "pred" else 0)) // 8)
    return total


def show_type(aval: Any) -> str:
    """Returns the type of an array or a `ShapeDtypeStruct` as HLO writes it, such as `f32[8,256]`."""
    name = getattr(getattr(aval, "dtype", None), "name", "token")
    for long, short in (("float", "f"), ("uint", "u"), ("int", "s"), ("bool", "pred"), ("_", "")):
        name = name.replace(long, short)
    return f"{name}[{','.join(map(str, getattr(aval, 'shape', ())))}]"


def computations(text: str) -> tuple[dict[str, list[Instruction]], str | None]:
    """Returns the instructions of each computation of a module by its name, and the entry computation's name if any.

    Dumps of JAX 0.11 (XLA's flag `xla_dump_compact_gte`) write `%loop#1` for an element of a tuple and leave the
    `get-tuple-element` out. It is put back here, before its first use and with `loop#1` as its name, so all texts read
    the same.
    """
    found: dict[str, dict[str, Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = found.setdefault(header["name"], {})
            entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            rest = match["rest"]
            if opcode := _OPCODE.search(" " + rest):
                operands = _OPERAND.findall(opcode[2])
                for name, whole, index in operands:
                    if index and name not in current and whole in current:
                        current[name] = _element(name, current[whole], int(index))
                names = tuple(name for name, _, _ in operands)
                size = type_bytes(rest[: opcode.start()])
                current[match["name"]] = Instruction(match["name"], opcode[1], size, names, rest)
    return {name: list(rows.values()) for name, rows in found.items()}, entry


def _element(name: str, whole: Instruction, index: int) -> Instruction:
    """Returns the instruction that takes an element of a tuple."""
    kind = "".join(_element_types(whole.type)[index : index + 1])
    line = f"{kind} get-tuple-element(%{whole.name}), index={index}"
    return Instruction(name, "get-tuple-element", type_bytes(kind), (whole.name,), line)


@functools.lru_cache(maxsize=64)
def _element_types(text: str) -> tuple[str, ...]:
    """Returns the types of a tuple's elements, which may be tuples; commas in brackets don't divide them."""
    parts, depth = [""], 0
    for c in text.strip()[1:-1]:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return tuple(re.sub(r"/\*.*?\*/", "", part).strip() for part in parts)


class Fusion(NamedTuple):
    """Operations that the compiler turns into one kernel: values between them are never in memory.

    Attributes:
      name: its name.
      kind: XLA's kind, such as `kLoop`, `kOutput` or `kCustom`.
      inside: the instructions of its computation.
      read: bytes of its distinct operands.
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
    """A `while`: its name and body, its trip count (1 if not known), and how often the whole loop runs."""

    name: str
    body: str
    trips: int
    runs: int


class Collective(NamedTuple):
    """A collective of a program.

    Attributes:
      kind: such as `all-gather`; between slices, over the data-centre network, it ends in ` (dcn)`.
      name: its name; that of the start if it is asynchronous.
      group: devices in a replica group; between slices, the number of slices.
      bytes: the larger side on one device: the gathered result of an all-gather, the operand of a reduce-scatter,
        the array of an all-reduce. Of a ragged all-to-all the smaller one: the other has room for the worst case.
      runs: how often one run of the module executes it.
      overlapped: names of the instructions between its start and its done; None if it blocks.
      arrays: type and bytes of each of its arrays: compilers combine collectives.
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
        return ring_bytes(self.kind, self.bytes, self.group)


class Product(NamedTuple):
    """A matrix product of a program.

    Attributes:
      name: its name.
      where: JAX's name for it, such as `jit(step)/transpose(jvp(ffn))/dot_general`; "" if the compiler left none.
      types: the factors' types, such as `s8` or `bf16`, as they are multiplied.
      result: the type and shape of its result, such as `s32[256,512]`.
      runs: how often one run of the module executes it.
    """

    name: str
    where: str
    types: tuple[str, ...]
    result: str
    runs: int


def ring_bytes(kind: str, size: int, group: int) -> float:
    """Returns the bytes that each device of a group sends for a collective whose larger side has `size` bytes."""
    kind = kind.removesuffix(" (dcn)")
    if kind.startswith("collective-"):  # permute, broadcast
        return float(size)
    return (1 + (kind == "all-reduce")) * size * (group - 1) / group


class Module:
    """A compiled module, parsed from its text.

    Attributes:
      computations: the instructions of each computation by its name.
      entry: the entry computation's name, None if there is none.
      devices: how many devices it is for.
    """

    def __init__(self, text: str):
        self.computations, self.entry = computations(text)
        header = text.lstrip().partition("\n")[0]  # long: it lists all arguments
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.devices = math.prod(int(n) for n in counts)
        self._runs = _executions(self.computations, self.entry)
        self._sizes = {c: {i.name: i.bytes for i in rows} for c, rows in self.computations.items()}

    def _executed(self) -> Iterator[tuple[str, Instruction, int]]:
        """Yields the computation, the instruction and the number of runs of everything that runs."""
        for name, runs in self._runs.items():
            for instruction in self.computations.get(name, []):
                yield name, instruction, runs

    def fusions(self) -> list[Fusion]:
        """The fusions that run."""
        found = []
        for name, i, runs in self._executed():
            if i.opcode == "fusion":
                sizes = self._sizes[name]
                kind = re.search(r"\bkind=(\w+)", i.line)
                inside = tuple(self.computations.get(i.called.get("calls", ""), ()))
                read = sum(sizes.get(operand, 0) for operand in set(i.operands))
                found.append(Fusion(i.name, kind[1] if kind else "", inside, read, i.bytes, runs))
        return found

    def loops(self) -> list[Loop]:
        """The loops that run."""
        return [
            Loop(i.name, i.called.get("body", ""), _trip_count(i, name, self.computations), runs)
            for name, i, runs in self._executed()
            if i.opcode == "while"
        ]

    def collectives(self) -> list[Collective]:
        """The collectives that run.

        A collective that a TPU splits into a chain of pieces, to overlap it with compute, counts once. An all-reduce
        that is fused with the following slice counts as the reduce-scatter it becomes. Groups of one device send
        nothing and do not count.
        """
        found, seen = [], set()
        for name, i, runs in self._executed():
            kind = i.opcode.removesuffix("-start")
            if kind == "send" and (slices := _BETWEEN_SLICES.search(i.line)):
                kind = f"{slices[1].lower().replace('_', '-')} (dcn)"
            elif kind not in COLLECTIVES:
                continue
            chain, group = CHAIN.search(i.line), group_size(i.line, self.devices)
            if (chain and chain[1] in seen) or group == 1 < self.devices:
                continue
            seen.add(chain and chain[1])
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            between = _between(i, self.computations[name]) if "-start" in i.opcode else None
            if chain and between is None:
                between = self._along(chain[0])
            arrays = _arrays(i, self._sizes[name])
            if kind == "all-gather (dcn)":  # the send has the smaller side
                arrays = tuple((dtype, size * group) for dtype, size in arrays)
            size = sum(size for _, size in arrays)
            found.append(Collective(kind, i.name, group, size, runs, between, arrays))
        return found

    def products(self) -> list[Product]:
        """The matrix products that run, in fusions or not, those of a GPU's library and a TPU's grouped ones too.

        Products inside other kernels, such as attention's, aren't seen.
        """
        found = []
        for name, i, runs in self._executed():
            grouped = i.name.startswith("ragged-dot-") and "metadata" not in i.name
            called = i.opcode == "custom-call" and (grouped or _LIBRARY.search(i.line))
            if i.opcode not in ("dot", "convolution") and not called:
                continue
            types = {other.name: _TYPE.search(other.type) for other in self.computations[name]}
            two = i.operands[-2:] if grouped else i.operands[:2]
            factors = [match[1] for operand in two if (match := types.get(operand))]
            where, result = re.search(r'op_name="([^"]*)"', i.line), _TYPE.search(i.type)
            label, shape = where[1] if where else "", result[0] if result else ""
            found.append(Product(i.name, label, tuple(factors), shape, runs))
        return found

    def _along(self, chain: str) -> tuple[str, ...] | None:
        """Returns the names of what the schedule has from the first to the last piece of a split collective."""
        pieces = {
            c for c, found in self.computations.items() if any(chain in i.line for i in found)
        }
        for found in self.computations.values():
            # Only a few fusions call one, and a regular expression is slow on the long lines of all the others.
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

    A loop's body counts once per iteration, if the trip count is a constant; a loop without one counts once, and so
    does each branch of a conditional. `Module.collectives` and `Collective` say what is counted.

    Returns:
      kind -> (count, bytes) of the kinds that occur.
    """
    return {kind: sums[:2] for kind, sums in sum_by_kind(Module(text).collectives()).items()}


def sum_by_kind(found: Iterable[Collective]) -> dict[str, tuple[int, int, float]]:
    """Returns kind -> (count, bytes, bytes that each device sends) of one step."""
    sums: dict[str, tuple[int, int, float]] = {}
    for one in found:
        count, size, sent = sums.get(one.kind, (0, 0, 0.0))
        runs = one.runs
        sums[one.kind] = count + runs, size + runs * one.bytes, sent + runs * one.moved
    return dict(sorted(sums.items()))


def _arrays(collective: Instruction, sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Returns the type of each array that a collective sends, and its bytes as `Collective.bytes` counts them."""
    operands = [sizes.get(operand, 0) for operand in collective.operands]
    results = [(match[1], type_bytes(match[0])) for match in _TYPE.finditer(collective.type)]
    if collective.opcode == "send":  # one array and a token
        return ((results[0][0], sum(operands)),) if results else ()
    if collective.opcode.startswith("ragged"):
        # One array, the buffer that it is written to, and integers.
        return tuple((kind, min(operands[:2], default=0)) for kind, _ in results[:1])
    # A start's type is a tuple of the operands, the results and, for a permute, two counters.
    if collective.opcode.endswith("-start") and len(results) >= 2 * len(operands):
        results = results[len(operands) :]
    return tuple((kind, max(n, size)) for n, (kind, size) in zip(operands, results, strict=False))


def _between(start: Instruction, computation: list[Instruction]) -> tuple[str, ...]:
    """Returns the names of what the schedule has between a start and its done, without what takes no time."""
    names = []
    for instruction in computation[computation.index(start) + 1 :]:
        if start.name in instruction.operands and instruction.opcode.endswith("-done"):
            return tuple(names)
        names += [instruction.name] * (instruction.opcode not in FREE)
    return ()


def _executions(found: dict[str, list[Instruction]], entry: str | None) -> dict[str, int]:
    """Returns how often each computation runs in one run of the entry."""
    times = {entry: 1} if entry is not None else {}
    # In a module's text each computation comes after those that it calls.
    for name in reversed(found):
        for instruction in found[name]:
            # A done names the computation that its start already ran.
            if name not in times or instruction.opcode.endswith(("-done", "-update")):
                continue
            for role, callee in instruction.called.items():
                # A to_apply is a scalar function, except in a plain call.
                if role == "condition" or (role == "to_apply" and instruction.opcode != "call"):
                    continue
                runs = times[name]
                if role == "body":
                    runs *= _trip_count(instruction, name, found)
                times[callee] = times.get(callee, 0) + runs
    return times


def _trip_count(loop: Instruction, around: str, found: dict[str, list[Instruction]]) -> int:
    """Returns a loop's iterations: as the compiler noted them, or up to the condition's only constant."""
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(noted[1])
    condition = found.get(loop.called.get("condition", ""), [])
    bounds = [n for i in condition if (n := _integer(i)) is not None]
    counters = [int(n) for i in condition for n in _ELEMENT.findall(i.line)]
    if len(bounds) != 1:
        return 1
    if len(counters) != 1:
        return max(0, bounds[0])
    first = _first(loop, counters[0], found[around])
    step = _step(found.get(loop.called.get("body", ""), []), counters[0])
    return max(0, -(-(bounds[0] - first) // step))


def _step(body: list[Instruction], counter: int) -> int:
    """Returns what one iteration adds to a counter, 1 if not known; 2 if the compiler unrolled the loop once."""
    made = {i.name: i for i in body}
    last = body[-1].operands[counter : counter + 1] if body else ()
    added = made.get("".join(last))
    if added is None or added.opcode != "add":
        return 1
    return next((n for name in added.operands if name in made and (n := _integer(made[name]))), 1)


def _first(loop: Instruction, counter: int, around: list[Instruction]) -> int:
    """Returns where a counter starts, 0 if not known; not 0 if the compiler peeled the first iterations."""
    made = {i.name: i for i in around}
    carried = made.pop("".join(loop.operands[:1]), loop)
    begin = made.pop("".join(carried.operands[counter : counter + 1]), loop)
    while begin.opcode == "copy":
        begin = made.pop("".join(begin.operands), loop)
    return _integer(begin) or 0


def _integer(i: Instruction) -> int | None:
    written = re.match(r"[su](?:32|64)\[\]\S* constant\((\d+)\)", i.line)
    return int(written[1]) if written else None


_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


def group_size(line: str, devices: int) -> int:
    """Returns how many devices form a replica group; for a transfer between slices, how many slices.

    Args:
      line: the collective's instruction.
      devices: how many the program is for, which are one group if the line names none.
    """
    if slices := _MEGASCALE.search(line):
        return slices[1].count(",") + 1
    return max(1, len(replica_group(line, devices)))


def replica_group(line: str, devices: int) -> tuple[int, ...]:
    """Returns the devices of a collective's first replica group, by the numbers of their partitions.

    Compilers list the groups, transpose and reshape a range of numbers, or name axes of a mesh. The arguments are those
    of `group_size`.
    """
    if listed := _LISTED_GROUPS.search(line):
        return tuple(int(n) for n in listed[1].split(",") if n)
    if iota := _IOTA_GROUPS.search(line):
        groups, size = int(iota[1]), int(iota[2])
        dims = [int(n) for n in iota[3].split(",")] if iota[3] else [groups, size]
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota[4]:
            ids = ids.transpose([int(n) for n in iota[4].split(",")])
        return tuple(ids.reshape(-1, size)[0].tolist())
    if mesh := _MESH_GROUPS.search(line):
        return _mesh_group(mesh[1], mesh[2])
    return tuple(range(devices))


def _mesh_group(axes: str, names: str) -> tuple[int, ...]:
    """Returns the first group of `mesh[axes] {names}`, such as of `mesh['a'=2,'b'=4] {'b'}`.

    In `'a':(2)4` axis a has an outer factor of 2, and a group is the 4 devices inside it.
    """
    strides, stride = {}, 1
    for name, size in reversed(re.findall(r"(\w+)'?=(\d+)", axes)):
        strides[name] = (int(size), stride)
        stride *= int(size)
    group = [0]
    for name, outer, part in re.findall(r"(\w+)'?(?::\((\d+)\)(\d+))?", names):
        size, step = strides.get(name, (1, 0))
        count = int(part or size)
        step *= size // max(1, int(outer or 1) * count)
        group = [g + step * n for g in group for n in range(count)]
    return tuple(sorted(group))
