"""Pipelines: schedules that keep their promises, and the loss and gradients of one device whatever the schedule."""

import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sharding import batch_for

from minitext import stacks
from minitext.checkpoint import Checkpointer
from minitext.errors import UserError
from minitext.mesh import make_mesh
from minitext.parallel.schedule import Slot, bubble, idle_share, make_table
from minitext.parallel.trace import measure_slots
from minitext.train import (
    abstract_batch,
    abstract_state,
    accumulate,
    check_mesh,
    init_state,
    make_eval_step,
    make_loss_fn,
    make_train_step,
    make_value_and_grad,
)

SMALL = [
    "model.layers=8", "model.embed=16", "model.heads=2", "model.kv_heads=2", "model.mlp=32", "model.vocab=256",
    "model.scan_layers=true", "data.seq_len=16", "train.global_batch=16", "mesh.data=1",
]  # fmt: skip


def mesh_of(cfg):
    return make_mesh(cfg.mesh, devices=jax.devices()[: np.prod(list(cfg.mesh.sizes().values()))])


# --- schedules


@st.composite
def pipelines(draw):
    schedule, S = draw(st.sampled_from(["gpipe", "1f1b", "circular"])), draw(st.integers(1, 6))
    if schedule == "circular":
        return schedule, S, S * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return schedule, S, draw(st.integers(1, 20)), 1


@given(pipelines())
def test_the_table_is_idle_as_the_formula_says(pipeline):
    assert idle_share(make_table(*pipeline)) == pytest.approx(bubble(*pipeline))


@given(pipelines())
def test_every_dependency_is_kept(pipeline):
    """All work is there once, and begins after what it needs is done and, from another stage, sent."""
    _, S, M, R = pipeline
    when = {}
    for row, slots in enumerate(make_table(*pipeline)):
        for stage, slot in enumerate(slots):
            if slot is not None:
                assert (slot, stage) not in when
                when[slot, stage] = row
    assert len(when) == 2 * S * M * R
    way = list(itertools.product(range(R), range(S)))
    for m in range(M):
        forward = [when[Slot("forward", m, group), stage] for group, stage in way]
        backward = [when[Slot("backward", m, group), stage] for group, stage in reversed(way)]
        assert forward + backward == sorted({*forward, *backward})


@given(pipelines())
def test_1f1b_keeps_few_microbatches_however_many_there_are(pipeline):
    _, S, M, _ = pipeline
    table = make_table("1f1b", S, M)
    for stage in range(S):
        alive = most = 0
        for row in table:
            if row[stage] is not None:
                alive += 1 if row[stage].kind == "forward" else -1
                most = max(most, alive)
        assert most == min(M, 2 * (S - 1 - stage) + 1)


# --- values


@functools.cache
def reference(tiny, tied):
    """Loss and gradients of one device over three steps of plain gradient descent."""
    cfg = tiny(*SMALL, f"model.tie_embeddings={tied}")
    return descend(cfg, make_mesh(devices=jax.devices()[:1]))


def descend(cfg, mesh, steps=3):
    params, seen = init_state(cfg, mesh).params, []
    gradients = jax.jit(accumulate(make_value_and_grad(cfg, mesh), cfg))
    move = jax.jit(lambda params, grads: jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads))
    with jax.set_mesh(mesh):
        for seed in range(steps):
            nll, grads = gradients(params, batch_for(cfg, mesh, seed))
            params = move(params, grads)
            seen.append((float(nll), stacks.as_one_stack(jax.device_get(grads))))
    return seen


LAYOUTS = [
    "mesh.stage=4 pipeline.schedule=gpipe pipeline.microbatches=4",
    "mesh.stage=4 pipeline.schedule=gpipe pipeline.microbatches=8",
    "mesh.stage=4 pipeline.schedule=1f1b pipeline.microbatches=8",
    "mesh.stage=4 pipeline.schedule=circular",
    *(f"mesh.stage=2 mesh.fsdp=2 mesh.tensor=2 pipeline.schedule={s}" for s in ("gpipe", "1f1b", "circular")),
    "mesh.stage=2 mesh.fsdp=2 pipeline.schedule=1f1b model.tie_embeddings=true model.scan_layers=false",
    "mesh.stage=2 mesh.data=2 pipeline.schedule=circular model.remat=full train.microbatches=2",
    "mesh.stage=2 pipeline.schedule=gpipe model.remat=dots model.tie_embeddings=true",
    "mesh.stage=2 pipeline.schedule=1f1b model.remat=full train.microbatches=4 sharding.rules=pp",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_compute_what_one_device_computes(tiny, layout):
    cfg = tiny(*SMALL, *layout.split())
    want = reference(tiny, cfg.model.tie_embeddings)
    for (nll, grads), (want_nll, want_grads) in zip(descend(cfg, mesh_of(cfg)), want, strict=True):
        np.testing.assert_allclose(nll, want_nll, rtol=2e-6)
        for (path, got), leaf in zip(
            jax.tree.leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
        ):
            scale, name = np.abs(leaf).max(), jax.tree_util.keystr(path)
            np.testing.assert_allclose(got / scale, leaf / scale, atol=1e-5, err_msg=name)


def test_a_trace_shows_the_idle_slots_of_the_formula(tiny):
    """Four stages and sixteen microbatches: stages that wait compute no layer, those that work do."""
    cfg = tiny(*SMALL, "mesh.stage=4", "pipeline.schedule=circular", "pipeline.microbatches=16")
    mesh = mesh_of(cfg)
    state, batch = init_state(cfg, mesh), batch_for(cfg, mesh, 0)
    with jax.set_mesh(mesh):
        compiled = make_train_step(cfg, mesh).lower(state, batch).compile()
    slots = measure_slots(compiled, state, batch)
    table = make_table("circular", 4, 16, 2)
    assert [[slot is not None for slot in row] for row in table] == slots
    idle = 1 - np.mean(slots)
    assert abs(idle - bubble("circular", 4, 16, 2)) < 0.03


# --- memory


def temporary_bytes(tiny, schedule, M):
    """Temporaries of a step whose microbatches have two rows, however many there are."""
    cfg = tiny(
        *SMALL, "mesh.stage=4", f"pipeline.schedule={schedule}", "model.layers=4", "data.seq_len=64",
        f"pipeline.microbatches={M}", f"train.global_batch={2 * M}",
    )  # fmt: skip
    mesh = mesh_of(cfg)
    with jax.set_mesh(mesh):
        step = make_train_step(cfg, mesh).lower(abstract_state(cfg, mesh), abstract_batch(cfg, mesh))
    return step.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_1f1b_does_not_grow_with_microbatches(tiny):
    few, many = (temporary_bytes(tiny, "1f1b", M) for M in (8, 32))
    assert many < 1.2 * few
    few, many = (temporary_bytes(tiny, "gpipe", M) for M in (8, 32))
    assert many > 2.5 * few
