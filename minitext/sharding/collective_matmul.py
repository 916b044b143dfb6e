"""Matrix products that overlap with their collective: rows or sums travel around a ring while others are multiplied.

A layer split over a mesh axis gathers rows before its first product and reduce-scatters sums after its last. Done one
after the other, the collective and the product wait for each other. Cut into one part per device, they overlap: while a
part travels, another is multiplied (Wang et al. 2023; Austin et al. 2025, parts 3 and 5). Half of each part travels in
each direction, which uses both of a chip's links on the axis and halves the time of a trip.

Call both functions inside a `jax.shard_map` that is manual over all axes that split their arguments. Each is the
other's transpose, so gradients use the same rings. Gathered rows aren't kept for the weight's gradient; they travel
around the ring again (as in Korthikanti et al. 2022). The rings are unrolled, with 2(n-1) permutes for n devices:
libtpu 0.0.51 estimates 0.4 to 0.9 of the cycles of a loop that hides as much.

The model leaves its products to the compiler, which does part of this. In a `tp_seq` step for eight v5e chips (one
layer of width 2048) libtpu turns some products into rings. Blocking collectives still send two fifths of the bytes:
some gathers and all remaining reduce-scatters. The rings here have costs too, since products are smaller and sums pass
through memory. By libtpu's estimates they pay off where the collective takes as long as the product.

Shapes: X rows in all, R = X/n of them on a device; D is summed over.

Chapters: 10, 12.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def gather_matmul(x_RD: jax.Array, w_DF: jax.Array, axis: str) -> jax.Array:
    """Equals `all_gather(x_RD, axis, tiled=True) @ w_DF`, without ever gathering.

    Args:
      x_RD: [R, D], this device's rows.
      w_DF: [D, F], this device's weight, for instance its columns of a wider one.
      axis: the mesh axis that splits the rows, in order.

    Returns:
      [X, F] for all devices' rows, in x's type.

    Raises:
      ValueError: if the shapes don't fit.
    """
    return _gather_matmul(*_alike(x_RD, w_DF, axis), axis)


def matmul_scatter(x_XD: jax.Array, w_DF: jax.Array, axis: str) -> jax.Array:
    """Equals `psum_scatter(x_XD @ w_DF, axis, tiled=True)`; sums travel while the next part is multiplied.

    Sums travel in x's type. A bfloat16 sum has half the bytes of a float32 one but is rounded before each of its n-1
    trips; the error grows with the square root of n. Products and additions are float32.

    Args:
      x_XD: [X, D], all rows of this device's part of the summed dimension.
      w_DF: [D, F], the same part of the weight.
      axis: the mesh axis to sum over, which also splits the result's rows.

    Returns:
      [R, F] for this device's rows, in x's type.

    Raises:
      ValueError: if the shapes don't fit, or the axis does not divide the rows.
    """
    x_XD, w_DF = _alike(x_XD, w_DF, axis)
    if x_XD.shape[0] % (n := jax.lax.axis_size(axis)):
        raise ValueError(f"{x_XD.shape[0]} rows don't divide over the {n} devices of axis {axis!r}")
    return _matmul_scatter(x_XD, w_DF, axis)


def _alike(x: jax.Array, w: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Types both factors as varying along the ring and wherever the other varies, so copies' gradients are summed."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"a product of {x.shape} and {w.shape}: expected [rows, D] and [D, F]")
    # JAX types a sum as varying along every axis along which a term varies. XLA removes the addition of zero.
    zero = jnp.zeros_like(x[:1, :1] * w[:1, :1]) + 0 * jax.lax.axis_index(axis)
    return x + zero.astype(x.dtype), w + zero.astype(w.dtype)


# --- the two rings ---------------------------------------------------------------------------------


def _halves(rows: int) -> list[tuple[int, int, int]]:
    """Returns (direction, first row, rows) of the halves that travel right and left; a single row goes right."""
    high = rows // 2
    return [half for half in ((1, 0, rows - high), (-1, rows - high, high)) if half[2]]


def _shift(x: jax.Array, axis: str, direction: int) -> jax.Array:
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(d, (d + direction) % n) for d in range(n)])


def _around(x_RD: jax.Array, axis: str, visit: Callable, state: Any) -> Any:
    """Calls `visit` with half of each device's rows at a time, while the next halves travel; returns the last state.

    Args:
      x_RD: [R, D], this device's rows.
      axis: the ring.
      visit: (state, index of the first row among all X, rows) -> state.
      state: the first call's state.
    """
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    R = x_RD.shape[0]
    halves = _halves(R)
    here = [x_RD[low : low + rows] for _, low, rows in halves]
    for iteration in range(n):
        following = here
        if iteration < n - 1:
            following = [_shift(x, axis, d) for x, (d, *_) in zip(here, halves, strict=True)]
        for x, (direction, low, _) in zip(here, halves, strict=True):
            state = visit(state, (me - direction * iteration) % n * R + low, x)
        # Without this the compiler may do all sending before it begins to multiply.
        state, here = jax.lax.optimization_barrier((state, following))
    return state


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _rows(x: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, rows)


def _put(x: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, rows.astype(x.dtype), start, 0)


def _room(x_RD: jax.Array, columns: int, axis: str) -> jax.Array:
    """Returns an uninitialised [X, columns]: writing zeros would cost a pass over the result."""
    return jax.lax.empty((jax.lax.axis_size(axis) * x_RD.shape[0], columns), x_RD.dtype)


def _go_round(x_XD: jax.Array, w_DF: jax.Array, axis: str, half: tuple[int, int, int]) -> jax.Array:
    """Returns this device's sum for a half, which starts at a neighbour and travels all the way around the ring."""
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    direction, low, rows = half
    parts = [(me - direction * (iteration + 1)) % n for iteration in range(n)]
    first, *others = [part * (x_XD.shape[0] // n) + low for part in parts]
    moving = _product(_rows(x_XD, first, rows), w_DF).astype(x_XD.dtype)
    for start in others:
        # This product must not start before the previous sum departs, or it couldn't hide the trip. If XLA fuses it
        # with the addition below, it waits for the arriving sum, and the other half's product hides the trip.
        start, moving = jax.lax.optimization_barrier((start, moving))
        made = _product(_rows(x_XD, start, rows), w_DF)
        moving = (made + _shift(moving, axis, direction)).astype(x_XD.dtype)
    return moving


# --- the products and their gradients --------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_matmul(x_RD, w_DF, axis):
    def visit(out_XF, start, x):
        return _put(out_XF, _product(x, w_DF), start)

    return _around(x_RD, axis, visit, _room(x_RD, w_DF.shape[1], axis))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul_scatter(x_XD, w_DF, axis):
    halves = _halves(x_XD.shape[0] // jax.lax.axis_size(axis))
    return jnp.concatenate([_go_round(x_XD, w_DF, axis, half) for half in halves])


def _gather_backward(axis, factors, grad_XF):
    x_RD, w_DF = factors

    def visit(grad_w_DF, start, x):
        return grad_w_DF + _product(x.T, _rows(grad_XF, start, x.shape[0]))

    grad_w_DF = _around(x_RD, axis, visit, jnp.zeros(w_DF.shape, jnp.float32))
    return _matmul_scatter(grad_XF, w_DF.T, axis), grad_w_DF.astype(w_DF.dtype)


def _scatter_backward(axis, factors, grad_RF):
    x_XD, w_DF = factors

    def visit(grads, start, grad):
        grad_x_XD, grad_w_DF = grads
        more = _product(_rows(x_XD, start, grad.shape[0]).T, grad)
        return _put(grad_x_XD, _product(grad, w_DF.T), start), grad_w_DF + more

    zero = _room(grad_RF, w_DF.shape[0], axis), jnp.zeros(w_DF.shape, jnp.float32)
    grad_x_XD, grad_w_DF = _around(grad_RF, axis, visit, zero)
    return grad_x_XD, grad_w_DF.astype(w_DF.dtype)


def _forward(function, x, w, axis):
    return function(x, w, axis), (x, w)


_gather_matmul.defvjp(partial(_forward, _gather_matmul), _gather_backward)
_matmul_scatter.defvjp(partial(_forward, _matmul_scatter), _scatter_backward)
