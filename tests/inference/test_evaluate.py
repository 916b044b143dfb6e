"""Benchmarks of lm-eval: our scores are what the model's logits say, whatever is beside a text in its batch."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import minitext as mt
from minitext.data.chat import Chat
from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError
from minitext.inference import evaluate
from minitext.inference.engine import dropless
from minitext.models.transformer import Transformer
from tests.inference.test_engine import KINDS, TINY

LONGEST = 48  # tokens, which are bytes here
WORDS = ["red", "a long and winding answer", "é"]
DOCUMENTS = [
    {"question": f"{'Which? ' * (i % 9)}Number {i}.", "choices": WORDS, "right": i % 3}
    for i in range(21)
]


def write_task(folder, name, **settings):
    lines = "".join(json.dumps(document) + "\n" for document in DOCUMENTS)
    (folder / "documents.jsonl").write_text(lines)
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **settings,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    write_task(
        path, "choose", output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="right",
        metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    write_task(
        path, "read", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{question}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )  # fmt: skip
    write_task(
        path, "write", output_type="generate_until", doc_to_target="{{choices[right]}}",
        generation_kwargs={"until": ["a"], "max_gen_toks": 9}, metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    return path


@pytest.fixture(
    scope="module",
    params=["gqa", *(pytest.param(kind, marks=pytest.mark.audit) for kind in ("moe", "deltanet"))],
)
def model(request):
    """Returns our model for the harness, and a function from tokens [T] to logits [T, V] by one forward pass."""
    settings = [*TINY, *KINDS[request.param], "model.vocab=257"]
    cfg = mt.load_config("laptop", settings).model
    net = Transformer(dropless(cfg), rngs=nnx.Rngs(1))
    forward = nnx.jit(lambda net, tokens: net(tokens)[0])
    words = ByteTokenizer()
    chat = Chat(None, {}, frozenset({words.eod_id}), None)
    ours = evaluate.MinitextLM(
        cfg, nnx.state(net), words, chat, max_length=LONGEST, max_sequences=4
    )

    def logits(tokens):
        # One program for every length. What comes after changes nothing: here it is other than in our batches.
        padded = np.full((1, LONGEST), 7, np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(forward(net, jnp.asarray(padded)))[: len(tokens)]

    return ours, logits


def log_probability(logits, context, continuation):
    tokens = (context + continuation)[-LONGEST - 1 :]
    values = jax.nn.log_softmax(logits(tokens[:-1])[-len(continuation) :])
    target = np.asarray(continuation)
    nats = float(np.sum(np.asarray(values)[np.arange(len(target)), target]))
    return nats, bool(np.all(np.argmax(values, 1) == target))


def test_choices_are_scored_by_their_tokens(model, folder):
    ours, logits = model
    pairs = [
        (("", ""), list(document["question"].encode()), list(f" {word}".encode()))
        for document in DOCUMENTS
        for word in WORDS
    ]
    assert max(len(context) + len(continuation) for _, context, continuation in pairs) > LONGEST
    found = ours._loglikelihood_tokens(pairs)
    expected = [
        log_probability(logits, context, continuation) for _, context, continuation in pairs
    ]
    np.testing.assert_allclose(
        [x for x, _ in found], [x for x, _ in expected], rtol=1e-4, atol=1e-4
    )
    greedy = int(np.argmax(logits([1, 2, 3])[-1]))
    both = ours._loglikelihood_tokens(
        [(("", ""), [1, 2, 3], [greedy]), (("", ""), [1, 2, 3], [(greedy + 1) % 257])]
    )
    assert [is_greedy for _, is_greedy in both] == [True, False]
    scores = evaluate.evaluate(ours, evaluate.load_tasks(["choose"], str(folder)))["choose"]
    chosen = np.argmax(np.reshape([x for x, _ in expected], (-1, len(WORDS))), 1)
    right = [document["right"] for document in DOCUMENTS]
    assert scores["samples"] == len(DOCUMENTS) and scores["acc"] == np.mean(chosen == right)


def test_in_rendered_messages_the_end_of_an_answer_is_one_token(model, monkeypatch):
    ours, _ = model
    words = ByteTokenizer()
    monkeypatch.setattr(ours, "_chat", ours._chat.plain(words))
    monkeypatch.setattr(ours, "_renders", False)
    turns = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
    assert ours.tok_encode(ours.apply_chat_template(turns)).count(words.eod_id) == 1


def test_with_longrope_a_text_s_score_does_not_depend_on_those_beside_it():
    long = (
        "kind: longrope, short_factor: [1], long_factor: [30], original_length: 12, max_length: 48"
    )
    sizes = [
        "model.vocab=257",
        "model.layers=1",
        "model.heads=1",
        "model.kv_heads=1",
        "model.embed=2",
    ]
    cfg = mt.load_config("laptop", [*TINY, *sizes, f"model.rope={{{long}}}"]).model
    net, words = Transformer(cfg, rngs=nnx.Rngs(1)), ByteTokenizer()
    chat = Chat(None, {}, frozenset(), None)
    ours = evaluate.MinitextLM(cfg, nnx.state(net), words, chat, max_length=48)
    forward = nnx.jit(lambda net, tokens: jax.nn.log_softmax(net(tokens)[0, -1]))
    texts = [[*range(n)] for n in (13, 14)]  # with 12 inputs and 13
    found = ours._loglikelihood_tokens([(("", ""), text[:-1], text[-1:]) for text in texts])
    for text, (nats, _) in zip(texts, found, strict=True):
        expected = forward(net, jnp.asarray([text[:-1]]))[text[-1]]
        assert nats == pytest.approx(float(expected), abs=1e-4)
    asked = [types.SimpleNamespace(args=("a" * 20, {"until": [], "max_gen_toks": 2}))]
    with pytest.raises(UserError, match="set --max-model-len 12, and contexts lose"):
        ours.generate_until(asked)


def test_a_text_longer_than_a_window_counts_every_byte_once(model, folder):
    ours, logits = model
    nats, size = 0.0, 0
    for document in DOCUMENTS:
        tokens = list(document["question"].encode())
        size += len(tokens)
        first = tokens[:LONGEST]
        nats += log_probability(logits, [256], first)[0]
        if rest := tokens[LONGEST:]:  # seen with as much before it as a window holds
            nats += log_probability(logits, tokens[len(rest) - 1 : LONGEST], rest)[0]
    scores = evaluate.evaluate(ours, evaluate.load_tasks([str(folder / "read.yaml")]))["read"]
    assert scores["bits_per_byte"] == pytest.approx(-nats / size / math.log(2), rel=1e-5)


def test_answers_are_greedy_and_end_where_the_task_says(model, folder):
    ours, logits = model
    requests = [
        [document["question"], {"until": ["a", "\x00"], "max_gen_toks": 9}]
        for document in DOCUMENTS
    ]
    expected = []
    for context, _ in requests:
        tokens = list(context.encode())[9 - LONGEST :]
        prompt = len(tokens)
        while len(tokens) < prompt + 9:
            token = int(np.argmax(logits(tokens)[-1]))
            if token == 256:
                break
            tokens.append(token)
        written = bytes(tokens[prompt:]).decode(errors="replace")
        expected.append(written.partition("a")[0].partition("\x00")[0])
    instances = [
        evaluate.Instance("generate_until", {}, (c, g), i) for i, (c, g) in enumerate(requests)
    ]
    assert ours.generate_until(instances) == expected
    assert len(set(expected)) > 5
    scores = evaluate.evaluate(ours, evaluate.load_tasks(["write"], str(folder)), limit=5)["write"]
    assert scores["samples"] == 5 and 0 <= scores["exact_match"] <= 1


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"max_gen_toks": LONGEST}, "choose fewer"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"max_gen_toks": 0}, "answers of 0 tokens"),
    ],
)
def test_what_a_task_asks_in_vain_is_named(model, generation, words):
    with pytest.raises(UserError, match=words):
        model[0].generate_until([evaluate.Instance("generate_until", {}, ("Hi", generation), 0)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "chose", "--include-path", "{folder}"], "did you mean choose"),
        (["--tasks", ","], "names no task"),
        (["--tasks", "choose", "--include-path", "/nowhere"], "is not a folder"),
        (["--limit", "3"], "--limit belongs to benchmarks"),
        (["data.path=x", "--tasks", "choose"], "data.path=x has no effect"),
    ],
)
def test_the_command_refuses_in_one_line(words, message, folder, tmp_path, minitext):
    code, _, said = minitext("eval", tmp_path, *(word.format(folder=folder) for word in words))
    assert code == 2 and message in said and "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


def test_tasks_that_are_not_there_are_named(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a task that names no documents takes whatever is below
    with pytest.raises(UserError, match="no task chose in .*did you mean choose"):
        evaluate.load_tasks(["chose"], str(folder))
    with pytest.MonkeyPatch.context() as patch:  # which takes ten seconds to read its own tasks
        patch.delattr(evaluate, "TaskManager")
        with pytest.raises(UserError, match="no task hellaswagg: did you mean hellaswag"):
            evaluate.load_tasks(["hellaswagg"])
    (tmp_path / "broken.yaml").write_text(
        "task: broken\ndataset_path: json\noutput_type: nothing\n"
    )
    for broken in ("task: [", "task: broken\ndataset_path: json\n", "- 1\n"):
        (tmp_path / "broken.yaml").write_text(broken)
        with pytest.raises(UserError, match="cannot load"):
            evaluate.load_tasks([str(tmp_path / "broken.yaml")])
