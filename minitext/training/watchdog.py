"""What every thread was doing when training hung, and the end of a job that hangs.

If no step ends for `train.hang_seconds`, and on SIGUSR1, the stack traces of all threads are written to
RUN/stacks/PROCESS-TIME.txt. A hang rarely starts where it shows: one process waits for its disk, and all the others
wait for that process. So when one process dumps its stacks, all do: each looks once a second at a file in the run
directory.

After a hang the job then ends with exit code 1, which every launcher restarts; after SIGUSR1 it goes on. A thread here
does both while the main thread is deep in a compiler or a collective and runs no Python. Should no thread be able to
run Python, `faulthandler`, whose timer and traces are in C, writes the stacks and ends the process `GRACE` later,
without the line that says so.

Chapters: 21.
"""

import contextlib
import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

STACKS = "stacks"
REQUEST = "request"  # a process that has dumped touches it, so the others dump too
POLL = 1.0  # seconds
FIRST = 10  # times train.hang_seconds for the first step, which compiles
GRACE = 30.0  # seconds after train.hang_seconds in which the thread should have ended the job
QUIET = 10.0  # seconds after a dump in which requests are ignored: all may have hung, and asked, at once


class Watchdog:
    """A context manager that watches whether steps end. Use one at a time.

    Args:
      directory: the run directory, which all processes see.
      process: this process's index.
      say: prints a line.
      seconds: dump the stacks and end when no step has ended for so long, or the first not for `FIRST` times as long;
        None dumps only on request.
      end: called after a hang with a line that says so; it ends the job.

    Attributes:
      path: this process's file of stacks, removed at the end if nothing was dumped.
    """

    def __init__(
        self,
        directory: Path,
        process: int,
        say: Callable[[str], None],
        seconds: float | None = None,
        end: Callable[[str], None] = lambda why: None,
        poll: float = POLL,
    ):
        self._folder, self._say, self._seconds, self._poll = directory / STACKS, say, seconds, poll
        self._end_job = end
        moment = time.strftime("%Y%m%d-%H%M%S")
        self._mine = f"{process}-"
        self.path = self._folder / f"{self._mine}{moment}.txt"
        self._steps = self._seen = self._request = 0
        self._since = time.monotonic()  # when the last step was seen to end
        self._size, self._quiet_until = 0, 0.0
        self._end = threading.Event()

    def step_ended(self, *_: object) -> None:
        """Takes note that a step has ended."""
        self._steps += 1

    def __enter__(self) -> "Watchdog":
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(
            f"{self._mine}*.txt"
        ):  # empty, from a process that was killed
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
        self._since = time.monotonic()
        if self._seconds is not None:
            faulthandler.dump_traceback_later(self._limit() + GRACE, file=self._file, exit=True)

    def _limit(self) -> float:
        return (self._seconds or math.inf) * (1 if self._seen else FIRST)

    def _watch(self) -> None:
        while not self._end.wait(self._poll):
            if self._seen != self._steps:
                self._seen = self._steps
                self._arm()
            elif time.monotonic() - self._since > self._limit():
                self._end_hang()
            size, request = os.fstat(self._file.fileno()).st_size, self._requested()
            if size != self._size:  # by SIGUSR1
                self._tell("stacks of all threads")
                self._ask_others()
            elif request != self._request and time.monotonic() > self._quiet_until:
                faulthandler.dump_traceback(self._file, all_threads=True)
                self._tell("another process asked for the stacks of all threads")
            self._request = self._requested() if size != self._size else request
            self._size = os.fstat(self._file.fileno()).st_size

    def _end_hang(self) -> None:
        """Dumps the stacks, gives the other processes the time to do so too, and ends the job."""
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._ask_others()
        training_ended = self._end.wait(2 * self._poll)
        if not training_ended and self._seen == self._steps:
            self._end_job(
                f"no step has ended in {self._limit():g} s (train.hang_seconds={self._seconds:g}): stacks of all "
                f"threads are in {self.path}"
            )
        self._size, self._request = os.fstat(self._file.fileno()).st_size, self._requested()
        self._arm()

    def _tell(self, what: str) -> None:
        self._quiet_until = time.monotonic() + max(QUIET, 2 * self._poll)
        self._say(f"{what} are in {self.path}")

    def _requested(self) -> int:
        try:
            return (self._folder / REQUEST).stat().st_mtime_ns
        except OSError:  # there is none, or the disk doesn't answer: no reason to stop watching
            return self._request

    def _ask_others(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / REQUEST).write_text(self.path.name, encoding="utf-8")
