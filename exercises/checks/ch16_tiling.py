import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.book.grading import Exercise
from minitext.compiler.aot import compiles_for
from minitext.kernels.simulator import strict

BF16, F32 = jnp.bfloat16, jnp.float32


def spec(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def numbers(t, *shape):
    return jnp.asarray(t.rng.normal(size=shape), BF16)


def wide(x):
    return np.asarray(x, np.float64)


# XLA turns a product with a converted bool into a choice, which hides that 0 times NaN is NaN. Mosaic doesn't.
AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp"}


def simulate(t, fn, *args, cores=1):
    """The result and the one kernel's run, in the strict simulator, in an order of its own."""
    with strict(cores=cores, seed=int(t.rng.integers(1, 1000))) as runs:
        out = jax.jit(fn, compiler_options=AS_WRITTEN)(*args)
    t.equal(len(runs), 1, why="how many Pallas calls run")
    return out, runs[0]


def compiles(t, fn, *args):
    shapes = ", ".join(str(list(x.shape)) for x in args)
    reason = compiles_for("v5e", fn, *args)
    t.true(reason is None, f"Mosaic does not compile it for a v5e at {shapes}: {reason}", reason)


def one_call(t, fn, *args):
    """One Pallas call takes the arguments as they are, and what it returns is the result."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    while len(jaxpr.eqns) == 1 and "jaxpr" in jaxpr.eqns[0].params:
        if jaxpr.eqns[0].primitive.name == "pallas_call":
            return
        jaxpr = jaxpr.eqns[0].params["jaxpr"].jaxpr
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    t.true(False, f"outside of the kernel there is more to do: {', '.join(names)}", names)


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


# ------------------------------------------------------------------------------- accumulator

accumulator = Exercise(
    "16.accumulator",
    title="A sum that stays in float32",
    function="tiled_matmul",
    minutes=30,
    points=15,
    forbid=("jax.numpy.pad", "jax.lax.pad"),
    statement="""
Write `tiled_matmul(x_MK, w_KN, tiles)`: the product of two bfloat16 matrices in one Pallas call.

- The grid goes over tiles of rows, tiles of columns and, innermost, tiles of K. Blocks are `(m, k)` and `(k, n)`, and
  `(m, n)` for the result. A step loads its pair of tiles once, and each tile of the result is stored once.
- All sums are float32, including those within a product of two tiles. They stay in scratch until they're complete, and
  are rounded to bfloat16 once.
- No size is smaller than its tile, but sizes needn't be multiples. Past the end, a last block may contain NaN.
- Two cores may share the tiles of the result, but not the steps of one sum.
- It compiles for a v5e at `[1000, 4000]` and `[4000, 1000]` with tiles (256, 256, 256).
""",
    hints=(
        "Which of the grid's three dimensions are independent? At which step of the innermost one does a sum start, "
        "and at which is it complete?",
        "`scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)]` gives the kernel one more ref, after the result's. Only K "
        "needs a mask, and both factors need it: 0 times NaN is NaN.",
        "`left = K - step * k`. With `jnp.where`, keep the columns of x below `left`, and the rows of w below it. Add "
        "`jnp.dot(x, w, preferred_element_type=jnp.float32)` to the scratch. At step `pl.num_programs(2) - 1`, store "
        "it with `.astype(o_ref.dtype)`.",
    ),
)


def multiplies(fn, t, M, K, N, tiles, cores=1):
    x, w = numbers(t, M, K), numbers(t, K, N)
    got, run = simulate(t, lambda x, w: fn(x, w, tiles), x, w, cores=cores)
    text = f"[{M}, {K}] times [{K}, {N}] in tiles {tiles}"
    k = tiles[1]
    last = (K - 1) // k * k
    mistakes = {
        "Only the first tile of K counts": wide(x)[:, :k] @ wide(w)[:k],
        "Only the last tile of K counts": wide(x)[:, last:] @ wide(w)[last:],
        "The last tile of K is missing": wide(x)[:, :last] @ wide(w)[:last],
        "The first tile of K is missing": wide(x)[:, k:] @ wide(w)[k:],
        "The last tile of K counts twice": wide(x) @ wide(w) + wide(x)[:, last:] @ wide(w)[last:],
    }
    text += rounded_more(got, x, w, k)
    t.close(got, wide(x) @ wide(w), 4e-3, 1e-3, text, BF16, mistakes)
    return run


def rounded_more(got, x, w, k):
    """Says where a sum is rounded to bfloat16 before it is complete, if that is what nearly all numbers look like."""
    parts = [wide(x)[:, i : i + k] @ wide(w)[i : i + k] for i in range(0, x.shape[1], k)]

    def narrow(y):
        return wide(jnp.asarray(y, BF16))

    ways = {}
    if len(parts) > 1:
        ways["Each product of two tiles is rounded to bfloat16"] = narrow(sum(map(narrow, parts)))
        ways["The sum is rounded to bfloat16 at every step"] = narrow(parts[0])
        ways["The sum and each product are rounded to bfloat16 at every step"] = narrow(parts[0])
    for part in parts[1:]:
        for way, added in zip(list(ways)[1:], (part, narrow(part)), strict=True):
            ways[way] = narrow(ways[way] + added)
    right = narrow(sum(parts))
    if np.shape(got) != right.shape or (seen := wide(got) != right).mean() < 0.01:
        return ""
    like = {way: (wide(got) == y)[seen | (y != right)].mean() for way, y in ways.items()}
    best = max(like, key=like.__getitem__, default="")
    return f". {best}" if best and like[best] > 0.9 else ""


@accumulator.check("one tile")
def _(fn, t):
    multiplies(fn, t, 16, 128, 128, (16, 128, 128))


@accumulator.check("several tiles of everything, and their loads")
def _(fn, t):
    run = multiplies(fn, t, 32, 256, 256, (16, 128, 128))
    t.equal(run.loads[:2], [8, 8], why="tiles of x and of w that 8 steps load")
    t.equal(run.stores[2], 4, why="tiles of the result that are stored")


@accumulator.check("sums that bfloat16 can't hold")
def _(fn, t):
    left = t.rng.integers(1, 15, 128)
    w = np.full((384, 128), 32.0)
    w[256:] = -64
    w[0] += left
    got, _ = simulate(t, lambda x, w: fn(x, w, (16, 128, 128)), jnp.ones((16, 384), BF16), w_(w))
    why = "columns that sum to 4096 and a little, 4096, and -8192; only the little remains"
    t.close(got, np.broadcast_to(left, (16, 128)), 0, 0, why, BF16)


def w_(array):
    return jnp.asarray(array, BF16)


@accumulator.check("sizes that tiles don't divide")
def _(fn, t):
    M, K, N = (int(t.rng.integers(least + 1, 2 * least)) for least in (32, 256, 256))
    run = multiplies(fn, t, M, K, N, (32, 256, 256))
    t.equal(run.loads[:2], [8, 8], why="tiles of x and of w that 8 steps load, the last ones cut")


@accumulator.check("a NaN of x's own stays")
def _(fn, t):
    x, w = (np.array(numbers(t, *shape)) for shape in ((16, 200), (200, 128)))
    x[3, int(t.rng.integers(100))] = np.nan
    got, _ = simulate(t, lambda x, w: fn(x, w, (16, 128, 128)), jnp.asarray(x), jnp.asarray(w))
    why = "row 3 of x has a NaN, so row 3 of the result has nothing else"
    t.close(got, wide(x) @ wide(w), 4e-3, 1e-3, why, BF16)


@accumulator.check("two cores share the tiles of the result")
def _(fn, t):
    run = multiplies(fn, t, 32, 256, 128, (16, 128, 128), cores=2)
    cores = {core for core, _ in run.visits}
    why = "only one core has work to do: no dimension of the grid is parallel"
    t.true(len(cores) == 2, why, len(cores))
    alone = multiplies(fn, t, 16, 512, 128, (16, 128, 128), cores=2)
    cores = {core for core, _ in alone.visits}
    t.true(len(cores) == 1, "two cores share the steps of one sum", len(cores))


@accumulator.check("Mosaic compiles it, and nothing is left outside")
def _(fn, t):
    args = spec(1000, 4000), spec(4000, 1000)
    compiles(t, lambda x, w: fn(x, w, (256, 256, 256)), *args)
    one_call(t, lambda x, w: fn(x, w, (256, 256, 256)), *args)


def tiled_matmul_with(
    *,
    begin="sum",
    scratch=True,
    exact=True,
    masks="xw",
    semantics=("parallel", "parallel", "arbitrary"),
    steps_of=pl.cdiv,
    k_first=False,
):
    """The solution with a mistake that is asked for."""

    def fn(x_MK, w_KN, tiles):
        (M, K), N = x_MK.shape, w_KN.shape[1]
        m, k, n = tiles
        at = 0 if k_first else 2

        def kernel(x_ref, w_ref, o_ref, *scratch_refs):
            sum_ref = scratch_refs[0] if scratch else o_ref
            step = pl.program_id(at)
            first = {
                "sum": step == 0,
                "never": step < 0,
                "step": step >= 0,
                "kernel": (pl.program_id(0) == 0) & (pl.program_id(1) == 0) & (step == 0),
            }[begin]

            @pl.when(first)
            def _():
                sum_ref[...] = jnp.zeros_like(sum_ref)

            x, w, left = x_ref[...], w_ref[...], K - step * k
            if "x" in masks:
                x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < left, x, 0)
            if masks == "NaN":
                x, w = (jnp.where(jnp.isnan(a), 0, a) for a in (x, w))
            if "w" in masks:
                w = jnp.where(jax.lax.broadcasted_iota(jnp.int32, w.shape, 0) < left, w, 0)
            part = jnp.dot(x, w, preferred_element_type=F32 if exact else None)
            part = part.astype(BF16) if not (exact or scratch) else part
            sum_ref[...] = (sum_ref[...] + part).astype(sum_ref.dtype)
            if scratch:

                @pl.when(step == pl.num_programs(at) - 1)
                def _():
                    o_ref[...] = sum_ref[...].astype(o_ref.dtype)

        grid = (pl.cdiv(M, m), pl.cdiv(N, n), steps_of(K, k))

        def order(index):
            return (lambda s, r, c: index(r, c, s)) if k_first else index

        return pl.pallas_call(
            kernel,
            grid=(grid[2], *grid[:2]) if k_first else grid,
            in_specs=[
                pl.BlockSpec((m, k), order(lambda r, c, s: (r, s))),
                pl.BlockSpec((k, n), order(lambda r, c, s: (s, c))),
            ],
            out_specs=pl.BlockSpec((m, n), order(lambda r, c, s: (r, c))),
            out_shape=spec(M, N),
            scratch_shapes=[pltpu.VMEM((m, n), F32)] if scratch else [],
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        )(x_MK, w_KN)

    return fn


mistaken(
    accumulator,
    "summed_in_the_result",
    "You add to the result's block, which is bfloat16, so each step rounds the sum. Add to a float32 scratch, and "
    "round it once at the last step.",
    tiled_matmul_with(scratch=False),
)
mistaken(
    accumulator,
    "both_rounded_in_the_result",
    "You add to the result's block, which is bfloat16, so each step rounds the product and the sum. Add float32 "
    "products to a float32 scratch, and round it once at the last step.",
    tiled_matmul_with(scratch=False, exact=False),
)
mistaken(
    accumulator,
    "clears_every_nan",
    "You replace NaN by 0 wherever it is. What is past the end may be anything, and a NaN in x itself must show in "
    "the result: mask by position.",
    tiled_matmul_with(masks="NaN"),
)
mistaken(
    accumulator,
    "product_in_bfloat16",
    "Your sum is float32, but each product of two tiles is rounded to bfloat16 before you add it. Ask `jnp.dot` "
    "for `preferred_element_type=jnp.float32`.",
    tiled_matmul_with(exact=False),
)
mistaken(
    accumulator,
    "never_begun",
    "You add to scratch that was never initialised. Store zeros when a sum's first step starts.",
    tiled_matmul_with(begin="never"),
)
mistaken(
    accumulator,
    "begun_at_each_step",
    "You reset the sum at every step, so only the last tile of K counts. Do it under `pl.when(step == 0)`.",
    tiled_matmul_with(begin="step"),
)
mistaken(
    accumulator,
    "begun_once",
    "You set the scratch to zero only once in the whole kernel. It keeps its value from step to step, so the next "
    "tile of the result starts with the previous one's sum.",
    tiled_matmul_with(begin="kernel"),
)
mistaken(
    accumulator,
    "padding_counted",
    "The last tiles of K reach past the end of the arrays, and you multiply what's there. Replace it with 0, "
    "using `jnp.where`, in both factors: 0 times NaN is NaN.",
    tiled_matmul_with(masks=""),
)
mistaken(
    accumulator,
    "last_tile_forgotten",
    "`K // k` steps leave out the last tile of K when it is not full. Take `pl.cdiv(K, k)`.",
    tiled_matmul_with(steps_of=lambda K, k: K // k),
)
mistaken(
    accumulator,
    "steps_in_parallel",
    "You mark the steps of a sum as parallel. They may then run in any order, and two cores may share one sum: "
    'only rows and columns are "parallel".',
    tiled_matmul_with(semantics=("parallel",) * 3),
)
mistaken(
    accumulator,
    "nothing_in_parallel",
    'You mark no dimension as parallel. Tiles of rows and of columns are: ("parallel", "parallel", "arbitrary").',
    tiled_matmul_with(semantics=("arbitrary",) * 3),
)
mistaken(
    accumulator,
    "k_outermost",
    "Your tiles of K are the grid's first dimension. Each tile of the result is left and visited again, and the "
    "one scratch mixes the sums of many. K comes last.",
    tiled_matmul_with(k_first=True, semantics=("arbitrary",) * 3),
)

# ---------------------------------------------------------------------------- fused_epilogue

fused_epilogue = Exercise(
    "16.fused_epilogue",
    title="A gated product that writes only its result",
    function="gated_product",
    minutes=30,
    points=15,
    statement="""
The first half of a SwiGLU (chapter 4) is `silu(x @ gate) * (x @ up)`. As two products and an elementwise operation, it
writes two arrays `[M, N]` and reads them again. Write `gated_product(x_MK, gate_KN, up_KN, tiles)`, which writes only
the result.

- It is one Pallas call. Each tile of x is loaded once and used for both products.
- Everything is float32 until the result is rounded to bfloat16, once.
- The lengths in `tiles`, (m, k, n), divide M, K and N. K is summed innermost.
- Two cores may share the tiles of the result.
- It compiles for a v5e at M = 1024, K = 4096, N = 1024 with tiles (256, 256, 256).
""",
    hints=(
        "`silu` of a sum isn't the sum of silus. When can you apply it, and how many sums have to wait until then?",
        "The kernel has three inputs, one result and two scratch arrays. Both weights have the same index map.",
        "At step 0, set both sums to 0. Add `jnp.dot(x, gate_ref[...], preferred_element_type=jnp.float32)` to one, "
        "and the product with `up_ref[...]` to the other. At the last step, store `(jax.nn.silu(gate_sum_ref[...]) * "
        "up_sum_ref[...]).astype(o_ref.dtype)`.",
    ),
)


def gates(fn, t, M, K, N, tiles, scale=1.0, cores=1):
    x, gate, up = numbers(t, M, K), scale * numbers(t, K, N), numbers(t, K, N)
    got, run = simulate(t, lambda *a: fn(*a, tiles), x, gate, up, cores=cores)
    z = wide(x) @ wide(gate)
    want = z / (1 + np.exp(-z)) * (wide(x) @ wide(up))
    text = f"M={M}, K={K}, N={N} in tiles {tiles}"
    # One rounding to bfloat16 moves a number by up to 1/256 of it, and more roundings by more.
    y, k = wide(x) @ wide(up), tiles[1]
    last, silu = K - k, lambda z: z / (1 + np.exp(-z))
    z_last, y_last = (wide(x)[:, last:] @ wide(w)[last:] for w in (gate, up))
    with np.errstate(all="ignore"):
        mistakes = {
            "silu is applied to `up`: it belongs to the gate": z * silu(y),
            "silu is applied to the product of both: it belongs to the gate": silu(z * y),
            "silu is missing": z * y,
            "That is the gate's sigmoid: silu(z) is z * sigmoid(z)": silu(z) / z * y,
            "That is gelu of the gate": np.asarray(jax.nn.gelu(jnp.asarray(z))) * y,
            "That is relu of the gate": np.maximum(z, 0) * y,
            "Only the last tile of K counts": silu(z_last) * y_last,
            "`up` has no part in it": silu(z),
            "The two are added, not multiplied": silu(z) + y,
        }
    t.close(got, want, 4.2e-3, 2e-3, text, BF16, mistakes)
    return run


@fused_epilogue.check("one tile")
def _(fn, t):
    gates(fn, t, 16, 128, 128, (16, 128, 128))


@fused_epilogue.check("several tiles, and their loads")
def _(fn, t):
    run = gates(fn, t, 32, 256, 256, (16, 128, 128), scale=0.25)
    t.equal(run.loads[:-1], [8, 8, 8], why="tiles of x, gate and up that 8 steps load")
    t.equal(run.stores[-1], 4, why="tiles of the result that are stored")
    run = gates(fn, t, 32, 512, 256, (32, 256, 256), scale=0.25)
    t.equal(run.loads[:-1], [2, 2, 2], why="tiles of x, gate and up that 2 steps load")


@fused_epilogue.check("gates of -90 and 90")
def _(fn, t):
    gates(fn, t, 16, 256, 128, (16, 128, 128), scale=6.0)


@fused_epilogue.check("two cores share the tiles of the result")
def _(fn, t):
    run = gates(fn, t, 32, 256, 128, (16, 128, 128), cores=2)
    cores = {core for core, _ in run.visits}
    why = "only one core has work to do: no dimension of the grid is parallel"
    t.true(len(cores) == 2, why, len(cores))


@fused_epilogue.check("Mosaic compiles it, and nothing is left outside")
def _(fn, t):
    args = spec(1024, 4096), spec(4096, 1024), spec(4096, 1024)
    compiles(t, lambda *a: fn(*a, (256, 256, 256)), *args)
    one_call(t, lambda *a: fn(*a, (256, 256, 256)), *args)


def gated_product_with(
    *,
    begin="both",
    when="last",
    finish=lambda gate, up: jax.nn.silu(gate) * up,
    semantics=("parallel", "parallel", "arbitrary"),
    sums=F32,
    two_x=False,
):
    """The solution with a mistake that is asked for."""

    def fn(x_MK, gate_KN, up_KN, tiles):
        (M, K), N = x_MK.shape, gate_KN.shape[1]
        m, k, n = tiles

        def kernel(x_ref, *refs):
            also_ref = refs[0] if two_x else x_ref
            gate_ref, up_ref, o_ref, gate_sum_ref, up_sum_ref = refs[two_x:]
            step = pl.program_id(2)

            @pl.when(step == 0)
            def _():
                gate_sum_ref[...] = jnp.zeros_like(gate_sum_ref)
                if begin == "both":
                    up_sum_ref[...] = jnp.zeros_like(up_sum_ref)

            gate = jnp.dot(x_ref[...], gate_ref[...], preferred_element_type=F32)
            up = jnp.dot(also_ref[...], up_ref[...], preferred_element_type=F32)
            if when == "step":
                gate_sum_ref[...] += jax.nn.silu(gate) * up
            else:
                gate_sum_ref[...] = (gate_sum_ref[...] + gate).astype(sums)
                up_sum_ref[...] = (up_sum_ref[...] + up).astype(sums)

            @pl.when(step == (0 if when == "first" else pl.num_programs(2) - 1))
            def _():
                z = gate_sum_ref[...]
                o_ref[...] = (z if when == "step" else finish(z, up_sum_ref[...])).astype(BF16)

        weights = pl.BlockSpec((k, n), lambda r, c, s: (s, c))
        block = pl.BlockSpec((m, k), lambda r, c, s: (r, s))
        return pl.pallas_call(
            kernel,
            grid=(M // m, N // n, K // k),
            in_specs=[*([block] * (1 + two_x)), weights, weights],
            out_specs=pl.BlockSpec((m, n), lambda r, c, s: (r, c)),
            out_shape=spec(M, N),
            scratch_shapes=[pltpu.VMEM((m, n), sums)] * 2,
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        )(*([x_MK] * (1 + two_x)), gate_KN, up_KN)

    return fn


def bf16(x):
    return x.astype(BF16)


mistaken(
    fused_epilogue,
    "silu_of_each_step",
    "You apply silu to the product of each pair of tiles and add the results. silu of a sum isn't the sum of "
    "silus: apply it once, when both sums are complete.",
    gated_product_with(when="step"),
)
mistaken(
    fused_epilogue,
    "finished_at_the_first_step",
    "You finish at the first step, when the sums hold only one tile of K. The last step is `pl.num_programs(2) - "
    "1`.",
    gated_product_with(when="first"),
)
mistaken(
    fused_epilogue,
    "gate_and_up_swapped",
    "You apply silu to the product with `up`. It belongs to the gate.",
    gated_product_with(finish=lambda gate, up: gate * jax.nn.silu(up)),
)
mistaken(
    fused_epilogue,
    "sigmoid",
    "You multiply by the sigmoid of the gate. silu(z) is z times its sigmoid.",
    gated_product_with(finish=lambda gate, up: jax.nn.sigmoid(gate) * up),
)
mistaken(
    fused_epilogue,
    "rounded_before_the_gate",
    "You round both sums to bfloat16 and then multiply. They're in VMEM, where float32 costs nothing extra: round "
    "only the result, once.",
    gated_product_with(finish=lambda gate, up: jax.nn.silu(bf16(gate).astype(F32)) * bf16(up)),
)
mistaken(
    fused_epilogue,
    "narrow_sums",
    "Your scratch is bfloat16, so each step rounds the sums. Make it float32.",
    gated_product_with(sums=BF16),
)
mistaken(
    fused_epilogue,
    "one_sum_not_begun",
    "You set only one of the two sums to zero.",
    gated_product_with(begin="gate"),
)
mistaken(
    fused_epilogue,
    "x_loaded_twice",
    "You pass x to the kernel twice, so its tiles are loaded twice. You can read one ref twice.",
    gated_product_with(two_x=True),
)
mistaken(
    fused_epilogue,
    "nothing_in_parallel",
    'You mark no dimension as parallel. Tiles of rows and of columns are: ("parallel", "parallel", "arbitrary").',
    gated_product_with(semantics=("arbitrary",) * 3),
)


@fused_epilogue.mutant(
    "You compute the products in kernels and gate them outside. Both are written to HBM and read again, which is "
    "what you wanted to avoid."
)
def gated_outside(x_MK, gate_KN, up_KN, tiles):
    gate, up = (tiled_matmul_with()(x_MK, w, tiles) for w in (gate_KN, up_KN))
    return (jax.nn.silu(gate.astype(F32)) * up).astype(BF16)


# ------------------------------------------------------------------------------ choose_tiles

choose = Exercise(
    "16.choose_tiles",
    title="Tiles that fit and move little",
    function="choose_tiles",
    minutes=25,
    points=10,
    statement="""
Arithmetic can choose tiles before you ask a compiler. Write `choose_tiles(M, K, N, budget)` for this chapter's matmul:
bfloat16 in and out, grid (rows, columns, steps of K), a float32 scratch of `(m, n)`.

- m, k and n are each 128, 256, 512, 1024, 2048 or 4096, and divide M, K and N.
- Each of the three blocks is in VMEM twice, the scratch once. Together they take at most `budget`.
- Among those, choose the tiles that move the fewest bytes between HBM and VMEM. A tile is loaded **unless the previous
  step had the same one**. So with a single step of K, a tile of x stays while columns pass, and if one tile of w is all
  of w, it is loaded once. Each tile of the result is stored once.
- If several move equally few bytes, take the one with the fewest steps in all, then with the least VMEM, then the
  smallest (m, k, n).

It returns the tiles and the bytes, or None if no tiles fit. The last check asks about a product whose sizes are drawn
for you.
""",
    hints=(
        "How many times does all of x go through VMEM? How many times does w? In which two cases are these not the "
        "number of tiles of columns, and of rows?",
        "VMEM: `2 * 2 * (m * k + k * n + m * n) + 4 * m * n` bytes. With more than one step of K, x moves "
        "`N // n` times and w `M // m` times.",
        "Go over `itertools.product` of the lengths that divide, skip those over the budget, collect `(moved, rows * "
        "columns * steps, vmem, (m, k, n))` and take `min`. x moves once if `steps == 1`, w once if `steps * columns "
        "== 1`.",
    ),
)

LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def choose_with(
    *,
    buffers=2,
    scratch=4,
    strict_limit=False,
    stays="xw",
    order=(0, 1, 2, 3),
    result=1,
    swap=False,
    lengths=LENGTHS,
):
    """The solution with a mistake that is asked for."""

    def fn(M, K, N, budget):
        found = []
        divisors = ([length for length in lengths if size % length == 0] for size in (M, K, N))
        for m, k, n in itertools.product(*divisors):
            vmem = buffers * 2 * (m * k + k * n + m * n) + scratch * m * n
            if vmem > budget or (strict_limit and vmem == budget):
                continue
            rows, columns, steps = M // m, N // n, K // k
            x_times, w_times = (rows, columns) if swap else (columns, rows)
            if "x" in stays and steps == 1:
                x_times = 1
            if "w" in stays and (steps if "W" in stays else steps * columns) == 1:
                w_times = 1
            stored = steps if result == "steps" else result
            moved = 2 * (x_times * M * K + w_times * K * N + stored * M * N)
            row = (moved, rows * columns * steps, vmem, (m, k, n))
            found.append(([row[i] for i in order], row))
        if not found:
            return None
        _, (moved, _, _, tiles) = min(found)
        return tiles, moved

    return fn


right = choose_with()


def bytes_moved(tiles, M, K, N):
    """How often x and w move, and the bytes in all."""
    m, k, n = tiles
    steps, columns = K // k, N // n
    x_times, w_times = columns if steps > 1 else 1, M // m if steps * columns > 1 else 1
    return x_times, w_times, 2 * (x_times * M * K + w_times * K * N + M * N)


def tiles_tell(tiles, told, M, K, N, budget):
    """What tiles take and move, by the statement."""
    if not all(n in LENGTHS and size % n == 0 for n, size in zip(tiles, (M, K, N), strict=True)):
        return f"{tiles} is not a choice: lengths are among {LENGTHS} and divide"
    m, k, n = tiles
    vmem, steps = 4 * (m * k + k * n + m * n) + 4 * m * n, K // k
    x_times, w_times, moved = bytes_moved(tiles, M, K, N)
    fits = "which fit" if vmem <= budget else "which don't fit"
    said = "" if told == moved else f" (not {told:,})"
    return (
        f"{tiles} take {vmem:,} bytes of VMEM, {fits}, and move {moved:,}{said}: x {x_times} times, w "
        f"{w_times} times, in {M // m * (N // n) * steps:,} steps"
    )


def which_is_better(got, want, M, K, N, budget):
    """Why the second of two choices is the right one, by the statement's order."""
    (tiles, told), (best, moved) = got, want
    if not all(n in LENGTHS and size % n == 0 for n, size in zip(tiles, (M, K, N), strict=True)):
        return ""
    if tiles == best:
        return f". The tiles are right; the bytes are {told / moved:.4g} times what they move"
    if told != bytes_moved(tiles, M, K, N)[2]:
        return ""  # what is off is said already
    vmem, again = (4 * (m * k + k * n + m * n) + 4 * m * n for m, k, n in (tiles, best))
    steps, fewer = ((M // m) * (K // k) * (N // n) for m, k, n in (tiles, best))
    if vmem > budget:
        return ". Yours take more than the budget"
    if told > moved:
        return ". The second move fewer bytes"
    if told == moved and steps > fewer:
        return ". They move as many bytes, and the second take fewer steps"
    if told == moved and steps == fewer:
        less = "take less VMEM" if vmem > again else "come first in order"
        return f". They move as many bytes in as many steps, and the second {less}"
    return ""


def chooses(fn, t, *cases):
    """A case is (M, K, N, budget). All of them are observed: two mistakes often agree on one."""
    found = []
    for case in cases:
        got = fn(*case)
        t.equal(
            2 if got is None else len(got),
            2,
            why="results: the tiles (m, k, n), and the bytes moved",
        )
        found.append((tuple(int(x) for x in got[0]), int(got[1])) if got is not None else None)
    wanted = [right(*case) for case in cases]
    seen = np.zeros((len(cases), 4))
    for row, got, want in zip(seen, found, wanted, strict=True):
        if got is not None:  # numbers of like size, so that each counts
            row[:] = (*np.log2(np.maximum(got[0], 1)), got[1] / (want[1] if want else 1))
    for (M, K, N, budget), got, want in zip(cases, found, wanted, strict=True):
        text = f"got {got}, want {want}: M={M}, K={K}, N={N} and a budget of {budget:,} bytes"
        for tiles, moved in filter(None, (got, want)):
            text += f". {tiles_tell(tiles, moved, M, K, N, budget)}"
        if got and want:
            text += which_is_better(got, want, M, K, N, budget)
        t.true(got == want, text, seen)


@choose.check("every length in every dimension")
def _(fn, t):
    # Each of the six lengths is the right m of one of these, the right k of one and the right n of one.
    cases = (
        (8192, 1024, 8192, 2**23), (128, 512, 2048, 2**23), (2048, 256, 512, 2**21),
        (512, 2048, 4096, 2**26), (2048, 4096, 1024, 2**26), (4096, 128, 128, 2**24),
        (4096, 4096, 4096, 12 * 2**20),
        (256, 2048, 2048, 2**22),  # the fewest steps move more
        (1024, 256, 2048, 2**24),  # two tiles that move as few, in as many steps, and differ in VMEM
        (6144, 1024, 256, 2**19),  # two tiles that differ in their order alone
        # Budgets that are no round numbers: whatever is counted wrong leaves other tiles.
        (4096, 768, 1536, 1_000_000), (6144, 3072, 9216, 5_000_000), (2560, 7680, 5120, 3_333_333),
        (10_752, 4096, 9600, 5_768_697), (4096, 8192, 2048, 20_000_000), (1536, 2048, 3072, 9_000_000),
    )  # fmt: skip
    chooses(fn, t, *cases)


@choose.check("budgets that just fit, and that just don't")
def _(fn, t):
    for m, k, n in ((512, 512, 512), (256, 1024, 512), (128, 128, 128)):
        vmem = 4 * (m * k + k * n + m * n) + 4 * m * n
        for budget in (vmem, vmem - 1):
            chooses(fn, t, (4096, 8192, 6144, budget))


@choose.check("no tiles fit")
def _(fn, t):
    chooses(fn, t, (1024, 1024, 1024, 262_143))


@choose.check("one step of K, one tile of w")
def _(fn, t):
    for M, K, N in ((8192, 128, 2048), (8192, 256, 256), (65536, 512, 512), (256, 512, 8192)):
        chooses(fn, t, (M, K, N, int(t.rng.integers(3, 12)) * 2**20))


@choose.check("products of many shapes")
def _(fn, t):
    sizes = 128 * t.rng.integers(1, 100, (40, 3))
    cases = [
        (*row, budget) for row, budget in zip(sizes, t.rng.integers(2**18, 2**24, 40), strict=True)
    ]
    chooses(fn, t, *(tuple(int(n) for n in case) for case in cases))


@choose.check("a product of your own")
def _(fn, t):
    sizes = [1024 * (1 + (t.learner >> shift) % 16) for shift in (0, 4, 8)]
    chooses(fn, t, (*sizes, 2**20 * (4 + (t.learner >> 12) % 9)))


mistaken(
    choose,
    "single_buffered",
    "You count each block once. While one step computes, the next one's blocks arrive, so each block is in VMEM "
    "twice, including the result's.",
    choose_with(buffers=1),
)
mistaken(
    choose,
    "no_scratch",
    "You forgot the float32 scratch of (m, n).",
    choose_with(scratch=0),
)
mistaken(
    choose,
    "scratch_twice",
    "You count the scratch twice, as if it were a block. It isn't copied to or from HBM, so there's only one.",
    choose_with(scratch=8),
)
mistaken(
    choose,
    "budget_not_used_up",
    "You refuse tiles that take exactly the budget. They fit.",
    choose_with(strict_limit=True),
)
mistaken(
    choose,
    "x_never_stays",
    "With a single step of K, the tile of x stays the same while columns pass, so it isn't loaded again.",
    choose_with(stays="w"),
)
mistaken(
    choose,
    "w_never_stays",
    "If one tile of w is all of w, it is the same in every step and loaded only once.",
    choose_with(stays="x"),
)
mistaken(
    choose,
    "two_bytes_short",
    "You count two bytes too few for each number of a tile of the result. Its block is in VMEM twice, like the "
    "others, and the scratch is float32.",
    choose_with(scratch=2),
)
mistaken(
    choose,
    "w_stays_with_one_step",
    "With a single step of K you load w once. While columns pass, each needs another tile of w, and all of them again "
    "for the next rows: only if one tile is all of w does it stay.",
    choose_with(stays="xwW"),
)
mistaken(
    choose,
    "vmem_forgotten",
    "If several tiles move equally few bytes in equally few steps, take the one with the least VMEM. You don't.",
    choose_with(order=(0, 1, 3)),
)
mistaken(
    choose,
    "rows_and_columns_swapped",
    "You have x move once for each tile of *rows*. Each of its tiles is needed for every tile of columns: x moves "
    "N / n times, and w M / m times.",
    choose_with(swap=True),
)
mistaken(
    choose,
    "result_not_counted",
    "You count what is loaded, but not the result that is stored.",
    choose_with(result=0),
)
mistaken(
    choose,
    "result_at_every_step",
    "You count a store of the result for each step of K. Its tile stays in VMEM while the sum grows, and is stored "
    "once.",
    choose_with(result="steps"),
)
mistaken(
    choose,
    "ties_by_size",
    "If several tiles move equally few bytes, you take the smallest (m, k, n). The fewest steps come first, then the "
    "least VMEM.",
    choose_with(order=(0, 3)),
)
mistaken(
    choose,
    "fewest_steps",
    "You choose the fewest steps, that is, the largest tiles. The exercise asks for the fewest bytes; steps only "
    "break ties.",
    choose_with(order=(1, 0, 2, 3)),
)
mistaken(
    choose,
    "no_4096",
    "You leave out tiles of 4096, the longest allowed.",
    choose_with(lengths=LENGTHS[:-1]),
)
mistaken(
    choose,
    "steps_forgotten",
    "If several tiles move equally few bytes, take the one with the fewest steps in all. You don't.",
    choose_with(order=(0, 2, 1, 3)),
)

# -------------------------------------------------------------------------- double_buffering

double_buffering = Exercise(
    "16.double_buffering",
    title="Copy one part, multiply another",
    function="streamed_matmul",
    minutes=35,
    points=20,
    forbid=("jax.experimental.pallas.tpu.emit_pipeline",),
    statement="""
Write `streamed_matmul(x_MK, w_KN, k)` for few rows of x and a weight matrix that is too large to be one block. Start
the copies yourself.

- It is one Pallas call. x and the result are whole in VMEM (`pl.BlockSpec()`). w stays in HBM
  (`pl.BlockSpec(memory_space=pl.ANY)`) and comes in parts of k rows, where k divides K. Each part is copied once.
- VMEM holds only **two** parts of w, each in its own slot with its own semaphore. While one part is multiplied, the
  next is being copied. (`pltpu.SemaphoreType.DMA((2,))` is an array of two semaphores; `ref.at[i]` names one of them.)
- The result is float32, and so are its sums.
- It compiles for a v5e with x `[128, 16384]` and w `[16384, 1024]`, which takes 32 MiB, twice what a kernel
  gets by default. Mosaic needs to know that a slice of x's columns starts at a multiple of 128:
  `pl.multiple_of(step * k, k)` tells it.
""",
    hints=(
        "First write it with one slot: start, wait, multiply. Which copy can you start before that wait, and into "
        "which slot?",
        "Part `step` goes to slot `step % 2`. Before you wait for part `step`, start part `step + 1` if there is one. "
        "The other slot was read one step ago, so it is free.",
        "`def copy(step)` returns `pltpu.make_async_copy(w_ref.at[pl.ds(step * k, k)], parts_ref.at[step % 2], "
        "done_ref.at[step % 2])`. Start `copy(0)`. In `@pl.loop(0, K // k)`, start `copy(step + 1)` under "
        "`pl.when(step + 1 < steps)`, then call `copy(step).wait()`, then add the product.",
    ),
)


def streams(fn, t, M, K, N, k):
    x, w = numbers(t, M, K), numbers(t, K, N)
    got, run = simulate(t, lambda x, w: fn(x, w, k), x, w)
    t.close(got, wide(x) @ wide(w), 1e-4, 1e-3, f"[{M}, {K}] times [{K}, {N}], k={k}", F32)
    t.equal(run.loads[1], K // k, why="how many parts of w are copied")


def in_order(jaxpr):
    """Names of the primitives of a kernel, loops' bodies once and branches one after another."""
    for eqn in jaxpr.eqns:
        for p in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(p, "eqns") or hasattr(p, "jaxpr"):
                yield from in_order(getattr(p, "jaxpr", p))
        yield eqn.primitive.name


@double_buffering.check("one part is copied while another is multiplied")
def _(fn, t):
    jaxpr = jax.make_jaxpr(lambda x, w: fn(x, w, 128))(spec(16, 1024), spec(1024, 128)).jaxpr
    names = list(in_order(jaxpr))
    t.true("dma_start" in names, "the kernel starts no copy", "no copy")
    t.true("dma_wait" in names, "the kernel waits for no copy", "no wait")
    t.true("dot_general" in names, "the kernel has no product", "no product")
    before = names[: names.index("dot_general")]
    flying = before.count("dma_start") - before.count("dma_wait")
    why = "while the first part is multiplied, no other is being copied: the chip waits for each"
    t.true(flying > 0, why, flying)


@double_buffering.check("one part")
def _(fn, t):
    streams(fn, t, 16, 128, 128, 128)


@double_buffering.check("two parts")
def _(fn, t):
    streams(fn, t, 16, 256, 128, 128)


@double_buffering.check("five parts")
def _(fn, t):
    streams(fn, t, 24, 640, 256, 128)


@double_buffering.check("larger parts")
def _(fn, t):
    streams(fn, t, 16, 768, 128, 256)


@double_buffering.check("no unnecessary copies")
def _(fn, t):
    x, w = numbers(t, 16, 256), numbers(t, 256, 128)
    # In the strict simulator a copy takes place when it is waited for, and here when it starts.
    params = pltpu.InterpretParams(out_of_bounds_reads="raise", dma_execution_mode="eager")
    found = "no"
    try:
        with pltpu.force_tpu_interpret_mode(params):
            jax.block_until_ready(jax.jit(lambda x, w: fn(x, w, 128))(x, w))
    except jax.errors.JaxRuntimeError as error:
        found = "out of bounds" if "ut-of-bounds" in str(error) else str(error)[-200:]
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    t.true(found == "no", "a copy is started of rows of w that are not there", found)


def scratch_numbers(jaxpr, dtype):
    """How many numbers of a type the scratch of a function's Pallas call holds in VMEM."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            count = eqn.params["grid_mapping"].num_scratch_operands
            refs = eqn.params["jaxpr"].invars
            scratch = [ref.aval for ref in refs[len(refs) - count :]]
            total += sum(math.prod(x.shape) for x in scratch if x.dtype == dtype)
            continue
        for p in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(p, "jaxpr"):
                total += scratch_numbers(p.jaxpr, dtype)
    return total


@double_buffering.check("at most two slots")
def _(fn, t):
    jaxpr = jax.make_jaxpr(lambda x, w: fn(x, w, 128))(spec(16, 1024), spec(1024, 128)).jaxpr
    places = scratch_numbers(jaxpr, BF16) / (128 * 128)
    why = f"the scratch has room for {places:g} parts of w, where two are enough"
    t.true(places <= 2, why, places)


@double_buffering.check("Mosaic compiles it, and w is not whole in VMEM")
def _(fn, t):
    compiles(t, lambda x, w: fn(x, w, 256), spec(128, 16384), spec(16384, 1024))


def streamed_with(
    *,
    order="start wait dot",
    slot=lambda step: step % 2,
    read=None,
    wait=True,
    guard=True,
    zero=True,
    columns=True,
    whole=False,
    places=2,
    semaphores=True,
):
    """The solution with a mistake that is asked for."""

    def fn(x_MK, w_KN, k):
        (M, K), N = x_MK.shape, w_KN.shape[1]
        steps = K // k

        def kernel(x_ref, w_ref, o_ref, parts_ref, done_ref):
            def copy(step):
                rows, at = pl.ds(step * k, k), slot(step)
                done = done_ref.at[at if semaphores else 0]
                return pltpu.make_async_copy(w_ref.at[rows], parts_ref.at[at], done)

            def start_next(step):
                if guard:
                    pl.when(step + 1 < steps)(lambda: copy(step + 1).start())
                else:
                    copy(step + 1).start()

            def multiply(step):
                at = pl.multiple_of(step * k, k) if columns else 0
                w = parts_ref[(read or slot)(step)]
                o_ref[...] += jnp.dot(x_ref[:, pl.ds(at, k)], w, preferred_element_type=F32)

            if zero:
                o_ref[...] = jnp.zeros_like(o_ref)
            if order == "all":
                for part in range(steps):
                    copy(part).start()
            elif order != "serial":
                copy(0).start()

            @pl.loop(0, steps)
            def _(step):
                if order == "serial":
                    copy(step).start()
                if order == "start wait dot":
                    start_next(step)
                if wait:
                    copy(step).wait()
                multiply(step)
                if order == "wait dot start":
                    start_next(step)

        def whole_kernel(x_ref, w_ref, o_ref, parts_ref, done_ref):
            o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)

        w_spec = pl.BlockSpec() if whole else pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            whole_kernel if whole else kernel,
            in_specs=[pl.BlockSpec(), w_spec],
            out_shape=spec(M, N, dtype=F32),
            scratch_shapes=[
                pltpu.VMEM((places, k, N), BF16),
                pltpu.SemaphoreType.DMA((places if semaphores else 1,)),
            ],
        )(x_MK, w_KN)

    return fn


mistaken(
    double_buffering,
    "serial",
    "While a part is multiplied, no other is being copied, so the chip either copies or multiplies. Start the "
    "next part's copy before the product, not after it or just before its own wait.",
    streamed_with(order="serial"),
)
mistaken(
    double_buffering,
    "all_started_at_once",
    "You start all copies at the beginning. There are two slots, so the third part arrives where the first is still "
    "waiting to be read. Start part `step + 1` in step `step`.",
    streamed_with(order="all"),
)
mistaken(
    double_buffering,
    "one_place",
    "All parts go to the same slot, so the next one arrives where this one is being read. Use slot `step % 2`.",
    streamed_with(slot=lambda step: 0),
)
mistaken(
    double_buffering,
    "not_waited_for",
    "You never wait, so you read data that hasn't arrived. Call `wait()` on a copy of the same part before you "
    "use it.",
    streamed_with(wait=False),
)
mistaken(
    double_buffering,
    "other_place_read",
    "You multiply the part in the other slot, which is still arriving. Part `step` is in slot `step % 2`.",
    streamed_with(read=lambda step: (step + 1) % 2),
)
mistaken(
    double_buffering,
    "one_part_too_many",
    "At the last step, you start copying a part that doesn't exist. Start it under `pl.when(step + 1 < steps)`.",
    streamed_with(guard=False),
)
mistaken(
    double_buffering,
    "never_begun",
    "You add to a result that was never initialised. Store zeros before the first product.",
    streamed_with(zero=False),
)
mistaken(
    double_buffering,
    "same_columns_of_x",
    "You multiply every part of w by the first k columns of x. Part `step` needs the columns from `step * k` on.",
    streamed_with(columns=False),
)
mistaken(
    double_buffering,
    "all_of_w_in_vmem",
    "Your w is a single block. All of it is copied before the kernel starts, and a large one doesn't fit. Leave "
    "it in HBM with `memory_space=pl.ANY`.",
    streamed_with(whole=True),
)
mistaken(
    double_buffering,
    "three_places",
    "You keep three parts of w in VMEM. When part `step + 1` starts, part `step - 1` has been read, so its slot "
    "is free: two are enough.",
    streamed_with(slot=lambda step: step % 3, places=3),
)
mistaken(
    double_buffering,
    "one_semaphore",
    "Both slots share a semaphore. It counts arrivals but can't tell which copy arrived. Give each slot its own: "
    "`pltpu.SemaphoreType.DMA((2,))` and `done_ref.at[step % 2]`.",
    streamed_with(semaphores=False),
)
