"""The heartbeat, in threads: who is lost, why, and who says it; and that leaving at different times is no loss."""

import queue
import socket
import threading
import time

import pytest

from minitext.distributed import heartbeat
from minitext.distributed.heartbeat import Heartbeat, Hub, Member, one_line, open_server

TOKEN = "secret"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(heartbeat, "GRACE", 0.5)


class Job:
    """A hub and members in one process, and the lines that each would have ended with."""

    def __init__(self, processes, silence=30.0):
        self.lines = [queue.Queue() for _ in range(processes)]
        self.server = open_server("127.0.0.1")
        address = self.server.getsockname()
        told = [line.put for line in self.lines]
        hub = Hub(self.server, TOKEN, 0, processes, "host0", told[0], silence)
        self.parts: list[Heartbeat] = [hub]
        hub.start()
        for index in range(1, processes):
            rest = index, processes, f"host{index}", told[index], silence
            self.parts.append(Member(address, TOKEN, *rest))
            self.parts[-1].start()
        members = self.parts[1:]
        end = time.monotonic() + 60
        while len(hub._peers) < len(members) or any(
            "host0" not in [peer.host for peer in list(member._peers.values())]
            for member in members
        ):
            assert time.monotonic() < end, "not all have said hello"
            time.sleep(0.01)

    def line(self, index):
        return self.lines[index].get(timeout=60)

    def assert_nobody_is_lost(self):
        assert all(line.empty() for line in self.lines)


def cut(part):
    """What the kernel does to the connections of a killed process."""
    part.on_loss = lambda line: None
    if isinstance(part, Hub):
        part._ended.set()  # its thread ends, and closes all connections without a word
    else:
        part._socket.shutdown(2)


def freeze(part):
    """A stopped process keeps its connection open and sends nothing."""
    part._beat = lambda: None


def test_a_killed_member_is_told_by_everyone_else():
    job = Job(4)
    cut(job.parts[2])
    for index in (0, 1, 3):
        assert job.line(index) == "process 2 of 4 (host2) died"


def test_a_killed_hub_is_told_by_every_member():
    job = Job(3)
    cut(job.parts[0])
    for index in (1, 2):
        assert job.line(index) == "process 0 of 3 (host0) died"


@pytest.mark.parametrize("index", [0, 1])
def test_a_frozen_process_is_told_after_the_silence(index):
    job = Job(2, silence=1.0)
    freeze(job.parts[index])
    expected = f"process {index} of 2 (host{index}) has been silent for 1 s"
    assert job.line(1 - index) == expected


def test_a_process_that_never_comes_is_told():
    lines = queue.Queue()
    Hub(open_server("127.0.0.1"), TOKEN, 0, 2, "host0", lines.put, 0.5).start()
    assert lines.get(timeout=60) == "process 1 of 2 (unknown host) never said that it lives"


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_fails_says_why(index):
    job = Job(3)
    job.parts[index].fail("ValueError: no\nsuch thing")
    for other in {0, 1, 2} - {index}:
        told = job.line(other)
        assert told == f"process {index} of 3 (host{index}) failed: ValueError: no such thing"
    assert job.lines[index].empty()


def test_processes_that_fail_of_the_same_thing_each_use_their_own_words():
    job = Job(3)
    threads = [threading.Thread(target=part.fail, args=("no disk",)) for part in job.parts]
    for thread in reversed(threads):
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    time.sleep(0.5)
    job.assert_nobody_is_lost()


def test_leaving_waits_for_all_and_is_no_loss():
    job = Job(3)
    left = []

    def leave(part):
        left.append((part.index, part.leave()))

    threads = [threading.Thread(target=leave, args=(part,)) for part in job.parts]
    for thread in (threads[1], threads[0]):
        thread.start()
    time.sleep(0.4)
    assert not left  # process 2 is still at work
    threads[2].start()
    for thread in threads:
        thread.join()
    assert sorted(left) == [(0, True), (1, True), (2, True)]
    job.assert_nobody_is_lost()


def test_a_process_that_dies_while_others_wait_to_leave_is_told():
    job = Job(2)
    result = queue.Queue()
    threading.Thread(target=lambda: result.put(job.parts[0].leave())).start()
    cut(job.parts[1])
    assert job.line(0) == "process 1 of 2 (host1) died"
    assert result.get(timeout=60) is False


def test_strangers_are_not_heard():
    job = Job(2)
    for text in (b"hello wrong 1 evil\n", b"GET / HTTP/1.1\r\n\r\n", b"hello\n", b"x" * 100_000):
        with socket.create_connection(job.server.getsockname()) as stranger:
            stranger.sendall(text)
    time.sleep(0.5)
    job.assert_nobody_is_lost()
    cut(job.parts[1])
    assert job.line(0) == "process 1 of 2 (host1) died"


def test_one_line_is_short():
    assert one_line("a\n  b\t c") == "a b c"
    assert len(one_line("x" * 10_000)) == 400
