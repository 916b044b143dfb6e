import math
from fractions import Fraction

import jax.numpy as jnp


# EXERCISE 03.intensity
def einsum_cost(subscripts, shapes, dtype, result_dtype):
    """FLOPs, bytes and intensity of a product of two arrays.

    Args:
      subscripts: such as "BTD,DF->BTF": one letter a dimension, no spaces, no
        letter twice in one operand. A letter that only one operand has is in
        the result too.
      shapes: two tuples of Python ints, the operands' shapes.
      dtype: JAX's name of the operands' dtype, such as "bfloat16" or "int8".
      result_dtype: JAX's name of the result's dtype.

    Returns:
      (flops, bytes, intensity): two exact Python ints, and a float in FLOPs
      per byte.

    Raises:
      ValueError: a letter has two sizes; the message has the letter.
    """
    # YOUR CODE HERE
    raise NotImplementedError("03.intensity")


# EXERCISE 03.crossover_batch
def crossover_batch(D, F, peak, bandwidth, activation_bytes, weight_bytes):
    """The smallest batch at which `BD,DF->BF` no longer waits for memory.

    Args:
      D: size of the dimension that is summed, a Python int.
      F: size of the other dimension of the weights, a Python int.
      peak: FLOP/s, a Python int or a float that holds one.
      bandwidth: bytes/s, a Python int or a float that holds one.
      activation_bytes: bytes per number in the input and the result, an int.
      weight_bytes: bytes per weight: 4, 2, 1, 0.5, or 0 if the weights need
        not be read.

    Returns:
      A Python int, at least 1, or None if no batch is large enough.
    """
    # YOUR CODE HERE
    raise NotImplementedError("03.crossover_batch")


# EXERCISE 03.classify
def predict_time(ops, peaks, bandwidth):
    """Each operation's limit, the total time, and the share spent on memory.

    Args:
      ops: list of dicts with
        "flops", "bytes": floats, of one run;
        "runs": how often it runs;
        "dtype": of its operands, a name;
        "product": whether the matrix unit does it.
      peaks: FLOP/s of the matrix unit by dtype; "float32" is always there.
      bandwidth: bytes/s.

    Returns:
      (limits, seconds, memory_share): a list with "compute" or "memory" for
      each operation, the total time in seconds, and the share of it, from 0 to
      1, taken by operations that wait for memory.
    """
    # YOUR CODE HERE
    raise NotImplementedError("03.classify")


# EXERCISE 03.count_scan
def matmul_flops(closed_jaxpr):
    """FLOPs of every `dot_general` that a jaxpr runs.

    Args:
      closed_jaxpr: the result of `jax.make_jaxpr(fn)(*args)`.

    Returns:
      A Python int.
    """
    # YOUR CODE HERE
    raise NotImplementedError("03.count_scan")


# EXERCISE 03.cut
def cut_program(ops, first, room, peak, bandwidth, launch):
    """Cut a chain of operations into the kernels that take the least time.

    Args:
      ops: list of dicts in the order in which they run. Each reads the result
        of the one before, and has
        "flops": a float;
        "weights": bytes of its weights, which it reads as well;
        "result": bytes of its result.
      first: bytes of the input that the first operation reads.
      room: bytes that a kernel can hold on the chip.
      peak: FLOP/s.
      bandwidth: bytes/s.
      launch: seconds that each kernel costs before it does anything.

    Returns:
      (seconds, lengths): the time of the whole program, and a list with the
      number of operations in each kernel, in order.
    """
    # YOUR CODE HERE
    raise NotImplementedError("03.cut")
