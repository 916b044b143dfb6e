"""A state on a mesh of any shape, to save in one process and restore in another that has other devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from minitext.checkpoint.checkpointer import Checkpointer


def state(shape):
    """The state on the first devices, as many as the mesh has."""
    mesh = jax.make_mesh(shape, ("fsdp", "tensor"), devices=jax.devices()[: math.prod(shape)])
    values = {
        "w": (np.arange(64 * 8, dtype=np.float32).reshape(64, 8), ("fsdp", "tensor")),
        "b": (np.arange(16).astype(jnp.bfloat16), (("fsdp", "tensor"),)),
        "scalar": (np.int32(7), ()),
        "key": (jax.random.key(3), ()),
    }
    return {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for name, (x, spec) in values.items()
    }


def save(directory, shape):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(5, state(shape), {"position": 5})


def restore(directory, shape):
    """Asserts that the state comes back; returns the mesh that it was saved on, and how `w` was divided."""
    here = state(shape)
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), here
    )
    with Checkpointer(directory) as checkpointer:
        restored, layout = checkpointer.restore(wanted), checkpointer.facts(5)["layout"]
    assert restored is not None and restored.step == 5
    assert restored.data_state == {"position": 5}
    for name, leaf in restored.state.items():
        want = here[name]
        assert leaf.sharding == want.sharding, (name, leaf.sharding)
        if name == "key":
            leaf, want = jax.random.key_data(leaf), jax.random.key_data(want)
        assert np.array_equal(leaf, want) and leaf.dtype == want.dtype, name
    return layout["mesh"], layout["leaves"]["w"]["spec"]
