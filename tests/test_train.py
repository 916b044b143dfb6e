"""The train step: token weighting, accumulation, donation, and bit-equal reruns."""

import jax
import numpy as np
import pytest
from test_sharding import batch_for

from minitext.errors import UserError
from minitext.mesh import make_mesh
from minitext.train import abstract_state, check_mesh, init_state, make_eval_step, make_train_step


def run(cfg, mesh, steps=2):
    state, step, losses = init_state(cfg, mesh), make_train_step(cfg, mesh), []
    for seed in range(steps):
        state, metrics = step(state, batch_for(cfg, mesh, seed))
        losses.append(jax.device_get(metrics))
    return losses, jax.device_get(state)


def test_microbatches_give_the_whole_batch(tiny, one_device):
    """Rows have different numbers of targets, so a mean of means would show."""
    (whole, _), _ = run(tiny(), one_device)
    (parts, _), _ = run(tiny("train.microbatches=4"), one_device)
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=2e-6)


def test_microbatches_on_a_mesh(tiny):
    cfg = tiny("train.microbatches=2", "mesh.data=2", "mesh.fsdp=2", "model.scan_layers=true")
    mesh = make_mesh(cfg.mesh, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        (got, _), _ = run(cfg, mesh)
    one = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(one):
        (want, _), _ = run(tiny(), one)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=2e-6)
    np.testing.assert_allclose(got["grad_norm"], want["grad_norm"], rtol=1e-5)


def test_two_runs_are_bit_equal(tiny, one_device):
    for a, b in zip(*(jax.tree.leaves(run(tiny(), one_device)) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_old_state_is_donated(tiny, one_device):
    cfg = tiny()
    state, batch = init_state(cfg, one_device), batch_for(cfg, one_device, 0)
    make_train_step(cfg, one_device)(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_z_loss_changes_the_gradient_and_not_the_reported_loss(tiny, one_device):
    (plain, _), _ = run(tiny(), one_device)
    (with_z, _), _ = run(tiny("train.z_loss=0.1"), one_device)
    np.testing.assert_allclose(with_z["loss"], plain["loss"], rtol=1e-6)
    assert with_z["grad_norm"] != plain["grad_norm"]


def test_a_batch_without_targets_changes_nothing_to_nan(tiny, one_device):
    cfg = tiny()
    batch = batch_for(cfg, one_device, 0)
    batch["loss_mask"] = batch["loss_mask"] * 0
    _, metrics = make_train_step(cfg, one_device)(init_state(cfg, one_device), batch)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["tokens"] == 0


def test_eval_sums_and_counts(tiny, one_device):
    cfg = tiny()
    batch = batch_for(cfg, one_device, 0)
    nll, tokens = make_eval_step(cfg)(init_state(cfg, one_device).params, batch)
    (metrics, _), _ = run(cfg, one_device)
    np.testing.assert_allclose(nll / tokens, metrics["loss"], rtol=1e-6)
    assert tokens == batch["loss_mask"].sum()


def test_abstract_state_is_the_state(tiny):
    cfg = tiny("mesh.fsdp=8")
    mesh = make_mesh(cfg.mesh)
    abstract, real = abstract_state(cfg, mesh), init_state(cfg, mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    for a, x in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype) == (x.shape, x.dtype)
        assert a.sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["mesh.tensor=2"], "mesh.tensor=2"),
        (["train.global_batch=12"], "train.global_batch=12"),
        (["train.microbatches=4"], "train.microbatches=4"),
        (["mesh.fsdp=8", "model.embed=36", "model.heads=2"], "model.embed=36"),
    ],
)
def test_a_mesh_the_model_cannot_use_is_refused(tiny, overrides, named):
    cfg = tiny(*overrides)
    with pytest.raises(UserError, match=named):
        check_mesh(cfg, make_mesh(cfg.mesh))
