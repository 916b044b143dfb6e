import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# EXERCISE 15.index_maps
def attention_specs(B, T, N, K, H, block):
    """Return the grid and blocks of causal attention with shared key heads.

    Args:
      B: rows of the batch. All sizes are Python ints; arrays are q_BNTH, k_BKTH
        and v_BKTH.
      T: tokens of a row, queries as well as keys.
      N: query heads.
      K: key heads; N is divisible by it.
      H: width of a head.
      block: number of queries, and of keys, in a block; T is divisible by it.

    Returns:
      (grid, in_specs, out_spec): the grid (B, N, T // block, T // block), whose
        last index numbers the blocks of keys; a list of three `pl.BlockSpec`,
        for q, k and v; and the result's.
    """
    # BEGIN SOLUTION
    tiles, shape = T // block, (None, None, block, H)
    query = pl.BlockSpec(shape, lambda b, n, t, s: (b, n, t, 0))
    # Past the diagonal the index doesn't change, so nothing is loaded.
    key = pl.BlockSpec(
        shape, lambda b, n, t, s: (b, n // (N // K), jnp.minimum(s, t), 0)
    )
    return (B, N, tiles, tiles), [query, key, key], query
    # END SOLUTION


# EXERCISE 15.reduction
def column_stats(x_MN, block_M=32, block_N=128):
    """Compute the sum and maximum of each column.

    Args:
      x_MN: [M, N] float32 or bfloat16; both sizes are at least 1.
      block_M: rows of a block of x.
      block_N: columns of a block of x.

    Returns:
      (sum_1N, max_1N): two float32 arrays [1, N].
    """
    # BEGIN SOLUTION
    M, N = x_MN.shape

    def kernel(x_ref, sum_ref, max_ref):
        i = pl.program_id(1)

        @pl.when(i == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)
            max_ref[...] = jnp.full_like(max_ref, -jnp.inf)

        x = x_ref[...].astype(jnp.float32)
        is_row = (
            i * block_M + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < M
        )
        sum_ref[...] += jnp.sum(jnp.where(is_row, x, 0), axis=0, keepdims=True)
        top = jnp.max(jnp.where(is_row, x, -jnp.inf), axis=0, keepdims=True)
        max_ref[...] = jnp.maximum(max_ref[...], top)

    out = pl.BlockSpec((1, block_N), lambda j, i: (0, j))
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(N, block_N), pl.cdiv(M, block_M)),
        in_specs=[pl.BlockSpec((block_M, block_N), lambda j, i: (i, j))],
        out_specs=(out, out),
        out_shape=(jax.ShapeDtypeStruct((1, N), jnp.float32),) * 2,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")
        ),
    )(x_MN)
    # END SOLUTION


# EXERCISE 15.out_of_bounds
def second_difference(x_MN):
    """Compute each column's second difference; rows outside x count as 0.

    Args:
      x_MN: float32 [M, N]; both sizes are at least 1.

    Returns:
      float32 [M, N]: x[m - 1] - 2 x[m] + x[m + 1].
    """
    # BEGIN SOLUTION
    M, N = x_MN.shape
    last = pl.cdiv(M, 8) - 1

    def kernel(above_ref, x_ref, below_ref, o_ref):
        x = x_ref[...]
        row = 8 * pl.program_id(0) + jax.lax.broadcasted_iota(
            jnp.int32, x.shape, 0
        )
        above = jnp.concatenate([above_ref[7:], x[:-1]])
        below = jnp.concatenate([x[1:], below_ref[:1]])
        above, below = (
            jnp.where(row > 0, above, 0),
            jnp.where(row < M - 1, below, 0),
        )
        o_ref[...] = above - 2 * x + below

    def at(shift):
        return pl.BlockSpec((8, N), lambda i: (jnp.clip(i + shift, 0, last), 0))

    return pl.pallas_call(
        kernel,
        grid=(last + 1,),
        in_specs=[at(-1), at(0), at(1)],
        out_specs=at(0),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
    )(x_MN, x_MN, x_MN)
    # END SOLUTION


# EXERCISE 15.softmax
def row_softmax(x_MN, block_M=8):
    """Softmax over each row, in float32; a row that is all -inf gives zeros.

    Args:
      x_MN: [M, N] float32 or bfloat16; both sizes are at least 1, and entries
        may be -inf.
      block_M: rows of a block.

    Returns:
      [M, N] in the type of x_MN.
    """
    # BEGIN SOLUTION
    M, N = x_MN.shape

    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        top = jnp.max(x, axis=1, keepdims=True)
        # -inf - (-inf) is NaN: a row without a finite entry is shifted by 0.
        exps = jnp.exp(x - jnp.where(top == -jnp.inf, 0, top))
        total = jnp.sum(exps, axis=1, keepdims=True)
        o_ref[...] = (exps / jnp.where(total == 0, 1, total)).astype(
            o_ref.dtype
        )

    block = pl.BlockSpec((block_M, N), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, block_M),),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), x_MN.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(x_MN)
    # END SOLUTION


# EXERCISE 15.gather
def take_rows(table_VD, ids_T):
    """Look up rows of a table by id; an id without a row gives zeros.

    Args:
      table_VD: float32 [V, D]; both sizes are at least 1.
      ids_T: int32 [T]; T is at least 1.

    Returns:
      float32 [T, D].
    """
    # BEGIN SOLUTION
    V, D = table_VD.shape
    T = ids_T.shape[0]

    def wanted(i, r, ids_ref):
        return ids_ref[jnp.minimum(8 * i + r, T - 1)]

    def block_of(i, r, ids_ref):
        return jnp.clip(wanted(i, r, ids_ref), 0, V - 1) // 8, 0

    def kernel(ids_ref, table_ref, o_ref):
        r = pl.program_id(1)
        row = wanted(pl.program_id(0), r, ids_ref)
        found = table_ref[pl.ds(jnp.clip(row, 0, V - 1) % 8, 1), :]
        is_row = (row >= 0) & (row < V)
        o_ref[pl.ds(r, 1), :] = jnp.where(is_row, found, 0)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(T, 8), 8),
            in_specs=[pl.BlockSpec((8, D), block_of)],
            out_specs=pl.BlockSpec((8, D), lambda i, r, ids_ref: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((T, D), jnp.float32),
    )(ids_T, table_VD)
    # END SOLUTION


# EXERCISE 15.order
def order_steps(wanted_RK):
    """Order the steps of a list so that the fewest blocks of x are loaded.

    Args:
      wanted_RK: bool [R, K]; block r of the result is the sum of the blocks k
        of x for which it is true. Both sizes are at least 1.

    Returns:
      (loads, steps): how many blocks of x the steps load, the fewest possible,
      and a list of tuples (r, k, adds), in order.
    """
    # BEGIN SOLUTION
    best = {None: (0, [])}  # {last block of x: (loads, steps)}
    for r, row in enumerate(wanted_RK):
        blocks = [k for k, wanted in enumerate(row) if wanted]
        after = {}
        if not blocks:  # its step keeps the block that is there
            for last, (loads, steps) in best.items():
                after[last] = loads, [*steps, (r, last, False)]
        anywhere = min(best, key=lambda last: best[last][0])
        for last in blocks:
            # Only the first block can have been loaded before, and it must be
            # different from the last, unless it's the only one.
            firsts = [k for k in blocks if k != last] or [last]
            ways = [(best[anywhere][0], anywhere, firsts[0])]
            ways += [(best[k][0] - 1, k, k) for k in firsts if k in best]
            loads, before, first = min(ways, key=lambda way: way[0])
            middle = [k for k in firsts if k != first]
            order = [first, *middle, last][: len(blocks)]
            steps = best[before][1] + [(r, k, True) for k in order]
            after[last] = loads + len(blocks), steps
        best = after
    loads, steps = min(best.values(), key=lambda way: way[0])
    # Steps before the first wanted block of x load that block.
    known = next((k for _, k, _ in steps if k is not None), 0)
    steps = [(r, known if k is None else k, adds) for r, k, adds in steps]
    return max(loads, 1), steps
    # END SOLUTION
