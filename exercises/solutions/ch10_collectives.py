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
    # BEGIN SOLUTION
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    right = [(i, (i + 1) % n) for i in range(n)]

    def add(step, parts):
        arriving = jax.lax.ppermute(parts[(me - step) % n], axis, right)
        return parts.at[(me - 1 - step) % n].add(arriving)

    def keep(step, parts):
        # Part me + 1 is complete here after the first phase.
        arriving = jax.lax.ppermute(parts[(me + 1 - step) % n], axis, right)
        return parts.at[(me - step) % n].set(arriving)

    parts = x_N.reshape(n, -1)
    parts = jax.lax.fori_loop(0, n - 1, add, parts)
    parts = jax.lax.fori_loop(0, n - 1, keep, parts)
    return parts.reshape(-1)
    # END SOLUTION


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
    # BEGIN SOLUTION
    if group == 1:
        return 0
    own = jnp.dtype(dtype).itemsize
    for size in shape:
        own *= size
    if kind == "collective-permute":
        return own
    if kind == "all-gather":
        return own * (group - 1)  # the whole is group times the operand
    once = own * (group - 1) / group
    return 2 * once if kind == "all-reduce" else once
    # END SOLUTION


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
    # BEGIN SOLUTION
    # Device d needs columns d N/n ... of all devices' rows: [M, N/n].
    columns = jax.lax.all_to_all(
        x_RN, axis, split_axis=1, concat_axis=0, tiled=True
    )
    return columns.T
    # END SOLUTION


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
    # BEGIN SOLUTION
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    right = [(i, (i + 1) % n) for i in range(n)]
    rows = x_RD.shape[0]

    def put(out_BC, x_RD, step):
        owner = (me - step) % n
        return jax.lax.dynamic_update_slice_in_dim(
            out_BC, x_RD @ w_DC, owner * rows, 0
        )

    def trip(step, state):
        out_BC, here_RD = state
        # The next rows travel while these are multiplied; neither depends on
        # the other.
        arriving_RD = jax.lax.ppermute(here_RD, axis, right)
        return put(out_BC, here_RD, step), arriving_RD

    out_BC = jnp.tile(jnp.zeros_like(x_RD[:, :1] * w_DC[:1]), (n, 1))
    out_BC, last_RD = jax.lax.fori_loop(0, n - 1, trip, (out_BC, x_RD))
    return put(out_BC, last_RD, n - 1)
    # END SOLUTION
