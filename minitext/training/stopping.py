"""Stopping between two steps: every process stops after the same step, with its state saved.

A cluster sends SIGTERM some seconds before it takes a machine back; a person presses Ctrl-C. Both ask for the same:
finish the step, save, and print how to resume. The exit codes differ: 0 after SIGTERM, because everything went as the
cluster wanted, and 130 after Ctrl-C. A second Ctrl-C stops at once. While a program compiles, the signal has to wait,
as all of Python's signals do; there is nothing to lose then.

With several processes, a signal may reach only one of them, or each at a different step, and a step that some
processes don't take never ends for the others. So the first process that is asked writes the last step into the
coordination service's key-value store, which all read once a step. Which step can all still reach? A process reads
the store when it has dispatched step m and has read the metrics of step m - 1, which no process can have before all
have dispatched m - 1. A process asked at step n writes before it dispatches n + 1. Any process at step n + 2 has read
the metrics of n + 1, so it sees that word: all stop after step n + 2.

Chapters: 21.
"""

import signal
from collections.abc import Callable
from typing import Protocol

from minitext.training.run_dir import resume_command

SLACK = 2  # with several processes, steps from the one in which a process was asked to the last
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interrupted(Exception):
    """Training was stopped by a signal after saving; the message says how to resume.

    Attributes:
      exit_code: of the process, 0 after SIGTERM and 130 after Ctrl-C.
    """

    def __init__(self, step: int, directory: object, number: int = signal.SIGINT):
        super().__init__(
            f"stopped after step {step} and saved; resume with: {resume_command(str(directory))}"
        )
        self.exit_code = 0 if number == signal.SIGTERM else 130


class Board(Protocol):
    """Where processes leave a word for each other; `job.Board` is the coordination service's."""

    def put(self, word: str) -> None:
        """Leaves a word unless there is one already. When this returns, every process can read it."""
        ...

    def get(self) -> str | None:
        """Returns the first word that any process left, or None."""
        ...


class Stopper:
    """A context manager that handles SIGTERM and Ctrl-C, and agrees with other processes on the last step.

    Args:
      say: prints a line.
      board: shared by the processes of a job; None for a single process.

    Attributes:
      number: the signal that ended the training, once `last` has returned True.
    """

    def __init__(self, say: Callable[[str], None], board: Board | None = None):
        self._say, self._board = say, board
        self._asked: int | None = None
        self._before: dict[int, object] = {}
        self.number: int = signal.SIGINT

    def last(self, step: int) -> bool:
        """Returns whether training ends with this step. Call it once a step, after reading the step before."""
        asked = self._asked  # read once: a later signal counts for the next step
        if self._board is None:
            self.number = asked or self.number
            return asked is not None
        if asked is not None:
            self._board.put(f"{step + SLACK} {int(asked)}")
        word = self._board.get()
        if word is None:
            return False
        final, self.number = map(int, word.split())
        return step >= final

    def __enter__(self) -> "Stopper":
        try:
            for number in NAMES:
                self._before[number] = signal.signal(number, self._ask)
        except ValueError:  # not in the main thread, where no handler can be set and none is needed
            self._before.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # pyright: ignore[reportArgumentType]

    def _ask(self, number: int, _: object) -> None:
        again = ""
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])  # pyright: ignore[reportArgumentType]
            again = "; Ctrl-C again stops at once without saving"
        if self._asked is None:
            self._asked = number
            self._say(f"{NAMES[signal.Signals(number)]}: stopping after this step{again}")
