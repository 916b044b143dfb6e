"""The server, asked by OpenAI's own client, by many at once, and by those who mean no good."""

import asyncio
import contextlib
import http.client
import itertools
import json
import math
import queue
import re
import socket
import struct
import threading
import time
from collections import deque

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError
from minitext.inference import server as server_module
from minitext.inference.chat import Chat
from minitext.inference.requests import Busy, Event, Usage
from minitext.inference.server import Served, Server, bind

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)
ALPHABET = "the cat sät on 日 mat 🙂. ".encode()


class Engine:
    """Stands in: token i of an answer is a byte of a text that prompt and seed choose; a step is a millisecond."""

    max_length = 512

    def __init__(self, most=256, step_seconds=0.0005):
        self.waiting, self.running, self.cancelled = deque(), {}, []
        self.most, self.step_seconds = most, step_seconds
        self.lock, self.numbers, self.steps, self.closing = threading.Lock(), itertools.count(1), 0, False
        self.stop, self.generated = False, 0
        self.held = threading.Event()
        self.held.set()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def submit(self, request, sink):
        request.check(257)
        with self.lock:
            if self.closing or len(self.running) + request.n > self.most:
                raise Busy
            number = next(self.numbers)
            for i in range(request.n):
                self.running[number, i] = [request, sink, 0]
        return number

    def cancel(self, number):
        self.cancelled.append((number, self.steps))

    def usage(self):
        return Usage(len(self.running), 0, 100, len(self.running), 0, 1, 0, self.generated, self.steps, 0)

    def start(self):
        self.thread.start()

    def close(self, *, drain_seconds=0.0):
        self.closing = True
        end = time.monotonic() + drain_seconds
        while self.running and time.monotonic() < end:
            time.sleep(0.01)
        self.stop = True
        self.held.set()
        self.thread.join()
        for (_, i), (_, sink, _) in self.running.items():
            sink(Event(i, finish="error", error="the server is shutting down"))

    def token(self, request, sample, place):
        if request.temperature == 0:
            return ALPHABET[(len(request.prompt) + place) % len(ALPHABET)]
        return ALPHABET[(request.seed + sample + len(request.prompt) + place) % len(ALPHABET)]

    def _run(self):
        while not self.stop:
            self.held.wait()
            time.sleep(self.step_seconds)
            with self.lock:
                self._step()

    def _step(self):
        self.steps += 1
        gone, self.cancelled_now = {n for n, _ in self.cancelled}, None
        for (number, i), state in list(self.running.items()):
            request, sink, place = state
            if number in gone:
                del self.running[number, i]
                sink(Event(i, finish="cancelled"))
                continue
            token = self.token(request, i, place)
            if token in request.stop_ids or place == request.max_tokens:
                del self.running[number, i]
                sink(Event(i, finish="stop" if token in request.stop_ids else "length"))
                continue
            logprob, top = None, ()
            if request.logprobs is not None:
                logprob = -0.25
                top = ((token, -0.25), (65, -1.5), (0xE6, -math.inf))[: request.logprobs]
            state[2] += 1
            self.generated += 1
            sink(Event(i, token, logprob, top))


class Watched(Engine):
    """An engine that tells who was cancelled, and what was asked."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.asked, self.told = [], []

    def submit(self, request, sink):
        self.asked.append(request)
        return super().submit(request, sink)

    def cancel(self, number):
        self.told.append(number)
        super().cancel(number)


class Running:
    """A server in a thread of its own."""

    def __init__(self, folder, *, template=TEMPLATE, api_key=None, drain_seconds=5.0, **options):
        tokenizer = ByteTokenizer()
        self.engine = Watched(**options)
        self.engine.start()
        chat = Chat(template, {}, frozenset([tokenizer.eod_id]), folder / "published")
        self.served = Served("tiny", self.engine, tokenizer, chat, api_key)
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.socket.listen(2048)
        self.server = Server(self.served, drain_seconds)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, key="-"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, body, path="/v1/completions", **headers):
        """Sends a body as it is: returns status, headers and what was answered."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def direct(self, **request):
        """What the engine answers: the texts, and why each ends."""
        events, number = queue.Queue(), 0
        from minitext.inference.requests import Request

        request = Request(**({"max_tokens": 8, "temperature": 0.0, "stop_ids": frozenset([256])} | request))
        self.engine.submit(request, events.put)
        tokens, ends = [[] for _ in range(request.n)], {}
        while len(ends) < request.n:
            event = events.get(timeout=60)
            if event.finish:
                ends[event.sample] = event.finish
            else:
                tokens[event.sample].append(event.token)
        return [ByteTokenizer().decode(t) for t in tokens], [ends[i] for i in range(request.n)]

    def idle(self, seconds=20.0):
        """Waits until the engine has nothing to do; returns whether it came to that."""
        end = time.monotonic() + seconds
        while (now := self.engine.usage()).running + now.waiting:
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True

    def close(self):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("run"))
    yield running
    assert running.idle() and not running.served.preparing
    running.close()


@pytest.fixture
def start(tmp_path):
    """A factory of servers."""
    made = []

    def make(**options):
        made.append(Running(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ids(text):
    return tuple(text.encode())


# --- OpenAI's client


def test_a_chat(tiny):
    messages = [{"role": "user", "content": "hä?"}]
    answer = tiny.client().chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_completion_tokens=12
    )
    texts, ends = tiny.direct(prompt=ids("<user>hä?\n<assistant>"), max_tokens=12)
    assert [answer.choices[0].message.content] == texts and [answer.choices[0].finish_reason] == ends
    assert answer.choices[0].message.role == "assistant" and answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(ids("<user>hä?\n<assistant>"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(tiny):
    answer = tiny.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    )
    assert answer.usage.total_tokens == tiny.engine.max_length or answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_of_a_chat_says_the_same(tiny, n):
    asked = {
        "model": "tiny", "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "日"}],
        "seed": 5, "n": n, "max_tokens": 20, "temperature": 0.9, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = tiny.client().chat.completions.create(**asked)
    events = list(
        tiny.client().chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    assert events[-1].usage == whole.usage and not events[-1].choices
    assert all(e.usage is None and len(e.choices) == 1 for e in events[:-1])
    for choice in whole.choices:
        parts = [e.choices[0] for e in events[:-1] if e.choices[0].index == choice.index]
        assert parts[0].delta.role == "assistant" and all(p.delta.role is None for p in parts[1:])
        assert "".join(p.delta.content or "" for p in parts) == choice.message.content
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
        reported = [t for p in parts if p.logprobs for t in p.logprobs.content]
        assert reported == choice.logprobs.content
    assert len({e.id for e in events}) == 1


def test_completions_of_every_kind_of_prompt(tiny):
    client = tiny.client()
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 9}
    want = [tiny.direct(prompt=ids(p), max_tokens=9)[0][0] for p in ("one", "three")]
    for prompt, texts in [
        ("one", want[:1]), (["one", "three"], want), (list(ids("one")), want[:1]),
        ([list(ids("three")), list(ids("one"))], want[::-1]),
    ]:  # fmt: skip
        answer = client.completions.create(prompt=prompt, **asked)
        assert [c.text for c in answer.choices] == texts
        assert [c.index for c in answer.choices] == list(range(len(texts)))
        streamed = client.completions.create(prompt=prompt, stream=True, **asked)
        parts = [e.choices[0] for e in streamed]
        assert ["".join(p.text for p in parts if p.index == i) for i in range(len(texts))] == texts
    assert client.completions.create(model="tiny", prompt="a").usage.completion_tokens <= 16


def test_several_texts_of_several_prompts(tiny):
    answer = tiny.client().completions.create(
        model="tiny", prompt=["a", "bcd"], n=2, seed=3, max_tokens=6, temperature=1.0
    )
    want = [
        text
        for prompt in ("a", "bcd")
        for text in tiny.direct(prompt=ids(prompt), n=2, seed=3, max_tokens=6, temperature=1.0)[0]
    ]
    assert [c.text for c in answer.choices] == want
    assert answer.usage.prompt_tokens == 4  # each prompt once


def test_logprobs_of_a_completion(tiny):
    client = tiny.client()
    choice = client.completions.create(
        model="tiny", prompt="ab", temperature=0, max_tokens=30, logprobs=2
    ).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    for token, logprob, top, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert -9999 <= logprob <= 0 and top[token] == logprob and len(top) <= 3
        assert token == "\ufffd" or choice.text[offset:].startswith(token)
    none = client.completions.create(model="tiny", prompt="ab", logprobs=0, max_tokens=3)
    assert all(len(top) == 1 for top in none.choices[0].logprobs.top_logprobs)


def test_logprobs_of_a_chat(tiny):
    choice = tiny.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], temperature=0, max_tokens=30, logprobs=True,
        top_logprobs=3,
    ).choices[0]  # fmt: skip
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.bytes == (None if token.token == "\ufffd" else list(token.token.encode()))
    shown = "".join(t.token for t in choice.logprobs.content if t.bytes)
    assert shown == re.sub(r"[^\x00-\x7f]", "", choice.message.content)


def test_stop_strings_end_the_text_and_never_show(tiny):
    asked = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 60}
    whole = tiny.client().completions.create(**asked).choices[0].text
    stop = whole[10:13]
    want = whole[: whole.index(stop)]
    choice = tiny.client().completions.create(**asked, stop=["never there", stop], logprobs=1).choices[0]
    assert (choice.text, choice.finish_reason) == (want, "stop")
    assert all(offset < len(want) for offset in choice.logprobs.text_offset)
    events = list(tiny.client().completions.create(**asked, stop=stop, stream=True))
    assert "".join(e.choices[0].text for e in events) == want
    assert tiny.idle()
    assert tiny.engine.told[-1] in (len(tiny.engine.asked), len(tiny.engine.asked) - 1)  # not computed in vain


def test_settings_reach_the_engine(tiny):
    tiny.client().completions.create(
        model="tiny", prompt="abc", max_tokens=2, top_p=0.5, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"65": -3}, seed=7, extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2,
                                                  "stop_token_ids": [9], "ignore_eos": True},
    )  # fmt: skip
    asked = tiny.engine.asked[-1]
    assert (asked.top_p, asked.top_k, asked.min_p, asked.seed) == (0.5, 5, 0.1, 7)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (0.5, -0.5, 1.2)
    assert asked.logit_bias == {65: -3} and asked.stop_ids == {9} and asked.temperature == 1
    tiny.client().completions.create(model="tiny", prompt="abc", max_tokens=2)
    tiny.client().completions.create(model="tiny", prompt="abc", max_tokens=2)
    assert tiny.engine.asked[-1].seed != tiny.engine.asked[-2].seed  # of its own, if none is given


def test_models_health_and_metrics(tiny):
    client = tiny.client()
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="name tiny"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="name tiny"):
        client.completions.create(model="gpt-4", prompt="a")
    before = metrics(tiny)
    client.completions.create(model="tiny", prompt="a", max_tokens=3, temperature=0)
    after = metrics(tiny)
    assert after["minitext_generation_tokens_total"] >= before["minitext_generation_tokens_total"] + 1
    name = 'minitext_http_requests_total{path="/v1/completions",status="200"}'
    assert after[name] == before.get(name, 0) + 1
    assert after["minitext_time_to_first_token_seconds_count"] > before["minitext_time_to_first_token_seconds_count"]
    assert fetch(tiny, "/health") == (200, b'{"status":"ok"}')


def fetch(running, path, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def metrics(running):
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(fetch(running, "/metrics")[1].decode()):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found
