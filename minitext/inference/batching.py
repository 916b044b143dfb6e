"""Dynamic batching: requests that come at the same time are computed in one call of a program.

Reading weights takes as long for one row as for many, so further rows are nearly free. Calls can be joined if they
differ only in their rows. The first one waits a few milliseconds for others. The number of rows is rounded up to a
power of two, because the program is compiled anew for each number.

Only an exporter knows that rows don't influence each other, as they would in a function that subtracts the batch's
mean. If an artefact doesn't say so of a function, each of its requests is a call of its own.

Chapters: 27.
"""

import functools
import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from minitext.files import shorten
from minitext.inference.open_inference import specs_of
from minitext.inference.protocol import Refused
from minitext.terminal import show_bytes

log = logging.getLogger("minitext.server")

MOST_SHAPES = 64  # for which compiled programs are kept
# What JAX says of shapes that don't fit, between where it says that they don't and what was given.
_MISFIT = re.compile(
    r"do not match the (?:symbolic shape constraint|polymorphic shapes specification\.) (.*?) Using the"
)

Arrays = dict[str, np.ndarray]


class Program:
    """A function of an artefact, compiled for the shapes that it's called with.

    Args:
      function: of the artefact: a partial of the program and its weights.
      said: what the manifest says of it: `inputs`, `outputs` and perhaps `batch`, the symbol of independent rows.
      most_bytes: that a call may take besides the weights; None: no limit.

    Attributes:
      inputs: what it takes, by name.
      outputs: what it gives.
      axes: of each input and output, where its rows are, or None; empty if calls can't be joined.
    """

    def __init__(
        self,
        function: functools.partial[dict[str, jax.Array]],
        said: Mapping[str, Any],
        most_bytes: int | None = None,
    ):
        self._function, self._most_bytes = function, most_bytes
        self.inputs, self.outputs = specs_of(said["inputs"]), specs_of(said["outputs"])
        self.axes = self._rows(said.get("batch"))
        self._compiled: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def _rows(self, batch: str | None) -> dict[str, int | None]:
        """Returns the axis of the rows in every tensor, or an empty dict if some have rows in another form."""
        if batch is None:
            return {}
        axes: dict[str, int | None] = {}
        for name, spec in (*self.inputs.items(), *self.outputs.items()):
            using = [i for i, size in enumerate(spec.shape) if _names(size, batch)]
            if len(using) > 1 or any(spec.shape[i] != batch for i in using):
                return {}  # such as 2*b, or two dimensions of b
            axes[name] = using[0] if using else None
        return axes if any(axes[name] is not None for name in self.inputs) else {}

    @property
    def shapes(self) -> int:
        """The number of shapes for which there is a compiled program."""
        return len(self._compiled)

    def rows(self, inputs: Arrays) -> int:
        """Returns how many rows a call has, or 1 if calls can't be joined."""
        return next(
            (inputs[n].shape[axis] for n in self.inputs if (axis := self.axes.get(n)) is not None),
            1,
        )

    def __call__(self, inputs: Arrays) -> Arrays:
        """Computes the outputs.

        Raises:
          Refused: the program doesn't take these shapes, or needs more memory than it may have.
        """
        key = tuple(inputs[name].shape for name in self.inputs)
        compiled = self._compiled.pop(key, None) or self._compile(inputs)
        self._compiled[key] = compiled  # as the last one used
        if len(self._compiled) > MOST_SHAPES:
            self._compiled.popitem(last=False)
        try:
            outputs = compiled(inputs)
            return {name: np.asarray(outputs[name]) for name in self.outputs}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise Refused(
                    "there isn't enough memory for these shapes: ask for less", 413
                ) from None
            raise

    def _compile(self, inputs: Arrays) -> Callable[[Arrays], Mapping[str, jax.Array]]:
        program, weights = self._function.args
        types = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.items()}
        try:  # with the weights as arguments: as constants they would be in every compiled program again
            compiled = program.lower(weights, **types).compile()
        except ValueError as error:  # JAX's own, of a program's constraints on its symbols
            said = " ".join(str(error.__cause__ or error).split())
            found = _MISFIT.search(said)
            said = shorten(found[1] if found else said)
            raise Refused(f"the function doesn't take these shapes: {said}") from None
        memory = compiled.memory_analysis()
        needed = memory.temp_size_in_bytes + memory.output_size_in_bytes if memory else 0
        if self._most_bytes is not None and needed > self._most_bytes:
            raise Refused(
                f"these shapes need {show_bytes(needed)} of memory, and a call may have "
                f"{show_bytes(self._most_bytes)}: ask for fewer or shorter rows", 413,
            )  # fmt: skip
        return lambda inputs: compiled(weights, **inputs)


def _names(size: int | str, symbol: str) -> bool:
    return isinstance(size, str) and symbol in re.findall(r"\w+", size)


class BatchSizes(NamedTuple):
    """How calls are joined.

    Attributes:
      rows: at most, in one call of the program.
      wait_seconds: that a call waits for others at most.
    """

    rows: int = 32
    wait_seconds: float = 0.005


DEFAULT_SIZES = BatchSizes()


@dataclass(eq=False)
class Call:
    """One request's inputs.

    Attributes:
      inputs: by name.
      rows: how many there are.
      told: called in the batcher's thread with the outputs or an exception.
      arrived: when, by `time.perf_counter`.
      cancelled: whether the client has hung up.
    """

    inputs: Arrays
    rows: int
    told: Callable[[Arrays | BaseException], None]
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False


class Batcher:
    """A thread that calls one program, for several requests at once where that's possible.

    Args:
      program: to call, from this thread alone.
      sizes: how calls are joined.
      watched: called after each call of the program with its requests and the rows that were computed.
    """

    def __init__(
        self,
        program: Program,
        sizes: BatchSizes,
        watched: Callable[[Sequence[Call], int], None] = lambda calls, rows: None,
    ):
        self.program, self.sizes, self._watched = program, sizes, watched
        # Calls that can be joined, oldest first; the groups are in the order of their oldest calls.
        self._groups: OrderedDict[Any, deque[Call]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = self._given_up = False
        self._thread = threading.Thread(target=self._work, name="batch", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Calls that aren't begun."""
        with self._changed:
            return sum(map(len, self._groups.values()))

    def submit(self, inputs: Arrays, told: Callable[[Arrays | BaseException], None]) -> Call:
        """Queues a call.

        Args:
          inputs: that fit the program's.
          told: called in another thread with the outputs, or with why there are none.

        Raises:
          Refused: it has too many rows, or the batcher is closed.
        """
        call = Call(inputs, self.program.rows(inputs), told)
        if call.rows > self.sizes.rows:
            raise Refused(
                f"the request has {call.rows:,} rows, and at most {self.sizes.rows} are computed at once: send fewer",
                413,
            )
        key = self._group(call)
        with self._changed:
            if self._closed:
                raise Refused("the model is being unloaded: ask again later", 503)
            self._groups.setdefault(key, deque()).append(call)
            self._changed.notify()
        return call

    def _group(self, call: Call) -> Any:
        """Returns what calls have in common that can be joined; a call that can't has a group of its own."""
        if not self.program.axes:
            return id(call)
        found = []
        for name, x in call.inputs.items():
            axis = self.program.axes[name]
            # What has no rows is the same for all of a call.
            shape = x.shape if axis is None else (*x.shape[:axis], *x.shape[axis + 1 :])
            found.append((shape, hashlib.sha256(x.tobytes()).digest() if axis is None else None))
        return tuple(found)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Takes no more calls, and returns when those that came are answered; late ones are refused."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(drain_seconds)
        with self._changed:
            self._given_up = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while calls := self._next():
            calls = [call for call in calls if not call.cancelled]
            if calls:
                self._answer(calls)

    def _next(self) -> list[Call]:
        """Returns the calls to compute together, when there are enough or the oldest has waited; none: the end."""
        with self._changed:
            while True:
                now, soonest = time.perf_counter(), None
                for key, group in self._groups.items():
                    due = group[0].arrived + self.sizes.wait_seconds
                    rows = sum(call.rows for call in group)
                    alone = self._closed or not self.program.axes  # no others can come, or join
                    if alone or rows >= self.sizes.rows or now >= due:
                        return self._take(key)
                    soonest = min(soonest or due, due)
                if self._closed:
                    return []
                self._changed.wait(None if soonest is None else soonest - now)

    def _take(self, key: Any) -> list[Call]:
        group, taken, rows = self._groups[key], [], 0
        while group and rows + group[0].rows <= self.sizes.rows:
            rows += group[0].rows
            taken.append(group.popleft())
        del self._groups[key]
        if group:  # behind those that have waited longer
            self._groups[key] = group
        return taken

    def _answer(self, calls: list[Call]) -> None:
        if self._given_up:
            for call in calls:
                call.told(Refused("the server is shutting down: ask again later", 503))
            return
        try:
            outputs, rows = self._compute(calls)
        except Exception as error:
            if len(calls) == 1:
                if not isinstance(error, Refused):
                    log.exception("a call failed")
                calls[0].told(error)
                return
            for call in calls:  # whose fault it was shows when each is alone
                self._answer([call])
            return
        self._watched(calls, rows)
        for call, part in zip(calls, outputs, strict=True):
            call.told(part)

    def _compute(self, calls: list[Call]) -> tuple[list[Arrays], int]:
        """Returns the outputs of each call, and how many rows were computed."""
        axes, rows = self.program.axes, sum(call.rows for call in calls)
        if not axes:
            return [self.program(calls[0].inputs)], rows
        filled = min(1 << (rows - 1).bit_length(), self.sizes.rows)
        try:
            return self._joined(calls, filled), filled
        except Refused:
            if filled == rows:
                raise
            return self._joined(calls, rows), rows  # as many as a constraint or memory may allow

    def _joined(self, calls: list[Call], rows: int) -> list[Arrays]:
        """Returns the outputs of each call, computed together in so many rows."""
        axes = self.program.axes
        joined = {
            name: x if axes[name] is None else _join([c.inputs[name] for c in calls], axes[name], rows)
            for name, x in calls[0].inputs.items()
        }  # fmt: skip
        outputs, start, parts = self.program(joined), 0, []
        for call in calls:
            here = slice(start, start + call.rows)
            parts.append({n: _part(x, axes[n], here) for n, x in outputs.items()})
            start += call.rows
        return parts


def _join(arrays: Sequence[np.ndarray], axis: int | None, rows: int) -> np.ndarray:
    """Returns the arrays concatenated, with the last row repeated until there are `rows`."""
    assert axis is not None
    last = np.take(arrays[-1], [-1], axis)
    missing = rows - sum(x.shape[axis] for x in arrays)
    return np.concatenate([*arrays, *[last] * missing], axis)


def _part(x: np.ndarray, axis: int | None, rows: slice) -> np.ndarray:
    """Returns an output's rows, as an array of its own: a view would keep the whole batch."""
    return x if axis is None else x[(slice(None),) * axis + (rows,)].copy()
