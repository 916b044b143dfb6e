"""A run directory has one training at a time, is noticed when it goes, and isn't left behind half made."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from minitext.errors import UserError
from minitext.training.claim import LOCK, Claim, RunDirLost

HOLD = """
import sys, time
from pathlib import Path
from minitext.training.claim import Claim
with Claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that trains in tmp_path / "run"."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_training_is_refused_until_the_first_is_killed(holder, tmp_path):
    with pytest.raises(RunDirLost, match=f"in use, by process {holder.pid} on .* since 20"):
        Claim(tmp_path / "run").__enter__()
    with pytest.raises(RunDirLost), Claim(tmp_path / "run"):  # the refused one took nothing away
        pass
    with Claim(tmp_path / "run", first=False):  # of a job whose process 0 has the lock
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with Claim(tmp_path / "run"):
        assert f"process {os.getpid()} on " in (tmp_path / "run" / LOCK).read_text()


def test_a_child_that_outlives_its_parent_does_not_hold_the_lock(tmp_path):
    with Claim(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with Claim(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_directory_that_goes_is_noticed_at_the_next_write(tmp_path, how):
    run = tmp_path / "run"
    with pytest.raises(RunDirLost, match="was deleted or moved") as caught, Claim(run) as claim:
        claim.begin()
        claim.check()
        if how == "deleted":
            shutil.rmtree(run)
        else:
            run.rename(tmp_path / "elsewhere")
        if how == "replaced":
            run.mkdir()
            (run / LOCK).touch()
        claim.check()
    assert caught.value.exit_code == 1


def test_errors_of_writers_are_explained_by_the_directory_that_went(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(RunDirLost) as caught, Claim(run) as claim:
        claim.begin()
        shutil.rmtree(run)
        (run / "samples.txt").write_text("a checkpoint, a trace, a sample")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_what_never_began_is_not_left_behind_and_what_was_there_stays(tmp_path):
    run = tmp_path / "runs" / "a"
    with pytest.raises(UserError, match="refused"), Claim(run):
        (run / "config.yml").touch()
        raise UserError("refused")
    assert os.listdir(tmp_path) == []
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="refused"), Claim(run):
        raise UserError("refused")
    assert sorted(os.listdir(run)) == [LOCK, "metrics.jsonl"]
    with pytest.raises(KeyboardInterrupt), Claim(tmp_path / "b") as claim:
        claim.begin()
        raise KeyboardInterrupt
    assert (tmp_path / "b").exists()


def test_a_disk_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with Claim(tmp_path):
        pass
    assert "on a disk without locks (Operation not supported)" in caplog.text
