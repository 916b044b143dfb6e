"""Stopping between two steps: every process after the same one, its state saved.

SIGTERM is how a cluster takes a machine back, after some seconds of grace; Ctrl-C is how a person does. Both ask for
the same: end the step, save, say how to resume. The exit code tells them apart: 0 for SIGTERM, since all went as the
cluster wished, and 130 for Ctrl-C. A second Ctrl-C stops at once. While a program is being compiled the signal waits,
as all of Python's do; nothing that could be saved is lost then.

With several processes a signal may reach one of them, or each at another step, and a step that some do not take never
ends for the others. So the first one asked writes the step to stop after where all look once a step, the coordination
service's key-value store. Which step can all still reach? A process looks when it has dispatched step m and has read
the metrics of step m - 1, which no process can have before all have dispatched m - 1. Asked at step n, a process writes
before it dispatches n + 1. Whoever looks at step n + 2 has read the metrics of n + 1, so it sees what was written: all
stop after step n + 2.

Chapters: 21.
"""

import signal
from collections.abc import Callable
from typing import Protocol

from minitext.training.run_dir import resume_command

SLACK = 2  # steps between the one in which a process was asked and the last, with several processes
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
    """Where processes leave word for each other; `distributed.Board` is the coordination service's."""

    def put(self, word: str) -> None:
        """Leaves a word, unless there is one; it can be read everywhere when this returns."""
        ...

    def get(self) -> str | None:
        """Returns the first word that any process left, or None."""
        ...


class Stopper:
    """Takes SIGTERM and Ctrl-C while it is used as a context manager, and agrees on the last step.

    Args:
      say: prints a line.
      board: what the processes of a job share; None for a single process.

    Attributes:
      number: the signal that ended the training, once `last` has returned True.
    """

    def __init__(self, say: Callable[[str], None], board: Board | None = None):
        self._say, self._board = say, board
        self._asked: int | None = None
        self._before: dict[int, object] = {}
        self.number: int = signal.SIGINT

    def last(self, step: int) -> bool:
        """Returns whether training ends with this step. Called once a step, when the one before has been read."""
        asked = self._asked  # read once: a signal from here on is for the next step
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
