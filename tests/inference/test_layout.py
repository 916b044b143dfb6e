"""Texts with different adapters in one batch are what each would be of a model with its adapter merged."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import minitext as mt
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.inference.engine import Engine, EngineOptions
from minitext.inference.paged_cache import Pages
from minitext.inference.requests import Request
from minitext.models import lora
from minitext.models.transformer import Transformer
from minitext.sharding.mesh import make_mesh
from tests.conftest import audit_but

TINY = [
    "model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "model.vocab=50",
    "model.lora.rank=4",
]  # fmt: skip
KINDS = {
    "gqa": [], "nf4": ["model.storage=[{dtype: nf4, block: 16}]"],
    "int8": ["model.storage=[{dtype: int8}]"], "deltanet": ["model.attention.kind=deltanet"],
}  # fmt: skip
# Few pages and places: texts wait, and are preempted.
SMALL = EngineOptions(
    page_tokens=8,
    max_sequences=5,
    max_length=64,
    cache_tokens=152,
    chunk=16,
    adapters=3,
    row_sizes=(5,),
)
NAMES = (None, "one", "two", "three")


def setting(kind):
    """The configuration, the base's parameters, those of three adapters, and four merged models' parameters."""
    cfg = mt.load_config("laptop", [*TINY, *KINDS[kind]]).model
    graphdef, first, base = nnx.split(Transformer(cfg, rngs=nnx.Rngs(0)), nnx.LoRAParam, ...)

    def drawn(seed):
        leaves, treedef = jax.tree.flatten(first)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        new = [0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(treedef, new)

    adapters = [first, *map(drawn, (1, 2, 3))]

    def merged(adapter):
        model = nnx.merge(graphdef, adapter, base)
        lora.merge(model)
        return nnx.state(model)

    merge = jax.jit(merged)
    return cfg, base, adapters, [merge(adapter) for adapter in adapters]


def answers(engine, requests):
    found = [[] for _ in requests]
    for events, request in zip(found, requests, strict=True):
        engine.submit(request, events.append)
    while engine.step():
        pass
    return found


def requests_of(name, count=4, more=0):
    """Prompts that begin alike whatever the adapter."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 50, 18)
    return [
        Request((*shared, *rng.integers(0, 50, i + more)), 8, n=1 + i % 2, temperature=0.0, logprobs=2, adapter=name)
        for i in range(count)
    ]  # fmt: skip


def check_equal(got, want):
    for mine, theirs in zip(got, want, strict=True):
        key = lambda e: (e.sample, e.finish is not None)  # noqa: E731
        pairs = zip(sorted(mine, key=key), sorted(theirs, key=key), strict=True)
        for one, two in pairs:
            assert (one.sample, one.token, one.finish) == (two.sample, two.token, two.finish)
            if one.token is not None:
                assert abs(one.logprob - two.logprob) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", audit_but(["gqa"], ["gqa", "nf4", "deltanet"]))
def test_a_mixed_batch_is_what_merged_models_answer(kind):
    cfg, base, adapters, merged = setting(kind)
    engine = Engine(cfg, base, SMALL)
    for name, adapter in zip(NAMES[1:], adapters[1:], strict=True):
        engine.load_adapter(name, adapter)
    plain = lora.merged_config(cfg)
    mixed = [request for group in zip(*map(requests_of, NAMES), strict=True) for request in group]
    got = answers(engine, mixed)
    again = answers(engine, mixed)  # now from pages that are found
    usage = engine.usage()
    assert bool(usage.reused_tokens) == (kind != "deltanet")
    alone = Engine(plain, merged[0], dataclasses.replace(SMALL, adapters=0))
    texts = set()
    for number, name in enumerate(NAMES):
        alone.load(merged[number])
        want = answers(alone, [dataclasses.replace(r, adapter=None) for r in requests_of(name)])
        check_equal(got[number :: len(NAMES)], want)
        check_equal(again[number :: len(NAMES)], want)
        texts.add(tuple(e.token for e in want[0]))
    assert len(texts) == len(NAMES)  # the adapters tell


def test_adapters_come_and_go_without_compiling():
    cfg, base, adapters, merged = setting("gqa")
    engine = Engine(cfg, base, SMALL)
    programs = engine.programs
    sizes = lambda: [p._cache_size() for p in (programs.decode, programs.prefill)]  # noqa: E731
    engine.load_adapter("one", adapters[1])
    first = answers(engine, requests_of("one"))
    before = sizes()
    engine.load_adapter("one", adapters[2])  # in place of the first: its pages are not found
    second = answers(engine, requests_of("one"))
    options = dataclasses.replace(SMALL, adapters=0)
    alone = Engine(lora.merged_config(cfg), merged[2], options)
    check_equal(second, answers(alone, requests_of(None)))
    assert [e.token for e in first[0]] != [e.token for e in second[0]]
    engine.load_adapter("two", adapters[2])
    engine.load_adapter("three", adapters[3])
    with pytest.raises(UserError, match="room for 3"):
        engine.load_adapter("four", adapters[1])
    engine.unload("two")
    with pytest.raises(UserError, match="adapter two: the engine has one, three"):
        engine.submit(requests_of("two")[0], print)
    engine.load_adapter("four", adapters[1])
    check_equal(answers(engine, requests_of("four")), first)
    check_equal(answers(engine, requests_of("one")), second)
    engine.load(base)  # other weights leave the adapters
    check_equal(answers(engine, requests_of("one")), second)
    assert sizes() == before
    assert engine.adapters == ["one", "three", "four"] and engine.pages.used == 0
    with pytest.raises(UserError, match="set model.lora.rank"):
        Engine(lora.without_lora(cfg), base, SMALL)


@pytest.mark.audit
@pytest.mark.parametrize("kind", ["gqa", "int8"])
def test_adapters_of_a_model_in_training_are_replaced_alone(kind):
    """An engine of a model with its own adapters takes new ones, and its other arrays stay the very same."""
    cfg, base, adapters, _ = setting(kind)
    options = dataclasses.replace(SMALL, adapters=0)
    engine = Engine(cfg, nnx.merge_state(base, adapters[1]), options)
    answers(engine, requests_of(None))
    before = {id(x) for x in engine.arrays}
    engine.load(adapters[2])
    assert len(before & {id(x) for x in engine.arrays}) == len(before) - len(engine.programs.places)
    alone = Engine(cfg, nnx.merge_state(base, adapters[2]), options)
    want = answers(alone, requests_of(None))
    check_equal(answers(engine, requests_of(None)), want)
    whole = Engine(cfg, nnx.merge_state(base, adapters[3]), options)
    whole.load(nnx.merge_state(base, adapters[2]))
    check_equal(answers(whole, requests_of(None)), want)


@pytest.mark.audit
def test_devices_that_share_an_engine_answer_with_adapters_too():
    cfg, base, adapters, _ = setting("gqa")
    mixed = [request for name in NAMES for request in requests_of(name, 2)]

    def found(mesh):
        engine = Engine(cfg, base, SMALL, mesh=mesh)
        for name, adapter in zip(NAMES[1:], adapters[1:], strict=True):
            engine.load_adapter(name, adapter)
        return answers(engine, mixed)

    check_equal(found(make_mesh(MeshConfig(tensor=2), jax.devices()[:2])), found(None))


def test_pages_of_another_adapter_are_not_found():
    pages, tokens = Pages(10, 4), list(range(9))
    pages.admit(1, tokens, root=-1)
    pages.extend(1, 9)
    pages.commit(1, tokens)
    assert pages.match(tokens, root=-1) == 8 and pages.match(tokens) == pages.match(tokens, -2) == 0
    pages.fork(1, 2)
    pages.release(1)
    assert pages.admit(3, tokens, root=-1) == 8 and pages.admit(4, tokens) == 0
    assert len(pages.table(3)) == 2
