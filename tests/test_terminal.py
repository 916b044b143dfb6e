"""Bars are for people: a terminal sees them, a file or a pipe does not."""

import os
import pty
import subprocess
import sys

import pytest

from minitext import terminal

FAILS_IN_A_BAR = """
import sys
from minitext import terminal
try:
    with terminal.bar() as bar:
        for _ in bar.track(range(2), description="working"):
            raise ValueError
except ValueError:
    sys.stderr.write("error: one line\\n")
"""


def test_a_pipe_gets_the_error_and_no_empty_line():
    done = subprocess.run([sys.executable, "-c", FAILS_IN_A_BAR], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "error: one line\n")


def test_a_terminal_gets_the_bar():
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [sys.executable, "-c", FAILS_IN_A_BAR], stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        said = b""
        while more := _read(ours):
            said += more
    assert process.returncode == 0 and b"working" in said and b"error: one line" in said


def _read(fd):
    try:
        return os.read(fd, 4096)
    except OSError:  # Linux's answer when the other end has closed
        return b""


@pytest.mark.parametrize(("quiet", "said"), [(60.0, ""), (-1.0, "working ...\n")])
def test_slow_work_says_what_it_is_and_quick_work_nothing(capsys, monkeypatch, quiet, said):
    monkeypatch.setattr(terminal, "QUIET_SECONDS", quiet)
    with terminal.of_slow_work(10, "working") as advance_to:
        advance_to(5)
        advance_to(6)
    assert capsys.readouterr().err == said
