"""Flash attention for TPUs: in the simulator against the reference, its grid, and compiled ahead of time."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import tpu as pltpu

from minitext import kernels
from minitext.compiler.targets import topology_mesh
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.kernels.attention import tpu as flash_attention_tpu
from minitext.kernels.attention import xla as reference
from minitext.kernels.attention.mask import ALL, NONE, Mask
from minitext.kernels.attention.tpu_grid import FIRST, LAST, BlockShape, Task, Tile, plan
from minitext.kernels.simulator import strict
from tests.conftest import audit_but
from tests.kernels import dense

# Blocks that no chip would take but the simulator does, so that few tokens are many blocks.
SMALL = BlockShape(16, 32, forward=Tile(8, 8), backward=Tile(8, 16), column=16)


@pytest.fixture(autouse=True)
def fresh_simulator():
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


def simulate(f, *args, seed=0, visited=None):
    """Runs f on a simulated TPU: memory starts as NaN, out of bounds is an error, and so are races."""

    def record(token, place, _core):
        visited.append(tuple(int(x) for x in place))
        return token

    params = pltpu.InterpretParams(
        detect_races=True, random_seed=seed, grid_point_recorder=None if visited is None else record
    )
    with pltpu.force_tpu_interpret_mode(params):
        out = jax.block_until_ready(
            jax.jit(lambda *a: f(*a))(*args)
        )  # a function that no cache knows
    assert not simulator.races.races_found
    return out


def inputs(seed, B, T, N, K, H=8, size=1.0, dtype="float32"):
    rng = np.random.default_rng(seed)
    q = size * rng.normal(size=(B, T, N, H))
    k, v = rng.normal(size=(2, B, T, K, H))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def packed(seed, B, T):
    rng = np.random.default_rng(seed)
    return jnp.asarray(1 + np.cumsum(rng.random((B, T)) < 0.1, axis=1), jnp.int32)


def value_and_gradients(f, probe, *args):
    """Output, and gradients of its product with the probe."""

    def loss(*args):
        out = f(*args)
        return jnp.sum(probe * out.astype(jnp.float32)), out

    (_, out), grads = jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True)(*args)
    return out, *grads


flash = functools.partial(flash_attention_tpu.flash_attention, blocks=SMALL)
# With gradients of queries and of keys from two kernels, as for rows whose keys' gradients don't fit into VMEM.
flash_of_long_rows = functools.partial(flash, blocks=SMALL._replace(resident=False))


@st.composite
def masks(draw, T):
    blocks = None
    if draw(st.booleans()):
        side = -(-T // 32)
        row = st.tuples(*[st.booleans()] * side)
        blocks = draw(st.tuples(*[row] * side))
    window = draw(st.sampled_from([None, None, 1, 7, 20]))
    chunk = draw(st.sampled_from([None, None, 1, 5, 16, 24, 50]))
    return Mask(draw(st.booleans()), window, chunk, blocks, 32)


@given(
    data=st.data(), seed=st.integers(0, 99), T=st.sampled_from([37, 41, 16, 1]),
    heads=st.sampled_from([(2, 1), (4, 2), (1, 1)]), segmented=st.sampled_from([True, False]),
    softcap=st.sampled_from([2.0, None]), sinks=st.sampled_from([True, False]),
    flash=st.sampled_from([flash_of_long_rows, flash]),
)  # fmt: skip
@settings(max_examples=2)  # the first takes the first of each list
def test_it_equals_the_reference_in_value_and_gradient(
    data, seed, T, heads, segmented, softcap, sinks, flash
):
    q, k, v = inputs(seed, 1, T, *heads, size=3.0)
    segments = packed(seed, 1, T) if segmented else None
    mask = data.draw(masks(T))
    logits = (jnp.linspace(-2.0, 2.0, heads[0]),) if sinks else ()
    probe = jax.random.normal(jax.random.key(seed), q.shape)

    def run(attention):
        def f(q, k, v, *logits):
            options = {"mask": mask, "softcap": softcap, "sinks_N": logits[0] if logits else None}
            return attention(q, k, v, segments, **options)

        return functools.partial(value_and_gradients, f, probe)

    got = simulate(run(flash), q, k, v, *logits, seed=seed)
    want = jax.jit(run(reference.attention))(q, k, v, *logits)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))


@pytest.mark.audit  # in `make test` they are drawn above, and two are together below
@pytest.mark.parametrize("switches", dense.SWITCHES)
@pytest.mark.parametrize("segmented", [False, True])
def test_each_switch_is_that_of_the_reference(switches, segmented):
    got, want, plain = with_switches(simulate, flash, dense.SWITCHES[switches], 40, segmented)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))
    assert all(jnp.abs(a - b).max() > 1e-3 for a, b in zip(want, plain, strict=False))


def with_switches(simulate, flash, limits, T, segmented):
    """Output and gradients of the kernel, of the reference, and of the reference without switches."""
    limits = dict(limits)
    softcap, sinks = limits.pop("softcap", None), limits.pop("sinks", False)
    q, k, v = inputs(1, 1, T, 4, 2, size=3.0)
    segments = packed(1, 1, T) if segmented else None
    logits = (jnp.linspace(-2.0, 2.0, 4),) if sinks else ()
    probe = jax.random.normal(jax.random.key(1), q.shape)

    def run(attention, **options):
        def f(q, k, v, *logits):
            sinks_N = logits[0] if logits else None
            return attention(q, k, v, segments, sinks_N=sinks_N, **options)

        return functools.partial(value_and_gradients, f, probe)

    options = {"mask": Mask(**limits), "softcap": softcap}
    got = simulate(run(flash, **options), q, k, v, *logits)
    want = jax.jit(run(reference.attention, **options))(q, k, v, *logits)
    return got, want, jax.jit(run(reference.attention))(q, k, v)


def strictly(f, *args):
    """Runs f in the strict simulator, whose two cores take parallel steps in any order."""
    with strict():
        return jax.block_until_ready(jax.jit(lambda *a: f(*a))(*args))


@pytest.mark.audit
@pytest.mark.parametrize("switches", audit_but(["window and softcap"], dense.COMBINATIONS))
@pytest.mark.parametrize("T", audit_but([37], [1, 37]))
def test_switches_together_are_those_of_the_reference_in_the_strict_simulator(switches, T):
    got, want, plain = with_switches(strictly, flash, dense.COMBINATIONS[switches], T, T > 1)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))
    assert T == 1 or all(jnp.abs(a - b).max() > 1e-3 for a, b in zip(want, plain, strict=False))


@pytest.mark.parametrize("size", audit_but([3.0], [1.0, 3.0]))  # the larger, the fewer keys count
def test_in_bfloat16_it_is_no_further_from_float64_than_xla(size):
    q, k, v = inputs(0, 1, 256, 2, 1, H=64, size=size, dtype="bfloat16")
    probe = jax.random.normal(jax.random.key(1), q.shape, "bfloat16").astype("float32")
    blocks = BlockShape(128, 128, Tile(64, 64), Tile(64, 128))
    attention = functools.partial(flash_attention_tpu.flash_attention, blocks=blocks)
    got = simulate(functools.partial(value_and_gradients, attention, probe), q, k, v)
    xla = jax.jit(functools.partial(value_and_gradients, reference.attention, probe))(q, k, v)
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v))
        exact = value_and_gradients(float64_attention, jnp.asarray(np.float64(probe)), *wide)
    for a, b, c in zip(got, xla, exact, strict=True):
        assert a.dtype == "bfloat16"
        flash_error, xla_error = (np.linalg.norm(np.float64(x) - np.asarray(c)) for x in (a, b))
        # Where roundings are the same, as of the values' gradient, what differs is chance.
        assert flash_error <= 1.01 * xla_error


def float64_attention(q, k, v):
    (T, N, H), K = q.shape[1:], k.shape[2]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    logits = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(H)
    probs = jax.nn.softmax(jnp.where(np.tril(np.ones((T, T), bool)), logits, -np.inf), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", probs, v)


def test_large_and_infinite_logits_and_queries_that_see_nothing():
    """One row each: logits of +-90, a key that nobody reaches (-inf), and blocks that leave some queries no key."""
    q, k, v = inputs(0, 3, 48, 1, 1)
    q = q.at[0].multiply(40.0).at[1, ..., 0].set(2.0)
    assert float(jnp.abs(q[0, :, 0] @ k[0, :, 0].T).max() / math.sqrt(8)) > 90
    k = k.at[1, 20, 0, 0].set(-jnp.inf)
    blocks = ((False, True, True), (True, False, True), (False, False, False))
    mask = Mask(blocks=blocks, block=16)
    got = simulate(functools.partial(flash, mask=mask), q, k, v)
    want = jax.jit(functools.partial(reference.attention, mask=mask))(q, k, v)
    np.testing.assert_allclose(got, want, atol=2e-5)
    probe, nothing = jnp.ones((1, 48, 1, 8)), np.r_[0:16, 32:48]

    def run(attention):
        masked = functools.partial(attention, mask=mask)
        return functools.partial(value_and_gradients, masked, probe)

    args = q[:1], k[:1], v[:1]
    for got in (simulate(run(flash), *args), jax.jit(run(reference.attention))(*args)):
        assert all(np.all(np.isfinite(x)) for x in got)
        out, dq, dk, dv = got
        assert not np.any(out[:, nothing]) and not np.any(dq[:, nothing])
        assert np.any(out) and not np.any(dk[:, 16:]) and not np.any(dv[:, 16:])


def test_what_the_mask_excludes_is_neither_loaded_nor_a_step():
    T, blocks = 64, ((1, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0), (1, 0, 0, 1))
    mask = Mask(window=30, blocks=tuple(tuple(map(bool, row)) for row in blocks), block=16)
    q, k, v = inputs(0, 1, T, 2, 1)
    k, v = (
        x.at[:, 16:32].set(jnp.nan) for x in (k, v)
    )  # seen from the second block of queries alone
    visited = []
    got = simulate(functools.partial(flash, mask=mask), q, k, v, visited=visited)
    ok = np.r_[0:16, 32:64]
    clean = [jnp.nan_to_num(x) for x in (k, v)]
    want = reference.attention(q, *clean, mask=mask)
    np.testing.assert_allclose(got[:, ok], want[:, ok], atol=2e-5)
    # Of six blocks the window leaves five, and each of two heads visits them once.
    assert sorted(visited) == [(0, n, step) for n in range(2) for step in range(5)]


@given(
    data=st.data(), T=st.integers(1, 130), bq=st.sampled_from([8, 16]), bkv=st.sampled_from([8, 32])
)  # fmt: skip
@settings(max_examples=50)
def test_the_plan_visits_what_the_mask_leaves_and_knows_what_is_whole(data, T, bq, bkv):
    mask = data.draw(masks(T))
    seen = np.asarray(mask.sees(np.arange(T)[:, None], np.arange(T))) & mask.of_blocks(T)
    task = Task(mask, None, T, BlockShape(bq, bkv))
    kinds = mask.kinds(T, bq, bkv)
    for i, j in np.ndindex(*kinds.shape):
        part = seen[i * bq : (i + 1) * bq, j * bkv : (j + 1) * bkv]
        assert (kinds[i, j] != NONE) == part.any()
        if kinds[i, j] == ALL:
            assert part.all() and (j + 1) * bkv <= T
        elif part.all():
            assert (j + 1) * bkv > T
    for by_kv in (False, True):
        q, kv, kind = plan(task, by_kv=by_kv)
        row = kv if by_kv else q
        worked = (kind & 3) != NONE
        assert sorted(zip(q[worked], kv[worked], strict=True)) == [
            *zip(*np.nonzero(kinds), strict=True)
        ]
        # Every accumulator's steps follow each other; its first sets it to zero, its last writes it.
        assert list(row) == sorted(row) and set(row) == set(range(kinds.shape[by_kv]))
        np.testing.assert_array_equal((kind & FIRST) != 0, np.diff(row, prepend=-1) != 0)
        np.testing.assert_array_equal((kind & LAST) != 0, np.diff(row, append=-1) != 0)
        assert (
            len(row) == np.maximum((kinds.T if by_kv else kinds).astype(bool).sum(axis=1), 1).sum()
        )


def test_on_a_mesh_each_device_computes_its_rows_and_heads():
    from jax.sharding import PartitionSpec as P

    from minitext.sharding.mesh import make_mesh

    q, k, v = inputs(0, 2, 16, 4, 2)
    sinks, probe = jnp.linspace(-1.0, 1.0, 4), jax.random.normal(jax.random.key(0), q.shape)

    def run(attention, probe):
        f = lambda q, k, v, s: attention(q, k, v, None, sinks_N=s)  # noqa: E731
        return functools.partial(value_and_gradients, f, probe)

    want = jax.jit(run(reference.attention, probe))(q, k, v, sinks)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2), devices=jax.devices()[:4])):
        spec = P("data", None, "tensor", None)
        args = [jax.device_put(x, spec) for x in (q, k, v)]
        got = simulate(run(flash, jax.device_put(probe, spec)), *args, jax.device_put(sinks, P()))
        assert jax.typeof(got[0]).sharding.spec == spec
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


# --- dispatch


def on_tpu(B, T, N, K, H, dtype="bfloat16"):
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def test_it_says_what_it_needs():
    supports = flash_attention_tpu.supports
    assert supports(*on_tpu(1, 77, 4, 2, 64)) is None
    assert "got 24" in supports(*on_tpu(1, 77, 4, 2, 24))
    assert "float16" in supports(*on_tpu(1, 77, 4, 2, 64, "float16"))
    assert "got 96" in supports(
        *on_tpu(1, 77, 4, 2, 64), None, mask=Mask(blocks=((True,),), block=96)
    )


def test_masks_that_are_none_and_options_that_an_implementation_lacks_are_refused():
    q, k, v = inputs(0, 1, 128, 2, 1)
    for mask, word in (
        (Mask(window=0), "window=0"),
        (Mask(chunk=0), "chunk=0"),
        (Mask(blocks=((True,),), block=64), "give 2"),
        (Mask(blocks=((True,), (True, True)), block=64), "columns"),
    ):
        with pytest.raises(UserError, match=word):
            kernels.attention(q, k, v, mask=mask)
    with pytest.raises(UserError, match="softcap=-1"):
        kernels.attention(q, k, v, softcap=-1.0)
    for mask, word in ((Mask(causal=False), "causal=False"), (Mask(blocks=((True,),)), "blocks")):
        with pytest.raises(UserError, match=f"xla_blocked.*the mask has {word}"):
            kernels.attention(q, k, v, mask=mask, impl="xla_blocked")
    windowed = kernels.attention(q, k, v, mask=Mask(window=1))  # auto finds one that can
    np.testing.assert_allclose(windowed, jnp.repeat(v, 2, axis=2), atol=1e-6)


def compile_for(target, B, T, N, K, H, dtype="bfloat16", segmented=True, **options):
    """Compiles value and gradients for one chip, with what `auto` chooses there."""
    mesh = topology_mesh(target)
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(mesh.devices.flat[:1], ("data",), axis_types=mesh.axis_types[:1]),
        jax.sharding.PartitionSpec(),
    )
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x in on_tpu(B, T, N, K, H, dtype)
    ]
    if segmented:
        args.append(jax.ShapeDtypeStruct((B, T), "int32", sharding=sharding))

    def loss(q, k, v, segments=None):
        return jnp.sum(kernels.attention(q, k, v, segments, **options).astype(jnp.float32))

    with jax.set_mesh(sharding.mesh):
        lowered = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*args)
        assert lowered.as_text().count("tpu_custom_call") == 2
        return lowered.compile()


def test_it_compiles_for_v5e():
    mask = Mask(window=200, chunk=150, blocks=((True, False), (True, True)), block=256)
    compile_for("v5e:2x2", 1, 384, 2, 1, 128, mask=mask, softcap=30.0)


@pytest.mark.audit
@pytest.mark.parametrize("target", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_it_compiles_for_every_chip_at_the_shape_of_llama3_8b(target):
    compile_for(target, 1, 8192, 32, 8, 128)
    compile_for(target, 1, 1000, 4, 2, 64, dtype="float32", mask=Mask(causal=False, window=300))
    compile_for(target, 1, 1000, 4, 2, 128, mask=Mask(causal=False, chunk=400))


def temporary_bytes(B, T):
    """Of one layer's attention of Llama 3 8B, forward and backward, on a v5p."""
    one = topology_mesh("v5p:2x2x1").devices.flat[:1]
    mesh = jax.sharding.Mesh(one, ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = [
        jax.ShapeDtypeStruct((B, T, heads, 128), "bfloat16", sharding=there)
        for heads in (32, 8, 8, 32)
    ]

    def forward_and_backward(q, k, v, grad):
        out, backward = jax.vjp(kernels.attention, q, k, v)
        return out, backward(grad)

    with jax.set_mesh(mesh):
        compiled = jax.jit(forward_and_backward).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.audit
def test_memory_is_linear_in_tokens():
    """With 16 rows nothing is small enough to stay in VMEM, where memory costs nothing.

    What there is: q, k, v, the result and gradients with heads before tokens, and what rounding took from the result:
    4.52 times the queries, or 5.52 where XLA schedules a copy of one more beside them. In T squared it would be 16
    times as much at each step.
    """
    B, lengths = 16, (1024, 4096, 16384, 65536)
    found = [temporary_bytes(B, T) for T in lengths]
    queries = [B * T * 32 * 128 * 2 for T in lengths]
    assert all(q < bytes_ < 5.6 * q for bytes_, q in zip(found, queries, strict=True))
    assert all(high < 5 * low for low, high in itertools.pairwise(found))
