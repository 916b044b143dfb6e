"""The two errors that a user can fix.

Anything the user can fix is a `UserError`: its message says what was wrong, with the value, and how to fix it. The
command line prints it without a traceback and exits with `exit_code`. Everything else is a bug and keeps its traceback.

Chapters: 6.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class UserError(Exception):
    """Bad input: the message is one line that the user can act on."""

    exit_code = 2


class DoesNotFit(UserError):
    """A program needs more memory than the chip or the machine has."""

    exit_code = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean X?)` for the known word most like `word`, or "" if none is.

    Whole words are compared first, then the parts after the last dot: `learning_rate` finds `optim.learning_rate`.
    """
    known = list(known)
    tails = {name.rpartition(".")[2]: name for name in known}
    whole = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    tail = difflib.get_close_matches(word.rpartition(".")[2], tails, n=1, cutoff=0.5)
    close = whole or [tails[name] for name in tail]
    return f" (did you mean {close[0]}?)" if close else ""


# What to say for each of pydantic's rules, whose own words are for programmers. Braces hold the rule's limits.
_RULES = {
    "int_parsing": "choose a whole number",
    "int_type": "choose a whole number",
    "int_from_float": "choose a whole number",
    "int_parsing_size": "choose a smaller number",
    "float_parsing": "choose a number",
    "float_type": "choose a number",
    "finite_number": "choose a finite number",
    "greater_than_equal": "choose {ge} or more",
    "greater_than": "choose more than {gt}",
    "less_than_equal": "choose {le} or less",
    "less_than": "choose less than {lt}",
    "bool_parsing": "choose true or false",
    "bool_type": "choose true or false",
    "literal_error": "choose {expected}",
    "string_type": "it must be text: write it in quotes within quotes, such as '\"1\"'",
    "too_short": "give at least {min_length}",
    "too_long": "give at most {max_length}",
    "tuple_type": "write a list, such as [a, b]",
    "list_type": "write a list, such as [a, b]",
    "dict_type": "write keys with values, such as {{key: value}}",
    "model_type": "write keys with values, such as {{key: value}}",
    "model_attributes_type": "write keys with values, such as {{key: value}}",
}


def rule_of(problem: Mapping[str, Any]) -> str:
    """Returns the rule that a value breaks, as what to do, from one of the errors of pydantic's `ValidationError`."""
    if (text := _RULES.get(problem["type"])) is not None:
        limits = {name: _written(limit) for name, limit in problem.get("ctx", {}).items()}
        return text.format_map(limits)
    said = problem["msg"].removeprefix("Value error, ")
    return said[:1].lower() + said[1:]


def _written(limit: Any) -> Any:
    if isinstance(limit, float):
        return f"{limit:g}"
    return f"{limit:,}" if isinstance(limit, int) else limit
