"""Rewards are computed in processes of their own, each answer within a time limit.

An endless loop or a crash costs the reward of that answer alone: its process is killed and another takes its place.
Such answers, and those for which the function raises, get a reward from the settings and are counted. What no answer is
to blame for is refused: a function that returns something other than a number, or that fails for every answer.

Processes begin anew rather than as copies of this one, whose threads and devices a copy couldn't use.

Chapters: 26.
"""

import json
import math
import numbers
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from minitext.config.objective import RewardPart
from minitext.errors import UserError
from minitext.post_training import rewards

START_SECONDS = 120.0  # until a process is ready: a user's file may import much


class Rewarded(NamedTuple):
    """Rewards of some answers.

    Attributes:
      values: [N, parts] float64, those of failed answers as the settings say.
      failed: [N] bool, whether any of the functions took too long, raised or crashed.
      why: of the first failure, a line; or the empty text.
    """

    values: np.ndarray
    failed: np.ndarray
    why: str


class Worker:
    """A process that computes rewards one after another."""

    def __init__(self, parts: Sequence[RewardPart], seconds: float):
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        words = json.dumps([[part.name, part.argument] for part in parts])
        code = "from minitext.post_training.reward_workers import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs_in), str(theirs_out), str(seconds), words],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.send = Connection(ours_out, readable=False)
        self.receive = Connection(ours_in, writable=False)
        self.seconds = seconds
        first = self._next(START_SECONDS)
        if first != "ready":
            self.close()
            why = first["refused"] if isinstance(first, dict) else "its process did not start"
            raise UserError(why)

    def compute(self, record: Mapping[str, Any], answer: str) -> Any:
        """Returns the rewards of an answer as a list, or a text that says why there are none.

        Raises:
          UserError: if a function returned something other than a number.
        """
        try:
            self.send.send_bytes(json.dumps([record, answer]).encode())
            found = self._next(self.seconds)
        except (OSError, EOFError):
            found = "crashed"
        if isinstance(found, dict):
            raise UserError(found["refused"])
        return found

    def _next(self, seconds: float) -> Any:
        if not self.receive.poll(seconds):
            return f"took more than {seconds:g} s"
        try:
            return json.loads(self.receive.recv_bytes())
        except EOFError:
            return "crashed"

    def close(self) -> None:
        """Ends the process, whatever it does, and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.send.close()
        self.receive.close()


class RewardWorkers(AbstractContextManager):
    """Processes that compute rewards side by side.

    Args:
      parts: the functions.
      seconds: for each answer.
      failed: the reward of an answer for which a function took too long, raised or crashed.
      workers: processes at most; 0: one for each core.

    Raises:
      UserError: if a function can't be found.
    """

    def __init__(
        self, parts: Sequence[RewardPart], seconds: float, failed: float = 0.0, workers: int = 0
    ):
        self.parts, self.seconds, self.failed = tuple(parts), seconds, failed
        self.count = workers or os.cpu_count() or 1
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._idle.put(Worker(self.parts, seconds))  # the others start when there is work for them
        self._pool = ThreadPoolExecutor(self.count, "rewards")

    def compute(self, records: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> Rewarded:
        """Returns the rewards of answers, each to the record beside it.

        Raises:
          UserError: if a function returned something other than a number.
        """
        values = np.full((len(answers), len(self.parts)), self.failed, np.float64)
        failed, first = np.zeros(len(answers), bool), ""
        share = -(-len(answers) // self.count)
        starts = range(0, len(answers), max(share, 1))
        found = self._pool.map(
            lambda at: self._some(records[at : at + share], answers[at : at + share]), starts
        )
        for number, one in enumerate(one for some in found for one in some):
            if isinstance(one, str):
                failed[number], first = True, first or one
            else:
                values[number] = one
        return Rewarded(values, failed, first)

    def check(self, rewarded: Rewarded) -> None:
        """Raises UserError if there are answers and the functions failed for every one."""
        if len(rewarded.failed) and rewarded.failed.all():
            names, count = ", ".join(part.name for part in self.parts), len(rewarded.failed)
            raise UserError(f"reward {names} failed for all {count} answers: it {rewarded.why}")

    def _some(self, records: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[Any]:
        worker, found = self._take(), []
        try:
            for record, answer in zip(records, answers, strict=True):
                one = worker.compute(record, answer)
                if isinstance(one, str) and not one.startswith("raised"):
                    worker.close()
                    worker = Worker(self.parts, self.seconds)
                found.append(one)
        finally:
            self._idle.put(worker)
        return found

    def _take(self) -> Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return Worker(self.parts, self.seconds)

    def close(self) -> None:
        """Ends the processes."""
        self._pool.shutdown()
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def __exit__(self, *_):
        self.close()


def serve() -> None:
    """What a worker's process does: `sys.argv` has two pipes, the time limit, and the functions as JSON."""
    receive_at, send_at, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    receive, send = Connection(receive_at, writable=False), Connection(send_at, readable=False)

    def say(what: Any) -> None:
        send.send_bytes(json.dumps(what).encode())

    named = json.loads(sys.argv[4])
    try:
        functions = [(name, rewards.find(name), argument) for name, argument in named]
        for each in functions:
            rewards.check(*each)
    except UserError as error:
        say({"refused": str(error)})
        return
    say("ready")
    while True:
        try:
            record, answer = json.loads(receive.recv_bytes())
        except EOFError:
            return
        # If whoever asked is gone, an endless loop would stay.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
        say(_evaluate(functions, record, answer))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _evaluate(functions: Sequence[Any], record: Mapping[str, Any], answer: str) -> Any:
    """Returns an answer's rewards, a text that says why there are none, or what is to be refused."""
    found = []
    for name, function, argument in functions:
        more = () if argument is None else (argument,)
        try:
            value = function(record, answer, *more)
        except Exception as error:  # a user's function may raise anything
            return f"raised {type(error).__name__}: {error}".splitlines()[0][:200]
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            shown = repr(value)[:60]
            return {"refused": f"reward {name} returned {shown}: return a finite number"}
        found.append(float(value))
    return found
