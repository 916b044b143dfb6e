"""Training that is killed, interrupted, damaged or out of disk goes on as if nothing had happened.

Every command here is `minitext train` in a process of its own, forked by `crash_server.py`. Moments to kill at are
chosen by what the run has written, not by the clock, so that the tests mean the same on a busy machine.
"""

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from minitext.checkpoint.checkpointer import Checkpointer
from minitext.observability import goodput
from minitext.training.claim import Claim
from tests.conftest import Server, audit_but

STEPS, SAVE_EVERY = 100, 5
SETTINGS = [
    "model.layers=1", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "data.seq_len=32",
    "train.global_batch=8", "train.sample_tokens=0", "data.source=grammar", f"train.steps={STEPS}",
    f"train.save_every={SAVE_EVERY}", "train.eval_every=35", "train.eval_batches=2",
]  # fmt: skip
TIMING = {"tokens_per_second", "seconds", "mfu", "host_bytes", "device_bytes"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def alive(pid):
    # A child that has ended is gone: the server waits for it.
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def finished(server, tmp_path_factory):
    """A run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("finished")
    command = ["train", *SETTINGS, f"run.dir={directory}", "run.name=whole"]
    code, printed = server.run(*command, output=directory / "output")
    assert code == 0, printed
    return directory / "whole"


def records(run):
    """The lines of metrics.jsonl, none of them half or double, without what depends on the clock."""
    text = (run / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [{name: line[name] for name in line if name not in TIMING} for line in lines]


def count_lines(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def unfinished(run):
    """What this process is writing; what those before it left is marked."""
    paths = (run / "checkpoints").glob("*.tmp")
    return [path for path in paths if not (path / "left").exists()]


def listing(directory):
    return os.listdir(directory) if directory.exists() else []


def catches(pid, number):
    """Whether a process has a handler of its own for a signal."""
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def wait_until(condition, pid):
    while alive(pid) and not condition():
        time.sleep(0.001)


def stop_in_a_save(run, pid):
    """Stops a process while a save of it is unfinished, also if this process was slow to see it."""
    while alive(pid):
        wait_until(lambda: unfinished(run), pid)
        os.kill(pid, signal.SIGSTOP)
        if unfinished(run):
            return
        os.kill(pid, signal.SIGCONT)


def test_the_undisturbed_run_is_what_the_others_are_compared_with(finished):
    lines = records(finished)
    assert len(lines) == STEPS and lines[-1]["loss"] < lines[0]["loss"] - 1
    assert sum("val_loss" in line for line in lines) == STEPS // 35 + 1
    assert Checkpointer(finished / "checkpoints").steps() == [
        STEPS - 2 * SAVE_EVERY,
        STEPS - SAVE_EVERY,
        STEPS,
    ]


@pytest.mark.parametrize("kills", audit_but([6], [6, 20]))
def test_killed_at_random_moments_the_run_ends_as_if_undisturbed(server, finished, tmp_path, kills):
    rng = random.Random(20)
    moments = ["starting"] * (kills // 6)
    moments += ["saving"] * (kills * 2 // 5)
    moments += ["training"] * (kills - len(moments))
    rng.shuffle(moments)
    run, output = tmp_path / "run", tmp_path / "output"
    command = ["train", *SETTINGS, f"run.dir={tmp_path}", "run.name=run"]
    resumed = caught = saves = 0
    for moment in moments:
        before = count_lines(run)
        target = before + rng.randrange(1, 8)
        pid = server.start(*command, output=output)
        if moment != "starting":
            wait_until(lambda: count_lines(run) >= target, pid)  # noqa: B023
        if moment == "saving":
            stop_in_a_save(run, pid)
            saves += 1
            if saves > kills // 6:  # those before are killed here, in a save for certain
                os.kill(pid, signal.SIGCONT)
        time.sleep(rng.uniform(0, {"starting": 1.5, "training": 0.01, "saving": 0.06}[moment]))
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL, output.read_text()

        checkpointer = Checkpointer(run / "checkpoints")
        steps = checkpointer.steps()
        assert [checkpointer.verify(step) for step in steps] == [None] * len(steps)
        # Nothing that was saved is ever lost, and of the steps since at most as many as the interval.
        newest = max(steps, default=0)
        assert newest >= resumed
        resumed = newest
        left = unfinished(run)
        caught += bool(left)
        if count_lines(run) != before:  # else it was killed before it did anything
            lost = count_lines(run) - newest
            assert lost <= SAVE_EVERY, moment
        for path in left:
            (path / "left").touch()
    assert resumed > 0 and caught >= kills // 6
    code, printed = server.run(*command, output=output)
    assert code == 0 and f"resuming after step {resumed}" in printed, printed
    assert records(run) == records(finished)
    assert goodput.measure(run).steps == STEPS  # the ledger has every step that was saved
    assert sorted(listing(run / "checkpoints")) == sorted(listing(finished / "checkpoints"))
    assert_same_arrays(run, finished)


def assert_same_arrays(run, other):
    first, second = (arrays(directory) for directory in (run, other))
    assert first.keys() == second.keys() and len(first) > 20
    for name in first:
        assert np.array_equal(first[name], second[name]), name


def arrays(run):
    """Every array of a run's last checkpoint, by name."""
    with Checkpointer(run / "checkpoints") as checkpointer:
        leaves = checkpointer.facts(STEPS)["layout"]["leaves"]
        wanted = {n: np.zeros(leaf["shape"], leaf["dtype"]) for n, leaf in leaves.items()}
        restored = checkpointer.restore(wanted, step=STEPS)
    assert restored is not None
    return restored.state


@pytest.mark.audit
@pytest.mark.parametrize("which", ["some", "all"])
def test_each_truncated_file_is_reported_and_training_goes_on_from_before(
    server, finished, tmp_path, which
):
    script = Path(__file__).parent / "crash_damage.py"
    shutil.copytree(finished, tmp_path / "whole")
    words = script, tmp_path / "whole", which, *SETTINGS
    code, printed = server.run(*words, output=tmp_path / "output")
    assert code == 0, printed
    seen = json.loads(printed.splitlines()[-1])
    assert {case["file"] for case in seen} > {"facts.json", "manifest.json", "state/_METADATA"}
    expected = records(finished)
    for case in seen:
        (warning,) = case["warnings"]
        assert f"/copy/checkpoints/{STEPS} is damaged: {case['file']} " in warning
        assert f"resuming after step {STEPS - SAVE_EVERY}" in case["printed"]
        (tmp_path / "metrics.jsonl").write_text(case["metrics"])
        assert records(tmp_path) == expected
        assert case["fault"] is None and f"{STEPS}.damaged" in case["checkpoints"]


def test_a_run_directory_that_is_deleted_ends_the_training_at_the_next_line(server, tmp_path):
    run, output = tmp_path / "run", tmp_path / "output"
    command = ["train", *SETTINGS, f"run.dir={tmp_path}", "run.name=run", "train.steps=100000"]
    pid = server.start(*command, output=output)
    wait_until(lambda: count_lines(run) >= 2, pid)  # before the first save
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)  # a file may have been added meanwhile
    assert server.wait() == 1, output.read_text()
    *_, error = output.read_text().splitlines()
    assert error.startswith(f"error: {run} was deleted or moved while training wrote to it")
    assert "Traceback" not in output.read_text() and listing(run) == []


def test_a_second_training_in_a_run_directory_is_refused_and_changes_nothing(
    server, finished, tmp_path
):
    command = ["train", *SETTINGS, f"run.dir={tmp_path}", "run.name=run", "train.steps=300"]
    shutil.copytree(finished, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with Claim(tmp_path / "run"):
        code, printed = server.run(*command, output=tmp_path / "output")
    (error,) = printed.splitlines()
    assert code == 1 and f"run is in use, by process {os.getpid()} on " in error
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert {path for path in after if after[path] != before[path]} <= {tmp_path / "run" / "lock"}


@pytest.mark.parametrize("seconds", audit_but([0.4], [0.0, 0.4, 0.9]))
def test_sigterm_before_the_first_step_is_one_line_and_leaves_no_half_run(
    server, tmp_path, seconds
):
    output = tmp_path / "output"
    command = ["train", *SETTINGS, f"run.dir={tmp_path}/runs", "run.name=run"]
    pid = server.start(*command, output=output)
    begun_without = []

    def handled():
        begun = (tmp_path / "runs").exists()
        caught = catches(pid, signal.SIGTERM)
        if begun and not caught and alive(pid):
            begun_without.append(pid)
        return caught

    wait_until(handled, pid)
    time.sleep(seconds)
    os.kill(pid, signal.SIGTERM)
    code, said = server.wait(), output.read_text().splitlines()
    assert not begun_without, "the run began before SIGTERM had a handler"
    if code == 0:  # it came as far as the first step, and saved
        assert Checkpointer(tmp_path / "runs" / "run" / "checkpoints").steps(), said
        assert count_lines(tmp_path / "runs" / "run") > 0
    else:
        assert (code, said[-1]) == (143, "stopped by SIGTERM"), said
        assert not (tmp_path / "runs").exists()


@pytest.mark.audit
def test_ctrl_c_saves_and_the_printed_command_resumes(server, finished, tmp_path):
    run, output = tmp_path / "run", tmp_path / "output"
    command = ["train", *SETTINGS, f"run.dir={tmp_path}", "run.name=run"]
    pid = server.start(*command, output=output)
    wait_until(lambda: count_lines(run) >= 23, pid)
    os.kill(pid, signal.SIGINT)
    assert server.wait() == 130, output.read_text()
    *_, message = output.read_text().splitlines()
    stopped = count_lines(run)
    assert message.startswith(f"stopped after step {stopped}")
    assert 23 <= stopped < STEPS and Checkpointer(run / "checkpoints").latest() == stopped
    resume = shlex.split(message.partition("resume with: minitext ")[2])
    code, printed = server.run(*resume, output=output)
    assert code == 0 and f"resuming after step {stopped}" in printed, printed
    assert records(run) == records(finished)
    assert_same_arrays(run, finished)


@pytest.fixture
def small_disk(tmp_path):
    """A server that alone sees `tmp_path / "disk"` as a disk of 1.2 MB, and what it takes to change the disk."""
    own_mounts = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(disk)]
    if shutil.which("unshare") is None:
        pytest.skip("a disk of its own needs `unshare` from util-linux")
    allowed = subprocess.run([*own_mounts, *mount], capture_output=True, text=True, check=False)
    if allowed.returncode:
        pytest.skip(f"a disk of its own cannot be mounted here: {allowed.stderr.strip()}")
    server = Server(*own_mounts, "sh", "-c", f'{shlex.join(mount)} && exec "$@"', "sh")
    yield server, disk
    server.close()


@pytest.mark.audit
def test_a_full_and_a_read_only_disk_are_one_line_and_the_run_goes_on_later(
    small_disk, finished, tmp_path
):
    server, disk = small_disk
    output = tmp_path / "output"
    command = ["train", *SETTINGS, f"run.dir={disk}", "run.name=run"]

    def shell(line):
        code, printed = server.run("sh", "-c", line, output=output)
        assert code == 0, printed
        return printed.split()

    def refused(reason):
        code, printed = server.run(*command, output=output)
        (error,) = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert code == 2 and "Traceback" not in printed, printed
        assert reason in error, printed
        return error

    error = refused("No space left on device")
    steps = sorted(int(name) for name in shell(f"ls {disk}/run/checkpoints") if name.isdigit())
    assert steps and (f"step {steps[-1]} is intact" in error or "already saved are intact" in error)
    refused("No space left on device")  # and again: nothing that was saved gets lost
    again = shell(f"ls {disk}/run/checkpoints")
    assert {str(step) for step in steps} <= set(again)
    shell(f"mount -o remount,ro,size=50m {disk}")
    refused("Read-only file system")
    shell(f"mount -o remount,rw {disk}")
    code, printed = server.run(*command, output=output)
    assert code == 0 and f"resuming after step {steps[-1]}" in printed, printed
    shell(f"cp -r {disk}/run {tmp_path}/kept")
    assert records(tmp_path / "kept") == records(finished)
    names = listing(tmp_path / "kept" / "checkpoints")
    assert sorted(names) == sorted(listing(finished / "checkpoints"))
    assert_same_arrays(tmp_path / "kept", finished)
