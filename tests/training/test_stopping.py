"""Stopping by a signal: one step for all processes, saved, and the exit code says which signal it was."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from minitext.checkpoint.checkpointer import Checkpointer
from minitext.distributed.launch.local import environment_of, free_port
from minitext.observability.metrics import read_metrics
from minitext.training.stopping import SLACK, Interrupted, Stopper

TINY = [
    "model.layers=1", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "data.seq_len=32",
    "train.global_batch=8", "train.sample_tokens=0", "data.source=grammar", "train.eval_batches=1",
]  # fmt: skip


class SharedBoard:
    """The key-value store of one job: the first word stays."""

    def __init__(self):
        self.lock, self.word = threading.Lock(), None

    def put(self, word):
        with self.lock:
            self.word = self.word or word

    def get(self):
        with self.lock:
            return self.word


def send(number):
    os.kill(os.getpid(), number)


def test_one_process_ends_with_the_step_in_which_it_was_asked():
    said = []
    with Stopper(said.append) as stopper:
        assert not stopper.last(1)
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stopper.last(2) and stopper.number == signal.SIGTERM
    assert len(said) == 1 and said[0].startswith("SIGTERM: ")


def test_handlers_are_put_back_and_a_second_ctrl_c_is_at_once():
    # A shell that starts the tests in the background has them ignore Ctrl-C.
    shells = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Stopper(lambda _: None) as stopper:
        send(signal.SIGINT)
        assert stopper.last(5) and stopper.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
            time.sleep(1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    signal.signal(signal.SIGINT, shells)


@pytest.mark.parametrize("seed", range(20))
def test_all_processes_end_with_one_step_whoever_is_asked_and_when(seed):
    """A process dispatches a step, waits until all have dispatched the one before, and looks: in any interleaving."""
    rng, board, processes = random.Random(seed), SharedBoard(), 4
    stoppers = [Stopper(lambda _: None, board) for _ in range(processes)]
    dispatched, looked, ended = [0] * processes, [0] * processes, [0] * processes
    asked = 0
    for turn in range(2000):
        me = rng.randrange(processes)
        if ended[me]:
            continue
        if turn > 50 and rng.random() < 0.02:
            stoppers[me]._ask(signal.SIGTERM, None)
            asked = asked or looked[me] + 1
        if dispatched[me] == looked[me]:
            dispatched[me] += 1
        elif min(dispatched) >= dispatched[me] - 1:
            looked[me] = dispatched[me]
            if stoppers[me].last(looked[me]):
                ended[me] = looked[me]
    assert asked
    assert len(set(ended)) == 1 and asked <= ended[0] <= asked + SLACK, (asked, ended)
    assert {stopper.number for stopper in stoppers} == {signal.SIGTERM}


def test_the_exit_codes_tell_the_signals_apart():
    assert Interrupted(3, "runs/a", signal.SIGTERM).exit_code == 0
    assert Interrupted(3, "runs/a", signal.SIGINT).exit_code == 130
    assert "minitext train config=runs/a/config.yml" in str(Interrupted(3, "runs/a"))


def test_sigterm_saves_and_exits_0(server, tmp_path):
    command = ["train", *TINY, f"run.dir={tmp_path}", "run.name=a", "train.steps=1000000"]
    run, output = tmp_path / "a", tmp_path / "output"
    pid = server.start(*command, output=output)
    while Path(f"/proc/{pid}").exists() and not read_metrics(run):
        time.sleep(0.02)
    os.kill(pid, signal.SIGTERM)
    code, printed = server.wait(), output.read_text()
    assert code == 0, printed
    (step,) = Checkpointer(run / "checkpoints").steps()
    assert f"stopped after step {step} and saved; resume with: minitext train config=" in printed
    assert [line["step"] for line in read_metrics(run)] == list(range(1, step + 1))


@pytest.mark.audit
@pytest.mark.timeout(300)
def test_a_signal_to_one_of_two_processes_is_for_both(tmp_path):
    """SIGUSR1 to the second makes both write their stacks; SIGTERM to it ends both after one step, saved."""
    command = [
        sys.executable,
        "-m",
        "minitext",
        "train",
        *TINY,
        f"run.dir={tmp_path}",
        "run.name=a",
    ]
    port, run = free_port(), tmp_path / "a"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "300"}
    env.pop("XLA_FLAGS", None)
    job = [
        subprocess.Popen(
            [*command, "train.steps=1000000"], env=environment_of(env, index, 2, port, 1),
            text=True, stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip

    def wait_for(condition):
        while not condition():
            assert all(process.poll() is None for process in job)
            time.sleep(0.02)

    try:
        wait_for(lambda: read_metrics(run))
        job[1].send_signal(signal.SIGUSR1)
        wait_for(
            lambda: (
                {p.name[:2] for p in (run / "stacks").glob("*.txt") if p.stat().st_size}
                == {"0-", "1-"}
            )
        )
        job[1].send_signal(signal.SIGTERM)
        told = [process.communicate(timeout=60)[1] for process in job]
    finally:
        for process in job:
            process.kill()
    assert [process.returncode for process in job] == [0, 0], "\n".join(told)
    (step,) = Checkpointer(run / "checkpoints").steps()[-1:]
    assert all(f"stopped after step {step} and saved" in text for text in told)
    assert "in _watch" in next((run / "stacks").glob("0-*.txt")).read_text()
