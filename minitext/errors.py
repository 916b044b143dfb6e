"""The two errors that a person can fix.

Whatever the user can fix is a `UserError`: its message says what was wrong, with its value, and how to fix it. The
command line prints it without a traceback and exits with `exit_code`. Everything else is a bug and keeps its traceback.

Chapters: 6.
"""


class UserError(Exception):
    """Bad input: the message is one line a person can act on."""

    exit_code = 2


class DoesNotFit(UserError):
    """A program compiled for a chip needs more memory than the chip has."""

    exit_code = 3
