"""A loss that is no number: the run stops or skips the step, the batch is kept, checkpoints stay good."""

import os

import jax
import numpy as np
import pytest
from rich.console import Console

from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config.config import load_config
from minitext.data.batches import Batches, make_batches
from minitext.observability.metrics import read_metrics
from minitext.sharding.mesh import make_mesh
from minitext.training import run
from minitext.training.nonfinite import FOLDER, IN_A_ROW, NonFinite, rows
from minitext.training.step import init_state, make_train_step

QUICK = [
    "model.layers=1",
    "train.steps=7",
    "train.save_every=3",
    "train.eval_every=100",
    "train.eval_batches=1",
    "run.name=a",
]
BAD = 5


def poison(batch):
    """The batch with a weight in its first target that is no number."""
    mask = np.array(batch["loss_mask"])
    mask[0, 0] = np.nan
    return batch | {"loss_mask": jax.device_put(mask, batch["loss_mask"].sharding)}


@pytest.fixture
def poisoned(monkeypatch):
    """Makes batch number BAD of every run one whose loss is no number."""
    take = Batches.__next__

    def take_one(self):
        batch = take(self)
        bad = self._split == "train" and self._iterator.get_state()["next_index"] == BAD
        return poison(batch) if bad else batch

    monkeypatch.setattr(Batches, "__next__", take_one)


def test_stop_keeps_the_last_good_checkpoint_and_the_batch_and_skip_goes_on(
    tiny, tmp_path, poisoned
):
    cfg = tiny(*QUICK, f"run.dir={tmp_path}")
    with pytest.raises(NonFinite) as raised:
        run.train(cfg, Console(quiet=True))
    directory = tmp_path / "a"
    told = str(raised.value)
    assert raised.value.exit_code == 1 and "\n" not in told
    assert told.startswith(f"step {BAD}: loss is nan and grad_norm is nan; its batch is in ")
    assert Checkpointer(directory / "checkpoints").steps() == [3]
    lines = read_metrics(directory)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and lines[-1]["loss"] in (
        "nan",
        "inf",
    )
    with np.load(directory / FOLDER / f"{BAD}.npz") as saved:
        assert saved["step"] == BAD and saved["row"].tolist() == list(range(8))
        assert saved["tokens"].shape == (8, 32) and np.isnan(saved["loss_mask"]).sum() == 1
    text = (directory / FOLDER / f"{BAD}.txt").read_text()
    assert text.count("--- row") == 8 and "--- row 7\n" in text

    # Going on with the other policy begins at the last good step and passes over the bad one.
    console = Console(record=True, width=400)
    again = load_config(None, [f"config={tmp_path}/a/config.yml", "train.on_nan=skip"])
    run.train(again, console)
    lines = read_metrics(tmp_path / "a")
    assert [line.get("skipped") for line in lines] == [None] * 3 + [0.0, 1.0, 0.0, 0.0]
    assert all(np.isfinite(line["loss"]) for line in lines if line["step"] != BAD)
    assert f"step {BAD}: loss is " in console.export_text()
    assert Checkpointer(tmp_path / "a" / "checkpoints").steps() == [3, 6, 7]


def test_skips_that_do_not_end_stop_the_run(tiny, tmp_path):
    """The rate is so high that the first update overflows: no batch is at fault, and none helps."""
    cfg = tiny(
        *QUICK, f"run.dir={tmp_path}", "train.on_nan=skip", "optim.learning_rate=1e37",
        "train.steps=50", "train.save_every=50",
    )  # fmt: skip
    with pytest.raises(NonFinite, match=f"that makes {IN_A_ROW} skipped steps in a row"):
        run.train(cfg, Console(quiet=True))
    assert len(os.listdir(tmp_path / "a" / FOLDER)) == 2 * IN_A_ROW


def test_parameters_that_are_no_numbers_are_not_saved(tiny, tmp_path):
    """One step whose loss is a number and whose update is not."""
    cfg = tiny(
        *QUICK, f"run.dir={tmp_path}", "train.save_every=1", "optim.learning_rate=1e38",
        "optim.weight_decay=1e3", "optim.warmup_steps=0",
    )  # fmt: skip
    with pytest.raises(NonFinite, match="step 1: its update made parameters that are not finite"):
        run.train(cfg, Console(quiet=True))
    assert Checkpointer(tmp_path / "a" / "checkpoints").steps() == []


@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.audit)])
def test_a_skipped_step_changes_no_bit_but_counts(tiny, kind):
    words = "train.on_nan=skip", f"optim.kind={kind}", "mesh.fsdp=4", "mesh.data=2"
    cfg = tiny(*words, "model.layers=1")
    mesh = make_mesh(cfg.mesh)
    batches = make_batches(cfg.data, mesh, vocab=cfg.model.vocab, global_batch=8)
    with jax.set_mesh(mesh):
        step = make_train_step(cfg, mesh)
        state, metrics = step(init_state(cfg, mesh), next(batches))
        assert metrics["skipped"] == 0
        before = jax.tree.map(np.array, state)
        state, metrics = step(state, poison(next(batches)))
        assert metrics["skipped"] == 1 and np.isnan(metrics["loss"])
        after = jax.tree.map(np.array, state)
        state, metrics = step(state, next(batches))
        assert metrics["skipped"] == 0 and np.isfinite(metrics["loss"])
    assert after.step == before.step + 1
    moments = 0
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if np.issubdtype(old.dtype, np.integer):
            assert new == old + 1
        else:
            moments += 1
            assert np.array_equal(old, new)
    assert moments > 20
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), after.params, state.params)
    assert all(jax.tree.leaves(changed))


def test_rows_are_those_of_the_devices_each_once():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None))
    x = jax.device_put(np.arange(12).reshape(4, 3), sharding)
    numbers, arrays = rows({"x": x})
    assert numbers.tolist() == [0, 1, 2, 3]
    assert np.array_equal(arrays["x"], np.arange(12).reshape(4, 3))
