"""The GPU kernels: run by Pallas's interpreter, lowered for CUDA, and, with JAX's CUDA plugin, compiled for an H100."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitext import kernels
from minitext.compiler.targets import topology_mesh
from minitext.config.sections import MeshConfig
from minitext.kernels import tiles_gpu
from minitext.kernels.attention import gpu as flash
from minitext.kernels.attention import gpu_blocks as walks
from minitext.kernels.attention import xla as reference
from minitext.kernels.attention.mask import ALL, NONE, Mask
from minitext.kernels.grouped_matmul import gpu as grouped
from minitext.kernels.grouped_matmul import xla as xla_grouped
from minitext.kernels.linear import padded
from minitext.kernels.linear import xla as xla_linear
from minitext.kernels.linear.xla import Specs
from minitext.kernels.linear_cross_entropy import gpu as cross_entropy
from minitext.kernels.lookup import gpu as lookup
from minitext.kernels.paged_attention import gpu as paged
from minitext.kernels.paged_attention.operands import NARROW
from minitext.kernels.rms_norm import gpu as norm
from minitext.sharding.mesh import make_mesh
from tests.conftest import audit_but
from tests.kernels import dense
from tests.kernels.test_paged_attention import inputs, narrow, oracle

SMALL = flash.BlockShapes(
    flash.Tile(16, 32, 4, 2), flash.Tile(32, 16, 4, 2), flash.Tile(16, 32, 4, 2)
)
SMALL_TILES = grouped.TileShapes(grouped.Tile(16, 32, 16, 4, 2), grouped.Tile(32, 16, 16, 4, 2))


def interpreted():
    """Runs the kernels on the CPU; memory that nobody wrote, and what lies past an array's end, is NaN there.

    The context is named after TPUs; with True it takes the interpreter that knows no chip, and masked loads.
    """
    return pltpu.force_tpu_interpret_mode(True)


def on_h100():
    """Says which GPU is meant where there is none: JAX from 0.11 asks for that before it lowers a kernel."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def drawn(out):
    """A random cotangent, of numbers that bfloat16 can hold."""
    drawn = jax.random.normal(jax.random.key(9), out.shape).astype(jnp.bfloat16)
    if not jax.sharding.get_abstract_mesh().empty:
        drawn = jax.sharding.reshard(drawn, jax.typeof(out).sharding.spec)
    return drawn.astype(out.dtype)


def with_gradients(f, *args, cotangent=drawn):
    """Returns f's value and its gradients by the floating-point arguments."""
    places = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def run(args):
        def of_some(*some):
            given = dict(zip(places, some, strict=True))
            return f(*(given.get(i, x) for i, x in enumerate(args)))

        out, vjp = jax.vjp(of_some, *(args[i] for i in places))
        return out, *vjp(cotangent(out))

    return jax.jit(run)(args)


# ---------------------------------------------------------------------------- flash attention


def attention_inputs(seed, T, N, K, H=16, B=1, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, H)), dtype) for n in (N, K, K))
    segments = jnp.asarray(1 + np.cumsum(rng.random((B, T)) < 0.1, axis=1), jnp.int32)
    return q, k, v, segments, jnp.asarray(rng.normal(size=N), jnp.float32)


@st.composite
def masks(draw, T=64):
    size = -(-T // 32)
    blocks = st.lists(st.tuples(*[st.booleans()] * size), min_size=size, max_size=size).map(tuple)
    limits = st.none() | st.integers(1, T)
    return Mask(draw(st.booleans()), draw(limits), draw(limits), draw(st.none() | blocks), 32)


@given(
    seed=st.integers(0, 99), T=st.sampled_from([100, 64, 5]), heads=st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    mask=masks(100), packed=st.sampled_from([True, False]), softcap=st.sampled_from([2.0, None]),
    sinks=st.sampled_from([True, False]),
)  # fmt: skip
@settings(max_examples=2)  # the first takes the first of each list
def test_flash_attention_is_the_reference(seed, T, heads, mask, packed, softcap, sinks):
    q, k, v, segments, sinks_N = attention_inputs(seed, T, *heads)
    args = q, k, v, *([sinks_N] if sinks else [])

    def run(f, q, k, v, sinks_N=None):
        segment_ids = segments if packed else None
        return f(q, k, v, segment_ids, mask=mask, softcap=softcap, sinks_N=sinks_N)

    with interpreted():
        kernels = functools.partial(flash.flash_attention, blocks=SMALL)
        got = with_gradients(functools.partial(run, kernels), *args)
    want = with_gradients(functools.partial(run, reference.attention), *args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("switches", audit_but(["all"], [*dense.SWITCHES, *dense.COMBINATIONS]))
@pytest.mark.parametrize("T", audit_but([37], [1, 37]))
def test_switches_of_flash_attention_are_those_of_the_reference(switches, T):
    limits = dict((dense.SWITCHES | dense.COMBINATIONS)[switches])
    softcap, sinks = limits.pop("softcap", None), limits.pop("sinks", False)
    q, k, v, segments, sinks_N = attention_inputs(1, T, 4, 2)
    args = 3 * q, k, v, *([sinks_N] if sinks else [])

    def run(f, q, k, v, sinks_N=None, **options):
        return f(q, k, v, segments, sinks_N=sinks_N, **options)

    options = {"mask": Mask(**limits), "softcap": softcap}
    with interpreted():
        kernel = functools.partial(flash.flash_attention, blocks=SMALL)
        got = with_gradients(functools.partial(run, kernel, **options), *args)
    want = with_gradients(functools.partial(run, reference.attention, **options), *args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))
    plain = with_gradients(functools.partial(run, reference.attention), *args[:3])
    assert T == 1 or all(jnp.abs(a - b).max() > 1e-3 for a, b in zip(want, plain, strict=False))


def test_flash_attention_in_bfloat16_is_about_as_exact_as_the_reference():
    q, k, v, *_ = attention_inputs(0, 100, 4, 2)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    exact = with_gradients(reference.attention, *(x.astype(jnp.float32) for x in half))
    with interpreted():
        got = with_gradients(flash.flash_attention, *half)
    want = with_gradients(reference.attention, *half)
    for i, (a, b, c) in enumerate(zip(got, want, exact, strict=True)):
        assert a.dtype == jnp.bfloat16
        error, of_reference = (float(jnp.mean(jnp.abs(x.astype(jnp.float32) - c))) for x in (a, b))
        # The matrix units take the logits' gradient in bfloat16; XLA on a CPU keeps it in float32.
        assert error <= of_reference * (1.2 if i else 1)


def test_what_a_block_sparse_mask_excludes_is_not_loaded():
    q, k, v, *_ = attention_inputs(0, 96, 2, 1)
    blocks = ((True, False, True), (True, False, False), (True, False, True))
    mask = Mask(causal=False, blocks=blocks, block=32)
    bad_k, bad_v = (x.at[:, 32:64].set(jnp.nan) for x in (k, v))
    run = functools.partial(flash.flash_attention, mask=mask, blocks=SMALL)
    with interpreted():
        want, got = with_gradients(run, q, k, v), with_gradients(run, q, bad_k, bad_v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def visited(walk_of, i, tile, T, mask):
    """Steps through a walk in Python; returns {block: whether it is masked}."""
    found = {}
    for low, high, masked in walk_of(i, tile, T, mask).ranges:
        for step in range(int(low), int(high)):
            assert step not in found
            found[step] = masked
    return found


@given(
    T=st.integers(1, 200), causal=st.booleans(), window=st.none() | st.integers(1, 220),
    chunk=st.none() | st.integers(1, 220), q=st.sampled_from([16, 32, 64]), k=st.sampled_from([16, 32, 64]),
)  # fmt: skip
@settings(max_examples=20)
def test_only_blocks_that_are_seen_are_visited_and_only_whole_ones_unmasked(
    T, causal, window, chunk, q, k
):
    tile, mask = walks.Tile(q, k, 4, 2), Mask(causal, window, chunk)
    kinds = mask.kinds(T, q, k)
    for walk_of, of_block in ((walks.keys_of, kinds), (walks.queries_of, kinds.T)):
        for i, row in enumerate(of_block):
            found = visited(walk_of, i, tile, T, mask)
            assert set(found) == set(np.flatnonzero(row != NONE))
            # Keys past the end, which no query sees, have rows of dk and dv that are not stored.
            past = walk_of is walks.queries_of and (i + 1) * k > T and not causal
            assert past or all(masked or row[j] == ALL for j, masked in found.items())


def test_each_device_attends_to_its_own_rows_and_heads():
    args = attention_inputs(0, 20, 4, 2, B=2)
    heads = P("data", None, "tensor", None)
    specs = heads, heads, heads, P("data", None), P("tensor")
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])

    def run(q, k, v, segments, sinks_N):
        return flash.flash_attention(q, k, v, segments, sinks_N=sinks_N)

    with interpreted():
        want = with_gradients(run, *args)
        with jax.set_mesh(mesh):
            split = [jax.device_put(x, s) for x, s in zip(args, specs, strict=True)]
            got = with_gradients(run, *split)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize(("change", "reason"), [
    ({"dtype": jnp.float64}, "got float64"),
    ({"H": 24}, "got 24"),
    ({"mask": Mask(blocks=((True,),), block=40)}, "mask.block=40"),
])  # fmt: skip
def test_flash_attention_says_what_it_does_not_take(change, reason):
    shape = {"H": 16, "dtype": jnp.float32} | change
    q = jax.ShapeDtypeStruct((1, 32, 2, shape["H"]), shape["dtype"])
    assert reason in flash.supports(q, q, q, mask=change.get("mask", Mask()))
    q = jax.ShapeDtypeStruct((1, 32, 2, 16), jnp.float32)
    assert flash.supports(q, q, q) is None


# ---------------------------------------------------------------------------- grouped matmul


def grouped_by_definition(lhs_MK, rhs_GKN, group_sizes_G):
    ends_G = jnp.cumsum(group_sizes_G)
    row_M1 = jnp.arange(lhs_MK.shape[0])[:, None]
    own_MG = ((row_M1 < ends_G) & (row_M1 >= ends_G - group_sizes_G)).astype(lhs_MK.dtype)
    owned_MK = jnp.where(row_M1 < ends_G[-1], lhs_MK, 0)
    return jnp.einsum("MG,MK,GKN->MN", own_MG, owned_MK, rhs_GKN, precision="highest")


@given(
    seed=st.integers(0, 99), shape=st.sampled_from([(100, 48, 40), (64, 32, 64), (7, 5, 3)]), rest=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 100), min_size=1, max_size=4),
)  # fmt: skip
@settings(max_examples=3)
def test_grouped_matmul_is_its_definition(seed, shape, rest, cuts):
    M, K, N = shape
    rng, owned = np.random.default_rng(seed), max(0, M - rest)
    sizes = np.diff(np.minimum(sorted(cuts), owned), prepend=0, append=owned)
    lhs, rhs = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((M, K), (len(sizes), K, N)))
    lhs = lhs.at[owned:].set(jnp.nan)  # is not read
    sizes = jnp.asarray(sizes, jnp.int32)
    run = functools.partial(grouped.grouped_matmul, tiles=SMALL_TILES)
    with interpreted():
        got = with_gradients(run, lhs, rhs, sizes)
    for a, b in zip(got, with_gradients(grouped_by_definition, lhs, rhs, sizes), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


@given(sizes=st.lists(st.integers(0, 70), min_size=5, max_size=5))
@settings(max_examples=15)
def test_every_row_has_one_tile_and_no_tile_has_two_groups(sizes):
    M, rest = 350, 350 - sum(sizes)
    group_X, first_X, end_X = map(np.asarray, grouped._row_tiles(jnp.asarray(sizes), M, 16))
    owners = np.repeat(np.arange(len(sizes) + 1), [*sizes, rest])
    found = np.full(M, -1)
    for group, first, end in zip(group_X, first_X, end_X, strict=True):
        rows = np.arange(first, min(first + 16, end))
        assert (found[rows] == -1).all()
        found[rows] = group
    np.testing.assert_array_equal(found, owners)


def test_programs_in_bands_cover_every_tile_once():
    for tall, wide in ((1, 1), (7, 3), (8, 5), (21, 4)):
        places = {
            tuple(map(int, tiles_gpu.place(jnp.int32(i), tall, wide))) for i in range(tall * wide)
        }
        assert places == {(x, y) for x in range(tall) for y in range(wide)}


# ---------------------------------------------------------------------------- the smaller ones


def cross_entropy_by_definition(x_XD, w_DV, targets_X):
    logits_XV = jnp.matmul(x_XD, w_DV, precision="highest")
    normalizer_X = jax.nn.logsumexp(logits_XV, axis=-1)
    hit_XV = jnp.arange(w_DV.shape[1]) == targets_X[:, None]
    return jnp.stack(
        [normalizer_X - jnp.sum(jnp.where(hit_XV, logits_XV, 0), axis=-1), normalizer_X]
    )


@pytest.mark.parametrize(("X", "D", "V"), [(40, 24, 200), (33, 50, 40)])
def test_linear_cross_entropy_is_its_definition(X, D, V):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((X, D), (D, V)))
    targets = jnp.asarray(rng.integers(-3, V + 5, X), jnp.int32)  # some of no column
    blocks = cross_entropy.Blocks(grouped.Tile(16, 32, 16, 4, 2), part=64)

    def run(*args):
        return jnp.stack(cross_entropy.linear_cross_entropy(*args, blocks=blocks))

    with interpreted():
        got = with_gradients(run, x, w, targets)
    want = with_gradients(cross_entropy_by_definition, x, w, targets)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("shape", [(2, 3, 64), (9, 7)])
def test_rms_norm_is_its_definition(shape):
    rng = np.random.default_rng(0)
    x, scale = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (shape, shape[-1:]))

    def definition(x, scale):
        return scale * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    with interpreted():
        got = with_gradients(lambda *a: norm.rms_norm(*a, blocks=norm.Blocks(4, 4)), x, scale)
    for a, b in zip(got, with_gradients(definition, x, scale), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_paged_attention_is_attention_over_the_pages_in_order():
    B, N, K, H, S, X = 4, 6, 2, 16, 16, 5
    rng = np.random.default_rng(0)
    lengths, table = np.array([0, 1, 37, 80]), rng.permutation(B * X).reshape(B, X)
    k, v = (rng.normal(size=(B, X * S, K, H)) for _ in "kv")
    k[np.arange(X * S) >= lengths[:, None]] = v[np.arange(X * S) >= lengths[:, None]] = np.nan
    pages = [np.empty((K, B * X, S, H)) for _ in "kv"]
    for filled, x in zip(pages, (k, v), strict=True):
        filled[:, table] = np.moveaxis(x.reshape(B, X, S, K, H), 3, 0)
    q = rng.normal(size=(B, N, H))
    args = [jnp.asarray(x, jnp.float32) for x in (q, *pages)]
    with interpreted():
        out = jax.jit(functools.partial(paged.paged_attention, blocks=paged.Blocks(parts=3)))(
            *args, jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32)
        )
    for b, n in np.ndindex(B, N):
        seen = slice(0, lengths[b]), n // (N // K)
        weights = np.exp(k[b][seen] @ q[b, n] / np.sqrt(H))
        want = weights @ v[b][seen] / max(weights.sum(), 1e-30)
        np.testing.assert_allclose(out[b, n], want, atol=2e-6)


@pytest.mark.parametrize("mask", [Mask(window=5), Mask(chunk=24)])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_paged_attention_ignores_what_a_page_holds_outside_the_mask(mask, poison):
    """A page that is seen in part holds NaN or infinity before the window and after the last token."""
    B, N, K, H, S, X = 3, 4, 2, 16, 16, 4
    rng = np.random.default_rng(1)
    lengths = np.array([3, 30, 61])
    last, t = lengths[:, None] - 1, np.arange(X * S)
    seen = (t <= last) & (
        t // mask.chunk == last // mask.chunk if mask.chunk else last - t < mask.window
    )
    table = rng.permutation(B * X).reshape(B, X)
    q, clean = rng.normal(size=(B, N, H)), rng.normal(size=(2, B, X * S, K, H))
    k, v = np.where(seen[None, :, :, None, None], clean, poison)

    def pages(x):
        filled = np.empty((K, B * X, S, H))
        filled[:, table] = np.moveaxis(x.reshape(B, X, S, K, H), 3, 0)
        return jnp.asarray(filled, jnp.float32)

    rest = jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32)
    run = jax.jit(functools.partial(paged.paged_attention, mask=mask))
    with interpreted():
        out = run(jnp.asarray(q, jnp.float32), pages(k), pages(v), *rest)
    for b, n in np.ndindex(B, N):
        weights = np.exp(k[b, seen[b], n // 2] @ q[b, n] / np.sqrt(H))
        want = weights @ v[b, seen[b], n // 2] / weights.sum()
        np.testing.assert_allclose(out[b, n], want, atol=2e-6)


@pytest.mark.parametrize("dtype", NARROW)
def test_paged_attention_reads_narrow_pages_with_their_scales(dtype):
    wide = inputs(0, [0, 5, 37], 6, 2, 16, 16, 3)
    args, scales_KP2S, held = narrow(*wide, dtype)
    with interpreted():
        got = jax.jit(paged.paged_attention)(*args, scales_KP2S=scales_KP2S)
    np.testing.assert_allclose(got, oracle(*held), atol=2e-5)


# ---------------------------------------------------------------------------- the shapes of models


def attention_case(T=4096, dtype="bfloat16", packed=False, sinks=False, blocks=None, **options):
    """Attention's gradients at llama3-8b's heads, as a function and its arguments' shapes."""
    q, k = ((4096 // T or 1, T, n, 128) for n in (32, 8))
    shapes = [(q, dtype), (k, dtype), (k, dtype), ((q[0], T), "int32"), ((32,), "float32")]
    limits = (options.pop(name, None) for name in ("window", "chunk"))
    mask = Mask(options.pop("causal", True), *limits, blocks)

    def run(q, k, v, segments, sinks_N):
        segments, sinks_N = segments if packed else None, sinks_N if sinks else None
        return flash.flash_attention(q, k, v, segments, mask=mask, sinks_N=sinks_N, **options)

    return run, shapes


def grouped_case(M=16384, D=4096, F=14336, E=8, dtype="bfloat16"):
    return grouped.grouped_matmul, [((M, D), dtype), ((E, D, F), dtype), ((E,), "int32")]


def both(f):
    """Makes one array of a function's two."""
    return lambda *args: jnp.stack(f(*args))


def entropy_case(X=16384, D=4096, V=128256, dtype="bfloat16"):
    run = both(cross_entropy.linear_cross_entropy)
    return run, [((X, D), dtype), ((D, V), dtype), ((X,), "int32")]


def paged_case(B=64, N=32, K=8, P=4096, S=64, X=128, dtype="bfloat16", held="bfloat16"):
    pages = (K, P, S, 128), held
    shapes = [((B, N, 128), dtype), pages, pages, ((B, X), "int32"), ((B,), "int32")]
    if held == dtype:
        return paged.paged_attention, shapes

    def run(*args):
        return paged.paged_attention(*args[:-1], scales_KP2S=args[-1])

    return run, [*shapes, ((K, P, 2, S), "float32")]


DIAGONAL = tuple(tuple(i - j in (0, 2) for j in range(32)) for i in range(32))
CASES = {
    "flash": attention_case(),
    "flash-8192": attention_case(T=8192),
    "flash-ragged": attention_case(T=1000, packed=True),
    "flash-variants": attention_case(packed=True, sinks=True, window=1024, softcap=50.0),
    "flash-chunked": attention_case(window=2048, chunk=1000),
    "flash-bidirectional": attention_case(causal=False),
    "flash-sparse": attention_case(blocks=DIAGONAL),
    "flash-f32": attention_case(dtype="float32", packed=True),
    "grouped": grouped_case(),
    "grouped-ragged": grouped_case(M=1000, D=200, F=312),
    "grouped-f32": grouped_case(dtype="float32"),
    "cross-entropy": entropy_case(),
    "cross-entropy-f32": entropy_case(X=1000, V=50257, D=768, dtype="float32"),
    "lookup": (lookup.lookup, [((32000, 2048), "bfloat16"), ((4, 4096), "int32")]),
    "rms-norm": (norm.rms_norm, [((16384, 4096), "bfloat16"), ((4096,), "float32")]),
    "rms-norm-wide": (norm.rms_norm, [((1000, 14336), "float32"), ((14336,), "float32")]),
    "paged": paged_case(),
    "paged-int8": paged_case(held="int8", S=128),
    "paged-fp8": paged_case(held="float8_e4m3fn", S=128),
}
# Kernels in a case's forward and backward pass.
KERNELS = {"flash": 3, "grouped": 3, "cross": 3, "rms": 2, "paged": 1, "lookup": 1}


def compilable(run):
    """Returns the value and the gradients; a random cotangent of such sizes the compiler would compute itself."""
    return functools.partial(with_gradients, run, cotangent=lambda out: out)


def traced(case, **place):
    """Traces the case's value, and its gradients if it has any, for arguments that lie at a place."""
    run, shapes = CASES[case]
    args = [jax.ShapeDtypeStruct(shape, dtype, **place) for shape, dtype in shapes]
    f = run if case.startswith("paged") else compilable(run)
    return jax.jit(f).trace(*args)


QUICK = (
    "flash", "flash-variants", "flash-sparse", "grouped", "cross-entropy", "lookup", "rms-norm", "paged"
)  # fmt: skip


@pytest.mark.parametrize("case", audit_but(QUICK, CASES))
def test_kernels_lower_for_cuda(case):
    with on_h100():
        text = traced(case).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= KERNELS[case.split("-")[0]]


def one_h100():
    """A whole H100 that compilers know and nobody has, as arguments' place."""
    chip = topology_mesh("h100:1x1x1", MeshConfig()).devices.reshape(-1)
    return NamedSharding(jax.sharding.Mesh(chip, ("one",)), P())


@pytest.mark.gpu_aot
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_h100(case):
    with on_h100():
        compiled = traced(case, sharding=one_h100()).lower().compile()
    assert compiled.as_text().count("xla.gpu.triton") >= KERNELS[case.split("-")[0]]


@pytest.mark.gpu_aot
def test_kernels_compile_for_eight_h100s():
    """Attention over rows and heads, in a program that the partitioner divides."""
    mesh = topology_mesh("h100:1x1x8", MeshConfig(data=4, tensor=2))
    specs = *[P("data", None, "tensor", None)] * 3, P("data", None), P("tensor")
    run, shapes = attention_case(packed=True, sinks=True)
    args = [
        jax.ShapeDtypeStruct(
            (4 * s[0], *s[1:]) if len(s) > 1 else s, d, sharding=NamedSharding(mesh, p)
        )
        for (s, d), p in zip(shapes, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        text = jax.jit(compilable(run)).lower(*args).compile().as_text()
    assert "flash_attention_dkv" in text and "all-to-all" not in text and "all-gather" not in text


@pytest.mark.gpu_aot
@pytest.mark.parametrize("G", [2, 8])
def test_xla_multiplies_all_rows_by_all_matrices(G):
    """Why `auto` takes our grouped product on a GPU: for an H100, XLA's is G times as wide, and ours is not."""
    M, D, F = 4096, 512, 768
    place = one_h100()
    shapes = [((M, D), "bfloat16"), ((G, D, F), "bfloat16"), ((G,), "int32")]
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
    with on_h100():
        theirs, ours = (
            jax.jit(f).lower(*args).compile()
            for f in (xla_grouped.grouped_matmul, grouped.grouped_matmul)
        )
    wide = f"bf16[{M},{G * D}]"
    assert wide in theirs.as_text() and wide not in ours.as_text()
    copy = 2 * M * G * D
    assert theirs.memory_analysis().temp_size_in_bytes >= copy
    assert ours.memory_analysis().temp_size_in_bytes < copy / 8
    assert kernels.ORDER["grouped_matmul", "gpu"][0] == "pallas_gpu"


@pytest.mark.gpu_aot
def test_a_token_is_multiplied_without_writing_products_of_numbers():
    """Why `auto` takes our projection of few tokens: for an H100, XLA's writes an array as large as the weight."""
    D, place = 2048, one_h100()
    shapes = [((1, D), "bfloat16"), ((D, D), "bfloat16")]
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
    none = Specs(None, None, None)

    def largest(linear):
        text = jax.jit(lambda x, w: linear(x, w, none)).lower(*args).compile().as_text()
        entry = text[text.index("ENTRY") :]
        made = re.findall(r"= (?:bf16|f32)\[([0-9,]+)\]\S* (?!parameter|bitcast)\w", entry)
        return max(math.prod(map(int, shape.split(","))) for shape in made)

    with on_h100():
        assert largest(xla_linear.linear) >= D * D > 64 * D >= largest(padded.linear)


@pytest.mark.gpu_aot
def test_memory_of_flash_attention_is_linear_in_the_tokens():
    """On an H100, from 1k to 64k tokens; the logits alone would grow 4,096-fold."""
    place = one_h100()

    def temporary(T):
        shapes = [(1, T, n, 128) for n in (32, 8, 8)]
        args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=place) for s in shapes]
        with on_h100():
            compiled = jax.jit(compilable(flash.flash_attention)).lower(*args)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    least, *others = (temporary(1024 * n) for n in (1, 4, 16, 64))
    for n, size in zip((4, 16, 64), others, strict=True):
        assert size <= 1.1 * n * least
