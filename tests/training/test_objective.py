"""Any objective runs through the same step: weights, microbatches, meshes, and a reference that doesn't change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minitext.book.equality import packed_batch
from minitext.errors import UserError
from minitext.sharding.mesh import make_mesh
from minitext.sharding.rules import RULES
from minitext.training.objective import Objective, count_targets, language_modelling, token_logps
from minitext.training.step import (
    init_state,
    make_eval_step,
    make_loss_fn,
    make_train_step,
    model_def,
)


def weighted(cfg):
    """An objective with weights that aren't integers and a reference: squared distance of log-probabilities."""
    graphdef = model_def(cfg)

    def prepare(reference, batch):
        model = nnx.merge(graphdef, reference)
        x_BTD = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])[0]
        return {**batch, "ref_logp": token_logps(cfg, model, x_BTD, batch)}

    def summed(model, x_BTD, batch):
        off_BT = token_logps(cfg, model, x_BTD, batch) - batch["ref_logp"] - 1.0
        loss = jnp.sum(batch["share"] * jnp.square(off_BT))
        return loss, {"loss": loss, "off": jnp.sum(batch["share"] * off_BT)}

    return Objective(summed, lambda batch: jnp.sum(batch["share"]), prepare, ("share",))


def run(cfg, mesh, steps=2):
    batch = packed_batch(cfg, mesh, 0)
    share = np.random.default_rng(1).uniform(0, 0.1, batch["tokens"].shape).astype(np.float32)
    batch["share"] = jax.device_put(share, batch["loss_mask"].sharding) * batch["loss_mask"]
    with jax.set_mesh(mesh):
        state = init_state(cfg, mesh)
        state = dataclasses.replace(state, reference=jax.tree.map(jnp.copy, state.params))
        before = jax.tree.map(np.asarray, state.reference)
        step = make_train_step(cfg, mesh, weighted(cfg))
        for _ in range(steps):
            state, metrics = step(state, batch)
        jax.tree.map(
            np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.reference)
        )
        values, weight = make_eval_step(cfg, weighted(cfg))(state, batch)
    numbers = jax.device_get(metrics) | {"after": float(values["loss"] / weight)}
    return numbers, jax.device_get(state.params)


BASE = ["optim.learning_rate=1e-2", "optim.warmup_steps=0"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["mesh.data=2", "mesh.tensor=2", "mesh.context=2", "train.microbatches=4"],
            marks=pytest.mark.audit,
        ),
        pytest.param(
            ["mesh.fsdp=4", "mesh.tensor=2", "mesh.data=1", "train.loss_chunks=4"],
            marks=pytest.mark.audit,
        ),
        pytest.param(["mesh.fsdp=4", "mesh.context=2", "mesh.data=1"], marks=pytest.mark.audit),
        pytest.param(
            ["mesh.stage=2", "mesh.data=2", "mesh.fsdp=2", "pipeline.schedule=1f1b"],
            marks=pytest.mark.audit,
        ),
    ],
    ids=["microbatches", "fsdp, tensor and chunks", "context", "1f1b"],
)
def test_weights_and_reference_are_the_same_on_every_layout(tiny, words):
    want, want_params = run(tiny(*BASE), make_mesh(devices=jax.devices()[:1]))
    cfg = tiny(*BASE, *words)
    got, params = run(cfg, make_mesh(cfg.mesh))
    assert want["off"] > -1.0 and want["after"] < want["loss"] < 1.0
    for name in ("loss", "off", "grad_norm", "after"):
        np.testing.assert_allclose(got[name], want[name], rtol=2e-4, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), params, want_params)


def test_frozen_parameters_get_no_gradient_and_keep_every_bit(tiny):
    cfg = tiny(*BASE, "model.layers=1")
    mesh = make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        whole = init_state(cfg, mesh)
        params, frozen = nnx.split_state(whole.params, nnx.PathContains("norm"), ...)
        batch = packed_batch(cfg, mesh, 0)
        gradient = jax.jit(jax.grad(make_loss_fn(cfg), has_aux=True))
        grads, _ = gradient(params, batch, frozen)
        want, _ = gradient(whole.params, batch)
    of_params, _ = nnx.split_state(want, nnx.PathContains("norm"), ...)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, of_params)
    state = dataclasses.replace(whole, params=params, frozen=frozen)
    names = {path for path, _ in nnx.to_flat_state(state.model_params)}
    assert names == {path for path, _ in nnx.to_flat_state(whole.params)}


def test_log_probabilities_are_those_of_the_loss(tiny):
    cfg = tiny(
        "train.loss_chunks=4", "mesh.data=1", "mesh.tensor=2", "mesh.context=2", "model.layers=1"
    )
    mesh = make_mesh(cfg.mesh, jax.devices()[:4])
    with jax.set_mesh(mesh):
        params, batch = init_state(cfg, mesh).params, packed_batch(cfg, mesh, 0)

        def logps(params, batch):
            rules = RULES[cfg.sharding.rules]
            batch = {name: rules.shard(x, "batch", "seq") for name, x in batch.items()}
            model = nnx.merge(model_def(cfg), params)
            x_BTD = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])[0]
            return token_logps(cfg, model, x_BTD, batch)

        both = jax.jit(lambda *args: (logps(*args), make_loss_fn(cfg)(*args)[0]))
        logp_BT, loss = both(params, batch)
    total = -np.sum(np.asarray(logp_BT) * np.asarray(batch["loss_mask"]))
    np.testing.assert_allclose(total, loss, rtol=1e-5)
    assert count_targets(batch) == np.sum(np.asarray(batch["loss_mask"]))


def test_another_objective_is_not_taken_for_language_modelling(tiny):
    cfg = tiny("objective.kind=preference", "data.source=preferences", "data.path=a.jsonl")
    with pytest.raises(UserError, match=r"objective.kind=preference is not language modelling"):
        language_modelling(cfg)
    assert isinstance(language_modelling(tiny()), Objective)
