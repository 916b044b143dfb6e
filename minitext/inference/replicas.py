"""Data parallelism in serving: engines with a copy of the model each, which share the requests.

A request goes to the replica with the fewest texts, and stays there: replicas never talk to each other. With little to
do, that is always the first, so texts that begin alike meet in one cache.

Chapters: 24.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from minitext.config.model import ModelConfig
from minitext.inference.engine import Engine, EngineOptions, Sink
from minitext.inference.requests import Request, Usage
from minitext.sharding.mesh import AXES


class Replicas:
    """Several engines that are used like one.

    Args:
      engines: of the same model, each on devices of its own.

    Attributes:
      max_length: tokens that a text may have, prompt included.
    """

    def __init__(self, engines: Sequence[Engine]):
        self.engines = list(engines)
        self.max_length = min(engine.max_length for engine in self.engines)

    @property
    def failed(self) -> str:
        """Why the last engine ended by itself, or the empty text while any works."""
        reasons = [engine.failed for engine in self.engines]
        return reasons[-1] if all(reasons) else ""

    def submit(self, request: Request, sink: Sink) -> int:
        """Queues a request with the engine that has the fewest texts; arguments, result and errors are `Engine`'s."""
        working = [i for i, engine in enumerate(self.engines) if not engine.failed]

        def texts(i: int) -> int:
            usage = self.engines[i].usage()
            return usage.running + usage.waiting

        chosen = min(working or [0], key=texts)
        return self.engines[chosen].submit(request, sink) * len(self.engines) + chosen

    def cancel(self, number: int, sample: int | None = None) -> None:
        """Ends a request's texts, or one of them, at the next step if it isn't answered yet."""
        local, chosen = divmod(number, len(self.engines))
        self.engines[chosen].cancel(local, sample)

    def load(self, params: Any) -> None:
        """Gives all engines other weights, as `Engine.load` does; none of them if one has texts."""
        with self._idle("other weights"):
            for engine in self.engines:
                engine.load(params)

    def load_adapter(self, name: str, params: Any) -> None:
        """Gives all engines an adapter, as `Engine.load_adapter` does; none of them if one has texts."""
        with self._idle("an adapter"):
            for engine in self.engines:
                engine.load_adapter(name, params)

    def unload(self, name: str) -> None:
        """Takes an adapter from all engines, as `Engine.unload` does; from none of them if one has texts."""
        with self._idle("another set of adapters"):
            for engine in self.engines:
                engine.unload(name)

    @contextlib.contextmanager
    def _idle(self, what: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.idle(what))
            yield

    @property
    def adapters(self) -> list[str]:
        """The names of the engines' adapters."""
        return self.engines[0].adapters

    def usage(self) -> Usage:
        """Returns what all engines do together."""
        return Usage(*map(sum, zip(*(engine.usage() for engine in self.engines), strict=True)))

    def warm_up(
        self, rows: int, told: Callable[[int, int], object] = lambda done, whole: None
    ) -> None:
        """Compiles each engine's programs, as `Engine.warm_up` does."""
        for engine in self.engines:
            engine.warm_up(rows, told)

    def start(self) -> None:
        """Starts a thread for each engine."""
        for engine in self.engines:
            engine.start()

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """Closes all engines at once, as `Engine.close` does."""
        closing = [
            Thread(target=engine.close, kwargs={"drain_seconds": drain_seconds})
            for engine in self.engines
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def divide(mesh: Mesh) -> list[Mesh]:
    """Returns the meshes of the replicas: one for each index of the axis `data`.

    Args:
      mesh: with the axes of `minitext.sharding.mesh.AXES`.
    """
    axis = AXES.index("data")
    types = (AxisType.Explicit,) * len(AXES)
    parts = np.split(mesh.devices, mesh.shape["data"], axis)
    return [Mesh(part, AXES, axis_types=types) for part in parts]


def make_replicas(
    cfg: ModelConfig,
    params: Any,
    options: EngineOptions,
    make_guide: Callable[[tuple[str, str]], Any] | None,
    mesh: Mesh,
) -> Engine | Replicas:
    """Returns an engine for each index of the mesh's axis `data`, or the engine alone if there is one.

    The arguments and errors are `Engine`'s; `options` are those of each engine.
    """
    engines = [Engine(cfg, params, options, make_guide, part) for part in divide(mesh)]
    return engines[0] if len(engines) == 1 else Replicas(engines)
