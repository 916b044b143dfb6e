"""A tiled matrix product for TPUs, with bias and activation applied before the result leaves the chip.

The grid runs over tiles of rows, tiles of columns and, innermost, tiles of the contraction. A tile of the result is
summed in float32 in VMEM and written to HBM once. While one pair of input tiles is multiplied, Pallas copies the next.
Each loaded element takes part in as many products as the other factor's tile is long, so larger tiles need less HBM
bandwidth, until they no longer fit in VMEM (Austin et al. 2025, part 1; JAX's Pallas guide, "Matrix multiplication").

Shapes: M rows, K contraction, N columns; m, k, n are one tile's.

Chapters: 16.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.errors import UserError
from minitext.kernels import block_shapes

ACTIVATIONS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}


def matmul(
    x_MK: jax.Array,
    w_KN: jax.Array,
    bias_N: jax.Array | None = None,
    *,
    activation: str | None = None,
    tiles: tuple[int, int, int] | None = None,
) -> jax.Array:
    """Computes `activation(x @ w + bias)` on one TPU device.

    Sums, bias and activation are float32 and rounded once. Float32 factors are multiplied at full precision.

    Args:
      x_MK: [M, K].
      w_KN: [K, N], in x's type.
      bias_N: [N] in any floating type, or None.
      activation: a key of `ACTIVATIONS`.
      tiles: (m, k, n); by default the chip's in `block_shapes`. A tile longer than its dimension is cut to it.

    Returns:
      [M, N] in x's type.

    Raises:
      UserError: if `supports` gives a reason.
    """
    if tiles is None:
        found = block_shapes.find("matmul")
        tiles = (found["m"], found["k"], found["n"])
    if reason := supports(x_MK, w_KN, bias_N, activation=activation, tiles=tiles):
        raise UserError(f"matmul_tpu cannot run: {reason}")
    return _matmul(x_MK, w_KN, bias_N, activation, tiles)


def supports(x_MK, w_KN, bias_N=None, *, activation=None, tiles=(16, 128, 128)) -> str | None:
    """Returns why the kernel can't compute this, or None.

    On a TPU, the last two dimensions of a block must be multiples of 8 and 128, or the array's own.
    """
    if x_MK.ndim != 2 or w_KN.ndim != 2 or x_MK.shape[1] != w_KN.shape[0]:
        return f"a product of {x_MK.shape} and {w_KN.shape}: expected [M, K] and [K, N]"
    if x_MK.dtype != w_KN.dtype or x_MK.dtype not in (jnp.bfloat16, jnp.float32):
        return f"factors of {x_MK.dtype} and {w_KN.dtype}: expected both bfloat16 or float32"
    if bias_N is not None and bias_N.shape != w_KN.shape[1:]:
        return f"a bias of {bias_N.shape} for {w_KN.shape[1]} columns"
    if activation not in ACTIVATIONS:
        return f"unknown activation {activation!r}: choose among {', '.join(map(str, ACTIVATIONS))}"
    sublanes = 32 // x_MK.dtype.itemsize  # rows that share a register: 8 of float32, 16 of bfloat16
    (m, k, n), (M, K), N = tiles, x_MK.shape, w_KN.shape[1]
    if 0 in (M, K, N):
        return f"a product of {x_MK.shape} and {w_KN.shape}: it needs a row, a column and a sum"
    for name, tile, size, step in (("m", m, M, sublanes), ("k", k, K, 128), ("n", n, N, 128)):
        if tile < 1 or (tile < size and tile % step):
            return f"tile {name}={tile} is neither a multiple of {step} nor all of {size}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(x_MK, w_KN, bias_N, activation, tiles):
    return _call(x_MK, w_KN, bias_N, activation, tiles)


def _backward(activation, tiles, saved, grad_MN):
    x_MK, w_KN, bias_N = saved
    m, k, n = tiles
    if activation is not None:
        # The activation's input was never written. Recomputing it costs a product.
        z_MN = _call(x_MK, w_KN, bias_N, None, tiles, jnp.float32)
        _, pull = jax.vjp(ACTIVATIONS[activation], z_MN)
        grad_MN = pull(grad_MN.astype(jnp.float32))[0].astype(x_MK.dtype)
    # Dimensions change roles, and each keeps a tile size that its new role allows.
    grad_x_MK = _call(grad_MN, w_KN.T, None, None, (m, n, k))
    grad_w_KN = _call(x_MK.T, grad_MN, None, None, (k, 128 * pl.cdiv(m, 128), n))
    grad_bias_N = None
    if bias_N is not None:
        grad_bias_N = grad_MN.sum(0, dtype=jnp.float32).astype(bias_N.dtype)
    return grad_x_MK, grad_w_KN, grad_bias_N


_matmul.defvjp(lambda *args: (_call(*args), args[:3]), _backward)


def _call(x_MK, w_KN, bias_N, activation, tiles, out_dtype=None) -> jax.Array:
    (M, K), N = x_MK.shape, w_KN.shape[1]
    m, k, n = (min(tile, size) for tile, size in zip(tiles, (M, K, N), strict=True))
    out_dtype = out_dtype or x_MK.dtype
    steps = pl.cdiv(K, k)
    specs = [
        pl.BlockSpec((m, k), lambda row, column, step: (row, step)),
        pl.BlockSpec((k, n), lambda row, column, step: (step, column)),
    ]
    args = [x_MK, w_KN]
    if bias_N is not None:
        specs.append(pl.BlockSpec((1, n), lambda row, column, step: (0, column)))
        args.append(bias_N[None])
    return pl.pallas_call(
        functools.partial(_kernel, activation=activation, K=K, has_bias=bias_N is not None),
        grid=(pl.cdiv(M, m), pl.cdiv(N, n), steps),
        in_specs=specs,
        out_specs=pl.BlockSpec((m, n), lambda row, column, step: (row, column)),
        out_shape=jax.ShapeDtypeStruct((M, N), out_dtype),
        scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            # Tiles of the result may be computed in any order, even by two cores; steps of a sum may not.
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name="matmul",
    )(*args)


def _kernel(x_ref, w_ref, *refs, activation, K, has_bias):
    """Adds the product of two tiles to the sum, and finishes the sum in its last step."""
    bias_ref, (out_ref, sum_ref) = refs[0] if has_bias else None, refs[has_bias:]
    step, steps = pl.program_id(2), pl.num_programs(2)

    @pl.when(step == 0)
    def _start():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    x_mk, w_kn = x_ref[...], w_ref[...]
    if K % x_mk.shape[1]:
        # The last tiles reach past the arrays' end. Memory there can hold NaN, and NaN times zero is NaN.
        left = K - step * x_mk.shape[1]
        x_mk = jnp.where(jax.lax.broadcasted_iota(jnp.int32, x_mk.shape, 1) < left, x_mk, 0)
        w_kn = jnp.where(jax.lax.broadcasted_iota(jnp.int32, w_kn.shape, 0) < left, w_kn, 0)
    precision = jax.lax.Precision.HIGHEST if x_mk.dtype == jnp.float32 else None
    sum_ref[...] += jnp.dot(x_mk, w_kn, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(step == steps - 1)
    def _finish():
        z_mn = sum_ref[...]
        if bias_ref is not None:
            z_mn += bias_ref[...].astype(jnp.float32)
        out_ref[...] = ACTIVATIONS[activation](z_mn).astype(out_ref.dtype)
