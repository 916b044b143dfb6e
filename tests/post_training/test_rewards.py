"""The rewards that come with the package, and how others are named."""

import subprocess
import sys

import pytest

from minitext.errors import UserError
from minitext.post_training.rewards import check, find, last_number


@pytest.mark.parametrize(
    ("answer", "exact", "number"),
    [("1204", 1, 1), (" 1204\n", 1, 1), ("it is 1,204.", 0, 1), ("1204 or 7", 0, 0), ("-1204", 0, 0), ("", 0, 0)],
)  # fmt: skip
def test_answers_are_right_or_wrong(answer, exact, number):
    record = {"answer": "1204"}
    assert find("exact")(record, answer) == exact
    assert find("number")(record, answer) == number


@pytest.mark.parametrize(
    ("text", "number"), [("it is .5.", 0.5), ("-.25", -0.25), ("let's see...5", 5), ("1.5", 1.5), (".", None)]
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("name", "record"), [("exact", {"answer": None}), ("number", {"answer": None}), ("number", {"answer": "two"})]
)  # fmt: skip
def test_nothing_is_right_where_the_record_has_no_answer(name, record):
    with pytest.raises(ValueError, match="the record's answer"):
        find(name)(record, "None")


@pytest.mark.parametrize(
    ("name", "argument", "problem"),
    [
        ("exact", "a", "cannot be called with a record, an answer and an argument"),
        ("format", None, "cannot be called with a record and an answer"),
        ("format", "(", "is not a regular expression"),
        ("length", "x", "is not a number of characters"),
        ("length", "0", "is not a number of characters"),
        ("length", "inf", "is not a number of characters"),
    ],
)
def test_arguments_that_no_answer_could_be_rewarded_with_are_refused(name, argument, problem):
    with pytest.raises(UserError, match=problem) as caught:
        check(name, find(name), argument)
    assert "\n" not in str(caught.value)


def test_arguments_of_a_users_function():
    check("mine.py:f", lambda record, answer, argument="x": 1, None)
    with pytest.raises(UserError, match="leave its argument out"):
        check("mine.py:f", lambda record, answer: 1, "a")


def test_form_and_length():
    assert find("format")({}, "<a>\nb</a>", "<a>.*</a>") == 1
    assert find("format")({}, "<a>b</a> c", "<a>.*</a>") == 0
    assert find("length")({}, "abcde", "10") == -0.5
    assert find("length")({}, "a" * 30, "10") == -1


def test_a_function_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("def short(record, answer):\n    return len(answer) < 3\n")
    assert find(f"{tmp_path}/mine.py:short")({}, "ab") is True


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("exakt", None, "did you mean exact"),
        ("mine.py:f", None, "there is no file"),
        ("mine.py:f", "f = 3", "has no function f"),
        ("mine.py:f", "import", "cannot be run \\(SyntaxError"),
        ("mine.py:f", "raise KeyError('x')", "cannot be run \\(KeyError"),
        ("mine.txt:f", "f = 3", "end its name in .py"),
    ],
)
def test_what_cannot_be_found_is_refused_in_a_line(tmp_path, monkeypatch, name, content, problem):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name.partition(":")[0]).write_text(content)
    with pytest.raises(UserError, match=problem) as caught:
        find(name)
    assert "\n" not in str(caught.value)


def test_rewards_are_computed_without_jax():
    """A worker that imported it would take a second to start, and memory for itself."""
    code = "import sys, minitext.post_training.reward_workers; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
