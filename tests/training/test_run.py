"""The loop: what a run directory holds, and that interrupting and resuming change nothing."""

import os
import signal
import time

import jax
import pytest
from rich.console import Console

from minitext import hardware
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config.config import load_config
from minitext.observability import metrics
from minitext.observability.metrics import read_metrics
from minitext.training import run
from minitext.training.stopping import Interrupted
from tests.conftest import audit_but

QUICK = [
    "model.layers=1", "train.steps=7", "train.save_every=3", "train.eval_every=4", "train.eval_batches=1",
]  # fmt: skip


def quick(tiny, directory, *overrides):
    return tiny(*QUICK, f"run.dir={directory}", "run.name=a", *overrides)


def curve(directory):
    names = ("step", "loss", "grad_norm", "learning_rate", "tokens", "val_loss")
    return [{k: r[k] for k in names if k in r} for r in read_metrics(directory)]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """An uninterrupted run, and what it printed."""
    directory = tmp_path_factory.mktemp("whole")
    console = Console(record=True, width=120)
    return run.train(
        quick(tiny, directory, "train.sample_tokens=8"), console
    ), console.export_text()


def test_a_run_directory_holds_all_that_is_promised(whole):
    directory, _ = whole
    assert load_config(None, [f"config={directory}/config.yml"]).train.steps == 7
    lines = read_metrics(directory)
    assert [r["step"] for r in lines] == list(range(1, 8))
    for record in lines:
        assert record.keys() >= {
            "step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "seconds", "mfu",
        }  # fmt: skip
    assert [r["step"] for r in lines if "val_loss" in r] == [4, 7]
    assert Checkpointer(directory / "checkpoints").steps() == [3, 6, 7]
    assert (directory / "samples.txt").read_text().count("--- step") == 3
    assert list((directory / "tensorboard").iterdir())
    assert (directory / "tokenizer.json").is_file()


def test_it_prints_samples_the_validation_loss_and_the_floor(whole):
    _, text = whole
    for words in (
        "sample at step 1",
        "sample at step 4",
        "sample at step 7",
        "validation loss",
        "floor",
        "tokens/s",
    ):
        assert words in text


@pytest.mark.audit  # a run that is interrupted shows it too
def test_two_runs_are_bit_equal(whole, tiny, tmp_path):
    again = run.train(quick(tiny, tmp_path), Console(quiet=True))
    assert curve(again) == curve(whole[0])


def test_ctrl_c_saves_and_resuming_is_bit_equal(whole, tiny, tmp_path, monkeypatch):
    cfg, write = quick(tiny, tmp_path), metrics.MetricsWriter.write

    def interrupt_at_step_4(self, record):
        write(self, record)
        if record["step"] == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(metrics.MetricsWriter, "write", interrupt_at_step_4)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"minitext train config=.*config\.yml"):
        run.train(cfg, Console(quiet=True))
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    stopped = Checkpointer(tmp_path / "a" / "checkpoints").latest()
    assert stopped in (4, 5)
    resumed = run.train(load_config(None, [f"config={tmp_path}/a/config.yml"]), Console(quiet=True))
    assert curve(resumed) == curve(whole[0])


def test_a_signal_while_the_step_is_compiled_saves_the_first_step(tiny, tmp_path, monkeypatch):
    compile_step = run.make_train_step

    def told_meanwhile(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return compile_step(*args)

    def too_early(*_):
        raise AssertionError("SIGTERM came where nothing waits for it")

    monkeypatch.setattr(run, "make_train_step", told_meanwhile)
    before = signal.signal(signal.SIGTERM, too_early)
    try:
        with pytest.raises(Interrupted) as stopped:
            run.train(quick(tiny, tmp_path), Console(quiet=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.exit_code == 0
    assert Checkpointer(tmp_path / "a" / "checkpoints").steps() == [1]


@pytest.mark.parametrize("save_every", audit_but([3], [1, 3]))
def test_no_line_is_written_that_a_kill_could_cost_beyond_the_interval(
    tiny, tmp_path, monkeypatch, save_every
):
    commit, exposed = Checkpointer._commit, []

    def exposed_now(checkpointer):
        return len(read_metrics(tmp_path / "a")) - (checkpointer.latest() or 0)

    def slow_disk(self, *args):
        # The disk takes until the training has done as much as it may, and then for many more steps of this model.
        wait_until = time.monotonic() + 60
        while exposed_now(self) < min(save_every, 7 - (self.latest() or 0)):
            assert time.monotonic() < wait_until
            time.sleep(0.01)
        time.sleep(0.3)
        exposed.append(exposed_now(self))
        commit(self, *args)

    monkeypatch.setattr(Checkpointer, "_commit", slow_disk)
    run.train(quick(tiny, tmp_path, f"train.save_every={save_every}"), Console(quiet=True))
    assert max(exposed) == save_every


def test_a_finished_run_says_so_and_stays_as_it_is(whole, tiny):
    directory, _ = whole
    before, console = curve(directory), Console(record=True, width=120)
    run.train(load_config(None, [f"config={directory}/config.yml"]), console)
    assert "already trained to step 7" in console.export_text()
    assert curve(directory) == before


@pytest.mark.audit  # in `make test`, test_equality has such layouts, and test_job a whole run
def test_simulated_devices_train_alike(whole, tiny, tmp_path):
    """The run's mesh takes all eight devices; one device gives the same losses but for rounding."""
    cfg = quick(tiny, tmp_path, "mesh.fsdp=4", "mesh.data=2", "train.steps=2")
    got = curve(run.train(cfg, Console(quiet=True)))
    want = curve(whole[0])
    assert jax.device_count() == 8
    assert abs(got[0]["loss"] - want[0]["loss"]) < 1e-5


def test_peak_of_simulated_devices_is_that_of_the_machine():
    one, eight = jax.devices()[:1], jax.devices()
    assert hardware.peak_flops(one, "float32") == hardware.peak_flops(eight, "float32") > 1e9
