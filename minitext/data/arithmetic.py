"""Sums of two numbers as text, and a teacher who errs: a task whose answers a program can check.

A prompt is `37+58=`, and its right answer `95`. Every sum belongs to one of two parts, so what is measured on the one
was never trained on.

Chapters: 26.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minitext import files
from minitext.data.placement import Split

HELD_OUT = 10  # every so many sums, one is for validation


def make_sums(
    split: Split, *, least: int = 10, most: int = 99, seed: int = 0
) -> list[dict[str, Any]]:
    """Returns all sums of one part in an order drawn from a seed.

    Args:
      split: `train`, nine in ten sums, or `validation`, the others.
      least: smallest number that is added.
      most: largest.
      seed: of the order; which part a sum belongs to doesn't depend on it.

    Returns:
      Records with `prompt`, such as `37+58=`, and `answer`, such as `95`.
    """
    numbers = most - least + 1
    mixed = np.random.default_rng(0).permutation(numbers**2)
    held_out = len(mixed) // HELD_OUT
    part = mixed[:held_out] if split == "validation" else mixed[held_out:]
    order = np.random.default_rng(seed).permutation(part)
    pairs = (divmod(int(number), numbers) for number in order)
    added = ((a + least, b + least) for a, b in pairs)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in added]


def taught(
    records: Sequence[dict[str, Any]], *, count: int, errors: float, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yields sums, again and again, with `completion`, what a teacher answers.

    Args:
      records: sums.
      count: how many to yield.
      errors: share of the digits in place of which the teacher writes another.
      seed: of the errors.
    """
    rng = np.random.default_rng([seed, 1])
    for number in range(count):
        record = records[number % len(records)]
        digits = [int(digit) for digit in record["answer"]]
        wrong = rng.random(len(digits)) < errors
        moved = rng.integers(1, 10, len(digits)) * wrong
        answer = "".join(str((d + m) % 10) for d, m in zip(digits, moved, strict=True))
        yield {**record, "completion": answer}


def write_records(path: str | Path, records: Iterator[dict[str, Any]] | Sequence[Any]) -> None:
    """Writes records as lines of JSON."""
    files.write(Path(path), "".join(json.dumps(record) + "\n" for record in records))
