"""Rows of conversations and pairs: nothing twice, nothing mixed, and the same after a restart."""

import itertools
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitext.config.config import load_config
from minitext.config.data import DataConfig
from minitext.config.sections import MeshConfig
from minitext.data import conversation_file, conversation_rows, preview
from minitext.data.batches import LocalRows, make_batches
from minitext.data.chat import open_template, read_chat, write_chat
from minitext.data.conversation_rows import best_fit, open_chat_rows
from minitext.data.tokenizer import END, ByteTokenizer, read_published, train_bpe
from minitext.errors import UserError
from tests.data.test_chat_mask import CHATML, published

BYTES = ByteTokenizer()
KEYS = {"tokens", "targets", "positions", "segment_ids", "loss_mask"}
T = 96


@pytest.fixture(autouse=True)
def cache_path(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer(number):
    return f"answer {number} " + "!" * (number * 7 % 23)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def conversations(path, count=40):
    def turn(role, content):
        return {"role": role, "content": content}

    return write(
        path,
        ({"messages": [turn("user", f"{n}?"), turn("assistant", answer(n))]} for n in range(count)),
    )


def pairs(path, count=20):
    return write(
        path,
        (
            {"prompt": f"{n}?", "chosen": answer(n)[:30], "rejected": f"no {n}"}
            for n in range(count)
        ),
    )


def chats(path, **values):
    return DataConfig(**{"source": "conversations", "path": str(path), "seq_len": T, **values})


def rows(cfg, split="train"):
    found = open_chat_rows(cfg, BYTES, open_template(cfg, BYTES), split)
    finite = len(found.rows) < sys.maxsize
    return found, [found.rows[i] for i in range(len(found.rows) if finite else 0)]


def texts(row):
    """Each segment of a row: all its tokens, and those that count, as texts."""
    found = []
    for segment in range(1, row["segment_ids"].max() + 1):
        at = np.flatnonzero(row["segment_ids"] == segment)
        assert (row["positions"][at] == np.arange(len(at))).all()
        assert (np.diff(at) == 1).all()
        ids = np.concatenate([row["tokens"][at[:1]], row["targets"][at]])
        assert (ids[1:-1] == row["tokens"][at[1:]]).all()
        counts = row["targets"][at][row["loss_mask"][at] == 1]
        found.append(tuple("".join(preview.spell(BYTES, x.tolist())) for x in (ids, counts)))
    padding = row["segment_ids"] == 0
    for name in KEYS:
        assert not row[name][padding].any() and row[name].shape == (len(padding),)
        assert row[name].dtype == (np.float32 if name == "loss_mask" else np.int32)
    return found


def test_every_conversation_is_in_one_row_and_only_its_answer_counts(tmp_path):
    cfg = chats(conversations(tmp_path / "a.jsonl"), epochs=1)
    seen = []
    for split in ("train", "validation"):
        found, made = rows(cfg, split)
        assert found.left_out == () and found.turn_ends == {256}
        for row in made:
            for whole, counts in texts(row):
                number = int(counts.split()[1])
                assert counts == answer(number) + END
                assert whole == f"<|user|>\n{number}?\n<|assistant|>\n{counts}"
                seen.append(number)
        assert found.used == (38 if split == "train" else 2)
    assert sorted(seen) == list(range(40))


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 70))
def test_best_fit_loses_nothing_and_wastes_little(lengths, capacity):
    found = best_fit(np.array(lengths, int), capacity)
    assert sorted(i for row in found for i in row.tolist()) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in row) for row in found]
    assert all(total <= capacity for total in sums)
    # No two rows could be one: the first piece of the later row would have fitted the earlier.
    assert all(a + b > capacity for a, b in itertools.combinations(sums, 2))


def test_long_conversations_are_left_out_or_cut(tmp_path):
    path = conversations(tmp_path / "a.jsonl", 30)
    with path.open("a") as file:
        for question in ("short", "q" * 2 * T):
            turns = [("user", question), ("assistant", "x" * 2 * T)]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    found, made = rows(chats(path, epochs=1))
    assert found.left_out == (
        f"2 with more tokens than a row of data.seq_len has, such as {path}:31",
    )
    assert not any("xx" in counts for row in made for _, counts in texts(row))
    cfg = chats(path, epochs=1, too_long="cut", validation_fraction=0.01)
    found, made = rows(cfg)
    (line,) = found.left_out
    assert line.startswith("1 with no answer in what a row") and f"{path}:32" in line
    both = made + rows(cfg, "validation")[1]
    (cut,) = [counts for row in both for _, counts in texts(row) if "xx" in counts]
    before = len("<|user|>\nshort\n<|assistant|>\n")
    assert cut == "x" * (T + 1 - before)


def test_a_row_of_preferences_is_a_pair(tmp_path):
    path = pairs(tmp_path / "a.jsonl")
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "q", "chosen": "x" * T, "rejected": "y"}) + "\n")
        file.write(json.dumps({"prompt": "q", "chosen": "x", "rejected": "x"}) + "\n")
    found, made = rows(chats(path, source="preferences", epochs=1))
    assert len(made) == found.used == 19
    alike, long = found.left_out
    assert f"{path}:22" in alike and "more tokens" in long and f"{path}:21" in long
    for row in made:
        (chosen, good), (rejected, bad) = texts(row)
        number = int(bad[3:].removesuffix(END))
        assert good == answer(number)[:30] + END and bad == f"no {number}{END}"
        begin = f"<|user|>\n{number}?\n<|assistant|>\n"
        assert chosen == begin + good and rejected == begin + bad


def batches(cfg, global_batch=4, **more):
    return make_batches(cfg, vocab=300, global_batch=global_batch, **more)


@pytest.mark.parametrize("kind", ["conversations", "preferences"])
def test_it_resumes_at_every_position(kind, tmp_path):
    path = (conversations if kind == "conversations" else pairs)(tmp_path / "a.jsonl")
    cfg = chats(path, source=kind)
    first = batches(cfg)
    want, states = [], []
    for _ in range(12):  # more than an epoch
        states.append(json.loads(json.dumps(first.get_state())))
        want.append(next(first))
    first.close()
    second = batches(cfg)
    for position in (11, 0, 5, 4, 10, 1, 2, 3, 6, 7, 8, 9):
        second.set_state(states[position])
        for a, b in zip(want[position : position + 2], second, strict=False):
            assert a.keys() == b.keys() == KEYS
            assert all((a[name] == b[name]).all() for name in KEYS)
    second.close()


def test_epochs_have_orders_of_their_own_and_an_end(tmp_path):
    cfg = chats(conversations(tmp_path / "a.jsonl", 80), epochs=2)
    found, _ = rows(cfg)
    per_epoch = len(found.rows) // 2

    def order(epoch):
        return [
            found.rows[i]["tokens"].tobytes()
            for i in range(epoch * per_epoch, (epoch + 1) * per_epoch)
        ]

    assert order(0) != order(1) and sorted(order(0)) == sorted(order(1))
    made = batches(cfg)
    assert made.left() == -(-2 * per_epoch // 4) == len(list(made))
    plain = cfg.model_copy(update={"shuffle": False, "epochs": 1})
    first = texts(rows(plain)[1][0])[0][1]
    held_out = [texts(row) for row in rows(plain, "validation")[1]]
    numbers = {int(counts.split()[1]) for row in held_out for _, counts in row}
    assert int(first.split()[1]) == min(set(range(80)) - numbers)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_batch_does_not_depend_on_the_number_of_processes(parts, tmp_path):
    found, _ = rows(chats(conversations(tmp_path / "a.jsonl"), epochs=1))
    whole = LocalRows(found.rows, SimpleNamespace(shape=(8, T), rows=range(8)))
    shares = [
        LocalRows(found.rows, SimpleNamespace(shape=(8, T), rows=part))
        for part in np.split(np.arange(8), parts)
    ]
    assert len(found.rows) % 8, "the last batch is padded"
    for k in range(len(whole)):
        together = [share[k] for share in shares]
        for name in KEYS:
            assert (whole[k][name] == np.concatenate([one[name] for one in together])).all()


def test_a_mesh_holds_the_same_batches(tmp_path):
    import jax

    from minitext.sharding.mesh import make_mesh

    cfg = chats(conversations(tmp_path / "a.jsonl"))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    placed, plain = batches(cfg, mesh=mesh), batches(cfg)
    for a, b in itertools.islice(zip(placed, plain, strict=True), 3):
        assert all((np.asarray(a[name]) == b[name]).all() for name in KEYS)
    placed.close()
    plain.close()


def test_what_is_read_is_kept_and_read_again_when_something_changes(tmp_path, monkeypatch):
    path = conversations(tmp_path / "a.jsonl")
    cfg = chats(path)
    made = []
    write_once = conversation_file._write
    monkeypatch.setattr(
        conversation_file, "_write", lambda *args: made.append(args) or write_once(*args)
    )
    digests = [rows(cfg)[0].digest for _ in range(2)]
    rows(cfg, "validation")
    rows(cfg.model_copy(update={"seq_len": 80, "seed": 3}))
    assert len(made) == 1 and digests[0] == digests[1]
    template = tmp_path / "t.jinja"
    template.write_text(open_template(cfg, BYTES).template.replace("<|", "<"))
    other = rows(cfg.model_copy(update={"chat_template": str(template)}))[0].digest
    bpe = train_bpe(["an answer to it"] * 9, 270)
    open_chat_rows(cfg, bpe, open_template(cfg, bpe), "train")
    conversations(path, 41)
    assert len({*digests, other, rows(cfg)[0].digest}) == 3 and len(made) == 4


def test_a_run_that_resumes_reads_what_its_first_start_kept(tmp_path):
    """A run notes the tokens that end turns, here one that neither the model nor its tokenizer names as an end."""
    tokenizer = read_published(
        json.dumps(published("trimmed").published()), "<|endoftext|>", "here"
    )
    (tmp_path / "template.jinja").write_text(CHATML)
    cfg = chats(conversations(tmp_path / "a.jsonl"), chat_template=str(tmp_path / "template.jinja"))
    first = open_template(cfg, tokenizer)
    kept = conversation_file.open_conversation_file(cfg, tokenizer, first)
    write_chat(tmp_path / "published", first, kept.turn_ends)
    again = read_chat(tmp_path / "published", tokenizer)
    assert again.stops > first.stops
    assert conversation_file.open_conversation_file(cfg, tokenizer, again).path == kept.path


def test_a_damaged_entry_of_the_cache_is_made_again(tmp_path, cache_path):
    cfg = chats(conversations(tmp_path / "a.jsonl"))
    want = rows(cfg)[0].digest
    (entry,) = cache_path.glob("conversations-*")
    (entry / "learned.bin").write_bytes(b"")
    assert rows(cfg)[0].digest == want


def test_nothing_left_is_an_error_that_says_why(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    path = write(tmp_path / "a.jsonl", [{"messages": turns}, {"messages": turns[::-1]}])
    with pytest.raises(UserError) as error:
        batches(chats(path))
    assert "1 with an empty answer" in str(error.value) and "roles" in str(error.value)
    for count, source, said in (
        (0, "conversations", "it is empty"),
        (1, "preferences", "one pair"),
    ):
        made = pairs if source == "preferences" else conversations
        with pytest.raises(UserError, match=said):
            batches(chats(made(tmp_path / "b.jsonl", count), source=source))
    with pytest.raises(UserError, match="40 with more tokens than a row"):
        batches(chats(conversations(tmp_path / "c.jsonl"), seq_len=8))


def test_bpe_learns_from_what_is_said(tmp_path):
    made = batches(chats(conversations(tmp_path / "a.jsonl"), tokenizer="bpe"))
    first = next(made)
    made.close()
    assert first["tokens"].max() > 256 and first["loss_mask"].any()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.source=conversations"], "needs conversations: set data.path"),
        (["data.too_long=cut"], "has no effect with data.source=stdlib"),
        (["data.chat_template=a"], "has no effect with data.source=stdlib"),
        (
            ["data.source=preferences", "data.path=a", "data.too_long=cut"],
            "has no effect with data.source=preferences",
        ),
        (["data.source=conversations", "data.path=gs://b/a"], "is in a bucket"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(words, said):
    with pytest.raises(UserError, match=said):
        load_config("laptop", words)


def test_files_of_other_kinds_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    for path in (tmp_path / "a.txt", tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(UserError, match=r"\.jsonl, \.parquet|does not exist"):
            batches(chats(path))


@pytest.mark.parametrize("tokenizer", [BYTES, train_bpe(["Äpfel 🙂 and more"] * 9, 290)])
def test_a_preview_spells_every_token(tokenizer):
    text = f"Äpfel 🙂 日本{END}\n and more\x1b[31m"
    ids = tokenizer.encode_spelled([text])[0].ids.tolist()
    spelled = preview.spell(tokenizer, ids)
    assert "".join(spelled) == text and len(spelled) == len(ids)


def test_a_preview_shows_rows_and_counts(tmp_path):
    path = conversations(tmp_path / "a.jsonl")
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "q", "completion": ""}) + "\n")
    cfg = preview.with_kind(chats(path))
    found = preview.preview(cfg, BYTES, open_template(cfg, BYTES), 2)
    said = json.loads(json.dumps(found.to_json()))
    assert len(said["rows"]) == 2 and said["used"] == 38 and not said["pairs"]
    (line,) = said["left_out"]
    assert line.startswith("1 with an empty answer")
    text = "\n".join(line.plain for line in preview.shown(found))
    assert "⟦answer" in text and f"{END}⟧" in text and "left out: 1 with" in text
    assert preview.with_kind(chats(pairs(tmp_path / "b.jsonl"))).source == "preferences"
    assert conversation_rows.LONG not in text
