"""Arrays from one set of devices to another, as weights go from devices that train to others that sample.

One process that sees all devices (a single controller, as on one machine, or on pods with Pathways) can have several
meshes at a time. `jax.device_put` then copies from device to device where every part that a device of the new mesh
needs is whole on one of the old ones. Where it isn't, it goes through the host's memory, and says nothing. `move` cuts
the arrays on the old devices as the new ones need them before it copies.

Chapters: 26.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

NO_MESH = Mesh(np.empty((), object), ())


def move(tree: Any, shardings: Any) -> Any:
    """Returns arrays with other shardings, also on other devices, without a trip through the host.

    Where the new devices are as many as the old ones, or one of several equal parts of them, every device holds no more
    on the way than the old and the new parts of one layout. Between other numbers whole arrays are copied.

    Args:
      tree: arrays, all on the same devices.
      shardings: a pytree of the same structure with a NamedSharding or SingleDeviceSharding of each, all on the same
        devices.
    """
    leaves, targets = jax.tree.leaves(tree), jax.tree.leaves(shardings)
    if all(_is_there(x, target) for x, target in zip(leaves, targets, strict=True)):
        return jax.device_put(tree, shardings)  # binds them to the devices, no more
    old, new = _devices(leaves[0].sharding), _devices(targets[0])
    with jax.set_mesh(NO_MESH):
        if len(old) % len(new) == 0:
            cut = jax.tree.map(lambda target: _like(target, old), shardings)
            # The copy, which where nothing moves is none, also takes the old mesh out of the arrays' types.
            return jax.device_put(_reshard(tree, cut), shardings)
        whole = jax.tree.map(lambda _: _whole(old), shardings)
        there = jax.tree.map(lambda _: _whole(new), shardings)
        apart = jax.device_put(_reshard(tree, whole), there)
        return jax.device_put(_reshard(apart, shardings), shardings)


def _is_there(x: jax.Array, target: Sharding) -> bool:
    """Whether an array has the sharding, and no mesh in its type if the sharding has none."""
    typed = isinstance(target, NamedSharding) or jax.typeof(x).sharding.mesh.empty
    return x.sharding == target and typed


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
