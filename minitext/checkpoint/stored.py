"""Where a tensor lies in a file of weights, and how its bytes become numbers.

Bytes are read with `pread`, not through a map of the file: mapped pages count as memory of the process until the system
takes them back, and a large file would seem to be held twice.

Chapters: 23.
"""

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from minitext import files
from minitext.errors import UserError

PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}  # fmt: skip
# Blocks of numbers that share a scale (GGUF): numbers and bytes in a block.
QUANTIZED = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q6_K": (256, 210)}  # fmt: skip


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
      shape: its dimensions, the slowest first.
      dtype: as the format calls it, such as BF16 or Q4_K.
      file: that holds it.
      offset: of its first byte in the file.
      size: in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    size: int

    @property
    def is_readable(self) -> bool:
        """Whether its type is one that is read as floating-point numbers."""
        return self.dtype in PLAIN or self.dtype in QUANTIZED

    @property
    def rows(self) -> int:
        """The size of the first dimension; a scalar is a row."""
        return self.shape[0] if self.shape else 1


def missing_library(name: str) -> UserError:
    """The error for a library that comes with an extra of the package."""
    return UserError(f'{name} is not installed: pip install "minitext[convert]"')


def check_regular(path: Path) -> int:
    """Returns a file's size.

    Raises:
      UserError: if it's missing, or something else than a file, which might never end.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(
            f"{files.shorten(str(path))} cannot be read ({error.strerror}): name a file or folder of weights"
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise UserError(
            f"{files.shorten(str(path))} is not a file: name a file or folder of weights"
        )
    return found.st_size


class Bytes:
    """Files that are open for reading at any place, from any thread, until `close`."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, size: int) -> np.ndarray:
        """Returns `size` bytes of a file.

        Raises:
          UserError: if it ends before, or can't be read.
        """
        found = np.empty(size, np.uint8)
        view, done = found.data, 0
        try:
            with self._lock:
                if path not in self._open:
                    self._open[path] = os.open(path, os.O_RDONLY)
            while done < size:
                count = os.preadv(self._open[path], [view[done:]], offset + done)
                if not count:
                    raise UserError(
                        f"{path} ends after {offset + done} bytes, in the middle of a tensor: copy it again"
                    )
                done += count
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): copy it again") from error
        return found

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}


def read_rows(source: Bytes, tensor: Stored, start: int, stop: int) -> np.ndarray:
    """Returns rows of a tensor, [stop - start, ...] in its type, quantized ones as float32.

    Raises:
      UserError: if the file ends before, or a library is missing.
    """
    if tensor.dtype in QUANTIZED and len(tensor.shape) == 1:  # a row of blocks, which is read whole
        row = tensor._replace(shape=(1, *tensor.shape))
        return read_rows(source, row, 0, 1)[0, start:stop]
    shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    row = tensor.size // max(tensor.rows, 1)
    raw = source.read(tensor.file, tensor.offset + start * row, (stop - start) * row)
    if tensor.dtype in PLAIN:
        return raw.view(PLAIN[tensor.dtype]).reshape(shape)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise missing_library("gguf") from error
    return dequantize(raw, GGMLQuantizationType[tensor.dtype]).reshape(shape)


def as_float32(array: np.ndarray) -> np.ndarray:
    """Returns the numbers as float32, exactly."""
    if array.dtype != ml_dtypes.bfloat16:
        return array.astype(np.float32, copy=False)
    # A bfloat16 is the upper half of a float32; ml_dtypes converts number by number.
    wide = array.view(np.uint16).astype(np.uint32)
    return np.left_shift(wide, 16, out=wide).view(np.float32)


def has_nonfinite(array: np.ndarray) -> bool:
    """Whether one of the numbers is infinite or NaN."""
    with np.errstate(all="ignore"):
        # The usual case, at the speed of reading. A sum may overflow by itself.
        return bool(not np.isfinite(array.sum()) and not np.isfinite(array).all())


def chunks(start: int, stop: int, row_bytes: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yields bounds of consecutive rows, each at most `limit` bytes, or one row."""
    step = max(1, limit // max(row_bytes, 1))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
