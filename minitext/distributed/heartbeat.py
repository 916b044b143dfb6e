"""Each process of a job tells the others that it lives, and ends when one of them does not.

The processes form a star: every process keeps one TCP connection to process 0. Both sides send a line every `BEAT`
seconds. A killed process is known at once, because its kernel closes the connection; a frozen or unplugged one is
known after `SILENCE`. Process 0 then tells all others which process it was. If process 0 itself is lost, each of the
others knows. A process that fails says why before it goes, and a process that is done waits until all are.

    to process 0      hello TOKEN INDEX HOST | alive | done | failed REASON
    from process 0    welcome HOST | alive | lost INDEX HOST WHY | end

This thread decides nothing about the program: it calls `on_loss` with one line, once.

Chapters: 21.
"""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SILENCE = 30.0  # seconds without a word after which a process counts as lost
BEAT = 2.0  # seconds between two words
GRACE = (
    3.0  # seconds for a process to fail in its own words, when another has failed of the same thing
)
_LINE_LIMIT = 4096
_TICK = 0.2


class Heartbeat:
    """One process's part in the heartbeat of its job: a thread, begun with `start`.

    Args:
      index: of this process.
      processes: in the job.
      host: this process's name for its host, for people.
      on_loss: called once, in the heartbeat's thread, with a line such as `process 1 of 4 (node02) died`.
      silence: seconds without a word after which a process counts as lost.
    """

    def __init__(
        self,
        index: int,
        processes: int,
        host: str,
        on_loss: Callable[[str], None],
        silence: float = SILENCE,
    ):
        self.index, self.processes, self.host = index, processes, host
        self.on_loss, self.silence = on_loss, silence
        self._leaving: str | None = None  # "done" or "failed ...", said once by the thread
        self._ended = threading.Event()  # nothing more will be heard or told
        self._failing = threading.Event()
        self._beaten = 0.0

    def start(self) -> None:
        """Begins to beat."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def leave(self) -> bool:
        """Says that this process is done, and waits until all processes are; returns whether they came to that."""
        self._leaving = self._leaving or "done"
        self._ended.wait()
        return not self._failing.is_set()

    def fail(self, reason: str) -> None:
        """Tells the others why this process fails; waits a moment until they know."""
        self._failing.set()
        self._leaving = f"failed {one_line(reason)}"
        self._ended.wait(2 * GRACE + 5)

    def _run(self) -> None:
        raise NotImplementedError

    def _lost(self, index: int, host: str, why: str) -> None:
        """Reports the loss of a process, unless this one fails in its own words meanwhile."""
        own_words = why.startswith("failed") and self._failing.wait(GRACE)
        self._ended.set()
        if not own_words and not self._failing.is_set():
            self._failing.set()
            self.on_loss(f"process {index} of {self.processes} ({host}) {why}")

    def _time_to_beat(self) -> bool:
        now = time.monotonic()
        if now - self._beaten < min(BEAT, self.silence / 4):
            return False
        self._beaten = now
        return True

    def _silent(self) -> str:
        return f"has been silent for {self.silence:.0f} s"


@dataclass
class _Line:
    """A connection, and what was heard on it."""

    socket: socket.socket
    heard: float
    index: int | None = None
    host: str = "unknown host"
    done: bool = False
    closed: bool = False
    buffer: bytes = b""

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # who is gone will be noticed when it is listened to
            self.socket.sendall(f"{text}\n".encode())

    def listen(self) -> Iterator[str]:
        """Yields the whole lines that have come; marks the connection closed at its end."""
        try:
            data = self.socket.recv(65_536)
        except TimeoutError:
            return
        except OSError:
            data = b""
        self.closed = not data
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        self.closed |= len(self.buffer) > _LINE_LIMIT
        if lines:
            self.heard = time.monotonic()
        for line in lines:
            yield line.decode(errors="replace")


class Hub(Heartbeat):
    """Process 0's part: it hears all others, and tells them who is lost.

    Args:
      server: a listening socket, from `open_server`.
      token: what the others must say to be heard.
      rest: as of `Heartbeat`.
    """

    def __init__(self, server: socket.socket, token: str, *rest, **more):
        super().__init__(*rest, **more)
        self._server, self._token = server, token
        self._lines: list[_Line] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, None)
        self._began = time.monotonic()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._hear()
            if self._ended.is_set():
                return
            members = {line.index: line for line in self._lines if line.index is not None}
            if self._leaving == "done" and len(members) == self.processes - 1:
                if all(line.done for line in members.values()):
                    self._tell("end")
                    return self._ended.set()
            elif self._leaving:
                self._spread(self.index, self.host, self._leaving.replace(" ", ": ", 1))
                return self._ended.set()
            if self._time_to_beat():
                self._tell("alive")
            self._look_for_silence(members)

    def _hear(self) -> None:
        for key, _ in self._selector.select(_TICK):
            if key.data is None:
                connection, _ = self._server.accept()
                connection.settimeout(1.0)
                line = _Line(connection, time.monotonic())
                self._lines.append(line)
                self._selector.register(connection, selectors.EVENT_READ, line)
                continue
            line = key.data
            for text in line.listen():
                self._understand(line, text)
            if line.closed:
                self._drop(line)
                if line.index is not None and not self._ended.is_set():
                    self._report(line.index, line.host, "died")

    def _understand(self, line: _Line, text: str) -> None:
        word, _, rest = text.partition(" ")
        if line.index is None:
            words = rest.split(" ", 2)
            if word != "hello" or len(words) != 3 or not secrets.compare_digest(
                words[0].encode(), self._token.encode()
            ):  # fmt: skip
                line.closed = True  # a stranger
                return
            line.index, line.host = int(words[1]), words[2]
            line.say(f"welcome {self.host}")
        elif word == "done":
            line.done = True
        elif word == "failed" and not self._ended.is_set():
            self._report(line.index, line.host, f"failed: {rest}")

    def _look_for_silence(self, members: dict[int, _Line]) -> None:
        now = time.monotonic()
        for index in range(1, self.processes):
            line = members.get(index)
            if line is None and now - self._began > self.silence:
                return self._report(index, "unknown host", "never said that it lives")
            if line is not None and now - line.heard > self.silence:
                return self._report(index, line.host, self._silent())

    def _report(self, index: int, host: str, why: str) -> None:
        self._spread(index, host, why)
        self._lost(index, host, why)

    def _spread(self, index: int, host: str, why: str) -> None:
        """Tells the others, and stays until they have gone: they would take its own end for the cause."""
        self._tell(f"lost {index} {host} {why}")
        end = time.monotonic() + GRACE + 2
        while time.monotonic() < end:
            left = [line for line in self._lines if line.index not in (None, index)]
            if not left:
                return
            for key, _ in self._selector.select(_TICK):
                if key.data is not None:
                    for _ in key.data.listen():
                        pass
                    if key.data.closed:
                        self._drop(key.data)

    def _tell(self, text: str) -> None:
        for line in self._lines:
            line.say(text)

    def _drop(self, line: _Line) -> None:
        if line not in self._lines:  # it went while the others were told of it
            return
        self._selector.unregister(line.socket)
        self._lines.remove(line)
        line.socket.close()


class Member(Heartbeat):
    """The part of every process but 0: it hears process 0.

    Args:
      address: host and port of the hub.
      token: what the hub wants to hear.
      rest: as of `Heartbeat`.

    Raises:
      OSError: if the hub can't be reached.
    """

    def __init__(self, address: tuple[str, int], token: str, *rest, **more):
        super().__init__(*rest, **more)
        connection = socket.create_connection(address, timeout=self.silence)
        connection.settimeout(_TICK)
        self._line = _Line(connection, time.monotonic(), 0)
        self._line.say(f"hello {token} {self.index} {self.host}")

    def _run(self) -> None:
        said = None
        while not self._ended.is_set():
            for text in self._line.listen():
                self._understand(text)
            if self._ended.is_set():
                break
            if self._line.closed:
                self._lost(0, self._line.host, "died")
            elif time.monotonic() - self._line.heard > self.silence:
                self._lost(0, self._line.host, self._silent())
            elif self._leaving != said:
                said = self._leaving
                self._line.say(str(said))
                if said != "done":
                    break
            elif self._time_to_beat():
                self._line.say("alive")
        self._ended.set()
        with contextlib.suppress(OSError):
            self._line.socket.shutdown(socket.SHUT_WR)

    def _understand(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word == "welcome":
            self._line.host = rest
        elif word == "end":
            self._ended.set()
        elif word == "lost" and not self._ended.is_set():
            index, host, why = rest.split(" ", 2)
            self._lost(int(index), host, why)


def open_server(host: str) -> socket.socket:
    """Opens the hub's socket on a free port: on all interfaces, unless `host` is this machine alone."""
    if host in ("127.0.0.1", "localhost"):
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", 0), backlog=1024)


def one_line(text: str) -> str:
    """Returns the first 400 characters of a text, on one line."""
    return " ".join(text.split())[:400]
