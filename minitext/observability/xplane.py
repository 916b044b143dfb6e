"""Reads a profiler's trace, an XSpace in an `.xplane.pb`, without TensorFlow or XProf.

A trace has planes (a device, the host, what is known of programs), a plane has lines (a thread, a stream, a kind of
event), a line has events. JAX reads these itself (`jax.profiler.ProfileData`). It leaves out what a plane says of
events that never happened, and there the profiler keeps the compiled programs: those are read here, from the protocol
buffer's bytes.

Sources: tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto for the field numbers.

Chapters: 20.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from minitext.errors import UserError

PROGRAMS = "/host:metadata"


class Event(NamedTuple):
    """What happened on a line: times in nanoseconds from the start of the trace."""

    name: str
    start: float
    end: float
    stats: dict[str, Any]

    @property
    def op(self) -> str:
        """The operation of the compiled program that it is, such as `fusion.5`, or the event's own name."""
        found = self.stats.get("hlo_op") or self.name
        return str(found).partition(" = ")[0].lstrip("%")


class Line(NamedTuple):
    """Events of one thread, stream or kind, by their start; one that holds others comes before them."""

    name: str
    events: list[Event]


class Plane(NamedTuple):
    """A device (`/device:TPU:0`), the host (`/host:CPU`), or facts."""

    name: str
    lines: list[Line]


class Program(NamedTuple):
    """A compiled program as a trace keeps it.

    Attributes:
      name: such as `jit_train_step`.
      op_names: where each operation comes from: `fusion.5` -> `jit(train_step)/attention/dot_general`.
      opcodes: what each operation is, whatever its name: `psum_invariant.7` -> `all-reduce`.
      bytes: of all its buffers, arguments included, on one device; 0 if the trace does not say.
    """

    name: str
    op_names: dict[str, str]
    opcodes: dict[str, str]
    bytes: int


def find(directory: Path | str) -> Path:
    """Returns the newest trace below a directory; of several processes the first one's.

    Raises:
      UserError: if there is none.
    """
    directory = Path(directory)
    paths = [directory] if directory.is_file() else sorted(directory.rglob("*.xplane.pb"))
    if not paths:
        raise UserError(
            f"{directory} holds no trace: train with profile.first_step=10, or name a folder with an .xplane.pb"
        )
    paths = [path for path in paths if "process-0" in path.parts] or paths
    # JAX names the folder of a session after the second in which it ended.
    newest = max(path.parent.name for path in paths)
    return next(path for path in paths if path.parent.name == newest)


def read(path: Path | str) -> list[Plane]:
    """Reads the events of a trace.

    Raises:
      UserError: if it is not a trace.
    """
    from jax.profiler import ProfileData

    try:
        planes = ProfileData.from_serialized_xspace(Path(path).read_bytes()).planes
        return [
            Plane(plane.name, [Line(line.name, _events(line)) for line in plane.lines])
            for plane in planes
        ]
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path} is not a trace: name an .xplane.pb that is whole") from error


def _events(line: Any) -> list[Event]:
    found = [Event(e.name, e.start_ns, e.end_ns, dict(e.stats)) for e in line.events]
    return sorted(found, key=lambda event: (event.start, -event.end))


def programs(path: Path | str) -> list[Program]:
    """Reads the compiled programs that a trace keeps."""
    found = []
    for plane in _all(Path(path).read_bytes(), 1):
        if _text(plane, 2) != PROGRAMS:
            continue
        for entry in _all(plane, 4):
            for metadata in _all(entry, 2):
                for stat in _all(metadata, 5):
                    found += [_program(proto) for proto in _all(stat, 6)]
    return found


def _program(hlo_proto: bytes) -> Program:
    module = next(iter(_all(hlo_proto, 1)), b"")
    op_names, opcodes = {}, {}
    for computation in _all(module, 3):
        for instruction in _all(computation, 2):
            opcodes[_text(instruction, 1)] = _text(instruction, 2)
            for metadata in _all(instruction, 7):
                op_names[_text(instruction, 1)] = _text(metadata, 2)
    buffers = [b for assignment in _all(hlo_proto, 3) for b in _all(assignment, 3)]
    size = sum(value for b in buffers for number, value in _fields(b) if number == 2)
    return Program(_text(module, 1), op_names, opcodes, size)


# --- the wire format of protocol buffers (protobuf.dev/programming-guides/encoding)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The number and value of each field: an int, or bytes; fixed-width numbers, which nothing here needs, as bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        yield number, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def _all(message: bytes, wanted: int) -> Iterator[bytes]:
    return (
        value for number, value in _fields(message) if number == wanted and isinstance(value, bytes)
    )


def _text(message: bytes, wanted: int) -> str:
    return next((value.decode() for value in _all(message, wanted)), "")
