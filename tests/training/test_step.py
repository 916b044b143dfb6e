"""The train step: token weighting, accumulation, donation, and bit-equal reruns."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minitext.book.equality import packed_batch
from minitext.compiler.targets import topology_mesh
from minitext.errors import UserError
from minitext.kernels.simulator import strict
from minitext.perf.memory import stored_bytes
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import make_mesh
from minitext.training.step import (
    abstract_batch,
    abstract_state,
    init_state,
    make_eval_step,
    make_loss_fn,
    make_train_step,
)
from tests.compiler.test_aot import needs_libtpu


def loss_and_gradients(cfg, mesh):
    state = init_state(cfg, mesh)
    args = state.params, packed_batch(cfg, mesh, 0)
    with jax.set_mesh(mesh):
        run = jax.jit(jax.value_and_grad(make_loss_fn(cfg), has_aux=True)).lower(*args).compile()
    # Without the mesh: a simulated kernel's memory, which the calling thread may fill, is of none.
    (loss, _), grads = run(*args)
    return float(loss), jax.device_get(grads)


def run(cfg, mesh, steps=2):
    state, step, losses = init_state(cfg, mesh), make_train_step(cfg, mesh), []
    for seed in range(steps):
        state, metrics = step(state, packed_batch(cfg, mesh, seed))
        losses.append(jax.device_get(metrics))
    return losses, jax.device_get(state)


@functools.cache
def on_one_device(tiny):
    """The step, a state to begin with, and the metrics of the steps that the others are compared with."""
    cfg, mesh = tiny(), make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        step, begin, found = make_train_step(cfg, mesh), init_state(cfg, mesh), []
        state = copy(begin)
        for seed in range(2):
            state, metrics = step(state, packed_batch(cfg, mesh, seed))
            found.append(jax.device_get(metrics))
    return step, begin, found


def copy(state):
    return jax.tree.map(jnp.copy, state)


@pytest.mark.audit  # those on a mesh show it too
def test_microbatches_give_the_whole_batch(tiny, one_device):
    """Rows have different numbers of targets, so a mean of means would show."""
    whole, _ = on_one_device(tiny)[2]
    (parts, _), _ = run(tiny("train.microbatches=4"), one_device)
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=2e-6)


def test_microbatches_on_a_mesh(tiny):
    cfg = tiny("train.microbatches=2", "mesh.data=2", "mesh.fsdp=2", "model.scan_layers=true")
    mesh = make_mesh(cfg.mesh, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        (got, _), _ = run(cfg, mesh)
    want, _ = on_one_device(tiny)[2]
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=2e-6)
    np.testing.assert_allclose(got["grad_norm"], want["grad_norm"], rtol=1e-5)


def test_the_old_state_is_donated(tiny, one_device):
    step, begin, _ = on_one_device(tiny)
    state = copy(begin)
    step(state, packed_batch(tiny(), one_device, 0))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_z_loss_changes_the_gradient_and_not_the_reported_loss(tiny, one_device):
    plain, _ = on_one_device(tiny)[2]
    (with_z, _), _ = run(tiny("train.z_loss=0.1"), one_device)
    np.testing.assert_allclose(with_z["loss"], plain["loss"], rtol=1e-6)
    assert with_z["grad_norm"] != plain["grad_norm"]


def test_a_batch_without_targets_changes_nothing_to_nan(tiny, one_device):
    step, begin, _ = on_one_device(tiny)
    batch = packed_batch(tiny(), one_device, 0)
    batch["loss_mask"] = batch["loss_mask"] * 0
    _, metrics = step(copy(begin), batch)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["tokens"] == 0


def test_eval_sums_and_counts(tiny, one_device):
    batch = packed_batch(tiny(), one_device, 0)
    _, begin, (metrics, _) = on_one_device(tiny)
    sums, tokens = make_eval_step(tiny())(begin, batch)
    np.testing.assert_allclose(sums["loss"] / tokens, metrics["loss"], rtol=1e-6)
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
        (["mesh.tensor=2", "sharding.rules=fsdp"], "mesh.tensor=2"),
        (["train.global_batch=12"], "train.global_batch=12"),
        (["train.microbatches=4"], "train.microbatches=4"),
        (["mesh.fsdp=8", "model.embed=36", "model.heads=2"], "model.embed=36"),
        (["train.loss_chunks=3"], "train.loss_chunks=3"),
        (
            ["mesh.context=8", "data.seq_len=36"],
            "data.seq_len=36 is not divisible by mesh.context=8",
        ),
        (["mesh.stage=8", "model.vocab=258"], "model.layers=2 is not divisible by mesh.stage=8"),
        (["train.loss_chunks=8", "mesh.context=8"], "among 1, 2, 4"),
        (["train.loss_impl=auto", "mesh.context=8"], "set train.loss_impl=xla"),
    ],
)
def test_a_mesh_the_model_cannot_use_is_refused(tiny, overrides, named):
    cfg = tiny(*overrides)
    with pytest.raises(UserError, match=named):
        check_mesh(cfg, make_mesh(cfg.mesh))


# The loss in chunks


@functools.cache
def whole_loss(tiny, z_loss, tied):
    cfg = tiny(f"train.z_loss={z_loss}", f"model.tie_embeddings={tied}", *ONE_LAYER)
    return loss_and_gradients(cfg, make_mesh(devices=jax.devices()[:1]))


ONE_LAYER = ("model.heads=8", "model.kv_heads=4", "model.layers=1")
CHUNKED = [
    ("mesh.data=1",),
    ("train.z_loss=0.1", "mesh.fsdp=4", "mesh.tensor=2"),
    ("train.z_loss=0.1", "mesh.context=2", "mesh.tensor=4", "model.tie_embeddings=true"),
    ("sharding.rules=tp_seq", "mesh.tensor=4"),
]


@pytest.mark.audit
@pytest.mark.parametrize("layout", CHUNKED)
def test_a_loss_in_chunks_is_the_loss(tiny, layout):
    cfg = tiny("train.loss_chunks=4", *ONE_LAYER, *layout)
    mesh = make_mesh(cfg.mesh, devices=jax.devices()[: 1 if layout == CHUNKED[0] else 8])
    loss, grads = loss_and_gradients(cfg, mesh)
    want_loss, want = whole_loss(tiny, cfg.train.z_loss, cfg.model.tie_embeddings)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("mesh.data=1",), marks=pytest.mark.audit),
        ("mesh.data=1", "train.z_loss=0.1", "model.tie_embeddings=true"),
        pytest.param(
            ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2", "train.z_loss=0.1"),
            marks=pytest.mark.audit,
        ),
    ],
    ids=" ".join,
)
def test_a_fused_loss_is_the_loss(tiny, as_on_a_tpu, settings):
    """No logits are stored: all that the output layer makes is what the kernel returns."""
    cfg = tiny("train.loss_impl=auto", "model.attention.impl=xla", *ONE_LAYER, *settings)
    mesh = make_mesh(cfg.mesh, devices=jax.devices()[: math.prod(cfg.mesh.sizes().values())])
    with strict() as runs:
        loss, grads = loss_and_gradients(cfg, mesh)
    assert runs, "no kernel ran"
    want_loss, want = whole_loss(tiny, cfg.train.z_loss, cfg.model.tie_embeddings)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def compiled_text(cfg, mesh):
    args = abstract_state(cfg, mesh), abstract_batch(cfg, mesh)
    with jax.set_mesh(mesh):
        return make_train_step(cfg, mesh).lower(*args).compile().as_text()


def sizes_with(text, dimension):
    """Numbers in each array of a program that has a dimension of this size."""
    shapes = [list(map(int, s.split(","))) for s in re.findall(r"\w\d+\[([\d,]+)\]", text)]
    return [math.prod(shape) for shape in shapes if dimension in shape]


V = 8 * 47  # a size that nothing else has


TPU = pytest.param("v5e:2x4", marks=[needs_libtpu, pytest.mark.audit])


@pytest.mark.parametrize("where", ["cpu", TPU])
def test_no_device_holds_logits_of_the_whole_vocabulary(tiny, where):
    def program(*settings):
        cfg = tiny(f"model.vocab={V}", *ONE_LAYER, *settings)
        return compiled_text(
            cfg, make_mesh(cfg.mesh) if where == "cpu" else topology_mesh(where, cfg.mesh)
        )

    split = program("mesh.data=2", "mesh.tensor=4")
    assert not sizes_with(split, V) and sizes_with(split, V // 4)
    if where == "cpu":  # the same search finds them where the vocabulary is whole
        assert max(sizes_with(program("mesh.data=8"), V)) >= 32 * V


def test_chunks_hold_a_part_of_the_logits(tiny, one_device):
    one, four = (
        max(
            sizes_with(
                compiled_text(
                    tiny(f"model.vocab={V}", f"train.loss_chunks={n}", "model.layers=1"), one_device
                ),
                V,
            )
        )
        for n in (1, 4)
    )
    assert one == 8 * 32 * V and four <= max(one // 4, V * 32)


# The optimizer's state on the host


@pytest.mark.audit
def test_offloaded_state_waits_on_the_host_and_changes_no_bit(tiny):
    cfg = tiny("optim.offload=true", "mesh.fsdp=8")
    mesh = make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        state = init_state(cfg, mesh)
        state, _ = make_train_step(cfg, mesh)(state, packed_batch(cfg, mesh, 0))
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)} == {"pinned_host"}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
        (_, away), (_, here) = (
            run(tiny(f"optim.offload={x}", "mesh.fsdp=8"), mesh) for x in (True, False)
        )
    for a, b in zip(jax.tree.leaves(away), jax.tree.leaves(here), strict=True):
        np.testing.assert_array_equal(a, b)


@needs_libtpu
def test_offloaded_state_is_no_argument_in_a_tpus_memory(tiny):
    cfg = tiny("optim.offload=true", "model.layers=1")
    mesh = topology_mesh("v5e:2x4", cfg.mesh)
    args = abstract_state(cfg, mesh), abstract_batch(cfg, mesh)
    with jax.set_mesh(mesh):
        stats = make_train_step(cfg, mesh).lower(*args).compile().memory_analysis()
    moments, params = (
        sum(stored_bytes(x.shape, 4, "tpu") for x in jax.tree.leaves(tree))
        for tree in (args[0].opt_state, args[0].params)
    )
    assert stats.host_argument_size_in_bytes == moments > 2 * params
    assert params < stats.argument_size_in_bytes < 1.1 * params
