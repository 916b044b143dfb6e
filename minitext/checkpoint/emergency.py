"""Copies of the state on each process's own disk, made more often than a shared checkpoint is worth.

A shared checkpoint of a large model takes minutes and a pod's whole bandwidth. Writing only the shards of its own
devices to its own disk takes a process seconds. With `checkpoint.local_dir`, each process does this every
`checkpoint.local_every` steps, and a restart begins with the newest step that all processes can have:

    every process has a copy        each reads its own disk
    some have a copy                where data-parallel replicas hold the same shards, the others get theirs over the
                                    network from those that have them: a lost disk costs nothing
    otherwise                       the shared checkpoint

Shards are written and read by the array handler that Orbax's own managers for this purpose use, in which every process
is its own primary (`leaves.checkpointer(own=True)`). Those managers (`CheckpointManager` and
`ReplicatorCheckpointManager` of `orbax.checkpoint.experimental.emergency`) don't fit: they write the persistent
checkpoint too, in another form than our sealed one; they save arrays only, which loses the position in the data; and
the first finds peers along a single mesh axis. Like every checkpoint, a copy is verified by its manifest. After a start
on another mesh, or with other processes, copies aren't used.

Chapters: 21.
"""

import hashlib
import json
import logging
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from minitext.checkpoint import leaves
from minitext.checkpoint.checkpointer import Checkpointer, Restored
from minitext.distributed import job
from minitext.errors import UserError

logger = logging.getLogger(__name__)

KEEP = 2  # processes finish a step's copy at different times, so the one before is still needed


class LocalCopies(AbstractContextManager):
    """This process's copies of one run. All processes make the same calls. A context manager.

    Args:
      local_dir: a folder on this process's own disk.
      every: steps between copies.
      directory: the run directory; its path identifies the run's copies.
      new: whether the run begins now: copies of an earlier run in the same directory are deleted.
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
        """Returns whether this step should be copied."""
        return step % self._every == 0

    def save(self, step: int, state: Any, data_state: dict[str, Any], config: Any = None) -> None:
        """Copies this process's shards of the state in the background; like `Checkpointer.save`."""
        extended = {"data": data_state, "parts": _digest(leaves.named(state))}
        self._checkpointer.save(step, state, extended, config)

    def restore(self, abstract_state: Any, after: int) -> Restored | None:
        """Reads the newest step after `after` for which the processes together have all shards.

        Args:
          abstract_state: shapes, dtypes and shardings, on the run's mesh.
          after: the step of the newest shared checkpoint, -1 without one.

        Returns:
          The state, the data iterator's state and the step; None if the shared checkpoint is at least as new.
        """
        self._checkpointer.wait()
        digest = _digest(leaves.named(abstract_state))
        mine = [s for s in self._checkpointer.steps() if s > after and self._is_usable(s, digest)]
        held = [json.loads(text) for text in job.share("copies", json.dumps(mine))]
        for step in sorted(set().union(*held), reverse=True):
            holders = {process for process, steps in enumerate(held) if step in steps}
            if len(holders) == len(held) or _covers(abstract_state, holders):
                return self._read(abstract_state, step, holders, len(held))
        return None

    def _read(self, abstract_state: Any, step: int, holders: set[int], processes: int) -> Restored:
        data_state, state = "", None
        if jax.process_index() in holders:
            restored = self._checkpointer.restore(abstract_state, step)
            assert restored is not None
            data_state, state = json.dumps(restored.data_state["data"]), restored.state
        if len(holders) < processes:
            missing = sorted(set(range(processes)) - holders)
            logger.warning("step %s: processes %s get their parts from others", step, missing)
            data_state = next(filter(None, [data_state, *job.share("data state", data_state)]))
            state = from_peers(abstract_state, state, holders)
        return Restored(state, json.loads(data_state), step)

    def _is_usable(self, step: int, digest: str) -> bool:
        if self._checkpointer.verify(step) is not None:
            return False
        return self._checkpointer.facts(step)["data_state"].get("parts") == digest

    def __exit__(self, *error: Any) -> None:
        self._checkpointer.__exit__(*error)


def restore_newest(
    checkpointer: Checkpointer, copies: LocalCopies | None, abstract_state: Any
) -> Restored | None:
    """Reads the newest state: from the processes' own copies if they are newer, else from the shared checkpoint.

    Copies are also read where the newest shared checkpoint is damaged and they are newer than the one before.

    Raises:
      UserError: what `Checkpointer.restore` raises.
    """
    if copies is None:
        return checkpointer.restore(abstract_state)
    latest = checkpointer.latest()
    shared = job.agree("latest", -1 if latest is None else latest)[0]
    if restored := copies.restore(abstract_state, shared):
        return restored
    try:
        whole = checkpointer.choose()
    except UserError:  # all are damaged
        if restored := copies.restore(abstract_state, -1):
            return restored
        raise
    if whole is None:
        return None
    if whole != shared and (restored := copies.restore(abstract_state, whole)):
        return restored
    return checkpointer.read(abstract_state, whole)


def from_peers(abstract_state: Any, state: Any, holders: set[int]) -> Any:
    """Gives every device its shard of the state, from the devices of processes that hold it.

    Of each shard, one device's bits are summed with zeros from all other replicas: exact for every dtype.

    Args:
      abstract_state: shapes, dtypes and `NamedSharding`s.
      state: arrays of these, on a process among `holders`; anything elsewhere.
      holders: indices of the processes whose `state` is whole; `_covers` says whether they suffice.
    """
    held = leaves.named(state) if jax.process_index() in holders else {}
    wanted = leaves.named(abstract_state)
    whole = {name: _spread(held.get(name), like, holders) for name, like in wanted.items()}
    return leaves.rebuild(abstract_state, whole)


def _spread(array: jax.Array | None, like: jax.ShapeDtypeStruct, holders: set[int]) -> Any:
    sharding: Any = like.sharding
    split_over = set(jax.tree.leaves(tuple(sharding.spec)))
    axes = tuple(axis for axis in sharding.mesh.axis_names if axis not in split_over)
    if not axes:
        return array
    sources: dict[Any, Any] = {}  # one device for each shard
    for device, bounds in _shards(like).items():
        if device.process_index in holders:
            sources.setdefault(bounds, device)
    chosen = set(sources.values())
    mine = {} if array is None else {s.device: s.data for s in array.addressable_shards}
    shape = sharding.shard_shape(like.shape)
    parts = [
        # An offloaded moment is in the host's memory, and devices add in their own.
        jax.device_put(mine[device], SingleDeviceSharding(device, memory_kind="device"))
        if device in chosen
        else jnp.zeros(shape, like.dtype, device=device)
        for device in sharding.addressable_devices
    ]
    bits = f"int{8 * like.dtype.itemsize}"

    def add(x: jax.Array) -> jax.Array:
        raw = jax.lax.pcast(jax.lax.bitcast_convert_type(x, bits), axes, to="varying")
        return jax.lax.bitcast_convert_type(jax.lax.psum(raw, axes), like.dtype)

    spec = sharding.spec
    spread = jax.jit(jax.shard_map(add, mesh=sharding.mesh, in_specs=spec, out_specs=spec))
    on_devices = sharding.with_memory_kind("device")
    summed = spread(jax.make_array_from_single_device_arrays(like.shape, on_devices, parts))
    return jax.device_put(summed, sharding)  # where it's wanted, and the object asked for


def _covers(abstract_state: Any, holders: set[int]) -> bool:
    """Whether the devices of `holders` have every shard of every leaf."""
    return all(
        set(shards.values())
        == {b for device, b in shards.items() if device.process_index in holders}
        for shards in map(_shards, jax.tree.leaves(abstract_state))
    )


def _digest(named: dict[str, Any]) -> str:
    """A digest of which shards of which arrays this process's devices hold."""
    me = jax.process_index()
    parts = {
        name: [
            str(leaf.dtype),
            leaf.shape,
            sorted({b for device, b in _shards(leaf).items() if device.process_index == me}),
        ]
        for name, leaf in named.items()
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _shards(leaf: Any) -> dict[Any, tuple[tuple[int, int], ...]]:
    """The bounds of each device's shard of a leaf: (start, stop) for every dimension."""
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
    }
