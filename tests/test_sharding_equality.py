"""The equality matrix: however the work is split, three train steps give one device's losses, gradients, parameters."""

import functools

import jax
import numpy as np
import pytest
from test_sharding import batch_for

from minitext import stacks
from minitext.mesh import make_mesh
from minitext.parallel.layouts import LAYOUTS
from minitext.train import accumulate, init_state, make_train_step, make_value_and_grad

SIZES = [
    "model.layers=4", "model.embed=32", "model.heads=8", "model.kv_heads=4", "model.mlp=64", "model.vocab=256",
    "model.scan_layers=true", "data.seq_len=32", "train.global_batch=16", "mesh.data=1",
]  # fmt: skip


def three_steps(cfg, mesh):
    """Losses, gradients and the last parameters of three steps of AdamW on packed rows."""
    step, gradients = make_train_step(cfg, mesh), accumulate(make_value_and_grad(cfg, mesh), cfg)
    both = jax.jit(lambda state, batch: (*step(state, batch), gradients(state.params, batch)[1]))
    state, losses, grads = init_state(cfg, mesh), [], []
    with jax.set_mesh(mesh):
        for seed in range(3):
            state, metrics, found = both(state, batch_for(cfg, mesh, seed))
            losses.append(float(metrics["loss"]))
            grads.append(stacks.as_one_stack(jax.device_get(found)))
    return losses, grads, stacks.as_one_stack(jax.device_get(state.params))


@functools.cache
def one_device(tiny, tied):
    cfg = tiny(*SIZES, f"model.tie_embeddings={tied}")
    return three_steps(cfg, make_mesh(devices=jax.devices()[:1]))


def assert_near(got, want, relative):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale, name = np.abs(b).max(), jax.tree_util.keystr(path)
        np.testing.assert_allclose(a / scale, b / scale, atol=relative, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_three_steps_are_those_of_one_device(tiny, layout):
    cfg = tiny(*SIZES, *layout.split())
    losses, grads, params = three_steps(cfg, make_mesh(cfg.mesh))
    want_losses, want_grads, want_params = one_device(tiny, cfg.model.tie_embeddings)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    # Rounding: sums of up to 512 tokens in another order.
    assert_near(grads, want_grads, 1e-5)
    assert_near(params, want_params, 3e-5)
