"""Published weights, read a part at a time: a Hugging Face folder of safetensors, or a GGUF file.

Nothing in these files is believed: sizes are compared with the file before memory is taken, nothing is unpickled, and a
name of a file can't lead out of its folder. Opening reads the headers alone.

Chapters: 23.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from minitext import files
from minitext.checkpoint import gguf, safetensors, stored
from minitext.checkpoint.stored import Stored
from minitext.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_LIMIT = 32 << 20


class Weights(AbstractContextManager):
    """Tensors by name, in one file or many. May be read from several threads.

    Attributes:
      path: the folder or file.
      tensors: name -> where it lies, its shape and type.
      metadata: what the file says of itself, by key; of a folder, the first file's.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, Any]):
        self.path, self.tensors, self.metadata = path, dict(tensors), dict(metadata)
        self._bytes = stored.Bytes()

    @property
    def is_gguf(self) -> bool:
        """Whether this is a GGUF file, with its own names and metadata."""
        return self.path.suffix == ".gguf" or "general.architecture" in self.metadata

    def names(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns name -> (shape, type as the format calls it)."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns a tensor or a slice of it; quantized ones as float32, others in their type.

        Of the first dimension only the rows in the slice are read from the file.

        Raises:
          UserError: if the file ends before, or the tensor has a type that isn't read.
        """
        tensor = self.tensors[name]
        if not tensor.is_readable:
            known = ", ".join([*stored.PLAIN, *stored.QUANTIZED])
            raise UserError(
                f"{self.path}: {name} is of type {tensor.dtype}, and {known} are read: get the weights in one of these"
            )
        if not slices:
            return stored.read_rows(self._bytes, tensor, 0, tensor.rows)
        rows = range(tensor.rows)[slices[0]]
        if not rows:
            return stored.read_rows(self._bytes, tensor, 0, 0)[(slice(None), *slices[1:])]
        found = stored.read_rows(self._bytes, tensor, rows[0], rows[-1] + 1)
        return found[(slice(None, None, rows.step), *slices[1:])]

    @property
    def size(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def count(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def close(self) -> None:
        """Closes the files."""
        self._bytes.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def open_weights(path: Path | str) -> Weights:
    """Opens a folder with `model.safetensors` or its index of several files, one such file, or a GGUF file.

    Raises:
      UserError: if there is none, or a file is damaged, lies about its sizes or is a pickle.
    """
    path = Path(files.local_path(path))
    if path.is_dir():
        if (path / INDEX).exists():
            return _open_index(path)
        if (path / SINGLE).exists():
            return Weights(path, *safetensors.read_header(path / SINGLE))
        for pickle in sorted(p for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth")):
            raise safetensors.pickle_error(pickle)
        raise UserError(f"{path} has no {SINGLE} and no {INDEX}: name a folder of weights")
    stored.check_regular(path)
    try:
        with path.open("rb") as file:
            first = file.read(4)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): name a file or folder of weights"
        ) from error
    if first == gguf.MAGIC or path.suffix == ".gguf":
        return Weights(path, *gguf.read_header(path))
    return Weights(path, *safetensors.read_header(path))


def _open_index(folder: Path) -> Weights:
    index = files.read_json(folder / INDEX, INDEX_LIMIT)
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where:
        raise UserError(f"{folder / INDEX} has no weight_map: copy it again")
    for name in where.values():
        # A name alone: no folder, nothing above this one.
        if not isinstance(name, str) or not name.strip(".") or set(name) & set("/\\\0"):
            raise UserError(
                f"{folder / INDEX} names the file {files.shorten(str(name))}, which is not in this folder: a name "
                "without / was expected"
            )
        if not name.endswith(".safetensors"):
            raise safetensors.pickle_error(folder / name)
    tensors: dict[str, Stored] = {}
    metadata: dict[str, Any] = {}
    for name in sorted(set(where.values())):
        found, said = safetensors.read_header(folder / name)
        metadata = metadata or said
        if twice := found.keys() & tensors.keys():
            both = tensors[min(twice)].file.name
            raise UserError(
                f"{folder}: the tensor {files.shorten(min(twice))} is in {both} and in {name}"
            )
        tensors |= found
    for name, file in where.items():
        if name not in tensors or tensors[name].file.name != file:
            raise UserError(
                f"{folder / INDEX} says that {files.shorten(name)} is in {file}, and it isn't: copy the folder again"
            )
    return Weights(folder, tensors, metadata)
