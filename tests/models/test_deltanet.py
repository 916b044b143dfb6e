"""Gated DeltaNet: its definition, chunks and steps, packed rows, the cache, meshes, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import minitext as mt
from minitext.checkpoint import leaves
from minitext.config.config import ConfigError
from minitext.config.model import DeltaNetConfig, ModelConfig
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.inference.generate import Generator, Sampling, check_length
from minitext.models import deltanet
from minitext.models.deltanet import DeltaNet
from minitext.models.flops import count_flops, count_params
from minitext.models.transformer import Transformer, make_cache
from minitext.perf import cost
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import abstract_mesh, make_mesh
from minitext.sharding.rules import RULES, tree_shardings

# Every width is one of its own.
WIDTHS = DeltaNetConfig(key_heads=2, value_heads=6, key_dim=5, value_dim=7, conv=3)
CFG = ModelConfig(vocab=40, layers=2, embed=24, heads=3, mlp=32, attention=WIDTHS)
# The last layer of each period has keys and values.
MIXED = CFG.model_copy(update={"period": ((), (("attention.kind", "gqa"),)), "scan_layers": False})


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(deltanet, "CHUNK", 4)


def make_layer(cfg=CFG, seed=0):
    """A layer with every parameter random, and states that last."""
    graphdef, params = nnx.split(DeltaNet(cfg, rules=RULES["dp"], rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda w: w + 0.2 * rng.normal(size=w.shape).astype(np.float32), params)
    return graphdef, params


def run(graphdef, params, x_BTD, segments, cache=None):
    B, T, D = x_BTD.shape
    places = jnp.zeros((B, T), jnp.int32)
    out, new = nnx.merge(graphdef, params)(x_BTD.reshape(B * T, D), places, segments, cache)
    return out.reshape(B, T, D), new


def oracle(a, weights, x_TD, segments_T):
    """One row, one head and one token at a time, in float64; each document for itself."""
    R, heads = a.value_heads // a.key_heads, []
    unit = lambda x: x / np.sqrt(x @ x + 1e-6)  # noqa: E731
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731

    def mixed(name, t, head, width):
        columns = slice(head * width, (head + 1) * width)
        total = np.zeros(width)
        for back in range(a.conv):
            if t - back >= 0 and segments_T[t - back] == segments_T[t]:
                tap = weights[f"{name}_conv"][a.conv - 1 - back, columns]
                total += tap * (x_TD[t - back] @ weights[f"{name}.w"][:, columns])
        return silu(total)

    for head in range(a.value_heads):
        state, outs = np.zeros((a.key_dim, a.value_dim)), []
        for t, x in enumerate(x_TD):
            if t and segments_T[t] != segments_T[t - 1]:
                state = 0 * state
            q = unit(mixed("q", t, head // R, a.key_dim)) / np.sqrt(a.key_dim)
            k, v = unit(mixed("k", t, head // R, a.key_dim)), mixed("v", t, head, a.value_dim)
            time = np.log1p(np.exp(x @ weights["decay.w"][:, head] + weights["time_bias"][head]))
            state = state * np.exp(-np.exp(weights["log_rate"][head]) * time)
            beta = 1 / (1 + np.exp(-x @ weights["beta.w"][:, head]))
            state = state + np.outer(k, beta * (v - k @ state))
            out = q @ state
            out = out / np.sqrt(np.mean(out * out) + 1e-6) * weights["norm.scale"]
            columns = slice(head * a.value_dim, (head + 1) * a.value_dim)
            outs.append(out * silu(x @ weights["gate.w"][:, columns]))
        heads.append(outs)
    return np.concatenate(heads, axis=-1) @ weights["o.w"]


def test_value_and_gradient_are_those_of_the_definition(short_chunks):
    """Of packed documents, one of them longer than two chunks, and one that begins where a chunk does."""
    graphdef, params = make_layer()
    rng = np.random.default_rng(0)
    x, probe = (rng.normal(size=(1, 15, 24)).astype(np.float32) for _ in range(2))
    segments = np.repeat([1, 2, 3, 0], [1, 10, 2, 2])[None]
    segments[0, 12:] = [3, 3, 4]
    layer = jax.jit(lambda params, x: run(graphdef, params, x, segments)[0])
    out, back = jax.vjp(layer, params, x)
    weights = {name: np.float64(w) for name, w in leaves.named(params).items()}
    want = oracle(CFG.attention, weights, np.float64(x[0]), segments[0])
    np.testing.assert_allclose(out[0], want, atol=2e-5)

    # The slope along one direction in all parameters and inputs together, by differences of the oracle.
    grad_params, grad_x = back(jnp.asarray(probe))
    grads = leaves.named(grad_params)
    step = {name: rng.normal(size=w.shape) for name, w in weights.items()}
    step_x = rng.normal(size=x.shape)

    def loss(size):
        moved = {name: w + size * step[name] for name, w in weights.items()}
        rows = oracle(CFG.attention, moved, np.float64(x[0]) + size * step_x[0], segments[0])
        return np.sum(probe[0] * rows)

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    got = sum(np.sum(np.float64(grads[name]) * step[name]) for name in step)
    scale = sum(np.linalg.norm(grads[name]) for name in step)
    np.testing.assert_allclose(got + np.sum(grad_x * step_x), slope, atol=1e-5 * scale)


def test_no_output_depends_on_a_later_input_or_another_document(short_chunks):
    graphdef, params = make_layer()
    segments = np.asarray([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0]])
    x = jax.random.normal(jax.random.key(0), (1, 11, 24))
    jacobian = jax.jit(jax.jacobian(lambda x: run(graphdef, params, x, segments)[0][0].sum(-1)))(x)[
        :, 0
    ]
    same = segments[0][:, None] == segments[0]
    np.testing.assert_array_equal(np.abs(jacobian).max(-1) > 0, np.tril(same))


def test_chunks_are_steps(short_chunks):
    rng = np.random.default_rng(0)
    shapes = (2, 2, 5), (2, 2, 5), (2, 2, 3, 7), (2, 2, 3), (2, 2, 3)
    q, k, v, fade, beta = (
        jnp.asarray(rng.normal(size=(s[0], 11, *s[1:])), jnp.float32) for s in shapes
    )
    tokens = deltanet.Tokens(
        deltanet.unit(q), deltanet.unit(k), v, -jnp.square(fade), jax.nn.sigmoid(beta)
    )
    state = start = jnp.asarray(rng.normal(size=(2, 2, 3, 5, 7)), jnp.float32)
    outs = []
    for t in range(11):
        one = deltanet.Tokens(*(x[:, t : t + 1] for x in tokens))
        out, state = jax.jit(deltanet.step)(one, state)
        outs.append(out)
    whole, last = jax.jit(deltanet.chunked)(tokens, jnp.zeros((2, 11), jnp.int32), start)
    np.testing.assert_allclose(whole, jnp.concatenate(outs, 1), atol=5e-6)
    np.testing.assert_allclose(last, state, atol=5e-6)


def test_fast_fading_leaves_nothing_that_is_not_finite():
    """Products of factors below the smallest float32, within a chunk, and their gradients."""
    x = jnp.ones((1, 64, 1, 2))
    beta = jnp.full((1, 64, 1, 1), 0.5)
    runs = jnp.zeros((1, 64), jnp.int32)

    def loss(decay):
        tokens = deltanet.Tokens(x, x, x[..., None, :], decay, beta)
        return jnp.sum(deltanet.chunked(tokens, runs)[0] ** 2)

    decay = jnp.full((1, 64, 1, 1), -40.0)
    value, grad = jax.jit(jax.value_and_grad(loss))(decay)
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_padding_does_not_enter_the_cache(short_chunks):
    graphdef, params = make_layer()
    empty = jax.tree.map(lambda x: x[0] if x.ndim else x, make_cache(CFG, 2, 0))
    x = jax.random.normal(jax.random.key(0), (2, 9, 24))
    read = jax.jit(partial(run, graphdef))
    for length in (1, 6):  # fewer tokens than the convolution sees, and more
        segments = (jnp.arange(9) < length).astype(jnp.int32)[None].repeat(2, 0)
        out, padded = read(params, x, segments, empty)
        want, clean = read(params, x[:, :length], None, empty)
        np.testing.assert_allclose(out[:, :length], want, atol=2e-5)
        for a, b in zip(padded[:-1], clean[:-1], strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


def test_greedy_texts_are_those_of_decoding_without_a_cache():
    """Also with a prompt that is shorter than the convolution; prompts are padded."""
    graphdef, state = nnx.split(Transformer(MIXED, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda x: 2 * x, state)
    logits = jax.jit(lambda row: nnx.merge(graphdef, params)(row))
    for prompt in ([5], [5, 7, 9, 11]):
        row = np.zeros((1, 16), np.int32)
        row[0, : len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + 6):
            row[0, end] = int(jnp.argmax(logits(row)[0, end - 1]))
        tokens = Generator(MIXED, params, Sampling(0)).tokens(np.asarray([prompt]), max_tokens=6)
        found = np.stack(list(tokens), axis=1)[0].tolist()
        assert found == row[0, len(prompt) : len(prompt) + 6].tolist()


def test_the_cache_does_not_grow_with_the_text():
    size = {n: jax.eval_shape(lambda n=n: make_cache(CFG, 1, n)) for n in (1, 10**9)}
    assert jax.tree.map(jnp.shape, size[1]) == jax.tree.map(jnp.shape, size[10**9])
    check_length(CFG, 1, 1, 10**9, "max_tokens")  # is not refused
    assert size[1].state.dtype == jnp.float32


def test_formulas_of_parameters_and_operations_are_exact():
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(CFG, rngs=nnx.Rngs(0))))
    assert count_params(CFG) == sum(x.size for x in jax.tree.leaves(params))
    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    cache = jax.eval_shape(lambda: make_cache(CFG, 2, 0))
    found = cost.count(lambda p, t, c: nnx.merge(graphdef, p)(t, cache=c), params, tokens, cache)
    products = sum(op.runs * op.flops for op in found if op.is_product)
    assert 3 * products == count_flops(CFG, 2, 1) == count_flops(CFG, 2, 4096)


def test_a_mesh_computes_the_same(short_chunks):
    """Heads and rows are split; the values and the gradients of all parameters are those of one device."""
    cfg = CFG.model_copy(
        update={"attention": WIDTHS.model_copy(update={"value_heads": 4, "value_dim": 6})}
    )
    graphdef, params = make_layer(cfg)
    x = jax.random.normal(jax.random.key(1), (4, 9, 24))
    segments = jnp.asarray(1 + (np.arange(9) >= np.asarray([[2], [4], [5], [9]])))

    def loss(graphdef, params, x, segments):
        return jnp.sum(jnp.sin(run(graphdef, params, x, segments)[0]))

    want = jax.jit(jax.value_and_grad(partial(loss, graphdef)))(params, x, segments)
    rules = RULES["fsdp_tp"]
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), devices=jax.devices()[:4])
    split = nnx.graphdef(nnx.eval_shape(lambda: DeltaNet(cfg, rules=rules, rngs=nnx.Rngs(0))))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, tree_shardings(params, mesh, rules))
        x, segments = (jax.device_put(a, P("fsdp")) for a in (x, segments))

        def sharded(params, x, segments):
            B, T, D = x.shape
            flat = jax.lax.reshape(x, (B * T, D), out_sharding=P("fsdp"))
            out, _ = nnx.merge(split, params)(flat, jnp.zeros_like(segments), segments)
            return jnp.sum(jnp.sin(out))

        found = jax.jit(jax.value_and_grad(sharded))(params, x, segments)
    for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(np.abs(b).max(), 1))


STATES = ["model.attention.kind=deltanet", "mesh.data=1"]


@pytest.mark.parametrize(
    "settings, word",
    [
        (["mesh.context=2", *STATES], "mesh.context=2 cannot be combined with model.attention.kind=deltanet"),
        (["mesh.context=2", "model.period=[{}, {attention: {kind: deltanet}}]", "mesh.data=1"], "mesh.context=2"),
        (["mesh.tensor=8", "model.vocab=320", *STATES], "model.attention.key_heads=4"),
    ],
)  # fmt: skip
def test_a_mesh_that_cannot_split_it_is_refused(settings, word):
    cfg = mt.load_config("laptop", settings)
    with pytest.raises(UserError) as error:
        check_mesh(cfg, abstract_mesh(cfg.mesh))
    assert word in str(error.value) and "\n" not in str(error.value)


def test_heads_of_values_that_keys_cannot_serve_are_refused():
    with pytest.raises(ConfigError, match="value_heads=8 is not divisible by .*key_heads=3"):
        mt.load_config("laptop", ["model.attention.kind=deltanet", "model.attention.key_heads=3"])
