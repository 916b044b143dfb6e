"""Grouped matmul for XLA's CPU backend: rows in blocks, each multiplied by its group's matrix.

`jax.lax.ragged_dot` has the same result, but XLA's CPU backend multiplies all rows by all groups' matrices and masks:
G times the work, and G times the memory.

Chapters: 18, 19.
"""

import jax
import jax.numpy as jnp

BLOCK = 128  # rows; measured best among 64, 128 and 256 on two cores of an AMD EPYC
FEW = 16


@jax.custom_vjp
def grouped_matmul(lhs_MK: jax.Array, rhs_GKN: jax.Array, group_sizes_G: jax.Array) -> jax.Array:
    """Computes `minitext.kernels.grouped_matmul`, a block of rows at a time."""
    return _forward(lhs_MK, rhs_GKN, group_sizes_G, "bk,kn->bn")


def _forward(lhs, rhs, sizes_G, product: str) -> jax.Array:
    M, N = lhs.shape[0], rhs.shape[1 if product.endswith("bk") else 2]
    (size, count, first, group, _), padded = _blocks(sizes_G, M), _padded(lhs)

    def body(i, out):
        x = jax.lax.dynamic_slice_in_dim(padded, first[i], size)
        w = jax.lax.dynamic_index_in_dim(rhs, group[i], keepdims=False)
        y = jnp.einsum(product, x, w, preferred_element_type=jnp.float32).astype(out.dtype)
        # What a group's last block writes past the group's end, the next group's blocks overwrite.
        return jax.lax.dynamic_update_slice_in_dim(out, y, first[i], 0)

    # Zeros like the rows: with manual mesh axes, they vary along the same axes as the rows.
    start = jnp.zeros_like(padded, shape=(padded.shape[0], N))
    out_MN = jax.lax.fori_loop(0, count, body, start)[:M]
    return jnp.where((jnp.arange(M) < jnp.sum(sizes_G))[:, None], out_MN, 0)


def _transposed(lhs_MK, grad_MN, sizes_G) -> jax.Array:
    """Returns each group's rows, transposed, times their gradients: [G, K, N] in float32."""
    (M, K), N = lhs_MK.shape, grad_MN.shape[1]
    size, count, first, group, rows = _blocks(sizes_G, M)
    lhs, grad = _padded(lhs_MK), _padded(grad_MN)

    def body(i, out):
        own = (jnp.arange(size) < rows[i])[:, None]
        x = jnp.where(own, jax.lax.dynamic_slice_in_dim(lhs, first[i], size), 0)
        # Without the barrier XLA leaves the transposition to the product, which makes it slower.
        x_kb = jax.lax.optimization_barrier(x.T[None])[0]
        # Mask both factors: rows past the last group may be NaN.
        y = jnp.where(own, jax.lax.dynamic_slice_in_dim(grad, first[i], size), 0)
        y = jnp.einsum("kb,bn->kn", x_kb, y, preferred_element_type=jnp.float32)
        sum_KN = y + jax.lax.dynamic_index_in_dim(out, group[i], keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(out, sum_KN, group[i], 0)

    start = jnp.zeros_like(grad, shape=(len(sizes_G), K, N), dtype=jnp.float32)
    return jax.lax.fori_loop(0, count, body, start)


def _backward(residuals, grad_MN):
    lhs, rhs, sizes_G = residuals
    grad_lhs = _forward(grad_MN, rhs, sizes_G, "bn,kn->bk")
    return grad_lhs, _transposed(lhs, grad_MN, sizes_G).astype(rhs.dtype), None


grouped_matmul.defvjp(lambda *args: (grouped_matmul(*args), args), _backward)


def _block_size(M: int) -> int:
    # A row's bits must not depend on the number of other rows, but XLA's order of summation depends on the shape. So
    # all blocks have the same shape. Few rows are those of a generated token.
    return BLOCK if M > FEW else FEW


def _blocks(sizes_G: jax.Array, M: int):
    """Divides each group into blocks, from its first row on.

    Returns:
      The rows per block; the number of blocks; and for each block its first row, its group, and how many of its rows
      belong to the group. These arrays may have room for more blocks than there are.
    """
    size, G = _block_size(M), len(sizes_G)
    count_G = (sizes_G + size - 1) // size
    ends_G, starts_G = jnp.cumsum(count_G), jnp.cumsum(sizes_G) - sizes_G
    number = jnp.arange(M // size + G)
    group = jnp.minimum(jnp.searchsorted(ends_G, number, side="right"), G - 1)
    inside = (number - (ends_G - count_G)[group]) * size
    rows = jnp.clip(sizes_G[group] - inside, 0, size)
    return size, ends_G[-1], starts_G[group] + inside, group, rows


def _padded(x: jax.Array) -> jax.Array:
    """Appends rows of zeros, so every block is full."""
    return jnp.pad(x, ((0, _block_size(len(x))), (0, 0)))
