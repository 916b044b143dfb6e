import re

import jax
import jax.numpy as jnp

from minitext.compiler import hlo


# EXERCISE 02.count_bytes
def bytes_moved(text):
    """Bytes that one run of a compiled program reads and writes.

    Args:
      text: the optimised module, `compiled.as_text()`.

    Returns:
      (read, written): two Python ints.
    """
    # YOUR CODE HERE
    raise NotImplementedError("02.count_bytes")


# EXERCISE 02.restore_fusion
def make_one_pass(limit):
    """Return a function that scales and clips a gated activation in one kernel.

    Args:
      limit: Python float > 0.

    Returns:
      fn(a_XF, b_XF, scale_F) -> y_XF, all float32: the first result of the
        broken version.
    """
    # YOUR CODE HERE
    raise NotImplementedError("02.restore_fusion")


# EXERCISE 02.read_collective
def bytes_sent(text):
    """Collectives that run, and bytes that each device sends, by kind.

    Args:
      text: an optimised module for several devices.

    Returns:
      {kind: (count, bytes)}: how many collectives of this kind one run
      executes, a Python int, and the bytes that one device sends in all of
      them, a float.
    """
    # YOUR CODE HERE
    raise NotImplementedError("02.read_collective")


# EXERCISE 02.roll_loop
def rolled(x_BD, w_LDD, b_LD):
    """Run L layers of tanh and relu in turn, in a program of constant size.

    Args:
      x_BD: float32 [B, D].
      w_LDD: float32 [L, D, D], L at least 1, even or odd.
      b_LD: float32 [L, D].

    Returns:
      (x_BD, size_L): the last layer's result, and for each layer the root of
      the mean square of its h_BD, float32 [L].
    """
    # YOUR CODE HERE
    raise NotImplementedError("02.roll_loop")
