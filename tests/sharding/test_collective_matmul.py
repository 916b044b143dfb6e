"""Products in a ring: equal to the plain ones with their gradients, and what the compiled rings send and hide."""

import re
from functools import cache, partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.compiler import hlo
from minitext.compiler.targets import topology_mesh
from minitext.sharding.collective_matmul import gather_matmul, matmul_scatter

needs_libtpu = pytest.mark.skipif(not find_spec("libtpu"), reason="libtpu is not installed")


def gathered_product(x, w, axis):
    return jax.lax.all_gather(x, axis, tiled=True) @ w


def scattered_product(x, w, axis):
    return jax.lax.psum_scatter(x @ w, axis, tiled=True)


PLAIN = {gather_matmul: gathered_product, matmul_scatter: scattered_product}
both = pytest.mark.parametrize("product", PLAIN, ids=lambda f: f.__name__)


def specs(product):
    """Of x and w, and of the result."""
    if PLAIN.get(product, product) is gathered_product:
        return (P("ring", None), P(None, "ring")), P(None, "ring")
    return (P(None, "ring"), P("ring", None)), P("ring", None)


def ring(n):
    return jax.make_mesh((n,), ("ring",), devices=jax.devices()[:n])


def on_mesh(product, mesh, check_vma=True):
    inside, out = specs(product)
    run = partial(product, axis="ring")
    return jax.shard_map(run, mesh=mesh, in_specs=inside, out_specs=out, check_vma=check_vma)


def run(product, mesh, x, w, grad, **options):
    """The product and its gradients by x and w."""
    inside, out = specs(product)
    x, w, grad = (
        jax.device_put(y, NamedSharding(mesh, spec))
        for y, spec in zip((x, w, grad), (*inside, out), strict=True)
    )

    @jax.jit
    def forward_and_back(x, w, grad):
        y, back = jax.vjp(on_mesh(product, mesh, **options), x, w)
        return y, *back(grad)

    return [np.asarray(y, np.float64) for y in forward_and_back(x, w, grad)]


def draw(seed, *shapes, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@settings(max_examples=4)
@given(
    product=st.sampled_from(list(PLAIN)),
    n=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 5),
    inner=st.integers(1, 3),
    columns=st.integers(1, 3),
    check_vma=st.booleans(),
    seed=st.integers(0, 9),
)
@example(product=gather_matmul, n=8, rows=1, inner=1, columns=1, check_vma=True, seed=0)
@example(product=matmul_scatter, n=8, rows=5, inner=2, columns=3, check_vma=True, seed=1)
def test_products_and_gradients_are_the_plain_ones(
    product, n, rows, inner, columns, check_vma, seed
):
    X, D, F = n * rows, n * inner, n * columns
    x, w, grad = draw(seed, (X, D), (D, F), (X, F))
    got = run(product, ring(n), x, w, grad, check_vma=check_vma)
    x, w, grad = (np.asarray(y, np.float64) for y in (x, w, grad))
    for a, b in zip(got, (x @ w, grad @ w.T, x.T @ grad), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("product", "kind"), [(gather_matmul, AxisType.Explicit), (matmul_scatter, AxisType.Auto)]
)
def test_a_weight_that_is_the_same_along_another_axis_has_its_gradient_summed(product, kind):
    """Rows also lie over `data`, along which the weight is copied; the ring is only one of the axes."""
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(kind,) * 2)
    (x_spec, w_spec), out = specs(product)
    rows = P(("data", "ring") if x_spec[0] else "data", x_spec[1])
    out = P(("data", "ring") if out[0] else "data", out[1])
    x, w = draw(0, (24, 8), (8, 12))
    x, w = (jax.device_put(y, NamedSharding(mesh, s)) for y, s in ((x, rows), (w, w_spec)))

    def loss(f, x, w):
        split = jax.shard_map(
            partial(f, axis="ring"), mesh=mesh, in_specs=(rows, w_spec), out_specs=out
        )
        return jnp.sum(jnp.sin(split(x, w)))

    with jax.set_mesh(mesh):
        got, want = (
            jax.jit(jax.value_and_grad(partial(loss, f), (0, 1)))(x, w)
            for f in (product, PLAIN[product])
        )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@both
def test_factors_that_are_the_same_on_every_device(product):
    """Nothing is divided, so everyone adds the same: JAX must still sum the gradients of the copies."""
    x, w = draw(1, (8, 3), (3, 5))

    def loss(f, x, w):
        return jnp.sum(
            jax.shard_map(partial(f, axis="ring"), mesh=mesh, in_specs=P(), out_specs=P("ring"))(
                x, w
            )
            ** 2
        )

    mesh = ring(4)
    x, w = (jax.device_put(y, NamedSharding(mesh, P())) for y in (x, w))
    got, want = (
        jax.jit(jax.value_and_grad(partial(loss, f), (0, 1)))(x, w)
        for f in (product, PLAIN[product])
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@pytest.mark.parametrize("n", [2, 4])
def test_bfloat16_sums_are_rounded_only_as_they_depart(n):
    """Against the same ring in float64, where each sum is rounded before a trip and at its end, and nothing else is."""
    rows, D, F = 6, n * 64, n * 2
    x, w, grad = draw(2, (n * rows, D), (D, F), (n * rows, F), dtype=jnp.bfloat16)
    y, grad_x, grad_w = run(matmul_scatter, ring(n), x, w, grad)
    x, w, grad = (np.asarray(a, np.float64) for a in (x, w, grad))
    want = np.zeros((n, rows, F))
    made = np.einsum("xnd,ndf->nxf", x.reshape(-1, n, D // n), w.reshape(n, D // n, F))
    made = made.reshape(n, n, rows, F)  # whose share, of whose rows
    for home in range(n):
        for half, step in ((slice(0, 3), 1), (slice(3, 6), -1)):
            for turn in range(1, n + 1):
                total = want[home, half] + made[(home + step * turn) % n, home, half]
                want[home, half] = rounded(total)
    # float32 sums in another order are now and then on the other side of a boundary.
    for a, b in ((y, want.reshape(y.shape)), (grad_x, grad @ w.T), (grad_w, x.T @ grad)):
        assert np.mean(a == rounded(b)) > 0.97
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("product", "x", "w", "message"),
    [
        (matmul_scatter, (12, 8), (8, 3), "12 rows don't divide over the 8 devices of axis 'ring'"),
        (
            gather_matmul,
            (4, 8),
            (7, 3),
            r"a product of \(4, 8\) and \(7, 3\): expected \[rows, D\]",
        ),
        (matmul_scatter, (2, 8, 4), (4, 3), r"a product of \(2, 8, 4\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(product, x, w, message):
    split = jax.shard_map(
        partial(product, axis="ring"), mesh=ring(8), in_specs=P(), out_specs=P("ring")
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(split, jnp.zeros(x), jnp.zeros(w))


# --- what is compiled


@cache
def compiled_text(product, mesh, sizes, dtype, backward):
    X, D, F = sizes
    inside, out = specs(product)
    shapes = ((X, D), (D, F), (X, F))
    x, w, grad = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, (*inside, out), strict=True)
    )
    split = on_mesh(product, mesh)
    if backward:
        lowered = jax.jit(lambda x, w, g: jax.vjp(split, x, w)[1](g)).lower(x, w, grad)
    else:
        lowered = jax.jit(split).lower(x, w)
    return lowered.compile().as_text()


@pytest.mark.parametrize(("n", "rows"), [pytest.param(2, 6, marks=pytest.mark.audit), (8, 5)])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@both
def test_permutes_and_their_bytes(product, backward, n, rows):
    X, D, F = n * rows, n * 3, n * 7
    text = compiled_text(product, ring(n), (X, D, F), "float32", backward)
    found = hlo.Module(text).collectives()
    assert {c.kind for c in found} == {"collective-permute"}
    # A gather sends n-1 times its own rows; its gradient sends them again, and the sums of their gradients.
    rings = 2 if backward and product is gather_matmul else 1
    width = D if product is gather_matmul else F
    assert sum(c.runs for c in found) == rings * 2 * (n - 1)
    assert sum(c.runs * c.moved for c in found) == rings * (n - 1) * 4 * rows * width
    assert {c.bytes for c in found} <= {4 * width * (rows // 2), 4 * width * (rows - rows // 2)}
    to_the_right = len(re.findall(r"source_target_pairs=\{\{0,1\}", text))
    assert to_the_right == (1 if n > 2 else 2) * rings * (n - 1)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@both
def test_the_gathered_array_never_exists(product, backward):
    """No device has all rows of what is gathered, or of the sums that are scattered."""
    sizes = X, D, F = 8 * 5, 8 * 3, 8 * 7
    whole = f"[{X},{D if product is gather_matmul else F}]"
    assert whole in compiled_text(PLAIN[product], ring(8), sizes, "float32", backward)
    assert whole not in compiled_text(product, ring(8), sizes, "float32", backward)


def multiplying(module):
    """Names of all instructions that have a product in them."""
    found, before = set(), None
    while before != len(found):
        before = len(found)
        found |= {
            i.name
            for body in module.computations.values()
            for i in body
            if i.opcode in ("convolution", "dot")
            or any(
                j.name in found
                for name in re.findall(r"calls=%([\w.\-]+)", i.line)
                for j in module.computations.get(name, ())
            )
        }
    return found


@needs_libtpu
@pytest.mark.parametrize(
    ("product", "backward"),
    [
        pytest.param(gather_matmul, False, id="gather_matmul-forward"),
        pytest.param(gather_matmul, True, id="gather_matmul-backward"),
        pytest.param(matmul_scatter, False, id="matmul_scatter-forward", marks=pytest.mark.audit),
        pytest.param(matmul_scatter, True, id="matmul_scatter-backward", marks=pytest.mark.audit),
    ],
)
def test_a_tpu_multiplies_during_every_permute(product, backward):
    mesh = jax.make_mesh((4,), ("ring",), devices=list(topology_mesh("v5e:2x2").devices.flat))
    # Where a compiler that is left its freedom sends, or multiplies, nearly all before the other begins.
    sizes = (4096, 512, 512) if product is gather_matmul else (512, 8192, 4096)
    module = hlo.Module(compiled_text(product, mesh, sizes, "bfloat16", backward))
    products, found = multiplying(module), module.collectives()
    assert {c.kind for c in found} == {"collective-permute"}
    assert len(found) == (12 if backward and product is gather_matmul else 6)
    for c in found:
        assert products & set(c.overlapped), c.name
    if product is matmul_scatter and not backward:  # the plain one waits
        plain = hlo.Module(compiled_text(scattered_product, mesh, sizes, "bfloat16", False))
        assert {c.kind: c.overlapped for c in plain.collectives()}["reduce-scatter"] is None
