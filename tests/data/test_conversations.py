"""Conversations: every schema is read, and every kind of bad data is counted or refused."""

import json

import pytest

from minitext.config.data import DataConfig
from minitext.data import conversations
from minitext.data.conversations import Conversation, Fault, Unusable, conversation_of, pair_of
from minitext.errors import UserError

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
Q2, A2 = {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}
B = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("record", "messages", "first"),
    [
        ({"messages": [Q, A]}, (Q, A), 0),
        ({"messages": [SYSTEM, Q, A, Q2, A2], "id": 3}, (SYSTEM, Q, A, Q2, A2), 0),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            (Q, A),
            0,
        ),
        ({"conversations": [{"role": "user", "content": "q", "name": "Ann"}, A]}, (Q, A), 0),
        ({"prompt": "q", "completion": "a"}, (Q, A), 1),
        ({"prompt": [SYSTEM, Q, A, Q2], "completion": [A2]}, (SYSTEM, Q, A, Q2, A2), 4),
        ({"messages": [Q, A, Q2]}, (Q, A), 0),  # nobody answers the last question
        ({"messages": None, "conversations": [Q, A]}, (Q, A), 0),
        ({"conversations": [Q, A], "system": "s", "tools": "[]"}, (SYSTEM, Q, A), 0),
        ({"messages": [SYSTEM, Q, A], "system": "other"}, (SYSTEM, Q, A), 0),
        ({"prompt": "q", "completion": "a", "system": "s", "label": True}, (SYSTEM, Q, A), 2),
        ({"messages": [Q, A | {"weight": 1, "tool_calls": None}], "tools": []}, (Q, A), 0),
    ],
)
def test_every_schema_of_conversations_is_read(record, messages, first):
    assert conversation_of(record, "here") == Conversation(messages, first)


@pytest.mark.parametrize(
    ("record", "common", "chosen", "rejected"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, (Q,), (A,), (B,)),
        ({"prompt": [SYSTEM, Q], "chosen": [A], "rejected": [B]}, (SYSTEM, Q), (A,), (B,)),
        ({"prompt": "q", "chosen": [Q, A], "rejected": [Q, B]}, (Q,), (A,), (B,)),
        ({"system": "s", "prompt": "q", "chosen": "a", "rejected": "b"}, (SYSTEM, Q), (A,), (B,)),
        ({"chosen": [Q, A, Q2, A2], "rejected": [Q, A, Q2, B]}, (Q, A, Q2), (A2,), (B,)),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
            (Q,),
            (A,),
            (B,),
        ),
    ],
)
def test_every_schema_of_pairs_is_read(record, common, chosen, rejected):
    first, second = pair_of(record, "here")
    assert first == Conversation(common + chosen, len(common))
    assert second == Conversation(common + rejected, len(common))


@pytest.mark.parametrize(
    ("turns", "kind"),
    [
        ([Q, Q, A], conversations.ORDER),
        ([A], conversations.ORDER),
        ([SYSTEM, A], conversations.ORDER),
        ([Q, SYSTEM, A], conversations.ORDER),
        ([Q, A, B], conversations.ORDER),
        ([Q, {"role": "tool", "content": "4"}, A], conversations.ORDER),
        ([Q, {"role": 5, "content": "4"}], conversations.ORDER),
        ([Q, {"content": "4"}], conversations.ORDER),
        ([Q, {"role": "assistant", "content": " \n"}], conversations.EMPTY),
        ([Q, {"role": "assistant", "content": "\u200b\ufeff\x07"}], conversations.EMPTY),
        ([Q, A | {"tool_calls": [{"name": "f"}]}], conversations.TOOLS),
        ([Q, A | {"function_call": {"name": "f"}}], conversations.TOOLS),
        ([Q, A | {"weight": 0}, Q2, A2], conversations.WEIGHED),
        ([Q, {"role": "assistant", "content": None}], conversations.NOT_TEXT),
        (
            [Q, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
            conversations.NOT_TEXT,
        ),
        ([Q, {"role": "assistant", "content": "\ud800"}], conversations.NOT_TEXT),
        ([Q, "a"], conversations.NOT_TEXT),
        ([Q], conversations.NO_TURN),
        ([SYSTEM], conversations.NO_TURN),
        ([], conversations.NO_TURN),
        ("q", conversations.NO_TURN),
    ],
)
def test_what_is_wrong_with_a_conversation_is_found(turns, kind):
    with pytest.raises(Unusable) as error:
        conversation_of({"messages": turns}, "here")
    assert error.value.fault.kind == kind


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"messages": [Q, A], "tools": [{"name": "f"}]}, conversations.TOOLS),
        ({"conversations": [Q, A], "tools": '[{"name": "f"}]'}, conversations.TOOLS),
        ({"prompt": "q", "completion": "a", "label": False}, conversations.BAD),
        ({"conversations": [Q, A], "system": 5}, conversations.NOT_TEXT),
    ],
)
def test_what_is_wrong_beside_a_conversation_is_found(record, kind):
    with pytest.raises(Unusable) as error:
        conversation_of(record, "here")
    assert error.value.fault.kind == kind


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": " a\n"}, conversations.ALIKE),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, conversations.EMPTY),
        ({"chosen": [Q, A], "rejected": [Q2, A]}, conversations.APART),
        ({"chosen": [Q, A], "rejected": [Q, A, Q2, A2]}, conversations.NO_TURN),
        ({"prompt": "q", "chosen": "a", "rejected": 5}, conversations.NO_TURN),
        ({"chosen": "a", "rejected": "b"}, conversations.NO_TURN),
        (
            {
                "chosen": "s\n\nHuman: q\n\nAssistant: a",
                "rejected": "s\n\nHuman: q\n\nAssistant: b",
            },
            conversations.ORDER,
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": [1]}, conversations.TOOLS),
    ],
)
def test_what_is_wrong_with_a_pair_is_found(record, kind):
    with pytest.raises((Unusable,)) as error:
        pair_of(record, "here")
    assert error.value.fault.kind == kind


def read(path, source="conversations"):
    return list(conversations.read(DataConfig(source=source, path=str(path))))


def test_faults_are_yielded_with_their_place_and_counted(tmp_path):
    lines = [{"messages": [Q, A]}, {"messages": [Q, Q]}, {"messages": [A]}, {"messages": [Q]}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    found = read(path)
    assert [where for _, where in found] == [f"{path}:{n}" for n in (1, 3, 5, 7)]
    counts = {}
    for one, where in found:
        if isinstance(one, Fault):
            conversations.count_fault(counts, one, where)
    order, none = conversations.fault_lines(counts)
    assert order.startswith("2 with roles in the wrong order") and f"{path}:3" in order
    assert none.startswith("1 with no turn of the assistant's") and f"{path}:7" in none


@pytest.mark.parametrize(
    ("content", "source", "said"),
    [
        ('{"messages": []', "conversations", ":1 is not a JSON object"),
        ("[" * 100_000, "conversations", ":1 is not a JSON object"),
        ('\n"x"', "conversations", ":2 is not a JSON object"),
        ("[]", "conversations", ":1 is a JSON list: write each record in a line of its own"),
        (
            '{"prompt": "q", "completion": "a", "completion": "b"}',
            "conversations",
            "completion is there twice",
        ),
        ('{"text": "x"}', "conversations", ":1: the record has text"),
        ("{}", "conversations", ":1: the record has no keys"),
        ('{"chosen": "x", "rejected": "y"}', "conversations", "set data.source=preferences"),
        ('{"messages": []}', "preferences", ":1: the record has messages"),
        ('{"messages": "\xff"}', "conversations", "is not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file_is_refused(content, source, said, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError) as error:
        read(path, source)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_line_of_gigabytes_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations.text_files, "LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [Q, A]}) + "\n" + " " * 1001)
    with pytest.raises(UserError, match=":2: the line has more than"):
        read(path)


def test_parquet_and_saved_datasets_hold_the_same(tmp_path):
    import datasets

    records = [{"messages": [Q, A]}, {"messages": [Q2, A2, Q, B]}]
    made = datasets.Dataset.from_list(records)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "dict")
    want = [conversation_of(record, "") for record in records]
    assert [found for found, _ in read(tmp_path / "a.parquet")] == want
    for name in ("saved", "dict"):
        cfg = DataConfig(source="conversations", hf_name=str(tmp_path / name))
        assert [found for found, _ in conversations.read(cfg)] == want
