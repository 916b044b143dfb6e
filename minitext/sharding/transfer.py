"""Arrays from one set of devices to another, as weights go from devices that train to others that sample.

One process that sees all devices (a single controller, as on one machine, or on pods with Pathways) can have several
meshes at a time. `jax.device_put` then copies from device to device where every part that a device of the new mesh
needs is whole on one of the old ones. Where it isn't, it goes through the host's memory, and says nothing. `move` cuts
the arrays on the old devices as the new ones need them before it copies. An array whose parts are on the new devices
already is not copied: old and new have the same memory, and are deleted together when either is donated.

With several processes each has devices of its own that it moves arrays to, and all move the same arrays together. What
isn't arrays, `share_bytes` gives to all of them.

Chapters: 26.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

NO_MESH = Mesh(np.empty((), object), ())


def move(tree: Any, shardings: Any) -> Any:
    """Returns arrays with other shardings, also on other devices, without a trip through the host.

    Where the new devices are as many as the old ones, or one of several equal parts of them, no device makes whole
    arrays on the way: besides the old and the new parts it holds about as much as the new ones again. Between other
    numbers whole arrays are copied.

    Args:
      tree: arrays, all on the same devices.
      shardings: a pytree of the same structure with a NamedSharding or SingleDeviceSharding of each, all on the same
        devices. If several processes have the old ones, the new are one of their equal parts, in their order: each
        process names one of its own, divided in the same way.
    """
    leaves, treedef = jax.tree.flatten(tree)
    targets = jax.tree.leaves(shardings)
    rest = [i for i, pair in enumerate(zip(leaves, targets, strict=True)) if not _is_there(*pair)]
    moved = dict(
        zip(rest, _copied(*([x[i] for i in rest] for x in (leaves, targets))), strict=True)
    )
    same = [moved.get(i, x) for i, x in enumerate(leaves)]
    return treedef.unflatten(map(_rebound, same, targets))


def _copied(arrays: list[jax.Array], targets: list[Any]) -> list[Any]:
    """Returns arrays of which every new device has its part; others may have parts too."""
    if not arrays:
        return []
    old, new = _devices(arrays[0].sharding), _devices(targets[0])
    with jax.set_mesh(NO_MESH):
        if len(old) % len(new) == 0:
            wanted = [_like(target, old) for target in targets]
            finer = [_finer(*pair) for pair in zip(arrays, wanted, strict=True)]
            first = [i for i, sharding in enumerate(finer) if sharding is not None]
            parts = _reshard([arrays[i] for i in first], [finer[i] for i in first])
            moved = dict(zip(first, parts, strict=True))
            cut = _reshard([moved.get(i, x) for i, x in enumerate(arrays)], wanted)
            there = all(map(_is_there, cut, targets))
            return cut if there else jax.device_put(cut, targets)
        whole = _reshard(arrays, [_whole(old)] * len(arrays))
        apart = jax.device_put(whole, [_whole(new)] * len(arrays))
        return _reshard(apart, targets)


def _finer(x: jax.Array, wanted: NamedSharding) -> NamedSharding | None:
    """Returns a sharding to pass through: as `wanted`, but cut further into parts of which each device has only one.

    From parts along one dimension to parts along another that several devices have, XLA makes the whole array on every
    device, and all arrays at once. On this way it exchanges parts and then gathers them. None where that isn't needed,
    or where no dimension can be divided so.
    """
    sizes = zip(x.sharding.shard_shape(x.shape), wanted.shard_shape(x.shape), x.shape, strict=True)
    if not any(have < want == whole for have, want, whole in sizes):
        return None
    mesh, entries = _mesh(wanted), list(wanted.spec)
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    free = tuple(axis for axis in mesh.axis_names if not any(axis in names for names in axes))
    if math.prod(mesh.shape[axis] for axis in free) == 1:
        return None
    for dim, names in enumerate(axes):
        ways = math.prod(mesh.shape[axis] for axis in (*names, *free))
        if names and x.shape[dim] % ways == 0:
            return NamedSharding(
                mesh, PartitionSpec(*entries[:dim], (*names, *free), *entries[dim + 1 :])
            )
    return None


def _is_there(x: jax.Array, target: Sharding) -> bool:
    """Whether each device of the sharding has its part of the array already; all processes find the same."""
    if not x.is_fully_addressable:
        return x.sharding.is_equivalent_to(_like(target, _devices(x.sharding)), x.ndim)
    held = {shard.device: shard.index for shard in x.addressable_shards}
    wanted = target.addressable_devices_indices_map(x.shape)
    bounds = lambda index: [at.indices(n) for at, n in zip(index, x.shape, strict=True)]  # noqa: E731
    return all(d in held and bounds(held[d]) == bounds(at) for d, at in wanted.items())


def _rebound(x: jax.Array, target: Sharding) -> jax.Array:
    """Returns an array of the parts that the sharding's devices have, with the sharding in its type: no copy."""
    if x.sharding == target and isinstance(target, NamedSharding):
        return x
    held = {shard.device: shard.data for shard in x.addressable_shards}
    parts = [held[device] for device in target.addressable_devices_indices_map(x.shape)]
    return jax.make_array_from_single_device_arrays(x.shape, target, parts)


def _reshard(tree: Any, shardings: Any) -> Any:
    """Changes layouts on the same devices by a program, whose collectives move the parts."""
    return jax.jit(lambda tree: tree, out_shardings=shardings)(tree)


def _devices(sharding: Sharding) -> list[Any]:
    if isinstance(sharding, NamedSharding):
        return np.ravel(_mesh(sharding).devices).tolist()
    return sorted(sharding.device_set, key=lambda device: device.id)


def _like(target: Any, devices: Sequence[Any]) -> NamedSharding:
    """Returns what cuts an array as `target` does, over other devices, several of which may have the same part."""
    if not isinstance(target, NamedSharding):
        return _whole(devices)
    mesh = _mesh(target)
    arranged = np.array(devices).reshape(-1, *mesh.devices.shape)
    return NamedSharding(Mesh(arranged, ("copy", *mesh.axis_names)), target.spec)


def _mesh(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def _whole(devices: Sequence[Any]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("copy",)), PartitionSpec())


def share_bytes(data: bytes) -> list[bytes]:
    """Returns the bytes of each process, which need not be equally many. All processes make the call."""
    if jax.process_count() == 1:
        return [data]
    from jax.experimental import multihost_utils

    with jax.set_mesh(NO_MESH):
        lengths = multihost_utils.process_allgather(np.asarray(len(data), np.int32)).tolist()
        # Few sizes are compiled.
        padded = np.zeros(1 << (max(lengths) - 1).bit_length(), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
