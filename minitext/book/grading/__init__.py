"""Graded exercises: the format authors write, the checks in a notebook, and `minitext grade`.

Chapters: none.
"""

from typing import Any

from minitext.book.grading.registry import Exercise, learner_number

__all__ = ["Exercise", "check", "learner_number"]


def check(id: str, fn: Any = None) -> None:
    """Checks one answer in a notebook and prints a verdict; it never raises.

    Args:
        id: the exercise, such as "05.adamw".
        fn: the learner's function.
    """
    from minitext.book.grading.inline import check

    check(id, fn)
