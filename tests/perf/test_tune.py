"""Choosing block shapes: what is counted, what is refused, and how candidates are ranked."""

import importlib.util
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from minitext.cli import main
from minitext.errors import UserError
from minitext.hardware import CHIPS
from minitext.kernels import block_shapes, cases
from minitext.kernels.matmul.tpu import matmul
from minitext.perf import tune

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")


def small(m: int = 128, k: int = 128, n: int = 128) -> cases.Case:
    shape = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    return cases.Case(lambda x, w: matmul(x, w, tiles=(m, k, n)), (shape, shape))


@pytest.mark.audit
@needs_libtpu
def test_candidates_are_compiled_and_ranked(monkeypatch):
    monkeypatch.setitem(cases.CASES, "small", small)
    monkeypatch.setitem(cases.SWEEPS, "small", {"m": (7, 128), "k": (256,), "n": (128, 256)})
    seen = []
    found = tune.tune("small", "v5e", lambda *counts: seen.append(counts))
    assert seen == [(n, 4) for n in (1, 2, 3, 4)]
    # Fewer, larger steps spend less on each step's beginning and end.
    assert [tuple(c.blocks.values()) for c in found[:2]] == [(128, 256, 256), (128, 256, 128)]
    assert [c.steps for c in found[:2]] == [2, 4]
    for candidate in found[:2]:
        assert candidate.seconds == candidate.steps * candidate.cycles / CHIPS["v5e"].clock
        assert 0 < candidate.mxu_share < 1 and candidate.vmem_bytes > 0
    for candidate in found[2:]:
        assert "tile m=7" in candidate.refusal and candidate.to_json()["seconds"] is None
    assert tune.best("small", found) is found[0]
    with pytest.raises(UserError, match="no block shape of small can run: .*tile m=7"):
        tune.best("small", found[2:])


def call(name, grid):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    return lambda x: pl.pallas_call(body, grid=grid, out_shape=x, name=name)(x)


def test_steps_are_those_of_the_grid():
    x = jnp.zeros((8, 128))
    one, two = (type("Kernel", (), {"name": name}) for name in ("one", "two"))
    # One kernel needs no name; two are told apart by theirs, in whatever order they come.
    assert tune.count_steps(jax.jit(call(None, (3, 5))), (x,), (one,)) == [15]
    both = lambda x: call("one", (2,))(jax.jit(call("two", (7,)))(x))  # noqa: E731
    assert tune.count_steps(both, (x,), (one, two)) == [2, 7]
    assert tune.count_steps(both, (x,), (two, one)) == [7, 2]
    with pytest.raises(UserError, match="ambiguous"):
        tune.count_steps(lambda x: call("one", (2,))(call("one", (3,))(x)), (x,), (one, two))
    with pytest.raises(UserError, match="grid of one depends on values"):
        tune.count_steps(lambda n, x: call("one", (n,))(x), (jnp.int32(3), x), (one,))


@given(q=st.sampled_from([128, 384, 512, 8192]), kv=st.sampled_from([128, 640, 2048]))
def test_causal_steps_are_the_blocks_with_something_to_see(q, kv):
    starts = [(i, j) for i in range(0, cases.T, q) for j in range(0, cases.T, kv)]
    # Its last query sees a block's first key, or none sees any.
    seen = sum(min(i + q, cases.T) > j for i, j in starts)
    assert cases._causal_steps(q, kv) == cases.N * seen


@given(m=st.sampled_from([100, 128, 512, 1000, 4096]))
def test_group_steps_are_the_tiles_with_rows_of_a_group(m):
    group = np.repeat(np.arange(cases.E), cases.GROUPS)
    visits = {(row // m, group[row]) for row in range(len(group))}
    assert cases._group_steps(m) == len(visits)


@pytest.mark.parametrize("op", cases.SWEEPS)
def test_every_operation_to_tune_has_its_rows(op):
    assert op in cases.CASES
    for chip in (name for name, chip in CHIPS.items() if chip.platform == "tpu"):
        row = block_shapes.BLOCKS[op, chip]
        assert row.keys() == cases.SWEEPS[op].keys()
        assert math.prod(row.values()) > 0


def test_what_cannot_be_tuned_is_said(monkeypatch, capsys):
    def minitext(*words):
        monkeypatch.setattr(sys, "argv", ["minitext", *words])
        with pytest.raises(SystemExit) as stop:
            main.main()
        return stop.value.code, capsys.readouterr().err

    for words, reason in (
        (["matmul"], "one chip"), (["softmax", "chip=v5e"], "nothing to tune for 'softmax'"),
        (["matmul", "chip=v9"], "no chip 'v9'"), (["matmul", "chip=h100"], "run this on one"),
    ):  # fmt: skip
        code, err = minitext("tune", *words)
        assert code == 2 and reason in err
    monkeypatch.setitem(sys.modules, "tune_jax", None)
    with pytest.raises(UserError, match=r"minitext\[tune\]"):
        tune.measure("matmul")
