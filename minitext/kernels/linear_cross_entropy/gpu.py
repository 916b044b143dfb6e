"""Output layer and cross-entropy for NVIDIA GPUs: Pallas kernels that JAX lowers to Triton, and products by XLA.

A program computes a tile of the logits and reduces it at once: in the forward pass, to each row's log-sum-exp and
target logit. The backward pass takes the vocabulary in parts. For each part a kernel recomputes the logits and stores
their gradient, and two ordinary products turn that into gradients of x and w. So memory holds one part's gradients and
never the logits, and only the first product is computed twice.

Chapters: 16.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from minitext.kernels.attention.xla import MASKED
from minitext.kernels.linear_cross_entropy import operands
from minitext.kernels.per_device import on_each_device, split
from minitext.kernels.tiles_gpu import (
    LOG2_E,
    Tile,
    call,
    dot,
    fitted,
    load,
    place,
    scaled_exp2,
    side,
    store,
)


class Blocks(NamedTuple):
    """How the work is divided.

    Attributes:
      tile: a tile of the logits, [tokens, columns], and the features per step.
      part: columns of the vocabulary whose gradients are stored at a time.
    """

    tile: Tile
    part: int = 16384


BLOCKS = Blocks(Tile(128, 256, 64, 8, 3))
# Float32 takes twice the memory, and the matrix units don't multiply it.
BLOCKS_F32 = Blocks(Tile(64, 64, 32, 4, 2))


def linear_cross_entropy(
    x_XD, w_DV, targets_X, *, blocks: Blocks | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes `minitext.kernels.linear_cross_entropy`. Tokens may be split over a mesh."""
    blocks = blocks or (BLOCKS_F32 if x_XD.dtype == jnp.float32 else BLOCKS)
    run = partial(_cross_entropy, blocks)
    return on_each_device(run, x_XD, w_DV, targets_X, outs=((2, 1), (2, 1)))


def supports(x_XD, w_DV, targets_X) -> str | None:
    """Returns why the kernels can't compute this, or None."""
    if x_XD.dtype != w_DV.dtype or x_XD.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        types = f"{x_XD.dtype} and {w_DV.dtype}"
        return f"x and w must have the same type, float32, bfloat16 or float16: got {types}"
    if axes := split(w_DV)[1]:
        return f"the vocabulary must not be split over devices: w is split over {axes}"
    return operands.reason(x_XD, w_DV, targets_X)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(blocks: Blocks, x_XD, w_DV, targets_X):
    return _forward(blocks, x_XD, w_DV, targets_X)[0]


def _forward(blocks: Blocks, x_XD, w_DV, targets_X):
    (X, D), V = x_XD.shape, w_DV.shape[1]
    tile = fitted(blocks.tile, X, V, D)
    parts = jax.ShapeDtypeStruct((pl.cdiv(V, tile.columns), X), jnp.float32)
    args = x_XD, w_DV, targets_X.astype(jnp.int32)
    normalizers_YX, targets_YX = _call(_forward_kernel, args, [parts, parts], X, V, tile)
    normalizer_X = jax.nn.logsumexp(normalizers_YX, axis=0)
    out = normalizer_X - jnp.sum(targets_YX, axis=0), normalizer_X
    return out, (x_XD, w_DV, targets_X, normalizer_X)


def _backward(blocks: Blocks, residuals, grads):
    x_XD, w_DV, targets_X, normalizer_X = residuals
    (X, D), V = x_XD.shape, w_DV.shape[1]
    part = min(blocks.part, V)
    rows = normalizer_X, grads[0] + grads[1], grads[0]  # d loss + d normalizer, and d loss alone

    def step(first, size: int, dx_XD, dw_DV):
        w_Dv = jax.lax.dynamic_slice_in_dim(w_DV, first, size, axis=1)
        tile = fitted(blocks.tile, X, size, D)
        args = x_XD, w_Dv, targets_X.astype(jnp.int32) - first, *rows
        out = jax.ShapeDtypeStruct((X, size), x_XD.dtype)
        grad_Xv = _call(_backward_kernel, args, out, X, size, tile)
        dx_XD += _product("Xv,Dv->XD", grad_Xv, w_Dv)
        dw_Dv = _product("XD,Xv->Dv", x_XD, grad_Xv).astype(w_DV.dtype)
        return dx_XD, jax.lax.dynamic_update_slice_in_dim(dw_DV, dw_Dv, first, axis=1)

    carry: Any = jnp.zeros((X, D), jnp.float32), jnp.zeros_like(w_DV)
    carry = jax.lax.fori_loop(0, V // part, lambda i, carry: step(i * part, part, *carry), carry)
    if V % part:
        carry = step(V - V % part, V % part, *carry)
    return carry[0].astype(x_XD.dtype), carry[1], None


_cross_entropy.defvjp(_forward, _backward)


def _product(subscripts: str, a, b):
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _call(kernel, args, out, X: int, V: int, tile: Tile):
    grid = (pl.cdiv(X, tile.rows) * pl.cdiv(V, tile.columns),)
    name = "linear_cross_entropy" + kernel.__name__.removesuffix("_kernel")
    return call(partial(kernel, tile=tile), args, out, grid, tile, name)


def _forward_kernel(x_ref, w_ref, targets_ref, normalizers_ref, found_ref, *, tile: Tile):
    """Computes a tile of logits, and stores its rows' log-sum-exps and the target logits that are in it."""
    y, row, column, logits = _logits(x_ref, w_ref, tile)
    ids = column.start + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    hit = ids == jnp.expand_dims(load(targets_ref, (), row), 1)
    store(found_ref, (y,), jnp.sum(jnp.where(hit, logits, 0.0), axis=1), row)
    if column.end is not None:
        logits = jnp.where(ids < column.end, logits, MASKED)
    most = jnp.max(logits, axis=1)
    total = jnp.sum(scaled_exp2(logits, LOG2_E, -jnp.expand_dims(most * LOG2_E, 1)), axis=1)
    store(normalizers_ref, (y,), most + jnp.log(total), row)


def _backward_kernel(
    x_ref, w_ref, targets_ref, normalizer_ref, both_ref, loss_ref, grad_ref, *, tile: Tile
):
    """Computes a tile of the gradient of the logits."""
    _, row, column, logits = _logits(x_ref, w_ref, tile)
    targets, normalizer, both, loss = (
        jnp.expand_dims(load(ref, (), row), 1)
        for ref in (targets_ref, normalizer_ref, both_ref, loss_ref)
    )
    ids = column.start + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    weights = scaled_exp2(logits, LOG2_E, -normalizer * LOG2_E)
    grad = weights * both - jnp.where(ids == targets, loss, 0.0)
    store(grad_ref, (), grad, row, column)


def _logits(x_ref, w_ref, tile: Tile):
    """Returns the program's number among the columns' tiles, its tile's sides, and its logits in float32."""
    (X, D), V = x_ref.shape, w_ref.shape[1]
    x, y = place(pl.program_id(0), pl.cdiv(X, tile.rows), pl.cdiv(V, tile.columns))
    row, column = side(x, tile.rows, X), side(y, tile.columns, V)

    def step(i, logits):
        features = side(i, tile.step, D)
        return logits + dot(load(x_ref, (), row, features), load(w_ref, (), features, column))

    logits = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    return y, row, column, jax.lax.fori_loop(0, pl.cdiv(D, tile.step), step, logits)
