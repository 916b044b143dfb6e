"""Copies of the state on each process's own disk, more often than the shared checkpoint is worth.

A shared checkpoint of a large model takes minutes and a pod's whole bandwidth. A process's own disk takes its own
devices' parts in seconds. So with `checkpoint.local_dir` each process copies them every `checkpoint.local_every` steps,
and a restart begins with the newest step that all processes can have:

    a copy of every process         each reads its own disk
    a copy of some                  where layers of data parallelism hold the same parts, the others get theirs over
                                    the network from those that have them: a lost disk costs nothing
    neither                         the shared checkpoint

The parts are written and read by what Orbax's managers for this use (`orbax.checkpoint.experimental.emergency`: its
`CheckpointManager` and the `ReplicatorCheckpointManager`): the array handler that takes every process for its own
primary (`leaves.checkpointer(own=True)`). The managers themselves do not fit. They bring the persistent checkpoint with
them, in a form of their own, where a run has its sealed one; they keep arrays only, so that the place in the data is
lost; and the first knows peers along one axis of the mesh alone. Whether a copy is whole is told as for every other
checkpoint, by its manifest. After a start on another mesh, or of other processes, copies do not serve.

Chapters: 21.
"""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from minitext.checkpoint import leaves
from minitext.checkpoint.checkpointer import Checkpointer, Restored
from minitext.distributed import job

logger = logging.getLogger(__name__)

KEEP = 2  # the processes end a step's copy at different moments, so the one before is still needed


class LocalCopies:
    """This process's copies of one run. All processes make the same calls. A context manager.

    Args:
      local_dir: a folder on this process's own disk.
      every: steps between copies.
      directory: the run directory; copies are told apart by it.
      new: whether the run begins now: copies of an earlier one of that name are deleted.
    """

    def __init__(self, local_dir: str, every: int, directory: Path, new: bool):
        path = str(directory.absolute())
        run = f"{directory.name}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
        self.folder = Path(local_dir) / run / str(jax.process_index())
        if new:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._every = every
        self._checkpointer = Checkpointer(self.folder, KEEP, own=True)

    def is_due(self, step: int) -> bool:
        """Returns whether a copy is to be made of this step."""
        return step % self._every == 0

    def save(self, step: int, state: Any, data_state: dict[str, Any], config: Any = None) -> None:
        """Copies this process's part of the state in the background; like `Checkpointer.save`."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        place = {"data": data_state, "parts": _parts(leaves.named(state))}
        self._checkpointer.save(step, state, place, config)

    def restore(self, abstract_state: Any, after: int) -> Restored | None:
        """Reads the newest step after `after` of which the processes together have all parts.

        Args:
          abstract_state: what is wanted, on the run's mesh.
          after: the step of the newest shared checkpoint, -1 without one.

        Returns:
          The state, the data's place and the step; None where the shared checkpoint is as new.
        """
        self._checkpointer.wait()
        parts = _parts(leaves.named(abstract_state))
        mine = [step for step in self._checkpointer.steps() if step > after]
        mine = [step for step in mine if self._is_usable(step, parts)]
        held = [json.loads(text) for text in job.share("copies", json.dumps(mine))]
        for step in sorted(set().union(*held), reverse=True):
            holders = {process for process, steps in enumerate(held) if step in steps}
            if len(holders) == len(held) or _covers(abstract_state, holders):
                return self._read(abstract_state, step, holders, len(held))
        return None

    def _read(self, abstract_state: Any, step: int, holders: set[int], processes: int) -> Restored:
        place, state = "", None
        if jax.process_index() in holders:
            restored = self._checkpointer.restore(abstract_state, step)
            assert restored is not None
            place, state = json.dumps(restored.data_state["data"]), restored.state
        if len(holders) < processes:
            missing = sorted(set(range(processes)) - holders)
            logger.warning("step %s: processes %s get their parts from others", step, missing)
            places = job.share("place", place)
            place = place or next(filter(None, places))
            state = from_peers(abstract_state, state, holders)
        return Restored(state, json.loads(place), step)

    def _is_usable(self, step: int, parts: str) -> bool:
        if self._checkpointer.verify(step) is not None:
            return False
        return self._checkpointer.facts(step)["data_state"].get("parts") == parts

    def __enter__(self) -> "LocalCopies":
        return self

    def __exit__(self, *error: Any) -> None:
        self._checkpointer.__exit__(*error)


def restore_newest(
    checkpointer: Checkpointer, copies: LocalCopies | None, abstract_state: Any
) -> Restored | None:
    """Reads the newest state: of the processes' own copies, if they have a newer one, or the shared checkpoint."""
    if copies is not None:
        latest = checkpointer.latest()
        shared = job.agree("latest", -1 if latest is None else latest)[0]
        if restored := copies.restore(abstract_state, shared):
            return restored
    return checkpointer.restore(abstract_state)


def from_peers(abstract_state: Any, state: Any, holders: set[int]) -> Any:
    """Gives every device its part of the state, from the devices of processes that hold it.

    Of each part one device's bits are summed with zeros of all others that should hold it: exact for every type.

    Args:
      abstract_state: shapes, types and `NamedSharding`s.
      state: arrays of these, on a process among `holders`; anything elsewhere.
      holders: indices of the processes whose `state` is whole. `_covers` tells whether they suffice.
    """
    wanted = leaves.named(abstract_state)
    if jax.process_index() in holders:
        arrays = leaves.named(state)
    else:
        arrays = {name: _zeros(leaf) for name, leaf in wanted.items()}
    whole = {name: _spread(array, wanted[name], holders) for name, array in arrays.items()}
    return leaves.rebuild(abstract_state, whole)


def _spread(array: jax.Array, like: jax.ShapeDtypeStruct, holders: set[int]) -> jax.Array:
    sharding: Any = like.sharding
    mesh, named, sources = sharding.mesh, set(), {}
    for names in sharding.spec:
        named |= set(names if isinstance(names, tuple) else (names,))
    for device, index in sharding.devices_indices_map(like.shape).items():
        if device.process_index in holders:
            sources.setdefault(_bounds(index, like.shape), device)
    chosen = set(sources.values())
    axes = tuple(axis for axis in mesh.axis_names if axis not in named)
    if not axes:
        return array
    every = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))

    def is_source(index: Any) -> np.ndarray:
        device = mesh.devices[index].item()
        return np.full((1,) * mesh.devices.ndim, device in chosen)

    source = jax.make_array_from_callback(mesh.devices.shape, every, is_source)
    bits = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[like.dtype.itemsize]

    def add(x: jax.Array, source: jax.Array) -> jax.Array:
        raw = jax.lax.bitcast_convert_type(x, bits)
        total = jax.lax.psum(jnp.where(source.reshape(()), raw, jnp.zeros_like(raw)), axes)
        return jax.lax.bitcast_convert_type(total, like.dtype)

    specs = (sharding.spec, every.spec)
    spread = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=specs, out_specs=sharding.spec))
    return jax.device_put(spread(array, source), sharding)  # the same place, under the same name


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    part = jnp.zeros(like.sharding.shard_shape(like.shape), like.dtype)  # pyright: ignore
    return jax.make_array_from_callback(like.shape, like.sharding, lambda _: part)


def _covers(abstract_state: Any, holders: set[int]) -> bool:
    """Whether the devices of `holders` have every part of every leaf."""
    for leaf in jax.tree.leaves(abstract_state):
        indices = leaf.sharding.devices_indices_map(leaf.shape)
        parts = {_bounds(index, leaf.shape) for index in indices.values()}
        theirs = {d: i for d, i in indices.items() if d.process_index in holders}
        if parts != {_bounds(index, leaf.shape) for index in theirs.values()}:
            return False
    return True


def _parts(named: dict[str, Any]) -> str:
    """A digest of which parts of which arrays lie on this process's devices."""
    parts = {}
    for name, leaf in named.items():
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        found = sorted({_bounds(index, leaf.shape) for index in indices})
        parts[name] = [str(leaf.dtype), leaf.shape, found]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    found = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    return tuple(found)
