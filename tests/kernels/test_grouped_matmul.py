"""Grouped matrix products: the kernels in the strict simulator and the XLA reference against a float64 oracle."""

import contextlib
import functools
import io
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitext import kernels
from minitext.compiler.targets import topology_mesh
from minitext.errors import UserError
from minitext.kernels import dispatch
from minitext.kernels.grouped_matmul import tpu
from minitext.kernels.grouped_matmul.xla import grouped_matmul as reference


@contextlib.contextmanager
def strict(seed):
    """Simulates kernels with races, late copies, NaN in unwritten memory and parallel steps in any order."""
    params = pltpu.InterpretParams(detect_races=True, random_seed=seed)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(params):
            yield
            jax.effects_barrier()
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE" not in printed.getvalue()


def oracle(lhs, rhs, sizes, probe):
    """The product and its gradients, one group at a time, in float64; rows that no group owns stay zeros."""
    lhs, rhs, probe = (np.asarray(x, np.float64) for x in (lhs, rhs, probe))
    out, grad_lhs, grad_rhs = np.zeros_like(probe), np.zeros_like(lhs), np.zeros_like(rhs)
    for g, high in enumerate(np.cumsum(sizes)):
        rows = slice(high - sizes[g], high)
        out[rows] = lhs[rows] @ rhs[g]
        grad_lhs[rows] = probe[rows] @ rhs[g].T
        grad_rhs[g] = lhs[rows].T @ probe[rows]
    return out, grad_lhs, grad_rhs


def inputs(M, K, N, G, dtype, owned):
    """Normal numbers, and NaN in the rows of `lhs` and of the result's gradient that no group owns."""
    rng = np.random.default_rng(0)
    lhs, rhs, probe = (rng.normal(size=size) for size in ((M, K), (G, K, N), (M, N)))
    lhs[owned:] = probe[owned:] = np.nan
    return [jnp.asarray(x, dtype) for x in (lhs, rhs, probe)]


def with_gradients(run):
    def f(lhs, rhs, sizes, probe):
        out, vjp = jax.vjp(lambda lhs, rhs: run(lhs, rhs, sizes), lhs, rhs)
        return out, *vjp(probe)

    return f


def agree(got, want, dtype):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        rounding = 2e-5 if dtype == "float32" else 2.0**-8
        np.testing.assert_allclose(np.float64(a), b, rtol=rounding, atol=2e-5)


def group_sizes(M, G):
    """Sizes of G groups, empty ones among them, that own some or all of M rows."""
    cuts = st.lists(st.integers(0, M), min_size=G, max_size=G).map(sorted)
    return cuts.map(lambda ends: [b - a for a, b in itertools.pairwise([0, *ends])])


# --- the definition

# M, K, N, G, tiles and type: rows, contraction and columns that their tiles do not divide.
CASES = {
    "f32": (13, 6, 5, 3, tpu.Tiles(8, 4, 8), "float32"),
    "bf16": (12, 4, 10, 3, tpu.Tiles(4, 4, 8), "bfloat16"),
    "one row": (1, 3, 10, 1, tpu.Tiles(8, 4, 8), "float32"),
}


@functools.cache
def simulated(case):
    M, K, N, G, tiles, dtype = CASES[case]
    lhs, rhs, probe = inputs(M, K, N, G, dtype, M)
    f = with_gradients(lambda *args: tpu.grouped_matmul(*args, tiles))
    return jax.jit(f).lower(lhs, rhs, jnp.zeros(G, jnp.int32), probe).compile()


def check_simulated(case, sizes):
    M, K, N, G, _, dtype = CASES[case]
    lhs, rhs, probe = inputs(M, K, N, G, dtype, sum(sizes))
    with strict(seed=1):
        got = simulated(case)(lhs, rhs, jnp.asarray(sizes, jnp.int32), probe)
        jax.block_until_ready(got)
    agree(got, oracle(lhs, rhs, sizes, probe), dtype)


@pytest.mark.parametrize("case", ["f32", pytest.param("bf16", marks=pytest.mark.audit)])
@given(data=st.data())
@settings(max_examples=4)
def test_kernels_agree_with_the_definition(case, data):
    M, _, _, G, *_ = CASES[case]
    check_simulated(case, data.draw(group_sizes(M, G)))


@pytest.mark.parametrize("sizes", [[0], [1]])
def test_one_row_or_none(sizes):
    check_simulated("one row", sizes)


# Every implementation that runs here as it is.
BY_XLA = {
    impl: jax.jit(with_gradients(functools.partial(kernels.grouped_matmul, impl=impl)))
    for op, impl in kernels.IMPLEMENTATIONS
    if op == "grouped_matmul" and impl.startswith("xla")
}


@pytest.mark.parametrize("impl", BY_XLA)
@given(sizes=group_sizes(9, 4), dtype=st.sampled_from(["float32", "bfloat16"]))
@example(sizes=[0, 0, 0, 0], dtype="float32")
@example(sizes=[0, 9, 0, 0], dtype="bfloat16")
@settings(max_examples=20)
def test_xla_agrees_with_the_definition(impl, sizes, dtype):
    lhs, rhs, probe = inputs(9, 6, 5, 4, dtype, sum(sizes))
    got = BY_XLA[impl](lhs, rhs, jnp.asarray(sizes, jnp.int32), probe)
    agree(got, oracle(lhs, rhs, sizes, probe), dtype)


# --- the table


visits = jax.jit(tpu.visits, static_argnums=(1, 2), static_argnames=("empty", "unowned"))


@given(
    sizes=group_sizes(40, 5),
    tile=st.sampled_from([8, 16, 40]),
    more=st.sampled_from(["", "empty", "unowned"]),
)
@example(sizes=[0, 0, 0, 0, 0], tile=16, more="empty")
@example(sizes=[0, 0, 0, 0, 0], tile=16, more="unowned")
@example(sizes=[40, 0, 0, 0, 0], tile=8, more="empty")
@example(sizes=[3, 0, 9, 5, 0], tile=8, more="unowned")
@settings(max_examples=30)
def test_every_tile_is_visited_once_for_each_group_in_it(sizes, tile, more):
    """And once more for what a kernel has to fill with zeros: groups without rows, or tiles that no group owns."""
    empty, unowned = more == "empty", more == "unowned"
    table, count = visits(jnp.asarray(sizes, jnp.int32), 40, tile, empty=empty, unowned=unowned)
    groups, tiles = (np.asarray(x)[: int(count)].tolist() for x in table[1:])
    owner = np.repeat(np.arange(5), sizes)
    wanted = {(int(g), row // tile) for row, g in enumerate(owner)}
    made = list(zip(groups, tiles, strict=True))
    assert wanted <= set(made)
    zeros = [visit for visit in made if visit not in wanted]
    if empty:
        assert [g for g, _ in zeros] == [g for g in range(5) if not sizes[g]]
    else:
        rest = range(-(-sum(sizes) // tile), -(-40 // tile))
        assert zeros == [(4, number) for number in rest if unowned]
    assert len(set(made)) == len(made)
    # A tile of the result stays on the chip as long as it is visited, and must not be needed again.
    assert groups == sorted(groups) and tiles == sorted(tiles)
    # The entries after them, which nobody visits, are in range too.
    assert set(np.asarray(table.tiles_V)) <= set(range(-(-40 // tile)))
    assert set(np.asarray(table.groups_V)) <= set(range(5))


# --- on meshes


def on_each_device(run, check_vma, rhs_axis=None):
    """Every device along `data` has rows and group sizes of its own, and all matrices or its own."""
    return with_gradients(
        jax.shard_map(
            lambda lhs, rhs, sizes: run(lhs, rhs, sizes[0]),
            in_specs=(P("data"), P(rhs_axis), P("data")),
            out_specs=P("data"),
            check_vma=check_vma,
        )
    )


def test_devices_multiply_their_own_rows_and_share_the_gradient():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sizes = jnp.asarray([[3, 0, 2], [0, 8, 0]], jnp.int32)
    lhs, rhs, probe = inputs(16, 4, 8, 3, "float32", 16)
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((lhs, P("data")), (rhs, P()), (sizes, P("data")), (probe, P("data")))
    ]
    run = functools.partial(tpu.grouped_matmul, tiles=tpu.Tiles(8, 4, 8))
    with jax.set_mesh(mesh), strict(seed=1):
        # The simulator runs a kernel's own operations without telling JAX along which axes they vary.
        got = jax.block_until_ready(jax.jit(on_each_device(run, check_vma=False))(*args))
    parts = [oracle(lhs[i : i + 8], rhs, sizes[i // 8], probe[i : i + 8]) for i in (0, 8)]
    (out0, left0, right0), (out1, left1, right1) = parts
    want = np.concatenate([out0, out1]), np.concatenate([left0, left1]), right0 + right1
    agree(got, want, "float32")


def compiled(target, M, K, N, G, dtype, rhs_axis=None):
    """The product and its gradients, compiled for the chips of a target, each with M rows and G matrices."""
    mesh = topology_mesh(target)
    ways = mesh.shape["data"]
    with jax.set_mesh(mesh):

        def array(spec, dtype, *shape):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        args = (
            array(P("data"), dtype, ways * M, K),
            array(P(rhs_axis), dtype, ways * G if rhs_axis else G, K, N),
            array(P("data"), jnp.int32, ways, G),
            array(P("data"), dtype, ways * M, N),
        )
        f = on_each_device(kernels.grouped_matmul, check_vma=True, rhs_axis=rhs_axis)
        return jax.jit(f).lower(*args).compile()


def test_kernels_compile_for_tpus_and_auto_takes_them():
    text = compiled("v5e:2x2", 300, 200, 130, 3, "bfloat16").as_text()
    for name in ("gmm", "gmm_transposed", "tgmm"):
        assert re.search(rf"%{name}[.\d]* = .*custom-call", text), name


@pytest.mark.audit
@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        *((target, "bfloat16") for target in ("v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")),
        ("v4:1x1x1", "float32"),
    ],
)  # fmt: skip
def test_mixtral_compiles_without_a_transposed_copy(target, dtype):
    M, K, N, G = 8192, 4096, 14336, 8
    memory = compiled(target, M, K, N, G, dtype, rhs_axis="data").memory_analysis()
    # Tables of visits: no transposed matrix, and no result whose last rows are yet to become zeros.
    assert memory.temp_size_in_bytes < 2**20


# --- dispatch


def test_auto_takes_xla_here_and_kernels_say_what_they_need(caplog):
    dispatch._log_once.cache_clear()
    caplog.set_level("INFO", "minitext.kernels")
    lhs, rhs, _ = inputs(4, 3, 5, 2, "float32", 4)
    sizes = jnp.asarray([1, 3], jnp.int32)
    np.testing.assert_allclose(
        kernels.grouped_matmul(lhs, rhs, sizes), reference(lhs, rhs, sizes), rtol=1e-5
    )
    assert [r.message for r in caplog.records] == ["grouped_matmul on cpu: xla_blocked"]
    with pytest.raises(UserError, match="pallas_tpu.*for a cpu"):
        kernels.grouped_matmul(lhs, rhs, sizes, impl="pallas_tpu")
    supports = tpu.supports
    assert supports(lhs, rhs, sizes) is None
    assert "bfloat16" in supports(lhs.astype("bfloat16"), rhs, sizes)
    assert "float16" in supports(lhs.astype("float16"), rhs.astype("float16"), sizes)
    assert "(0, 3)" in supports(lhs[:0], rhs, sizes)


def test_on_a_mesh_the_kernels_belong_inside_shard_map(one_device):
    lhs, rhs, _ = inputs(4, 3, 5, 2, "float32", 4)
    assert "shard_map" in tpu.supports(lhs, rhs, None)
