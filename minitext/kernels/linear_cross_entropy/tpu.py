"""Output layer and cross-entropy as Pallas kernels for TPUs: logits exist a block at a time, on the chip.

The forward pass keeps each token's running maximum and sum of exponentials over blocks of the vocabulary (Milakov and
Gimelshein 2018), as flash attention does over keys. The backward pass recomputes each block of logits twice: once for
the gradient of x, which sums over the vocabulary, and once for that of w, which sums over tokens. That takes 5 products
where a program that stores the logits takes 3, but memory grows with X and V instead of X times V.

Chapters: 16.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.kernels.linear_cross_entropy import operands
from minitext.kernels.per_device import on_each_device, split
from minitext.kernels.tiles_tpu import dot, positions

# Rows of a bfloat16 register, and columns of any register.
ROWS, LANES = 16, 128
# The most features for which the backward pass has room. A float32 product keeps, beside both factors, three parts of
# each in bfloat16.
WIDEST = {"bfloat16": 6144, "float32": 4096}


class Blocks(NamedTuple):
    """Block sizes, each an upper bound. The defaults fit in the 16 MiB of vector memory that every chip has.

    Attributes:
      tokens: tokens in a block of logits in the forward pass.
      vocab: columns in a block of logits in the forward pass.
      embed: features multiplied per step of the forward pass.
      kept: tokens whose gradient of x, or columns whose gradient of w, a block of the backward pass sums. The block
        has all their features, so there are fewer of them beyond 4096 features in bfloat16 or 512 in float32.
      passing: columns, or tokens, that each step adds to that sum; fewer for wide features, too.
      vmem_bytes: vector memory for a kernel; None leaves it to the compiler.
    """

    tokens: int = 512
    vocab: int = 1024
    embed: int = 512
    kept: int = 128
    passing: int = 256
    vmem_bytes: int | None = None


DEFAULT = Blocks()


def linear_cross_entropy(
    x_XD, w_DV, targets_X, blocks: Blocks = DEFAULT
) -> tuple[jax.Array, jax.Array]:
    """Computes `minitext.kernels.linear_cross_entropy`. Tokens and vocabulary may be split over different mesh axes."""
    fused: Any = partial(_cross_entropy, blocks=blocks)
    vocab = split(w_DV)[1]

    def local(x_XD, w_DV, targets_X):
        if vocab is None:
            return fused(x_XD, w_DV, targets_X)
        # A target in another device's part matches no column here and adds nothing.
        first = jax.lax.axis_index(vocab) * w_DV.shape[1]
        loss_X, normalizer_X = fused(x_XD, w_DV, targets_X - first)
        target_X = jax.lax.psum(normalizer_X - loss_X, vocab)
        largest_X = jax.lax.pmax(jax.lax.stop_gradient(normalizer_X), vocab)
        sum_X = jax.lax.psum(jnp.exp(normalizer_X - largest_X), vocab)
        normalizer_X = largest_X + jnp.log(sum_X)
        return normalizer_X - target_X, normalizer_X

    return on_each_device(local, x_XD, w_DV, targets_X, outs=((2, 1), (2, 1)))


def supports(x_XD, w_DV, targets_X) -> str | None:
    """Returns why the kernels can't compute this, or None."""
    if x_XD.dtype != w_DV.dtype or x_XD.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x and w must both be float32 or both bfloat16: got {x_XD.dtype} and {w_DV.dtype}"
    if x_XD.shape[1] > (widest := WIDEST[x_XD.dtype.name]):
        return f"all of a token's {x_XD.dtype} features must fit on the chip, as {widest} do: got D={x_XD.shape[1]}"
    return operands.reason(x_XD, w_DV, targets_X)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cross_entropy(x_XD, w_DV, targets_X, blocks):
    return _forward(x_XD, w_DV, targets_X, blocks)[0]


def _forward(x_XD, w_DV, targets_X, blocks):
    (X, D), V = x_XD.shape, w_DV.shape[1]
    x, v = min(X, _round_down(blocks.tokens, ROWS)), min(V, _round_down(blocks.vocab, LANES))
    d = _divisor(D, blocks.embed)
    # A target beyond the vocabulary must match no column, not even of a block that overhangs.
    targets_X1 = jnp.where(targets_X < V, targets_X, -1).astype(jnp.int32)[:, None]
    column, f32 = pl.BlockSpec((x, 1), lambda i, j, k: (i, 0)), jnp.float32
    hit_X1, max_X1, sum_X1 = pl.pallas_call(
        partial(_forward_kernel, V=V),
        grid=(pl.cdiv(X, x), pl.cdiv(V, v), D // d),
        in_specs=[
            pl.BlockSpec((x, d), lambda i, j, k: (i, k)),
            pl.BlockSpec((d, v), lambda i, j, k: (k, j)),
            column,
        ],
        out_specs=[column] * 3,
        out_shape=[jax.ShapeDtypeStruct((X, 1), f32)] * 3,
        scratch_shapes=[pltpu.VMEM((x, v), f32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=blocks.vmem_bytes,
        ),
        name="linear_cross_entropy",
    )(x_XD, w_DV, targets_X1)
    normalizer_X1 = max_X1 + jnp.log(sum_X1)
    out = (normalizer_X1 - hit_X1)[:, 0], normalizer_X1[:, 0]
    # Keep maximum and sum: probabilities from the normalizer would carry the rounding of so large a number.
    return out, (x_XD, w_DV, targets_X1, max_X1, sum_X1)


def _forward_kernel(x_ref, w_ref, target_ref, hit_ref, max_ref, sum_ref, logits_ref, *, V):
    j, k = pl.program_id(1), pl.program_id(2)

    @pl.when(k == 0)
    def _():
        logits_ref[...] = jnp.zeros_like(logits_ref)

    @pl.when((j == 0) & (k == 0))
    def _():
        max_ref[...] = jnp.full_like(max_ref, -jnp.inf)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        hit_ref[...] = jnp.zeros_like(hit_ref)

    logits_ref[...] += dot(x_ref[...], w_ref[...])

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        logits_xv = logits_ref[...]
        id_xv = positions(logits_xv.shape, 1, j)
        if V % logits_xv.shape[1]:  # memory beyond the last column can hold anything
            logits_xv = jnp.where(id_xv < V, logits_xv, -jnp.inf)
        max_x1 = jnp.maximum(max_ref[...], jnp.max(logits_xv, axis=1, keepdims=True))
        sum_x1 = jnp.sum(jnp.exp(logits_xv - max_x1), axis=1, keepdims=True)
        sum_ref[...] = sum_ref[...] * jnp.exp(max_ref[...] - max_x1) + sum_x1
        max_ref[...] = max_x1
        hit_xv = jnp.where(id_xv == target_ref[...], logits_xv, 0.0)
        hit_ref[...] += jnp.sum(hit_xv, axis=1, keepdims=True)


def _backward(blocks, residuals, grads):
    x_XD, w_DV, targets_X1, max_X1, sum_X1 = residuals
    grad_loss_X, grad_normalizer_X = grads
    # A logit changes the normalizer, and so the loss, by its probability. The target's also changes the loss by -1.
    by_prob_X = (grad_loss_X + grad_normalizer_X) / sum_X1[:, 0]
    grads_X2 = jnp.stack([by_prob_X, grad_loss_X], axis=1)
    args = x_XD, w_DV, targets_X1, max_X1, grads_X2
    grad_x_XD = _backward_product(args, blocks, for_x=True)
    return grad_x_XD, _backward_product(args, blocks, for_x=False), None


_cross_entropy.defvjp(_forward, _backward)


def _backward_product(args, blocks: Blocks, *, for_x: bool):
    """Returns the gradient of x or of w. The blocks of it run along the grid's first dimension."""
    x_XD, w_DV = args[:2]
    (X, D), V = x_XD.shape, w_DV.shape[1]
    embed = _divisor(D, blocks.embed)
    narrow = pl.cdiv(D * (8 if x_XD.dtype == jnp.float32 else 1), 4096)
    kept, passing = blocks.kept // narrow, blocks.passing // narrow
    x, v = (kept, passing) if for_x else (passing, kept)
    x, v = min(X, _round_down(x, ROWS)), min(V, _round_down(v, LANES))
    order = (lambda i, j: (i, j)) if for_x else (lambda i, j: (j, i))
    by_token = lambda i, j: (order(i, j)[0], 0)  # noqa: E731
    x_spec = pl.BlockSpec((x, D), by_token)
    w_spec = pl.BlockSpec((D, v), lambda i, j: (0, order(i, j)[1]))
    like, spec, shape = (x_XD, x_spec, (x, D)) if for_x else (w_DV, w_spec, (D, v))
    return pl.pallas_call(
        partial(_backward_kernel, order=order, embed=embed, X=X, V=V, for_x=for_x),
        grid=order(pl.cdiv(X, x), pl.cdiv(V, v)),
        in_specs=[x_spec, w_spec, *(pl.BlockSpec((x, n), by_token) for n in (1, 1, 2))],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype),
        # A float32 result is its own accumulator.
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32)] * (like.dtype != jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=blocks.vmem_bytes
        ),
        name=f"linear_cross_entropy_backward_{'x' if for_x else 'w'}",
    )(*args)


def _backward_kernel(
    x_ref, w_ref, target_ref, max_ref, grads_ref, out_ref, *sum_refs, order, embed, X, V, for_x
):
    i, j = order(pl.program_id(0), pl.program_id(1))
    (sum_ref,) = sum_refs or (out_ref,)

    @pl.when(pl.program_id(1) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    x_xD, w_Dv = x_ref[...], w_ref[...]
    # The forward pass's logits to the bit, whose maximum and sum these are: float32 holds a logit of 90 only to 4e-6,
    # and another order of summation would be off by several times that.
    logits_xv: Any = sum(
        dot(x_xD[:, k : k + embed], w_Dv[k : k + embed]) for k in range(0, x_xD.shape[1], embed)
    )
    id_xv = positions(logits_xv.shape, 1, j)
    grad_xv = jnp.exp(logits_xv - max_ref[...]) * grads_ref[:, :1]
    grad_xv -= jnp.where(id_xv == target_ref[...], grads_ref[:, 1:], 0.0)
    # Memory beyond the last token or column can hold anything, and must not reach the sum.
    if for_x:
        if V % w_Dv.shape[1]:
            grad_xv = jnp.where(id_xv < V, grad_xv, 0.0)
            w_Dv = jnp.where(positions(w_Dv.shape, 1, j) < V, w_Dv, 0)
        sum_ref[...] += dot(grad_xv.astype(w_Dv.dtype), w_Dv, (1, 1))
    else:
        if X % x_xD.shape[0]:
            grad_xv = jnp.where(positions(grad_xv.shape, 0, i) < X, grad_xv, 0.0)
            x_xD = jnp.where(positions(x_xD.shape, 0, i) < X, x_xD, 0)
        sum_ref[...] += dot(x_xD, grad_xv.astype(x_xD.dtype), (0, 0))

    if sum_refs:

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _divisor(D: int, limit: int) -> int:
    """Returns the largest part of D, in whole lanes, that divides it: a product over D must not overhang."""
    parts = [part for part in range(LANES, min(D, limit) + 1, LANES) if D % part == 0]
    return max(parts, default=D)


def _round_down(size: int, step: int) -> int:
    return max(size // step, 1) * step
