"""Several processes as one job: the same numbers as one process, and one clear end when one of them dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from rich.console import Console

from minitext.config.config import load_config
from minitext.data.batches import make_batches
from minitext.distributed import heartbeat
from minitext.distributed import job as distributed
from minitext.distributed.cluster import Cluster
from minitext.distributed.launch.local import FINAL, environment_of, free_port
from minitext.errors import UserError
from minitext.observability.metrics import read_metrics
from minitext.sharding.mesh import make_mesh
from minitext.training import run
from tests.conftest import QUICK_FLAGS, TINY

NO_PROXY = "http://127.0.0.1:9"  # a machine may have one, which the processes of a job must not ask
JOB = Path(__file__).with_name("job.py")
QUICK = [
    *TINY, "train.steps=4", "train.save_every=2", "train.eval_every=4", "train.eval_batches=1",
    "mesh.fsdp=2", "model.layers=1",
]  # fmt: skip


def start(processes, devices, command):
    """Starts a job; its processes write to pipes, and compile as quickly as this one does."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment_of(os.environ, index, processes, port, devices)
            | {"XLA_FLAGS": QUICK_FLAGS, "http_proxy": NO_PROXY},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]


def finish(job, seconds=240):
    """Waits for the processes; returns their stderrs, all of which must have ended well."""
    try:
        told = [process.communicate(timeout=seconds)[1] for process in job]
    finally:
        for process in job:
            process.kill()
    assert [process.returncode for process in job] == [0] * len(job), "\n".join(told)
    return told


def run_job(processes, devices, what, directory, *settings):
    return finish(start(processes, devices, [str(JOB), what, str(directory), *settings]))


def settings_of(directory, name, *more):
    return [*QUICK, f"run.dir={directory}", f"run.name={name}", *more]


def expected_batches(cfg):
    batches = make_batches(
        cfg.data, make_mesh(cfg.mesh), vocab=cfg.model.vocab, global_batch=cfg.train.global_batch
    )
    found = [jax.device_get(next(batches)) for _ in range(3)]
    batches.close()
    return {f"{i}.{name}": x for i, batch in enumerate(found) for name, x in batch.items()}


def assert_same_arrays(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def assert_same_curve(ours, theirs):
    """Equal but for rounding: devices of two processes add in another order."""
    ours, theirs = read_metrics(ours), read_metrics(theirs)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert ("val_loss" in a) == ("val_loss" in b)
        assert a.get("val_loss", 0.0) == pytest.approx(b.get("val_loss", 0.0), rel=1e-5)


def test_alone_everything_agrees_with_itself():
    assert distributed.is_first() and not distributed.joined()
    assert distributed.agree("x", 7) == [7] and distributed.share("y", "z") == ["z"]
    distributed.barrier("here")
    distributed.finish(ValueError("nobody hears it"))


@pytest.mark.parametrize("host", ["127.0.0.1", "node01", "[::1]"])
def test_a_coordinator_whose_port_is_taken_is_refused_before_jax_hears_of_it(host):
    with heartbeat.open_server("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot open port {port} .*Address already in use"):
            distributed.start(Cluster("explicit", f"{host}:{port}", 2, 0))
    assert not distributed.joined() and jax.distributed.is_initialized() is False


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One process with eight devices: its run directory and configuration."""
    cfg = load_config("laptop", settings_of(tmp_path_factory.mktemp("whole"), "a"))
    return run.train(cfg, Console(quiet=True)), cfg


@pytest.mark.slow
def test_two_processes_of_four_devices_do_what_one_of_eight_does(whole, tmp_path):
    run_job(2, 4, "train", tmp_path, *settings_of(tmp_path, "a"))
    directory, cfg = whole
    assert_same_curve(tmp_path / "a", directory)
    assert_same_arrays(np.load(tmp_path / "batches.npz"), expected_batches(cfg))


@pytest.mark.audit
def test_processes_talk(tmp_path):
    run_job(3, 1, "talk", tmp_path, *settings_of(tmp_path, "a"))
    for index in range(3):
        values, missing, name = (tmp_path / f"{index}.txt").read_text().split("\n")
        assert values == str([[0, 1, 4], [1, 4, 9], [4, 9, 16]])
        assert name.startswith("process 1 of 3 (")
        if index == 0:
            assert "'late'" in missing and "process 1 of 3 (" in missing
            assert "process 2 of 3 (" in missing and "process 0" not in missing


@pytest.mark.audit
@pytest.mark.parametrize("processes, devices", [(4, 2), (2, 2)])
def test_the_order_of_data_is_the_same_for_any_number_of_processes(processes, devices, tmp_path):
    settings = settings_of(tmp_path, "a")
    run_job(processes, devices, "order", tmp_path, *settings)
    expected = expected_batches(load_config("laptop", settings))
    assert_same_arrays(np.load(tmp_path / "batches.npz"), expected)


@pytest.mark.audit
def test_resuming_with_other_numbers_of_processes_is_exact(tmp_path):
    """2 -> 4 -> 1 -> 2 processes: the state that is read is the one written, and the curve is that of one process."""
    steps = ["train.steps=8", "train.sample_tokens=4"]
    directory, name = tmp_path, "a"
    for processes, last in ((2, 2), (4, 4), (1, 6), (2, 8)):
        # The schedule is that of eight steps in every part: a process that has reached `last` is killed.
        job = start(
            processes,
            8 // processes,
            ["-m", "minitext", "train", *settings_of(directory, name, *steps)],
        )
        if last == 8:
            finish(job)
            break
        wait_for(lambda last=last: (directory / name / "checkpoints" / str(last)).exists(), job)
        for process in job:
            process.kill()
        for process in job:
            process.communicate()
        newest = max(int(path.name) for path in (directory / name / "checkpoints").glob("[0-9]"))
        states = []
        for others in (1, 2):
            run_job(
                others, 8 // others, "restore", directory, *settings_of(directory, name, *steps)
            )
            states.append(dict(np.load(directory / "state.npz")))
        assert int(states[0]["step"]) == newest
        assert_same_arrays(*states)
    cfg = load_config("laptop", settings_of(tmp_path, "whole", *steps))
    assert_same_curve(directory / name, run.train(cfg, Console(quiet=True)))


@pytest.mark.audit
def test_processes_that_read_parts_of_a_stream_resume_bit_equal(tmp_path):
    """The parts hold unequal numbers of rows, for training and for validation."""
    for part, records in enumerate((20, 200)):
        rows = [f"<{part}.{i}> " + "x" * (7 * i % 60) for i in range(records)]
        table = pa.table({"text": rows})
        parquet.write_table(table, tmp_path / f"{part}.parquet")
    stream = [
        "data.source=hf", "data.hf_name=parquet", f"data.path={tmp_path}/*.parquet", "data.validation_fraction=0.2",
        "train.steps=8", "train.eval_every=2", "train.eval_batches=1000",  # all of them
    ]  # fmt: skip

    def job(name):
        return start(2, 1, ["-m", "minitext", "train", *settings_of(tmp_path, name, *stream)])

    finish(job("whole"))
    killed = job("killed")
    wait_for(lambda: (tmp_path / "killed" / "checkpoints" / "4").exists(), killed)
    for process in killed:
        process.kill()
        process.communicate()
    finish(job("killed"))
    found, want = (read_metrics(tmp_path / name) for name in ("killed", "whole"))
    for ours, theirs in zip(found, want, strict=True):
        for key in ("step", "loss", "grad_norm", "val_loss", "tokens"):
            assert ours.get(key) == theirs.get(key)


def wait_for(condition, job, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        assert all(process.poll() is None for process in job), job[0].communicate()[1]
        time.sleep(0.02)


@pytest.mark.audit
@pytest.mark.parametrize(
    "processes, victim, how, word",
    [
        (3, 1, signal.SIGKILL, "died"),
        (3, 0, signal.SIGKILL, "died"),
        (2, 1, signal.SIGSTOP, "has been silent for 30 s"),
        (2, 0, signal.SIGSTOP, "has been silent for 30 s"),
    ],
)
def test_a_lost_process_ends_the_others_with_one_line(processes, victim, how, word, tmp_path):
    settings = settings_of(
        tmp_path, "a", "train.steps=1000000", "train.save_every=1000", "mesh.fsdp=1"
    )
    job = start(processes, 1, ["-m", "minitext", "train", *settings, "train.global_batch=6"])
    wait_for(lambda: len(read_metrics(tmp_path / "a")) > 3, job)
    job[victim].send_signal(how)
    began = time.monotonic()
    try:
        for index, process in enumerate(job):
            if index == victim:
                continue
            told = process.communicate(timeout=60)[1].splitlines()
            assert time.monotonic() - began < 60
            assert process.returncode == 1, told[-5:]
            assert told[-1].startswith(f"error: process {victim} of {processes} ("), told[-5:]
            assert word in told[-1] and "resume with: minitext train config=" in told[-1]
            assert not any("Traceback" in line for line in told)
            # What JAX's C++ client prints is in a file, or between our two lines if it was quicker.
            ours = [number for number, line in enumerate(told) if f"process {victim} of" in line]
            assert len(ours) == 2 and len(told) - ours[0] < 20, told
            print(f"process {index} ended {time.monotonic() - began:.1f} s after", told[-1])
    finally:
        for process in job:
            process.kill()
            process.wait()


@pytest.mark.audit
def test_a_hang_ends_the_job_with_stacks_and_a_code_that_launchers_retry(tmp_path):
    settings = settings_of(
        tmp_path, "a", "train.steps=1000000", "train.save_every=1000", "mesh.fsdp=1"
    )
    command = ["-m", "minitext", "train", *settings, "train.hang_seconds=15"]
    job = start(2, 1, command)
    wait_for(lambda: len(read_metrics(tmp_path / "a")) > 3, job)
    job[1].send_signal(signal.SIGSTOP)
    try:
        told = job[0].communicate(timeout=60)[1].splitlines()
    finally:
        for process in job:
            process.kill()
            process.wait()
    assert job[0].returncode == 1 and 1 not in FINAL
    assert told[-1].startswith(
        "error: no step has ended in 15 s (train.hang_seconds=15): stacks of"
    )
    assert "resume with: minitext train config=" in told[-1]
    (stacks,) = (tmp_path / "a" / "stacks").glob("0-2*.txt")
    assert "minitext/training/loop.py" in stacks.read_text()


@pytest.mark.audit
def test_processes_with_other_settings_and_processes_that_never_come_are_told(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "minitext", "train", *settings_of(tmp_path, "a")]
    job = [
        subprocess.Popen(
            [*command, f"train.seed={index}", "mesh.fsdp=1"],
            env=environment_of(os.environ, index, 2, port, 1),
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in job:
        told = process.communicate(timeout=100)[1]
        assert process.returncode == 2
        assert "was started with train.seed=1, process 0 with train.seed=0" in told.splitlines()[-1]
    code = (
        "from minitext.distributed import cluster, job as distributed\n"
        f"distributed.start(cluster.Cluster('explicit', '127.0.0.1:{free_port()}', 2, INDEX), seconds=3)"
    )
    for index in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("INDEX", str(index))],
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 1
        assert f"process {index} of 2 could not join the job" in done.stderr, done.stderr
