"""RMSNorm as a Pallas kernel for NVIDIA GPUs (through Triton), which reads every row once, forward and backward.

A program keeps a whole row in registers. In the backward pass it goes through several rows and sums its share of the
scale's gradient. The shares are added up afterwards in a fixed order, so two runs are bit-equal.

Chapters: 16.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from minitext.kernels.rms_norm import operands
from minitext.kernels.tiles_gpu import Side, load, store

WIDEST = 2**15  # features that fit in one program's registers


class Blocks(NamedTuple):
    """How the work is divided.

    Attributes:
      programs: programs of the backward pass, which share the rows: a few for each of a GPU's multiprocessors.
      warps: warps of a program.
    """

    programs: int = 528
    warps: int = 8


DEFAULT = Blocks()


def rms_norm(x, scale_D, eps: float = 1e-6, *, blocks: Blocks = DEFAULT) -> jax.Array:
    """Computes `minitext.kernels.rms_norm`. On a mesh each device takes its own rows."""
    return operands.by_rows(partial(_rms_norm, eps, blocks), x, scale_D)


def supports(x, scale_D, _eps=1e-6) -> str | None:
    """Returns why the kernel can't compute this, or None."""
    if (D := x.shape[-1]) > WIDEST:
        return f"a row must fit in registers, as up to {WIDEST} features do: got D={D}"
    return operands.reason(x, scale_D)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(eps: float, blocks: Blocks, x_XD, scale_D):
    X, D = x_XD.shape
    row = pl.BlockSpec((None, D), lambda i: (i, 0))
    return pl.pallas_call(
        partial(_forward_kernel, eps=eps),
        grid=(X,),
        in_specs=[row, pl.BlockSpec((D,), lambda _: (0,))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct((X, D), x_XD.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps),
        name="rms_norm",
    )(x_XD, scale_D)


def _backward(eps: float, blocks: Blocks, residuals, grad_XD):
    x_XD, scale_D = residuals
    X, D = x_XD.shape
    programs = min(X, blocks.programs)
    rows = pl.BlockSpec((X, D), lambda _: (0, 0))
    dx_XD, shares_PD = pl.pallas_call(
        partial(_backward_kernel, eps=eps, rows=pl.cdiv(X, programs)),
        grid=(programs,),
        in_specs=[rows, pl.BlockSpec((D,), lambda _: (0,)), rows],
        out_specs=[rows, pl.BlockSpec((None, D), lambda i: (i, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((X, D), x_XD.dtype),
            jax.ShapeDtypeStruct((programs, D), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps),
        name="rms_norm_backward",
    )(x_XD, scale_D, grad_XD)
    return dx_XD, jnp.sum(shares_PD, axis=0).astype(scale_D.dtype)


_rms_norm.defvjp(lambda *args: (_rms_norm(*args), args[2:]), _backward)


def _forward_kernel(x_ref, scale_ref, out_ref, *, eps: float):
    D = len(x_ref)
    x_D, scale_D = _row(x_ref, (), D), _row(scale_ref, (), D)
    inverse = jax.lax.rsqrt(jnp.sum(x_D * x_D) / D + eps)
    store(out_ref, (), x_D * inverse * scale_D, _features(D))


def _backward_kernel(x_ref, scale_ref, grad_ref, dx_ref, share_ref, *, eps: float, rows: int):
    X, D = x_ref.shape
    first = pl.program_id(0) * rows
    scale_D = _row(scale_ref, (), D)

    def step(i, share_D):
        x_D, grad_D = _row(x_ref, (i,), D), _row(grad_ref, (i,), D)
        inverse = jax.lax.rsqrt(jnp.sum(x_D * x_D) / D + eps)
        unit_D, scaled_D = x_D * inverse, grad_D * scale_D
        # The gradient loses its part along the row, because a longer row has the same direction.
        along = jnp.sum(scaled_D * unit_D) / D
        store(dx_ref, (i,), inverse * (scaled_D - unit_D * along), _features(D))
        return share_D + grad_D * unit_D

    last = jnp.minimum(first + rows, X)
    share_D = jax.lax.fori_loop(first, last, step, jnp.zeros_like(scale_D))
    store(share_ref, (), share_D, _features(D))


def _features(D: int) -> Side:
    """All features. The length of a Triton array is a power of two."""
    size = pl.next_power_of_2(D)
    return Side(0, size, None if size == D else D)


def _row(ref, index: tuple, D: int):
    return load(ref, index, _features(D)).astype(jnp.float32)
