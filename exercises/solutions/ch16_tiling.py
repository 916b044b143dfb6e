import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# EXERCISE 16.accumulator
def tiled_matmul(x_MK, w_KN, tiles):
    """Compute x @ w tile by tile, summed in float32 and rounded once.

    Args:
      x_MK: bfloat16 [M, K].
      w_KN: bfloat16 [K, N].
      tiles: (m, k, n), none longer than its dimension; they needn't divide it.

    Returns:
      bfloat16 [M, N].
    """
    # BEGIN SOLUTION
    (M, K), N = x_MK.shape, w_KN.shape[1]
    m, k, n = tiles

    def kernel(x_ref, w_ref, o_ref, sum_ref):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        x, w = x_ref[...], w_ref[...]
        # past the end may be NaN, so both factors are masked
        left = K - step * k
        x = jnp.where(
            jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < left, x, 0
        )
        w = jnp.where(
            jax.lax.broadcasted_iota(jnp.int32, w.shape, 0) < left, w, 0
        )
        sum_ref[...] += jnp.dot(x, w, preferred_element_type=jnp.float32)

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = sum_ref[...].astype(o_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, m), pl.cdiv(N, n), pl.cdiv(K, k)),
        in_specs=[
            pl.BlockSpec((m, k), lambda row, column, step: (row, step)),
            pl.BlockSpec((k, n), lambda row, column, step: (step, column)),
        ],
        out_specs=pl.BlockSpec((m, n), lambda row, column, step: (row, column)),
        out_shape=jax.ShapeDtypeStruct((M, N), x_MK.dtype),
        scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )(x_MK, w_KN)
    # END SOLUTION


# EXERCISE 16.fused_epilogue
def gated_product(x_MK, gate_KN, up_KN, tiles):
    """Compute silu(x @ gate) * (x @ up), writing nothing but the result.

    Args:
      x_MK: bfloat16 [M, K].
      gate_KN: bfloat16 [K, N].
      up_KN: bfloat16 [K, N].
      tiles: (m, k, n); they divide M, K and N.

    Returns:
      bfloat16 [M, N].
    """
    # BEGIN SOLUTION
    (M, K), N = x_MK.shape, gate_KN.shape[1]
    m, k, n = tiles

    def kernel(x_ref, gate_ref, up_ref, o_ref, gate_sum_ref, up_sum_ref):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            gate_sum_ref[...] = jnp.zeros_like(gate_sum_ref)
            up_sum_ref[...] = jnp.zeros_like(up_sum_ref)

        x = x_ref[...]
        gate_sum_ref[...] += jnp.dot(
            x, gate_ref[...], preferred_element_type=jnp.float32
        )
        up_sum_ref[...] += jnp.dot(
            x, up_ref[...], preferred_element_type=jnp.float32
        )

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            z = jax.nn.silu(gate_sum_ref[...]) * up_sum_ref[...]
            o_ref[...] = z.astype(o_ref.dtype)

    weights = pl.BlockSpec((k, n), lambda row, column, step: (step, column))
    return pl.pallas_call(
        kernel,
        grid=(M // m, N // n, K // k),
        in_specs=[
            pl.BlockSpec((m, k), lambda row, column, step: (row, step)),
            weights,
            weights,
        ],
        out_specs=pl.BlockSpec((m, n), lambda row, column, step: (row, column)),
        out_shape=jax.ShapeDtypeStruct((M, N), x_MK.dtype),
        scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )(x_MK, gate_KN, up_KN)
    # END SOLUTION


# EXERCISE 16.choose_tiles
def choose_tiles(M, K, N, budget):
    """Choose tiles that fit into VMEM and move the fewest bytes.

    Args:
      M: rows of x. All sizes are Python ints, and multiples of 128.
      K: columns of x and rows of w.
      N: columns of w.
      budget: bytes of VMEM for blocks and scratch.

    Returns:
      ((m, k, n), bytes): the tiles, and the bytes they move between HBM and
      VMEM; None if none fit.
    """
    # BEGIN SOLUTION
    lengths = (128, 256, 512, 1024, 2048, 4096)

    def divisors(size):
        return [length for length in lengths if size % length == 0]

    found = []
    for m, k, n in itertools.product(divisors(M), divisors(K), divisors(N)):
        vmem = 2 * 2 * (m * k + k * n + m * n) + 4 * m * n
        if vmem > budget:
            continue
        rows, columns, steps = M // m, N // n, K // k
        x_times = columns if steps > 1 else 1
        w_times = rows if steps * columns > 1 else 1
        moved = 2 * (x_times * M * K + w_times * K * N + M * N)
        found.append((moved, rows * columns * steps, vmem, (m, k, n)))
    if not found:
        return None
    moved, _, _, tiles = min(found)
    return tiles, moved
    # END SOLUTION


# EXERCISE 16.double_buffering
def streamed_matmul(x_MK, w_KN, k):
    """Compute x @ w, copying w from HBM k rows at a time into two slots.

    Args:
      x_MK: bfloat16 [M, K], which fits into VMEM.
      w_KN: bfloat16 [K, N], which needn't fit.
      k: rows of w in a part; it divides K.

    Returns:
      float32 [M, N].
    """
    # BEGIN SOLUTION
    (M, K), N = x_MK.shape, w_KN.shape[1]
    steps = K // k

    def kernel(x_ref, w_hbm_ref, o_ref, parts_ref, done_ref):
        def copy(step):
            rows, slot = pl.ds(step * k, k), step % 2
            return pltpu.make_async_copy(
                w_hbm_ref.at[rows], parts_ref.at[slot], done_ref.at[slot]
            )

        o_ref[...] = jnp.zeros_like(o_ref)
        copy(0).start()

        @pl.loop(0, steps)
        def _(step):
            @pl.when(step + 1 < steps)
            def _():
                copy(step + 1).start()

            copy(step).wait()
            x = x_ref[:, pl.ds(pl.multiple_of(step * k, k), k)]
            o_ref[...] += jnp.dot(
                x, parts_ref[step % 2], preferred_element_type=jnp.float32
            )

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(), pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((2, k, N), w_KN.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )(x_MK, w_KN)
    # END SOLUTION
