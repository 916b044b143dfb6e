"""Reads a profiler trace, an XSpace in an `.xplane.pb` file, without TensorFlow or XProf.

A trace consists of planes (a device, the host, or metadata), a plane of lines (a thread, a stream or a kind of event),
and a line of events. `jax.profiler.ProfileData` reads all of these. It doesn't expose a plane's event metadata, which
is where the profiler stores the compiled programs, so `programs` decodes those with `protobuf`.

Sources: tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto for the field numbers.

Chapters: 20.
"""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from minitext import files
from minitext.errors import UserError

HOST, PROGRAMS = "/host:CPU", "/host:metadata"
MOST_BYTES = 2**31 - 1  # protobuf reads no longer message
# The fields that we read of each message: name -> (number, type), in a list if it is
# repeated. protobuf skips every other field.
SCHEMA: dict[str, dict[str, tuple[int, Any]]] = {
    "XSpace": {"planes": (1, ["XPlane"])},
    "XPlane": {"name": (2, str), "event_metadata": (4, ["MapEntry"])},
    "MapEntry": {"value": (2, "XEventMetadata")},
    "XEventMetadata": {"stats": (5, ["XStat"])},
    "XStat": {"bytes_value": (6, bytes)},
    "HloProto": {"hlo_module": (1, "HloModule"), "buffer_assignment": (3, "BufferAssignment")},
    "HloModule": {
        "name": (1, str),
        "computations": (3, ["Computation"]),
        "schedule": (7, "Schedule"),
    },
    "Computation": {"instructions": (2, ["Instruction"])},
    "Instruction": {
        "name": (1, str),
        "opcode": (2, str),
        "metadata": (7, "OpMetadata"),
        "custom_call_target": (28, str),
        "id": (35, int),
        "backend_config": (43, bytes),
    },
    "OpMetadata": {"op_name": (2, str)},
    "Schedule": {"sequences": (1, ["SequenceEntry"])},
    "SequenceEntry": {"value": (2, "Sequence")},
    "Sequence": {"instruction_ids": (1, [int])},
    "BufferAssignment": {"buffer_allocations": (3, ["BufferAllocation"])},
    "BufferAllocation": {"size": (2, int)},
}


class Event(NamedTuple):
    """One event of a line; times in nanoseconds from the start of the trace."""

    name: str
    start: float
    end: float
    stats: dict[str, Any]

    @property
    def op(self) -> str:
        """The compiled program's operation, such as `fusion.5`, or the event's own name if it isn't one.

        A GPU runs most operations from command buffers, and a kernel of these has the name of its own operation.
        """
        found = self.stats.get("hlo_op") or self.name
        found = self.name if str(found).startswith("command_buffer") else found
        return str(found).partition(" = ")[0].lstrip("%")


class Line(NamedTuple):
    """The events of one thread, stream or kind, sorted by start; an enclosing event precedes those inside it."""

    name: str
    events: list[Event]


class Plane(NamedTuple):
    """A device (`/device:TPU:0`), the host (`/host:CPU`), or metadata."""

    name: str
    lines: list[Line]


class Launch(NamedTuple):
    """An operation that runs kernels on a GPU: a fusion, or a call of a library or of a kernel written in Triton.

    Attributes:
      op: its name in the program, such as `custom-call.79`.
      kernel: its kernel's name in the program, or "" if a library chooses the kernel.
    """

    op: str
    kernel: str


class Program(NamedTuple):
    """A compiled program stored in a trace.

    Attributes:
      name: such as `jit_train_step`.
      op_names: operation -> where it comes from: `fusion.5` -> `jit(train_step)/attention/dot_general`.
      opcodes: operation -> its opcode: `psum_invariant.7` -> `all-reduce`.
      bytes: size of all its buffers on one device, including arguments; 0 if the trace doesn't say.
      schedules: for each computation, what it launches on a GPU, in the order in which it runs.
    """

    name: str
    op_names: dict[str, str]
    opcodes: dict[str, str]
    bytes: int
    schedules: list[list[Launch]]


def find(directory: Path | str) -> Path:
    """Returns the newest trace below a directory; if several processes were traced, the first one's.

    Raises:
      UserError: if there is none.
    """
    directory = Path(directory)
    # Not rglob, which raises when a folder goes meanwhile, as checkpoints of a run do.
    below = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    paths = sorted(path for path in below if path.name.endswith(".xplane.pb"))
    paths = [directory] if directory.is_file() else paths
    if not paths:
        raise UserError(
            f"{directory} holds no trace: train with profile.first_step=10, or name a folder with an .xplane.pb"
        )
    paths = [path for path in paths if "process-0" in path.parts] or paths
    # JAX names a session's folder after the second in which the session ended. max() takes the first of equals.
    return max(paths, key=lambda path: path.parent.name)


def read(path: Path | str) -> list[Plane]:
    """Reads the events of a trace.

    Raises:
      UserError: if the file can't be read or isn't a trace.
    """
    from jax.profiler import ProfileData

    content = _content(path)
    try:
        planes = ProfileData.from_serialized_xspace(content).planes
        return [
            Plane(plane.name, [Line(line.name, _events(line)) for line in plane.lines])
            for plane in planes
        ]
    except (RuntimeError, ValueError) as error:
        raise _not_a_trace(path) from error


def _content(path: Path | str) -> bytes:
    with files.open_file(Path(path)) as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
            raise UserError(f"{path} has {size:,} bytes, too many for a trace: trace fewer steps")
        return file.read()


def _not_a_trace(path: Path | str) -> UserError:
    return UserError(f"{path} is not a trace: name an .xplane.pb that is whole")


def _events(line: Any) -> list[Event]:
    found = [Event(e.name, e.start_ns, e.end_ns, dict(e.stats)) for e in line.events]
    return sorted(found, key=lambda event: (event.start, -event.end))


def host_lines(planes: list[Plane]) -> list[Line]:
    """Returns the lines of the host's threads."""
    return [line for plane in planes if plane.name == HOST for line in plane.lines]


def programs(path: Path | str) -> list[Program]:
    """Reads the compiled programs that a trace stores.

    Raises:
      UserError: if the file can't be read or isn't a trace.
    """
    from google.protobuf.message import DecodeError

    parse, content = _parser(), _content(path)
    try:
        stats = [
            stat
            for plane in parse("XSpace", content).planes
            if plane.name == PROGRAMS
            for entry in plane.event_metadata
            for stat in entry.value.stats
        ]
        return [_program(parse("HloProto", s.bytes_value)) for s in stats if s.bytes_value]
    except DecodeError as error:
        raise _not_a_trace(path) from error


def _program(hlo: Any) -> Program:
    instructions = [i for c in hlo.hlo_module.computations for i in c.instructions]
    launches = {i.id: _launch(i) for i in instructions if i.opcode in ("fusion", "custom-call")}
    sequences = [entry.value.instruction_ids for entry in hlo.hlo_module.schedule.sequences]
    return Program(
        hlo.hlo_module.name,
        {i.name: i.metadata.op_name for i in instructions if i.HasField("metadata")},
        {i.name: i.opcode for i in instructions},
        sum(buffer.size for buffer in hlo.buffer_assignment.buffer_allocations),
        [[launches[i] for i in ids if i in launches] for ids in sequences],
    )


def _launch(instruction: Any) -> Launch:
    if instruction.opcode == "fusion":
        return Launch(instruction.name, instruction.name)
    triton = instruction.custom_call_target == "__gpu$xla.gpu.triton"
    named = triton and re.search(rb', name = "([^"]+)"', instruction.backend_config)
    return Launch(instruction.name, named[1].decode() if named else "")


@functools.cache
def _parser() -> Callable[[str, bytes], Any]:
    """Returns a function that parses the bytes of a message named in `SCHEMA`."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    Field = descriptor_pb2.FieldDescriptorProto
    scalars = {int: Field.TYPE_INT64, str: Field.TYPE_STRING, bytes: Field.TYPE_BYTES}
    file = descriptor_pb2.FileDescriptorProto(name="xplane", package="minitext", syntax="proto3")
    for message, fields in SCHEMA.items():
        added = file.message_type.add(name=message).field
        for name, (number, kind) in fields.items():
            field = added.add(name=name, number=number, label=Field.LABEL_OPTIONAL)
            if isinstance(kind, list):
                field.label, kind = Field.LABEL_REPEATED, kind[0]
            field.type = scalars.get(kind, Field.TYPE_MESSAGE)
            if kind not in scalars:
                field.type_name = f".minitext.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClassesForFiles([file.name], pool)
    return lambda message, data: made[f"minitext.{message}"].FromString(data)
