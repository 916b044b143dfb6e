"""The whole model: causality, packing, layouts, remat, cache, and its formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from pydantic import ValidationError

from minitext.config.config import load_config, presets
from minitext.config.model import ModelConfig
from minitext.errors import UserError
from minitext.kernels.dispatch import IMPLEMENTATIONS
from minitext.models import transformer
from minitext.models.flops import count_flops, count_params
from minitext.models.qwix_rules import traced_products
from minitext.models.transformer import Transformer, make_cache
from tests.conftest import audit_but

CFG = ModelConfig(vocab=40, layers=2, embed=24, heads=4, kv_heads=2, mlp=32, scan_layers=False)


def make(**changes):
    return Transformer(CFG.model_copy(update=changes), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
    return make()


TOKENS = jax.random.randint(jax.random.key(0), (2, 12), 0, 40)


@nnx.jit
def whole(model):
    """The logits of `TOKENS`."""
    return model(TOKENS)


def test_gradients_respect_causality(model):
    graphdef, params = nnx.split(model)

    def summed_logits(params, t):  # of row 0, in which every token occurs once
        return nnx.merge(graphdef, params)(jnp.arange(12)[None])[0, t].sum()

    grad = jax.jit(jax.grad(summed_logits))
    for t in (0, 5, 11):
        reach = np.abs(grad(params, t)["embed"]["table"].get_value()).max(-1) > 0
        np.testing.assert_array_equal(reach[:12], np.arange(12) <= t)


def test_packed_documents_are_bit_equal_to_whatever_stands_beside_them(model):
    segments = jnp.asarray([[1] * 5 + [2] * 7] * 2)
    positions = jnp.asarray([[*range(5), *range(7)]] * 2)
    graphdef, params = nnx.split(model)
    run = jax.jit(lambda tokens: nnx.merge(graphdef, params)(tokens, positions, segments))
    before, after = run(TOKENS), run(TOKENS.at[:, :5].set(7))
    np.testing.assert_array_equal(before[:, 5:], after[:, 5:])
    alone = nnx.jit(lambda model: model(TOKENS[:, 5:]))(model)
    np.testing.assert_allclose(before[:, 5:], alone, atol=1e-5)


@pytest.mark.parametrize(
    "impl", sorted({impl for op, impl in IMPLEMENTATIONS if op == "attention"})
)
@pytest.mark.parametrize("scan", audit_but([True], [True, False]))
def test_in_every_implementation_a_document_s_logits_are_bit_equal_beside_another(impl, scan):
    attention = CFG.attention.model_copy(update={"impl": impl})
    model = make(attention=attention, scan_layers=scan)
    rng = np.random.default_rng(0)
    T, cut = 132, 51
    tokens = jnp.asarray(rng.integers(0, 40, (2, T)))
    segments = jnp.asarray([[1] * cut + [2] * (T - cut)] * 2)
    positions = jnp.asarray([[*range(cut), *range(T - cut)]] * 2)
    graphdef, params = nnx.split(model)
    run = jax.jit(lambda tokens: nnx.merge(graphdef, params)(tokens, positions, segments))
    try:
        before = run(tokens)
    except UserError as error:
        pytest.skip(f"not on this machine: {error}")
    first = run(tokens.at[:, :cut].set(jnp.asarray(rng.integers(0, 40, (2, cut)))))
    second = run(tokens.at[:, cut:].set(jnp.asarray(rng.integers(0, 40, (2, T - cut)))))
    np.testing.assert_array_equal(before[:, cut:], first[:, cut:])
    np.testing.assert_array_equal(before[:, :cut], second[:, :cut])
    assert (before[:, :cut] != first[:, :cut]).any() and (before[:, cut:] != second[:, cut:]).any()


CHANGES = [(True, "none"), (True, "dots"), (True, "full"), (False, "full")]


@functools.cache
def gradient(**changes):
    graphdef, params = nnx.split(make(**changes))
    loss = lambda p: jnp.sum(jnp.square(nnx.merge(graphdef, p)(TOKENS)))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("change", audit_but(CHANGES[1::2], CHANGES))
def test_scan_and_remat_change_nothing(change):
    (loss, grads), (want_loss, want) = gradient(scan_layers=change[0], remat=change[1]), gradient()
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))


EVERY_NAME = ("qkv", "gate_up", "attention", "attention_out", "hidden")


@pytest.mark.parametrize(
    "save", audit_but([EVERY_NAME], [EVERY_NAME, EVERY_NAME[:2], EVERY_NAME[2:]])
)
def test_what_remat_keeps_by_name_changes_no_bit(save):
    kept = gradient(scan_layers=True, remat="names", remat_save=save)
    full = gradient(scan_layers=True, remat="full")
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(full), strict=True):
        np.testing.assert_array_equal(a, b)


def test_with_remat_dots_no_product_of_a_gated_layer_with_a_weight_is_recomputed():
    gated = CFG.attention.model_copy(update={"gate": True})

    def products(remat):
        graphdef, params = nnx.split(
            nnx.eval_shape(lambda: make(attention=gated, layers=1, remat=remat))
        )
        loss = lambda p: jnp.sum(nnx.merge(graphdef, p)(TOKENS))  # noqa: E731
        return len([*traced_products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)])

    assert products("dots") == products("none") + 2  # attention's own


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"remat": "names", "remat_save": ["qkv", "gates"]}, "gates: choose among qkv, attention"),
        ({"remat": "names"}, "it is empty"),
        ({"remat": "full", "remat_save": ["qkv"]}, "has no effect with model.remat=full"),
    ],
)
def test_names_to_keep_are_checked(changes, says):
    with pytest.raises(ValueError, match=says):
        ModelConfig(**changes)


@pytest.mark.parametrize("scan", [True, False])
def test_cache_gives_the_logits_of_the_whole_row(scan):
    model = make(scan_layers=scan)

    @nnx.jit
    def read(model, tokens, cache):
        logits, new = model(tokens, cache=cache)
        return logits, cache.append(new)

    first, cache = read(model, TOKENS[:, :7], make_cache(model.cfg, 2, 16))
    second, cache = read(model, TOKENS[:, 7:], cache)
    assert int(cache.length) == 12
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole(model), atol=1e-5)


def test_logits_are_float32_whatever_the_compute_type():
    logits = whole(make(dtype="bfloat16"))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, whole(make()), atol=0.1)


def test_an_untrained_model_finds_all_tokens_equally_likely(model):
    log_probs = jax.nn.log_softmax(whole(model))
    np.testing.assert_allclose(-log_probs.mean(), np.log(40), rtol=0.02)


@given(
    st.integers(1, 4), st.sampled_from([(4, 1), (4, 2), (4, 4), (2, 1)]), st.integers(1, 9), st.integers(2, 50),
    st.booleans(), st.sampled_from([None, 6]),
)  # fmt: skip
@settings(max_examples=15)
def test_parameter_formula_is_exact(layers, heads, mlp, vocab, tied, head_dim):
    cfg = ModelConfig(
        vocab=vocab, layers=layers, embed=16, heads=heads[0], kv_heads=heads[1], mlp=mlp, tie_embeddings=tied,
        head_dim=head_dim,
    )  # fmt: skip
    params = nnx.state(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))), nnx.Param)
    assert count_params(cfg) == sum(x.size for x in jax.tree.leaves(params))


def test_parameter_counts_of_the_presets():
    counts = {name: count_params(load_config(name).model) for name in presets()}
    assert counts["llama2-70b"] == 68_976_648_192  # Touvron et al. 2023: 70B
    assert counts["llama3-8b"] == 8_030_261_248  # Grattafiori et al. 2024: 8B
    assert counts["mixtral-8x7b"] == 46_702_792_704  # Jiang et al. 2024: 47B, of which 13B active
    assert counts["qwen3-30b-a3b"] == 30_532_122_624  # Qwen Team 2025: 30.5B, 3.3B active
    active = {n: count_params(load_config(n).model, active=True) for n in counts}
    assert 12.8e9 < active["mixtral-8x7b"] < 13e9 and 3.3e9 < active["qwen3-30b-a3b"] < 3.4e9
    assert active["llama3-8b"] == counts["llama3-8b"]
    assert 110e6 < counts["gpt2-124m"] < 130e6


def dot_flops(jaxpr):
    """Sums 2 x output x contraction over every dot_general, scan bodies times their length."""
    total = 0
    for eqn in jaxpr.eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for sub in jaxprs_in_params(eqn.params):
            total += times * dot_flops(sub)
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * int(np.prod([shape[i] for i in contract]))
    return total


@pytest.mark.parametrize("scan", [True, False])
def test_flop_formula_is_exact_for_the_full_square(scan):
    graphdef, params = nnx.split(make(scan_layers=scan))
    jaxpr = jax.make_jaxpr(lambda p: nnx.merge(graphdef, p)(TOKENS))(params)
    assert 3 * dot_flops(jaxpr.jaxpr) == count_flops(CFG, TOKENS.size, 12, causal=False)


def test_causal_attention_counts_half():
    full, half = (count_flops(CFG, 24, 12, causal=c) for c in (False, True))
    weights = 3 * 24 * 2 * (count_params(CFG) - 40 * 24 - 24 - CFG.layers * 2 * 24)
    assert full - weights == 2 * (half - weights)


PATTERNS = {
    "windows": {
        "layers": 5,
        "period": [{}, {"attention": {"window": None}, "rope": {"theta": 1e6}}],
        "attention": {"window": 3, "softcap": 20.0, "scale": 0.3, "qk_norm": "head"},
        "norms": "both",
        "norm_offset": True,
        "embed_scale": 8.0,
        "logit_scale": 0.1,
        "logit_softcap": 10.0,
        "tie_embeddings": True,
    },
    "experts": {
        "layers": 5,
        "dense_layers": 1,
        "dense_mlp": 96,
        "ffn": {
            "kind": "moe",
            "experts": 4,
            "router_bias": True,
            "bias": True,
            "activation": "clamped",
            "shared_experts": 1,
            "shared_gate": True,
            "bias_rate": 0.001,
        },
        "attention": {"sinks": True, "qkv_bias": True, "out_bias": True},
        "period": [{}, {"ffn": {"kind": "swiglu"}}],
    },
    "chunks": {
        "layers": 2,
        "ffn": {"kind": "moe", "experts": 4, "router": "sigmoid", "scale_input": True},
        "attention": {"qk_norm": "l2", "chunk": 4, "gate": True},
        "period": [
            {},
            {"rope": {"kind": "none"}, "attention": {"chunk": None, "temperature_length": 4}},
        ],
    },
    "whole norms": {"layers": 2, "norms": "after", "attention": {"qk_norm": "whole"}},
}


@pytest.fixture(params=audit_but(["windows"], PATTERNS))
def pattern(request):
    sizes = {"vocab": 64, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 32}
    return ModelConfig.model_validate(sizes | PATTERNS[request.param])


def test_a_period_recomputes_one_layer_at_a_time_and_computes_the_same(pattern, monkeypatch):
    """What orders operations changes no more than rounding, and each layer of a period, and no other, waits."""
    cfg = pattern.model_copy(update={"remat": "full", "scan_layers": True})
    model = Transformer(cfg, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    waited, after = [], transformer.after

    def gradients():
        loss = lambda params: jnp.sum(jnp.square(nnx.merge(graphdef, params)(TOKENS)))  # noqa: E731
        return jax.jit(jax.grad(loss, allow_int=True))(params)

    def seen(x, others):
        waited.append(len(others))
        return after(x, others)

    monkeypatch.setattr(transformer, "after", seen)
    ordered = gradients()
    together = [len(stack.layers) for stack in cfg.stacks.values()]
    places = sum(layers for layers in together if layers > 1)
    assert len(waited) == 2 * places
    # Its gradient, then those of all its weights.
    assert waited[::2] == [1] * places and all(count > 5 for count in waited[1::2])
    monkeypatch.setattr(transformer, "one_at_a_time", lambda layer: layer)
    free = gradients()
    for a, b in zip(jax.tree.leaves(ordered), jax.tree.leaves(free), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))


def test_patterns_are_counted_and_decode_as_they_read(pattern):
    """The same logits at once, token by token from a cache, and with the layers unrolled."""
    model = Transformer(pattern, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    assert count_params(pattern) == sum(x.size for x in jax.tree.leaves(params))
    tokens = jax.random.randint(jax.random.key(1), (2, 11), 0, pattern.vocab)
    step = nnx.jit(lambda model, tokens, cache=None: model(tokens, cache=cache))
    want = step(model, tokens)
    unrolled = pattern.model_copy(update={"scan_layers": False})
    flat = nnx.merge(nnx.graphdef(Transformer(unrolled, rngs=nnx.Rngs(0))), params)
    np.testing.assert_allclose(step(flat, tokens), want, atol=2e-5)
    logits, new = step(model, tokens[:, :6], make_cache(pattern, 2, 0))
    got, cache = [logits], make_cache(pattern, 2, 16).append(new)
    for t in range(6, 11):
        logits, new = step(model, tokens[:, t : t + 1], cache)
        cache = cache.append(new)
        got.append(logits)
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), want, atol=2e-5)


def test_a_pattern_that_cannot_be_is_refused():
    def problems(**settings):
        with pytest.raises(ValidationError) as error:
            ModelConfig.model_validate(settings)
        return str(error.value)

    assert "windw" in problems(period=[{}, {"attention": {"windw": 3}}])
    assert "period[0].vocab=3: a layer cannot" in problems(period=[{"vocab": 3}])
    assert "6 layers for 4" in problems(period=[{}] * 6)
    assert "leaves none" in problems(dense_layers=4)
    assert "set one of them to null" in problems(attention={"window": 3, "chunk": 4})
    assert "pairs" in problems(rope={"fraction": 0.1})
