"""Reading what launchers put into environment variables: numbers, addresses, lists of nodes.

Chapters: 21.
"""

import re
from collections.abc import Mapping

from minitext.errors import UserError

PORT = 8476  # of the coordinator, where nothing says another


def number(env: Mapping[str, str], name: str, least: int, default: int | None = None) -> int:
    """Reads a whole number.

    Args:
      env: environment variables.
      name: of the variable.
      least: the smallest number it may be.
      default: what it is where the variable is not set; None: it must be set.

    Raises:
      UserError: if it is not set, no whole number, or too small.
    """
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UserError(f"{name} is not set: set it to a whole number, {least} or more")
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < least:
        raise UserError(f"{name}={text!r} is not a whole number, {least} or more: mend or unset it")
    return int(text)


def numbers(env: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    """Reads whole numbers with commas between them, None where the variable is not set.

    Raises:
      UserError: if it is anything else.
    """
    text = env.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise UserError(f"{name}={text!r}: expected numbers such as 0,1")
    return tuple(int(part) for part in text.split(","))


def check_index(index: int, count: int, index_name: str, count_name: str) -> None:
    """Checks that there is an `index` among `count`.

    Raises:
      UserError: with both names and values, if there is not.
    """
    if not 0 <= index < count:
        raise UserError(
            f"{index_name}={index} and {count_name}={count} contradict each other: they are numbered from 0 to "
            f"{count - 1}"
        )


def address(text: str, name: str) -> str:
    """Checks `host`, `host:port` or `[address]:port`, and adds the port if it is missing.

    Raises:
      UserError: if it is none of these.
    """
    found = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?", text.strip())
    if not found or not 0 < int(found[2] or PORT) < 65_536:
        raise UserError(f"{name}={text!r} is no address: expected HOST:PORT, such as node01:{PORT}")
    return f"{found[1]}:{found[2] or PORT}"


def nodes(text: str) -> list[str]:
    """Expands SLURM's short form of node names: `a[01-03,7],b` is a01, a02, a03, a7, b.

    Raises:
      UserError: if it is no list of nodes.
    """
    names = []
    for part in _split_outside_brackets(text):
        pieces = re.findall(r"\[([^\[\]]*)\]|([^\[\]]+)", part)
        if "".join(f"[{a}]" if a else b for a, b in pieces) != part or not part:
            raise UserError(f"{text!r} is no list of nodes: expected one like node[01-04,7],login2")
        found = [""]
        for ranges, plain in pieces:
            ends = _expand_ranges(ranges, text) if ranges else [plain]
            found = [name + end for name in found for end in ends]
        names += found
    return names


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text.strip())


def _expand_ranges(ranges: str, text: str) -> list[str]:
    ends = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        low, high = (bounds[1], bounds[2] or bounds[1]) if bounds else ("1", "0")
        if int(high) < int(low) or int(high) - int(low) > 1_000_000:
            raise UserError(f"{text!r} is no list of nodes: {part!r} in it is no range of numbers")
        ends += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return ends
