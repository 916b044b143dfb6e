"""Pipelines: schedules that keep their promises, and the loss and gradients of one device whatever the schedule."""

import functools
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitext.book.equality import packed_batch
from minitext.book.pipeline_trace import measure_slots
from minitext.checkpoint import stacks
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.compiler.targets import topology_mesh
from minitext.config.sections import PipelineConfig
from minitext.errors import UserError
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import make_mesh
from minitext.sharding.pipeline_schedule import (
    Slot,
    bubble,
    count_microbatches,
    idle_share,
    make_table,
)
from minitext.training.step import (
    abstract_batch,
    abstract_state,
    accumulate,
    init_state,
    make_eval_step,
    make_train_step,
    make_value_and_grad,
)
from tests.conftest import QUICK_FLAGS, TINY, audit_but

SMALL = [
    "model.layers=8", "model.embed=16", "model.heads=2", "model.kv_heads=2", "model.mlp=32", "model.vocab=256",
    "model.scan_layers=true", "data.seq_len=16", "train.global_batch=16", "mesh.data=1",
]  # fmt: skip


def train(cfg, mesh, steps=3):
    state, losses = init_state(cfg, mesh), []
    step = make_train_step(cfg, mesh)
    with jax.set_mesh(mesh):
        for seed in range(steps):
            state, metrics = step(state, packed_batch(cfg, mesh, seed))
            losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


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
def reference(tiny, tied, layers):
    """The parameters at the start, and loss and gradients of one device over three steps of plain gradient descent."""
    cfg = tiny(*SMALL, f"model.tie_embeddings={tied}", f"model.layers={layers}")
    mesh = make_mesh(devices=jax.devices()[:1])
    start = init_state(cfg, mesh).params
    return jax.device_get(start), descend(cfg, mesh, start)


def place(start, cfg, mesh):
    """Parameters where `cfg` has them; a circular pipeline's have another shape, in the same order."""
    wanted, treedef = jax.tree.flatten(abstract_state(cfg, mesh).params)
    pairs = zip(jax.tree.leaves(start), wanted, strict=True)
    placed = [jax.device_put(np.reshape(x, w.shape), w.sharding) for x, w in pairs]
    return jax.tree.unflatten(treedef, placed)


def descend(cfg, mesh, params, steps=3):
    seen = []
    gradients = jax.jit(accumulate(make_value_and_grad(cfg, mesh), cfg))
    move = jax.jit(lambda params, grads: jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads))
    with jax.set_mesh(mesh):
        for seed in range(steps):
            sums, grads = gradients(params, packed_batch(cfg, mesh, seed))
            params = move(params, grads)
            seen.append((float(sums.values["loss"]), stacks.as_one_stack(jax.device_get(grads))))
    return seen


LAYOUTS = [
    "mesh.stage=4 pipeline.schedule=gpipe pipeline.microbatches=4",
    "mesh.stage=4 pipeline.schedule=gpipe pipeline.microbatches=8",
    "mesh.stage=4 pipeline.schedule=1f1b pipeline.microbatches=8",
    "mesh.stage=4 pipeline.schedule=circular",
    *(f"mesh.stage=2 mesh.fsdp=2 mesh.tensor=2 pipeline.schedule={s}" for s in ("gpipe", "1f1b", "circular")),
    "mesh.stage=2 mesh.fsdp=2 pipeline.schedule=1f1b model.tie_embeddings=true model.scan_layers=false model.layers=4",
    "mesh.stage=2 mesh.data=2 pipeline.schedule=circular model.remat=full train.microbatches=2",
    "mesh.stage=2 pipeline.schedule=gpipe model.remat=dots model.tie_embeddings=true",
    "mesh.stage=2 pipeline.schedule=1f1b model.remat=full train.microbatches=4 sharding.rules=pp",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", audit_but(LAYOUTS[7:8], LAYOUTS))
def test_stages_compute_what_one_device_computes(tiny, layout):
    cfg = tiny(*SMALL, *layout.split())
    start, want = reference(tiny, cfg.model.tie_embeddings, cfg.model.layers)
    found = descend(cfg, mesh_of(cfg), place(start, cfg, mesh_of(cfg)))
    for (nll, grads), (want_nll, want_grads) in zip(found, want, strict=True):
        np.testing.assert_allclose(nll, want_nll, rtol=2e-6)
        for (path, got), leaf in zip(
            jax.tree.leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
        ):
            scale, name = np.abs(leaf).max(), jax.tree_util.keystr(path)
            np.testing.assert_allclose(got / scale, leaf / scale, atol=1e-5, err_msg=name)


TRACE = """
    from minitext import load_config
    from minitext.distributed import devices
    devices.start(4)
    import jax, json, sys
    from minitext.book.equality import packed_batch
    from minitext.sharding.mesh import make_mesh
    from minitext.book.pipeline_trace import measure_slots
    from minitext.training.step import init_state, make_train_step
    cfg = load_config("laptop", sys.argv[1:])
    mesh = make_mesh(cfg.mesh)
    state, batch = init_state(cfg, mesh), packed_batch(cfg, mesh, 0)
    with jax.set_mesh(mesh):
        compiled = make_train_step(cfg, mesh).lower(state, batch).compile()
    print(json.dumps(measure_slots(compiled, state, batch)))
"""


@pytest.mark.audit
def test_a_trace_shows_the_idle_slots_of_the_formula():
    """Four stages and sixteen microbatches: stages that wait compute no layer, those that work do."""
    settings = "mesh.stage=4", "pipeline.schedule=circular", "pipeline.microbatches=16"
    # In a process of its own: others of these tests may have compiled for TPUs.
    code = [sys.executable, "-c", textwrap.dedent(TRACE), *TINY, *SMALL, *settings]
    slots = json.loads(
        subprocess.check_output(code, text=True, env=os.environ | {"XLA_FLAGS": QUICK_FLAGS})
    )
    table = make_table("circular", 4, 16, 2)
    assert [[slot is not None for slot in row] for row in table] == slots
    idle = 1 - np.mean(slots)
    assert abs(idle - bubble("circular", 4, 16, 2)) < 0.03


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_a_process_that_compiled_for_tpus_is_not_profiled():
    topology_mesh("v5e:2x2")
    with pytest.raises(UserError, match="start a new one"):
        measure_slots(None)


# --- memory


def temporary_bytes(tiny, schedule, M):
    """Temporaries of a step whose microbatches have two rows, however many there are."""
    cfg = tiny(
        *SMALL, "mesh.stage=4", f"pipeline.schedule={schedule}", "model.layers=4", "data.seq_len=64",
        f"pipeline.microbatches={M}", f"train.global_batch={2 * M}",
    )  # fmt: skip
    mesh = mesh_of(cfg)
    with jax.set_mesh(mesh):
        step = make_train_step(cfg, mesh).lower(
            abstract_state(cfg, mesh), abstract_batch(cfg, mesh)
        )
    return step.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.audit
def test_memory_of_1f1b_does_not_grow_with_microbatches(tiny):
    few, many = (temporary_bytes(tiny, "1f1b", M) for M in (8, 32))
    assert many < 1.2 * few
    few, many = (temporary_bytes(tiny, "gpipe", M) for M in (8, 32))
    assert many > 2.5 * few


# --- the rest of the package


@pytest.mark.audit
@pytest.mark.parametrize("schedule", audit_but(["circular"], ["1f1b", "circular"]))
def test_a_train_step_moves_the_parameters_as_one_device_does(tiny, schedule):
    """The whole step: clipping, AdamW, and the circular pipeline's way to store layers."""
    one = tiny(*SMALL)
    cfg = tiny(*SMALL, "mesh.stage=2", "mesh.fsdp=2", f"pipeline.schedule={schedule}")
    (losses, params), (want_losses, want) = (
        train(c, mesh) for c, mesh in ((cfg, mesh_of(cfg)), (one, mesh_of(one)))
    )
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    leaves = jax.tree.leaves(stacks.as_one_stack(params)), jax.tree.leaves(want)
    for got, leaf in zip(*leaves, strict=True):
        np.testing.assert_allclose(got, leaf, atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", audit_but([], ["1f1b", "circular"]))
def test_documents_in_a_row_stay_apart(tiny, schedule):
    """The loss of a row's second document is the same whatever stands in the first."""
    cfg = tiny(
        *SMALL, "model.layers=4", "train.global_batch=4", "mesh.stage=2", f"pipeline.schedule={schedule}"
    )  # fmt: skip
    mesh = mesh_of(cfg)
    state, batch = init_state(cfg, mesh), packed_batch(cfg, mesh, 0)
    batch["loss_mask"] = (batch["segment_ids"] == 2).astype("float32")
    other = {**batch, "tokens": jax.numpy.where(batch["segment_ids"] == 1, 7, batch["tokens"])}
    gradients = jax.jit(make_value_and_grad(cfg, mesh))
    with jax.set_mesh(mesh):
        (sums, _), (others, _) = gradients(state.params, batch), gradients(state.params, other)
        evaluated = make_eval_step(cfg)(state, batch)[0]
    assert sums == others and sums[0] > 0
    np.testing.assert_allclose(
        evaluated["loss"], sums[0], rtol=2e-6
    )  # evaluation takes another way through


@pytest.mark.slow
def test_a_circular_pipeline_s_layers_are_read_as_a_stack_and_back(tiny, tmp_path):
    """Its layers are stored in the order of the network, so saved in one form they are read in the other."""
    stages = tiny(*SMALL, "mesh.stage=2", "mesh.fsdp=2", "pipeline.schedule=circular")
    four = tiny(*SMALL, "mesh.stage=4", "pipeline.schedule=gpipe")
    one = tiny(*SMALL)
    for number, (a, b) in enumerate([(stages, one), (one, stages), (stages, four)]):
        saved = init_state(a, mesh_of(a))
        with Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(1, saved, {}, wait=True)
            wanted = abstract_state(b, mesh_of(b))
            restored = checkpointer.restore(wanted)
        got = restored.state
        for x, leaf in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert (x.shape, x.sharding) == (leaf.shape, leaf.sharding)
        states = (stacks.as_one_stack(jax.device_get(x.params)) for x in (saved, got))
        for x, leaf in zip(*map(jax.tree.leaves, states), strict=True):
            np.testing.assert_array_equal(x, leaf)


def test_layers_are_stored_where_they_are_used(tiny):
    """Stage s of S holds, of every group, the s-th part: with 2 stages and 2 groups of 8 layers 0 1 4 5 and 2 3 6 7."""
    cfg = tiny(*SMALL, "mesh.stage=2", "pipeline.schedule=circular")
    params = abstract_state(cfg, mesh_of(cfg)).params
    numbered = jax.device_put(
        np.arange(8.0).reshape(2, 4, 1), params["blocks"]["norm_ffn"]["scale"].get_value().sharding
    )
    held = [shard.data.ravel().tolist() for shard in numbered.addressable_shards]
    assert held == [[0, 1, 4, 5], [2, 3, 6, 7]]
    blocks = jax.tree.leaves(params["blocks"])
    parts = [math.prod(x.sharding.shard_shape(x.shape)) for x in blocks]
    assert sum(x.size for x in blocks) == 2 * sum(parts)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["mesh.stage=4", "model.layers=6"], r"model.layers=6 .* mesh.stage=4: choose a multiple of 4"),
        (
            ["mesh.stage=4", "pipeline.schedule=circular", "model.layers=12"],
            r"model.layers=12 .* mesh.stage=4 x pipeline.repeats=2: choose a multiple of 8",
        ),
        (
            ["mesh.stage=4", "pipeline.microbatches=3"],
            r"pipeline.microbatches=3 must divide the 16 .* among 1, 2, 4, 8, 16",
        ),
        (
            ["mesh.stage=4", "pipeline.schedule=circular", "pipeline.microbatches=2"],
            r"pipeline.microbatches=2 must be a multiple of mesh.stage=4 .* among 4, 8, 16",
        ),
        (
            ["mesh.stage=4", "pipeline.schedule=circular", "train.microbatches=8"],
            r"pipeline.schedule=circular .* multiple of 4 .* there are 2: raise train.global_batch",
        ),
        (["mesh.stage=2", "mesh.tensor=2", "model.vocab=258"], r"model.vocab=258 .* mesh.stage=2 x mesh.tensor=2"),
        (["mesh.stage=2", "mesh.context=2"], "mesh.context=2 cannot be combined with mesh.stage=2"),
        (["mesh.stage=2", "sharding.rules=fsdp_tp"], r"mesh.stage=2 would do the same work"),
    ],
)  # fmt: skip
def test_a_pipeline_that_does_not_fit_is_refused(tiny, overrides, told):
    cfg = tiny(*SMALL, *overrides)
    with pytest.raises(UserError, match=told):
        check_mesh(cfg, mesh_of(cfg))


def test_microbatches_by_default_keep_the_bubble_below_a_fifth(tiny):
    for S, rows, schedule in [(2, 64, "1f1b"), (4, 64, "gpipe"), (4, 48, "circular")]:
        M = count_microbatches(PipelineConfig(schedule=schedule), S, rows)
        assert rows % M == 0 and bubble(schedule, S, M, 2) < 0.2
    assert count_microbatches(PipelineConfig(), 4, 7) == 7
