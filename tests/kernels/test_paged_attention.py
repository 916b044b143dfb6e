"""Paged decode attention in the strict simulator, against float64 and XLA, and compiled for every chip."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext import kernels
from minitext.compiler.targets import topology_mesh
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.kernels.attention import xla as reference
from minitext.kernels.attention.mask import CAUSAL, Mask
from minitext.kernels.paged_attention import cpu as paged_attention_cpu
from minitext.kernels.paged_attention import operands
from minitext.kernels.paged_attention import tpu as paged_attention_tpu
from minitext.kernels.paged_attention.pages import write_scales
from minitext.kernels.simulator import strict
from minitext.sharding.mesh import make_mesh
from tests.conftest import audit_but
from tests.kernels import dense
from tests.kernels.simulated import simulate

pytestmark = pytest.mark.usefixtures("as_on_a_tpu")
IMPLS = ["xla", "xla_blocked", "pallas_tpu"]
pallas = partial(kernels.paged_attention, impl="pallas_tpu")
NOT_A_PAGE = 10**6


def run(impl, *args, **options):
    """Computes the operation by one implementation, simulated if it's a TPU's."""
    f = partial(kernels.paged_attention, impl=impl, **options)
    return simulate(f, *args) if impl == "pallas_tpu" else jax.jit(f)(*args)


def inputs(seed, lengths, N, K, H, S, X, dtype="float32", size=1.0, mask=CAUSAL):
    """Pages in random order. What no sequence sees is NaN, and a page that none needs is out of bounds."""
    rng = np.random.default_rng(seed)
    B = len(lengths)
    P = B * X + 1
    q, k, v = (rng.normal(size=shape) for shape in ((B, N, H), (K, P, S, H), (K, P, S, H)))
    table = rng.permutation(P)[: B * X].reshape(B, X)
    seen, needed = np.zeros((P, S), bool), np.zeros((B, X), bool)
    for b, length in enumerate(lengths):
        for t in visible(length, mask):
            seen[table[b, t // S], t % S] = needed[b, t // S] = True
    k, v = (np.where(seen[None, :, :, None], x, np.nan) for x in (size * k, v))
    table = jnp.asarray(np.where(needed, table, NOT_A_PAGE), jnp.int32)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return q, k, v, table, jnp.asarray(lengths, jnp.int32)


def visible(length, mask):
    """Which of its tokens a sequence's last one sees, one at a time."""
    last, window, chunk = int(length) - 1, mask.window, mask.chunk
    return [
        t
        for t in range(length)
        if (window is None or last - t < window) and (chunk is None or last // chunk == t // chunk)
    ]


def oracle(q, k, v, table, lengths, mask=CAUSAL, softcap=None, sinks_N=None):
    """Attention by the book, one head of one sequence at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, S = np.zeros_like(q), k.shape[2]
    for b, n in np.ndindex(q.shape[:2]):
        head, seen = n // (q.shape[1] // len(k)), visible(lengths[b], mask)
        if seen:
            keys, values = (
                np.stack([x[head, table[b, t // S], t % S] for t in seen]) for x in (k, v)
            )
            logits = keys @ q[b, n] / np.sqrt(q.shape[2])
            logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
            sink = -np.inf if sinks_N is None else float(sinks_N[n])
            top = max(logits.max(), sink)
            weights = np.exp(logits - top)
            out[b, n] = weights / (weights.sum() + np.exp(sink - top)) @ values
    return out


@st.composite
def layouts(draw):
    """Lengths of 1 to 4 sequences among 0, partial pages, whole pages and all pages."""
    S, X = draw(st.sampled_from([(8, 5), (16, 3)]))
    lengths = draw(st.lists(st.sampled_from([0, 1, S, S + 3, X * S]), min_size=1, max_size=4))
    return lengths, S, X


@given(
    seed=st.integers(0, 99), layout=layouts(), heads=st.sampled_from([(4, 2), (1, 1), (6, 3)]),
    H=st.sampled_from([8, 128]), dtype=st.sampled_from(["bfloat16", "float32"]),
    size=st.sampled_from([60.0, 1.0]), cores=st.sampled_from([2, 1]), steps=st.sampled_from([2, 1]),
)  # fmt: skip
@settings(max_examples=2)  # the first takes the first of each list
def test_values_are_the_definition(seed, layout, heads, H, dtype, size, cores, steps):
    lengths, S, X = layout
    S = S if dtype == "float32" else 16
    args = inputs(seed, np.minimum(lengths, X * S), *heads, H, S, X, dtype, size)
    blocks = paged_attention_tpu.Blocks(tokens=steps * S, heads=1)
    kernel = partial(paged_attention_tpu.paged_attention, blocks=blocks)
    got, want = simulate(kernel, *args, seed=seed, cores=cores), oracle(*args)
    plain, blocked = run("xla", *args), run("xla_blocked", *args)
    assert got.dtype == plain.dtype == blocked.dtype == dtype

    def far(x):
        return np.max(np.abs(np.asarray(x, np.float64) - want))

    # Weights take bfloat16 before they are divided by their sum here, and after it there.
    assert far(got) <= max(2e-5 * max(1, size / 10), far(plain) + (dtype == "bfloat16") * 2**-8)
    assert far(blocked) <= max(2e-5 * max(1, size / 10), far(plain) + (dtype == "bfloat16") * 2**-8)


# Windows and chunks of a token, less than a page, a page, between pages, and more than all.
LIMITS = [1, 5, 8, 11, 16, 17, 100]


@given(
    seed=st.integers(0, 99), lengths=st.lists(st.sampled_from([0, 1, 8, 9, 23, 24, 31, 32]), min_size=1, max_size=5),
    window=st.sampled_from([None, *LIMITS]), chunk=st.sampled_from([None, *LIMITS]),
    softcap=st.sampled_from([None, 1.5]), sinks=st.booleans(), rows=st.sampled_from([1, 4, 99]),
)  # fmt: skip
@settings(max_examples=8)
def test_xla_computes_what_layers_have(seed, lengths, window, chunk, softcap, sinks, rows):
    check_options(seed, lengths, window, chunk, softcap, sinks, ("xla", "xla_blocked"), rows)


@given(
    seed=st.integers(0, 99), lengths=st.lists(st.sampled_from([0, 1, 8, 9, 23, 24, 31, 32]), min_size=1, max_size=3),
    window=st.sampled_from([None, *LIMITS]), chunk=st.sampled_from([None, *LIMITS]),
    softcap=st.sampled_from([None, 1.5]), sinks=st.booleans(),
)  # fmt: skip
@settings(max_examples=3)
def test_the_kernel_computes_what_layers_have(seed, lengths, window, chunk, softcap, sinks):
    check_options(seed, lengths, window, chunk, softcap, sinks, ("pallas_tpu",))


def check_options(seed, lengths, window, chunk, softcap, sinks, impls, rows=99):
    N, K, H, S, X = 4, 2, 8, 8, 4
    options = {"mask": Mask(window=window, chunk=chunk), "softcap": softcap}
    args = inputs(seed, lengths, N, K, H, S, X, mask=options["mask"])
    if sinks:
        options["sinks_N"] = jax.random.normal(jax.random.key(seed), N)
    want = oracle(*args, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention_cpu, "BLOCK_BYTES", rows * S * H * 4)
        for impl in impls:
            np.testing.assert_allclose(run(impl, *args, **options), want, atol=2e-5)


@pytest.mark.parametrize("switch", audit_but(["chunk", "all"], dense.SWITCHES))
def test_it_is_attention_over_a_cache_without_pages(switch):
    """The last of 40 tokens, as `cached_attention` computes it from a cache in one piece."""
    N, K, H, S, T = 4, 2, 8, 8, 40
    given = dict(dense.SWITCHES[switch])
    sinks = jax.random.normal(jax.random.key(1), N) if given.pop("sinks", False) else None
    options = {"softcap": given.pop("softcap", None), "sinks_N": sinks, "mask": Mask(**given)}
    q, k, v, table, lengths = inputs(0, [T, T], N, K, H, S, T // S)
    k_BKTH, v_BKTH = (jnp.moveaxis(x[:, table].reshape(K, 2, T, H), 0, 1) for x in (k, v))
    new = q[:, None], k_BKTH[:, :, -1:], v_BKTH[:, :, -1:]
    cache = k_BKTH[:, :, :-1], v_BKTH[:, :, :-1]
    want = reference.cached_attention(*new, *cache, T - 1, **options)[:, 0]
    for impl in ("xla", "xla_blocked"):
        got = run(impl, q, k, v, table, lengths, **options)
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_window_reads_only_the_pages_it_reaches():
    """Of 8 pages of 8 tokens, a window of 10 reaches into two, or into three."""
    q, k, v, table, lengths = inputs(0, [64, 57, 9, 0], 2, 1, 8, 8, 8, mask=Mask(window=10))
    with strict() as runs:
        jax.block_until_ready(pallas(q, k, v, table, lengths, mask=Mask(window=10)))
    assert max(runs[0].loads) == 2 + 3 + 2
    cut, ends, starts = operands.visible_pages(table, lengths, 8, Mask(window=10))
    assert cut.shape == (4, 3)
    assert cut[:, 0].tolist() == [table[b, page] for b, page in enumerate([6, 5, 0, 0])]
    assert ends.tolist() == [16, 17, 9, 0] and starts.tolist() == [6, 7, 0, 0]


def narrow(q, k, v, table, lengths, dtype):
    """The same pages in 8 bits with scales, and in float64 what they then hold. Unseen scales are NaN."""
    limit, both, scales = (127 if dtype == "int8" else 448), [], []
    for x in (np.asarray(k, np.float64), np.asarray(v, np.float64)):
        scale = np.abs(x).max(-1, keepdims=True) / limit
        whole = np.where(np.isnan(scale), limit, x / scale)
        both.append(jnp.asarray(np.round(whole) if dtype == "int8" else whole, dtype))
        scales.append(scale[..., 0].astype(np.float32))
    held = [np.asarray(x, np.float64) * s[..., None] for x, s in zip(both, scales, strict=True)]
    scales_KP2S = jnp.asarray(np.stack(scales, 2))
    return (q, *both, table, lengths), scales_KP2S, (q, *held, table, lengths)


@pytest.mark.parametrize("dtype", audit_but(["int8"], operands.NARROW))
@pytest.mark.parametrize("impl", IMPLS)
def test_narrow_pages_are_read_with_their_scales(impl, dtype):
    mask = Mask(window=150)
    wide = inputs(0, [0, 5, 256], 4, 2, 8, 128, 2, mask=mask)
    options = {"mask": mask, "softcap": 2.0, "sinks_N": jnp.asarray([0.5, -1.0, 2.0, 0.0])}
    args, scales_KP2S, held = narrow(*wide, dtype)
    got = run(impl, *args, scales_KP2S=scales_KP2S, **options)
    np.testing.assert_allclose(got, oracle(*held, **options), atol=2e-5)


@pytest.mark.audit
@pytest.mark.parametrize("impl", IMPLS)
def test_scales_are_split_as_their_pages_are(impl):
    args, scales_KP2S, held = narrow(*inputs(0, [9, 0, 256, 3], 4, 2, 8, 128, 2), "int8")
    pages = (("tensor", None, None, None),) * 2
    layout = [("data", "tensor", None), *pages, ("data", None), ("data",)]
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2), devices=jax.devices()[:4])):
        args = [jax.device_put(a, jax.P(*p)) for a, p in zip(args, layout, strict=True)]
        split = jax.device_put(scales_KP2S, jax.P("tensor"))
        got = run(impl, *args, scales_KP2S=split)
        np.testing.assert_allclose(got, oracle(*held), atol=2e-5)
        with pytest.raises(UserError, match=r"scales \(None"):
            pallas(*args, scales_KP2S=jax.device_put(scales_KP2S, jax.P()))


def test_scales_are_written_where_the_tokens_are():
    """In place, on one device and with heads split; a page that isn't there takes nothing."""
    old = jnp.arange(2 * 3 * 2 * 8, dtype=jnp.float32).reshape(2, 3, 2, 8)
    new = -jnp.arange(1.0, 13.0).reshape(3, 2, 2)
    page, slot = jnp.asarray([2, 0, 3]), jnp.asarray([7, 1, 0])
    want = np.array(old)
    want[:, 2, :, 7], want[:, 0, :, 1] = new[0], new[1]
    write = jax.jit(write_scales)
    np.testing.assert_array_equal(write(old, new, page, slot), want)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, tensor=2), devices=jax.devices()[:2])):
        split = jax.device_put(old, jax.P("tensor"))
        np.testing.assert_array_equal(write(split, new, page, slot), want)


def test_a_page_may_serve_several_sequences():
    q, k, v, table, lengths = inputs(0, [11, 11], 2, 1, 8, 8, 2)
    args = q, k, v, table.at[1].set(table[0]), lengths
    for impl in IMPLS:
        np.testing.assert_allclose(run(impl, *args), oracle(*args), atol=2e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_on_a_mesh_sequences_and_heads_may_be_split(impl):
    mask, sinks = Mask(window=6), jnp.asarray([0.5, -1.0, 2.0, 0.0])
    options = {"mask": mask, "softcap": 2.0}
    args = inputs(0, [9, 0, 16, 3], 4, 2, 8, 8, 2, mask=mask)
    pages = (("tensor", None, None, None),) * 2
    layout = [("data", "tensor", None), *pages, ("data", None), ("data",)]
    want = oracle(*args, **options, sinks_N=sinks)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2), devices=jax.devices()[:4])):
        args = [jax.device_put(a, jax.P(*p)) for a, p in zip(args, layout, strict=True)]
        got = run(impl, *args, **options, sinks_N=jax.device_put(sinks, jax.P(None)))
        assert jax.typeof(got).sharding.spec == jax.P("data", "tensor", None)
        np.testing.assert_allclose(got, want, atol=2e-5)
        whole = jax.device_put(args[1], jax.P(None, None, None, None))
        with pytest.raises(UserError, match=r"each alike in every argument"):
            pallas(args[0], whole, *args[2:])


@pytest.mark.parametrize("impl", IMPLS)
def test_it_has_no_gradient_and_says_so(impl):
    q, *rest = inputs(0, [3], 2, 1, 8, 8, 2)

    def loss(q, sinks_N):
        return jnp.sum(kernels.paged_attention(q, *rest, sinks_N=sinks_N, impl=impl))

    for argument in (0, 1):
        with pytest.raises(UserError, match=r"no gradient"):
            jax.grad(loss, argument)(q, jnp.zeros(2))


def test_it_says_what_it_cannot_take():
    q, k, v, table, lengths = inputs(0, [3], 2, 1, 8, 8, 2)
    with pytest.raises(UserError, match=r"got float32, bfloat16, float32"):
        pallas(q, k.astype("bfloat16"), v, table, lengths)
    with pytest.raises(UserError, match=r"multiple of 8 tokens: got 7"):
        pallas(q, k[:, :, :7], v[:, :, :7], table, lengths)
    with pytest.raises(UserError, match=r"page table must fit"):
        pallas(q, k, v, jnp.zeros((1, 140_000), jnp.int32), lengths)
    narrow, scales = k.astype("int8"), jnp.ones((*k.shape[:2], 2, k.shape[2]))
    with pytest.raises(UserError, match=r"both be int8 or both float8_e4m3fn.*int8, float32 and"):
        pallas(q, narrow, v, table, lengths, scales_KP2S=scales)
    with pytest.raises(UserError, match=r"pages of int8 need a multiple of 128 tokens: got 8"):
        pallas(q, narrow, narrow, table, lengths, scales_KP2S=scales)
    for options, message in [
        ({"mask": Mask(causal=False)}, r"computes causal attention, .* the mask has causal=False"),
        ({"mask": Mask(window=0)}, r"window=0: a token sees at least itself"),
        ({"softcap": 0.0}, r"softcap=0.0: choose a positive number"),
    ]:
        with pytest.raises(UserError, match=message):
            kernels.paged_attention(q, k, v, table, lengths, **options)


CHIPS = ["v5e:2x2"] + [
    pytest.param(chip, marks=pytest.mark.audit)
    for chip in ("v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("dtype", "S"),
    [
        ("bfloat16", 16),
        pytest.param("bfloat16", 128, marks=pytest.mark.audit),
        pytest.param("float32", 16, marks=pytest.mark.audit),
        pytest.param("int8", 128, marks=pytest.mark.audit),
        pytest.param("float8_e4m3fn", 128, marks=pytest.mark.audit),
    ],
)
def test_it_compiles_for_sequences_of_8192_tokens(chip, dtype, S):
    mesh = topology_mesh(chip)
    one = make_mesh(MeshConfig(), devices=[mesh.devices.flat[0]])
    N, K, H, B, P = 32, 8, 128, 64, 8 * 8192 // S
    pages, numbers = ((K, P, S, H), dtype), (B,)
    shapes = [((B, N, H), dtype), pages, pages, ((B, 8192 // S), "int32"), (numbers, "int32")]
    if dtype in operands.NARROW:
        shapes[0] = (B, N, H), "bfloat16"
        shapes += [((K, P, 2, S), "float32"), ((B, K, 2), "float32"), *[(numbers, "int32")] * 2]

    def attend(q, k, v, table, lengths, scales_KP2S=None, *new):
        if new:
            scales_KP2S = write_scales(scales_KP2S, *new)
        return pallas(q, k, v, table, lengths, scales_KP2S=scales_KP2S), scales_KP2S

    with jax.set_mesh(one):
        args = [
            jax.ShapeDtypeStruct(
                shape, t, sharding=jax.NamedSharding(one, jax.P(*[None] * len(shape)))
            )
            for shape, t in shapes
        ]
        donated = (5,) if dtype in operands.NARROW else ()
        compiled = jax.jit(attend, donate_argnums=donated).lower(*args).compile()
    # The cache is read where it lies, and scales are written there.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
