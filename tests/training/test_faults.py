"""Faults are drawn from a seed and fit into the run; each does to a process what it says."""

import collections
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import psutil
import pytest

from minitext import files
from minitext.data.batches import make_batches
from minitext.sharding.mesh import make_mesh
from minitext.training import faults


def plan(count, seed, steps=None, processes=2, kinds=tuple(faults.KINDS)):
    steps = steps or faults.least_steps(count, 10)
    return faults.plan(kinds, count, processes=processes, steps=steps, save_every=10, seed=seed)


@pytest.mark.parametrize("count, extra", [(1, 0), (7, 0), (50, 3), (50, 5000)])
def test_a_plan_is_that_of_its_seed_and_fits_the_run(count, extra):
    for seed in range(20):
        steps = faults.least_steps(count, 10) + extra
        drawn = plan(count, seed, steps)
        assert drawn == plan(count, seed, steps)
        kinds = collections.Counter(fault.kind for fault in drawn)
        assert max(kinds.values()) - min([kinds[k] for k in faults.KINDS]) <= 1
        at = [fault.step for fault in drawn]
        # After each there is room to be undone and to take the step of the next, and after the last to end.
        assert at == sorted(at) and at[0] > 10 and at[-1] <= steps - 30
        assert {fault.process for fault in plan(50, seed)} == {0, 1}
        for before, fault in itertools.pairwise(drawn):
            assert fault.moment != "starting" or before.ends_the_attempt
    assert plan(50, 1) != plan(50, 2)


def test_a_lone_process_is_never_frozen_for_good():
    alone, two = (plan(200, 0, processes=n, kinds=("freeze",)) for n in (1, 2))
    assert not any(fault.seconds == faults.FOR_GOOD for fault in alone)
    assert 40 < sum(fault.seconds == faults.FOR_GOOD for fault in two) < 100


def test_a_torn_checkpoint_is_found_damaged(tmp_path):
    how = set()
    for seed in range(12):
        folder = tmp_path / str(seed)
        (folder / "state").mkdir(parents=True)
        (folder / "facts.json").write_text("{}")
        (folder / "state" / "array").write_bytes(os.urandom(1000))
        (folder / "state" / "empty").touch()
        files.seal(folder)
        assert files.verify(folder) is None
        said = faults.tear(folder, random.Random(seed))
        assert files.verify(folder) is not None, said
        how.add("cut to" in said)
    assert how == {True, False}


@pytest.mark.skipif(not faults.can_fill_disks(), reason="needs prlimit(2), which Linux has")
def test_a_full_disk_refuses_every_write_of_that_process_alone(tmp_path):
    write = (
        "import sys; print('up', flush=True); sys.stdin.readline()\n"
        "with open(sys.argv[1], 'ab', buffering=0) as file: file.write(b'more')"
    )
    path = tmp_path / "file"
    path.write_bytes(b"before")
    process = subprocess.Popen(
        [sys.executable, "-c", write, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    assert process.stdout.readline() == b"up\n"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    faults.fill_disk([process])
    _, said = process.communicate(b"\n")
    assert process.returncode == 1 and b"File too large" in said
    assert path.read_bytes() == b"before" and resource.getrlimit(resource.RLIMIT_FSIZE) == before


def test_a_slow_process_gets_the_rest_of_the_time_and_goes_on_afterwards():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        slow, stopped, looks = faults.Slowdown(process, 0.7), 0, 0
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            slow.tick()
            stopped += psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            looks += 1
            time.sleep(0.002)
        process.send_signal(signal.SIGCONT)
        assert 0.5 < stopped / looks < 0.85
        deadline = time.monotonic() + 5
        while psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()


def test_one_batch_is_poisoned_and_the_next_is_not(tiny):
    cfg = tiny("mesh.data=8")
    batches = make_batches(cfg.data, make_mesh(cfg.mesh), vocab=cfg.model.vocab, global_batch=8)
    clean = make_batches(cfg.data, make_mesh(cfg.mesh), vocab=cfg.model.vocab, global_batch=8)
    faults._poison_next()
    first, second = batches.take(None), batches.take(None)
    for batch, want, broken in ((first, next(clean), 8), (second, next(clean), 0)):
        mask = np.asarray(batch["loss_mask"])
        assert np.isnan(mask).sum() == broken  # one in each device's rows
        assert batch["loss_mask"].sharding == want["loss_mask"].sharding
        where = ~np.isnan(mask)
        np.testing.assert_array_equal(mask[where], np.asarray(want["loss_mask"])[where])
        for name in batch.keys() - {"loss_mask"}:
            np.testing.assert_array_equal(batch[name], want[name])
    assert isinstance(first["loss_mask"], jax.Array)
    batches.close()
    clean.close()


def test_the_save_under_way_is_seen_and_those_left_behind_are_not(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "10.old.tmp").mkdir(parents=True)
    assert faults.saving_since(tmp_path, 0.0) is None and faults.whole_checkpoints(tmp_path) == []
    for name in ("9", "100", "20.1.tmp", "30.damaged"):
        (folder / name).mkdir(parents=True)
    (folder / "20.1.tmp" / "state").touch()
    assert [path.name for path in faults.whole_checkpoints(tmp_path)] == ["9", "100"]
    now = time.time()
    assert now - 10 < faults.saving_since(tmp_path, now - 100) <= now + 1
    assert faults.saving_since(tmp_path, now + 100) is None


@pytest.mark.skipif(sys.platform != "linux", reason="parents are told of their end on Linux only")
def test_no_process_outlives_its_supervisor(tmp_path):
    inner = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'from minitext.training import faults; import time; "
        "faults._die_with_parent(); print(1, flush=True); time.sleep(600)'], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE)
    child = psutil.Process(int(supervisor.stdout.readline()))
    child.send_signal(signal.SIGSTOP)  # a frozen one, too
    supervisor.kill()
    supervisor.wait()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_what_each_fault_may_undo():
    drawn = {fault.kind: fault for fault in plan(60, 3) if fault.ends_the_attempt}
    assert drawn["tear"].allowed(10) == 20 and drawn["kill"].allowed(10) == 10
    assert (
        faults.Fault("slow", 0, 1).allowed(10)
        == faults.Fault("freeze", 0, 1, seconds=2).allowed(10)
        == 0
    )
