"""The strict simulator: it passes what is right in any order, and refuses each thing that is wrong."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.errors import UserError
from minitext.kernels.simulator import Fault, strict

ROWS, COLUMNS = 3, 4  # blocks


def row_sums(x, *, start=True, shift=0, back=False, semantics=("parallel", "arbitrary")):
    """Sums of the rows of [24, 512], with a mistake that is asked for."""

    def kernel(x_ref, o_ref):
        if start:

            @pl.when(pl.program_id(1) == 0)
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.sum(x_ref[...], axis=1, keepdims=True)

    return pl.pallas_call(
        kernel,
        grid=(ROWS, COLUMNS),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, j + shift))],
        out_specs=pl.BlockSpec((8, 1), lambda i, j: (j % ROWS if back else i, 0)),
        out_shape=jax.ShapeDtypeStruct((24, 1), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
    )(x)


def copied(x, *, too_early):
    """Twice the first tile, which a copy brings that the kernel waits for, in time or too late."""

    def kernel(x_hbm, o_ref, tile, done):
        copy = pltpu.make_async_copy(x_hbm.at[:8, :128], tile, done)
        copy.start()
        if too_early:
            o_ref[...] = 2 * tile[...]
        copy.wait()
        if not too_early:
            o_ref[...] = 2 * tile[...]

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
    )(x)


X = jnp.asarray(np.random.default_rng(0).normal(size=(24, 512)), jnp.float32)


def simulate(fn, *args, cores=2, seed=0):
    with strict(cores=cores, seed=seed) as runs:
        out = jax.jit(fn)(*args)
    return np.asarray(out), runs


def test_right_kernels_pass_in_any_order_and_each_step_is_seen():
    orders, jitted = [], jax.jit(row_sums)
    for seed in (0, 1, 2):
        with strict(seed=seed) as runs:
            out = jitted(X)  # one jitted function, traced anew each time
        np.testing.assert_allclose(out, X.sum(1, keepdims=True), rtol=1e-5, atol=1e-5)
        (run,) = runs
        points = sorted(point for _, point in run.visits)
        assert points == list(itertools.product(range(ROWS), range(COLUMNS)))
        assert {core for core, _ in run.visits} == {0, 1}
        assert run.loads == [ROWS * COLUMNS, 0] and run.stores == [0, ROWS]
        orders.append(sorted(run.visits))
    assert orders[0] != orders[1] or orders[0] != orders[2]
    with pytest.raises(ValueError, match="interpret"):
        jitted(X)  # outside nothing is simulated


def test_memory_that_nobody_wrote_is_nan():
    assert np.isnan(simulate(lambda x: row_sums(x, start=False), X)[0]).all()


def test_memory_may_start_as_zero():
    """What then differs depends on memory that nothing wrote. A buffer that is used again keeps what it held."""
    with strict(uninitialized="zero", cores=1):
        out = np.asarray(jax.jit(lambda x: row_sums(x, start=False))(X))
    np.testing.assert_allclose(out[:8], X[:8].sum(1, keepdims=True), rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all()


def test_a_block_that_is_not_loaded_again_counts_once():
    def kernel(row_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + row_ref[...]

    def add(row, x):
        block = pl.BlockSpec((8, 128), lambda j, i: (i, j))
        return pl.pallas_call(
            kernel,
            grid=(COLUMNS, ROWS),
            in_specs=[pl.BlockSpec((1, 128), lambda j, i: (0, j)), block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(row, x)

    out, (run,) = simulate(add, X[:1], X, cores=1)
    np.testing.assert_array_equal(out, X[:1] + X)
    assert run.loads[:2] == [COLUMNS, ROWS * COLUMNS]


@pytest.mark.parametrize("wrong, text", [
    (lambda x: row_sums(x, shift=1), r'block index \(\d, 4\) for input "x_ref".*\[\(.*512:640'),
    (lambda x: row_sums(x, back=True, semantics=None), "Revisited block .*0:8"),
    (lambda x: copied(x, too_early=True), r"race in VMEM: a read of \[:\] by core 0 .* and a write of \[:\] by a copy"),
])  # fmt: skip
def test_each_mistake_is_refused_in_one_line_and_the_next_kernel_runs(wrong, text):
    with pytest.raises(Fault, match=text) as caught:
        simulate(wrong, X)
    assert "\n" not in str(caught.value) and "slice(" not in str(caught.value)
    np.testing.assert_array_equal(
        simulate(lambda x: copied(x, too_early=False), X)[0], 2 * X[:8, :128]
    )


def test_two_cores_that_write_one_block_race(capsys):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pl.debug_print("a print of the kernel's own")

    def last(x, semantics):
        return pl.pallas_call(
            kernel,
            grid=(COLUMNS,),
            in_specs=[pl.BlockSpec((24, 128), lambda j: (0, j))],
            out_specs=pl.BlockSpec((24, 128), lambda j: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((24, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
        )(x)

    with pytest.raises(Fault, match="race in HBM: .* core 0 .* core 1"):
        simulate(lambda x: last(x, "parallel"), X)
    printed = capsys.readouterr().out
    assert printed.count("a print") == COLUMNS and "RACE" not in printed
    np.testing.assert_array_equal(simulate(lambda x: last(x, "arbitrary"), X)[0], X[:, -128:])


def test_a_vmapped_kernel_is_simulated():
    """`jax.vmap` adds a parallel dimension to the grid, as it does on a TPU."""
    both = jnp.stack([X, 2 * X])
    out, (run,) = simulate(jax.vmap(row_sums), both)
    np.testing.assert_allclose(out, both.sum(2, keepdims=True), rtol=1e-5, atol=1e-5)
    points = sorted(point for _, point in run.visits)
    assert points == list(itertools.product(range(2), range(ROWS), range(COLUMNS)))
    assert {core for core, _ in run.visits} == {0, 1}
    right = functools.partial(copied, too_early=False)
    with pytest.raises(UserError, match=r"\(pl.ANY\) can't be simulated, .*: use jax.lax.map"):
        simulate(jax.vmap(right), both)
    out, _ = simulate(functools.partial(jax.lax.map, right), both)
    np.testing.assert_array_equal(out, 2 * both[:, :8, :128])


def test_errors_that_are_not_the_simulators_pass_through():
    with pytest.raises(ZeroDivisionError), strict():
        raise ZeroDivisionError
    with pytest.raises(TypeError, match="argument"):
        simulate(lambda x: pl.pallas_call(lambda x_ref: None, out_shape=x)(x), X)
