"""The two errors that a user can fix.

Anything the user can fix is a `UserError`: its message says what was wrong, with the value, and how to fix it. The
command line prints it without a traceback and exits with `exit_code`. Everything else is a bug and keeps its traceback.

Chapters: 6.
"""

import difflib
from collections.abc import Iterable


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
