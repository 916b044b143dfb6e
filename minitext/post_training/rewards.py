"""Rewards: plain functions of a prompt's record and the answer's text.

A reward is named in the settings by what it's registered as, or as `FILE.py:FUNCTION`. It gets the record, with
whatever fields the data have, and the text of the answer; if its settings have an `argument`, that comes third. It
returns a number. `minitext.post_training.reward_workers` runs them.

This file and those of users are imported by processes that only compute rewards: nothing here imports JAX.

Chapters: 26.
"""

import contextlib
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minitext import files
from minitext.errors import UserError, did_you_mean

Record = Mapping[str, Any]
Reward = Callable[..., float]

REWARDS: dict[str, Reward] = {}
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)")


def reward(name: str) -> Callable[[Reward], Reward]:
    """Registers a function as a reward of this name."""

    def register(function: Reward) -> Reward:
        assert name not in REWARDS, name
        REWARDS[name] = function
        return function

    return register


@reward("exact")
def exact(record: Record, answer: str) -> float:
    """Returns 1 if the answer is the record's `answer`, but for spaces around it."""
    return float(answer.strip() == right_answer(record).strip())


@reward("number")
def number(record: Record, answer: str) -> float:
    """Returns 1 if the last number in the answer equals the last one in the record's `answer`."""
    found, right = last_number(answer), last_number(right_answer(record))
    if right is None:
        raise ValueError("the record's answer has no number")
    return float(found == right)


@reward("format")
def matches(_record: Record, answer: str, pattern: str) -> float:
    """Returns 1 if the whole answer matches a regular expression."""
    return float(re.fullmatch(pattern, answer, re.DOTALL) is not None)


@reward("length")
def shortness(_record: Record, answer: str, characters: str) -> float:
    """Returns minus the length of the answer, in so many characters, and not less than -1: a penalty for length."""
    return -min(len(answer) / float(characters), 1.0)


def right_answer(record: Record) -> str:
    """Returns the record's answer as text."""
    if record["answer"] is None:
        raise ValueError("the record's answer is null")
    return str(record["answer"])


def check(name: str, function: Reward, argument: str | None) -> None:
    """Raises UserError if a reward can't be called with what the settings give it.

    Args:
      name: in the settings.
      function: what `find` returns of it.
      argument: from the settings, or None.
    """
    more = () if argument is None else (argument,)
    with contextlib.suppress(ValueError):  # a function of another language may have no signature
        signature = inspect.signature(function)
        try:
            signature.bind({}, "", *more)
        except TypeError as error:
            given = "a record and an answer" if not more else "a record, an answer and an argument"
            raise UserError(
                f"reward {name} cannot be called with {given} ({error}): "
                f"{'leave its argument out' if more else 'set its argument'}"
            ) from None
    if REWARDS.get(name) is matches:
        try:
            re.compile(str(argument))
        except re.error as error:
            raise UserError(
                f"reward {name}: argument={files.shorten(str(argument))} is not a regular expression ({error}): "
                "correct it"
            ) from None
    if REWARDS.get(name) is shortness:
        try:
            characters = float(str(argument))
        except ValueError:
            characters = 0.0
        if not 0 < characters < math.inf:
            raise UserError(
                f"reward {name}: argument={files.shorten(str(argument))} is not a number of characters: give one "
                "above 0"
            )


def last_number(text: str) -> float | None:
    """Returns the last number in a text, such as 1204.5 of `it is 1,204.5.`, or None."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def find(name: str) -> Reward:
    """Returns the reward of a name.

    Args:
      name: a registered one, or FILE.py:FUNCTION. The file is run: it is the user's own.

    Raises:
      UserError: if there is no such reward, or its file can't be run.
    """
    file, colon, function = name.rpartition(":")
    if not colon:
        if name not in REWARDS:
            raise UserError(
                f"reward {name!r} does not exist{did_you_mean(name, REWARDS)}: choose among {', '.join(REWARDS)}, or "
                "name a function as FILE.py:FUNCTION"
            )
        return REWARDS[name]
    if not Path(files.local_path(file)).is_file():
        raise UserError(f"reward {name}: there is no file {file}: write FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"minitext_rewards_{abs(hash(file))}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"reward {name}: {file} is not a file of Python: end its name in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        raise UserError(
            f"reward {name}: {file} cannot be run ({type(error).__name__}: {error}): correct it"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise UserError(
            f"reward {name}: {file} has no function {function or repr('')}{did_you_mean(function, known)}: name one "
            f"of {', '.join(known) or 'its own: it has none yet'}"
        )
    return found  # pyright: ignore[reportReturnType]
