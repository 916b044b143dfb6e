"""A pytree's leaves by name: how a checkpoint compares them, and stores and reads them with Orbax.

A dict from names to arrays is all that is stored, so a checkpoint needs none of the classes that
were saved, and a leaf that doesn't match is told by its name.

Chapters: 8.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minitext import files


def named(tree: Any) -> dict[str, Any]:
    """The leaves by name, in their order: {"params.blocks.wq": array, "opt_state.0.count": ...}.

    Python numbers come as numpy arrays; jax arrays and `jax.ShapeDtypeStruct`s as they are.

    Raises:
        TypeError: a leaf is neither an array nor a number.
        ValueError: two leaves have one name (a key contains a dot).
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
    """The shapes, dtypes and partition of named leaves, as JSON."""
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
    """The first leaf whose shape or dtype isn't the saved one, or that is on one side only.

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


def checkpointer(own: bool = False) -> Any:
    """An `orbax.checkpoint.AsyncCheckpointer` that raises its errors without printing them too.

    Args:
        own: whether this process saves and reads its own devices' parts, without the other processes.
    """
    import orbax.checkpoint as ocp  # a quarter of a second, which `import minitext` shouldn't take

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    if not isinstance(sys.unraisablehook, _LateWrites):
        sys.unraisablehook = _LateWrites(sys.unraisablehook)
    # A directory that can't be written fails before anything else is begun.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    if not own:
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)
    # What Orbax's emergency and replicator managers save local copies with.
    me, handlers = jax.process_index(), ocp.type_handlers
    alone = ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={me}, barrier_sync_key_prefix=f"own{me}"
    )
    parts = handlers.ArrayHandler(primary_host=None, replica_id=None, use_replica_parallel=False)
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=alone,
        type_handler_registry=handlers.create_type_handler_registry((jax.Array, parts)),
    )
    return ocp.AsyncCheckpointer(handler, async_options=options, multiprocessing_options=alone)


def storable(leaves: dict[str, Any]) -> dict[str, Any]:
    """What Orbax stores of named leaves.

    PRNG keys are stored as the integers they hold. Orbax refuses arrays of size 0 (`rebuild` makes
    them from their shape) and an empty dict.
    """
    arrays = {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for name, leaf in leaves.items()
        if leaf.size
    }
    return arrays or {"": np.zeros(1, np.int8)}


def on_host(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays in this host's memory, safe from later changes; all of each must be addressable.

    On the CPU no jax array is copied: when a step donates one, XLA sees that it is in use and
    copies it then.
    """
    for array in arrays.values():
        if isinstance(array, jax.Array):
            array.copy_to_host_async()  # all transfers are under way before the first is awaited
    return {
        name: np.asarray(array) if isinstance(array, jax.Array) else array.copy()
        for name, array in arrays.items()
    }


def gather(tree: Any) -> Any:
    """The tree as numpy arrays on every process, whichever processes' devices hold their parts.

    All processes of a job make the call.
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    # One leaf after another, so that a device never holds a second whole tree.
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)


def write(checkpointer: Any, directory: Path, arrays: dict[str, Any]) -> None:
    """Begins to save `storable` arrays in the background."""
    import orbax.checkpoint as ocp

    checkpointer.save(directory, args=ocp.args.PyTreeSave(arrays))


def read(checkpointer: Any, directory: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The saved arrays of named leaves, each on its leaf's sharding; numpy where it has none."""
    import orbax.checkpoint as ocp

    wanted = {name: leaf for name, leaf in wanted.items() if leaf.size}
    if not wanted:
        return {}
    how = {}
    for name, leaf in wanted.items():
        how[name] = ocp.RestoreArgs(restore_type=np.ndarray)
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None:
            shape = jax.eval_shape(jax.random.key_data, leaf).shape if _is_key(leaf) else leaf.shape
            how[name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape)
    args = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
    return checkpointer.restore(directory, args=args)


def rebuild(tree: Any, values: dict[str, Any]) -> Any:
    """The pytree `tree` with the named `values`, of the kind `tree` has: jax, numpy or a number."""
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
    """Whether a leaf is of typed PRNG keys, which are stored as the integers they hold."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _type(dtype: Any, shape: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _is_news(record: logging.LogRecord) -> bool:
    """A log filter: what Orbax raises, it logs as well, and asyncio each further failed write."""
    error = record.exc_info[1] if record.exc_info else None
    if record.msg.startswith("Global object size logging"):
        return False  # own parts alone have no global size
    if record.name == "asyncio" and error is not None:
        return files.explain(error) is None
    return record.levelno != logging.ERROR or "orbax" not in record.pathname


class _LateWrites:
    """Python's hook for errors nobody can catch, less those of writes that end after a failed one.

    When one array's write fails, Orbax closes the event loop that awaits the others, and each of
    them then prints a traceback.
    """

    def __init__(self, hook: Callable[[Any], None]):
        self.hook = hook

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.hook(unraisable)
