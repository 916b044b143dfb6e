"""RMSNorm as a Pallas kernel for TPUs: every row is read once, forward and backward.

Chapters: 16.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

# Rows that a kernel computes at a time, so that their sums stay in registers; those of a whole block would be spilled
# to memory. What it needs twice it reads twice, because holding a wide strip meanwhile would take all registers.
# Registers hold 8 rows of float32 or 16 of bfloat16.
STRIP = 16
# Bytes of a block at most. The backward pass holds three blocks, each twice: one is computed while the next is loaded
# or stored. That is 6 MiB of the 16 that every chip gives a program; wide rows are spilled to the rest.
BLOCK_BYTES = 2**20


class Blocks(NamedTuple):
    """Block sizes.

    Attributes:
      rows: rows of a block, at most; wide rows make it fewer.
    """

    rows: int = 128


DEFAULT = Blocks()


def rms_norm(
    x: jax.Array, scale_D: jax.Array, eps: float = 1e-6, blocks: Blocks = DEFAULT
) -> jax.Array:
    """RMSNorm as `minitext.kernels.rms_norm` defines it; on a mesh each device takes its own rows."""

    def local(x, scale_D):
        x_XD = jnp.reshape(x, (-1, x.shape[-1]))
        return jnp.reshape(_rms_norm(x_XD, scale_D, eps, blocks), x.shape)

    if jax.sharding.get_abstract_mesh().empty:
        return local(x, scale_D)
    # Without types of what varies over devices, the scale's gradient is summed over all of them.
    spec, whole = jax.typeof(x).sharding.spec, PartitionSpec(None)
    return jax.shard_map(local, in_specs=(spec, whole), out_specs=spec, check_vma=False)(x, scale_D)


def supports(x, scale_D, _eps=1e-6) -> str | None:
    """Returns the reason why the kernel can't compute this, or None."""
    D = x.shape[-1]
    if x.size == 0:
        return f"it needs at least one row and one feature: got x of shape {x.shape}"
    if _widest(x) < D:
        return f"{STRIP} rows of {x.dtype} must fit on the chip, as they do up to D={_widest(x)}: got D={D}"
    for name, array in (("x", x), ("scale", scale_D)):
        spec = jax.typeof(array).sharding.spec
        if len(spec) == array.ndim and spec[-1] is not None:
            return f"the features of each row must be on one device: those of {name} are split over {spec[-1]}"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x_XD, scale_D, eps: float, blocks: Blocks):
    X, D = x_XD.shape
    rows = _rows(x_XD, blocks)
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


def _forward(x_XD, scale_D, eps, blocks):
    return _rms_norm(x_XD, scale_D, eps, blocks), (x_XD, scale_D)


def _backward(eps, blocks, residuals, grad_XD):
    x_XD, scale_D = residuals
    X, D = x_XD.shape
    rows = _rows(x_XD, blocks)
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
        # In order: all blocks of rows add to one gradient of the scale.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="rms_norm_backward",
    )(x_XD, scale_D[None], grad_XD)
    return grad_x_XD, jnp.sum(grad_scale_8D, axis=0).astype(scale_D.dtype)


_rms_norm.defvjp(_forward, _backward)


def _rows(x_XD, blocks: Blocks) -> int:
    X, D = x_XD.shape
    strips = min(pl.cdiv(X, STRIP), pl.cdiv(blocks.rows, STRIP), _widest(x_XD) // D)
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
        # What is lost is the gradient's part along the row: a longer row gives the same unit.
        along_x1 = inverse_x1 * _mean(grad(rows) * _read(scale_ref) * x(rows))
        unit_xD = x(rows) * inverse_x1
        grad_x_xD = inverse_x1 * (grad(rows) * _read(scale_ref) - unit_xD * along_x1)
        grad_x_ref[rows] = grad_x_xD.astype(grad_x_ref.dtype)
        share_xD = grad(rows) * unit_xD
        if X % len(x_ref):  # beyond the last row memory holds anything
            first = pl.program_id(0) * len(x_ref) + i * STRIP
            row_xD = first + jax.lax.broadcasted_iota(jnp.int32, share_xD.shape, 0)
            share_xD = jnp.where(row_xD < X, share_xD, 0.0)
        # Eight rows apart, as a register holds them: adding those up is left to the end.
        grad_scale_ref[...] += share_xD[:8] + share_xD[8:]


def _strip(i):
    return pl.ds(pl.multiple_of(i * STRIP, STRIP), STRIP)


def _read(ref, rows: Any = ...):
    return ref[rows].astype(jnp.float32)


def _mean(x_xD):
    return jnp.mean(x_xD, axis=-1, keepdims=True)
