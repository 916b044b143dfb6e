"""A pytree's leaves by name: how a checkpoint compares them, and stores and reads them with Orbax.

Only a dict from names to arrays is stored, so reading a checkpoint needs none of the classes that were saved, and a
leaf that doesn't match is reported by name.

Chapters: 8.
"""

import functools
import logging
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minitext import files


def named(tree: Any) -> dict[str, Any]:
    """Returns the leaves by name, in their order: {"params.blocks.wq": array, "opt_state.0.count": ...}.

    Python numbers become numpy arrays; jax arrays and `jax.ShapeDtypeStruct`s stay as they are.

    Raises:
        TypeError: a leaf is neither an array nor a number.
        ValueError: two leaves have the same name (a key contains a dot).
    """
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if path and path[-1] == jax.tree_util.GetAttrKey("value"):
            path = path[:-1]  # an nnx.Variable is one leaf, under its own name
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise ValueError(f"two leaves have the name {name!r}: rename a key that contains a dot")
        if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            kind = type(leaf).__name__
            leaf = np.asarray(leaf)
            if leaf.dtype.kind in "OSUMm":
                raise TypeError(f"{name} is a {kind}: only arrays and numbers can be saved")
        leaves[name] = leaf
    return leaves


def layout(leaves: dict[str, Any]) -> dict[str, Any]:
    """Returns the shapes, dtypes and sharding of named leaves, as JSON."""
    shardings = {name: getattr(leaf, "sharding", None) for name, leaf in leaves.items()}
    meshes = [s.mesh for s in shardings.values() if isinstance(s, jax.sharding.NamedSharding)]
    return {
        "processes": jax.process_count(),
        "mesh": dict(meshes[0].shape) if meshes else None,
        "leaves": {
            name: {
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "spec": str(getattr(shardings[name], "spec", None)),
            }
            for name, leaf in leaves.items()
        },
    }


def difference(saved: dict[str, Any], wanted: dict[str, Any], partial: bool = False) -> str | None:
    """Describes the first leaf whose shape or dtype differs from the saved one, or that is missing on either side.

    Args:
        saved: the "leaves" of the saved `layout`.
        wanted: named leaves.
        partial: whether `wanted` may lack saved leaves.
    """
    here = {name: _type(leaf.dtype, leaf.shape) for name, leaf in wanted.items()}
    there = {name: _type(leaf["dtype"], leaf["shape"]) for name, leaf in saved.items()}
    names = here if partial else here | there
    wrong = [name for name in names if here.get(name) != there.get(name)]
    if not wrong:
        return None
    name, others = wrong[0], len(wrong) - 1
    more = f" (and {others} more)" if others else ""
    return f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here{more}"


def checkpointer(own: bool = False, at_once: int | None = None) -> Any:
    """Returns an `orbax.checkpoint.AsyncCheckpointer` that raises its errors without also printing them.

    Args:
        own: whether this process saves and reads its own devices' shards, without the other processes.
        at_once: bytes of arrays that are copied to the host, compressed and written at a time; None: all.
    """
    import orbax.checkpoint as ocp  # a quarter of a second, which `import minitext` shouldn't take

    _silence_orbax()
    # If the directory can't be written, this fails before anything else is begun.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    # In GB; Orbax wants more than the largest array's.
    limit: Any = None if at_once is None else (at_once + 1) / 1e9
    limits = {"save_concurrent_gb": limit, "save_device_host_concurrent_gb": limit}
    if not own:
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(**limits), async_options=options)
    # What Orbax's emergency and replicator managers save local copies with.
    me, handlers = jax.process_index(), ocp.type_handlers
    alone = ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={me}, barrier_sync_key_prefix=f"own{me}"
    )
    shards = handlers.ArrayHandler(primary_host=None, replica_id=None, use_replica_parallel=False)
    handler = ocp.PyTreeCheckpointHandler(
        **limits,
        multiprocessing_options=alone,
        type_handler_registry=handlers.create_type_handler_registry((jax.Array, shards)),
    )
    return ocp.AsyncCheckpointer(handler, async_options=options, multiprocessing_options=alone)


def storable(leaves: dict[str, Any]) -> dict[str, Any]:
    """Returns what Orbax stores of named leaves: of PRNG keys, the integers they hold.

    Orbax refuses arrays of size 0 (`rebuild` makes them from their shape) and an empty dict.
    """
    arrays = {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for name, leaf in leaves.items()
        if leaf.size
    }
    return arrays or {"": np.zeros(1, np.int8)}


def on_host(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays in this host's memory, safe from later changes; each must be fully addressable.

    On the CPU no jax array is copied: when a step donates one, XLA sees that it's in use and copies it then.
    """
    for array in arrays.values():
        if isinstance(array, jax.Array):
            array.copy_to_host_async()  # starts all transfers before waiting for any
    return {
        name: np.asarray(array) if isinstance(array, jax.Array) else array.copy()
        for name, array in arrays.items()
    }


def gather(tree: Any) -> Any:
    """Returns the tree as numpy arrays on every process, wherever their shards are. All processes make the call."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    # Leaf by leaf, so that a device never holds a second whole tree.
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)


def write(checkpointer: Any, directory: Path, arrays: dict[str, Any]) -> None:
    """Begins saving `storable` arrays in the background."""
    import orbax.checkpoint as ocp

    checkpointer.save(directory, args=ocp.args.PyTreeSave(arrays))


def read(checkpointer: Any, directory: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the saved arrays of named leaves, each on its leaf's sharding; as numpy if the leaf has none."""
    import orbax.checkpoint as ocp

    wanted = {name: leaf for name, leaf in wanted.items() if leaf.size}
    if not wanted:
        return {}
    targets = {}
    for name, leaf in wanted.items():
        targets[name] = ocp.RestoreArgs(restore_type=np.ndarray)
        if (sharding := getattr(leaf, "sharding", None)) is not None:
            shape = jax.eval_shape(jax.random.key_data, leaf).shape if _is_key(leaf) else leaf.shape
            targets[name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape)
    args = ocp.args.PyTreeRestore(wanted, restore_args=targets, partial_restore=True)
    return checkpointer.restore(directory, args=args)


def rebuild(tree: Any, values: dict[str, Any]) -> Any:
    """Returns the pytree `tree` with the named `values`, each of the kind that `tree` has: jax, numpy or a number."""
    leaves, treedef = jax.tree.flatten(tree)
    names = named(tree)
    return treedef.unflatten(
        _like(leaf, values.get(name)) for name, leaf in zip(names, leaves, strict=True)
    )


def _like(leaf: Any, value: Any) -> Any:
    if value is None:
        value = np.zeros(leaf.shape, leaf.dtype)
    if _is_key(leaf):
        impl: list[Any] = []  # `key_impl` takes keys and tracers of keys, not their abstract shape
        jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), leaf)
        return jax.random.wrap_key_data(jnp.asarray(value), impl=impl[0])
    if isinstance(value, jax.Array):
        return value
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return jnp.asarray(value) if leaf.sharding is None else jax.device_put(value, leaf.sharding)
    return value if isinstance(leaf, np.ndarray) else type(leaf)(value.item())


def _is_key(leaf: Any) -> bool:
    """Whether a leaf consists of typed PRNG keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _type(dtype: Any, shape: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


@functools.cache
def _silence_orbax() -> None:
    """Hides what Orbax prints of errors that it also raises."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    hook = sys.unraisablehook

    def hook_without_late_writes(unraisable: Any) -> None:
        # When an array's write fails, Orbax closes the event loop that awaits the others, and each prints a traceback.
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = hook_without_late_writes


def _is_news(record: logging.LogRecord) -> bool:
    """A log filter: Orbax logs the errors that it raises, and asyncio every later failed write."""
    error = record.exc_info[1] if record.exc_info else None
    if record.msg.startswith("Global object size logging"):
        return False  # a process's own shards have no global size
    if record.name == "asyncio" and error is not None:
        return files.explain(error) is None
    return record.levelno != logging.ERROR or "orbax" not in record.pathname
