"""Reading a run back, and refusing a directory that holds another one."""

import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.observability.metrics import read_metrics
from minitext.training import run, run_dir
from minitext.training.step import init_state


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    cfg = tiny("model.layers=1", "train.steps=2", "train.eval_batches=1", f"run.dir={directory}", "run.name=a",
               "mesh.data=1", "mesh.fsdp=8", "optim.schedule=constant")  # fmt: skip
    return run.train(cfg, Console(quiet=True)), cfg


def test_a_run_trained_on_eight_devices_is_read_on_one(trained):
    directory, cfg = trained
    again, params, tokenizer, step = run_dir.load_run(directory)
    assert again.model == cfg.model and step == 2
    assert tokenizer.decode(tokenizer.encode("def f():")) == "def f():"
    for x in jax.tree.leaves(params):
        assert len(x.devices()) == 1 and np.isfinite(x).all()


def test_evaluation_reports_one_loss_in_several_units(trained):
    result = run_dir.evaluate_run(trained[0])
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
    result = run_dir.evaluate_run(trained[0], ["data.source=files", f"data.path={tmp_path}/a.txt"])
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
        run_dir.load_run(tmp_path)


def test_a_run_without_checkpoint_says_how_to_train_it(trained, tmp_path):
    (tmp_path / "config.yml").write_text((trained[0] / "config.yml").read_text())
    with pytest.raises(UserError, match="no checkpoint yet.*minitext train config="):
        run_dir.load_run(tmp_path)


@pytest.mark.parametrize("folder", ["runs", "my runs", "it's $HOME"])
def test_a_shell_takes_the_command_that_resumes_as_it_is(folder):
    words = shlex.split(run_dir.resume_command(f"{folder}/a"))
    assert words == ["minitext", "train", f"config={folder}/a/config.yml"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("no space")])
def test_disk_errors_are_one_line(tmp_path, error):
    with pytest.raises(UserError, match=f"{tmp_path}: .*o space"), run_dir.disk_errors(tmp_path):
        raise error


def test_resumed_parameters_are_those_that_were_saved(trained):
    directory, cfg = trained
    _, params, _, _ = run_dir.load_run(directory)
    from minitext.sharding.mesh import make_mesh

    fresh = init_state(cfg, make_mesh(devices=jax.devices()[:1])).params
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(fresh), strict=True)
    ]
    assert all(moved)


def test_an_export_has_the_parameters_and_nothing_else(trained, tmp_path):
    directory, cfg = trained
    exported = tmp_path / "export"
    assert run_dir.export_run(directory, exported) == cfg.train.steps
    (_, params, _, step), (_, ours, tokenizer, same) = map(run_dir.load_run, (directory, exported))
    assert step == same and tokenizer.decode(tokenizer.encode("the queen")) == "the queen"
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(ours), strict=True):
        np.testing.assert_array_equal(a, b)
    size = lambda d: sum(p.stat().st_size for p in Path(d, "checkpoints", str(step)).rglob("*"))  # noqa: E731
    assert size(exported) < 0.6 * size(directory)
    assert run_dir.evaluate_run(exported) == run_dir.evaluate_run(directory)
    with pytest.raises(UserError, match="export exists"):
        run_dir.export_run(directory, exported)


ORBAX_ALONE = """
import sys
sys.modules["minitext"] = None  # an import of it fails
import jax, numpy, orbax.checkpoint
tree = orbax.checkpoint.PyTreeCheckpointer().restore(sys.argv[1])
names = jax.tree_util.tree_flatten_with_path(tree)[0]
arrays = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in names}
numpy.savez(sys.argv[2], **arrays)
"""


def test_orbax_alone_reads_an_export(trained, tmp_path):
    run_dir.export_run(trained[0], tmp_path / "export")
    _, params, _, step = run_dir.load_run(trained[0])
    state = tmp_path / "export" / "checkpoints" / str(step) / "state"
    words = [sys.executable, "-c", ORBAX_ALONE, state, tmp_path / "found.npz"]
    subprocess.run(words, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    found = np.load(tmp_path / "found.npz")
    paths, _ = jax.tree_util.tree_flatten_with_path({"params": params})
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    ours = {name.removesuffix(".value"): x for name, (_, x) in zip(names, paths, strict=True)}
    theirs = {name.removesuffix(".value"): found[name] for name in found.files}
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(theirs[name], x, err_msg=name)


def test_an_export_is_whole_or_not_at_all(trained, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file/export"):
        run_dir.export_run(trained[0], tmp_path / "file" / "export")

    def full(*_, **__):
        raise UserError("step 2 was not saved: No space left on device")

    monkeypatch.setattr(run_dir.Checkpointer, "save", full)
    with pytest.raises(UserError, match="No space left"):
        run_dir.export_run(trained[0], tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def losses(directory):
    return {record["step"]: record["loss"] for record in read_metrics(directory)}


def test_a_new_run_begins_with_another_s_parameters(trained, tmp_path):
    directory, cfg = trained
    exported = tmp_path / "export"
    run_dir.export_run(directory, exported)
    fresh = {"run.dir": str(tmp_path), "train.steps": 2}
    for name, source in (("run", directory), ("export", exported)):
        again = cfg.replace(
            fresh | {"run.name": f"from-{name}", "checkpoint.load_parameters": str(source)}
        )
        warm = run.train(again, Console(quiet=True))
        assert list(losses(warm)) == [1, 2]
        assert losses(warm)[1] < losses(directory)[1]


def test_a_new_run_goes_on_from_another_s_full_state(trained, tmp_path):
    directory, cfg = trained
    steps = cfg.train.steps
    more = {"train.steps": steps + 2}
    on = cfg.replace(more | {
        "run.dir": str(tmp_path), "run.name": "on", "checkpoint.load_full_state": str(directory),
    })  # fmt: skip
    shutil.copytree(directory, tmp_path / "copy")
    same = cfg.replace(more | {"run.dir": str(tmp_path), "run.name": "copy"})
    resumed, begun = (losses(run.train(c, Console(quiet=True))) for c in (same, on))
    assert list(begun) == [steps + 1, steps + 2]
    assert begun == {step: resumed[step] for step in begun}  # the data went on as well
    # Its own checkpoints go before another's.
    further = run.train(on.replace({"train.steps": steps + 3}), Console(quiet=True))
    assert list(losses(further)) == [steps + 1, steps + 2, steps + 3]


@pytest.mark.parametrize("key", ["checkpoint.load_full_state", "checkpoint.load_parameters"])
def test_what_cannot_be_loaded_is_one_line(key, trained, tmp_path):
    directory, cfg = trained
    fresh = {"run.dir": str(tmp_path), "run.name": "new"}
    with pytest.raises(UserError, match="not a run directory"):
        run.train(cfg.replace(fresh | {key: str(tmp_path / "nowhere")}), Console(quiet=True))
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="holds another model"):
        run.train(cfg.replace(fresh | {key: str(directory), "model.mlp": 96}), Console(quiet=True))


def test_a_run_begins_from_one_other_at_most():
    with pytest.raises(UserError, match="are both set"):
        load_config("laptop", ["checkpoint.load_full_state=a", "checkpoint.load_parameters=b"])
