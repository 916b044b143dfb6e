"""Sampling: the cache changes nothing, and every setting does what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.config.model import ModelConfig
from minitext.errors import UserError
from minitext.inference.generate import Generator, Sampling, generate, sample
from minitext.models.transformer import Transformer

CFG = ModelConfig(vocab=40, layers=2, embed=24, heads=4, kv_heads=2, mlp=32)
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def params():
    # Weights larger than at the start, so that the choices are far from ties.
    state = nnx.state(Transformer(CFG, rngs=nnx.Rngs(0)), nnx.Param)
    return jax.tree.map(lambda x: 3 * x, state)


def test_greedy_tokens_are_those_of_decoding_without_a_cache(params):
    model = nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: Transformer(CFG, rngs=nnx.Rngs(0)))), params
    )
    logits = jax.jit(lambda tokens: nnx.merge(nnx.split(model)[0], params)(tokens))
    for prompt in ([3], list(range(30)), [5] * 64, [7] * 65):
        got = list(generate(CFG, params, prompt, max_tokens=6, sampling=GREEDY))
        row = np.zeros((1, 80), np.int32)
        row[0, : len(prompt)] = prompt
        for i in range(6):
            end = len(prompt) + i
            row[0, end] = int(jnp.argmax(logits(row)[0, end - 1]))
        assert got == row[0, len(prompt) : len(prompt) + 6].tolist()


def test_a_seed_gives_one_text_and_another_seed_another(params):
    texts = [
        list(generate(CFG, params, [1, 2], max_tokens=20, seed=s, sampling=Sampling(2.0)))
        for s in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_it_stops_at_the_stop_token(params):
    tokens = list(generate(CFG, params, [1, 2], max_tokens=12, sampling=GREEDY))
    stop = tokens[4]
    assert (
        list(generate(CFG, params, [1, 2], max_tokens=12, sampling=GREEDY, stop_id=stop))
        == tokens[: tokens.index(stop)]
    )


def test_decode_compiles_once(params):
    generator = Generator(CFG, params, GREEDY)
    list(generator.tokens([[1]], max_tokens=4))
    before = generator.programs.decode._cache_size()
    list(generator.tokens([[1, 2, 3]], max_tokens=4))
    assert generator.programs.decode._cache_size() == before > 0


def test_one_generator_serves_one_text_and_several(params):
    generator = Generator(CFG, params, GREEDY)
    texts = [
        np.stack(list(generator.tokens([[1, 2]] * rows, max_tokens=9)), axis=1).tolist()
        for rows in (1, 3, 1)
    ]
    assert texts[0] == texts[2] and texts[1] == texts[0] * 3


def test_a_step_with_a_long_cache_copies_none_of_it():
    """Its temporaries are logits and the like: the same few for a cache of 8 MiB as for a small one."""
    cfg = CFG.model_copy(update={"layers": 1, "head_dim": 64})
    for rows in (1, 2):
        generator = Generator(cfg, nnx.state(Transformer(cfg, rngs=nnx.Rngs(0))), GREEDY)
        token = next(generator.tokens([[1]] * rows, max_tokens=1))
        programs, key = generator.programs, jax.random.key(0)
        prompt = jnp.ones((rows, 64), jnp.int32)
        _, cache = programs.prefill(generator.arrays, prompt, 64, key, length=8192)
        step = programs.decode.lower(generator.arrays, token, cache, key).compile()
        cache_bytes = sum(x.nbytes for x in jax.tree.leaves((cache.k, cache.v)))
        assert step.memory_analysis().temp_size_in_bytes < cache_bytes / 8


def test_rows_of_a_batch_and_layers_apart_change_nothing(params):
    prompts = np.random.default_rng(0).integers(0, CFG.vocab, (5, 9))
    alone = [list(generate(CFG, params, row, max_tokens=12, sampling=GREEDY)) for row in prompts]
    for scan in (True, False):
        cfg = CFG.model_copy(update={"scan_layers": scan})
        together = list(Generator(cfg, params, GREEDY).tokens(prompts, max_tokens=12))
        assert np.stack(together, axis=1).tolist() == alone


draw = jax.jit(jax.vmap(sample, in_axes=(None, 0, None)), static_argnums=2)


@given(st.integers(0, 99), st.integers(1, 12))
@settings(max_examples=5)
def test_top_k_draws_only_the_k_likeliest(seed, k):
    logits = jax.random.normal(jax.random.key(seed), (1, 10)) * 2
    drawn = draw(logits, jax.random.split(jax.random.key(seed), 200), Sampling(1.0, top_k=k))
    assert set(np.unique(drawn)) <= set(np.argsort(-logits[0])[:k].tolist())


@given(st.integers(0, 99), st.sampled_from([0.01, 0.5, 0.9]))
@settings(max_examples=10)
def test_top_p_draws_only_from_the_nucleus(seed, p):
    logits = jax.random.normal(jax.random.key(seed), (1, 10)) * 2
    probs = np.asarray(jax.nn.softmax(logits[0]), np.float64)
    order = np.argsort(-probs)
    size = int(np.searchsorted(np.cumsum(probs[order]), p - 1e-6)) + 1
    drawn = draw(logits, jax.random.split(jax.random.key(seed), 200), Sampling(1.0, top_p=p))
    assert set(np.unique(drawn)) <= set(order[:size].tolist())


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-45])
def test_the_coldest_draws_are_the_most_likely_tokens(temperature):
    """Of several logits, although each divided by the temperature is more than a float32 holds."""
    logits = jnp.asarray([[10.0, 30.0, 20.0]])
    assert sample(logits, jax.random.key(0), Sampling(temperature)) == 1


def test_draws_follow_the_distribution():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.2]]))
    drawn = draw(logits, jax.random.split(jax.random.key(0), 4000), Sampling(1.0))
    np.testing.assert_allclose(
        np.bincount(np.asarray(drawn).ravel()) / 4000, [0.5, 0.3, 0.2], atol=0.03
    )


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [([], GREEDY, "empty"), ([40], GREEDY, "token 40"), ([3, -1], GREEDY, "token -1"),
     ([1], Sampling(-1.0), "temperature=-1"),
     ([1], Sampling(float("nan")), "temperature=nan"), ([1], Sampling(top_k=-2), "top_k=-2"),
     ([1], Sampling(top_p=0.0), "top_p=0"), ([1], Sampling(top_p=1.5), "top_p=1.5")],
)  # fmt: skip
def test_bad_settings_are_one_line(params, prompt, sampling, named):
    with pytest.raises(UserError, match=named):
        next(generate(CFG, params, prompt, max_tokens=3, sampling=sampling))
