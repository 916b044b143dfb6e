"""Tokenizers: nothing is lost, nothing crashes, what is saved comes back."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitext.config.data import DataConfig
from minitext.data.rows import make_tokenizer
from minitext.data.tokenizer import END, ByteTokenizer, load_tokenizer, read_published, train_bpe
from minitext.errors import UserError

CORPUS = [
    "the cat sat on the mat, the cat that sat; def f(x): return x + 1\n" * 20,
    "äöü 日本語 " * 9,
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(CORPUS, 300)


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request, bpe):
    return ByteTokenizer() if request.param == "byte" else bpe


@given(text=st.text())
def test_round_trip_of_any_unicode_text(text, bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.eod_id for i in ids)
        assert tokenizer.encode_batch([text, text])[1].tolist() == ids


@given(ids=st.lists(st.integers(-3, 400)))
def test_decoding_whatever_a_model_samples_never_raises(ids, bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        assert isinstance(tokenizer.decode(ids), str)
        assert tokenizer.decode(np.array(ids, np.int32)) == tokenizer.decode(ids)


def test_hostile_texts(tokenizer):
    for text in (
        "",
        "\0",
        "\0\0a\0",
        "<|endoftext|>",
        "\r\n\t\u2028",
        "🙂👩‍👩‍👧",
        "\ufffd",
        "\uffff",
        "Ā",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(), cut=st.integers(0, 20))
def test_bytes_are_counted_where_characters_are_cut_too(text, cut, bpe):
    published = read_published(json.dumps(bpe.published()), END, "here")
    for tokenizer in (ByteTokenizer(), bpe, published):
        ids = np.array([*tokenizer.encode(text.replace(END, "")), tokenizer.eod_id])
        counts = tokenizer.count_bytes(ids[:cut]), tokenizer.count_bytes(ids[cut:])
        assert sum(counts) == len(text.replace(END, "").encode())


def test_end_of_document_is_the_last_id_and_decodes_to_nothing(tokenizer):
    assert tokenizer.eod_id == tokenizer.vocab_size - 1
    assert (
        tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod_id, *tokenizer.encode("b")]) == "ab"
    )
    assert tokenizer.decode([tokenizer.vocab_size, 10**6]) == "\ufffd\ufffd"


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
        with pytest.raises(UserError, match=r"U\+D800 at character 2"):
            encode("ab\ud800")


def test_saved_and_loaded(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.encode(CORPUS[0]) == tokenizer.encode(CORPUS[0])
    assert (loaded.vocab_size, loaded.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)


def test_a_save_that_is_cut_short_leaves_no_file(bpe, tmp_path, monkeypatch):
    written = Path.write_text

    def killed(self, text, **options):
        written(self, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        bpe.save(tmp_path / "tokenizer.json")
    assert not [
        *tmp_path.iterdir()
    ]  # half a file would stay in a run, and be refused when it resumes


def test_loading_something_else_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none\.json: No such file"):
        load_tokenizer(tmp_path / "none.json")
    for wrong in ("", "[]", "{}", '{"kind": "bpe", "bpe": {}}', '{"kind": "other"}', "\0"):
        (tmp_path / "wrong.json").write_text(wrong)
        with pytest.raises(UserError, match="not a tokenizer saved by minitext") as error:
            load_tokenizer(tmp_path / "wrong.json")
        assert "\n" not in str(error.value)


def test_bpe_learns_merges_and_the_same_ones_each_time(bpe):
    assert 258 <= bpe.vocab_size <= 300
    assert len(bpe.encode(CORPUS[0])) < len(CORPUS[0]) / 2
    assert train_bpe(list(CORPUS), 300).to_json() == bpe.to_json()


def test_bpe_of_a_text_without_pairs_has_fewer_ids():
    tokenizer = train_bpe(["a"], 5000)
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode(tokenizer.encode("any text")) == "any text"


def test_vocab_too_small_says_what_to_set():
    with pytest.raises(UserError, match=r"model\.vocab=256 .* set model\.vocab to 257 or more"):
        make_tokenizer(DataConfig(), 256)
    with pytest.raises(UserError, match=r"model\.vocab=257 .* set model\.vocab to 258 or more"):
        train_bpe(CORPUS, 257)


def test_bpe_is_trained_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text(CORPUS[0])
    cfg = DataConfig(source="files", path=str(tmp_path / "a.txt"), tokenizer="bpe")
    first = make_tokenizer(cfg, 280)
    (saved,) = (tmp_path / "cache").glob("*/tokenizer.json")
    changed = saved.stat().st_mtime_ns
    assert make_tokenizer(cfg, 280).to_json() == first.to_json() == json.loads(saved.read_text())
    assert saved.stat().st_mtime_ns == changed
    assert make_tokenizer(cfg, 270).vocab_size == 270 < first.vocab_size == 280


def test_bpe_is_trained_again_where_other_text_is_read(tmp_path, monkeypatch):
    """Of a file that holds texts and conversations, and of a stream whose file changes."""
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.jsonl"

    def write(text, said):
        talk = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
        path.write_text(json.dumps({"text": text, "messages": talk}) + "\n")

    def first_merge(**values):
        cfg = DataConfig(path=str(path), tokenizer="bpe", **values)
        return make_tokenizer(cfg, 300).decode([256])

    write("ab" * 50, "cd" * 50)
    assert first_merge(source="files") in "abab"
    assert first_merge(source="conversations") in "cdcd"
    assert first_merge(source="hf", hf_name="json") in "abab"
    write("ef" * 60, "cd" * 50)
    assert first_merge(source="hf", hf_name="json") in "efef"
