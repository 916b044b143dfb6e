"""Sums, their two parts, and the teacher's errors."""

import json

import numpy as np
import pytest

from minitext.data.arithmetic import make_sums, taught, write_records


def test_no_sum_is_in_both_parts_and_every_answer_is_right():
    train, held_out = make_sums("train"), make_sums("validation", seed=3)
    prompts = [{record["prompt"] for record in part} for part in (train, held_out)]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 90**2
    assert len(held_out) == 810
    for record in (*train[:100], *held_out[:100]):
        a, b = record["prompt"].removesuffix("=").split("+")
        assert int(a) + int(b) == int(record["answer"])


def test_a_seed_changes_the_order_alone():
    one, other = make_sums("train", seed=1), make_sums("train", seed=2)
    assert one != other and sorted(map(str, one)) == sorted(map(str, other))
    assert one == make_sums("train", seed=1)


@pytest.mark.parametrize("errors", [0.0, 0.25, 1.0])
def test_a_teacher_errs_in_a_share_of_the_digits(errors):
    records = list(taught(make_sums("train"), count=5_000, errors=errors, seed=1))
    digits = [
        (right, said)
        for record in records
        for right, said in zip(record["answer"], record["completion"], strict=True)
    ]
    wrong = np.mean([right != said for right, said in digits])
    assert abs(wrong - errors) < 4 * np.sqrt(errors * (1 - errors) / len(digits)) + 1e-9
    assert records == list(taught(make_sums("train"), count=5_000, errors=errors, seed=1))


def test_records_are_lines_of_json(tmp_path):
    write_records(tmp_path / "a.jsonl", make_sums("validation")[:5])
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == make_sums("validation")[:5]
