"""Text as it streams: nothing lost, nothing said too early, and never half a character."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minitext.data.tokenizer import ByteTokenizer, PublishedTokenizer, train_bpe
from minitext.inference.text import Detokenizer, StopStrings, TextStream, token_text

CORPUS = ["the cat sat on the mat; def f(x): return x\n" * 20, "äöü 日本語 🙂🙃 " * 9]


def sentencepiece() -> PublishedTokenizer:
    """Words with their space in front of them, bytes for what has no word: as Llama 2's."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁cat", "s", "at", "▁\ufffd",
             "日", "é", "."]  # fmt: skip
    model = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    model.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    model.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return PublishedTokenizer(model, 2)


def metaspace() -> PublishedTokenizer:
    model = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("▁a", -1.0), ("b", -2.0)], 0))
    model.decoder = decoders.Metaspace()
    model.add_special_tokens([AddedToken("</s>")])
    return PublishedTokenizer(model, 4)


def wordpiece() -> PublishedTokenizer:
    words = ["[UNK]", "[SEP]", "play", "##ing", "##s", ".", "日", "n't", "do"]
    model = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    model.decoder = decoders.WordPiece()
    model.add_special_tokens([AddedToken("[SEP]")])
    return PublishedTokenizer(model, 1)


def byte_level() -> PublishedTokenizer:
    """A published tokenizer of bytes and their pairs, with tokens that no text shows."""
    model = Tokenizer.from_str(train_bpe(CORPUS, 300)._model.to_str())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|start|>")])
    return PublishedTokenizer(model, model.token_to_id("<|end|>"))


TOKENIZERS = {
    "byte": ByteTokenizer(), "bpe": train_bpe(CORPUS, 300), "published": byte_level(),
    "sentencepiece": sentencepiece(), "metaspace": metaspace(), "wordpiece": wordpiece(),
}  # fmt: skip
NAMES = sorted(TOKENIZERS)
by_name = pytest.mark.parametrize("name", NAMES)


def pieces_of(tokenizer, ids, before=()):
    detokenizer = Detokenizer(tokenizer, before)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def random_ids(tokenizer):
    """Any ids, and ids of text with characters of one to four bytes, cut and stirred."""
    any_id = st.integers(0, tokenizer.vocab_size + 2)
    text = st.text("aé日🙂 \ufffdthe.").map(
        lambda t: [int(i) for i in tokenizer.encode_batch([t])[0]]
    )
    cut = st.tuples(text, st.integers(0, 9)).map(lambda c: c[0][c[1] :])
    return st.lists(st.one_of(any_id.map(lambda i: [i]), cut), max_size=12).map(
        lambda parts: list(itertools.chain(*parts))
    )


@by_name
@given(data=st.data())
@settings(max_examples=30)
def test_the_pieces_joined_are_the_text(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(random_ids(tokenizer))
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@by_name
@given(data=st.data())
@settings(max_examples=30)
def test_after_a_prompt_a_text_goes_on_as_it_would_in_one(name, data):
    tokenizer = TOKENIZERS[name]
    before, ids = data.draw(random_ids(tokenizer)), data.draw(random_ids(tokenizer))
    prompt = tokenizer.decode(before)
    if not prompt or prompt.endswith("\ufffd"):
        return
    if before[-1] in tokenizer.byte_ids and ids[:1] and ids[0] in tokenizer.byte_ids:
        return  # what follows may spoil the prompt itself
    whole = tokenizer.decode([*before, *ids])
    assert prompt + "".join(pieces_of(tokenizer, ids, before)) == whole


@by_name
@given(data=st.data())
@settings(max_examples=30)
def test_no_piece_holds_half_a_character(name, data):
    """Text that is whole has no U+FFFD in any piece, wherever its tokens cut its characters."""
    tokenizer = TOKENIZERS[name]
    text = data.draw(st.text("aé日🙂 the."))
    ids = [int(i) for i in tokenizer.encode_batch([text])[0]]
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces_of(tokenizer, ids))


def test_what_is_certain_is_not_held_back():
    assert pieces_of(ByteTokenizer(), "aé🙂b".encode()) == ["a", "", "é", "", "", "", "🙂", "b", ""]
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [tokenizer._model.token_to_id(t) for t in ("▁the", "▁cat", "s", "<0xC3>", "<0xA9>", ".")]
    assert pieces_of(tokenizer, ids) == ["the", " cat", "s", "", "", "é.", ""]


@pytest.mark.parametrize("byte", [0xFF, 0xE2, 0x80], ids=hex)
@pytest.mark.parametrize("name", ["byte", "published", "sentencepiece"])
def test_bytes_that_are_no_text_take_time_in_proportion(name, byte):
    """Ten times as many tokens: far from a hundred times the work. Counted, as times vary."""
    tokenizer = TOKENIZERS[name]
    token = {"byte": byte, "sentencepiece": byte + 3}.get(name)
    if token is None:
        token = next(
            i
            for i in range(300)
            if tokenizer._model.id_to_token(i) == {0xFF: "ÿ", 0xE2: "â", 0x80: "Ģ"}[byte]
        )
    decoded = []

    class Counting(type(tokenizer)):
        def decode(self, ids):
            decoded.append(len(ids))
            return super().decode(ids)

    counting = object.__new__(Counting)
    counting.__dict__.update(tokenizer.__dict__)
    work = []
    for count in (200, 2000):
        decoded.clear()
        assert "".join(pieces_of(counting, [token] * count)) == tokenizer.decode([token] * count)
        work.append(sum(decoded))
    assert work[1] < 15 * work[0]


@by_name
def test_a_tokens_own_text(name):
    """Joined, tokens' own texts are the text, but for characters that take several."""
    tokenizer = TOKENIZERS[name]
    ids = [int(i) for i in tokenizer.encode_batch(["ab a"])[0]]
    first = tokenizer.decode(ids[:1])
    assert first + "".join(token_text(tokenizer, i) for i in ids[1:]) == tokenizer.decode(ids)


# --- strings that end a text


def ended(text, stops):
    """Character by character, as the definition says."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    text=st.text("abc", max_size=30),
    cuts=st.lists(st.integers(0, 30)),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
def test_a_text_ends_at_the_first_stop_string_however_it_comes(text, cuts, stops):
    stop, given_out, done = StopStrings(stops), "", False
    places = [0, *sorted(cuts), len(text)]
    for start, end in itertools.pairwise(places):
        piece, done = stop.push(text[start:end])
        given_out += piece
        assert ended(text, stops)[0].startswith(given_out)  # nothing of a stop string, ever
        if done:
            break
        # No more is held back than may be the beginning of one.
        held = text[:end][len(given_out) :]
        assert not held or any(s.startswith(held) for s in stops)
    if not done:
        given_out += stop.finish()
    assert (given_out, done) == ended(text, stops)


@by_name
@given(data=st.data())
@settings(max_examples=30)
def test_a_stream_gives_each_token_with_its_text(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(random_ids(tokenizer))
    stops = data.draw(st.lists(st.text("athe é日", min_size=1, max_size=3), max_size=2))
    stream, text, tokens = TextStream(tokenizer, (), stops), "", []
    for i, token in enumerate(ids):
        piece, done = stream.push(token, -float(i), ())
        text += piece
        tokens += done
        assert all(t.offset < len(text) for t in done)  # not before their text
    if not stream.stopped:
        piece, done = stream.finish()
        text += piece
        tokens += done
    assert (text, stream.stopped) == ended(tokenizer.decode(ids), stops)
    assert len(text) == stream.length
    # In order, none left out but those of the stop string and after it.
    assert [t.token for t in tokens] == ids[: len(tokens)]
    assert [t.logprob for t in tokens] == [-float(i) for i in range(len(tokens))]
    assert [t.offset for t in tokens] == sorted(t.offset for t in tokens)
    assert stream.stopped or len(tokens) == len(ids)
    assert stream.push(5) == ("", []) or not stream.stopped


def test_a_long_text_streams_quickly():
    """Tens of microseconds a token, or many streams at once would wait for their text."""
    tokenizer = TOKENIZERS["published"]
    ids = [int(i) for i in tokenizer.encode_batch([CORPUS[0] * 8])[0]]
    began = time.process_time()
    pieces_of(tokenizer, ids)
    assert (time.process_time() - began) / len(ids) < 500e-6
