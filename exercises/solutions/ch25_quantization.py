import re

import jax
import jax.numpy as jnp
import numpy as np


# EXERCISE 25.absmax
def absmax(x_RC, shared, block):
    """Quantizes a matrix to int8 with the scale of the largest number.

    Args:
      x_RC: [R, C] float32 or bfloat16.
      shared: "tensor", "row" or "block": which numbers share a scale.
      block: the length of a block, at least 1; used by "block" alone.

    Returns:
      (values_RC, scale): int8 from -127 to 127, and float32 of shape [1, 1],
      [R, 1] or [R, ceil(C / block)].
    """
    # BEGIN SOLUTION
    R, C = x_RC.shape
    rows = 1 if shared == "tensor" else R
    x_RN = jnp.reshape(x_RC.astype(jnp.float32), (rows, -1))
    N = x_RN.shape[1]
    size = block if shared == "block" else N
    x_RBS = jnp.pad(x_RN, ((0, 0), (0, -N % size))).reshape(rows, -1, size)
    largest_RB = jnp.max(jnp.abs(x_RBS), axis=-1)
    scale_RB = jnp.where(largest_RB > 0, largest_RB / 127, 1.0)
    values_RBS = jnp.round(x_RBS / scale_RB[..., None])
    values_RC = values_RBS.reshape(rows, -1)[:, :N].reshape(R, C)
    return values_RC.astype(jnp.int8), scale_RB
    # END SOLUTION


# EXERCISE 25.int8_matmul
def int8_matmul(x_TD, w_DF):
    """Multiplies int8 numbers, in the forward and in the backward pass.

    Args:
      x_TD: [T, D] tokens, float32 or bfloat16.
      w_DF: [D, F] weights, float32.

    Returns:
      [T, F] in the type of x_TD. The gradients have the types of x_TD and w_DF.
    """
    # BEGIN SOLUTION
    return _product(x_TD, w_DF)


def _quantized(x, axis):
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(x / scale).astype(jnp.int8), scale


def _int8_dot(a_MK, b_KN):
    # Numbers along K share a scale, because the product sums over K.
    (a, a_scale_M1), (b, b_scale_1N) = _quantized(a_MK, 1), _quantized(b_KN, 0)
    sums_MN = jnp.dot(a, b, preferred_element_type=jnp.int32)
    return sums_MN.astype(jnp.float32) * a_scale_M1 * b_scale_1N


@jax.custom_vjp
def _product(x_TD, w_DF):
    return _int8_dot(x_TD, w_DF).astype(x_TD.dtype)


def _backward(kept, grad_TF):
    x_TD, w_DF = kept
    grad_x = _int8_dot(grad_TF, w_DF.T)
    grad_w = _int8_dot(x_TD.T, grad_TF)
    return grad_x.astype(x_TD.dtype), grad_w.astype(w_DF.dtype)


_product.defvjp(lambda x, w: (_product(x, w), (x, w)), _backward)
# END SOLUTION


# EXERCISE 25.stochastic_rounding
def quantize_at_random(x_RC, key):
    """Quantizes rows to int8, and rounds so that the mean is exact.

    Args:
      x_RC: [R, C] float32.
      key: a JAX random key.

    Returns:
      (values_RC, scale_R1): int8 from -127 to 127, and float32.
    """
    # BEGIN SOLUTION
    largest_R1 = jnp.max(jnp.abs(x_RC), axis=1, keepdims=True)
    scale_R1 = jnp.where(largest_R1 > 0, largest_R1 / 127, 1.0)
    noise_RC = jax.random.uniform(key, x_RC.shape)
    values_RC = jnp.floor(x_RC / scale_R1 + noise_RC)
    return jnp.clip(values_RC, -127, 127).astype(jnp.int8), scale_R1
    # END SOLUTION


# EXERCISE 25.find_wide
def find_wide(text):
    """Finds the products of a compiled program that were not quantized.

    Args:
      text: a module in XLA's text form.

    Returns:
      List of (where, left, right), in the order of the text: the op_name ("" if
      there is none) and the types of both factors, such as "bf16".
    """
    # BEGIN SOLUTION
    found, types = [], {}
    for line in text.splitlines():
        if line.endswith("{"):
            types = {}  # a computation begins, with names of its own
        parts = re.match(
            r"\s*(?:ROOT )?%(\S+) = (\w+)\[\S* ([\w-]+)\(([^)]*)\)", line
        )
        if parts is None:
            continue
        name, kind, opcode, operands = parts.groups()
        types[name] = kind
        if opcode in ("dot", "convolution"):
            left, right = (
                types[o] for o in re.findall(r"%([^\s,]+)", operands)
            )
            if not all(
                re.match(r"[su][48]$|f8", kind) for kind in (left, right)
            ):
                where = re.search(r'op_name="([^"]*)"', line)
                found.append((where[1] if where else "", left, right))
    return found
    # END SOLUTION


# EXERCISE 25.feedback
def round_with_feedback(w_DF, x_ND, damp):
    """Rounds weights to 4 bits so that the product with x changes little.

    Args:
      w_DF: [D, F] weights, NumPy float32.
      x_ND: [N, D] inputs of the layer, NumPy float32.
      damp: a positive number.

    Returns:
      (values_DF, scale_F): int8 from -7 to 7, and float32: the weights are
      about values_DF * scale_F.
    """
    # BEGIN SOLUTION
    D = len(w_DF)
    left_DF, x_ND = w_DF.astype(np.float64), x_ND.astype(np.float64)
    largest_F = np.abs(left_DF).max(0)
    scale_F = np.where(largest_F > 0, largest_F / 7, 1.0)
    h_DD = x_ND.T @ x_ND + damp * np.eye(D)
    values_DF = np.zeros(w_DF.shape)
    for d in range(D):
        values_DF[d] = np.clip(np.round(left_DF[d] / scale_F), -7, 7)
        error_F = left_DF[d] - values_DF[d] * scale_F
        later = slice(d + 1, D)
        share_R = np.linalg.solve(h_DD[later, later], h_DD[later, d])
        left_DF[later] += np.outer(share_R, error_F)
    return values_DF.astype(np.int8), scale_F.astype(np.float32)
    # END SOLUTION
