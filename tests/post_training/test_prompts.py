"""Prompts: what can be answered is read, and what can't is refused in one line that says where it is."""

import datetime
import json

import pytest

from minitext.config.config import load_config
from minitext.data.chat import open_template
from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError
from minitext.post_training.prompts import open_prompts

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def opened(path):
    words = [
        "data.source=prompts", f"data.path={path}", "data.seq_len=128", "objective.kind=grpo",
        "objective.max_tokens=8",
    ]  # fmt: skip
    cfg, tokenizer = load_config("laptop", words), ByteTokenizer()
    return open_prompts(cfg, tokenizer, open_template(cfg.data, tokenizer), "train")


@pytest.mark.parametrize("prompt", ["q", [Q], [SYSTEM, Q], [Q, A, Q], ""])
def test_a_prompt_ends_where_the_answer_begins(prompt, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": one}) for one in (prompt, prompt)))
    (ids,) = opened(path).tokens
    assert ByteTokenizer().decode(ids).endswith("<|assistant|>\n")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([Q, A], r"\(assistant last, which leaves nothing to answer\)"),
        ([SYSTEM], "system last"),
        ([Q, Q], "user where assistant should be"),
        ([A, Q], "assistant first"),
        ([], "no turn of the assistant's"),
        (5, "it has no list of messages"),
        (None, "it has no list of messages"),
        ([{"role": "user", "content": ["q"]}], "something other than text"),
        ("q <|endoftext|> a", "text that spells a special token"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(prompt, said, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": one}) for one in ("q", prompt)))
    with pytest.raises(UserError, match=said) as caught:
        opened(path)
    assert f"{path}:2: " in str(caught.value) and "\n" not in str(caught.value)


def test_a_record_that_rewards_could_not_be_given_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    when = datetime.datetime(2026, 1, 1)
    table = pyarrow.table({"prompt": ["q", "r"], "when": [when, when]})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(
        UserError, match="row 0: when cannot be given to a reward .*datetime"
    ) as caught:
        opened(path)
    assert "\n" not in str(caught.value)
