"""The fused output layer and cross-entropy in the strict simulator, against float64 and XLA, and compiled."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minitext import kernels
from minitext.compiler.targets import topology_mesh
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.kernels.linear_cross_entropy import tpu as linear_cross_entropy_tpu
from minitext.sharding.mesh import make_mesh
from minitext.training.loss import cross_entropy
from tests.kernels.simulated import simulate

pytestmark = pytest.mark.usefixtures("as_on_a_tpu")
# Small blocks, so that small shapes have several, and some that overhang.
SMALL = linear_cross_entropy_tpu.Blocks(tokens=16, vocab=128, embed=128, kept=16, passing=16)
fused = partial(linear_cross_entropy_tpu.linear_cross_entropy, blocks=SMALL)
xla = partial(kernels.linear_cross_entropy, impl="xla")


def with_gradients(f):
    """A function of (x, w, targets, both outputs' gradients) giving both outputs and the gradients of x and w."""

    def run(x, w, targets, *grads):
        out, pull = jax.vjp(lambda x, w: f(x, w, targets), x, w)
        return *out, *pull(grads)

    return run


def oracle(x, w, targets, grad_loss, grad_normalizer):
    """The same four in float64."""
    x, w, *grads = (np.asarray(a, np.float64) for a in (x, w, grad_loss, grad_normalizer))
    logits = x @ w
    top = logits.max(-1, keepdims=True)
    normalizer = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    hit = np.asarray(targets)[:, None] == np.arange(w.shape[1])
    loss = normalizer - np.sum(hit * logits, -1, keepdims=True)
    grad = np.exp(logits - normalizer) * (grads[0] + grads[1])[:, None] - hit * grads[0][:, None]
    return loss[:, 0], normalizer[:, 0], grad @ w.T, x.T @ grad


def inputs(seed, X, D, V, dtype="float32", size=1.0):
    """Logits of at most this size, the largest of it; some targets are out of the vocabulary."""
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(X, D)), rng.normal(size=(D, V))
    w *= size / np.abs(x @ w).max()
    targets = jnp.asarray(rng.integers(-1, V + 2, size=X), jnp.int32)
    grads = jnp.asarray(rng.normal(size=(2, X)), jnp.float32)
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), targets, *grads


def far(got, want):
    """The largest difference, by the size of what is compared."""
    want = np.asarray(want, np.float64)
    return np.max(np.abs(np.asarray(got, np.float64) - want)) / max(1.0, np.max(np.abs(want)))


@given(
    seed=st.integers(0, 99), X=st.sampled_from([1, 16, 37]), D=st.sampled_from([1, 40, 256]),
    V=st.sampled_from([1, 128, 300]), dtype=st.sampled_from(["float32", "bfloat16"]),
    size=st.sampled_from([3.0, 90.0]), cores=st.sampled_from([1, 2]),
)  # fmt: skip
@settings(max_examples=2)
# A token whose largest logit is 77, which float32 holds to 4e-6: the backward pass must not sum it in another order.
@example(seed=0, X=1, D=256, V=128, dtype="float32", size=90.0, cores=1)
def test_values_and_gradients_are_the_definition(seed, X, D, V, dtype, size, cores):
    args = inputs(seed, X, D, V, dtype, size)
    got = simulate(with_gradients(fused), *args, seed=seed, cores=cores)
    plain, want = jax.jit(with_gradients(xla))(*args), oracle(*args)
    for a, b, c in zip(got, plain, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # The gradient's products take bfloat16, as XLA's do on a TPU; on a CPU it multiplies in float32.
        rounding = 2**-8 if dtype == "bfloat16" and a.dtype == jnp.bfloat16 else 0
        assert far(a, c) <= max(2e-5, far(b, c) + rounding)


def test_logits_at_the_edge_of_what_float32_can_give_the_exponential_of():
    """Those of every other token are 90 and 0 in turn, of the rest all -90."""
    _, w, targets, *grads = inputs(0, 20, 2, 300)
    w = jnp.zeros_like(w).at[0, ::2].set(90.0).at[1].set(-90.0)
    args = jnp.eye(2).repeat(10, 0)[jnp.arange(20) * 9 % 20], w, targets, *grads
    for a, b in zip(simulate(with_gradients(fused), *args), oracle(*args), strict=True):
        assert far(a, b) <= 2e-6


@pytest.mark.parametrize("impl", ["xla", "pallas_tpu"])
def test_on_a_mesh_tokens_and_vocabulary_may_be_split(impl):
    args = inputs(0, 8, 16, 12)
    want = oracle(*args)
    layout = [("data", None), (None, "tensor"), ("data",), ("data",), ("data",)]
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2), devices=jax.devices()[:4])):
        args = [jax.device_put(a, jax.P(*p)) for a, p in zip(args, layout, strict=True)]
        f = with_gradients(partial(kernels.linear_cross_entropy, impl=impl))
        got = simulate(f, *args) if impl == "pallas_tpu" else jax.jit(f)(*args)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        split = jax.device_put(args[0], jax.P(None, "tensor"))
        with pytest.raises(UserError, match=r"features must not be split"):
            kernels.linear_cross_entropy(split, *args[1:3], impl="pallas_tpu")


def test_it_is_the_models_loss_with_and_without_z_loss():
    x, w, targets, *_ = inputs(0, 12, 16, 20)
    targets = targets.clip(0, 19)
    loss, normalizer = xla(x, w, targets)
    for z in (0.0, 0.1):
        want = cross_entropy((x @ w)[None], targets[None], z_loss=z)[0]
        np.testing.assert_allclose(loss + z * normalizer**2, want, rtol=1e-5)


def test_it_says_what_it_cannot_take():
    x, w, targets, *_ = inputs(0, 4, 8, 6)
    run = partial(kernels.linear_cross_entropy, impl="pallas_tpu")
    with pytest.raises(UserError, match=r"both bfloat16: got bfloat16 and float32"):
        run(x.astype("bfloat16"), w, targets)
    with pytest.raises(UserError, match=r"it needs a token"):
        run(x[:0], w, targets[:0])
    with pytest.raises(UserError, match=r"as 4096 do: got D=4224"):
        run(jnp.zeros((4, 4224)), jnp.zeros((4224, 6)), targets)


def compiled(chip, dtype, D, V):
    """The kernels of both passes, for 8192 tokens on a chip."""
    mesh = topology_mesh(chip)
    one = make_mesh(MeshConfig(), devices=[mesh.devices.flat[0]])
    with jax.set_mesh(one):

        def abstract(shape, dtype):
            place = jax.NamedSharding(one, jax.P(*[None] * len(shape)))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

        X = 8192
        args = abstract((X, D), dtype), abstract((D, V), dtype), abstract((X,), "int32")
        grads = [abstract((X,), "float32")] * 2
        f = with_gradients(partial(kernels.linear_cross_entropy, impl="pallas_tpu"))
        return jax.jit(f).lower(*args, *grads).compile()


def test_it_compiles():
    assert compiled("v5e:2x2", "bfloat16", 1024, 2000).memory_analysis()


@pytest.mark.audit
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize(
    ("dtype", "D"), [("bfloat16", 4096), ("bfloat16", 6144), ("float32", 4096)]
)
def test_no_chip_ever_holds_the_logits(chip, dtype, D):
    memory = compiled(chip, dtype, D, 128_256).memory_analysis()
    # A hundredth of what the logits would take in bfloat16.
    assert memory.temp_size_in_bytes < 8192 * 128_256 * 2 / 100
