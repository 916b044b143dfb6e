"""GGUF files, llama.cpp's format: their header is read with suspicion, and they are written tensor by tensor.

A file is a header (metadata by key, then each tensor's name, dimensions, type and offset) and the tensors' bytes. The
`gguf` library's reader believes every count and length in it, so one of 2^60 makes it loop or take all memory. Here
each is first compared with what the file can hold. The library names the types, dequantizes and writes.

Chapters: 23.
"""

import contextlib
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from minitext import files
from minitext.checkpoint.stored import PLAIN, QUANTIZED, Stored, check_regular, missing_library
from minitext.errors import UserError

MAGIC = b"GGUF"
HEADER_LIMIT = 128 << 20  # a vocabulary of a million words with its merges needs 50 MB
MOST_ITEMS = 4 << 20  # of all lists in a header
MOST_KEYS, MOST_TENSORS, MOST_DIMENSIONS, LONGEST_NAME = 1 << 12, 1 << 16, 4, 256
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # fmt: skip
STRING, LIST = 8, 9
# What float16 rounds to infinity, and so does the scale of a block, a 127th or an eighth of its largest number.
LARGEST = {"F16": 65_520.0, "Q8_0": 127 * 65_520.0, "Q4_0": 8 * 65_520.0}


class _Header:
    """Reads a header's fields one after another, none longer than what is left of the file."""

    def __init__(self, file: BinaryIO, size: int, path: Path):
        self.file, self.path = file, path
        self.left = min(size, HEADER_LIMIT)
        self.items = MOST_ITEMS

    def refuse(self, what: str) -> UserError:
        return UserError(f"{self.path} is not a GGUF file, or is damaged: {what}: copy it again")

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise self.refuse(f"a field has {count} bytes and {self.left} are left")
        self.left -= count
        found = self.file.read(count)
        if len(found) < count:
            raise self.refuse("it ends in its header")
        return found

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, what: str, most: int) -> int:
        found = self.number("Q")
        if found > most:
            raise self.refuse(f"{found} {what}, and {most} is the limit")
        return found

    def string(self, most: int = HEADER_LIMIT) -> str:
        length = self.number("Q")
        if length > most:
            raise self.refuse(f"a name of {length} bytes, and {most} is the limit")
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int, inner: bool = False) -> Any:
        if kind == STRING:
            return self.string()
        if kind == LIST and not inner:
            kind, count = self.number("I"), self.count("items in a list", self.items)
            self.items -= count
            if kind in SCALARS:
                dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
                return np.frombuffer(self.take(count * dtype.itemsize), dtype)
            return [self.value(kind, inner=True) for _ in range(count)]
        if kind not in SCALARS:
            raise self.refuse(f"a field of the unknown kind {kind}")
        return self.number(SCALARS[kind])


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Returns the tensors of a file by name, and its metadata by key; reads the header alone.

    Lists of numbers are numpy arrays. Shapes have the slowest dimension first, as in numpy, unlike in the file.

    Raises:
      UserError: if it's no GGUF file, or damaged, or lies about its sizes.
    """
    size = check_regular(path)
    with path.open("rb") as file:
        header = _Header(file, size, path)
        if header.left < 24 or header.take(4) != MAGIC:
            raise header.refuse("it doesn't begin with GGUF")
        if (version := header.number("I")) not in (2, 3):
            raise header.refuse(f"version {version}, and 2 and 3 are read")
        tensor_count = header.count("tensors", MOST_TENSORS)
        metadata: dict[str, Any] = {}
        for _ in range(header.count("keys", MOST_KEYS)):
            key = header.string(LONGEST_NAME)
            if key in metadata:
                raise header.refuse(f"the key {files.shorten(key)} is there twice")
            metadata[key] = header.value(header.number("I"))
        infos = [_tensor(header) for _ in range(tensor_count)]
        start = file.tell()
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise header.refuse(f"general.alignment={alignment} is not a power of two")
    start += -start % alignment
    tensors: dict[str, Stored] = {}
    for name, shape, dtype, offset in infos:
        if name in tensors:
            raise header.refuse(f"the tensor {files.shorten(name)} is there twice")
        length = _size(shape, dtype)
        if length is None or start + offset + length > size:
            raise header.refuse(
                f"the tensor {files.shorten(name)}, {dtype}{list(shape)} at byte {start + offset}, doesn't fit into "
                f"{size} bytes"
            )
        tensors[name] = Stored(shape, dtype, path, start + offset, length)
    return tensors, metadata


def _tensor(header: _Header) -> tuple[str, tuple[int, ...], str, int]:
    name = header.string(LONGEST_NAME)
    if (dimensions := header.number("I")) > MOST_DIMENSIONS:
        raise header.refuse(
            f"the tensor {files.shorten(name)} has {dimensions} dimensions, and {MOST_DIMENSIONS} is the limit"
        )
    shape = tuple(reversed([header.number("Q") for _ in range(dimensions)]))
    return name, shape, _type_name(header.number("I")), header.number("Q")


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise missing_library("gguf") from error
    return gguf


def _type_name(number: int) -> str:
    try:
        return _library().GGMLQuantizationType(number).name
    except ValueError:
        return f"type {number}"


def _size(shape: tuple[int, ...], dtype: str) -> int | None:
    """The bytes of a tensor; None if rows aren't whole blocks, 0 for types that are not read."""
    if dtype in PLAIN:
        return math.prod(shape) * PLAIN[dtype].itemsize
    if dtype not in QUANTIZED:
        return 0
    numbers, size = QUANTIZED[dtype]
    if not shape or shape[-1] % numbers:
        return None
    return math.prod(shape) // numbers * size


def stored_type(shape: tuple[int, ...], wanted: str) -> str:
    """Returns the type in which a tensor is written: vectors as F32, rows that aren't whole blocks as F16."""
    if len(shape) < 2:
        return "F32"
    if wanted in QUANTIZED and shape[-1] % QUANTIZED[wanted][0]:
        return "F16"
    return wanted


def write(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    values: Iterable[np.ndarray],
) -> None:
    """Writes a file, tensor by tensor.

    Args:
      path: of the new file.
      architecture: llama.cpp's name for the family.
      fields: metadata: text, whole and other numbers, truth values, and lists of one of these.
      tensors: name -> (shape, type: F32, F16, Q8_0 or Q4_0), the type as `stored_type` gives it.
      values: their float32 arrays, in the same order; each is asked for when the one before is written.

    Raises:
      OSError: if it can't be written.
      UserError: if a number is too large for its type, or the library is missing.
    """
    gguf = _library()
    with contextlib.closing(gguf.GGUFWriter(path, architecture)) as writer:
        _write(gguf, writer, fields, tensors, values)


def _write(gguf: Any, writer: Any, fields: Any, tensors: Any, values: Iterable[np.ndarray]) -> None:
    for key, value in fields.items():
        _add(writer, key, value)
    for name, (shape, dtype) in tensors.items():
        kind = gguf.GGMLQuantizationType[dtype]
        # Of quantized types the library wants the shape in bytes.
        numbers, size = QUANTIZED.get(dtype, (1, 1))
        sizes = (*shape[:-1], shape[-1] // numbers * size) if shape else shape
        element = np.dtype(np.uint8) if dtype in QUANTIZED else PLAIN[dtype]
        writer.add_tensor_info(name, sizes, element, _size(shape, dtype), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (name, (_, dtype)), value in zip(tensors.items(), values, strict=True):
        largest = max(value.max(initial=0), -value.min(initial=0))
        # Not a number is larger than none.
        if dtype in LARGEST and not largest < LARGEST[dtype]:
            raise UserError(
                f"{name} has the number {largest:.3g}, which {dtype} can't hold: export as float32"
            )
        writer.write_tensor_data(gguf.quants.quantize(value, gguf.GGMLQuantizationType[dtype]))


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, list(value))
