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
from minitext.kernels.paged_attention import tpu as paged_attention_tpu
from minitext.sharding.mesh import make_mesh
from tests.kernels.simulated import simulate

pytestmark = pytest.mark.usefixtures("as_on_a_tpu")
xla = jax.jit(partial(kernels.paged_attention, impl="xla"))
pallas = partial(kernels.paged_attention, impl="pallas_tpu")
NOT_A_PAGE = 10**6


def inputs(seed, lengths, N, K, H, S, X, dtype="float32", size=1.0):
    """Pages in random order. What no sequence sees is NaN, and a page that none needs is out of bounds."""
    rng = np.random.default_rng(seed)
    B = len(lengths)
    P = B * X + 1
    q, k, v = (rng.normal(size=shape) for shape in ((B, N, H), (K, P, S, H), (K, P, S, H)))
    table = rng.permutation(P)[: B * X].reshape(B, X)
    seen = np.zeros((P, S), bool)
    for b, length in enumerate(lengths):
        for t in range(length):
            seen[table[b, t // S], t % S] = True
    k, v = (np.where(seen[None, :, :, None], x, np.nan) for x in (size * k, v))
    needed = np.arange(X) * S < np.asarray(lengths)[:, None]
    table = jnp.asarray(np.where(needed, table, NOT_A_PAGE), jnp.int32)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return q, k, v, table, jnp.asarray(lengths, jnp.int32)


def oracle(q, k, v, table, lengths):
    """Attention by the book, one head of one sequence at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, S = np.zeros_like(q), k.shape[2]
    for b, n in np.ndindex(q.shape[:2]):
        head, seen = n // (q.shape[1] // len(k)), range(lengths[b])
        if seen:
            keys, values = (
                np.stack([x[head, table[b, t // S], t % S] for t in seen]) for x in (k, v)
            )
            logits = keys @ q[b, n] / np.sqrt(q.shape[2])
            weights = np.exp(logits - logits.max())
            out[b, n] = weights / weights.sum() @ values
    return out


@st.composite
def layouts(draw):
    """Lengths of 1 to 4 sequences among 0, partial pages, whole pages and all pages."""
    S, X = draw(st.sampled_from([(8, 5), (16, 3)]))
    lengths = draw(st.lists(st.sampled_from([0, 1, S, S + 3, X * S]), min_size=1, max_size=4))
    return lengths, S, X


@given(
    seed=st.integers(0, 99), layout=layouts(), heads=st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    H=st.sampled_from([8, 128]), dtype=st.sampled_from(["float32", "bfloat16"]),
    size=st.sampled_from([1.0, 60.0]), cores=st.sampled_from([1, 2]), steps=st.sampled_from([1, 2]),
)  # fmt: skip
@settings(max_examples=3)
def test_values_are_the_definition(seed, layout, heads, H, dtype, size, cores, steps):
    lengths, S, X = layout
    S = S if dtype == "float32" else 16
    args = inputs(seed, np.minimum(lengths, X * S), *heads, H, S, X, dtype, size)
    blocks = paged_attention_tpu.Blocks(tokens=steps * S, heads=1)
    run = partial(paged_attention_tpu.paged_attention, blocks=blocks)
    got, plain, want = simulate(run, *args, seed=seed, cores=cores), xla(*args), oracle(*args)
    assert got.dtype == plain.dtype == dtype

    def far(x):
        return np.max(np.abs(np.asarray(x, np.float64) - want))

    # Weights take bfloat16 before they are divided by their sum here, and after it there.
    assert far(got) <= max(2e-5 * max(1, size / 10), far(plain) + (dtype == "bfloat16") * 2**-8)


def test_a_page_may_serve_several_sequences():
    q, k, v, table, lengths = inputs(0, [11, 11], 2, 1, 8, 8, 2)
    args = q, k, v, table.at[1].set(table[0]), lengths
    np.testing.assert_allclose(simulate(pallas, *args), oracle(*args), atol=2e-5)


@pytest.mark.parametrize("impl", ["xla", "pallas_tpu"])
def test_on_a_mesh_sequences_and_heads_may_be_split(impl):
    args = inputs(0, [9, 0, 16, 3], 4, 2, 8, 8, 2)
    pages = (("tensor", None, None, None),) * 2
    layout = [("data", "tensor", None), *pages, ("data", None), ("data",)]
    want = oracle(*args)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2), devices=jax.devices()[:4])):
        args = [jax.device_put(a, jax.P(*p)) for a, p in zip(args, layout, strict=True)]
        got = simulate(pallas, *args) if impl == "pallas_tpu" else jax.jit(xla)(*args)
        np.testing.assert_allclose(got, want, atol=2e-5)
        whole = jax.device_put(args[1], jax.P(None, None, None, None))
        with pytest.raises(UserError, match=r"each alike in every argument"):
            pallas(args[0], whole, *args[2:])


@pytest.mark.parametrize("impl", ["xla", "pallas_tpu"])
def test_it_has_no_gradient_and_says_so(impl):
    q, *rest = inputs(0, [3], 2, 1, 8, 8, 2)
    with pytest.raises(UserError, match=r"no gradient"):
        jax.grad(lambda q: jnp.sum(kernels.paged_attention(q, *rest, impl=impl)))(q)


def test_it_says_what_it_cannot_take():
    q, k, v, table, lengths = inputs(0, [3], 2, 1, 8, 8, 2)
    with pytest.raises(UserError, match=r"got float32, bfloat16, float32"):
        pallas(q, k.astype("bfloat16"), v, table, lengths)
    with pytest.raises(UserError, match=r"multiple of 8 tokens: got 7"):
        pallas(q, k[:, :, :7], v[:, :, :7], table, lengths)
    with pytest.raises(UserError, match=r"page table must fit"):
        pallas(q, k, v, jnp.zeros((1, 140_000), jnp.int32), lengths)


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
    ],
)
def test_it_compiles_for_sequences_of_8192_tokens(chip, dtype, S):
    mesh = topology_mesh(chip)
    one = make_mesh(MeshConfig(), devices=[mesh.devices.flat[0]])
    N, K, H, B, P = 32, 8, 128, 64, 8 * 8192 // S
    shapes = [(B, N, H), (K, P, S, H), (K, P, S, H), (B, 8192 // S), (B,)]
    with jax.set_mesh(one):
        args = [
            jax.ShapeDtypeStruct(
                shape, t, sharding=jax.NamedSharding(one, jax.P(*[None] * len(shape)))
            )
            for shape, t in zip(shapes, [dtype] * 3 + ["int32"] * 2, strict=True)
        ]
        compiled = jax.jit(pallas).lower(*args).compile()
    # The cache is read where it lies.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
