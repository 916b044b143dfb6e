"""Slots of a buffer in which tokens wait for their experts.

Chapters: 18.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Placement(NamedTuple):
    """A one-to-one map between A assignments and the slots of a buffer, with places left over on both sides.

    Attributes:
      slot_A: [A] each assignment's slot; the number of slots where it has none.
      assignment_S: [S] each slot's assignment; the number of assignments where it is empty.
    """

    slot_A: jax.Array
    assignment_S: jax.Array

    @staticmethod
    def of(assignments: jax.Array, slots: jax.Array, size: int) -> "Placement":
        """Places assignment `assignments[i]`, all A of them in any order, in slot `slots[i]` of `size`, if below."""
        A = len(assignments)
        empty = jnp.zeros_like(slots, shape=(size,)) + A
        return Placement(
            jnp.zeros_like(slots).at[assignments].set(slots),
            empty.at[slots].set(assignments, mode="drop"),
        )

    def dispatch(self, x_XD: jax.Array, k: int) -> jax.Array:
        """Returns [S, D]: in each slot its token's vector, zero in an empty one; assignment a is of token a // k."""
        return _take(x_XD, self.assignment_S // k, jnp.reshape(self.slot_A, (-1, k)))

    def back(self, rows_SD: jax.Array) -> jax.Array:
        """Returns [A, D]: for each assignment its slot's row, zero if it has none."""
        return _take(rows_SD, self.slot_A, self.assignment_S[:, None])

    def combine(self, rows_SD: jax.Array, weights_Xk: jax.Array) -> jax.Array:
        """Returns [X, D]: each token's sum of its slots' rows, weighted; an assignment without a slot adds nothing."""
        X, k = weights_Xk.shape
        rows_XkD = jnp.reshape(self.back(rows_SD), (X, k, -1)).astype(jnp.float32)
        return jnp.sum(rows_XkD * weights_Xk[..., None], axis=1).astype(rows_SD.dtype)


# Autodiff's gradient of a gather is a scatter, a loop over rows on a CPU and slow on a TPU. The map is one-to-one, so
# the gradient is a gather, too.
@jax.custom_vjp
def _take(x_ND: jax.Array, from_M: jax.Array, to_NK: jax.Array) -> jax.Array:
    """Row `from_M[m]` of x in row m, zeros where there is no such row; `to_NK` has the m of which that is true."""
    return x_ND.at[from_M].get(mode="fill", fill_value=0)


_take.defvjp(
    lambda x_ND, from_M, to_NK: (_take(x_ND, from_M, to_NK), to_NK),
    lambda to_NK, grad_MD: (
        jnp.sum(grad_MD.at[to_NK].get(mode="fill", fill_value=0), axis=1),
        None,
        None,
    ),
)
