"""A conversation says what the model would say to its messages, in whichever way it came about."""

import contextlib

import jax
import numpy as np
import pytest
from flax import nnx

from minitext.data.chat import Chat
from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError
from minitext.inference.conversation import LEAST, Conversation
from minitext.inference.engine import Engine, EngineOptions
from minitext.inference.generate import Sampling, generate
from minitext.models.transformer import Transformer

TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"
GREEDY = Sampling(temperature=0)


@pytest.fixture
def conversation(tiny, tmp_path):
    def make(length=256, system=""):
        cfg, tokenizer = tiny("model.layers=1").model, ByteTokenizer()
        params = nnx.state(Transformer(cfg, rngs=nnx.Rngs(0)), nnx.Param)
        engine = Engine(cfg, params, EngineOptions(max_sequences=1, max_length=length))
        chat = Chat(TEMPLATE, {}, frozenset({tokenizer.eod_id}), tmp_path / "published")
        made = stack.enter_context(
            contextlib.closing(Conversation(engine, chat, tokenizer, system))
        )
        return made, (cfg, params, tokenizer)

    with contextlib.ExitStack() as stack, jax.default_device(jax.devices()[0]):
        yield make


def alone(model, text, count):
    cfg, params, tokenizer = model
    tokens = tokenizer.encode_batch([text])[0].tolist()
    found = generate(
        cfg, params, tokens, max_tokens=count, sampling=GREEDY, stop_id=tokenizer.eod_id
    )
    return tokenizer.decode([int(x) for x in found])


def test_answers_are_those_of_the_rendered_messages(conversation):
    made, model = conversation(system="be brief")
    first = "".join(made.ask("hello", max_tokens=9, sampling=GREEDY))
    assert first == alone(model, "[s]be brief[u]hello[a]", 9)
    second = "".join(made.ask("more", max_tokens=9, sampling=GREEDY))
    assert second == alone(model, f"[s]be brief[u]hello[a]{first}[u]more[a]", 9)
    assert [m["role"] for m in made.messages] == ["user", "assistant"] * 2
    made.forget()
    assert "".join(made.ask("hello", max_tokens=9, sampling=GREEDY)) == first
    made.chat = made.chat.plain(made.tokenizer)
    prompt = made._prompt()  # in which the answer ends as in training, with one token
    assert prompt.count(made.tokenizer.eod_id) == 1


def test_an_answer_cut_short_is_kept_and_gives_its_pages_back(conversation):
    made, model = conversation()
    pieces = made.ask("hello", max_tokens=100, sampling=GREEDY)
    text = "".join(next(pieces) for _ in range(6))
    pieces.close()
    assert text and made.messages[-1]["content"] == text
    usage = made.engine.usage()
    assert usage.running == usage.waiting == usage.pages_used == 0
    after = "".join(made.ask("go on", max_tokens=5, sampling=GREEDY))
    assert after == alone(model, f"[u]hello[a]{text}[u]go on[a]", 5)


def test_the_oldest_turns_are_forgotten_when_there_is_no_room(conversation):
    made, model = conversation(length=64)
    for turn in range(4):
        text = "".join(made.ask(f"turn {turn}", max_tokens=8, sampling=GREEDY))
    kept = made.messages[made.forgotten :]
    assert made.forgotten > 0 and kept[0]["role"] == "user"
    rendered = "".join(f"[{m['role'][0]}]{m['content']}" for m in kept[:-1]) + "[a]"
    assert text == alone(model, rendered, 8)
    before = list(made.messages)
    with pytest.raises(UserError, match=r"the message takes 1\d\d tokens"):
        next(made.ask("x" * (64 - LEAST + 100)))
    assert made.messages == before


def test_sampling_repeats_with_its_seed(conversation):
    made, _ = conversation()
    texts = []
    for seed in (1, 1, 2):
        made.forget()
        texts.append("".join(made.ask("hello", max_tokens=12, seed=seed)))
    assert texts[0] == texts[1] != texts[2]
    assert np.all([len(text) > 0 for text in texts])
