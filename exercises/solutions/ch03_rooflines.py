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
    # BEGIN SOLUTION
    operands, result = subscripts.split("->")
    sizes = {}
    for letters, shape in zip(operands.split(","), shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"{letter} is {sizes[letter]} and {size}")
    # Python's integers have no largest one; NumPy's wrap around at 2**63.
    flops = 2 * math.prod(sizes.values())
    read = sum(math.prod(shape) for shape in shapes)
    written = math.prod(sizes[letter] for letter in result)
    moved = read * jnp.dtype(dtype).itemsize
    moved += written * jnp.dtype(result_dtype).itemsize
    return flops, moved, flops / moved if moved else 0.0
    # END SOLUTION


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
    # BEGIN SOLUTION
    peak, bandwidth = Fraction(peak), Fraction(bandwidth)
    weight_bytes = Fraction(weight_bytes)
    # 2BDF / peak >= (B (D + F) a + D F w) / bandwidth, sorted by B:
    gain = 2 * D * F * bandwidth - peak * activation_bytes * (D + F)
    needed = peak * weight_bytes * D * F
    if needed == 0:
        return 1 if gain >= 0 else None
    return math.ceil(needed / gain) if gain > 0 else None
    # END SOLUTION


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
    # BEGIN SOLUTION
    limits, seconds = [], {"compute": 0.0, "memory": 0.0}
    for op in ops:
        arithmetic = 0.0
        if op["product"]:
            arithmetic = op["flops"] / peaks.get(op["dtype"], peaks["float32"])
        memory = op["bytes"] / bandwidth
        limits.append("compute" if arithmetic > memory else "memory")
        seconds[limits[-1]] += op["runs"] * max(arithmetic, memory)
    total = sum(seconds.values())
    return limits, total, seconds["memory"] / total if total else 0.0
    # END SOLUTION


# EXERCISE 03.count_scan
def matmul_flops(closed_jaxpr):
    """FLOPs of every `dot_general` that a jaxpr runs.

    Args:
      closed_jaxpr: the result of `jax.make_jaxpr(fn)(*args)`.

    Returns:
      A Python int.
    """
    # BEGIN SOLUTION

    def flops(jaxpr):
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # closed or not
        total = 0
        for eqn in jaxpr.eqns:
            params = eqn.params
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = params["dimension_numbers"]
                left = eqn.invars[0].aval.shape
                terms = math.prod(left[axis] for axis in contracted)
                total += 2 * math.prod(eqn.outvars[0].aval.shape) * terms
            elif eqn.primitive.name == "scan":
                total += params["length"] * flops(params["jaxpr"])
            elif eqn.primitive.name == "cond":
                total += max(flops(branch) for branch in params["branches"])
            else:
                # jit and checkpoint call theirs `jaxpr`, functions with rules
                # of their own `call_jaxpr`.
                for name in ("jaxpr", "call_jaxpr"):
                    if name in params:
                        total += flops(params[name])
        return total

    return flops(closed_jaxpr)
    # END SOLUTION


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
    # BEGIN SOLUTION
    best = [(0.0, [])]  # of the first 0, 1, 2, ... operations
    for end in range(1, len(ops) + 1):
        found = []
        weights = flops = results = 0
        for begin in reversed(range(end)):  # the last kernel grows backwards
            weights += ops[begin]["weights"]
            flops += ops[begin]["flops"]
            results += ops[begin]["result"]
            read = ops[begin - 1]["result"] if begin else first
            if end - begin > 1 and read + weights + results > room:
                break  # a longer one holds even more
            moved = read + weights + ops[end - 1]["result"]
            seconds = launch + max(flops / peak, moved / bandwidth)
            before, lengths = best[begin]
            found.append((before + seconds, [*lengths, end - begin]))
        best.append(min(found))
    return best[-1]
    # END SOLUTION
