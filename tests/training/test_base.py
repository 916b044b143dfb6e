"""A run with adapters trains and saves nothing else, and its base stays the one that it was trained beside."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import minitext as mt
from minitext.book.equality import packed_batch
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config.quantization import STORAGE_PRESETS
from minitext.errors import UserError
from minitext.models.lora import is_adapter, merged_config
from minitext.models.transformer import Transformer
from minitext.sharding.mesh import make_mesh
from minitext.training import base, run, run_dir
from minitext.training.quantize_run import quantize_run
from minitext.training.step import check_trainable, init_state, make_train_step
from tests.conftest import audit_but

LORA = "model.lora.rank=4", "model.lora.alpha=8", "optim.learning_rate=0.01"
QUIET = Console(quiet=True)


def variables(state):
    return jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))


@pytest.fixture
def runs(adapted):
    """The folder of both runs, and the configuration of the one with adapters."""
    return adapted, run_dir.read_config(adapted / "tuned")


def again(runs, tmp_path, *changes):
    """Copies both runs, without the adapters' last steps, and returns the folder and the configuration to resume."""
    folder, cfg = runs
    for name in ("base", "tuned"):
        shutil.copytree(folder / name, tmp_path / name)
    shutil.rmtree(tmp_path / "tuned" / "checkpoints" / "6")
    lines = (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()[:3]
    (tmp_path / "tuned" / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    values = {"run.dir": str(tmp_path), "checkpoint.load_parameters": str(tmp_path / "base")}
    return cfg.replace(values | dict(change.split("=") for change in changes))


def losses(path):
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [(x["step"], x["loss"], x["grad_norm"]) for x in map(json.loads, lines)]


def test_only_adapters_are_trained_and_saved(runs, tiny, tmp_path):
    folder, cfg = runs
    mesh = make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        state = init_state(cfg, mesh)
        before = jax.device_get(state.frozen)
        batch = packed_batch(cfg, mesh, 0)
        new, metrics = make_train_step(cfg, mesh)(state, batch)
    assert all(map(is_adapter, variables(new.params)))
    assert not any(map(is_adapter, variables(new.frozen)))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(new.frozen))
    count = sum(x.size for x in jax.tree.leaves(new.params))
    moments = sum(x.size for x in jax.tree.leaves(new.opt_state))
    assert 2 * count <= moments <= 2 * count + 3  # and steps taken
    assert metrics["grad_norm"] > 0
    with Checkpointer(folder / "tuned" / "checkpoints") as checkpointer:
        saved = checkpointer.facts(6)["layout"]["leaves"]
    sizes = [int(np.prod(leaf["shape"])) for leaf in saved.values()]
    assert 3 * count <= sum(sizes) <= 3 * count + 4


def test_a_run_with_adapters_is_read_whole_and_exported_merged(runs, tmp_path):
    folder, _ = runs
    cfg, params, _, step = run_dir.load_run(folder / "tuned")
    assert step == 6 and cfg.model.lora.rank == 4
    _, plain, _, _ = run_dir.load_run(folder / "base")
    frozen = nnx.state(nnx.merge(nnx.graphdef(model(cfg.model)), params), nnx.Not(nnx.LoRAParam))
    for mine, theirs in zip(jax.tree.leaves(frozen), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert run_dir.export_run(folder / "tuned", tmp_path / "merged") == 6
    merged_cfg, merged, _, _ = run_dir.load_run(tmp_path / "merged")
    assert merged_cfg.model == merged_config(cfg.model)
    tokens = np.arange(24).reshape(2, 12)
    with_adapters = nnx.merge(nnx.graphdef(model(cfg.model)), params)(tokens)
    one = nnx.merge(nnx.graphdef(model(merged_cfg.model)), merged)(tokens)
    np.testing.assert_allclose(one, with_adapters, atol=1e-5)
    base_logits = nnx.merge(nnx.graphdef(model(merged_cfg.model)), plain)(tokens)
    assert np.abs(base_logits - with_adapters).max() > 1e-2


def model(cfg):
    return nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("mesh", audit_but([()], [(), ("mesh.fsdp=8", "mesh.data=1")]))
def test_resuming_is_bit_equal(runs, tmp_path, mesh):
    """On another mesh too, but for rounding; and a base that has been trained on is read at the step that it was."""
    cfg = again(runs, tmp_path, *mesh)
    theirs = run_dir.read_config(tmp_path / "base")
    run.train(theirs.replace({"run.dir": str(tmp_path), "train.steps": 4}), QUIET)
    run.train(cfg, QUIET)
    want, got = losses(runs[0] / "tuned"), losses(tmp_path / "tuned")
    if not mesh:
        assert got == want
    else:
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_another_base_is_refused(runs, tiny, tmp_path):
    cfg = again(runs, tmp_path)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match="not a run directory"):
        run.train(cfg, QUIET)
    with pytest.raises(UserError, match="is not a run directory: put it back"):
        run_dir.load_run(_at(tmp_path / "tuned", cfg))
    theirs = run_dir.read_config(runs[0] / "base")
    run.train(
        theirs.replace({"run.dir": str(tmp_path), "data.seed": 7, "train.save_every": 2}), QUIET
    )
    for call in (lambda: run.train(cfg, QUIET), lambda: run_dir.load_run(tmp_path / "tuned")):
        with pytest.raises(UserError, match="another step 3 than") as error:
            call()
        assert "\n" not in str(error.value)
    shutil.rmtree(tmp_path / "base" / "checkpoints" / "3")
    with pytest.raises(UserError, match="belong to step 3 of"):
        run.train(cfg, QUIET)
    (tmp_path / "tuned" / base.NAME).write_text("{}")
    with pytest.raises(UserError, match="does not say which base"):
        run.train(cfg, QUIET)


def _at(directory, cfg):
    from minitext.config.config import to_yaml

    (directory / "config.yml").write_text(to_yaml(cfg))
    return directory


def test_what_cannot_be_trained_is_refused(tiny, tmp_path):
    with pytest.raises(UserError, match="name it in checkpoint.load_parameters"):
        run.train(tiny(*LORA, f"run.dir={tmp_path}"), QUIET)
    stored = "model.storage=[{dtype: int8}]"
    mesh = make_mesh(tiny().mesh, jax.devices()[:1])
    with pytest.raises(UserError, match=r"train adapters beside them \(model.lora.rank=8\)"):
        check_trainable(tiny(stored), mesh)
    check_trainable(tiny(stored, *LORA), mesh)
    staged = tiny(*LORA, "mesh.stage=2", "pipeline.schedule=1f1b")
    with pytest.raises(UserError, match="set pipeline.schedule=gpipe"):
        check_trainable(staged, make_mesh(staged.mesh, jax.devices()[:2]))


@pytest.mark.audit
def test_adapters_beside_stored_weights_and_beside_other_adapters(runs, tmp_path):
    """A quantized run is a base too; a run with adapters is one with its adapters merged."""
    folder, cfg = runs
    quantize_run(folder / "base", tmp_path / "small", STORAGE_PRESETS["nf4"])
    small = mt.load_config(None, [f"config={tmp_path}/small/config.yml"])
    values = {
        "run.dir": str(tmp_path), "run.name": "q", "checkpoint.load_parameters": str(tmp_path / "small"),
        "model.storage": small.model.storage,
    }  # fmt: skip
    run.train(cfg.replace(values), QUIET)
    whole, params, _, _ = run_dir.load_run(tmp_path / "q")
    assert whole.model.is_stored and whole.model.lora.rank
    kinds = {str(x.dtype) for x in jax.tree.leaves(params)}
    assert "uint8" in kinds
    run_dir.export_run(tmp_path / "q", tmp_path / "q-merged")
    assert not run_dir.load_run(tmp_path / "q-merged")[0].model.is_stored

    second = cfg.replace(
        {"run.dir": str(tmp_path), "run.name": "second", "checkpoint.load_parameters": str(folder / "tuned")}
    )  # fmt: skip
    run.train(second, QUIET)
    run_dir.export_run(folder / "tuned", tmp_path / "merged")
    plain = second.replace(
        {"run.name": "third", "checkpoint.load_parameters": str(tmp_path / "merged")}
    )
    run.train(plain, QUIET)
    np.testing.assert_allclose(losses(tmp_path / "second"), losses(tmp_path / "third"), rtol=1e-5)


MESHES = {
    "fsdp": ("mesh.fsdp=8", "sharding.rules=fsdp"),
    "tp": ("mesh.tensor=2", "mesh.data=4", "sharding.rules=tp"),
    "fsdp_tp": ("mesh.fsdp=4", "mesh.tensor=2", "sharding.rules=fsdp_tp"),
    "parts": ("mesh.data=1", "train.microbatches=4"),
    "gpipe": ("mesh.fsdp=2", "mesh.stage=2", "pipeline.schedule=gpipe"),
}


@pytest.mark.audit
@pytest.mark.parametrize("name", [*MESHES])
def test_a_step_is_the_same_on_every_mesh(tiny, name):
    def step(*settings):
        cfg = tiny(*LORA, *settings)
        sizes = cfg.mesh.sizes().values()
        mesh = make_mesh(cfg.mesh, jax.devices()[: abs(int(np.prod([*sizes])))])
        with jax.set_mesh(mesh):
            state = init_state(cfg, mesh)
            leaves, treedef = jax.tree.flatten(state.params)
            grown = [x + 0.02 * jnp.cos(jnp.arange(x.shape[-1])) for x in leaves]
            state = dataclasses.replace(state, params=jax.tree.unflatten(treedef, grown))
            new, metrics = make_train_step(cfg, mesh)(state, packed_batch(cfg, mesh, 0))
        return jax.device_get(metrics), jax.device_get(new.params)

    (one, params), (other, others) = step("mesh.data=1"), step(*MESHES[name])
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-5)
    np.testing.assert_allclose(other["grad_norm"], one["grad_norm"], rtol=1e-4)
    for want, got in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_a_value_head_is_trained_beside_adapters(runs, tiny, tmp_path):
    """The base doesn't have it, and it is saved with the adapters."""
    cfg = tiny(*LORA, "model.value_head=true", f"run.dir={tmp_path}", "run.name=a",
               f"checkpoint.load_parameters={runs[0]}/base")  # fmt: skip
    mesh = make_mesh(cfg.mesh)
    state, _ = run_dir.first_state(cfg, mesh, None)
    (tmp_path / "a").mkdir()
    state = run_dir.complete_state(cfg, mesh, state, reference=False)
    assert "value" in state.params and "value" not in state.frozen
    assert not any(map(is_adapter, variables(state.frozen)))
