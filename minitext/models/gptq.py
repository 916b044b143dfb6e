"""GPTQ: weights rounded one input after another, each rounding error passed on to the inputs that come after.

A product's error is what counts, not a weight's. With the second moments H = X^T X of inputs X from real text, the
error of outputs X (W - Q) is the sum over outputs of (w - q)^T H (w - q). Rounding the weights of one input changes
the best values of those not yet rounded, by a step that the inverse of H gives (Frantar et al. 2023, "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", algorithm 1). A block's scales are set when its
first input is reached.

Chapters: 25.
"""

from functools import partial

import jax
import jax.numpy as jnp

from minitext.models.quantization import Quantized
from minitext.models.quantized_storage import decode, encode, in_blocks, scales

DAMPING = 0.01  # of the mean second moment, added to each: an input that is always 0 has no inverse
# Of the largest number, among which a block's scale is chosen.
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


@partial(jax.jit, static_argnames=("kind", "block"))
def store_calibrated(
    w_DF: jax.Array, moments_DD: jax.Array, *, kind: str, block: int | None
) -> Quantized:
    """Returns what `quantized_storage.store` does of a weight [D, F], rounded for inputs with these second moments.

    Args:
      w_DF: float32.
      moments_DD: sums of products of two inputs over the tokens of a text, float32.
      kind: as in `store`.
      block: as in `store`.
    """
    D = w_DF.shape[0]
    blocks_NBF = in_blocks(w_DF, block)
    N, B = blocks_NBF.shape[:2]
    upper = _inverse_factor(moments_DD)
    filled = N * B - D  # inputs that fill up the last block depend on no others
    ends = jnp.concatenate([jnp.zeros(D), jnp.ones(filled)])
    upper = jnp.pad(upper, (0, filled)) + jnp.diag(ends)
    importance_N = jnp.reshape(jnp.pad(jnp.diag(moments_DD), (0, filled)), (N, B, 1))

    def one_block(w_NBF, number):
        w_BF = w_NBF[number]
        scale_1F = _best_scale(w_BF, importance_N[number], kind, block)
        start = number * B
        rows_BD = jax.lax.dynamic_slice_in_dim(upper, start, B)
        own_BB = jax.lax.dynamic_slice_in_dim(rows_BD, start, B, axis=1)

        def one_input(carry, i):
            w_BF, errors_BF = carry
            w_F = w_BF[i]
            rounded_F = _rounded(w_F[None], kind, scale_1F)[0]
            error_F = (w_F - rounded_F) / own_BB[i, i]
            # Inputs before this one have zeros in its row.
            return (w_BF - own_BB[i][:, None] * error_F, errors_BF.at[i].set(error_F)), rounded_F

        zeros = jnp.zeros_like(w_BF)
        (_, errors_BF), rounded_BF = jax.lax.scan(one_input, (w_BF, zeros), jnp.arange(B))
        change = jnp.einsum("BD,BF->DF", rows_BD, errors_BF)
        return w_NBF - jnp.reshape(change, w_NBF.shape), (rounded_BF, scale_1F)

    _, (rounded_NBF, scale_N1F) = jax.lax.scan(one_block, blocks_NBF, jnp.arange(N))
    return Quantized(encode(rounded_NBF, kind, scale_N1F), scale_N1F)


def _inverse_factor(moments_DD: jax.Array) -> jax.Array:
    """Returns the upper triangular U with U^T U the inverse of the damped second moments."""
    mean = jnp.mean(jnp.diag(moments_DD))
    damped = moments_DD + (DAMPING * mean + jnp.finfo(jnp.float32).tiny) * jnp.eye(len(moments_DD))
    inverse = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(damped), True), jnp.eye(len(damped)))
    return jnp.linalg.cholesky((inverse + inverse.T) / 2).T


def _rounded(w_BF: jax.Array, kind: str, scale_1F: jax.Array) -> jax.Array:
    """Returns the nearest stored numbers to weights that share the scale of their column, times the scale."""
    numbers = decode(encode(w_BF, kind, scale_1F), kind, len(w_BF))
    return numbers * scale_1F.astype(jnp.float32)


def _best_scale(
    w_BF: jax.Array, importance_B1: jax.Array, kind: str, block: int | None
) -> jax.Array:
    """Returns the scales [1, F] with the least error, each input weighted by its second moment."""
    largest_1F = scales(w_BF, kind, block)
    tried = jnp.stack(
        [(largest_1F.astype(jnp.float32) * s).astype(largest_1F.dtype) for s in SHRINKS]
    )
    errors = [jnp.sum(importance_B1 * (_rounded(w_BF, kind, s) - w_BF) ** 2, axis=0) for s in tried]
    best_1F = jnp.argmin(jnp.stack(errors), axis=0)[None]
    return jnp.take_along_axis(tried, best_1F[None], axis=0)[0]
