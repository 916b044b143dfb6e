"""What every thread was doing when training hung.

When no step ends for `train.hang_seconds`, and on SIGUSR1, the stack traces of all threads go to
RUN/stacks/PROCESS-TIME.txt. A hang is seldom where it shows: one process waits for its disk, and all others for that
process. So the dump of one makes all dump, by a file in the run directory that each looks at once a second.

The traces are written by `faulthandler`, in C, so that they come also when the main thread is deep in a compiler or a
collective and no Python of it runs. The timer is C too: a thread here sets it anew as long as steps end, and where that
thread itself is held up, the timer is not set anew.

Chapters: 21.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

STACKS = "stacks"
REQUEST = "request"  # touched by a process that has dumped, for the others
POLL = 1.0  # seconds
QUIET = 10.0  # seconds after a dump in which requests are not answered: all may have hung, and asked, together


class Watchdog:
    """Watches that steps end, while it is used as a context manager. Only one is in use at a time.

    Args:
      directory: the run directory, which all processes see.
      process: this process's index.
      say: prints a line.
      seconds: without the end of a step, after which stacks are dumped; None only dumps when asked.

    Attributes:
      path: the file that this process's stacks go to; removed at the end if nothing was dumped.
    """

    def __init__(
        self,
        directory: Path,
        process: int,
        say: Callable[[str], None],
        seconds: float | None = None,
        poll: float = POLL,
    ):
        self._folder, self._say, self._seconds, self._poll = directory / STACKS, say, seconds, poll
        moment = time.strftime("%Y%m%d-%H%M%S")
        self._mine = f"{process}-"
        self.path = self._folder / f"{self._mine}{moment}.txt"
        self._steps = self._seen = 0
        self._size, self._quiet_until = 0, 0.0
        self._end = threading.Event()

    def step_ended(self, *_: object) -> None:
        """Takes note that a step has ended."""
        self._steps += 1

    def __enter__(self) -> "Watchdog":
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(f"{self._mine}*.txt"):  # empty, of a process that was killed
            if not left.stat().st_size:
                left.unlink()
        self._file = self.path.open("a", encoding="utf-8")
        self._size = self.path.stat().st_size
        self._request = self._requested()
        self._on_signal = threading.current_thread() is threading.main_thread()
        if self._on_signal:
            faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True)
        self._arm()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._seconds is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._on_signal:
            faulthandler.unregister(signal.SIGUSR1)
        self._file.close()
        with contextlib.suppress(OSError):  # other processes' stacks may be there
            if not self.path.stat().st_size:
                self.path.unlink()
                self._folder.rmdir()

    def _arm(self) -> None:
        if self._seconds is not None:
            faulthandler.dump_traceback_later(self._seconds, file=self._file)

    def _watch(self) -> None:
        while not self._end.wait(self._poll):
            if self._seen != self._steps:
                self._seen = self._steps
                self._arm()
            size, request = os.fstat(self._file.fileno()).st_size, self._requested()
            if size != self._size:  # by the timer, or by SIGUSR1
                self._tell("stacks of all threads")
                self._ask_others()
            elif request != self._request and time.monotonic() > self._quiet_until:
                faulthandler.dump_traceback(self._file, all_threads=True)
                self._tell("another process asked for the stacks of all threads")
            self._request = self._requested() if size != self._size else request
            self._size = os.fstat(self._file.fileno()).st_size

    def _tell(self, what: str) -> None:
        self._quiet_until = time.monotonic() + max(QUIET, 2 * self._poll)
        self._say(f"{what} are in {self.path}")

    def _requested(self) -> int:
        try:
            return (self._folder / REQUEST).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _ask_others(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / REQUEST).write_text(self.path.name, encoding="utf-8")
