"""MaxText's checkpoints: the arrays of its parameters, read a layer at a time, and written as Orbax writes them.

MaxText stacks the parameters of layers that it scans along one axis (`param_scan_axis`); other layers have arrays of
their own. Here both have the names of the second form, such as `decoder/layers_3/mlp/wi_0/kernel`, and a stacked array
is seen as one tensor for each layer. Of a training state, the optimizer's part and the step are left behind.

Orbax describes a checkpoint in a JSON file and keeps arrays in zarr, alone or inside an OCDBT database; TensorStore
reads both, in parts (orbax.readthedocs.io, "Checkpoint format guide").

Chapters: 27.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitext import files
from minitext.checkpoint.stored import Stored
from minitext.checkpoint.weights import Weights
from minitext.errors import UserError

METADATA, METADATA_LIMIT = "_METADATA", 256 << 20
WHOLE = "store_array_data_equal_to_fill_value"  # its key for whether zeros were written too
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
MOST_ARRAYS = 1_000_000
# What layers are stacked in: all of one kind, or in a cycle with arrays of its own for each of its layers.
STACKS = ("layers", "dense_layers", "moe_layers")
CYCLE, REST = (
    re.compile(r"decoder/layers/layers_(\d+)/(.+)"),
    re.compile(r"decoder/layers_remainder/layers_(\d+)/(.+)"),
)
STACKED = re.compile(rf"decoder/({'|'.join(STACKS)})/(.+)")


class Part(NamedTuple):
    """Where one layer's tensor is.

    Attributes:
      array: the name of the array.
      index: which of the stacked layers; None: the array is the tensor.
    """

    array: str
    index: int | None = None


class MaxTextWeights(Weights):
    """The parameters of a MaxText checkpoint by their unscanned names. May be read from several threads.

    Attributes:
      path: the folder.
      tensors: name -> shape and type.
      left: names of what else the checkpoint has, such as `opt_state`, which isn't read.
      is_scanned: whether layers are stacked.
    """

    def __init__(self, path: Path, arrays: Mapping[str, Any], left: list[str], axis: int):
        self._arrays, self._axis = arrays, axis
        self.left, self._parts = left, dict(_parts(arrays, axis, path))
        self.is_scanned = any(part.index is not None for part in self._parts.values())
        tensors = {name: self._stored(path, part) for name, part in self._parts.items()}
        super().__init__(path, tensors, {})

    def _stored(self, path: Path, part: Part) -> Stored:
        array = self._arrays[part.array]
        shape = list(array.shape)
        if part.index is not None:
            del shape[self._axis]
        dtype = TYPES.get(array.dtype.name, str(array.dtype.name))
        return Stored(
            tuple(shape), dtype, path, 0, math.prod(shape) * array.dtype.numpy_dtype.itemsize
        )

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns a tensor or a slice of it in its type; of a stacked array, that layer alone.

        Raises:
          UserError: if the data is missing or damaged, or isn't floating-point numbers.
        """
        if not (tensor := self.tensors[name]).is_readable:
            raise UserError(
                f"{self.path}: {name} is of type {tensor.dtype}, and {', '.join(TYPES)} are read: save it without "
                "quantization"
            )
        part, where = (
            self._parts[name],
            list(slices) + [slice(None)] * (len(tensor.shape) - len(slices)),
        )
        if part.index is not None:
            where.insert(self._axis, part.index)  # pyright: ignore[reportArgumentType]
        try:
            return np.ascontiguousarray(self._arrays[part.array][tuple(where)].read().result())
        except (ValueError, OSError) as error:
            raise _damaged(self.path, part.array, error) from error

    def close(self) -> None:
        """Closes the files."""
        self._arrays = {}


def _parts(arrays: Mapping[str, Any], axis: int, path: Path) -> Iterator[tuple[str, Part]]:
    """Yields the name of each layer's tensor and where it is."""
    cycle = {int(match[1]) for name in arrays if (match := CYCLE.fullmatch(name))}
    length = max(cycle, default=-1) + 1
    whole = max(
        (_stacked(arrays[n], axis, n, path) for n in arrays if CYCLE.fullmatch(n)), default=0
    )
    for name, array in arrays.items():
        if match := CYCLE.fullmatch(name):
            for i in range(_stacked(array, axis, name, path)):
                yield f"decoder/layers_{i * length + int(match[1])}/{match[2]}", Part(name, i)
        elif match := REST.fullmatch(name):
            yield f"decoder/layers_{whole * length + int(match[1])}/{match[2]}", Part(name)
        elif match := STACKED.fullmatch(name):
            for i in range(_stacked(array, axis, name, path)):
                yield f"decoder/{match[1]}_{i}/{match[2]}", Part(name, i)
        else:
            yield name, Part(name)


def _stacked(array: Any, axis: int, name: str, path: Path) -> int:
    """Returns how many layers are stacked in an array."""
    if not 0 <= axis < len(array.shape):
        raise UserError(
            f"{path}: {name} has the shape {list(array.shape)}, and param_scan_axis={axis} is none of its axes: give "
            "the param_scan_axis with which it was saved"
        )
    if array.shape[axis] > MOST_ARRAYS:
        raise UserError(
            f"{path}: {name} stacks {array.shape[axis]:,} layers: give the right param_scan_axis"
        )
    return array.shape[axis]


def stacked_name(name: str, scanned: Sequence[str], cycle: int, layers: int) -> Part:
    """Returns where a tensor goes in a scanned checkpoint.

    Args:
      name: an unscanned name.
      scanned: the stacks that the model has, such as `layers`.
      cycle: layers of a cycle that has arrays of its own for each; 1: none.
      layers: of the model, of which those that don't fill a cycle follow it.
    """
    match = re.fullmatch(r"decoder/(\w*layers)_(\d+)/(.+)", name)
    if match is None or match[1] not in scanned:
        return Part(name)
    number = int(match[2])
    if cycle == 1:
        return Part(f"decoder/{match[1]}/{match[3]}", number)
    whole = layers // cycle * cycle
    if number >= whole:
        return Part(f"decoder/layers_remainder/layers_{number - whole}/{match[3]}")
    return Part(f"decoder/layers/layers_{number % cycle}/{match[3]}", number // cycle)


def open_checkpoint(path: Path | str, axis: int = 1) -> MaxTextWeights:
    """Opens a checkpoint of MaxText: a folder of steps, one step, its `items`, or parameters alone.

    Args:
      path: the folder; of several steps, the newest is read.
      axis: along which scanned layers are stacked, MaxText's param_scan_axis.

    Raises:
      UserError: if it isn't one, or is damaged, or isn't on this machine.
    """
    import tensorstore

    folder = _find(Path(files.local_path(path)))
    said = files.read_json(folder / METADATA, METADATA_LIMIT)
    tree = said.get("tree_metadata") if isinstance(said, dict) else None
    if not isinstance(tree, dict) or not tree or len(tree) > MOST_ARRAYS:
        raise UserError(f"{folder / METADATA} describes no tree: copy the checkpoint again")
    found: dict[str, tuple[str, ...]] = {}
    left = set[str]()
    for row in tree.values():
        keys = _keys(folder, row)
        if keys[0] == "params":
            inner = list(keys[1:-1] if keys[-1] == "value" else keys[1:])  # of an nnx.Variable
            found["/".join(inner[1:] if inner[:1] == ["params"] else inner)] = keys
        else:
            left.add(keys[0])
    if not found:
        raise UserError(
            f"{folder} has no params, but {', '.join(sorted(left))[:80]}: is it a checkpoint of MaxText?"
        )
    driver = "zarr3" if said.get("use_zarr3") else "zarr"
    # Where every number was written, zeros too, a part that is missing was lost.
    more = {"driver": driver, "fill_missing_data_reads": not said.get(WHOLE)}
    if (ocdbt := said.get("use_ocdbt")) is None:  # older metadata doesn't say
        ocdbt = (folder / "manifest.ocdbt").is_file()
    specs = {
        name: more | {"kvstore": _store(folder, keys, bool(ocdbt))} for name, keys in found.items()
    }
    # A stacked array is read once and decoded once, though a layer at a time.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    arrays = _open_all(folder, specs, context)
    largest = max(math.prod(a.shape) * a.dtype.numpy_dtype.itemsize for a in arrays.values())
    if any(STACKED.fullmatch(name) for name in arrays):
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": largest + (64 << 20)}})
        arrays = _open_all(folder, specs, context)
    return MaxTextWeights(folder, arrays, sorted(left), axis)


def _find(path: Path) -> Path:
    """Returns the folder of the checkpoint's tree."""
    if not path.is_dir():
        raise UserError(
            f"{path} is not a folder: name a checkpoint of MaxText, such as RUN/checkpoints/1000/items"
        )
    for folder in (path, path / "items", path / "checkpoints"):
        if (folder / METADATA).is_file():
            return folder
        steps = [p for p in folder.iterdir() if p.name.isdecimal()] if folder.is_dir() else []
        for step in sorted(steps, key=lambda p: -int(p.name)):
            for inner in (step / "items", step):
                if (inner / METADATA).is_file():
                    return inner
    raise UserError(
        f"{path} has no {METADATA}: name a checkpoint of MaxText, such as RUN/checkpoints/1000/items; one that is "
        "older than 2024, or that was copied in part, has none"
    )


def _keys(folder: Path, row: Any) -> tuple[str, ...]:
    keys = row.get("key_metadata") if isinstance(row, dict) else None
    names = (
        [k.get("key") if isinstance(k, dict) else None for k in keys or ()]
        if isinstance(keys, list)
        else []
    )
    if not names or not all(
        isinstance(n, str) and n and not set(n) & set("/\\\0") and n.strip(".") for n in names
    ):
        raise UserError(f"{folder / METADATA} has an invalid name: copy the checkpoint again")
    return tuple(map(str, names))


def _store(folder: Path, keys: tuple[str, ...], ocdbt: bool) -> dict[str, Any]:
    name, base = ".".join(keys), str(folder.resolve())
    if not ocdbt:
        return {"driver": "file", "path": f"{base}/{name}/"}
    inner = {"driver": "file", "path": f"{base}/"}
    return {"driver": "ocdbt", "base": inner, "path": f"{name}/"}


def _open_all(folder: Path, specs: Mapping[str, Any], context: Any) -> dict[str, Any]:
    import tensorstore

    waiting = {
        name: tensorstore.open(spec, read=True, context=context) for name, spec in specs.items()
    }
    found = {}
    for name, array in waiting.items():
        try:
            found[name] = array.result()
        except (ValueError, OSError) as error:
            raise _damaged(folder, name, error) from error
        size = math.prod(found[name].shape)
        if math.prod(found[name].chunk_layout.read_chunk.shape or (1,)) > max(size, 1 << 20):
            raise UserError(
                f"{folder}: the parts of {name} are larger than the array: copy the checkpoint again"
            )
    return found


def _damaged(folder: Path, name: str, error: Exception) -> UserError:
    reason = str(error).partition("[")[0].strip().replace("\n", " ")[:120]
    return UserError(f"{folder}: {name} cannot be read ({reason}): copy the checkpoint again")


def write_checkpoint(target: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes parameters alone, as MaxText loads them by load_parameters_path.

    Args:
      target: the folder to make.
      arrays: by name, such as `decoder/layers/mlp/wi_0/kernel`.
    """
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, leaf = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = array
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(target, args=ocp.args.PyTreeSave({"params": {"params": tree}}))
