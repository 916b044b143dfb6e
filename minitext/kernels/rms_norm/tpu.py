"""RMSNorm as a Pallas kernel for TPUs, which reads every row once, forward and backward.

Chapters: 16.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.kernels.rms_norm import operands

# Rows that a kernel computes at a time. Their sums stay in registers, where those of a whole block would spill to
# memory. Values needed twice are read twice, because holding a wide strip in between would take all registers.
# A register holds 8 rows of float32 or 16 of bfloat16.
STRIP = 16
# Upper bound of a block's bytes. The backward pass keeps three blocks, each twice: it computes on one while the other
# is loaded or stored. That is 6 MiB of the 16 that every chip gives a program; wide rows spill into the rest.
BLOCK_BYTES = 2**20


def rms_norm(x, scale_D, eps: float = 1e-6, *, rows: int = 128) -> jax.Array:
    """Computes `minitext.kernels.rms_norm`, at most `rows` rows at a time; wide rows leave room for fewer.

    On a mesh each device takes its own rows.
    """
    return operands.by_rows(partial(_rms_norm, eps, rows), x, scale_D)


def supports(x, scale_D, _eps=1e-6) -> str | None:
    """Returns why the kernel can't compute this, or None."""
    if _widest(x) < (D := x.shape[-1]):
        return f"{STRIP} rows of {x.dtype} must fit on the chip, as they do up to D={_widest(x)}: got D={D}"
    return operands.reason(x, scale_D)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(eps: float, most: int, x_XD, scale_D):
    (X, D), rows = x_XD.shape, _rows(x_XD, most)
    block, scale = pl.BlockSpec((rows, D), lambda i: (i, 0)), pl.BlockSpec((1, D), lambda i: (0, 0))
    return pl.pallas_call(
        partial(_forward_kernel, eps=eps),
        grid=(pl.cdiv(X, rows),),
        in_specs=[block, scale],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((X, D), x_XD.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="rms_norm",
    )(x_XD, scale_D[None])


def _backward(eps: float, most: int, residuals, grad_XD):
    x_XD, scale_D = residuals
    (X, D), rows = x_XD.shape, _rows(x_XD, most)
    block, scale = pl.BlockSpec((rows, D), lambda i: (i, 0)), pl.BlockSpec((1, D), lambda i: (0, 0))
    grad_x_XD, grad_scale_8D = pl.pallas_call(
        partial(_backward_kernel, eps=eps, X=X),
        grid=(pl.cdiv(X, rows),),
        in_specs=[block, scale, block],
        out_specs=[block, pl.BlockSpec((8, D), lambda i: (0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((X, D), x_XD.dtype),
            jax.ShapeDtypeStruct((8, D), jnp.float32),
        ],
        # In order, because all blocks of rows add to one gradient of the scale.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="rms_norm_backward",
    )(x_XD, scale_D[None], grad_XD)
    return grad_x_XD, jnp.sum(grad_scale_8D, axis=0).astype(scale_D.dtype)


_rms_norm.defvjp(lambda *args: (_rms_norm(*args), args[2:]), _backward)


def _rows(x_XD, most: int) -> int:
    X, D = x_XD.shape
    strips = min(pl.cdiv(X, STRIP), pl.cdiv(most, STRIP), _widest(x_XD) // D)
    return strips * STRIP


def _widest(x) -> int:
    return BLOCK_BYTES // STRIP // x.dtype.itemsize


def _forward_kernel(x_ref, scale_ref, y_ref, *, eps: float):
    @pl.loop(0, len(x_ref) // STRIP)
    def _(i):
        rows = _strip(i)
        inverse_x1 = jax.lax.rsqrt(_mean(jnp.square(_read(x_ref, rows))) + eps)
        y_ref[rows] = (_read(x_ref, rows) * inverse_x1 * _read(scale_ref)).astype(y_ref.dtype)


def _backward_kernel(x_ref, scale_ref, grad_ref, grad_x_ref, grad_scale_ref, *, eps: float, X: int):
    @pl.when(pl.program_id(0) == 0)
    def _():
        grad_scale_ref[...] = jnp.zeros_like(grad_scale_ref)

    @pl.loop(0, len(x_ref) // STRIP)
    def _(i):
        rows, x, grad = _strip(i), partial(_read, x_ref), partial(_read, grad_ref)
        inverse_x1 = jax.lax.rsqrt(_mean(jnp.square(x(rows))) + eps)
        # The gradient loses its part along the row, because a longer row has the same direction.
        along_x1 = inverse_x1 * _mean(grad(rows) * _read(scale_ref) * x(rows))
        unit_xD = x(rows) * inverse_x1
        grad_x_xD = inverse_x1 * (grad(rows) * _read(scale_ref) - unit_xD * along_x1)
        grad_x_ref[rows] = grad_x_xD.astype(grad_x_ref.dtype)
        share_xD = grad(rows) * unit_xD
        if X % len(x_ref):  # memory beyond the last row can hold anything
            first = pl.program_id(0) * len(x_ref) + i * STRIP
            row_xD = first + jax.lax.broadcasted_iota(jnp.int32, share_xD.shape, 0)
            share_xD = jnp.where(row_xD < X, share_xD, 0.0)
        # The eight rows of a register stay apart and are added up at the very end.
        grad_scale_ref[...] += share_xD[:8] + share_xD[8:]


def _strip(i):
    return pl.ds(pl.multiple_of(i * STRIP, STRIP), STRIP)


def _read(ref, rows: Any = ...):
    return ref[rows].astype(jnp.float32)


def _mean(x_xD):
    return jnp.mean(x_xD, axis=-1, keepdims=True)
