"""The server, asked by OpenAI's own client, by many at once, and by those who mean no good."""

import asyncio
import contextlib
import functools
import http.client
import json
import math
import os
import queue
import re
import shutil
import socket
import struct
import threading
import time

import openai
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import minitext as mt
from minitext.data.chat import Chat
from minitext.data.tokenizer import ByteTokenizer
from minitext.inference import http_server
from minitext.inference import server as server_module
from minitext.inference.engine import Engine, EngineOptions
from minitext.inference.http_server import bind
from minitext.inference.requests import Request
from minitext.inference.server import Served, Server
from minitext.inference.structured import guides
from minitext.models.transformer import Transformer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)
PAGES = {
    "page_tokens": 128, "max_sequences": 8, "max_length": 512, "chunk": 512, "row_sizes": (8,),
}  # fmt: skip


@functools.cache
def model():
    cfg = mt.load_config(
        "laptop", ["model.layers=1", "model.embed=16", "model.heads=2", "model.kv_heads=1", "model.mlp=16",
                   "model.vocab=257"],
    ).model  # fmt: skip
    return cfg, nnx.state(Transformer(cfg, rngs=nnx.Rngs(1)))


class Watched(Engine):
    """An engine that tells what was asked and cancelled, and can be held up."""

    def __init__(self, **options):
        cfg, params = model()
        guide = guides(ByteTokenizer(), cfg.vocab, [256])
        super().__init__(cfg, params, EngineOptions(**PAGES | options), guide)
        self.asked, self.numbered, self.told = [], [], []
        self.steps, self.cancelled_at, self.steps_kept = 0, {}, {}
        self.held = threading.Event()
        self.held.set()

    def submit(self, request, sink):
        number = super().submit(request, sink)
        self.asked.append(request)
        self.numbered.append(number)
        return number

    def cancel(self, number, sample=None):
        self.cancelled_at[number] = self.steps
        super().cancel(number, sample)
        self.told.append(number)

    def step(self):
        if self.held.is_set():
            more = super().step()
            self.steps += 1
            for number in self.cancelled_at.keys() - {text.number for text in self.running}:
                self.steps_kept[number] = self.steps - self.cancelled_at.pop(number)
            return more
        time.sleep(0.001)
        return True


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
        events = queue.Queue()
        request = Request(
            **({"max_tokens": 8, "temperature": 0.0, "stop_ids": frozenset([256])} | request)
        )
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
    assert [answer.choices[0].message.content] == texts and [
        answer.choices[0].finish_reason
    ] == ends
    assert answer.choices[0].message.role == "assistant" and answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(ids("<user>hä?\n<assistant>"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(tiny):
    answer = tiny.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    )
    assert (
        answer.usage.total_tokens == tiny.engine.max_length
        or answer.choices[0].finish_reason == "stop"
    )


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
    assert (
        len(found.tokens)
        == len(found.token_logprobs)
        == len(found.top_logprobs)
        == len(found.text_offset)
    )
    for token, logprob, top, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert -9999 <= logprob <= 0 and len(top) <= 3
        assert token == "\ufffd" or top[token] == logprob  # which many bytes become
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
    choice = (
        tiny.client().completions.create(**asked, stop=["never there", stop], logprobs=1).choices[0]
    )
    assert (choice.text, choice.finish_reason) == (want, "stop")
    assert all(offset < len(want) for offset in choice.logprobs.text_offset)
    events = list(tiny.client().completions.create(**asked, stop=stop, stream=True))
    assert "".join(e.choices[0].text for e in events) == want
    assert tiny.idle()
    assert tiny.engine.told[-1] == tiny.engine.numbered[-1]  # no more is computed


def test_a_stop_string_may_be_complete_only_when_the_text_ends(tiny):
    """Half a character waits for the rest of it, and is written as U+FFFD where none comes."""
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 1, "logit_bias": {str(0xE6): 100}}
    half = tiny.client().completions.create(**asked).choices[0]
    assert (half.text, half.finish_reason) == ("\ufffd", "length")
    choice = tiny.client().completions.create(**asked, stop="\ufffd").choices[0]
    assert (choice.text, choice.finish_reason) == ("", "stop")


def test_settings_reach_the_engine(tiny):
    tiny.client().completions.create(
        model="tiny", prompt="abc", max_tokens=2, top_p=0.5, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"65": -3}, seed=7, extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2,
                                                  "stop_token_ids": [9], "ignore_eos": True},
    )  # fmt: skip
    asked = tiny.engine.asked[-1]
    assert (asked.top_p, asked.top_k, asked.min_p, asked.seed) == (0.5, 5, 0.1, 7)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (
        0.5,
        -0.5,
        1.2,
    )
    assert asked.logit_bias == {65: -3} and asked.stop_ids == {9} and asked.temperature == 1
    tiny.client().completions.create(model="tiny", prompt="abc", max_tokens=2)
    tiny.client().completions.create(model="tiny", prompt="abc", max_tokens=2)
    assert tiny.engine.asked[-1].seed != tiny.engine.asked[-2].seed  # of its own, if none is given


def test_an_answer_in_a_format(tiny):
    """By response_format as OpenAI's client sends it, and by vLLM's structured_outputs."""
    schema = {
        "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False,
    }  # fmt: skip
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 200,
        "seed": 1,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    # A model that knows nothing would fill its answer with blanks.
    bias = {str(blank): -100 for blank in b" \n\t\r"}
    answer = tiny.client().chat.completions.create(**asked, response_format=form, logit_bias=bias)
    assert json.loads(answer.choices[0].message.content)["ok"] in (True, False)
    answer = tiny.client().completions.create(
        model="tiny",
        prompt="a",
        max_tokens=40,
        extra_body={"structured_outputs": {"regex": "[ab]{3}"}},
    )
    assert (
        re.fullmatch("[ab]{3}", answer.choices[0].text)
        and answer.choices[0].finish_reason == "stop"
    )
    for wrong in (
        {"type": "nonsense"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wrong}}
        with pytest.raises(openai.BadRequestError, match="can't be used|can't be followed"):
            tiny.client().chat.completions.create(**asked, response_format=form)


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
    assert (
        after["minitext_generation_tokens_total"] >= before["minitext_generation_tokens_total"] + 1
    )
    name = 'minitext_http_requests_total{path="/v1/completions",status="200"}'
    assert after[name] == before.get(name, 0) + 1
    assert (
        after["minitext_time_to_first_token_seconds_count"]
        > before["minitext_time_to_first_token_seconds_count"]
    )
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


# --- many at once


def test_two_hundred_clients_at_once_lose_no_request(tiny):
    """Each gets its own text, of its own length, whoever else is there; half of them stream."""

    async def ask(client, i):
        asked = {
            "model": "tiny",
            "prompt": f"client {i}",
            "seed": i,
            "max_tokens": 1 + i % 7,
            "temperature": 1.0,
        }
        if i % 2:
            return (await client.completions.create(**asked)).choices[0].text
        parts = [
            e.choices[0].text async for e in await client.completions.create(**asked, stream=True)
        ]
        return "".join(parts)

    async def everybody():
        async with openai.AsyncOpenAI(
            base_url=f"{tiny.url}/v1", api_key="-", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(200)))

    found = asyncio.run(everybody())
    for i in range(0, 200, 23):
        want = tiny.direct(
            prompt=ids(f"client {i}"), seed=i, max_tokens=1 + i % 7, temperature=1.0
        )[0]
        assert [found[i]] == want
    assert len(found) == 200 and all(isinstance(text, str) for text in found)


def test_beyond_the_queue_clients_are_told_to_come_again(start):
    running = start(max_waiting=5)
    running.engine.held.clear()
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 3, "n": 4, "temperature": 0}
    with running.client().completions.create(**asked, stream=True) as stream:
        status, headers, said = running.post(asked)
        assert status == 429 and int(headers["Retry-After"]) >= 1
        assert "ask again" in json.loads(said)["error"]["message"]
        with pytest.raises(openai.RateLimitError, match="too many requests are waiting"):
            running.client().completions.create(**asked)
        with pytest.raises(openai.RateLimitError):  # of two prompts none is begun
            running.client().completions.create(
                **asked | {"prompt": ["a", "b"], "n": 1}, stream=True
            )
        assert running.engine.told == running.engine.numbered[1:] and len(running.engine.told) == 1
        running.engine.held.set()
        assert sum(bool(e.choices[0].finish_reason) for e in stream) == 4
    assert running.idle()
    assert len(running.client().completions.create(**asked).choices) == 4


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]], ids=["one", "two"])
def test_a_client_that_hangs_up_is_cancelled_at_once(tiny, stream, prompts):
    before = len(tiny.engine.told)
    body = json.dumps(
        {"prompt": prompts, "max_tokens": 500, "stream": stream, "ignore_eos": True}
    ).encode()
    with socket.create_connection(("127.0.0.1", tiny.port)) as client:
        client.sendall(request_of(body))
        while not tiny.engine.usage().running:
            time.sleep(0.001)
        if stream:
            assert b"data: " in client.recv(1 << 16) + client.recv(1 << 16)
    began, steps = time.monotonic(), tiny.engine.usage().steps
    while len(tiny.engine.told) < before + len(prompts):
        assert time.monotonic() < began + 5
        time.sleep(0.0005)
    assert tiny.idle(1)
    assert tiny.engine.usage().steps - steps < 250  # of 500 that it would have taken
    assert len(tiny.engine.told) == before + len(prompts)
    while tiny.engine.cancelled_at:  # the step that it ended in isn't over yet
        assert time.monotonic() < began + 10
        time.sleep(0.0005)
    # The step that is under way when the client goes, and the next one, which gives its pages back.
    assert all(tiny.engine.steps_kept[number] <= 2 for number in tiny.engine.told[before:])


def request_of(body, *headers, path="/v1/completions", length=None):
    lines = [
        f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}", *headers,
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# --- keys, limits, and the end


def test_an_api_key(start):
    running = start(api_key="sesame ä")
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    for path in ("/v1/completions", "/v1/chat/completions"):
        for headers in ({}, {"Authorization": "Bearer sesame"}, {"Authorization": "Basic c2VzYW1lIOQ="},
                        {"Authorization": "Bearer "}, {"Authorization": "sesame"}):  # fmt: skip
            status, given, said = running.post(b"not even JSON", path, **headers)
            assert status == 401 and given["WWW-Authenticate"] == "Bearer"
            assert json.loads(said)["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        running.client("wrong").models.list()
    assert (
        fetch(running, "/health")[0]
        == fetch(running, "/metrics")[0]
        == fetch(running, "/")[0]
        == 200
    )
    running.served.api_key = "open"
    assert running.client("open").completions.create(**asked).usage.completion_tokens <= 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a", "max_tokens": 511, "stream": True}, None),
        ({"prompt": "a", "max_tokens": 512}, "more than the context of 512 tokens"),
        ({"prompt": "a" * 512}, "prompt of 512 tokens"),
        ({"prompt": "a", "n": 129}, "n=129"),
        ({"prompt": ["a"] * 100, "n": 2}, "100 prompts with n=2 are 200 texts"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "prompt=[]"),
        ({"prompt": [1, "a"]}, "prompt=[1, 'a']"),
        ({"prompt": [True]}, "prompt=[True]"),
        ({"prompt": [257]}, "token 257 is not in the model's vocabulary of 257"),
        ({"prompt": [-1]}, "token -1"),
        ({"prompt": [10**30]}, "token 1000"),
        ({}, "prompt is missing"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1"),
        ({"prompt": "a", "temperature": "hot"}, "temperature=hot: choose a number"),
        ({"prompt": "a", "temperature": math.nan}, "not JSON"),
        ({"prompt": "a", "temperature": 10**400}, "temperature="),
        ({"prompt": "a", "top_p": 0}, "top_p=0"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens=1.5"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens=True"),
        ({"prompt": "a", "max_tokens": 10**100}, "max_tokens=1000"),
        ({"prompt": "a", "seed": 2**63}, "seed="),
        ({"prompt": "a", "seed": 10**4200}, "seed=1000"),
        ({"prompt": [10**4200]}, "token 1000"),
        ({"prompt": "a", "max_tokens": -(10**4200)}, "max_tokens=-1000"),
        ({"prompt": "a", "best_of": 10**4200}, "best_of=1000"),
        ({"prompt": "a", "repetition_penalty": 1e-40}, "repetition_penalty=1e-40"),
        ({"prompt": "a", "top_k": 2**64}, None),
        ({"prompt": "a", "logprobs": 21}, "logprobs=21"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias names x"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias of token 1=101"),
        ({"prompt": "a", "stop": [""]}, "stop has a string of 0 characters"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop has 17 strings"),
        ({"prompt": "a", "stop": 3}, "stop=3"),
        ({"prompt": "a", "stop": {}}, "stop={}"),
        ({"prompt": "a", "stop": False}, "stop=False"),
        ({"prompt": "a", "best_of": 2}, "best_of=2"),
        ({"prompt": "a", "suffix": "b"}, "suffix=b is not supported"),
        ({"prompt": "a", "echo": True}, "echo=True is not supported"),
        ({"prompt": "a", "model": "x\n" * 99}, "there is no model"),
        ({"prompt": "a", "stream_options": 3}, "stream_options=3"),
        ({"prompt": "a\ud800"}, "not JSON"),
        ([], "send a JSON object"),
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt":' * 10_000, "not JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        ({"prompt": "a", "best_of": 1, "user": "u", "metadata": {"a": 1}, "store": False, "echo": None}, None),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_in_a_line(tiny, body, words):
    said = refusal(tiny, body)
    assert (said is None) == (words is None) and (words is None or words in said), said


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages=[]"),
        ({}, "messages is missing"),
        ({"messages": "hi"}, "messages=hi"),
        ({"messages": [3]}, "messages.0=3"),
        ({"messages": [{"role": "user"}]}, "messages[0].content=None"),
        ({"messages": [{"content": "a"}]}, "messages[0].role=None"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "that is not text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "bad", "content": "a"}]}, "refuses the messages: no such role"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "tokens is more than the context"),
        ({"tools": [{"type": "function"}]}, "tools="),
        ({"modalities": ["audio"]}, "modalities="),
        ({"top_logprobs": 2}, "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs=21"),
        ({"response_format": {"type": "yaml"}}, "response_format.type=yaml"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"chat_template": "{{ 1 }}"}, "chat_template="),
        ({"max_tokens": 10, "max_completion_tokens": 10**6}, "max_tokens=1000000"),
        ({"tools": [], "tool_choice": "none", "reasoning_effort": "low", "max_tokens": 1}, None),
    ],
)  # fmt: skip
def test_what_a_chat_cannot_be_is_refused_in_a_line(tiny, body, words):
    if words and "messages" not in words and "context" not in words:
        body = {"messages": [{"role": "user", "content": "a"}]} | body
    said = refusal(tiny, body | ({} if words else {"messages": [{"role": "user", "content": "a"}]}),
                   "/v1/chat/completions")  # fmt: skip
    assert (said is None) == (words is None) and (words is None or words in said), said


ALLOWED = {400, 404, 408, 413, 415}


def refusal(running, body, path="/v1/completions"):
    """Returns the line of a refusal, which is checked; None if the request was answered."""
    status, _, data = running.post(body, path)
    if status == 200:
        return None
    return line_of(status, data)


def line_of(status, data):
    assert status in ALLOWED, (status, data[:500])
    error = json.loads(data)["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
    )
    assert error["message"].isprintable() and 10 < len(error["message"]) < 400
    return error["message"]


def test_a_model_without_a_template_says_so(start):
    running = start(template=None)
    said = refusal(
        running, {"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions"
    )
    assert "no chat template" in said and "/" not in said.replace("/v1/completions", "")


def test_addresses_and_methods_that_are_not_there(tiny):
    for path, method, status in [("/v1/embeddings", "POST", 404), ("/%0a%ff" + "x" * 999, "GET", 404),
                                 ("/v1/completions", "GET", 405), ("/docs", "GET", 404)]:  # fmt: skip
        found, data = fetch(tiny, path, method)
        assert found == status
        said = json.loads(data)["error"]["message"]
        assert said.startswith(method) and said.isprintable() and len(said) < 200
    assert tiny.post(b"{}", **{"Content-Type": "text/plain"})[0] == 415


def test_a_body_that_is_too_long_is_not_kept(tiny):
    limit = tiny.served.most_bytes
    said = refusal(tiny, b'{"prompt": "' + b"a" * limit + b'"}')
    assert f"more than {limit:,} bytes" in said
    # However long it says it is.
    with socket.create_connection(("127.0.0.1", tiny.port)) as client:
        client.sendall(request_of(b"", length=10**15))
        with contextlib.suppress(OSError):
            for _ in range(20 * limit >> 16):
                client.sendall(b"a" * (1 << 16))
        with contextlib.suppress(ConnectionResetError):
            assert b" 413 " in client.recv(4096)


def test_the_end_finishes_what_runs(start):
    running = start()
    stream = running.client().completions.create(
        model="tiny", prompt="a", max_tokens=200, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    running.server.should_exit = True
    assert list(stream)[-1].usage.completion_tokens == 200
    running.thread.join(10)
    assert not running.thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", running.port))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_what_is_not_done_in_time_is_told_so(start, stream):
    running = start(drain_seconds=0.05)
    running.engine.held.clear()
    answers = []
    body = {"prompt": "a", "max_tokens": 500, "stream": stream}
    asking = threading.Thread(target=lambda: answers.append(running.post(body)))
    asking.start()
    while not running.engine.usage().waiting:
        time.sleep(0.001)
    running.server.should_exit = True
    asking.join(10)
    status, _, data = answers[0]
    assert "shutting down" in data.decode() and status == (200 if stream else 503)
    if stream:
        assert '"error"' in data.decode() and data.endswith(b"data: [DONE]\n\n")


# --- those who mean no good

ODD = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=20),
        st.sampled_from([10**30, -(2**63), 2**64, 1e308, -0.0, "a\ud800", "\0", "\u202e", "9" * 5000, [[]] * 50]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
FIELDS = [
    "model", "prompt", "messages", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop",
    "stop_token_ids", "ignore_eos", "stream", "stream_options", "logprobs", "top_logprobs", "best_of", "echo",
    "suffix", "tools", "user", "response_format", "structured_outputs",
]  # fmt: skip


@st.composite
def hostile(draw):
    """An address, and a body that has something wrong with it, or is wrong altogether."""
    path = draw(st.sampled_from(["/v1/completions", "/v1/completions", "/v1/chat/completions"]))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return path, draw(st.binary(max_size=200))
    if kind == 1:
        opening = draw(st.sampled_from([b"[", b'{"a":', b'{"prompt":[', b'"\\u']))
        return path, opening * draw(st.integers(1, 10_000))
    body = {"prompt": "ab", "max_tokens": 2}
    if path.endswith("chat/completions"):
        # A message that would be rendered costs a process each time.
        body = {
            "messages": draw(st.sampled_from([[{"role": "user", "content": None}], []])),
            "max_tokens": 2,
        }
    for name in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4)):
        body[name] = draw(ODD)
    data = json.dumps(body).encode()
    if kind == 2:
        data = data[: draw(st.integers(0, len(data)))]
    return path, data


CANARY = "canary"  # what another client asks, from the first of these tests to the end of the file


@pytest.fixture(scope="module")
def attacked(tiny):
    """A server, a connection that is kept, and another client who asks all the while."""
    tiny.server.config.timeout_keep_alive = 60  # on a busy machine seconds pass between two bodies
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=60)
    asked = {"prompt": CANARY, "seed": 3, "max_tokens": 10}
    want = tiny.direct(prompt=ids(CANARY), seed=3, max_tokens=10, temperature=1.0)[0][0]
    done, answers = threading.Event(), []

    def sing():
        while not done.is_set():
            answers.append(json.loads(tiny.post(asked)[2])["choices"][0]["text"] == want)
            done.wait(0.05)

    singing = threading.Thread(target=sing)
    singing.start()
    yield tiny, connection
    done.set()
    singing.join()
    assert answers and all(answers)


def attack(attacked, path, data):
    _, connection = attacked
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    said = answer.read()
    if answer.status != 200:
        line_of(answer.status, said)


@given(asked=hostile())
@settings(max_examples=150)
def test_no_body_makes_the_server_fail(attacked, asked):
    attack(attacked, *asked)


@pytest.mark.audit
@pytest.mark.timeout(3600)
def test_ten_thousand_bodies_leave_nothing_behind(attacked):
    import gc

    @given(asked=hostile())
    @settings(max_examples=5_000)
    def some(asked):
        attack(attacked, *asked)

    counts = []
    for _ in range(2):
        some()
        assert attacked[0].idle()
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[1] < counts[0] * 1.1


def test_connections_that_do_not_behave_are_closed_and_harm_nobody(attacked, monkeypatch):
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.3)
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.3)
    tiny, _ = attacked
    body = json.dumps(
        {"prompt": "a", "max_tokens": 500, "stream": True, "ignore_eos": True}
    ).encode()
    clients = []

    def open_(data):
        clients.append(socket.create_connection(("127.0.0.1", tiny.port), timeout=20))
        with contextlib.suppress(OSError):
            clients[-1].sendall(data)
        return clients[-1]

    def answer(client):
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while not data.startswith(b"HTTP/1.1 4") and (more := client.recv(1 << 16)):
                data += more
        return data

    for data in (
        b"\0" * 1000, b"GET / HTTP\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET /" + b"a" * 200_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        request_of(b"zz\r\n", "Transfer-Encoding: chunked")[:-4] + b"zz\r\nnonsense",
    ):  # fmt: skip
        refused = answer(open_(data))  # or reset, while it's still being sent
        assert refused.startswith(b"HTTP/1.1 4") or (len(data) > 1 << 16 and not refused), data[:50]
    half = open_(request_of(body)[:-5])  # the rest of the body never comes
    assert b" 408 " in answer(half)
    closed = open_(request_of(body))
    closed.shutdown(socket.SHUT_WR)  # half-closed: counts as hung up
    answer(closed)
    silent = [open_(b"") for _ in range(50)]
    partial = [open_(request_of(body)[:30]) for _ in range(50)]
    reset = open_(request_of(body))
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    assert tiny.idle(10)
    assert tiny.client().completions.create(model="tiny", prompt="a", max_tokens=2).choices
    for client in (*clients, *silent, *partial):
        client.close()


def test_a_client_that_takes_nothing_is_left_after_a_while(start, monkeypatch):
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.3)
    running = start()
    running.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect(("127.0.0.1", running.port))
    body = {"prompt": "a", "max_tokens": 500, "stream": True, "n": 4, "ignore_eos": True}
    client.sendall(request_of(json.dumps(body).encode()))
    end = time.monotonic() + 20
    while not running.engine.told:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert running.idle()
    client.close()


def test_a_client_that_says_nothing_is_left_after_a_while(tiny, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    request = request_of(b'{"prompt": "a", "max_tokens": 2}')
    clients = [socket.create_connection(("127.0.0.1", tiny.port), timeout=20) for _ in range(3)]
    silent, slow, second = clients
    second.sendall(request)
    slow.sendall(request[:10])
    assert silent.recv(1 << 16) == slow.recv(1 << 16) == b""
    data = b""
    while b"total_tokens" not in data:
        more = second.recv(1 << 16)
        assert more, data
        data += more
    second.sendall(request[:20])  # the beginning of another
    assert second.recv(1 << 16) == b""
    # A request under way has all the time it needs.
    events = tiny.client().completions.create(
        model="tiny", prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(events).choices
    tiny.engine.held.clear()
    time.sleep(0.5)
    tiny.engine.held.set()
    assert len(list(events)) > 100
    for client in clients:
        client.close()


# --- the page, in a real browser


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("MINITEXT_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "no Chromium to open the page in: install it, or name its path in MINITEXT_CHROMIUM"
        )
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
        )
        yield running
        running.close()


@pytest.fixture
def tab(browser):
    """A factory of open pages; none may log an error or ask another host."""
    faults, contexts = [], []

    def make(running, width=1200, scheme="light"):
        contexts.append(
            browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        )
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console", lambda m: faults.append(m.text) if "Content Security" in m.text else None
        )
        page.on(
            "request",
            lambda r: None if r.url.startswith((running.url, "data:")) else faults.append(r.url),
        )
        page.goto(running.url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert not faults


@pytest.mark.audit
def test_the_page_chats(tiny, tab):
    page = tab(tiny)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("12")
    message = page.get_by_label("Message", exact=True)
    message.fill("<b>hä?</b>")
    message.press("Enter")
    page.get_by_text(re.compile(r"\d+ tokens?, first after .* s")).wait_for()
    page.get_by_role("button", name="Send").wait_for()
    prompt = "<user><b>hä?</b>\n<assistant>"
    texts, ends = tiny.direct(prompt=ids(prompt), max_tokens=12)
    said = page.locator(".said .text")
    assert said.all_text_contents() == ["<b>hä?</b>", texts[0]]  # as text, never as a page
    assert ("max tokens" in page.get_by_role("status").text_content()) == (ends == ["length"])
    message.fill("and?")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Send").wait_for()
    asked = [one.prompt for one in tiny.engine.asked if one.prompt != ids(CANARY)]
    # The whole conversation.
    assert bytes(asked[-1]).decode() == f"{prompt}{texts[0]}\n<user>and?\n<assistant>"
    page.get_by_role("button", name="New").click()
    assert said.count() == 0


@pytest.mark.audit
def test_the_page_stops(tiny, tab):
    page = tab(tiny)
    before = len(tiny.engine.told)

    def asked():  # by the page: the canary asks for less
        return sum(one.max_tokens == 400 for one in tiny.engine.asked)

    earlier = asked()
    tiny.engine.held.clear()
    try:
        page.get_by_label("Max tokens").fill("400")
        page.get_by_label("Message", exact=True).fill("a")
        page.get_by_role("button", name="Send").click()
        while asked() == earlier:
            time.sleep(0.01)
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Send").wait_for()
        end = time.monotonic() + 10
        while len(tiny.engine.told) == before:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        tiny.engine.held.set()
    assert "stopped" in page.get_by_role("status").text_content()
    assert tiny.idle()


@pytest.mark.audit
def test_the_page_of_a_model_that_only_goes_on(start, tab):
    running = start(template=None, api_key="sesame")
    page = tab(running)
    text = page.get_by_label("Text to go on from")
    text.fill("abc")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("this server wants its API key").wait_for()
    assert text.input_value() == "abc"  # nothing is lost
    page.get_by_label("API key").fill("sesame")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("9")
    page.get_by_role("button", name="Send").click()
    page.get_by_text(re.compile("first after")).wait_for()
    page.get_by_role("button", name="Send").wait_for()
    want = "abc" + running.direct(prompt=ids("abc"), max_tokens=9)[0][0]
    assert page.locator(".said .text").all_text_contents() == [want]


@pytest.mark.audit
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_can_be_read(tiny, tab, width, scheme):
    page = tab(tiny, width, scheme)
    page.get_by_label("Max tokens").fill("50")
    page.get_by_label("Message", exact=True).fill("x" * 300)
    page.get_by_label("Message", exact=True).press("Enter")
    page.get_by_text(re.compile("first after")).wait_for()
    page.get_by_role("button", name="Send").wait_for()
    wide = "document.documentElement.scrollWidth <= innerWidth && texts.scrollWidth <= texts.clientWidth"
    assert page.evaluate(wide)
    assert page.get_by_role("button", name="Send").bounding_box()["width"] > 40
    # WCAG's contrast of all text with what is behind it.
    worst = page.evaluate(
        """() => {
          const parse = c => c.match(/[\\d.]+/g).map(Number);
          const light = c => parse(c).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          const behind = e => { while (e) { const c = getComputedStyle(e).backgroundColor, p = parse(c);
            if (p.length < 4 || p[3]) return c; e = e.parentElement } };
          return Math.min(...[...document.body.querySelectorAll("*")].filter(e => e.innerText && e.tagName !== "SCRIPT")
            .map(e => { const a = light(getComputedStyle(e).color), b = light(behind(e));
              return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) }));
        }"""
    )
    assert worst >= 4.5
