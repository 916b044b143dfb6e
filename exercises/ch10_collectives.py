import jax
import jax.numpy as jnp


# EXERCISE 10.ring_all_reduce
def ring_all_reduce(x_N, axis):
    """Give each device the sum over a mesh axis, by permutes to the right.

    Args:
      x_N: [N], this device's numbers; N is a multiple of the number of devices
        n on the axis.
      axis: name of the mesh axis.

    Returns:
      [N], of x_N's dtype: the sum.
    """
    # YOUR CODE HERE
    raise NotImplementedError("10.ring_all_reduce")


# EXERCISE 10.byte_predictor
def predicted_bytes(kind, group, shape, dtype):
    """Bytes that each device sends in one collective.

    Args:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or
        "collective-permute".
      group: Python int, devices in a group.
      shape: tuple of Python ints, the operand's shape on one device.
      dtype: JAX's name for its dtype, such as "bfloat16".

    Returns:
      A Python int or float.
    """
    # YOUR CODE HERE
    raise NotImplementedError("10.byte_predictor")


# EXERCISE 10.all_to_all_transpose
def distributed_transpose(x_RN, axis):
    """Transpose a matrix that is split by rows, and return this device's rows.

    Args:
      x_RN: [M/n, N], this device's rows of a matrix [M, N]; n devices are on
        the axis, and n divides M and N.
      axis: name of the mesh axis.

    Returns:
      [N/n, M], this device's rows of the transpose [N, M].
    """
    # YOUR CODE HERE
    raise NotImplementedError("10.all_to_all_transpose")


# EXERCISE 10.collective_matmul
def gather_while_multiplying(x_RD, w_DC, axis):
    """Multiply rows of x while they go round; return own columns of x @ w.

    Args:
      x_RD: [B/n, D], this device's rows of x [B, D]; n devices are on the axis.
      w_DC: [D, F/n], this device's columns of w [D, F].
      axis: name of the mesh axis.

    Returns:
      [B, F/n], of x_RD's dtype.
    """
    # YOUR CODE HERE
    raise NotImplementedError("10.collective_matmul")
