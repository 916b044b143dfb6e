"""Data: nothing lost, nothing twice, nothing across documents, and the same after a restart."""

import hashlib
import http.server
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.config.data import DataConfig
from minitext.config.sections import MeshConfig
from minitext.data import batches as batches_module
from minitext.data import grammar, packing, text_files, token_file
from minitext.data.batches import LocalWindows, make_batches
from minitext.data.rows import make_tokenizer, pack_source
from minitext.data.tokenizer import ByteTokenizer, read_published, train_bpe
from minitext.errors import UserError
from tests.conftest import QUICK_FLAGS

EOD = 256
KEYS = {"tokens", "targets", "positions", "segment_ids", "loss_mask"}


@pytest.fixture
def cache_path(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(path, **values):
    return DataConfig(source="files", path=str(path), **{"seq_len": 16, **values})


def batches(cfg, global_batch=4, **kwargs):
    return make_batches(cfg, vocab=300, global_batch=global_batch, **kwargs)


def texts(folder, count=40):
    if not folder.exists():
        folder.mkdir()
        for i in range(count):
            words = [f"é{i}.{k}" for k in range(7 * i % 23)]
            (folder / f"{i:02}.txt").write_text(f"document {i}: " + " ".join(words))
    return folder


def same(a, b):
    assert a.keys() == b.keys() == KEYS
    for key in KEYS:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def rows_of(batch):
    """One bytes object for each row that is not padding alone."""
    whole = np.concatenate([batch["tokens"], batch["targets"]], axis=1)
    return [
        row.tobytes() for row, ids in zip(whole, batch["segment_ids"], strict=True) if ids.any()
    ]


# --- packing -----------------------------------------------------------------------------------

documents = st.lists(st.lists(st.integers(0, 255), max_size=20), min_size=1, max_size=20)


def lay_out(docs, seed=None):
    tokens = np.array([t for doc in docs for t in [*doc, EOD]], np.uint16)
    ends = np.cumsum([len(doc) + 1 for doc in docs])
    order = None if seed is None else np.random.default_rng(seed).permutation(len(docs))
    return packing.TokenStream(tokens, ends, order), order


@given(docs=documents, seq_len=st.integers(1, 24), seed=st.none() | st.integers(0, 9))
def test_every_token_is_an_input_once_and_a_target_once(docs, seq_len, seed):
    stream, order = lay_out(docs, seed)
    docs = docs if order is None else [docs[i] for i in order]
    flat = np.array([t for doc in docs for t in [*doc, EOD]])
    total = packing.row_count(len(flat), seq_len)
    windows = packing.Windows(stream, seq_len, 0, total)
    if not total:
        assert len(flat) == 1
        return
    out = packing.pack(np.stack([windows[i] for i in range(total)]), EOD)
    real = out["segment_ids"] > 0

    # Padding is only at the end of the last row.
    assert real[:-1].all() and real[-1, 0] and (np.diff(real[-1].astype(int)) <= 0).all()
    np.testing.assert_array_equal(out["tokens"][real], flat[:-1])
    np.testing.assert_array_equal(out["targets"][real], flat[1:])

    # Scored targets are all tokens but the first of each document.
    first = np.concatenate([[0], np.cumsum([len(doc) + 1 for doc in docs])[:-1]])
    scored = np.flatnonzero(out["loss_mask"][real]) + 1
    np.testing.assert_array_equal(scored, np.setdiff1d(np.arange(len(flat)), first))

    # Segments and positions again, with loops.
    document = np.searchsorted(first, np.arange(len(flat)), side="right")
    for row in range(total):
        at = np.arange(row * seq_len, min((row + 1) * seq_len, len(flat) - 1))
        assert (
            out["segment_ids"][row, : len(at)].tolist()
            == (document[at] - document[at[0]] + 1).tolist()
        )
        start = np.maximum(first[document[at] - 1], at[0])
        assert out["positions"][row, : len(at)].tolist() == (at - start).tolist()
    for key in KEYS:
        assert (out[key][~real] == 0).all()
        assert out[key].dtype == (np.float32 if key == "loss_mask" else np.int32)


@given(docs=documents, seed=st.integers(0, 9), data=st.data())
def test_a_reordered_stream_reads_anywhere(docs, seed, data):
    stream, order = lay_out(docs, seed)
    flat = np.array([t for i in order for t in [*docs[i], EOD]])
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat) + 5))
    np.testing.assert_array_equal(stream.read(start, stop), flat[start:stop])


# --- order, splits, resuming -------------------------------------------------------------------


def test_splits_share_no_row_and_an_epoch_has_every_row_once(tmp_path, cache_path):
    cfg = files(texts(tmp_path / "texts"), validation_fraction=0.2)
    held = [row for batch in batches(cfg, 3, split="validation") for row in rows_of(batch)]
    total = packing.row_count(sum(len(p.read_bytes()) + 1 for p in text_files.find_files(cfg)), 16)
    training = total - len(held)
    assert len(held) == round(total * 0.2) and training % 3 != 0

    stream = (row for batch in batches(cfg, 3) for row in rows_of(batch))
    epochs = [list(itertools.islice(stream, training)) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == training
        assert not set(epoch) & set(held)
    assert epochs[0] != epochs[1] != epochs[2]


def test_validation_is_the_same_pass_each_time(tmp_path, cache_path):
    cfg = files(texts(tmp_path / "texts"), validation_fraction=0.3)
    held_out = batches(cfg, split="validation")
    first = list(held_out)
    next(iter(held_out))  # a pass cut short
    again = list(held_out)
    assert len(first) == len(again) > 2
    for a, b in zip(first, again, strict=True):
        same(a, b)
        assert a["tokens"].shape == (4, 16)


def test_unshuffled_text_comes_in_order(tmp_path, cache_path):
    (tmp_path / "a.txt").write_text("0123456789" * 30)
    batch = next(batches(files(tmp_path / "a.txt", shuffle=False)))
    assert bytes(batch["tokens"].ravel().tolist()) == b"0123456789" * 6 + b"0123"


def test_the_seed_orders_the_rows(tmp_path, cache_path):
    def first(seed):
        return rows_of(next(batches(files(texts(tmp_path / "texts"), seed=seed))))

    assert first(0) == first(0) != first(1)
    assert len(list(cache_path.glob("tokens-*"))) == 1  # tokenised once for all seeds


def every_source(tmp_path):
    return [
        files(texts(tmp_path / "texts")),
        DataConfig(source="grammar", seq_len=16),
        hub(tmp_path / "hub", records=90),
    ]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_saved_position_resumes_bit_equal(tmp_path, cache_path, split):
    for cfg in every_source(tmp_path):
        cfg = cfg.model_copy(update={"validation_fraction": 0.5})
        running = batches(cfg, split=split)
        for taken in (0, 1, 2, 5):
            for _ in range(taken):
                next(running)
            state = json.loads(json.dumps(running.get_state()))
            want = [next(running) for _ in range(3)]
            resumed = batches(cfg, split=split)
            resumed.set_state(state)
            for batch in want:
                same(batch, next(resumed))
            resumed.set_state(state)  # going back is the same
            same(want[0], next(resumed))
            resumed.close()
            running.set_state(state)


def test_a_position_in_other_data_is_refused(tmp_path, cache_path):
    folder = texts(tmp_path / "texts")
    state = batches(files(folder)).get_state()
    with pytest.raises(UserError, match="other data"):
        batches(files(folder, seed=1)).set_state(state)
    (folder / "00.txt").write_text("changed")
    with pytest.raises(UserError, match="other data"):
        batches(files(folder)).set_state(state)


def test_touching_or_moving_the_text_does_not_lose_the_position(tmp_path, cache_path):
    folder = texts(tmp_path / "texts")
    running = batches(files(folder))
    next(running)
    os.utime(folder / "00.txt", (1, 1))
    moved = batches(files(folder.rename(tmp_path / "moved")))
    moved.set_state(running.get_state())
    same(next(running), next(moved))


def test_another_batch_size_goes_on_at_the_same_row(tmp_path, cache_path):
    cfg = files(texts(tmp_path / "texts"))
    small = batches(cfg, 2)
    for _ in range(6):
        next(small)
    large = batches(cfg, 4)
    large.set_state(small.get_state())
    assert rows_of(next(large)) == rows_of(next(small)) + rows_of(next(small))
    with pytest.raises(UserError, match=r"row 16 of batches of 2: set train.global_batch=2"):
        batches(cfg, 5).set_state(small.get_state())


# --- processes and devices ---------------------------------------------------------------------


@given(parts=st.sampled_from([1, 2, 3, 4, 6, 12]), rows=st.integers(1, 40), data=st.data())
def test_a_global_batch_does_not_depend_on_the_number_of_processes(parts, rows, data):
    windows = np.arange(rows * 2).reshape(rows, 2)
    placements = [
        SimpleNamespace(shape=(12, 1), rows=part) for part in np.split(np.arange(12), parts)
    ]
    readers = [LocalWindows(windows, placement) for placement in placements]
    assert {len(reader) for reader in readers} == {-(-rows // 12)}
    batch = data.draw(st.integers(0, len(readers[0]) - 1))
    got = np.concatenate([reader[batch] for reader in readers])
    want = windows[12 * batch : 12 * batch + 12]
    np.testing.assert_array_equal(got[: len(want)], want)
    assert (got[len(want) :] == packing.PAD).all()


def test_on_a_mesh_batches_are_the_same_arrays_sharded(tmp_path, cache_path):
    import jax

    from minitext.sharding.mesh import make_mesh

    for cfg in every_source(tmp_path):
        mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
        placed, plain = batches(cfg, mesh=mesh), batches(cfg)
        for _ in range(3):
            batch = next(placed)
            assert batch["tokens"].sharding.spec == jax.P(("data", "fsdp", "expert"), None)
            assert batch["tokens"].addressable_data(0).shape == (1, 16)
            same({key: np.asarray(value) for key, value in batch.items()}, next(plain))
    with pytest.raises(UserError, match=r"global_batch=6 is not divisible .* a multiple of 4"):
        batches(files(tmp_path / "texts"), 6, mesh=mesh)


WORKER = """
import sys
import jax
port, index = sys.argv[1:3]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
import numpy as np
from minitext.config import DataConfig, MeshConfig
from minitext.data import make_batches
from minitext.sharding.mesh import make_mesh
from jax.experimental.multihost_utils import process_allgather
cfg = DataConfig(source="grammar", seq_len=8)
plain = make_batches(cfg, vocab=300, global_batch=4)
for sizes in (dict(fsdp=4), dict(fsdp=2, tensor=2), dict(tensor=4)):
    mesh = make_mesh(MeshConfig(data=1, **sizes))
    placed = make_batches(cfg, mesh, vocab=300, global_batch=4)
    plain.set_state(placed.get_state())
    for _ in range(3):
        batch, want = next(placed), next(plain)
        for key in want:
            np.testing.assert_array_equal(process_allgather(batch[key], tiled=True), want[key])
print("equal")
"""


@pytest.mark.audit  # in a job of two processes they train on the batches of one, too
def test_two_processes_make_the_batch_of_one():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"XLA_FLAGS": QUICK_FLAGS}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(port), str(i)], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]  # fmt: skip
    for worker in workers:
        out, err = worker.communicate(timeout=120)
        assert worker.returncode == 0 and "equal" in out, err


# --- local text --------------------------------------------------------------------------------


def test_the_standard_library_is_there():
    cfg = DataConfig()
    found = text_files.find_files(cfg)
    names = {path.name for path in found}
    assert {"ast.py", "argparse.py"} <= names and not any("test" in path.parts for path in found)
    assert sum(path.stat().st_size for path in found) > 4e6
    batch = next(batches(cfg.model_copy(update={"seq_len": 128})))
    assert batch["tokens"].shape == (4, 128) and batch["loss_mask"].mean() > 0.9


def test_each_kind_of_file_gives_its_documents(tmp_path, cache_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.md").write_text("# mark")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "zwei \\u00fc"}\n')
    pq.write_table(pa.table({"id": [1, 2, 3], "text": ["p", None, "q"]}), tmp_path / "d.parquet")
    (tmp_path / "e.csv").write_text("ignored")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "f.txt").write_text("ignored")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "g.py").write_text("code")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "gone.txt")
    opened = token_file.open_token_file(files(tmp_path), ByteTokenizer())
    starts = [0, *opened.ends[:-1]]
    found = [
        bytes(opened.tokens[a : b - 1].tolist()).decode()
        for a, b in zip(starts, opened.ends, strict=True)
    ]
    assert found == ["text", "# mark", "one", "zwei ü", "p", "q", "code"]
    assert (opened.tokens[opened.ends - 1] == EOD).all()
    assert text_files.find_files(files(tmp_path / "**" / "*.py")) == [tmp_path / "sub" / "g.py"]


@settings(max_examples=60)
@given(
    text=st.text(alphabet=st.sampled_from("ab  \n\té日🙂'.1"), max_size=120),
    size=st.integers(1, 30),
)
def test_a_file_read_in_pieces_has_the_ids_of_the_whole(text, size, tmp_path_factory):
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    path.write_bytes(text.encode())
    tokenizer = train_bpe(["ab aba bab  \n\n a é日 ab' 11. aab"], 290)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "PIECE_BYTES", size)
        pieces = list(text_files.read_file(path, "text"))
    assert "".join(piece for piece, _ in pieces) == text
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True] * bool(text)
    cut = [i for piece, _ in pieces for i in tokenizer.encode(piece)]
    assert tokenizer.decode(cut) == text
    if len(max(re.findall(r"\S+|\s+", text), key=len, default="").encode()) < size / 4:
        assert cut == tokenizer.encode(text)  # there was always a place to cut at


LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def published(kind):
    """Tokenizers as they are published: tokens have punctuation and line ends, or begin with a sign for a space."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    if kind in ("line ends", "a space", "spaces"):
        made = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(kind != "line ends", use_regex=kind == "a space")
        split = [] if kind == "a space" else [pre_tokenizers.Split(Regex(LLAMA3), "isolated")]
        made.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
        made.train_from_iterator(["ab; \n\n);\n ab );\n\n\té 12345 );\n"] * 9, trainer)
        made.add_special_tokens(["</s>"])
        return read_published(made.to_str(), "</s>", "here")
    pairs = [("▁", "▁"), ("▁", "a"), ("▁a", "b"), (")", ";")]
    names = ["<unk>", "</s>", *"▁ab);12345\n\té", *map("".join, pairs)]
    made = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, pairs, unk_token="<unk>"))
    if kind == "prepended":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.add_special_tokens(["</s>"])
    return read_published(made.to_str(), "</s>", "here")


@pytest.mark.parametrize("kind", ["line ends", "a space", "spaces", "prepended", "first"])
def test_a_published_tokenizer_sees_a_document_as_a_whole(kind, tmp_path, cache_path, monkeypatch):
    """Also where a document is read in pieces: nothing is put before those, and no token is cut."""
    tokenizer, rng = published(kind), np.random.default_rng(0)
    words, spaces = ["a", "ab", "12345", "é"], [" ", "\n", "  ", "\n\n\t", " \n"]
    for name in "abcd":
        text = "".join(
            rng.choice(words) + rng.choice(spaces) + rng.choice(["", ");\n", ");", ");\n\n"])
            for _ in range(rng.integers(1, 200))
        )
        (tmp_path / f"{name}.txt").write_text(text)
    monkeypatch.setattr(text_files, "PIECE_BYTES", 128)
    monkeypatch.setattr(token_file, "BATCH_CHARACTERS", 500)  # a part of a document
    assert len(list(text_files.read_file(tmp_path / "d.txt", "text"))) > 3
    found = token_file.open_token_file(files(tmp_path / "*.txt"), tokenizer)
    texts = [(tmp_path / f"{name}.txt").read_text() for name in "abcd"]
    want = [[*ids, tokenizer.eod_id] for ids in tokenizer.encode_batch(texts)]
    assert found.ends.tolist() == np.cumsum([len(ids) for ids in want]).tolist()
    assert found.tokens.tolist() == list(itertools.chain(*want))


def test_bpe_batches_are_text_again(tmp_path, cache_path):
    from minitext.data.rows import make_tokenizer

    cfg = files(texts(tmp_path / "texts"), tokenizer="bpe", shuffle=False)
    tokenizer = make_tokenizer(cfg, 300)
    batch = next(batches(cfg))
    want = "".join(path.read_text() for path in text_files.find_files(cfg))
    assert want.startswith(tokenizer.decode(batch["tokens"].ravel())[:-1])
    (tmp_path / "texts" / "new.txt").write_text("a run goes on with its own tokenizer " * 9)
    assert batches(cfg, tokenizer=tokenizer)._about != batches(cfg)._about
    with pytest.raises(UserError, match=r"model\.vocab=290 .* set model\.vocab to 300"):
        make_batches(cfg, vocab=290, global_batch=4, tokenizer=tokenizer)


BAD = {
    "missing": (None, "does not exist"),
    "glob*": (None, "matches no file"),
    "a.csv": (b"x", r"\.csv: its name must end in one of \.txt"),
    "empty.txt": (b"", "has no text in it"),
    "short.txt": (b"0123456789", r"seq_len=16 .* 11 tokens .* set it to 5 or less"),
    "one.txt": (b"x", "give more text"),
    "latin.txt": (b"caf\xe9 au lait", "not UTF-8: byte 3 is 0xe9"),
    "cut.txt": (b"aaaaaaaaa\xc3", "not UTF-8: byte 9 is 0xc3"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": \n', r"bad\.jsonl:2 is not a JSON object"),
    "list.jsonl": (b"[1]", r"list\.jsonl:1 is a JSON list: write each record in a line"),
    "key.jsonl": (
        b'{"content": "a", "id": 1}',
        r"key\.jsonl:1: no 'text' among content, id: set data.text_key",
    ),
    "number.jsonl": (b'{"text": 5}', r"number\.jsonl:1: 'text' holds int, not text"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}', "not UTF-8: byte 24 is 0xe9"),
    "lone.jsonl": (b'{"text": "\\ud800"}', r"U\+D800"),
    "bad.parquet": (b"PAR1 no", r"bad\.parquet is not a Parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(name, tmp_path, cache_path):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        batches(files(tmp_path / name))
    assert "\n" not in str(error.value)
    assert not list(cache_path.glob(".*"))  # nothing half-written is left


def test_a_folder_without_text_and_a_column_that_is_missing(tmp_path, cache_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder without a \.txt"):
        batches(files(tmp_path / "folder"))
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: no 'text' among body, id"):
        batches(files(tmp_path / "a.parquet"))
    pq.write_table(pa.table({"text": [1]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: row 0: 'text' holds int"):
        batches(files(tmp_path / "b.parquet"))


def test_the_byte_of_an_error_is_right_across_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PIECE_BYTES", 7)
    for at in range(1, 40):
        text = ("é" * 40).encode()[: 2 * at] + b"\xff" + b"a" * 9
        (tmp_path / "a.txt").write_bytes(text)
        with pytest.raises(UserError, match=f"byte {2 * at} is 0xff"):
            list(text_files.read_file(tmp_path / "a.txt", "text"))


# --- the cache ---------------------------------------------------------------------------------


def test_the_cache_is_used_again_and_remade_when_damaged(tmp_path, cache_path, monkeypatch):
    cfg = files(texts(tmp_path / "texts"))
    want = next(batches(cfg))
    (entry,) = cache_path.glob("tokens-*")
    before = (entry / "tokens.bin").stat().st_ino
    same(want, next(batches(cfg)))
    assert (entry / "tokens.bin").stat().st_ino == before
    for name in ("tokens.bin", "ends.npy", "about.json"):
        data = (entry / name).read_bytes()
        for cut in (0, len(data) // 2):
            (entry / name).unlink()  # a file that is mapped must not be cut short in place
            (entry / name).write_bytes(data[:cut])
            same(want, next(batches(cfg)))
    (tmp_path / "texts" / "00.txt").write_text("changed")
    next(batches(cfg))
    assert len(list(cache_path.glob("tokens-*"))) == 2


def test_an_entry_that_another_process_finishes_meanwhile_stays(tmp_path, cache_path, monkeypatch):
    cfg, read, entries = files(texts(tmp_path / "texts")), token_file._read, []
    open_files = []  # whose numbers no new file gets

    def read_before_the_other_ends(path):
        monkeypatch.setattr(token_file, "_read", read)
        assert read(path) is None
        open_files.append(token_file.open_token_file(cfg, ByteTokenizer()))
        entries.append((path / "tokens.bin").stat().st_ino)

    monkeypatch.setattr(token_file, "_read", read_before_the_other_ends)
    token_file.open_token_file(cfg, ByteTokenizer())
    (entry,) = cache_path.glob("tokens-*")
    assert [(entry / "tokens.bin").stat().st_ino] == entries


def test_many_at_once_make_one_entry(tmp_path, cache_path):
    cfg, digests = files(texts(tmp_path / "texts")), []
    start = threading.Barrier(4)

    def work():
        start.wait()
        digests.append(token_file.open_token_file(cfg, ByteTokenizer()).digest)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(digests) == 4 and len(set(digests)) == 1
    assert len(list(cache_path.iterdir())) == 1


def test_a_cache_that_cannot_be_used_says_so(tmp_path, monkeypatch):
    cfg = files(texts(tmp_path / "texts"))
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path / "texts" / "00.txt"))
    with pytest.raises(UserError, match=r"cannot use the cache directory .*MINITEXT_CACHE"):
        batches(cfg)
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path / "full"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_file, "_write", full)
    with pytest.raises(UserError, match="No space left on device"):
        batches(cfg)
    assert not list((tmp_path / "full").iterdir())


def test_importing_is_cheap():
    heavy = "{'grain', 'datasets', 'tokenizers', 'pyarrow', 'rich.progress', 'jax'}"
    code = f"import sys, minitext.data; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# --- grammar -----------------------------------------------------------------------------------


def test_the_automaton_is_a_language():
    it = grammar.automaton()
    for edges in it.edges:
        assert sum(share for share, _ in edges.values()) == 256
        assert all(share > 0 for share, _ in edges.values())
    assert it.visits.min() > 0
    np.testing.assert_allclose(it.visits[0], 1)
    # Visits balance: what flows into a state flows out of it (one document begins and ends).
    flow = np.zeros(len(it.edges))
    for state, edges in enumerate(it.edges):
        for share, after in edges.values():
            flow[after] += it.visits[state] * share / 256
    np.testing.assert_allclose(flow, it.visits, rtol=1e-9)
    assert it.entropy[0] == 0  # a document's first byte, which is no target, carries nothing


def test_the_entropy_rate_is_what_a_long_sample_converges_to():
    rng = np.random.default_rng(7)
    tokens = grammar.generate(rng, 400_000)
    tokens = tokens[: np.flatnonzero(tokens == EOD)[-1] + 1]
    nats = grammar.grammar_nll(tokens)
    assert np.isfinite(nats).all()
    ends = np.flatnonzero(tokens == EOD) + 1
    information = np.add.reduceat(nats, [0, *ends[:-1]])
    targets = np.diff([0, *ends]) - 1
    # Documents are independent, so the ratio of sums has the delta method's error.
    ratio, rate = information.sum() / targets.sum(), grammar.grammar_entropy_rate()
    error = np.std(information - ratio * targets) / targets.mean() / np.sqrt(len(targets))
    assert error < 0.005 * rate
    assert abs(ratio - rate) < 4 * error


def test_neighbouring_letters_do_not_tell_it_all():
    tokens = grammar.generate(np.random.default_rng(3), 300_000)
    previous = None
    for order in (1, 2, 4):
        context = sum(
            tokens[i : len(tokens) - order + i].astype(np.int64) * 257**i for i in range(order)
        )
        pair = context * 257 + tokens[order:]

        def entropy(values):
            p = np.unique(values, return_counts=True)[1] / len(values)
            return -(p * np.log(p)).sum()

        conditional = entropy(pair) - entropy(context)
        assert conditional > 1.3 * grammar.grammar_entropy_rate()
        assert previous is None or conditional < previous
        previous = conditional


def ngram_nats(train, test, orders):
    """Held-out nats a token of n-gram models, each falling back on the one before (Witten and Bell 1991)."""

    def context(tokens, order):
        hashed = np.zeros(len(tokens), np.uint64)
        for k in range(1, order + 1):
            before = np.full(len(tokens), 300, np.uint64)
            before[k:] = tokens[:-k]
            hashed = (
                hashed * np.uint64(6364136223846793005) + before + np.uint64(1442695040888963407)
            )
        return hashed

    def counts(keys, asked):
        known, times = np.unique(keys, return_counts=True)
        place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        return np.where(known[place] == asked, times[place], 0)

    def follow(hashed, tokens):
        return (hashed ^ (hashed >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + tokens

    train, test = train.astype(np.uint64), test.astype(np.uint64)
    targets = np.concatenate([[False], test[:-1] != EOD])
    p, nats = np.full(len(test), 1 / 257), []
    for order in orders:
        seen, asked = context(train, order), context(test, order)
        pairs = follow(seen, train)
        total, both = counts(seen, asked), counts(pairs, follow(asked, test))
        kinds = counts(seen[np.unique(pairs, return_index=True)[1]], asked)
        p = np.where(total > 0, (both + kinds * p) / np.maximum(total + kinds, 1), p)
        nats.append(-np.log(p[targets]).mean())
    return nats


@pytest.mark.audit
def test_an_ngram_model_approaches_the_entropy_rate_from_above():
    rate, test = grammar.grammar_entropy_rate(), grammar.generate(np.random.default_rng(1), 100_000)
    excess = []
    for size in (20_000, 200_000, 2_000_000):
        train = grammar.generate(np.random.default_rng(2), size)
        nats = ngram_nats(train, test, (1, 2, 3, 4, 6, 8, 12, 16))
        assert min(nats) > rate
        excess.append(min(nats) / rate - 1)
    # Ten times the text takes a third or more of what is left away, and no model of any order falls below.
    assert excess[1] < 2 / 3 * excess[0] and excess[2] < 2 / 3 * excess[1] < 0.22


def test_rows_are_cut_from_the_stationary_stream():
    made = batches(DataConfig(source="grammar", seq_len=64), 32)
    assert made.floor == grammar.grammar_entropy_rate() > 0
    batch = [next(made) for _ in range(150)]
    tokens = np.concatenate([b["tokens"] for b in batch])
    # No position in a row is special: each holds the end of a document equally often.
    share = (tokens == EOD).mean(axis=0)
    expected = 1 / grammar.automaton().visits.sum()
    error = np.sqrt(expected / len(tokens))
    assert np.abs(share - expected).max() < 4.5 * error
    assert len({row.tobytes() for row in tokens}) > 0.99 * len(tokens)
    for row in tokens[:200]:  # what follows an end of document is a document
        for start in np.flatnonzero(row == EOD) + 1:
            assert np.isfinite(grammar.grammar_nll(row[start:])).all()


def test_grammar_rows_are_a_function_of_seed_split_and_index():
    def digest(seed, split, index):
        return hashlib.sha256(grammar.Windows(32, seed, split)[index]).hexdigest()

    places = list(itertools.product((0, 1), ("train", "validation"), (0, 1, 1000)))
    found = [digest(*place) for place in places]
    assert len(set(found)) == len(found) and found == [digest(*place) for place in places]
    held = batches(DataConfig(source="grammar", seq_len=8), 100, split="validation")
    made = list(held)
    assert sum(len(rows_of(batch)) for batch in made) == grammar.VALIDATION_ROWS
    assert made[-1]["tokens"].shape == (100, 8)


# --- ArrayRecord -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder of texts' configuration, and that of the rows packed from it."""
    folder = tmp_path_factory.mktemp("pack")
    rng = np.random.default_rng(0)
    (folder / "texts").mkdir()
    for i in range(40):
        text = "".join(rng.choice(list("abcdef \n"), rng.integers(1, 400)))
        (folder / "texts" / f"{i}.txt").write_text(text)
    direct = DataConfig(source="files", path=str(folder / "texts"), seq_len=24, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINITEXT_CACHE", str(folder / "cache"))
        counts = pack_source(direct, folder / "packed", vocab=320, shards=3)
    assert counts["train"] > 10 * counts["validation"] > 0
    return direct, direct.model_copy(
        update={"source": "arrayrecord", "path": str(folder / "packed")}
    )


@pytest.mark.parametrize("split", ["train", "validation"])
def test_packed_rows_give_the_batches_of_the_text(packed, split, cache_path):
    direct, rows = (batches(cfg, 16, split=split) for cfg in packed)
    made = list(itertools.islice(rows, 80))  # of training, more than an epoch
    for ours, theirs in zip(made, direct, strict=False):
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name])
    assert len(made) == 80 or split == "validation"


def test_packed_rows_resume_where_they_were(packed):
    first = batches(packed[1], 16)
    for _ in range(7):
        next(first)
    position, expected = json.loads(json.dumps(first.get_state())), next(first)
    other = batches(packed[1], 16)
    other.set_state(position)
    np.testing.assert_array_equal(next(other)["tokens"], expected["tokens"])


def test_packed_text_brings_its_tokenizer(packed, tmp_path, cache_path):
    cfg = packed[0].model_copy(update={"tokenizer": "bpe"})
    pack_source(cfg, tmp_path / "bpe", vocab=300, shards=1)
    read = packed[1].model_copy(update={"path": str(tmp_path / "bpe")})
    tokenizer = make_tokenizer(read, 300)
    assert 257 < tokenizer.vocab_size <= 300
    assert tokenizer.to_json() == make_tokenizer(cfg, 300).to_json()
    assert next(batches(read, 4))["tokens"].max() > 256


def damage(folder, how):
    if how == "seq_len":
        return {"seq_len": 25}
    if how == "no folder":
        return {"path": str(folder / "nothing")}
    target = sorted(folder.glob("train*"))[1]
    if how == "a file gone":
        target.unlink()
    elif how == "a file of nothing":
        target.write_bytes(b"")
    else:
        shutil.copy(sorted(folder.glob("validation*"))[0], target)
    return {}


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("seq_len", "was packed with data.seq_len=24, not 25"),
        ("no folder", "is not a packed folder"),
        ("a file gone", "train-00001-of-00003.array_record is missing"),
        ("a file of nothing", "pack the text again"),
        ("another's file", "train rows and should have"),
    ],
)
def test_what_is_wrong_with_a_packed_folder_is_one_line(packed, tmp_path, how, told):
    shutil.copytree(packed[1].path, tmp_path / "copy")
    cfg = packed[1].model_copy(update={"path": str(tmp_path / "copy")})
    cfg = cfg.model_copy(update=damage(tmp_path / "copy", how))
    with pytest.raises(UserError, match=told) as error:
        batches(cfg, 16)
    assert "\n" not in str(error.value)


def test_packing_is_whole_or_not_at_all(packed, tmp_path, cache_path):
    with pytest.raises(UserError, match="exists: name a folder that does not"):
        pack_source(packed[0], packed[1].path, vocab=320, shards=1)
    with pytest.raises(UserError, match="data.source=grammar cannot be packed"):
        pack_source(DataConfig(source="grammar"), tmp_path / "a", vocab=320, shards=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file/b"):
        pack_source(packed[0], tmp_path / "file" / "b", vocab=320, shards=1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["file"]


# --- Hugging Face ------------------------------------------------------------------------------


def hub(folder, shards=3, records=30, **values):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for shard in range(shards):
        rows = [f"<{shard}.{i}>" + "x" * (i * 5 % 17) for i in range(records)]
        table = pa.table({"text": rows, "id": list(range(records))})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=4)
    values = {"hf_name": "parquet", "path": str(folder / "*.parquet"), "seq_len": 16, **values}
    return DataConfig(source="hf", **values)


def streamed(cfg, split, part=0, parts=1, windows=None):
    """The documents of one process, as text."""
    from minitext.data import streaming

    placement = SimpleNamespace(shape=(2 * parts, 16), rows=[2 * part, 2 * part + 1])
    stream = iter(streaming.StreamedWindows(cfg, ByteTokenizer(), placement, split))
    tokens = [
        t for rows in itertools.islice(stream, windows) for row in rows for t in row[:-1] if t >= 0
    ]
    return "".join(chr(t) if t < 256 else "\n" for t in tokens).split("\n")


def every_record(shards=3, records=30):
    return {f"<{s}.{i}>" + "x" * (i * 5 % 17) for s in range(shards) for i in range(records)}


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_every_record_goes_to_one_process_and_one_split(tmp_path, parts):
    cfg = hub(tmp_path / "hub", validation_fraction=0.3)
    held = [set(streamed(cfg, "validation", part, parts)) - {""} for part in range(parts)]
    seen = [set(streamed(cfg, "train", part, parts, windows=250 // parts)) for part in range(parts)]
    seen = [{record for record in share if record in every_record()} for share in seen]
    for one, other in itertools.combinations(held + seen, 2):
        assert not one & other
    assert set().union(*held) | set().union(*seen) == every_record()
    assert 0.1 < len(set().union(*held)) / 90 < 0.5


def test_streamed_epochs_differ_in_the_order_of_shards(tmp_path):
    cfg = hub(tmp_path / "hub", shards=5, validation_fraction=0.01)
    found = [r for r in streamed(cfg, "train", windows=400) if r in every_record(5)]
    orders = [[r[1] for r in found[i : i + 149]] for i in (0, 149, 298)]
    assert len({tuple(dict.fromkeys(order)) for order in orders}) > 1
    plain = streamed(cfg.model_copy(update={"shuffle": False}), "train", windows=60)
    assert plain[0].startswith("<0.0>") and plain[20].startswith("<0.")


def in_two_processes(monkeypatch, body):
    """Runs `body` in two threads that take themselves for the processes of a job, each with half of every batch."""
    barrier, said, me = threading.Barrier(2, timeout=60), {}, threading.local()

    def share_bytes(data):
        said[me.index] = data
        barrier.wait()
        found = [said[0], said[1]]
        barrier.wait()
        return found

    class Half:
        def __init__(self, _, global_batch, seq_len):
            self.shape, half = (global_batch, seq_len), global_batch // 2
            self.rows = range(me.index * half, (me.index + 1) * half)

        def __call__(self, batch):
            return batch

    def run(index):
        me.index = index
        return body()

    monkeypatch.setattr(batches_module, "share_bytes", share_bytes)
    monkeypatch.setattr(batches_module, "Placement", Half)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_each_process_goes_on_in_its_own_part_of_a_stream(tmp_path, monkeypatch):
    cfg = hub(tmp_path / "hub", shards=4)

    def body():
        whole = batches(cfg)
        for _ in range(5):
            next(whole)
        state = whole.get_state()
        return json.dumps(state), [next(whole) for _ in range(9)]

    (state, first), (also, second) = in_two_processes(monkeypatch, body)
    assert state == also  # whichever a checkpoint stores

    def resume():
        again = batches(cfg)
        again.set_state(json.loads(state))
        return [next(again) for _ in range(9)]

    for found, want in zip(in_two_processes(monkeypatch, resume), (first, second), strict=True):
        for pair in zip(found, want, strict=True):
            same(*pair)
    monkeypatch.undo()
    with pytest.raises(UserError, match="parts, 2 of them, and here they would be 1: start as"):
        batches(cfg).set_state(json.loads(state))


def test_processes_validate_for_as_many_steps_whatever_their_parts_hold(tmp_path, monkeypatch):
    cfg = hub(tmp_path / "hub", shards=2, validation_fraction=0.3)
    (tmp_path / "hub" / "1.parquet").unlink()
    shutil.copy(tmp_path / "hub" / "0.parquet", tmp_path / "hub" / "1.parquet")
    import pyarrow.parquet as pq

    few = pq.read_table(tmp_path / "hub" / "1.parquet").slice(0, 6)
    pq.write_table(few, tmp_path / "hub" / "1.parquet")

    def body():
        held_out = batches(cfg, split="validation")
        return [[batch["loss_mask"].sum() for batch in held_out] for _ in range(2)]

    (first, again), (second, too) = in_two_processes(monkeypatch, body)
    assert len(first) == len(second) and first == again and second == too
    assert first[-1] > 0 == second[-1]  # padding


def test_a_stream_too_short_to_hold_anything_out_is_one_line(tmp_path):
    cfg = hub(tmp_path / "hub", shards=1, records=3, validation_fraction=0.001)
    with pytest.raises(
        UserError, match="none of it is held out .*: raise data.validation_fraction"
    ):
        next(iter(batches(cfg, split="validation")))


@pytest.fixture
def empty_hub(monkeypatch):
    """A Hub on this machine that has no datasets; gives the requests it got."""
    from huggingface_hub import constants

    asked = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield asked
        server.shutdown()


def test_a_dataset_that_the_hub_does_not_have_is_one_line(empty_hub, caplog):
    cfg = DataConfig(source="hf", hf_name="no/such", seq_len=16)
    with pytest.raises(
        UserError, match="data.hf_name=no/such is not a dataset of .*check the name"
    ) as error:
        batches(cfg)
    assert "\n" not in str(error.value) and not caplog.records
    assert len([path for path in empty_hub if "no/such" in path]) == 1


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(monkeypatch, caplog):
    from huggingface_hub import constants

    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        start = time.perf_counter()
        with pytest.raises(
            UserError, match=f"{address} does not answer .*HF_HUB_OFFLINE=1"
        ) as error:
            batches(DataConfig(source="hf", hf_name="no/such", seq_len=16))
    assert "\n" not in str(error.value) and not caplog.records
    assert time.perf_counter() - start < 5


def test_jsonl_through_datasets_and_its_errors(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"body": "line " * 9}) + "\n" for _ in range(40))
    )
    cfg = DataConfig(
        source="hf", hf_name="json", path=str(tmp_path / "a.jsonl"), seq_len=16, text_key="body"
    )
    assert next(batches(cfg))["loss_mask"].sum() > 60
    with pytest.raises(UserError, match=r"no 'text' among body: set data.text_key"):
        next(batches(cfg.model_copy(update={"text_key": "text"})))
    with pytest.raises(
        UserError, match=r"cannot open data.hf_name=json .*data.hf_split=other"
    ) as error:
        batches(cfg.model_copy(update={"hf_split": "other"}))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="does not exist"):
        batches(cfg.model_copy(update={"path": str(tmp_path / "none.jsonl")}))
    (tmp_path / "a.jsonl").write_text('{"body": ""}\n')
    with pytest.raises(UserError, match="has no text in 'body' to train on"):
        next(batches(cfg))


def test_bpe_learns_from_the_first_streamed_records(tmp_path, cache_path):
    cfg = hub(tmp_path / "hub", tokenizer="bpe")
    assert next(batches(cfg))["tokens"].max() > 256


def test_windows_come_in_the_order_they_are_given():
    tokens = np.arange(21, dtype=np.uint16)
    stream = packing.TokenStream(tokens, np.array([21]))
    windows = packing.Windows(stream, 4, 1, 4, np.array([2, 0, 1]))
    assert [int(windows[i][0]) for i in range(3)] == [12, 4, 8]
