"""Files in the safetensors format: their header is read with suspicion, and they are written tensor by tensor.

A file is the length of its header (8 bytes), the header (JSON: name -> dtype, shape, where it lies), then the bytes.
The `safetensors` library says whether a header is sound: that tensors don't overlap or leave holes, and that the file
has the length it promises. It would then map the file, or write tensors from one dict that holds them all; here they
are read and written one at a time.

Chapters: 23.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from minitext import files
from minitext.checkpoint.stored import PLAIN, Stored, check_regular, missing_library
from minitext.errors import UserError

# The format's names of all types that JAX has by default.
DTYPES = PLAIN | {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)} | {
    "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
HEADER_LIMIT = 32 << 20  # the library's is 100 MB; a model of 100,000 tensors needs 12
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def pickle_error(path: Path) -> UserError:
    """The error for weights in a format that runs code."""
    return UserError(
        f"{files.shorten(str(path))} is a pickle, and reading one can run any code: get the checkpoint as "
        ".safetensors, or convert it where you trust it, with transformers' save_pretrained"
    )


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns the tensors of a file by name, and its metadata; reads the header alone.

    Raises:
      UserError: if it's no safetensors file, or damaged, or lies about its sizes.
    """
    size = check_regular(path)
    with path.open("rb") as file:
        first, brace = file.read(8), file.read(1)
        file.seek(8)
        # The length of a header, such as 640 bytes, may begin like a pickle; what follows it is JSON.
        if first.startswith(PICKLES) and brace != b"{":
            raise pickle_error(path)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > size - 8:
            raise UserError(
                f"{path} is not a safetensors file, or was cut short: its header should have {length} bytes, and the "
                f"file has {size}"
            )
        if length > HEADER_LIMIT:
            raise UserError(
                f"{path} has a header of {length} bytes, and {HEADER_LIMIT} is the limit: no model has so many tensors"
            )
        header = file.read(length)
    _check_with_library(path)
    found = json.loads(header)
    metadata = found.pop("__metadata__", None) or {}
    start = 8 + length
    tensors = {}
    for name, entry in found.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors[name] = Stored(shape, entry["dtype"], path, start + begin, end - begin)
    return tensors, metadata


def _check_with_library(path: Path) -> None:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise missing_library("safetensors") from error
    try:
        with safe_open(path, "np"):
            pass
    except (SafetensorError, OSError) as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"{path} is not a safetensors file, or is damaged ({files.shorten(said)}): copy it again"
        ) from error


def write(
    path: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    values: Iterable[np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes a file, tensor by tensor.

    Args:
      path: of the new file.
      tensors: name -> (shape, dtype: one of `DTYPES`).
      values: their arrays, in the same order; each is asked for when the one before is written.
      metadata: strings for the header.

    Raises:
      OSError: if it can't be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, (shape, dtype)), value in zip(tensors.items(), values, strict=True):
            if value.shape != shape or value.dtype != DTYPES[dtype]:
                raise ValueError(f"{name}: {value.dtype}{value.shape} in place of {dtype}{shape}")
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
