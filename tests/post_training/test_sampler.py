"""The engine of a run answers with the trainer's own arrays, and lets go of them before a step donates them."""

import dataclasses
import gc
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import minitext as mt
from minitext.errors import UserError
from minitext.inference.engine import COLUMNS, LEAST_PAGES
from minitext.inference.sampling import Want
from minitext.post_training.sampler import Sampler, engine_devices
from minitext.sharding.mesh import make_mesh
from minitext.training.step import init_state

PROMPTS, SEEDS = [(1, 2, 3), (4, 5)], [7, 8]


def setting(*words, devices=1):
    """A sampler, and a model's state."""
    cfg = mt.load_config(
        "laptop",
        [
            "model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=4", "model.mlp=64", "model.vocab=260",
            "data.source=prompts", "data.path=a.jsonl", "data.seq_len=16", "train.global_batch=8",
            "objective.kind=grpo", "objective.prompts=2", "objective.group=4", "objective.max_tokens=6", *words,
        ],
    )  # fmt: skip
    mesh = make_mesh(cfg.mesh, devices=jax.devices()[:devices])
    sampler = Sampler(cfg, mesh, frozenset([256]))
    sampler.options = dataclasses.replace(sampler.options, row_sizes=(8,))  # one program to compile
    return sampler, init_state(cfg, mesh)


def buffers(tree):
    """The bytes on each device at each address; arrays that share memory count once."""
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return {(s.device.id, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}


def copied(sampler, params):
    """The bytes that a loaded engine has beside the trainer's, and the engine."""
    engine, shared = sampler._loaded(params), buffers(params)
    found = buffers(engine.arrays)
    return sum(size for place, size in found.items() if place not in shared), engine


def answer(sampler, params):
    return sampler.answer(params, PROMPTS, SEEDS, [1.0, 0.7], 4)


def assert_same(ours, theirs):
    for one, other in zip(chain(*ours), chain(*theirs), strict=True):
        assert one.tokens == other.tokens and one.ended == other.ended
        np.testing.assert_array_equal(one.logp, other.logp)


@pytest.mark.audit
@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (("mesh.data=2", "mesh.tensor=2", "objective.engine_devices=2"), 4),
        (("mesh.data=8",), 8),
        (("mesh.data=1", "mesh.tensor=4", "objective.engine_devices=4"), 4),
    ],
)
def test_where_the_devices_have_their_parts_nothing_is_copied(words, devices):
    sampler, state = setting(*words, devices=devices)
    assert copied(sampler, state.params)[0] == 0


@pytest.mark.audit
def test_what_is_copied_for_an_engine_is_gone_after_the_answers():
    """One device wants the whole of what two divide for training."""
    sampler, state = setting("mesh.data=1", "mesh.fsdp=2", devices=2)
    first = answer(sampler, state.params)

    def live():
        gc.collect()
        return sum(buffers(jax.live_arrays()).values())

    before, params = live(), jax.tree.leaves(state.params)
    own, engine = copied(sampler, state.params)
    assert own == sum(x.nbytes for x in params if not x.is_fully_replicated) > 0
    assert live() - before == own
    engine.release()
    assert live() == before
    assert_same(first, answer(sampler, state.params))
    assert live() == before


@pytest.mark.audit
def test_bfloat16_costs_half_the_matrices_while_it_answers():
    sampler, state = setting("model.dtype=bfloat16")
    assert state.params["blocks"]["norm_ffn"]["scale"].ndim == 2  # a vector of each layer
    matrices = [
        x for x in jax.tree.leaves(state.params) if x.ndim == 3 or (x.ndim == 2 and len(x) > 2)
    ]
    whole, halves = (
        sum(x.nbytes for x in tree) for tree in (jax.tree.leaves(state.params), matrices)
    )
    own, engine = copied(sampler, state.params)
    assert own == whole - halves // 2
    answer(sampler, state.params)
    assert engine.arrays == []


@pytest.mark.parametrize(
    "words",
    [(), pytest.param(("model.lora.rank=2",), marks=pytest.mark.audit)],
    ids=["all", "adapters"],
)
def test_a_step_that_donates_the_weights_changes_only_the_next_answers(words):
    """They are those of an engine with a copy, bit for bit."""
    sampler, state = setting(*words)
    lender, _ = setting(*words)
    lender.options = dataclasses.replace(lender.options, borrow=False)
    lender.keeps = bool(words)
    step = jax.jit(lambda params: jax.tree.map(lambda x: 1.5 * x + 0.1, params), donate_argnums=0)
    texts = []
    for _ in range(3):
        params = state.model_params
        assert copied(sampler, params)[0] == 0
        ours = answer(sampler, params)
        assert_same(ours, answer(lender, params))
        texts.append([one.tokens for group in ours for one in group])
        old = buffers(state.params)
        state = dataclasses.replace(state, params=step(state.params))
        assert (
            buffers(state.params).keys() == old.keys()
        )  # nothing kept the step from using their memory
    assert texts[0] != texts[1] != texts[2]


def test_each_process_has_the_first_devices_that_are_its_own():
    class Device(NamedTuple):
        id: int
        process_index: int

    def mesh(*processes) -> Any:
        devices = np.empty(len(processes), object)
        devices[:] = [Device(i, process) for i, process in enumerate(processes)]
        return SimpleNamespace(devices=devices.reshape(2, -1))

    ids = lambda *args: [device.id for device in engine_devices(*args)]  # noqa: E731
    assert ids(mesh(0, 0, 0, 0), 2) == [0, 1] and ids(mesh(0, 0, 0, 0), 3) == [0, 1, 2]
    assert ids(mesh(0, 0, 0, 1, 1, 1), 2) == [0, 1]
    assert ids(mesh(1, 1, 0, 0), 2) == [2, 3] and ids(mesh(1, 0, 0, 1), 1) == [1]
    for processes, count, problem in (
        ((1, 0, 0, 1), 2, "can't be divided like that"),
        ((0, 0, 1, 1), 4, "can't be divided like that"),
        ((0, 0), 3, "there are 2"),
    ):
        with pytest.raises(UserError, match=problem):
            engine_devices(mesh(*processes), count)


@pytest.mark.audit
def test_a_program_cuts_out_one_matrix_at_a_time():
    """Or borrowing would only move the second copy into each program's own memory."""
    sampler, state = setting("model.layers=8", "model.embed=128", "model.mlp=512")
    engine = sampler._loaded(state.params)
    ints = np.zeros((4, COLUMNS + LEAST_PAGES), np.int32)
    run = np.zeros(4, np.int32), ints, np.zeros((4, 4), np.float32), None
    part = np.zeros((6, 16), np.int32), np.zeros((1, 0), np.int32), np.int32(0), np.int32(0)
    matrix = 4 * 128 * 512
    for program, args in (
        (partial(engine.programs.decode.lower, want=Want(random=True)), run),
        (engine.programs.prefill.lower, part),
    ):
        memory = program(engine.arrays, engine.cache, *args).compile().memory_analysis()
        assert matrix < memory.temp_size_in_bytes < 2 * matrix
