"""Latent attention: its definition, its cache, and that the two ways to compute it are one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext import kernels
from minitext.checkpoint import leaves
from minitext.config.config import load_config
from minitext.config.model import MLAConfig, ModelConfig
from minitext.errors import UserError
from minitext.inference.generate import Generator, Sampling, make_programs
from minitext.kernels.attention import cudnn
from minitext.models.flops import count_flops, count_params
from minitext.models.mla import MLA
from minitext.models.transformer import Transformer, make_cache
from minitext.perf import cost
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import abstract_mesh
from minitext.sharding.rules import RULES

# Every width is one of its own.
WIDTHS = MLAConfig(q_rank=10, kv_rank=12, nope_dim=6, rope_dim=4, v_dim=5)
CFG = ModelConfig(vocab=40, layers=2, embed=24, heads=3, mlp=32, attention=WIDTHS)


def change(cfg=CFG, **widths):
    return cfg.model_copy(update={"attention": cfg.attention.model_copy(update=widths)})


def make_layer(cfg=CFG):
    return nnx.split(MLA(cfg, rules=RULES["dp"], rngs=nnx.Rngs(0)))


def run(graphdef, params, x_BTD, positions, segments):
    B, T, D = x_BTD.shape
    out, _ = nnx.merge(graphdef, params)(x_BTD.reshape(B * T, D), positions, segments)
    return out.reshape(B, T, D)


def packed(rng, B, T):
    """Segment ids, and positions in the segments."""
    segments = 1 + np.cumsum(rng.random((B, T)) < 0.3, axis=1)
    places = [[t - list(row).index(row[t]) for t in range(T)] for row in segments]
    return np.asarray(places), segments


def oracle(cfg, weights, x_BTD, positions, segments):
    """One token and one head at a time, in float64; nothing is shared, folded or masked."""
    a, out = cfg.attention, np.zeros_like(x_BTD)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x) + cfg.attention.latent_eps) * scale

    def turned(x, place):
        half = len(x) // 2
        angles = place * cfg.rope.theta ** (-np.arange(half) / half)
        z = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag])

    def columns(name, head, width):
        return weights[f"{name}.w"][:, head * width : (head + 1) * width]

    def query(b, t, head):
        source = x_BTD[b, t]
        if a.q_rank:
            source = norm(source @ weights["q_down.w"], weights["q_norm.scale"])
        q = source @ columns("q", head, a.nope_dim + a.rope_dim)
        return np.concatenate([q[: a.nope_dim], turned(q[a.nope_dim :], positions[b, t])])

    def key_and_value(b, s, head):
        both = x_BTD[b, s] @ weights["kv_down.w"]
        latent = norm(both[: a.kv_rank], weights["kv_norm.scale"])
        key = turned(both[a.kv_rank :], positions[b, s])
        key = np.concatenate([latent @ columns("k_up", head, a.nope_dim), key])
        return key, latent @ columns("v_up", head, a.v_dim)

    for b, t in np.ndindex(*x_BTD.shape[:2]):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        heads = []
        for head in range(cfg.heads):
            q = query(b, t, head)
            keys, values = zip(*(key_and_value(b, s, head) for s in seen), strict=True)
            logits = np.asarray(keys) @ q / np.sqrt(a.nope_dim + a.rope_dim)
            exps = np.exp(logits - logits.max())
            heads.append(exps / exps.sum() @ np.asarray(values))
        out[b, t] = np.concatenate(heads) @ weights["o.w"]
    return out


@given(seed=st.integers(0, 99), q_rank=st.sampled_from([None, 10]))
@settings(max_examples=4)
def test_value_and_gradient_are_those_of_the_definition(seed, q_rank):
    cfg, rng = change(q_rank=q_rank), np.random.default_rng(seed)
    graphdef, params = make_layer(cfg)
    params = jax.tree.map(lambda w: w + 0.1 * rng.normal(size=w.shape).astype(np.float32), params)
    x, probe = (rng.normal(size=(1, 7, 24)).astype(np.float32) for _ in range(2))
    positions, segments = packed(rng, 1, 7)
    out, back = jax.vjp(
        jax.jit(lambda params, x: run(graphdef, params, x, positions, segments)), params, x
    )
    weights = {name: np.asarray(w, np.float64) for name, w in leaves.named(params).items()}
    np.testing.assert_allclose(
        out, oracle(cfg, weights, np.float64(x), positions, segments), atol=2e-5
    )

    # The slope along one direction in all parameters and inputs together, by differences of the oracle.
    grad_params, grad_x = back(jnp.asarray(probe))
    grads = leaves.named(grad_params)
    step = {name: rng.normal(size=w.shape) for name, w in weights.items()}
    step_x = rng.normal(size=x.shape)

    def loss(size):
        moved = {name: w + size * step[name] for name, w in weights.items()}
        return np.sum(probe * oracle(cfg, moved, x + size * step_x, positions, segments))

    want = (loss(1e-4) - loss(-1e-4)) / 2e-4
    got = sum(np.sum(np.float64(grads[name]) * step[name]) for name in step)
    assert set(grads) == set(step) and all(np.isfinite(g).all() for g in grads.values())
    scale = sum(np.linalg.norm(grads[name]) for name in step)
    np.testing.assert_allclose(got + np.sum(grad_x * step_x), want, atol=1e-5 * scale)


def test_no_output_depends_on_a_later_input():
    graphdef, params = make_layer()
    positions = np.arange(6)[None]
    x = jax.random.normal(jax.random.key(0), (1, 6, 24))
    jacobian = jax.jit(
        jax.jacobian(lambda x: run(graphdef, params, x, positions, None)[0].sum(-1))
    )(x)[:, 0]
    np.testing.assert_array_equal(np.abs(jacobian).max(-1) > 0, np.tril(np.ones((6, 6), bool)))


def test_a_document_does_not_feel_the_others_in_its_row():
    graphdef, params = make_layer()
    positions, segments = np.asarray([[0, 1, 2, 0, 1]]), np.asarray([[1, 1, 1, 2, 2]])
    layer = jax.jit(lambda x: run(graphdef, params, x, positions, segments))
    x = jax.random.normal(jax.random.key(0), (1, 5, 24))
    before, after = layer(x), layer(x.at[:, :3].set(7.0))
    np.testing.assert_array_equal(before[:, 3:], after[:, 3:])
    assert not np.array_equal(before[:, :3], after[:, :3])


@pytest.mark.parametrize(("q_rank", "dtype"), [(10, "float32"), (None, "bfloat16")])
def test_token_by_token_from_the_latents_is_all_at_once_from_keys_and_values(q_rank, dtype):
    cfg = change(CFG.model_copy(update={"dtype": dtype}), q_rank=q_rank)
    graphdef, params = nnx.split(Transformer(cfg, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 40)
    want = jax.jit(lambda tokens: nnx.merge(graphdef, params)(tokens))(tokens)

    @jax.jit
    def read(tokens, cache):
        # The places that are not filled hold what nothing may see.
        filled = jnp.arange(10) < cache.length
        dirty = [jnp.where(filled[:, *[None] * (x.ndim - 3)], x, 1e6) for x in cache[:-1]]
        cache = cache._make((*dirty, cache.length))
        logits, new = nnx.merge(graphdef, params)(tokens, cache=cache)
        return logits, cache.append(new)

    cache, parts = make_cache(cfg, 2, 10), []
    for low, high in [(0, 3), *((t, t + 1) for t in range(3, 8))]:
        logits, cache = read(tokens[:, low:high], cache)
        parts.append(logits)
    assert int(cache.length) == 8
    limit = 2e-5 if dtype == "float32" else 0.1
    np.testing.assert_allclose(np.concatenate(parts, 1), want, atol=limit)


def test_greedy_texts_are_those_of_decoding_without_a_cache():
    cfg = CFG.model_copy(update={"scan_layers": False})
    graphdef, state = nnx.split(Transformer(cfg, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda x: 3 * x, state)
    logits = jax.jit(lambda row: nnx.merge(graphdef, params)(row))
    row = np.zeros((1, 16), np.int32)
    row[0, :3] = prompt = [5, 7, 9]
    for end in range(3, 9):
        row[0, end] = int(jnp.argmax(logits(row)[0, end - 1]))
    for rows in (1, 2):  # one row's projections are split in groups, those by head in heads
        tokens = Generator(cfg, params, Sampling(0)).tokens([prompt] * rows, max_tokens=6)
        assert np.stack(list(tokens), axis=1).tolist() == [row[0, 3:9].tolist()] * rows


def test_a_step_with_a_long_cache_copies_none_of_it():
    cfg = change(CFG.model_copy(update={"layers": 1, "scan_layers": False}), kv_rank=128)
    params = nnx.state(Transformer(cfg, rngs=nnx.Rngs(0)), nnx.Param)
    programs = make_programs(cfg, Sampling(0), 2)
    cache = make_cache(cfg, 1, 16384)
    cache = cache._make((*map(tuple, cache[:-1]), cache.length))
    args = programs.lay_out(params), jnp.zeros(1, jnp.int32), cache, jax.random.key(0)
    step = programs.decode.lower(*args).compile()
    size = sum(x.nbytes for x in jax.tree.leaves(cache[:-1]))
    assert step.memory_analysis().temp_size_in_bytes < size / 8


@pytest.mark.parametrize("heads", [2, 16])
def test_the_cache_holds_one_latent_and_one_key_for_all_heads(heads):
    cfg = CFG.model_copy(update={"heads": heads, "dtype": "bfloat16"})
    cache = jax.eval_shape(lambda: make_cache(cfg, 3, 50))
    size = sum(x.size * x.dtype.itemsize for x in cache[:-1])
    assert size == cfg.layers * 3 * 50 * (12 + 4) * 2
    # A published case: DeepSeek-V2 (60 layers, 128 heads of 128) against attention whose heads have keys of their own.
    deepseek = MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    sizes = {"layers": 60, "embed": 5120, "heads": 128, "head_dim": None}
    latent, whole = (
        jax.eval_shape(lambda c=c: make_cache(c, 1, 1))
        for c in (
            ModelConfig(**sizes, attention=deepseek),
            ModelConfig(**sizes | {"head_dim": 128}),
        )
    )
    count = [sum(x.size for x in c[:-1]) for c in (latent, whole)]
    assert count == [60 * 576, 60 * 2 * 128 * 128]


@given(
    st.sampled_from([None, 7]), st.integers(1, 9), st.integers(1, 5), st.sampled_from([2, 4]), st.integers(1, 5),
    st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=6)
def test_formulas_of_parameters_and_operations_are_exact(q_rank, kv_rank, nope, rotated, v, heads):
    widths = MLAConfig(q_rank=q_rank, kv_rank=kv_rank, nope_dim=nope, rope_dim=rotated, v_dim=v)
    cfg = CFG.model_copy(update={"heads": heads, "attention": widths})
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    assert count_params(cfg) == sum(x.size for x in jax.tree.leaves(params))
    tokens = jax.ShapeDtypeStruct((2, 12), jnp.int32)
    found = cost.count(lambda p, tokens: nnx.merge(graphdef, p)(tokens), params, tokens)
    products = sum(op.runs * op.flops for op in found if op.is_product)
    assert 3 * products == count_flops(cfg, 24, 12, causal=False)


def test_every_kernel_takes_values_of_another_width_or_says_that_it_does_not():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 128, 2, H)), jnp.float32) for H in (6, 6, 3))
    segments = jnp.asarray(1 + np.cumsum(rng.random((1, 128)) < 0.1, axis=1))

    def gradients(impl):
        def loss(q, k, v):
            return jnp.sum(kernels.attention(q, k, v, segments, impl=impl) ** 2)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)

    want = gradients("xla")
    for op, impl in kernels.IMPLEMENTATIONS:
        if op == "attention" and not kernels.IMPLEMENTATIONS[op, impl].reason(q, k, v, segments):
            for a, b in zip(jax.tree.leaves(gradients(impl)), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
    wide, narrow = (jnp.zeros((1, 8, 2, H), jnp.bfloat16) for H in (16, 8))
    assert "as wide as keys" in cudnn.supports(wide, wide, narrow)


def test_latents_kept_for_the_backward_pass_change_no_bit():
    def gradient(**changes):
        cfg = CFG.model_copy(update=changes)
        graphdef, params = nnx.split(Transformer(cfg, rngs=nnx.Rngs(0)))
        tokens = jnp.arange(8)[None]
        loss = lambda p: jnp.sum(jnp.square(nnx.merge(graphdef, p)(tokens)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    kept = gradient(remat="names", remat_save=("latents",))
    for a, b in zip(*map(jax.tree.leaves, (kept, gradient(remat="full"))), strict=True):
        np.testing.assert_array_equal(a, b)


LAYER = ["model.heads=8", "model.kv_heads=null", "model.attention.kind=mla"]


def test_a_rank_that_fsdp_does_not_divide_is_refused_by_its_key():
    for key in ("kv_rank", "q_rank"):
        settings = [*LAYER, f"model.attention.{key}=20", "mesh.fsdp=8", "mesh.data=1"]
        cfg = load_config("laptop", settings)
        with pytest.raises(UserError, match=rf"model\.attention\.{key}=20 .*multiple of 8"):
            check_mesh(cfg, abstract_mesh(cfg.mesh))
