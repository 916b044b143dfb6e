"""Parameters to and from published checkpoints: one table of names for both directions.

A table has a row for each of our parameters: what their tensors are called, and how one of them is seen as ours.
Reading takes this view of a tensor and copies it into a shard; writing takes the same view of an empty tensor and
copies the parameter into it. So the two directions can't disagree, and a tensor that goes in and out is equal bit by
bit.

Chapters: 23.
"""

import fnmatch
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from minitext import terminal
from minitext.checkpoint import leaves, stored
from minitext.checkpoint.weights import Weights
from minitext.errors import UserError, did_you_mean

Bounds = tuple[tuple[int, int], ...]  # start and stop in each dimension

CHUNK = (
    4 << 20
)  # bytes that a thread reads and converts at a time: few enough to stay in a core's cache
MOST_NUMBERS = 1 << 50  # in one parameter; numpy can't count those of the largest shapes
ROWS = 16  # that are transposed at a time: their columns are a cache line of the result
ALIGNMENT = 64  # of the numpy arrays that JAX takes for its own on a CPU, instead of copying them


@dataclass(frozen=True)
class View:
    """How a tensor of theirs is seen as one of ours: its dimensions are split, a part of them taken, and reordered.

    What remains, read in its order, is our parameter (of one layer and one expert), whose shape may split or join
    dimensions again. No arithmetic is done, and numpy needs no copy for any of the three.

    Attributes:
      shape: their tensor's shape; by default it follows from ours and `order`, and there is nothing to split or take.
      split: the same numbers in more dimensions; by default `shape`.
      part: a slice or an index for each dimension of `split`; by default all.
      order: which of the dimensions that remain is our first, second and so on; by default as they are.
    """

    shape: tuple[int, ...] | None = None
    split: tuple[int, ...] | None = None
    part: tuple[slice | int, ...] = ()
    order: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.shape is None and (self.split is not None or self.part):
            raise ValueError(f"{self}: a view that splits or takes a part names the tensor's shape")
        if self.split is not None and math.prod(self.split) != math.prod(self.shape or ()):
            raise ValueError(f"{self}: shape and split differ in size")

    def theirs(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Returns their tensor's shape, given the shape of one of ours."""
        if self.shape is not None:
            return self.shape
        order = self.order or tuple(range(len(ours)))
        return tuple(ours[order.index(i)] for i in range(len(ours)))

    def of(self, theirs: np.ndarray) -> np.ndarray:
        """Returns the view of their whole tensor: not a copy, so writing into it writes into the tensor."""
        seen = theirs if self.split is None else theirs.reshape(self.split)
        seen = seen[self.part]
        return seen if self.order is None else seen.transpose(self.order)

    def is_sliceable(self, ours: tuple[int, ...]) -> bool:
        """Whether each dimension of ours is a part of one of theirs, so that a slice of ours is a slice of theirs."""
        if self.split is not None or any(isinstance(p, int) for p in self.part):
            return False
        empty = np.broadcast_to(np.zeros((), np.bool_), self.theirs(ours))
        return self.of(empty).shape == ours

    def slices(self, ours: tuple[int, ...], bounds: Bounds) -> tuple[slice, ...]:
        """Returns the slices of their tensor that hold ours within `bounds`; the view must be sliceable."""
        theirs = self.theirs(ours)
        order = self.order or tuple(range(len(theirs)))
        found = []
        for i, size in enumerate(theirs):
            taken = self.part[i] if i < len(self.part) else slice(None)
            assert isinstance(taken, slice)
            numbers = range(size)[taken]
            start, stop = bounds[order.index(i)]
            kept = numbers[start:stop]
            found.append(slice(kept.start, kept.stop, kept.step))
        return tuple(found)


KEEP = View()
TRANSPOSED = View(order=(1, 0))  # a projection's [out, in] as our [in, out]


@dataclass(frozen=True)
class Row:
    """One parameter of ours and the tensors that it's made of; several rows may take their parts of the same tensors.

    Where no single view of theirs is our parameter, several rows fill their parts of it.

    Attributes:
      name: of their tensors, such as `model.layers.{layer}.mlp.experts.{expert}.up_proj.weight`.
      path: of our parameter, such as `blocks.ffn.up`.
      view: how one of their tensors is seen as ours.
      layers: the numbers that `{layer}` stands for, in the order of our first dimension.
      experts: how many numbers `{expert}` stands for; they are our next dimension.
      into: the part of our parameter (of one layer and one expert) that the view fills, in its order; by default all.
    """

    name: str
    path: str
    view: View = KEEP
    layers: Sequence[int] = ()
    experts: int = 0
    into: View = KEEP

    def __post_init__(self):
        if ("{layer}" in self.name) != bool(self.layers):
            raise ValueError(f"{self.name}: `layers` says which numbers {{layer}} stands for")
        if ("{expert}" in self.name) != bool(self.experts):
            raise ValueError(f"{self.name}: `experts` says how many numbers {{expert}} stands for")

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading dimensions of our parameter that go over tensors: layers and experts, if there are any."""
        return (len(self.layers),) * bool(self.layers) + (self.experts,) * bool(self.experts)

    def filled(self, each: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what the row fills of our parameter, of shape `each` in one layer and one expert."""
        return self.into.of(np.broadcast_to(np.zeros((), np.bool_), each)).shape

    def theirs(self, each: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of each of their tensors."""
        return self.view.theirs(self.filled(each))

    def sources(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yields the place in our leading dimensions and the name of each tensor."""
        ranges = [range(size) for size in self.leading]
        for place in itertools.product(*ranges):
            layer = self.layers[place[0]] if self.layers else None
            expert = place[-1] if self.experts else None
            yield place, self.name.replace("{layer}", str(layer)).replace("{expert}", str(expert))


@dataclass(frozen=True)
class Table:
    """All names of one model.

    Attributes:
      rows: those of each of our parameters.
      ignored: patterns (`fnmatch`) of tensors that nothing uses, such as `*.rotary_emb.inv_freq`.
      copies: a tensor that may be there, and the one it must then be equal to, such as a tied output layer.
    """

    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether a tensor is one that nothing uses."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)

    def left_unread(self, weights: Weights) -> str:
        """Returns a line about the tensors that nothing uses; empty if there are none."""
        sizes = {n: t.size for n, t in weights.tensors.items() if self.ignores(n)}
        if not sizes:
            return ""
        size = terminal.show_bytes(sum(sizes.values()))
        count = f"{len(sizes)} tensors ({size}), such as {min(sizes)}"
        return f"left unread, because the language model doesn't use them: {count}"


def load(
    weights: Weights,
    table: Table,
    params: Any,
    advance: Callable[[int], None] = lambda done: None,
    allow_nonfinite: bool = False,
) -> Any:
    """Reads parameters from published weights straight onto their shards.

    Tensors are read in parts of a few megabytes, by several threads; of each, only the rows that devices of this
    process hold. On a CPU that is all the memory beside the parameters. An accelerator's shards pass through the
    host's memory, one parameter (of all layers) at a time.

    Args:
      weights: the files.
      table: the model's names.
      params: a pytree of `jax.ShapeDtypeStruct`s with shardings, such as `abstract_state(cfg, mesh).params`.
      advance: called with the number of bytes read so far.
      allow_nonfinite: whether infinite numbers and NaN are read as they are.

    Returns:
      The pytree with arrays.

    Raises:
      UserError: if a tensor is missing, left over, of another shape or type, not finite, or its file is damaged.
    """
    wanted = leaves.named(params)
    check_names(weights, table, wanted)
    done, values = 0, {}
    with ThreadPoolExecutor(max(2, min(os.cpu_count() or 1, 8))) as pool:
        for path, like in wanted.items():
            shards = _Shards(like)
            for row in table.rows:
                if row.path != path:
                    continue
                reader = _Reader(row, like, shards.held, weights, allow_nonfinite)
                parts = [p for place, name in row.sources() for p in reader.parts(place, name)]
                # Whole tensors, where they are read so, one after another: two at a time would be one too many.
                for size in (pool.map if reader.is_sliceable else map)(reader.fill, parts):
                    done += size
                    advance(done)
            values[path] = shards.array()
        for name, original in table.copies:
            if name in weights.tensors:
                _check_copy(weights, name, original)
    return leaves.rebuild(params, values)


def check_names(weights: Weights, table: Table, wanted: Mapping[str, Any]) -> None:
    """Compares the names and shapes in files, table and model, before anything is read.

    Args:
      weights: the files.
      table: the model's names.
      wanted: our parameters' names and shapes.

    Raises:
      UserError: naming a tensor that is missing, that nothing uses, or that has another shape, or a parameter that no
        row of the table sets.
    """
    paths = [row.path for row in table.rows]
    if unset := [path for path in wanted if path not in paths]:
        raise UserError(f"{weights.path}: no tensor sets the parameter {_some(unset)}")
    there, read, filled = weights.names(), set(), dict[str, int]()
    for row in table.rows:
        if row.path not in wanted:
            raise UserError(f"{row.name} would set {row.path}, which the model does not have")
        ours = tuple(wanted[row.path].shape)
        if math.prod(ours) > MOST_NUMBERS:
            raise UserError(
                f"{weights.path}: {row.path} would have the shape {list(ours)}, more than any memory holds: is this "
                "config.json the checkpoint's own?"
            )
        each = ours[len(row.leading) :]
        if ours[: len(row.leading)] != row.leading:
            raise UserError(
                f"{row.path} has the shape {list(ours)}, and the tensors {row.name} are {list(row.leading)}"
            )
        shape = row.theirs(each)
        filled[row.path] = filled.get(row.path, 0) + math.prod((*row.leading, *row.filled(each)))
        for _, name in row.sources():
            if name not in there:
                near = did_you_mean(name, there.keys()) if len(there) < 1000 else ""
                raise UserError(
                    f"{weights.path}: {row.path} needs the tensor {name}, which is missing{near}"
                )
            if there[name][0] != shape:
                raise UserError(
                    f"{weights.path}: {name} has the shape {list(there[name][0])}, and the model needs {list(shape)}: "
                    "is this config.json the checkpoint's own?"
                )
            read.add(name)
    _check_filled(filled, wanted)
    read |= {name for name, _ in table.copies}
    left = [n for n in there if n not in read]
    if left := [n for n in left if not table.ignores(n)]:
        raise UserError(
            f"{weights.path}: nothing uses the tensor {_some(left)}: it belongs to another model"
        )


def _check_filled(filled: Mapping[str, int], wanted: Mapping[str, Any]) -> None:
    for path, size in filled.items():
        if size != wanted[path].size:
            raise ValueError(f"{path}: the table's rows fill {size} of {wanted[path].size} numbers")


class Part(NamedTuple):
    """A part of a tensor that is read at a time.

    Attributes:
      place: of the tensor in our leading dimensions.
      name: of the tensor.
      bounds: of the part, in the dimensions of ours that follow.
    """

    place: tuple[int, ...]
    name: str
    bounds: Bounds


class _Shards:
    """One of our parameters while it is read: what this process's devices hold of it."""

    def __init__(self, like: Any):
        self.like = like
        self.devices: dict[Any, Bounds] = {
            device: tuple(
                part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True)
            )
            for device, index in like.sharding.addressable_devices_indices_map(like.shape).items()
        }
        # Devices with the same part share it, as far as the platform allows.
        self.held = {bounds: _aligned(bounds, like.dtype) for bounds in self.devices.values()}

    def array(self) -> jax.Array:
        """Returns the parameter; what is held must not be changed any more."""
        parts = [jax.device_put(self.held[bounds], d) for d, bounds in self.devices.items()]
        return jax.make_array_from_single_device_arrays(self.like.shape, self.like.sharding, parts)


class _Reader:
    """Reads the tensors of one row into the shards of its parameter."""

    def __init__(
        self,
        row: Row,
        like: Any,
        shards: Mapping[Bounds, np.ndarray],
        weights: Weights,
        allow_nonfinite: bool,
    ):
        self.row, self.shards, self.weights = row, shards, weights
        self.allow_nonfinite = allow_nonfinite
        self.each = tuple(like.shape)[len(row.leading) :]
        self.is_sliceable = row.into == KEEP and row.view.is_sliceable(self.each)

    def parts(self, place: tuple[int, ...], name: str) -> Iterator[Part]:
        """Yields the parts of a tensor to read at a time, without those that no device here holds."""
        held = [bounds[len(place) :] for bounds in self.shards if _holds(bounds, place)]
        if not held:
            return
        if not self.is_sliceable:
            yield Part(place, name, tuple((0, size) for size in self.each))
            return
        hull = tuple(
            (min(b[i][0] for b in held), max(b[i][1] for b in held)) for i in range(len(self.each))
        )
        if not hull:
            yield Part(place, name, ())
            return
        first = (self.row.view.order or range(len(hull))).index(0)
        tensor = self.weights.tensors[name]
        row_bytes = 4 * math.prod(tensor.shape[1:])
        for bounds in stored.chunks(*hull[first], row_bytes, CHUNK):
            yield Part(place, name, (*hull[:first], bounds, *hull[first + 1 :]))

    def fill(self, part: Part) -> int:
        """Reads a part of a tensor, and copies it to its shards; returns how many bytes were read."""
        view, (place, name, bounds) = self.row.view, part
        slices = view.slices(self.each, bounds) if self.is_sliceable else ()
        read = self.weights.read(name, slices)
        seen = stored.as_float32(read)
        if not self.allow_nonfinite and stored.has_nonfinite(seen):
            raise UserError(
                f"{self.weights.path}: {name} has numbers that are NaN or infinite: get the checkpoint again, or read "
                "it as it is with --allow-nonfinite"
            )
        mine = None  # which numbers of the parameter this row fills, if not all
        if self.row.into != KEEP:
            ours, mine = np.empty(self.each, np.float32), np.zeros(self.each, np.bool_)
            self.row.into.of(mine)[...] = True
            target = self.row.into.of(ours)
            target[...] = view.of(seen).reshape(target.shape)
            seen = ours
        elif not self.is_sliceable:
            seen = view.of(seen).reshape(self.each)
        elif view.order:
            seen = seen.transpose(view.order)
        for where, shard in self.shards.items():
            if not _holds(where, place):
                continue
            rest = where[len(place) :]
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(rest, bounds, strict=True)]
            if all(start < stop for start, stop in both):
                at = tuple(p - w[0] for p, w in zip(place, where, strict=False))
                into = tuple(
                    slice(s - r[0], t - r[0]) for (s, t), r in zip(both, rest, strict=True)
                )
                out_of = tuple(
                    slice(s - b[0], t - b[0]) for (s, t), b in zip(both, bounds, strict=True)
                )
                to, frm = shard[(*at, *into, ...)], seen[(*out_of, ...)]
                if mine is None:
                    _copy(to, frm)
                else:
                    np.copyto(to, frm, where=mine[out_of])
        return read.nbytes


def _holds(bounds: Bounds, place: tuple[int, ...]) -> bool:
    return all(start <= p < stop for p, (start, stop) in zip(place, bounds, strict=False))


def _aligned(bounds: Bounds, dtype: Any) -> np.ndarray:
    """Returns memory for a part of an array; the system provides it as it's written."""
    shape, dtype = tuple(stop - start for start, stop in bounds), np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size].view(dtype).reshape(shape)


def _copy(to: np.ndarray, frm: np.ndarray) -> None:
    """Copies arrays of one shape; a transposed one a few rows at a time, which is five times as fast as all at once."""
    if frm.ndim < 2 or abs(frm.strides[-1]) <= abs(frm.strides[-2]):
        to[...] = frm
        return
    for start in range(0, frm.shape[-1], ROWS):
        to[..., start : start + ROWS] = frm[..., start : start + ROWS]


def _check_copy(weights: Weights, name: str, original: str) -> None:
    """Compares a tensor with the one that it must be equal to, a part at a time."""
    one, other = weights.tensors[name], weights.tensors[original]
    same = one.shape == other.shape
    if same:
        parts = stored.chunks(0, one.rows, 4 * math.prod(one.shape[1:]), CHUNK)
        same = all(
            np.array_equal(
                *(stored.as_float32(weights.read(n, (slice(*p),))) for n in (name, original)),
                equal_nan=True,
            )
            for p in parts
        )
    if not same:
        raise UserError(
            f"{weights.path}: {name} differs from {original}, and the configuration says that they are one: set "
            "tie_word_embeddings to false in config.json"
        )


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
}  # config.json's name: safetensors'


def tensors(table: Table, params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the published tensors by name, in the order in which they are written.

    Args:
      table: the model's names.
      params: a pytree of arrays, or of their shapes.
    """
    wanted = leaves.named(params)
    if missing := set(wanted) - {row.path for row in table.rows}:
        raise UserError(f"nothing is written for the parameter {_some(sorted(missing))}")
    shapes, covered = {}, dict[str, int]()
    # Layer by layer, as others write them, so that fused parts come together.
    listed = sorted(
        (row.layers[place[0]] if row.layers else -1, number, place, name)
        for number, row in enumerate(table.rows)
        for place, name in row.sources()
    )
    for _, number, _, name in listed:
        row = table.rows[number]
        each = tuple(wanted[row.path].shape)[len(row.leading) :]
        shapes[name] = row.theirs(each)
        covered[name] = covered.get(name, 0) + math.prod(row.filled(each))
    for name, shape in shapes.items():
        if covered[name] != math.prod(shape):
            raise ValueError(f"{name}: the table's rows give {covered[name]} numbers of {shape}")
    return shapes


def values(
    table: Table, params: Any, advance: Callable[[int], None] = lambda done: None
) -> Iterator[np.ndarray]:
    """Yields the published tensors in float32, in the order of `tensors`, one at a time.

    Args:
      table: the model's names.
      params: a pytree of arrays.
      advance: called with the number of tensors made so far.
    """
    named = leaves.named(params)
    sources: dict[str, list[tuple[Row, tuple[int, ...]]]] = {}
    for row in table.rows:
        for place, name in row.sources():
            sources.setdefault(name, []).append((row, place))
    for done, (name, shape) in enumerate(tensors(table, params).items()):
        tensor = np.empty(shape, np.float32)
        for row, place in sources[name]:
            seen = row.view.of(tensor)
            ours = row.into.of(np.asarray(named[row.path][place]))
            seen[...] = ours.reshape(seen.shape)
        yield tensor
        advance(done + 1)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns float32 numbers in a type of `DTYPES`.

    Raises:
      UserError: if one is too large for it.
    """
    if dtype == "float32":
        return array
    with np.errstate(over="ignore"):
        found = array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    if stored.has_nonfinite(stored.as_float32(found)):
        largest = np.abs(array[np.isfinite(array) & ~np.isfinite(found)]).max(initial=0)
        if largest:
            raise UserError(
                f"{largest:.3g} is too large for {dtype}: export as float32 or bfloat16"
            )
    return found
