import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


# EXERCISE 09.spec_puzzle
def place(shape, mesh, spec, itemsize, index):
    """Compute how an array is stored on a mesh.

    Args:
      shape: the array's, a tuple of Python ints.
      mesh: axis name -> number of devices, in the mesh's order. Devices are
        numbered from 0, the last axis fastest.
      spec: None, a name or a tuple of names for each dimension; trailing
        entries may be missing.
      itemsize: bytes of one number.
      index: of one element, a tuple of Python ints.

    Returns:
      (shard, bytes, copies, holders): the shape of one device's part, its
      bytes, how many devices hold the same part, and the numbers of all
      devices that hold the element, ascending.

    Raises:
      ValueError: no array can be stored this way.
    """
    # BEGIN SOLUTION
    if len(spec) > len(shape):
        raise ValueError(f"{len(spec)} entries for {len(shape)} dimensions")
    spec = (*spec, *[()] * (len(shape) - len(spec)))
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    named = [axis for entry in entries for axis in entry]
    for axis in named:
        if axis not in mesh:
            raise ValueError(f"the mesh has no axis {axis!r}")
        if named.count(axis) > 1:
            raise ValueError(f"axis {axis!r} is named twice")
    shard, wanted = [], {}
    for size, entry, i in zip(shape, entries, index, strict=True):
        parts = math.prod(mesh[axis] for axis in entry)
        if size % parts:
            raise ValueError(f"{size} is not divisible by {parts}")
        shard.append(size // parts)
        number = i // shard[-1]  # of the part; the last of its axes is fastest
        for axis in reversed(entry):
            number, wanted[axis] = divmod(number, mesh[axis])
    holders = []
    for device in range(math.prod(mesh.values())):
        rest, here = device, {}
        for axis in reversed(mesh):
            rest, here[axis] = divmod(rest, mesh[axis])
        if all(here[axis] == place for axis, place in wanted.items()):
            holders.append(device)
    nbytes = math.prod(shard) * itemsize
    return tuple(shard), nbytes, len(holders), tuple(holders)
    # END SOLUTION


# EXERCISE 09.out_sharding
def make_two_layers(case):
    """Return a two-layer computation with exactly one collective.

    Args:
      case: "A", "B", "C" or "D", a row of the table.

    Returns:
      fn(x_BD, w_DF, v_FD) -> y_BD, all float32: relu(x w) v, sharded as the
      row says.
    """
    # BEGIN SOLUTION

    def column_row(x_BD, w_DF, v_FD):
        h_BF = jax.nn.relu(x_BD @ w_DF)
        return jnp.einsum("bf,fd->bd", h_BF, v_FD, out_sharding=P("data", None))

    def column_column(x_BD, w_DF, v_FD):
        # Without the reshard h_BF is gathered too: only one side is split.
        h_BF = jax.nn.relu(x_BD @ w_DF)
        return jax.sharding.reshard(h_BF, P("data", None)) @ v_FD

    def row_whole(x_BD, w_DF, v_FD):
        h_BF = jnp.einsum("bd,df->bf", x_BD, w_DF, out_sharding=P("data", None))
        return jax.nn.relu(h_BF) @ v_FD

    def turned(x_BD, w_DF, v_FD):
        # out_sharding= on the product would gather h_BF, which is wider.
        y_BD = jax.nn.relu(x_BD @ w_DF) @ v_FD
        return jax.sharding.reshard(y_BD, P(None, "data"))

    cases = {"A": column_row, "B": column_column, "C": row_whole, "D": turned}
    return cases[case]
    # END SOLUTION


# EXERCISE 09.shard_map_port
def split_softmax(x_BV, vocab):
    """Softmax over the first `vocab` columns of rows split over devices.

    Args:
      x_BV: float32 [B, V], sharded P("data", "tensor") on the mesh in use.
      vocab: Python int, 1 to V. Columns from here on are padding.

    Returns:
      p_BV: float32 [B, V], sharded like x_BV: padding is 0, and every row adds
        up to 1.
    """
    # BEGIN SOLUTION

    def of_one_device(x_BV):
        first = jax.lax.axis_index("tensor") * x_BV.shape[1]
        is_token_V = first + jnp.arange(x_BV.shape[1]) < vocab
        x_BV = jnp.where(is_token_V, x_BV, -jnp.inf)
        local_B1 = jnp.max(x_BV, axis=1, keepdims=True)
        top_B1 = jax.lax.pmax(jax.lax.stop_gradient(local_B1), "tensor")
        e_BV = jnp.exp(x_BV - top_B1)
        sum_B1 = jnp.sum(e_BV, axis=1, keepdims=True)
        return e_BV / jax.lax.psum(sum_B1, "tensor")

    return jax.shard_map(of_one_device, out_specs=P("data", "tensor"))(x_BV)
    # END SOLUTION


# EXERCISE 09.rules
def spec_of(names, table, sizes, drop=()):
    """Return the PartitionSpec of an array whose dimensions have names.

    Args:
      names: for each dimension a name, or None for one that stays whole.
      table: name -> tuple of mesh axes, possibly empty.
      sizes: mesh axis -> number of devices; it has every axis of the table.
      drop: mesh axes to leave out.

    Returns:
      A PartitionSpec with an entry for each dimension.

    Raises:
      ValueError: a name is unknown, or one axis would split two dimensions.
    """
    # BEGIN SOLUTION
    entries, taken = [], {}
    for name in names:
        if name is not None and name not in table:
            known = ", ".join(sorted(table))
            raise ValueError(f"unknown name {name!r}: choose among {known}")
        axes = () if name is None else table[name]
        axes = [a for a in axes if sizes[a] > 1 and a not in drop]
        for axis in axes:
            if axis in taken:
                both = f"{taken[axis]!r} and {name!r}"
                raise ValueError(f"{both} both claim mesh axis {axis!r}")
            taken[axis] = name
        if len(axes) > 1:
            entries.append(tuple(axes))
        else:
            entries.append(axes[0] if axes else None)
    return P(*entries)
    # END SOLUTION


# EXERCISE 09.route
def cheapest_route(shape, itemsize, mesh, source, target, room):
    """The moves that bring an array from one layout to another in fewest bytes.

    Args:
      shape: tuple of ints, the whole array's shape.
      itemsize: bytes of a number.
      mesh: dict from an axis to its size, 2 or more.
      source: tuple with a tuple of axes for each dimension, major axis first;
        no axis occurs twice.
      target: the layout wanted, likewise.
      room: the largest number of bytes a device can hold of the array.

    Returns:
      (received, layouts): the bytes that a device receives in all, and a list
      of the layouts after each move; None if there is no way.
    """
    # BEGIN SOLUTION
    import heapq

    def block_bytes(layout):
        """Bytes on a device, or None if the layout doesn't divide the array."""
        size = itemsize
        for length, axes in zip(shape, layout, strict=True):
            parts = math.prod(mesh[axis] for axis in axes)
            if length % parts:
                return None
            size *= length // parts
        return size

    def moves(layout):
        size, dims = block_bytes(layout), range(len(shape))
        for i in dims:
            for axis in mesh.keys() - set(sum(layout, ())):  # cut
                yield 0, replace(layout, i, (*layout[i], axis))
            if layout[i]:
                *rest, axis = layout[i]  # only the last one can come off
                without, n = replace(layout, i, tuple(rest)), mesh[axis]
                yield (n - 1) * size, without  # all-gather
                for j in dims:
                    if j != i:  # all-to-all
                        there = replace(without, j, (*layout[j], axis))
                        yield size - size // n, there

    def replace(layout, i, axes):
        return (*layout[:i], axes, *layout[i + 1 :])

    # Dijkstra's algorithm: the cheapest unfinished layout can't get cheaper.
    queue, done = [(0, source, [])], set()
    while queue:
        received, layout, route = heapq.heappop(queue)
        if layout == target:
            return received, route
        if layout in done:
            continue
        done.add(layout)
        for cost, new in moves(layout):
            size = block_bytes(new)
            if size is not None and size <= room:
                heapq.heappush(queue, (received + cost, new, [*route, new]))
    return None
    # END SOLUTION
