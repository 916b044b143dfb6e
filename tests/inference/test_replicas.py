"""Replicas answer like one engine, and share the work."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import minitext as mt
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.inference.engine import Engine, dropless
from minitext.inference.replicas import Replicas, divide, make_replicas
from minitext.inference.requests import Busy, Request
from minitext.models.transformer import Transformer
from minitext.sharding.mesh import make_mesh
from tests.inference.test_engine import (
    LONGEST,
    ON_A_MESH,
    SMALL,
    TINY,
    check_a_crowd,
    finish,
    nothing_left,
    some_requests,
    tokens_of,
)


class Stepped(Replicas):
    """Replicas without threads."""

    def step(self):
        return any([engine.step() for engine in self.engines])


@pytest.fixture(scope="module")
def made():
    cfg = mt.load_config("laptop", [*TINY, "model.vocab=48", "model.layers=1"]).model
    return cfg, nnx.state(Transformer(cfg, rngs=nnx.Rngs(1)))


@pytest.fixture
def two(made):
    replicas = make_replicas(*made, SMALL, None, make_mesh(MeshConfig(data=2), jax.devices()[:2]))
    return Stepped(replicas.engines)


def ask(replicas, request):
    events = []
    return replicas.submit(request, events.append), events


def alone(replicas, request):
    """What each of the replicas answers."""
    found = []
    for engine in replicas.engines:
        _, events = ask(engine, request)
        finish(engine)
        found.append(tokens_of(events))
    return found


def test_two_replicas_of_two_devices_answer_like_one_engine(made):
    requests = [
        dataclasses.replace(one, temperature=0.7 * (i % 2), seed=i)
        for i, one in enumerate(some_requests(5, 6, most=10))
    ]
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    replicas = make_replicas(*made, SMALL, None, mesh)
    answers = []
    for replica in (Engine(*made, SMALL), replicas):
        replica.start()
        asked = [ask(replica, request)[1] for request in requests]
        replica.close(drain_seconds=120)
        answers.append(
            [[tokens_of(a, i) for i in range(r.n)] for a, r in zip(asked, requests, strict=True)]
        )
    assert answers[0] == answers[1]
    used = [engine.usage().generated_tokens for engine in replicas.engines]
    assert min(used) > 0 and sum(used) == sum(r.n * r.max_tokens for r in requests)
    for engine in replicas.engines:
        nothing_left(engine)


@pytest.mark.audit
@pytest.mark.parametrize("kind", ["gqa", "moe", "mla", "deltanet"])
def test_two_hundred_texts_on_eight_devices(kind):
    sizes = ["model.layers=1", "model.embed=64", "model.heads=16", "model.mlp=64", "model.vocab=48"]
    cfg = mt.load_config("laptop", [*sizes, *ON_A_MESH[kind]]).model
    net = Transformer(dropless(cfg), rngs=nnx.Rngs(0))
    logits = nnx.jit(lambda net, tokens, at: net(tokens)[0, at])

    def greedy(prompt, count):
        tokens = np.zeros((1, LONGEST), np.int32)
        tokens[0, : len(prompt)] = prompt
        for at in range(len(prompt), len(prompt) + count):
            tokens[0, at] = np.argmax(logits(net, tokens, at - 1))
        return tokens[0, len(prompt) : len(prompt) + count].tolist()

    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    engines = make_replicas(cfg, nnx.state(net), SMALL, None, mesh).engines
    check_a_crowd(Stepped(engines), greedy, 0, 200)
    assert min(engine.usage().generated_tokens for engine in engines) > 100


def test_each_request_goes_where_the_fewest_texts_are(two):
    first = two.engines[0]
    for n, counts in ((3, (3, 0)), (1, (3, 1)), (1, (3, 2)), (2, (3, 4)), (1, (4, 4))):
        ask(two, Request((1, 2), 4, n=n))
        found = tuple(e.usage().waiting + e.usage().running for e in two.engines)
        assert found == counts
    assert two.usage().waiting == 8 and two.usage().pages == first.usage().pages * 2
    finish(two)
    # One after the other, they meet in one cache.
    before = two.usage().reused_tokens
    for _ in range(3):
        ask(two, Request(tuple(range(20)), 2))
        finish(two)
    assert two.usage().reused_tokens - before == 2 * 16


def test_a_cancelled_request_ends_where_it_is(two):
    asked = [ask(two, Request((1, 2), 40, n=2)) for _ in range(4)]
    for _ in range(3):
        for engine in two.engines:
            engine.step()
    number, events = asked[3]
    two.cancel(number, 1)
    two.cancel(asked[2][0])
    finish(two)
    assert [tokens_of(events, i)[1] for i in range(2)] == ["length", "cancelled"]
    ends = [[tokens_of(events, i)[1] for i in range(2)] for _, events in asked[:3]]
    assert ends == [["length"] * 2, ["length"] * 2, ["cancelled"] * 2]


def test_one_that_fails_leaves_the_other(two, monkeypatch):
    first, second = two.engines

    def broken():
        if first._inbox:
            raise RuntimeError("out of memory")
        return False

    monkeypatch.setattr(first, "step", broken)
    two.start()
    _, events = ask(two, Request((1, 2), 4))
    first._thread.join(60)
    assert events[-1].finish == "error" and "RuntimeError" in first.failed and not two.failed
    _, events = ask(two, Request((1, 2), 4))
    two.close(drain_seconds=60)
    assert tokens_of(events)[1] == "length" and second.usage().generated_tokens == 4
    with pytest.raises(Busy):
        two.submit(Request((1, 2), 4), print)


def test_one_replica_is_an_engine(made):
    mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[:2])
    assert isinstance(make_replicas(*made, SMALL, None, mesh), Engine)
    parts = divide(make_mesh(MeshConfig(data=4, tensor=2)))
    assert [part.shape["tensor"] for part in parts] == [2] * 4
    assert len({device for part in parts for device in part.devices.flat}) == 8


def test_warming_up_compiles_what_short_texts_need(made):
    cfg = made[0].model_copy(update={"mlp": 72})  # no other test has compiled its programs
    options = dataclasses.replace(SMALL, row_sizes=(1, 2, 4))
    engine = Engine(cfg, nnx.state(Transformer(cfg, rngs=nnx.Rngs(0))), options)
    told = []
    engine.warm_up(2, lambda done, whole: told.append((done, whole)))
    whole = told[0][1]
    assert told == [(done, whole) for done in range(whole + 1)] and whole == 2 * 2 + 1
    compiled = engine.programs.decode._cache_size(), engine.programs.prefill._cache_size()
    events = []
    for prompts in ([(1,), (2,)], [(1,)], [tuple(range(9))]):
        for temperature, prompt in enumerate(prompts):
            engine.submit(Request(prompt, 6, temperature=temperature), events.append)
        while engine.step():
            pass
    assert sum(event.finish == "length" for event in events) == 4
    assert (engine.programs.decode._cache_size(), engine.programs.prefill._cache_size()) == compiled
    nothing_left(engine)


def test_replicas_change_together_or_not_at_all(two, made):
    """One that has a text keeps the others from taking weights too: they would answer as different models."""
    cfg, _ = made
    second = nnx.state(Transformer(cfg, rngs=nnx.Rngs(2)))
    request = Request((1, 2, 3), 6, temperature=0)
    before = alone(two, request)
    ask(two, Request((1, 2), 2))
    ask(two, Request((1, 2), 30))
    while two.engines[0].step():
        pass
    with pytest.raises(UserError, match="when they are done"):
        two.load(second)
    finish(two)
    assert alone(two, request) == before
    two.load(second)
    after = alone(two, request)
    assert after[0] == after[1] != before[0]
