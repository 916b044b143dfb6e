"""Parameters to and from published checkpoints: one table of names for both directions.

A table has a row for each of our parameters: what their tensors are called, and how one of them is seen as ours. Reading
takes this view of a tensor and copies it into a shard; writing takes the same view of an empty tensor and copies the
parameter into it. So the two directions can't disagree, and a tensor that goes in and out is equal bit by bit.

Chapters: 23.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Bounds = tuple[tuple[int, int], ...]  # start and stop in each dimension


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
      ignored: patterns (`fnmatch`) of tensors that are read by nobody, such as `*.rotary_emb.inv_freq`.
      copies: a tensor that may be there, and the one it must then be equal to, such as a tied output layer.
    """

    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
