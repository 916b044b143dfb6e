"""What the compiler says about memory: its buffer assignment and its out-of-memory errors.

Text that is truncated or comes from another version gives fewer entries, never an exception.

Chapters: 22.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minitext.compiler import hlo

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$")
_VALUE = re.compile(r"^ value: <\d+ ([^\s{>]+).*? @(\d+)> \(size=(\d+),offset=(\d+)\): (.+)$")


@dataclass(frozen=True)
class Buffer:
    """A piece of memory that the compiler assigned on each device.

    Attributes:
      bytes: its size, including the layout's padding.
      shape: type of a value it holds, such as `bf16[8192,1024]`.
      kind: `argument`, `output`, or `temporary`.
      op: name of the argument or of the JAX operation that makes the value; otherwise the instruction's name.
    """

    bytes: int
    shape: str
    kind: Literal["argument", "output", "temporary"]
    op: str


@dataclass(frozen=True)
class OutOfMemory:
    """The compiler's error for a program that is too large.

    Attributes:
      used: bytes the program needs on a device, as precise as the message.
      available: bytes it may use.
      buffers: the largest buffers, if the message lists them.
    """

    used: int
    available: int
    buffers: tuple[Buffer, ...]


def read_buffers(
    assignment: str, names: dict[str, str] | None = None, arguments: dict[int, str] | None = None
) -> list[Buffer]:
    """Parses XLA's buffer assignment: the pieces of a device's main memory, largest first.

    Values of one size at one address (the same array before, in and after a loop) count as one buffer. Buffers that
    live at different times may overlap, so temporaries sum to more than the program's temporary memory.

    Args:
      assignment: text of a `*buffer-assignment.txt` dump.
      names: instruction -> JAX name, from `op_names`; without it, buffers have instructions' names.
      arguments: number -> name, from `argument_names`.
    """
    names, pieces = names or {}, {}
    kind, argument, allocation = None, None, 0
    for line in assignment.splitlines():
        if header := _ALLOCATION.match(line):
            kind, allocation = _kind(header[2]), allocation + 1
            number = re.search(r"\bparameter (\d+)", header[2])
            argument = (arguments or {}).get(int(number[1])) if number else None
        elif kind is not None and (value := _VALUE.match(line)):
            name, _, size, offset, shape = value.groups()
            op = argument or names.get(name)
            # The first value with a JAX name describes a buffer best; loop parameters have none.
            address = (allocation, offset, size)
            if address not in pieces or (op and not pieces[address][0]):
                pieces[address] = (op, Buffer(int(size), _plain(shape), kind, op or name))
    return sorted((buffer for _, buffer in pieces.values()), key=lambda b: -b.bytes)


def allocated(assignment: str) -> dict[str, int]:
    """Sums XLA's buffer assignment for a device's main memory.

    Returns:
      Bytes of `argument`s, `alias` (arguments whose memory an output reuses), other `output`s and `temporary` memory;
      and `vector`, what a TPU keeps in its vector memory instead.
    """
    totals = {"argument": 0, "alias": 0, "output": 0, "temporary": 0, "vector": 0}
    for line in assignment.splitlines():
        header = _ALLOCATION.match(line)
        if header and re.search(r"\bcolor 1,.*preallocated-temp", header[2]):
            totals["vector"] += int(header[1])
        elif header and (kind := _kind(header[2])):
            totals[kind] += int(header[1])
            if kind == "argument" and "maybe-live-out" in header[2]:
                totals["alias"] += int(header[1])
    return totals


def _kind(attributes: str) -> Literal["argument", "output", "temporary"] | None:
    """Returns the kind of an allocation in main memory; None for constants and other memories."""
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
    """Parses the TPU compiler's error for a program that does not fit into HBM.

    Returns:
      The sizes it names, or None if the message is about something else, such as VMEM.
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
    """Parses a size as XLA prints it, such as `15.75G` or `16.51GiB`, in powers of 1024."""
    match = re.match(r"([\d.]+)\s*([KMGT]?)i?B?", text.strip())
    try:
        return round(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")) if match else None
    except ValueError:
        return None


def argument_names(text: str) -> dict[int, str]:
    """Returns the JAX names of a module's arguments by their number.

    Args:
      text: the module before optimizations; the compiler may overwrite the names later.
    """
    found, entry = hlo.computations(text)
    return {
        int(number[1]): name
        for i in found.get(entry or "", [])
        if (number := re.search(r" parameter\((\d+)\)", i.line))
        and (name := _op_name(i)) is not None
    }


def op_names(text: str) -> dict[str, str]:
    """Returns the JAX name of each instruction of a module that has one."""
    found = hlo.computations(text)[0].values()
    return {i.name: name for rows in found for i in rows if (name := _op_name(i)) is not None}


def _op_name(i: hlo.Instruction) -> str | None:
    match = _OP_NAME.search(i.line)
    return match[1].replace("\\'", "'") if match else None
