"""What XLA writes about a compiled program, read back: collectives, buffers, out-of-memory errors.

All functions take text and return what they recognise; text that is cut off or of another version
gives fewer entries, never an exception.

Chapters: 2, 10, 22.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_TYPE = re.compile(r"\b(pred|token|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.+)$")
_OPCODE = re.compile(r" ([a-z][a-z\-]*)\(([^()]*)")
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%([\w.\-]+)"
)
_CALLED_SETS = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")
_CHANNEL = re.compile(r"\bchannel_id=\d+")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


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


@dataclass(frozen=True)
class Buffer:
    """A piece of memory that the compiler set aside on each device.

    Attributes:
      bytes: its size, padding of the layout included.
      shape: type of a value it holds, such as `bf16[8192,1024]`.
      kind: `argument`, `output`, or `temporary`.
      op: what makes the value: an argument's name, or the JAX operation's; else the instruction's.
    """

    bytes: int
    shape: str
    kind: Literal["argument", "output", "temporary"]
    op: str


@dataclass(frozen=True)
class OutOfMemory:
    """What the compiler says of a program that is too large.

    Attributes:
      used: bytes the program needs on a device, as exact as the message prints them.
      available: bytes it may have.
      buffers: the largest, where the message lists them.
    """

    used: int
    available: int
    buffers: tuple[Buffer, ...]


def type_bytes(text: str) -> int:
    """Returns the size of an HLO type in bytes, tuples summed, padding not counted.

    Args:
      text: such as `bf16[8,128]{1,0}` or `(f32[4], s4[3])`; other text counts nothing.
    """
    total = 0
    for name, bits, dims in _TYPE.findall(text):
        count = 1
        for dim in dims.split(","):
            count *= int(dim or 1)
        total += -(-count * int(bits or (8 if name == "pred" else 0)) // 8)
    return total


def computations(text: str) -> tuple[dict[str, list[Instruction]], str | None]:
    """Splits a module's text into computations.

    Returns:
      The instructions of every computation by its name, and the entry computation's name (None if
      there is none).
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


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Counts the collectives that one run of an optimized module executes, and their bytes.

    Bytes are those of the whole side of a collective on one device: the gathered result of an
    all-gather, the operand of a reduce-scatter, the array of an all-reduce. What crosses a link
    follows from them and the algorithm. A loop's body counts as often as the constant that its
    condition compares the counter with; a loop without one counts once, and so does each branch of
    a conditional. The pieces of a collective that the compiler splits to overlap it with compute
    have one channel number and size, and count once. An all-reduce that a TPU fuses with the slice that
    follows counts as the reduce-scatter it is. Sends and receives between slices over the
    data-centre network don't count.

    Returns:
      Kind -> (count, bytes), kinds that don't occur left out.
    """
    found, entry = computations(text)
    totals: dict[str, tuple[int, int]] = {}
    seen = set()
    for name, times in _executions(found, entry).items():
        sizes = {instruction.name: instruction.bytes for instruction in found.get(name, [])}
        for instruction in found.get(name, []):
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            operands = sum(sizes.get(operand, 0) for operand in instruction.operands)
            result = instruction.bytes
            if instruction.opcode.endswith("-start") and result > operands:
                # The type is a tuple of the operands, the results and, of a permute, two counters.
                words = instruction.line.partition(f" {instruction.opcode}(")[0].count("u32[]")
                result -= operands + 4 * words
            size = max(operands, result)
            channel = _CHANNEL.search(instruction.line)
            if channel and (kind, channel[0], size) in seen:
                continue
            seen.add((kind, channel and channel[0], size))
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            count, total = totals.get(kind, (0, 0))
            totals[kind] = (count + times, total + times * size)
    return {kind: totals[kind] for kind in COLLECTIVES if kind in totals}


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
                    runs *= _trip_count(instruction, found.get(called.get("condition", ""), []))
                times[callee] = times.get(callee, 0) + runs
    return times


def _trip_count(loop: Instruction, condition: list[Instruction]) -> int:
    """Returns a counted loop's bound: noted by the compiler, or the condition's one constant."""
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(noted[1])
    constants = [re.match(r"s32\[\]\S* constant\((\d+)\)", i.line) for i in condition]
    bounds = [int(match[1]) for match in constants if match]
    return bounds[0] if len(bounds) == 1 else 1


def op_names(text: str) -> dict[str, str]:
    """Returns the JAX name of every instruction of a module that has one."""
    names = {}
    for line in text.splitlines():
        if (match := _INSTRUCTION.match(line)) and (op := _OP_NAME.search(match["rest"])):
            names[match["name"]] = op[1].replace("\\'", "'")
    return names


_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$")
_VALUE = re.compile(r"^ value: <\d+ ([^\s{>]+).*? @(\d+)> \(size=(\d+),offset=(\d+)\): (.+)$")


def buffers(assignment: str, names: dict[str, str] | None = None) -> list[Buffer]:
    """Reads XLA's buffer assignment: the pieces of a device's main memory, largest first.

    Values that share a place and a size (the same array before, in and after a loop) count as one
    buffer. Buffers that live at different times may overlap, so temporaries sum to more than the
    program's temporary memory.

    Args:
      assignment: text of a `*buffer-assignment.txt` dump.
      names: instruction -> JAX name, from `op_names`; without it buffers carry instructions' names.
    """
    names, pieces = names or {}, {}
    kind, allocation = None, 0
    for line in assignment.splitlines():
        if header := _ALLOCATION.match(line):
            kind, allocation = _kind(header[2]), allocation + 1
        elif kind is not None and (value := _VALUE.match(line)):
            name, _, size, offset, shape = value.groups()
            buffer = Buffer(int(size), _plain(shape), kind, names.get(name, name))
            # The first value with a JAX name describes a buffer best; loops' parameters have none.
            # An argument's own name beats those of operations that pass it on or overwrite it.
            rank = (name in names) + (kind == "argument" and not buffer.op.startswith("jit("))
            place = (allocation, offset, size)
            if place not in pieces or rank > pieces[place][0]:
                pieces[place] = (rank, buffer)
    return sorted((buffer for _, buffer in pieces.values()), key=lambda b: -b.bytes)


def allocated(assignment: str) -> dict[str, int]:
    """Sums XLA's buffer assignment for a device's main memory.

    Returns:
      Bytes of `argument`s, `alias` (arguments whose memory an output reuses), other `output`s and
      `temporary` memory.
    """
    totals = {"argument": 0, "alias": 0, "output": 0, "temporary": 0}
    for line in assignment.splitlines():
        if (header := _ALLOCATION.match(line)) and (kind := _kind(header[2])):
            totals[kind] += int(header[1])
            if kind == "argument" and "maybe-live-out" in header[2]:
                totals["alias"] += int(header[1])
    return totals


def _kind(attributes: str) -> Literal["argument", "output", "temporary"] | None:
    """Returns what an allocation of main memory is for; None for constants and other memories."""
    if re.search(r"\b(color [1-9]|constant|thread-local)", attributes):
        return None
    if re.search(r"\bparameter \d", attributes):
        return "argument"
    return "output" if "maybe-live-out" in attributes else "temporary"


def _plain(shape: str) -> str:
    """Strips layouts and comments from a type."""
    return re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", shape)


_NEEDS = (
    r"required for HLO temporaries \((?P<used>[^)]*)\) exceeds available HBM \((?P<has>[^)]*)\)",
    r"memory space hbm\. Used (?P<used>\S+) of (?P<has>\S+) hbm",
    r"Requires (?P<used>[^,]+), has (?P<has>\S+) available",
)
_LISTED = re.compile(
    r"Size: (?P<size>\S+)\n"
    r"(?:\s+Operator: op_name=\"(?P<op>[^\"]*)\".*\n)?"
    r"\s+Shape: (?P<shape>.+)\n"
    r"(?:.*\n){0,2}?(?:\s+XLA label: (?P<label>.*)\n)?\s+Allocation type: (?P<type>.+)"
)


def parse_out_of_memory(message: str) -> OutOfMemory | None:
    """Reads the error that the TPU compiler raises for a program that does not fit into HBM.

    Returns:
      What it says, or None if the message is about something else (VMEM, for instance).
    """
    for pattern in _NEEDS:
        if match := re.search(pattern, message):
            used, available = _read_size(match["used"]), _read_size(match["has"])
            if used is not None and available is not None:
                return OutOfMemory(used, available, tuple(_listed(message)))
    return None


def _listed(message: str) -> Iterator[Buffer]:
    for match in _LISTED.finditer(message):
        size = _read_size(match["size"])
        if size is None:
            continue
        kind = "argument" if "param" in match["type"].lower() else "temporary"
        op = match["op"] or (match["label"] or "").partition(" = ")[0]
        yield Buffer(size, _plain(match["shape"]), kind, op)


def _read_size(text: str) -> int | None:
    """Reads a size as XLA prints it, such as `15.75G` or `16.51GiB`, in powers of 1024."""
    match = re.match(r"([\d.]+)\s*([KMGT]?)i?B?", text.strip())
    try:
        return round(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")) if match else None
    except ValueError:
        return None
