"""The grouped matrix product in XLA: the reference for the kernels, and what runs where no kernel does.

Chapters: 18, 19.
"""

import jax
import jax.numpy as jnp


def grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G) -> jax.Array:
    """Computes `minitext.kernels.grouped_matmul` with `jax.lax.ragged_dot`.

    The TPU's compiler has a program for it. On a CPU and for an H100, all rows are multiplied by all matrices, with
    zeros for the rows of other groups, which is G times the necessary work.
    """
    owned_M1 = jnp.arange(lhs_MK.shape[0])[:, None] < jnp.sum(group_sizes_G)
    out_MN = jax.lax.ragged_dot(
        # Zeros for rows that no group owns: JAX doesn't promise to leave them out of the products and gradients.
        jnp.where(owned_M1, lhs_MK, 0),
        rhs_GKN,
        group_sizes_G,
        precision=jax.lax.Precision.HIGHEST if lhs_MK.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return jnp.where(owned_M1, out_MN, 0).astype(lhs_MK.dtype)


def plain_grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G) -> jax.Array:
    """Computes the same with the bare product, whose types follow from the factors: Qwix's own supports no others."""
    owned_M1 = jnp.arange(lhs_MK.shape[0])[:, None] < jnp.sum(group_sizes_G)
    out_MN = jax.lax.ragged_dot(jnp.where(owned_M1, lhs_MK, 0), rhs_GKN, group_sizes_G)
    return jnp.where(owned_M1, out_MN, 0)
