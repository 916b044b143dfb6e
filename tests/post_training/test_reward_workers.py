"""Rewards within a time limit, whatever a function does with an answer."""

import time

import psutil
import pytest

from minitext.config.objective import RewardPart
from minitext.errors import UserError
from minitext.post_training.reward_workers import RewardWorkers

HOSTILE = """
import os, re, subprocess, sys
def f(record, answer):
    print("noise on stdout")
    if answer == "loop":
        while True: pass
    if answer == "regex":  # does not return from C
        return re.fullmatch("(a+)+b", "a" * 64) is None
    if answer == "child":
        subprocess.Popen(["sleep", "1000"]); open(record["pids"], "w").write(str(os.getpgid(0)))
        while True: pass
    if answer == "exit": os._exit(3)
    if answer == "quit": sys.exit(0)
    if answer == "raise": raise ValueError("two\\nlines")
    return len(answer) * record["factor"]
def nan(record, answer): return float("nan")
def none(record, answer): return None
def text(record, answer): return "1"
def always(record, answer): raise KeyError(answer)
"""


@pytest.fixture
def part(tmp_path):
    (tmp_path / "mine.py").write_text(HOSTILE)
    return lambda name, **more: RewardPart(name=f"{tmp_path}/mine.py:{name}", **more)


def test_one_answer_costs_no_other_its_reward(part, tmp_path):
    answers = ["abc", "loop", "de", "exit", "f", "raise", "ghij", "regex", "", "quit", "child", "k"]
    records = [{"factor": i, "pids": str(tmp_path / "pids")} for i in range(len(answers))]
    with RewardWorkers([part("f")], seconds=0.4, failed=-0.5, workers=2) as workers:
        began = time.monotonic()
        found = workers.compute(records, answers)
        assert time.monotonic() - began < 20
        again = workers.compute(records[:1], answers[:1])
    bad = [answer in ("loop", "exit", "raise", "regex", "quit", "child") for answer in answers]
    want = [-0.5 if b else len(a) * i for i, (a, b) in enumerate(zip(answers, bad, strict=True))]
    assert found.failed.tolist() == bad and found.values[:, 0].tolist() == want
    assert found.why == "took more than 0.4 s" and again.values.tolist() == [[0]]
    group = int((tmp_path / "pids").read_text())
    assert group not in [p.info["pid"] for p in psutil.process_iter(["pid"])]


def test_parts_are_computed_side_by_side():
    parts = [RewardPart(name="exact"), RewardPart(name="length", weight=0.1, argument="10")]
    with RewardWorkers(parts, seconds=5, workers=2) as workers:
        found = workers.compute([{"answer": "7"}] * 3, ["7", "8", "12345"])
        assert workers.compute([], []).values.shape == (0, 2)
    assert found.values.tolist() == [[1, -0.1], [0, -0.1], [0, -0.5]]
    assert not found.failed.any() and not found.why


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nan", "nan returned nan: return a finite number"),
        ("none", "none returned None"),
        ("text", "text returned '1'"),
        ("always", "failed for all 2 answers: it raised KeyError"),
        ("missing", "has no function missing"),
    ],
)
def test_mistakes_of_a_function_are_refused_in_a_line(part, name, problem):
    def rewards():
        with RewardWorkers([part(name)], seconds=5, workers=1) as workers:
            workers.check(workers.compute([{"factor": 1}] * 2, ["a", "b"]))

    with pytest.raises(UserError, match=problem) as caught:
        rewards()
    assert "\n" not in str(caught.value) and "reward" in str(caught.value)
