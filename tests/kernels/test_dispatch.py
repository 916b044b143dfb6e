"""Every implementation of an operation against a float64 oracle, and the dispatch between them."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext import hardware, kernels
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.kernels import dispatch
from minitext.kernels.attention import cudnn
from minitext.kernels.attention.mask import Mask
from minitext.models.attention import KVCache
from minitext.sharding.mesh import make_mesh
from tests.conftest import QUICK_FLAGS, TINY, audit_but
from tests.kernels import dense

IMPLS = [impl for op, impl in kernels.IMPLEMENTATIONS if op == "attention"]


def oracle(q, k, v, segments, offset=0):
    """Attention by the book, one query and one head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    segments = None if segments is None else np.asarray(segments)
    B, T, N, H = q.shape
    out = np.zeros_like(q)
    for b in range(B):
        for t in range(T):
            seen = [
                s
                for s in range(t + offset + 1)
                if segments is None or segments[b, s] == segments[b, t]
            ]
            for n in range(N):
                head = n // (N // k.shape[2])
                logits = k[b, seen, head] @ q[b, t, n] / np.sqrt(H)
                weights = np.exp(logits - logits.max())
                out[b, t, n] = weights / weights.sum() @ v[b, seen, head]
    return out


def inputs(seed, B, T, N, K, H, size=1.0):
    rng = np.random.default_rng(seed)
    q = size * rng.normal(size=(B, T, N, H))
    k, v = rng.normal(size=(2, B, T, K, H))
    segments = 1 + np.cumsum(rng.random((B, T)) < 0.1, axis=1)
    return *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(segments, jnp.int32)


def supported(impl, *args):
    return kernels.IMPLEMENTATIONS["attention", impl].reason(*args) is None


HERE = [impl for impl in IMPLS if supported(impl, *inputs(0, 2, 128, 4, 2, 8))]


@pytest.mark.parametrize("impl", IMPLS)
@given(
    seed=st.integers(0, 99), T=st.sampled_from([1, 3, 132, 260]), heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    packed=st.booleans(), size=st.sampled_from([1.0, 60.0]),
)  # fmt: skip
@settings(max_examples=8)
def test_attention_is_its_definition(impl, seed, T, heads, packed, size):
    q, k, v, segments = inputs(seed, 1, T, *heads, 8, size)
    segments = segments if packed else None
    if not supported(impl, q, k, v, segments):
        with pytest.raises(UserError, match=impl):
            kernels.attention(q, k, v, segments, impl=impl)
        return
    got = jax.jit(functools.partial(kernels.attention, impl=impl))(q, k, v, segments)
    np.testing.assert_allclose(got, oracle(q, k, v, segments), atol=2e-5 * max(1, size / 10))


@pytest.mark.parametrize("impl", HERE)
def test_gradients_agree_with_the_reference(impl):
    q, k, v, segments = inputs(0, 2, 128, 4, 2, 8)
    probe = jax.random.normal(jax.random.key(1), q.shape)

    def gradients(impl):
        f = lambda *qkv: jnp.sum(probe * kernels.attention(*qkv, segments, impl=impl))  # noqa: E731
        return jax.jit(jax.grad(f, argnums=(0, 1, 2)))(q, k, v)

    for got, want in zip(gradients(impl), gradients("xla"), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("impl", HERE)
def test_bfloat16_is_within_its_rounding_of_float32(impl):
    *qkv, segments = inputs(0, 2, 128, 4, 2, 8)
    probe = jax.random.normal(jax.random.key(1), qkv[0].shape)

    def with_gradients(impl, dtype):
        f = lambda *x: jnp.sum(probe * kernels.attention(*x, segments, impl=impl))  # noqa: E731
        return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*(x.astype(dtype) for x in qkv))

    (_, got), (_, want) = with_gradients(impl, "bfloat16"), with_gradients("xla", "float32")
    for a, b in zip(got, want, strict=True):
        assert a.dtype == "bfloat16"
        np.testing.assert_allclose(np.float32(a), b, atol=0.03 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("impl", HERE)
def test_a_document_does_not_feel_the_others_in_its_row(impl):
    q, k, v, _ = inputs(0, 1, 128, 2, 2, 8)
    segments = jnp.asarray(np.where(np.arange(128) < 50, 1, 2)[None])
    run = jax.jit(functools.partial(kernels.attention, impl=impl))
    before = run(q, k, v, segments)
    after = run(q, k.at[:, :50].add(9.0), v.at[:, :50].set(7.0), segments)
    np.testing.assert_array_equal(before[:, 50:], after[:, 50:])
    assert not np.array_equal(before[:, :50], after[:, :50])


@pytest.mark.parametrize("cached", [0, 5, 11])
def test_cached_attention_sees_what_is_filled_and_itself(cached):
    q, k, v, _ = inputs(0, 2, 12, 4, 2, 8)
    k_BKSH, v_BKSH = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    # Beyond what is filled the cache holds what nothing may see.
    places = [
        jnp.full((2, 2, 16, 8), 1e9).at[:, :, :cached].set(x[:, :, :cached])
        for x in (k_BKSH, v_BKSH)
    ]
    late = kernels.cached_attention(
        q[:, cached:], k_BKSH[:, :, cached:], v_BKSH[:, :, cached:], *places, cached
    )
    np.testing.assert_allclose(late, oracle(q, k, v, None)[:, cached:], atol=2e-5)


def switched(window=None, chunk=None, softcap=None, sinks=False, heads=4):
    """The options of attention, and those of the dense reference, for a row of `dense.SWITCHES`."""
    logits = jnp.linspace(-2.0, 2.0, heads) if sinks else None
    options = {"mask": Mask(window=window, chunk=chunk), "softcap": softcap}
    return options, logits, {"window": window, "chunk": chunk}


# The blocked one has two blocks of 64, or four.
PLACES = [
    ("xla", 40, False),
    ("xla", 40, True),
    ("xla_blocked", 128, False),
    ("xla_blocked", 128, True),
]


@pytest.mark.parametrize("switches", audit_but(["all"], dense.SWITCHES))
@pytest.mark.parametrize(
    ("impl", "T", "mesh"),
    [*PLACES, pytest.param("xla_blocked", 512, False, marks=pytest.mark.audit)],
)
def test_switches_are_their_definition_in_value_and_gradient(impl, T, mesh, switches):
    options, sinks, limits = switched(**dense.SWITCHES[switches])
    q, k, v, segments = inputs(0, 2, T, 4, 2, 8, 3.0)
    probe = jax.random.normal(jax.random.key(1), q.shape)
    args = [x for x in (q, k, v, sinks) if x is not None]

    def loss(q, k, v, sinks=None):
        out = kernels.attention(q, k, v, segments, **options, sinks_N=sinks, impl=impl)
        return jnp.sum(probe * out), out

    run = jax.jit(jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True))
    if mesh:
        with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2), devices=jax.devices()[:4])):
            spec = jax.P("data", None, "tensor")
            args = [jax.device_put(x, jax.P() if x.ndim == 1 else spec) for x in args]
            segments, probe = jax.device_put(segments, jax.P("data")), jax.device_put(probe, spec)
            (_, out), grads = run(*args)
    else:
        (_, out), grads = run(*args)
    seen = dense.seen(T, np.asarray(segments), **limits)
    want = dense.value_and_gradients(q, k, v, probe, seen, options["softcap"], sinks)
    for got, exact in zip((out, *grads), want, strict=True):
        np.testing.assert_allclose(got, exact, atol=2e-5 * max(1.0, np.abs(exact).max()))
    plain = dense.value_and_gradients(q, k, v, probe, dense.seen(T, np.asarray(segments)))
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(want, plain, strict=False))


@pytest.mark.parametrize("switches", dense.SWITCHES)
@pytest.mark.parametrize("cached", audit_but([17], [5, 17, 39]))
def test_cached_attention_takes_the_switches(switches, cached):
    options, sinks, limits = switched(**dense.SWITCHES[switches])
    q, k, v, _ = inputs(1, 2, 40, 4, 2, 8, 3.0)
    late = [jnp.swapaxes(x[:, cached:], 1, 2) for x in (k, v)]
    filled = [
        jnp.full((2, 2, 44, 8), 1e9).at[:, :, :cached].set(jnp.swapaxes(x[:, :cached], 1, 2))
        for x in (k, v)
    ]
    run = jax.jit(functools.partial(kernels.cached_attention, **options))
    got = run(q[:, cached:], *late, *filled, cached, sinks_N=sinks)
    with jax.enable_x64(True):
        exact = (np.asarray(x, np.float64) for x in (q, k, v))
        want = dense.attention(*exact, dense.seen(40, **limits), options["softcap"], sinks)
    np.testing.assert_allclose(got, want[:, cached:], atol=2e-5)


@pytest.mark.parametrize("switches", ["window", "chunk", "all"])
def test_rows_of_a_cache_may_have_lengths_of_their_own(switches):
    options, sinks, _ = switched(**dense.SWITCHES[switches])
    q, k, v, _ = inputs(2, 3, 20, 4, 2, 8, 3.0)
    k_BKSH, v_BKSH = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    late = q[:, :2], k_BKSH[:, :, :2], v_BKSH[:, :, :2]
    run = functools.partial(kernels.cached_attention, **options, sinks_N=sinks)
    lengths = jnp.asarray([0, 7, 20])
    got = run(*late, k_BKSH, v_BKSH, lengths)
    for row, length in enumerate(lengths):
        alone = [x[row : row + 1] for x in (*late, k_BKSH, v_BKSH)]
        np.testing.assert_allclose(got[row], run(*alone, length)[0], atol=1e-6)


@pytest.mark.parametrize("switches", ["window", "chunk", "all"])
def test_texts_of_a_row_follow_the_same_cache_and_not_each_other(switches):
    options, sinks, _ = switched(**dense.SWITCHES[switches])
    q, k, v, _ = inputs(3, 1, 14, 4, 2, 8, 3.0)
    k_BKSH, v_BKSH = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    earlier = k_BKSH, v_BKSH, jnp.asarray([9])
    run = functools.partial(kernels.cached_attention, **options, sinks_N=sinks)
    segments = jnp.repeat(jnp.asarray([1, 2, 3]), jnp.asarray([5, 1, 8]))[None]
    got = run(q, k_BKSH, v_BKSH, *earlier, segment_ids_BT=segments)
    for begin, end in ((0, 5), (5, 6), (6, 14)):
        new = q[:, begin:end], k_BKSH[:, :, begin:end], v_BKSH[:, :, begin:end]
        np.testing.assert_allclose(got[:, begin:end], run(*new, *earlier), atol=1e-6)


@pytest.mark.parametrize("apart", [False, True])
def test_rows_of_a_cache_grow_at_their_own_ends(apart):
    old, late = jnp.zeros((2, 3, 1, 8, 4)), jnp.ones((2, 3, 1, 2, 4))
    lengths = jnp.asarray([0, 3, 6])
    old, late = (tuple(x) if apart else x for x in (old, late))
    grown = KVCache(old, old, lengths).append(KVCache(late, late, 2))
    filled = np.arange(8) >= np.asarray(lengths)[:, None]
    filled &= np.arange(8) < np.asarray(lengths)[:, None] + 2
    for layer in grown.k:
        np.testing.assert_array_equal(layer[:, 0, :, 0], filled)
    np.testing.assert_array_equal(grown.length, lengths + 2)


def test_a_program_for_every_platform_takes_what_every_platform_has():
    with jax.sharding.use_abstract_mesh(hardware.any_platform()):
        assert hardware.platform() == hardware.ANY
        for op, impl in kernels.IMPLEMENTATIONS:
            if impl.startswith(("pallas", "cudnn")):
                with pytest.raises(UserError, match="for every platform"):
                    dispatch.choose(op, impl)
    assert hardware.platform() == "cpu"


def test_cached_attention_refuses_what_it_cannot():
    q, k = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 2, 1, 8))
    for mask, word in (
        (Mask(causal=False), "causal=False"),
        (Mask(blocks=((True,),)), "blocks of 128"),
        (Mask(window=0), "window=0"),
        (Mask(chunk=0), "chunk=0"),
    ):
        with pytest.raises(UserError, match=f"cached_attention.*{word}"):
            kernels.cached_attention(q, k, k, k, k, 0, mask=mask)
    with pytest.raises(UserError, match="softcap=0"):
        kernels.cached_attention(q, k, k, k, k, 0, softcap=0.0)


def test_limits_that_hold_all_tokens_leave_the_plain_program():
    """A model with chunks of 8192 that trains on rows of 128 runs what any other does."""
    q, k, v, _ = inputs(0, 1, 128, 2, 1, 8)

    def program(**options):
        return jax.jit(functools.partial(kernels.attention, **options)).lower(q, k, v).as_text()

    plain = program()
    assert program(mask=Mask(window=128, chunk=8192)) == plain
    assert program(mask=Mask(window=127)) != plain != program(mask=Mask(chunk=127))


@pytest.mark.parametrize(
    ("H", "packed", "chosen"),
    [(128, False, "gpu"), (128, True, "gpu"), (96, False, "cudnn"), (96, True, "cudnn")],
)
def test_a_gpu_attends_by_our_kernel_if_it_can(monkeypatch, H, packed, chosen):
    """Measured on an H100. What ours doesn't take goes to cuDNN, whose mask is smaller than XLA's scores."""
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    q = jax.ShapeDtypeStruct((2, 64, 4, H), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 64), jnp.int32) if packed else None
    run = dispatch.choose("attention", "auto", q, q, q, segments)
    assert run.__module__ == f"minitext.kernels.attention.{chosen}"


def test_cudnn_says_what_it_needs():
    shapes = {"bfloat16": (2, 64, 4, 64), "float32": (2, 64, 4, 64)}
    half, single = (jnp.zeros(shape, dtype) for dtype, shape in shapes.items())
    segments = jnp.ones((2, 64), jnp.int32)
    supports = cudnn.supports
    assert supports(half, half, half, segments) is None
    given = {"mask": Mask(window=9), "softcap": 2.0, "sinks_N": jnp.zeros(4)}
    assert "without window=9, softcap=2.0, sinks" in supports(half, half, half, **given)
    assert "model.dtype=bfloat16" in supports(single, single, single)
    assert "even" in supports(half[:, :63], half, half, segments[:, :63])
    assert "got 63" in supports(half[..., :63], half, half)


@pytest.mark.parametrize("op, impl", kernels.IMPLEMENTATIONS, ids="-".join)
def test_a_kernel_of_another_platform_is_refused(op, impl):
    where = kernels.IMPLEMENTATIONS[op, impl].platform
    assert where == {"tpu": "tpu", "gpu": "gpu", "cudnn": "gpu"}.get(impl.split("_")[-1])
    if where is not None:
        with pytest.raises(UserError, match=f"{impl}.*for a {where}, and the program is for a cpu"):
            kernels.choose(op, impl)


def test_auto_takes_the_blocked_one_where_it_can(caplog):
    dispatch._log_once.cache_clear()
    caplog.set_level("INFO", "minitext.kernels")
    q, k, v, _ = inputs(0, 1, 128, 2, 1, 8)
    for _ in range(2):
        kernels.attention(q, k, v)
    assert [r.message for r in caplog.records] == ["attention on cpu: xla_blocked"]


def test_names_that_do_not_exist_and_shapes_that_do_not_go_are_refused():
    q, k, v, _ = inputs(0, 1, 6, 2, 1, 8)
    with pytest.raises(UserError, match=r"'flash'.*xla"):
        kernels.attention(q, k, v, impl="flash")
    with pytest.raises(UserError, match=r"xla_blocked.*T=6"):
        kernels.attention(q, k, v, impl="xla_blocked")


def test_training_on_a_cpu_imports_only_what_it_needs(tmp_path):
    """The whole command in its own process: no other platform's kernel, compiler, prediction, grader or engine.

    Of the room `compiler`, a step needs its options alone.
    """
    small = ["model.layers=1", "train.steps=1", "train.eval_batches=1"]
    args = ["minitext", "train", "laptop", *TINY, *small, f"run.dir={tmp_path}"]
    code = f"""if True:
        import sys
        from minitext.cli.main import main
        sys.argv = {args}
        try:
            main()
        except SystemExit as end:
            assert not end.code
        print(*(name for name in sys.modules if name.startswith("minitext.")))
    """
    command = [sys.executable, "-c", code]
    quick = os.environ | {"XLA_FLAGS": QUICK_FLAGS}
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=quick).stdout
    loaded = lines.splitlines()[-1].split()
    assert "minitext.kernels.attention.xla" in loaded
    foreign = {"tpu", "gpu", "cudnn", "tpu_grid", "gpu_blocks", "tiles_tpu", "tiles_gpu", "cases"}
    foreign |= {"compiler", "perf", "book", "engine"}
    loaded = set(loaded) - {"minitext.compiler", "minitext.compiler.options"}
    assert not [name for name in loaded if foreign & set(name.split("."))]


def test_another_platform_is_refused_without_importing_its_kernel():
    code = """if True:
        import sys
        from minitext import kernels
        for (op, impl), row in kernels.IMPLEMENTATIONS.items():
            assert row.platform is None or "the program is for a cpu" in row.reason()
        print(*(name for name in sys.modules if name.startswith("minitext.kernels.")))
    """
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {name.rpartition(".")[2] for name in loaded} & {"tpu", "gpu", "cudnn"}
