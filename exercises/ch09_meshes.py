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
    # YOUR CODE HERE
    raise NotImplementedError("09.spec_puzzle")


# EXERCISE 09.out_sharding
def make_two_layers(case):
    """Return a two-layer computation with exactly one collective.

    Args:
      case: "A", "B", "C" or "D", a row of the table.

    Returns:
      fn(x_BD, w_DF, v_FD) -> y_BD, all float32: relu(x w) v, sharded as the
      row says.
    """
    # YOUR CODE HERE
    raise NotImplementedError("09.out_sharding")


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
    # YOUR CODE HERE
    raise NotImplementedError("09.shard_map_port")


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
    # YOUR CODE HERE
    raise NotImplementedError("09.rules")


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
    # YOUR CODE HERE
    raise NotImplementedError("09.route")
