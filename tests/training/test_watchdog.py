"""Stack traces of all threads: when nothing goes on, on SIGUSR1, and when another process asks."""

import os
import signal
import subprocess
import sys
import threading
import time

from minitext.training.watchdog import STACKS, Watchdog


def wait_for(condition):
    end = time.monotonic() + 100
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def a_thread_with_a_name_to_be_found(event):
    event.wait()


def test_a_hang_ends_the_job_after_both_processes_have_written_the_stacks_of_all_threads(tmp_path):
    ended, others, event = [], [], threading.Event()
    thread = threading.Thread(target=a_thread_with_a_name_to_be_found, args=[event])
    thread.start()
    # Another process's watchdog, with the thread that answers and without the timer, of which there is one a process.
    with (
        Watchdog(tmp_path, 1, others.append, poll=0.02) as other,
        Watchdog(tmp_path, 0, print, 0.1, ended.append, poll=0.02) as mine,
    ):
        assert wait_for(lambda: ended and others)
    event.set()
    thread.join()
    text = mine.path.read_text()
    assert "a_thread_with_a_name_to_be_found" in text
    assert "in test_a_hang_ends" in text  # where the main thread waits
    assert "a_thread_with_a_name_to_be_found" in other.path.read_text()
    assert "train.hang_seconds=0.1" in ended[0] and str(mine.path) in ended[0]
    assert "another process asked" in others[0]
    assert mine.path.name.startswith("0-") and other.path.name.startswith("1-")


def test_while_steps_end_nothing_is_written_and_nothing_is_left(tmp_path):
    for attempt in range(20):
        said, steps, longest = [], 0, 0.0
        run = tmp_path / str(attempt)
        with Watchdog(run, 0, said.append, 0.5, said.append, poll=0.02) as watchdog:
            began = last = time.monotonic()
            while last - began < 1.0:  # longer than the limit
                time.sleep(0.05)  # it looks more often than steps end
                watchdog.step_ended()
                now = time.monotonic()
                steps, longest, last = steps + 1, max(longest, now - last), now
        # Where the machine held this process up for as long as the limit, the watchdog is right to speak.
        if longest < 0.25:
            break
    assert steps > 3 and longest < 0.25
    assert not said and not (run / STACKS).exists()


def test_sigusr1_writes_the_stacks_and_training_goes_on(tmp_path):
    said = []
    with Watchdog(tmp_path, 0, said.append, poll=0.02) as watchdog:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wait_for(lambda: said)
    assert "test_sigusr1_writes" in watchdog.path.read_text()
    assert (tmp_path / STACKS / "request").read_text() == watchdog.path.name


def test_a_disk_that_gives_errors_does_not_end_the_watch(tmp_path):
    said, request = [], tmp_path / STACKS / "request"
    with Watchdog(tmp_path, 0, said.append, poll=0.02):
        request.symlink_to("request")  # in a circle
        time.sleep(0.2)
        request.unlink()
        request.touch()
        assert wait_for(lambda: said)
    assert "another process asked" in said[0]


def test_an_empty_file_of_a_killed_process_is_removed_and_a_full_one_stays(tmp_path):
    folder = tmp_path / STACKS
    folder.mkdir()
    for name, text in {"0-1.txt": "", "0-2.txt": "stack", "1-1.txt": ""}.items():
        (folder / name).write_text(text)
    with Watchdog(tmp_path, 0, print, poll=0.02):
        pass
    assert sorted(os.listdir(folder)) == ["0-2.txt", "1-1.txt"]


STUCK = """
import ctypes, sys
from pathlib import Path
from minitext.training import watchdog
watchdog.GRACE = 0.3
with watchdog.Watchdog(Path(sys.argv[1]), 0, print, 0.1, print):
    ctypes.PyDLL(None).sleep(60)  # in C and without releasing Python's lock, so no other thread runs
"""


def test_a_process_in_which_no_thread_can_run_python_ends_too(tmp_path):
    done = subprocess.run([sys.executable, "-c", STUCK, tmp_path], timeout=100, check=False)
    assert done.returncode == 1
    (path,) = (tmp_path / STACKS).glob("0-*.txt")
    assert "Timeout" in path.read_text() and 'File "<string>"' in path.read_text()
