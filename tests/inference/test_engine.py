"""Continuous batching gives every text what it would be alone, and every page comes back."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import minitext as mt
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.inference import engine as engine_module
from minitext.inference import sampling
from minitext.inference.engine import Engine, EngineOptions, dropless, prompt_lookup
from minitext.inference.requests import Busy, Request
from minitext.inference.sampling import Adjustments, Knobs, Want
from minitext.models.transformer import Transformer
from minitext.sharding.mesh import make_mesh
from tests.conftest import audit_but

V, LONGEST = 50, 96
TINY = [
    "model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", f"model.vocab={V}",
]  # fmt: skip
KINDS = {
    "gqa": ["model.layers=1"],
    "moe": ["model.ffn.kind=moe", "model.ffn.capacity_factor=1.0"],
    "mla": ["model.attention.kind=mla", "model.kv_heads=null"],
    "deltanet": ["model.attention.kind=deltanet"],
    "window": ["model.attention.window=5", "model.attention.softcap=9", "model.attention.sinks=true"],
    "period": ["model.period=[{attention.window: 7}, {attention.chunk: 8}]", "model.dense_layers=0"],
}  # fmt: skip
# Few pages of few tokens: texts wait for each other, and are preempted. Programs have 4 rows, or 16 with guesses.
SMALL = EngineOptions(
    page_tokens=8,
    max_sequences=4,
    max_length=LONGEST,
    cache_tokens=152,
    chunk=16,
    row_sizes=(4, 16),
)


@pytest.fixture(scope="module")
def model():
    """Makes a model of a kind, and returns (configuration, parameters, greedy tokens of a prompt without a cache)."""
    made = {}

    def make(kind):
        if kind not in made:
            cfg = mt.load_config("laptop", [*TINY, *KINDS[kind]]).model
            net = Transformer(dropless(cfg), rngs=nnx.Rngs(1))
            logits = nnx.jit(lambda net, tokens, at: net(tokens)[0, at])
            made[kind] = cfg, net, logits
        cfg, net, logits = made[kind]

        def after(tokens):
            padded = np.zeros((1, LONGEST), np.int32)
            padded[0, : len(tokens)] = tokens
            return np.asarray(logits(net, padded, len(tokens) - 1))

        def greedy(prompt, count):
            tokens = list(prompt)
            for _ in range(count):
                tokens.append(int(np.argmax(after(tokens))))
            return tokens[len(prompt) :]

        return cfg, nnx.state(net), after, greedy

    return make


def ask(engine, request):
    """Submits a request; its events arrive in the list returned."""
    events = []
    number = engine.submit(request, events.append)
    return number, events


def finish(engine):
    while engine.step():
        pass


def tokens_of(events, sample=0):
    found = [e for e in events if e.sample == sample]
    assert [e.finish is None for e in found] == [True] * (len(found) - 1) + [False]
    return [e.token for e in found[:-1]], found[-1].finish


def answer(engine, request):
    _, events = ask(engine, request)
    finish(engine)
    return [tokens_of(events, sample) for sample in range(request.n)]


def nothing_left(engine):
    """No page is held and no text is left, in an engine or in each of several."""
    for one in getattr(engine, "engines", ()):
        nothing_left(one)
    if hasattr(engine, "engines"):
        return
    assert engine.pages.used == 0 and not engine.running and not engine.waiting
    assert engine.pages.free == engine.pages.pages - 1
    usage = engine.usage()
    assert usage.running == usage.waiting == usage.pages_used == 0


def some_requests(seed, count, most=30):
    """Prompts of all lengths, of which many begin alike."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 48, 40).tolist()
    for _ in range(count):
        begin = shared[: rng.integers(0, 41)]
        prompt = begin + rng.integers(0, 48, rng.integers(1, 20)).tolist()
        yield Request(
            tuple(prompt),
            int(rng.integers(1, most)),
            n=int(rng.choice([1, 1, 1, 2])),
            temperature=0,
        )


def check_a_crowd(engine, greedy, seed, count):
    """Texts that come, wait, share and are cancelled at random steps are what they would be alone."""
    rng = np.random.default_rng(seed)
    asked = []
    for request in some_requests(seed, count):
        number, events = ask(engine, request)
        cancelled = rng.random() < 0.1
        asked.append((request, events, cancelled))
        for _ in range(rng.integers(0, 6)):
            engine.step()
        if cancelled:
            engine.cancel(number)
    finish(engine)
    for request, events, cancelled in asked:
        for sample in range(request.n):
            tokens, why = tokens_of(events, sample)
            assert why == "length" or (cancelled and why == "cancelled")
            expected = greedy(request.prompt, len(tokens))
            assert tokens == expected and (cancelled or len(tokens) == request.max_tokens)
    nothing_left(engine)


@pytest.mark.parametrize("kind", audit_but(("period",), KINDS))
def test_texts_are_what_they_would_be_alone(model, kind):
    cfg, params, _, greedy = model(kind)
    engine = Engine(cfg, params, dataclasses.replace(SMALL, row_sizes=(2, 4)))
    made = jax.tree.structure(engine.cache)
    check_a_crowd(engine, greedy, 0, 8)
    assert jax.tree.structure(engine.cache) == made  # otherwise programs are compiled twice
    usage = engine.usage()
    assert usage.preemptions or kind == "deltanet" or usage.reused_tokens
    assert (usage.reused_tokens == 0) == (kind == "deltanet")


def test_a_prompt_counts_once_however_often_it_is_computed(model):
    cfg, params, _, _ = model("gqa")
    engine = Engine(cfg, params, dataclasses.replace(SMALL, cache_tokens=56))
    for first in (1, 2):
        ask(engine, Request((first, *range(8)), 30, n=3, temperature=0))
    finish(engine)
    usage = engine.usage()
    assert usage.preemptions and usage.prompt_tokens == 2 * 9
    assert usage.reused_tokens == 0


@pytest.mark.parametrize("kind", audit_but(["window", "mla"], ["gqa", "window", "mla"]))
def test_prompts_that_begin_alike_are_computed_together(model, kind):
    """As under a common system prompt: the beginning is read from pages, and the rest of all is one program."""
    cfg, params, _, greedy = model(kind)
    options = EngineOptions(
        page_tokens=8, max_sequences=8, max_length=LONGEST, chunk=128, row_sizes=(8,)
    )
    engine = Engine(cfg, params, options)
    begin = np.random.default_rng(3).integers(0, 48, 17).tolist()
    answer(engine, Request(tuple(begin), 1, temperature=0))
    asked = [
        (prompt, ask(engine, Request(prompt, 4, temperature=0))[1])
        for prompt in (tuple([*begin, 48, *range(n)]) for n in range(1, 9))
    ]
    before = engine.usage().steps
    engine.step()
    # A program for all prompts, and one for their next tokens.
    assert engine.usage().steps == before + 2
    finish(engine)
    assert engine.usage().reused_tokens == 8 * 16
    assert [tokens_of(events)[0] for _, events in asked] == [greedy(p, 4) for p, _ in asked]
    nothing_left(engine)


NARROW = [
    f"{kind} {dtype}" for kind in ("gqa", "mla", "window", "period") for dtype in ("int8", "fp8")
]


@pytest.mark.parametrize("case", audit_but(["gqa int8"], NARROW))
def test_texts_with_a_narrow_cache_are_what_they_would_be_alone(model, case):
    """Each is computed again by itself, and with no other's pages."""
    kind, dtype = case.split()
    cfg, params, _, _ = model(kind)
    options = dataclasses.replace(SMALL, cache_dtype=dtype)
    alone = Engine(cfg, params, dataclasses.replace(options, reuse_prefixes=False))

    def greedy(prompt, count):
        return answer(alone, Request(prompt, count, temperature=0))[0][0] if count else []

    engine = Engine(cfg, params, options)
    check_a_crowd(engine, greedy, 0, 8)
    assert engine.usage().reused_tokens
    wide = Engine(cfg, params, SMALL)
    assert wide.usage().cache_tokens == engine.usage().cache_tokens
    assert engine.usage().cache_bytes == sum(x.nbytes for x in jax.tree.leaves(engine.cache))
    assert engine.usage().cache_bytes < wide.usage().cache_bytes / 2


@pytest.mark.audit
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [96, 312])
def test_two_hundred_texts(model, kind, tokens):
    cfg, params, _, greedy = model(kind)
    options = dataclasses.replace(SMALL, cache_tokens=tokens, max_sequences=7)
    check_a_crowd(Engine(cfg, params, options), greedy, tokens, 200)


def test_guessing_ahead_changes_nothing(model):
    cfg, params, _, _ = model("gqa")
    plain, fast = (
        Engine(cfg, params, dataclasses.replace(SMALL, speculate=guesses)) for guesses in (0, 3)
    )
    # Prompts that repeat themselves, so that guesses are right at times.
    for seed, temperature in ((0, 0.0), (1, 0.3), (2, 1.0)):
        request = Request((7, 8, 9) * 5, 40, temperature=temperature, seed=seed, n=2)
        assert answer(plain, request) == answer(fast, request)
    steps = plain.usage().steps, fast.usage().steps
    assert steps[1] < steps[0]
    nothing_left(fast)


def test_the_same_seed_gives_the_same_text_in_any_company(model):
    cfg, params, _, _ = model("gqa")
    request = Request((1, 2, 3), 20, n=3, temperature=0.8, top_k=20, top_p=0.9, seed=5)
    alone = answer(Engine(cfg, params, SMALL), request)
    assert len({tuple(tokens) for tokens, _ in alone}) == 3
    crowded = Engine(cfg, params, SMALL)
    others = [ask(crowded, one) for one in some_requests(3, 5)]
    crowded.step()
    _, events = ask(crowded, request)
    others += [
        ask(crowded, dataclasses.replace(one, temperature=2.0)) for one in some_requests(4, 4)
    ]
    finish(crowded)
    assert [tokens_of(events, sample) for sample in range(3)] == alone
    assert all(events[-1].finish for _, events in others)
    assert answer(crowded, dataclasses.replace(request, seed=6)) != alone


def test_stop_tokens_end_a_text_and_are_not_part_of_it(model):
    cfg, params, _, greedy = model("gqa")
    engine = Engine(cfg, params, SMALL)
    expected = greedy((4, 5), 20)
    stop = expected[7]
    first = expected.index(stop)
    request = Request((4, 5), 20, temperature=0, stop_ids=frozenset({stop}))
    assert answer(engine, request) == [(expected[:first], "stop")]
    nothing_left(engine)


def test_log_probabilities_are_the_models(model):
    cfg, params, after, _ = model("gqa")
    engine = Engine(cfg, params, SMALL)
    request = Request((3, 1, 4), 5, temperature=1.5, top_k=3, logprobs=4, seed=2)
    _, events = ask(engine, request)
    finish(engine)
    tokens = list(request.prompt)
    for event in events[:-1]:
        expected = np.asarray(jax.nn.log_softmax(after(tokens)))
        np.testing.assert_allclose(event.logprob, expected[event.token], atol=1e-4)
        ids, values = zip(*event.top, strict=True)
        assert list(ids) == np.argsort(-expected)[:4].tolist()
        np.testing.assert_allclose(values, expected[list(ids)], atol=1e-4)
        assert event.token in ids[:3]
        tokens.append(event.token)


def test_penalties_and_biases_change_the_logits(model):
    cfg, params, after, _ = model("gqa")
    engine = Engine(cfg, params, SMALL)
    request = Request(
        (3, 3, 4), 25, temperature=0, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.3, logit_bias={7: 1.5, 9: -100},
    )  # fmt: skip
    [(got, _)] = answer(engine, request)
    tokens = list(request.prompt)
    for token in got:
        logits = after(tokens).copy()
        for seen in set(tokens):
            logits[seen] = logits[seen] / 1.3 if logits[seen] > 0 else logits[seen] * 1.3
        for seen in set(tokens[3:]):
            logits[seen] -= 0.5 + 0.25 * tokens[3:].count(seen)
        logits[7] += 1.5
        logits[9] -= 100
        assert token == int(np.argmax(logits))
        tokens.append(token)
    nothing_left(engine)


def test_a_cancelled_request_gives_its_pages_back_within_a_step(model):
    cfg, params, _, greedy = model("gqa")
    engine = Engine(cfg, params, SMALL)
    number, events = ask(engine, Request(tuple(range(20)), 50, n=2, temperature=0))
    _, other = ask(engine, Request((1, 2), 30, temperature=0))
    for _ in range(6):
        engine.step()
    held = engine.pages.used
    engine.cancel(number)
    engine.step()
    assert [e.finish for e in events if e.finish] == ["cancelled"] * 2 and engine.pages.used < held
    finish(engine)
    assert tokens_of(other) == (greedy((1, 2), 30), "length")
    nothing_left(engine)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_cancelled_text_leaves_its_siblings_alone(model, steps):
    """Even the first, whose prompt they wait for."""
    cfg, params, _, greedy = model("gqa")
    engine, prompt = Engine(cfg, params, SMALL), tuple(range(40))
    number, events = ask(engine, Request(prompt, 5, n=3, temperature=0))
    for _ in range(steps):
        engine.step()
    assert not engine.running or engine.running[0].in_prompt
    engine.cancel(number, 0)
    finish(engine)
    assert tokens_of(events, 0) == ([], "cancelled")
    for sample in (1, 2):
        assert tokens_of(events, sample) == (greedy(prompt, 5), "length")
    nothing_left(engine)


def test_the_queue_has_an_end(model):
    cfg, params, _, _ = model("gqa")
    engine = Engine(cfg, params, dataclasses.replace(SMALL, max_waiting=3))
    request = Request((1,), 2, temperature=0)
    asked = [ask(engine, request) for _ in range(3)]
    with pytest.raises(Busy):
        engine.submit(request, print)
    finish(engine)
    assert all(events[-1].finish == "length" for _, events in asked)
    engine.submit(request, lambda event: None)


@pytest.mark.parametrize("kind", audit_but(["gqa"], ["gqa", "mla"]))
def test_an_engine_takes_other_weights_when_it_is_idle(model, kind):
    """Its answers are then those of a new engine, nothing cached is left, and nothing is compiled again."""
    cfg, first, _, _ = model(kind)
    engine = Engine(cfg, first, SMALL)
    request = Request((5, 6, 7) * 8, 6, temperature=0.0)
    before = answer(engine, request)
    programs = engine.programs.decode._cache_size(), engine.programs.prefill._cache_size()
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, data=2))
    with jax.set_mesh(mesh):  # as a trainer holds them
        made = nnx.jit(lambda: Transformer(dropless(cfg), rngs=nnx.Rngs(2)))()
    second = nnx.state(made)
    with jax.set_mesh(mesh):
        engine.load(second)
        after = answer(engine, request)
    assert engine.usage().reused_tokens == 0  # of the same prompt under other weights
    fresh = Engine(cfg, nnx.state(Transformer(dropless(cfg), rngs=nnx.Rngs(2))), SMALL)
    assert after == answer(fresh, request) != before
    engine.load(first)
    assert answer(engine, request) == before
    assert programs == (
        engine.programs.decode._cache_size(), engine.programs.prefill._cache_size()
    )  # fmt: skip
    ask(engine, request)
    with pytest.raises(UserError, match="when they are done"):
        engine.load(second)
    finish(engine)
    nothing_left(engine)


def test_a_thread_answers_and_closing_ends_what_is_left(model):
    cfg, params, _, greedy = model("gqa")
    engine = Engine(cfg, params, SMALL)
    engine.start()
    _, events = ask(engine, Request((5,), 10, temperature=0))
    engine.close(drain_seconds=60)
    assert tokens_of(events) == (greedy((5,), 10), "length")
    with pytest.raises(Busy):
        engine.submit(Request((5,), 1), print)
    late = Engine(cfg, params, SMALL)
    _, events = ask(late, Request((5,), 10, n=2))
    late.close()
    assert [e.finish for e in events] == ["error"] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (V,)}, f"token {V} is not in the model's vocabulary of {V}"),
        ({"prompt": (-1,)}, "token -1"),
        ({"logit_bias": {V: 1.0}}, f"token {V}"),
        ({"logit_bias": {1: 101.0}}, "logit_bias of token 1=101.0: choose -100 to 100"),
        ({"max_tokens": 0}, "max_tokens=0: choose 1 or more"),
        ({"max_tokens": 10**9}, "exceed the 96 tokens that a text may have: ask for at most 94"),
        ({"prompt": (1,) * LONGEST}, "tokens that a text may have: shorten the prompt"),
        ({"n": 10**9}, "n=1000000000: choose 1 to 128"),
        ({"temperature": -1.0}, "temperature=-1.0: choose 0 to"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0: choose more than 0 and at most 1"),
        ({"min_p": 1.5}, "min_p=1.5: choose 0 to 1"),
        ({"presence_penalty": 3.0}, "presence_penalty=3.0: choose -2 to 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: choose 1e-06 to"),
        ({"logprobs": 21}, "logprobs=21: choose 0 to 20"),
        ({"seed": 2**63}, f"seed={2**63}"),
        ({"grammar": ("regex", "a")}, "no tokenizer"),
    ],
)
def test_requests_that_cannot_be_answered(model, change, said):
    cfg, params, _, _ = model("gqa")
    engine = Engine(cfg, params, SMALL)
    with pytest.raises(UserError) as error:
        engine.submit(dataclasses.replace(Request((1, 2), 4), **change), print)
    assert said in str(error.value)
    nothing_left(engine)


def test_a_state_takes_no_guesses_back(model):
    cfg, params, _, _ = model("deltanet")
    with pytest.raises(UserError, match="speculate=2"):
        Engine(cfg, params, dataclasses.replace(SMALL, speculate=2))


@pytest.mark.parametrize("kind", ["gqa", "deltanet"])
def test_a_cache_beyond_the_devices_memory_is_refused(model, kind):
    cfg, params, _, _ = model(kind)
    with pytest.raises(
        UserError, match=r"a cache of 1,000,000,000,000,000 tokens takes .* lower --max-tokens"
    ):
        Engine(cfg, params, dataclasses.replace(SMALL, cache_tokens=10**15))


@pytest.mark.parametrize("name", ["page_tokens", "max_sequences", "max_length", "chunk"])
def test_an_option_below_its_least_is_refused(model, name):
    cfg, params, _, _ = model("gqa")
    least = engine_module.LEAST[name]
    with pytest.raises(UserError, match=f"{name}={least - 1}: choose {least} or more"):
        Engine(cfg, params, dataclasses.replace(SMALL, **{name: least - 1}))


def test_a_cache_type_that_cannot_be_is_refused(model):
    cfg, params, _, _ = model("gqa")
    with pytest.raises(UserError, match="cache_dtype=int4: choose auto or int8 or fp8"):
        Engine(cfg, params, dataclasses.replace(SMALL, cache_dtype="int4"))
    cfg, params, _, _ = model("deltanet")
    with pytest.raises(UserError, match="cache_dtype=int8: all layers keep recurrent states"):
        Engine(cfg, params, dataclasses.replace(SMALL, cache_dtype="int8"))


def test_answers_follow_a_grammar():
    pytest.importorskip("llguidance")
    from minitext.data.tokenizer import ByteTokenizer
    from minitext.inference.structured import guides

    tokenizer = ByteTokenizer()
    cfg = mt.load_config("laptop", [*TINY, "model.vocab=260"]).model
    params = nnx.state(Transformer(cfg, rngs=nnx.Rngs(0)))
    make = guides(tokenizer, cfg.vocab, [tokenizer.eod_id])
    engine = Engine(cfg, params, dataclasses.replace(SMALL, max_length=256, cache_tokens=784), make)
    schema = {
        "type": "object", "additionalProperties": False, "required": ["a", "b"],
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    }  # fmt: skip
    stops = frozenset({tokenizer.eod_id})
    asked = {}
    for grammar in (("regex", "[ab]{2,9}c"), ("json_schema", json.dumps(schema))):
        request = Request((1, 2), 200, n=2, grammar=grammar, stop_ids=stops, temperature=1.0)
        asked[grammar[0]] = ask(engine, request)[1]
    free = ask(engine, Request((1, 2), 30))[1]
    finish(engine)
    for sample in range(2):
        tokens, why = tokens_of(asked["regex"], sample)
        text = tokenizer.decode(tokens)
        assert (
            why == "stop" and set(text) <= set("abc") and 3 <= len(text) <= 10 and text[-1] == "c"
        )
        tokens, why = tokens_of(asked["json_schema"], sample)
        if why == "stop":  # a random model may write digits until its tokens are spent
            found = json.loads(tokenizer.decode(tokens))
            assert set(found) == {"a", "b"} and found["b"] in ("x", "yy")
    assert tokens_of(free)[1] == "length"
    for grammar in (("regex", "(("), ("json_schema", '{"$ref": "#"}'), ("json_schema", "[" * 9999)):
        with pytest.raises(UserError):
            engine.submit(Request((1,), 2, grammar=grammar), print)
    nothing_left(engine)


# llguidance would read the first for an hour and gigabytes, and the second for longer.
MULTIPLE = {"type": "integer", "multipleOf": 99_999_989}
PATTERNS = {"type": "string", "allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(10, 40)]}


@pytest.mark.parametrize("schema", [MULTIPLE, PATTERNS], ids=["multiple", "patterns"])
def test_a_grammar_that_is_too_much_is_refused(monkeypatch, schema):
    pytest.importorskip("llguidance")
    from minitext.data.tokenizer import ByteTokenizer
    from minitext.inference import structured

    monkeypatch.setattr(structured, "READ_SECONDS", 1)
    make = structured.guides(ByteTokenizer(), 257, [256])
    with pytest.raises(UserError, match="takes too much time or memory to read"):
        make(("json_schema", json.dumps(schema)))


def test_a_text_ends_whose_grammar_takes_too_long_for_a_token(monkeypatch):
    pytest.importorskip("llguidance")
    from minitext.data.tokenizer import ByteTokenizer
    from minitext.inference import structured

    cfg = mt.load_config("laptop", [*TINY, "model.vocab=260"]).model
    make = structured.guides(ByteTokenizer(), cfg.vocab, [256])
    engine = Engine(cfg, nnx.state(Transformer(cfg, rngs=nnx.Rngs(0))), SMALL, make)
    plain = Request((4, 5), 20, temperature=0)
    alone = answer(engine, plain)
    _, events = ask(engine, Request((4, 5), 20, n=2, temperature=0, grammar=("regex", "[ab]{40}")))
    _, other = ask(engine, plain)
    monkeypatch.setattr(structured, "STEP_SECONDS", -1)
    finish(engine)
    for sample in range(2):
        assert tokens_of(events, sample) == ([], "error")
    assert "takes more than" in events[-1].error
    assert [tokens_of(other)] == alone
    nothing_left(engine)


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 5))
def test_prompt_lookup_finds_what_followed_last_time(tokens, most):
    found = prompt_lookup(tokens, most)
    assert len(found) <= most
    if found:
        at = [
            i for i in range(len(tokens) - 2)
            if tokens[i : i + 2] == tokens[-2:] and tokens[i + 2 : i + 2 + len(found)] == found
        ]  # fmt: skip
        assert at


draw = jax.jit(sampling.draw_tokens, static_argnames="want")


def knobs(rows, **more):
    base = {
        "seed": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition": 1.0,
    }
    types = {"seed": np.int32, "top_k": np.int32}
    values = {name: np.full(rows, value) for name, value in base.items()} | more
    return Knobs(**{n: np.asarray(v, types.get(n, np.float32)) for n, v in values.items()})


@given(
    st.integers(0, 99),
    st.integers(0, 12),
    st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
)
@settings(max_examples=30)
def test_filters_keep_what_sorting_keeps(seed, k, p, least):
    logits = np.random.default_rng(seed).normal(size=(1, 11)).astype(np.float32).round(1) * 2
    x = jnp.asarray(logits)
    how = knobs(1, top_k=[k], top_p=[p], min_p=[least])
    kept = set(np.flatnonzero(np.isfinite(filtered(x, how)[0])))
    values = logits[0].astype(np.float64)
    ordered = np.sort(values)[::-1]
    alive = values >= (ordered[min(k, 11) - 1] if k else -np.inf)
    probs = np.where(alive, np.exp(values - values.max()), 0)
    probs /= probs.sum()
    greater = np.asarray([probs[values > v].sum() for v in values])
    expected = (
        alive & ((greater < p - 1e-6) | (p == 1)) & (probs >= least * probs.max() * (1 - 1e-6))
    )
    assert kept == set(np.flatnonzero(expected))


filtered = jax.jit(sampling.filtered)


def test_draws_follow_the_distribution():
    rows = 4000
    logits = jnp.broadcast_to(jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05])), (rows, 4))
    positions = np.arange(rows, dtype=np.int32)
    for how, want, expected in (
        ({}, Want(random=True), [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": [0.9] * rows}, Want(True, True), np.divide([0.5, 0.3, 0.15, 0], 0.95)),
        ({"min_p": [0.2] * rows}, Want(True, True), np.divide([0.5, 0.3, 0.15, 0], 0.95)),
    ):
        drawn = draw(logits, positions, knobs(rows, **how), None, want).token
        counts = np.bincount(np.asarray(drawn), minlength=4)
        possible = np.asarray(expected) > 0
        means = rows * np.asarray(expected)[possible]
        chi_squared = np.sum((counts[possible] - means) ** 2 / means)
        assert chi_squared < 16.3  # 0.1% for three degrees of freedom
        assert not counts[~possible].any()


@pytest.mark.parametrize("temperature", [1e-20, 1.2e-38, 1e-45])
def test_the_coldest_draws_are_the_most_likely_tokens(temperature):
    """Of several logits, although each divided by the temperature is more than a float32 holds."""
    logits = jnp.asarray([[10.0, 30.0, 20.0]])
    for want in (Want(True), Want(True, True)):
        drawn = draw(logits, np.arange(1), knobs(1, temperature=[temperature]), None, want)
        assert drawn.token == 1


def test_a_row_draws_the_same_whatever_the_others_want():
    logits = jax.random.normal(jax.random.key(0), (6, V))
    positions, how = np.arange(6, dtype=np.int32), knobs(6, temperature=[0, 1, 2, 0, 1, 1])
    nothing = Adjustments(np.zeros((6, V), np.float32), np.zeros((6, V), bool))
    plain = draw(logits, positions, how, None, Want(random=True)).token
    wants = Want(True), Want(True, True), Want(True, False, True), Want(True, True, True)
    for want, adjustments in zip(wants, (nothing, None, None, nothing), strict=True):
        found = draw(logits, positions, how, adjustments, want).token
        np.testing.assert_array_equal(found, plain)
    np.testing.assert_array_equal(plain[0], np.argmax(logits[0]))


ON_A_MESH = {
    "gqa": ["model.kv_heads=8"],
    "moe": ["model.kv_heads=8", "model.ffn.kind=moe"],
    "mla": ["model.attention.kind=mla"],
    "deltanet": [
        "model.attention.kind=deltanet", "model.attention.key_heads=8", "model.attention.value_heads=8",
    ],
}  # fmt: skip


@pytest.mark.audit  # test_replicas and test_rollouts have engines of several devices in `make test`
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, "auto") for kind in ON_A_MESH] + [("gqa", "int8"), ("mla", "fp8")]
)
def test_eight_devices_give_the_tokens_of_one(kind, dtype):
    sizes = ["model.layers=1", "model.embed=64", "model.heads=16", "model.mlp=64", "model.vocab=48"]
    cfg = mt.load_config("laptop", [*sizes, *ON_A_MESH[kind]]).model
    params = nnx.state(Transformer(cfg, rngs=nnx.Rngs(0)))
    answers = []
    for mesh in (None, make_mesh(MeshConfig(data=1, tensor=8))):
        engine = Engine(cfg, params, dataclasses.replace(SMALL, cache_dtype=dtype), mesh=mesh)
        asked = [
            ask(engine, dataclasses.replace(one, temperature=0.5 * (i % 2)))[1]
            for i, one in enumerate(some_requests(2, 6, most=12))
        ]
        finish(engine)
        answers.append([[(e.sample, e.token, e.finish) for e in events] for events in asked])
        nothing_left(engine)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_decode_program_is_compiled_once(model, tensor):
    """Whether the tokens come from the host, as the first do, or from the step before."""
    cfg, params, _, _ = model("gqa")
    sizes = MeshConfig(data=1, tensor=tensor)
    mesh = make_mesh(sizes, devices=jax.devices()[:tensor]) if tensor > 1 else None
    # No other test has a cache of this size, and so its programs.
    engine = Engine(cfg, params, dataclasses.replace(SMALL, cache_tokens=168), mesh=mesh)
    before = engine.programs.decode._cache_size()
    answer(engine, Request((5, 6, 7), 6, temperature=0.0))
    assert engine.programs.decode._cache_size() == before + 1
    engine.warm_up(1)  # a second one draws
    assert engine.programs.decode._cache_size() == before + 2
    answer(engine, Request((5, 6, 7), 6, temperature=1.0))
    assert engine.programs.decode._cache_size() == before + 2


def test_a_mesh_that_does_not_divide_the_model_is_refused(model):
    cfg = mt.load_config(
        "laptop", [*TINY, "model.embed=48", "model.heads=6", "model.kv_heads=6", "model.mlp=6"]
    ).model
    for sizes, said in (
        (MeshConfig(data=1, tensor=3), "model.vocab=50 is not divisible by mesh.tensor=3"),
        (MeshConfig(data=1, tensor=4), "model.heads=6 is not divisible by mesh.tensor=4"),
        (MeshConfig(data=1, fsdp=2), "mesh.fsdp=2: an engine splits heads and features"),
    ):
        count = sizes.tensor * sizes.fsdp
        with pytest.raises(UserError, match=said):
            Engine(cfg, None, SMALL, mesh=make_mesh(sizes, devices=jax.devices()[:count]))
