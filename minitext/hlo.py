"""The text of a compiled program, read back: computations, collectives, names.

All functions take text and return what they recognise; text that is cut off or of another version
gives fewer entries, never an exception.

Chapters: 2, 10, 22.
"""

import re
from typing import NamedTuple

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
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
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
    follows counts as the reduce-scatter it is. The part that goes between slices over the
    data-centre network is a kind of its own, such as `all-reduce (dcn)`.

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
            if kind == "send" and (slices := _BETWEEN_SLICES.search(instruction.line)):
                kind = f"{slices[1].lower().replace('_', '-')} (dcn)"
            elif kind not in COLLECTIVES:
                continue
            operands = sum(sizes.get(operand, 0) for operand in instruction.operands)
            result = 0 if instruction.opcode == "send" else instruction.bytes
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
    return {kind: totals[kind] for kind in sorted(totals)}


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


def argument_names(text: str) -> dict[int, str]:
    """Returns the JAX names of a module's arguments by their number.

    Args:
      text: the module before optimizations; the compiler may overwrite the names later.
    """
    found, entry = computations(text)
    names = {}
    for instruction in found.get(entry or "", []):
        number = re.search(r" parameter\((\d+)\)", instruction.line)
        if number and (op := _OP_NAME.search(instruction.line)):
            names[int(number[1])] = op[1].replace("\\'", "'")
    return names


def op_names(text: str) -> dict[str, str]:
    """Returns the JAX name of every instruction of a module that has one."""
    names = {}
    for line in text.splitlines():
        if (match := _INSTRUCTION.match(line)) and (op := _OP_NAME.search(match["rest"])):
            names[match["name"]] = op[1].replace("\\'", "'")
    return names
