"""TensorBoard's event files, written without TensorFlow or PyTorch, whose imports take seconds.

A file is a series of TFRecords: the length of the data as eight bytes, a checksum of these, the data, and a checksum of
the data. The data is an `Event`, a message of protocol buffers: each value follows a byte with its field's number and
kind. The first event names the format.

Sources: tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto for the fields,
tensorflow/core/lib/io/record_writer.h for the records, RFC 3720 (appendix B.4) for CRC-32C.

Chapters: 6.
"""

import functools
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

# The byte before a value: eight times its field's number, plus 0 for an integer, 1 for eight bytes, 2 for bytes whose
# length comes first, 5 for four bytes.
WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 0x09, 0x10, 0x1A, 0x2A, 0x3A  # of Event
VALUE = 0x0A  # of Summary
TAG, SIMPLE_VALUE = 0x0A, 0x15  # of Value
STATUS, START = 0x08, 1  # of SessionLog


class EventsWriter(AbstractContextManager):
    """Writes scalars into a new event file.

    Args:
      directory: where TensorBoard looks; made if missing.
      first_step: TensorBoard discards what earlier files of the directory hold of this step and later ones.
    """

    def __init__(self, directory: Path, first_step: int):
        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = (directory / name).open("wb")
        self._write(_bytes(FILE_VERSION, b"brain.Event:2"))
        started = bytes([STATUS, START])
        self._write(_integer(STEP, first_step) + _bytes(SESSION_LOG, started))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the scalars of a step by their names."""
        with np.errstate(over="ignore"):  # a number too large for 32 bits is infinity
            summary = b"".join(
                _bytes(VALUE, _bytes(TAG, name.encode()) + bytes([SIMPLE_VALUE]) + np.float32(value).tobytes())
                for name, value in scalars.items()
            )  # fmt: skip
        self._write(_integer(STEP, step) + _bytes(SUMMARY, summary))

    def _write(self, event: bytes) -> None:
        data = struct.pack("<Bd", WALL_TIME, time.time()) + event
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __exit__(self, *_):
        self.close()


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    out = []
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _integer(field: int, value: int) -> bytes:
    return bytes([field]) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field]) + _varint(len(value)) + value


@functools.cache
def _table() -> list[int]:
    """CRC-32C of each byte."""
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


def _checksum(data: bytes) -> bytes:
    """CRC-32C as a TFRecord has it: rotated and shifted, because a checksum of data with checksums is weak."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)
