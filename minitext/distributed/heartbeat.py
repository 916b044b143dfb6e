"""Notices when a process of a job is lost, and ends the others with a line that names it.

The processes form a star: each keeps one TCP connection to process 0, and both ends send a line every `BEAT` seconds.
A killed process is noticed at once, because its kernel closes the connection; a frozen or unplugged one after
`SILENCE`. Process 0 then tells the others which process it was. If process 0 itself is lost, they all see that
directly. A process that fails says why before it exits, and one that is done waits until all are.

    to process 0      hello TOKEN INDEX HOST | alive | done | failed REASON
    from process 0    welcome HOST | alive | lost INDEX HOST WHY | end

JAX's own heartbeat only has a timeout. In JAX 0.10.2 a worker killed with SIGKILL was noticed after 8.2 s with
`heartbeat_timeout_seconds=10` and after 29 s with 30; with 1 s, a worker that was merely stopped was lost after 1.9 s.
The survivors abort (SIGABRT, 22 lines of C++ log) without running Python, so they couldn't say how to resume.

The heartbeat runs in its own thread and decides nothing about the program: it calls `on_loss` once, with one line.

Chapters: 21.
"""

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SILENCE = 30.0  # seconds without a line after which a process counts as lost
BEAT = 2.0  # seconds between two lines
GRACE = 3.0  # seconds in which a process may report its own error, when another failed of the same cause
LOCAL = ("127.0.0.1", "localhost")
_LINE_LIMIT = 4096  # bytes
_TICK = 0.1  # seconds between two looks at the clock


@dataclass
class _Peer:
    """The process at the other end of a connection."""

    index: int
    host: str
    writer: asyncio.StreamWriter
    done: bool = False
    heard: float = field(default_factory=time.monotonic)


class Heartbeat:
    """One process's part in the heartbeat of its job; `start` starts its thread.

    Args:
      index: of this process.
      processes: in the job.
      host: this process's host name, as shown to the others.
      on_loss: called once, in the heartbeat's thread, with a line such as `process 1 of 4 (node02) died`.
      silence: seconds without a line after which a process counts as lost.
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
        self._peers: dict[int, _Peer] = {}
        self._last_word: str | None = None  # "done" or "failed ...", sent by the thread
        self._reported = False  # a loss, or the end of the job: later ones are consequences
        self._ended = threading.Event()
        self._failing = threading.Event()

    def start(self) -> None:
        """Starts the heartbeat's thread."""
        threading.Thread(None, lambda: asyncio.run(self._run()), "heartbeat", daemon=True).start()

    def leave(self) -> bool:
        """Reports that this process is done, and waits for all others; returns whether they got that far."""
        self._last_word = self._last_word or "done"
        self._ended.wait()
        return not self._failing.is_set()

    def fail(self, reason: str) -> None:
        """Tells the others why this process fails, and waits a moment until they know."""
        self._failing.set()
        self._last_word = f"failed {one_line(reason)}"
        self._ended.wait(2 * GRACE + 5)

    async def _run(self) -> None:
        beaten = 0.0
        while not self._ended.is_set():
            if time.monotonic() - beaten > min(BEAT, self.silence / 4):
                beaten = time.monotonic()
                self._beat()
            if not self._reported:
                await self._look()
            await asyncio.sleep(_TICK)

    def _beat(self) -> None:
        self._send("alive")

    def _send(self, text: str) -> None:
        for peer in self._peers.values():
            peer.writer.write(f"{text}\n".encode())

    async def _listen(self, reader: asyncio.StreamReader, peer: _Peer) -> None:
        """Handles a peer's lines until its connection closes."""
        try:
            while line := await _read_line(reader):
                peer.heard = time.monotonic()
                word, _, rest = line.partition(" ")
                await self._handle(peer, word, rest)
        finally:
            peer.writer.close()
        del self._peers[peer.index]
        await self._report(peer.index, peer.host, "died")

    async def _look_for_silence(self) -> None:
        for peer in [*self._peers.values()]:
            if time.monotonic() - peer.heard > self.silence:
                why = f"has been silent for {self.silence:.0f} s"
                await self._report(peer.index, peer.host, why)

    async def _report(self, index: int, host: str, why: str) -> None:
        """Ends this process because of another, unless it's about to report the same failure in its own words."""
        if self._reported or self._ended.is_set():
            return
        self._reported = True
        await self._spread(index, f"lost {index} {host} {why}")
        # This blocks the event loop, which has nothing left to do.
        own_words = why.startswith("failed") and self._failing.wait(GRACE)
        self._ended.set()
        if not own_words and not self._failing.is_set():
            self._failing.set()
            self.on_loss(f"process {index} of {self.processes} ({host}) {why}")

    async def _spread(self, index: int, text: str) -> None:
        """Passes on the news of process `index`, which only process 0 can."""

    async def _look(self) -> None:
        """Sends this process's last word when it has one, and looks for silent peers."""
        raise NotImplementedError

    async def _handle(self, peer: _Peer, word: str, rest: str) -> None:
        raise NotImplementedError


class Hub(Heartbeat):
    """Process 0's part: it hears all the others, and tells them who is lost.

    Args:
      server: a listening socket, from `open_server`.
      token: what the others must send to be heard.
      rest: as of `Heartbeat`.
    """

    def __init__(self, server: socket.socket, token: str, *rest, **more):
        super().__init__(*rest, **more)
        self._server, self._token = server, token
        self._tasks: set[asyncio.Task] = set()  # the event loop itself keeps only weak references
        self._deadline = time.monotonic() + self.silence  # for every hello

    async def _run(self) -> None:
        def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
            self._tasks.add(asyncio.create_task(self._welcome(reader, writer)))

        server = await asyncio.start_server(welcome, sock=self._server, limit=_LINE_LIMIT)
        await super()._run()
        server.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            match (await _read_line(reader)).split(" ", 3):
                case ["hello", token, index, host] if secrets.compare_digest(
                    token.encode(), self._token.encode()
                ):
                    writer.write(f"welcome {self.host}\n".encode())
                    peer = self._peers[int(index)] = _Peer(int(index), host, writer)
                    await self._listen(reader, peer)
        finally:
            writer.close()  # of a stranger

    async def _handle(self, peer: _Peer, word: str, rest: str) -> None:
        if word == "done":
            peer.done = True
        elif word == "failed":
            await self._report(peer.index, peer.host, f"failed: {rest}")

    async def _look(self) -> None:
        come = len(self._peers) == self.processes - 1
        if self._last_word == "done" and come and all(p.done for p in self._peers.values()):
            await self._spread(0, "end")
            self._ended.set()
        elif self._last_word and self._last_word != "done":
            await self._spread(0, f"lost 0 {self.host} {self._last_word.replace(' ', ': ', 1)}")
            self._ended.set()
        elif not come and time.monotonic() > self._deadline:
            missing = min(set(range(1, self.processes)) - self._peers.keys())
            await self._report(missing, "unknown host", "never said that it lives")
        else:
            await self._look_for_silence()

    async def _spread(self, index: int, text: str) -> None:
        """Tells the others, and stays until they have gone: they would take its own end for the cause."""
        self._reported = True
        self._send(text)
        end = time.monotonic() + GRACE + 2
        while self._peers.keys() - {index} and time.monotonic() < end:
            await asyncio.sleep(_TICK)


class Member(Heartbeat):
    """The part of every process but 0: it hears process 0.

    Args:
      address: host and port of the hub.
      token: what the hub expects.
      rest: as of `Heartbeat`.

    Raises:
      OSError: if the hub can't be reached.
    """

    def __init__(self, address: tuple[str, int], token: str, *rest, **more):
        super().__init__(*rest, **more)
        self._socket = socket.create_connection(address, timeout=self.silence)
        self._said: str | None = None  # of the last words
        self._socket.sendall(f"hello {token} {self.index} {self.host}\n".encode())

    async def _run(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._socket, limit=_LINE_LIMIT)
        peer = self._peers[0] = _Peer(0, "unknown host", writer)
        listening = asyncio.create_task(self._listen(reader, peer))
        await super()._run()
        listening.cancel()

    async def _handle(self, peer: _Peer, word: str, rest: str) -> None:
        if word == "welcome":
            peer.host = rest
        elif word == "end":
            self._ended.set()
        elif word == "lost":
            index, host, why = rest.split(" ", 2)
            await self._report(int(index), host, why)

    async def _look(self) -> None:
        await self._look_for_silence()
        if self._last_word and self._last_word != self._said:
            self._said = self._last_word
            self._send(self._said)
            if self._said != "done":
                self._ended.set()


async def _read_line(reader: asyncio.StreamReader) -> str:
    """Returns the next line, or "" if the connection has closed or the line is too long."""
    with contextlib.suppress(OSError, ValueError):
        line = await reader.readline()
        return line[:-1].decode(errors="replace") if line.endswith(b"\n") else ""
    return ""


def open_server(host: str, port: int = 0) -> socket.socket:
    """Opens a port, by default a free one: on all interfaces, unless `host` means this machine alone."""
    if host in LOCAL:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=ipv6, backlog=1024)


def one_line(text: str) -> str:
    """Returns the first 400 characters of a text, on one line."""
    return " ".join(text.split())[:400]
