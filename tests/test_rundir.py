"""Reading a run back, and refusing a directory that holds another one."""

import math

import jax
import numpy as np
import pytest
from rich.console import Console

from minitext import run, rundir
from minitext.errors import UserError
from minitext.train import init_state


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    cfg = tiny("train.steps=2", "train.eval_batches=1", f"run.dir={directory}", "run.name=a", "mesh.data=1",
               "mesh.fsdp=8")  # fmt: skip
    return run.train(cfg, Console(quiet=True)), cfg


def test_a_run_trained_on_eight_devices_is_read_on_one(trained):
    directory, cfg = trained
    again, params, tokenizer, step = rundir.load_run(directory)
    assert again.model == cfg.model and step == 2
    assert tokenizer.decode(tokenizer.encode("def f():")) == "def f():"
    for x in jax.tree.leaves(params):
        assert len(x.devices()) == 1 and np.isfinite(x).all()


def test_evaluation_reports_one_loss_in_several_units(trained):
    result = rundir.evaluate_run(trained[0])
    assert result["step"] == 2 and result["tokens"] > 1000
    np.testing.assert_allclose(result["perplexity"], math.exp(result["loss"]))
    # The grammar is ASCII and its tokens are bytes, but for the ends of documents, which are no text.
    assert (
        result["loss"] / math.log(2)
        <= result["bits_per_byte"]
        < 1.02 * result["loss"] / math.log(2)
    )
    assert result["floor"] < result["loss"]


def test_other_data_may_be_evaluated(trained, tmp_path):
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n" * 50)
    result = rundir.evaluate_run(trained[0], ["data.source=files", f"data.path={tmp_path}/a.txt"])
    assert result["floor"] is None and result["loss"] > 1


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.embed=16", "model.embed=32, not 16"),
        ("data.seq_len=16", "data.seq_len=32"),
        ("data.seed=3", "data.seed=0"),
    ],
)
def test_a_directory_of_another_model_or_other_data_is_refused(trained, tiny, override, named):
    _, cfg = trained
    other = cfg.replace(dict([override.split("=")]))
    with pytest.raises(UserError, match=named):
        run.train(other, Console(quiet=True))


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a run directory"):
        rundir.load_run(tmp_path)


def test_a_run_without_checkpoint_says_how_to_train_it(trained, tmp_path):
    (tmp_path / "config.yml").write_text((trained[0] / "config.yml").read_text())
    with pytest.raises(UserError, match="no checkpoint yet.*minitext train config="):
        rundir.load_run(tmp_path)


def test_disk_errors_are_one_line(tmp_path):
    with pytest.raises(UserError, match="No space left"), rundir.disk_errors(tmp_path):
        raise OSError(28, "No space left on device")


def test_resumed_parameters_are_those_that_were_saved(trained):
    directory, cfg = trained
    _, params, _, _ = rundir.load_run(directory)
    from minitext.mesh import make_mesh

    fresh = init_state(cfg, make_mesh(devices=jax.devices()[:1])).params
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(fresh), strict=True)
    ]
    assert all(moved)
