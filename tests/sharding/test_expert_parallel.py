"""Expert parallelism: one device's losses and gradients, what is dropped, and what devices send."""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.book.equality import differences, run_steps
from minitext.book.layouts import EXPERT_LAYOUTS
from minitext.errors import UserError
from minitext.perf.comms import notes, predict
from minitext.sharding.expert_parallel import Slots, on_each_device, ragged_slices
from minitext.sharding.mesh import make_mesh
from tests.conftest import audit_but
from tests.perf.test_comms import SIZES, TILES, audited

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")

MOE = ["model.ffn.kind=moe", "model.ffn.experts=8", "model.mlp=48", "model.scan_layers=true"]
SMALL = [*SIZES, *MOE, "model.layers=2"]
QUICK = "ep x fsdp x tp"


@functools.cache
def one_device(tiny, *other):
    cfg = tiny(*SMALL, *other)
    return run_steps(cfg, make_mesh(devices=jax.devices()[:1]), steps=2)


@functools.partial(jax.jit, static_argnames="k")
def dispatch_and_gradient(place, x, cotangent, k):
    sent, pull = jax.vjp(lambda x: place.dispatch(x, k), x)
    return sent, *pull(cotangent)


@settings(max_examples=6)
@given(
    k=st.integers(1, 3), spare=st.integers(0, 5), lost=st.integers(0, 4), seed=st.integers(0, 99)
)
def test_slots_hold_what_was_placed_and_gradients_go_the_same_way(k, spare, lost, seed):
    rng = np.random.default_rng(seed)
    X, D = 6, 3
    A, size = X * k, X * k - lost + spare
    slots = rng.permutation(A - lost + spare)[: A - lost]
    slots = np.concatenate([slots, np.full(A - len(slots), size)])
    place = Slots.of(jnp.array(rng.permutation(A)), jnp.array(slots), size)
    matrix = np.zeros((size, A))  # of slots and assignments
    for a, slot in enumerate(np.asarray(place.slot_A)):
        if slot < size:
            matrix[slot, a] = 1
            assert place.assignment_S[slot] == a
    assert matrix.sum() == A - lost and (np.asarray(place.assignment_S) == A).sum() == spare
    x, weights = rng.normal(size=(X, D)), rng.normal(size=(X, k))
    there = matrix @ np.repeat(x, k, axis=0)
    sent, grad = dispatch_and_gradient(place, np.float32(x), np.float32(there), k)
    np.testing.assert_allclose(sent, there, rtol=1e-6)
    back = (matrix.T @ there).reshape(X, k, D) * weights[..., None]
    combined = jax.jit(Slots.combine)(place, np.float32(there), np.float32(weights))
    np.testing.assert_allclose(combined, back.sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        grad, (matrix.T @ there).reshape(X, k, D).sum(1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("layout", audit_but([QUICK], EXPERT_LAYOUTS))
def test_steps_are_those_of_one_device(tiny, layout):
    """On packed rows: with the experts of a device elsewhere, and with features and storage split as well."""
    settings = EXPERT_LAYOUTS[layout].split()
    cfg = tiny(*SMALL, *settings)
    same = [word for word in settings if word.startswith("model.ffn.")]
    want = one_device(tiny, *same)
    found = run_steps(cfg, make_mesh(cfg.mesh), steps=2, start=want.start)
    for name, difference in differences(found, want).items():
        limit = 1e-6 if name == "loss" else 1e-5 if name.startswith("gradient of") else 3e-5
        assert difference < limit, name


@pytest.mark.audit  # test_comms has another model with experts on this layout in `make test`
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_simulated_devices_send_what_the_formula_says(layout):
    found = audited(*SMALL, *EXPERT_LAYOUTS[layout].split())
    assert found.differences() == {} and found.notes == []
    sends = any(term.kind == "all-to-all" for term in found.compiled)
    assert sends == ("mesh.expert" in EXPERT_LAYOUTS[layout])


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize("factor", ["null", "1.0"])
def test_tpus_send_tokens_as_often_as_the_formula_says(factor):
    settings = [*TILES, *MOE, "model.mlp=512", "model.layers=2", "model.dtype=bfloat16"]
    layout = ["mesh.expert=4", "mesh.fsdp=2", f"model.ffn.capacity_factor={factor}"]
    found = audited(*settings, *layout, target="v5e:2x4")
    kind = "ragged-all-to-all" if factor == "null" else "all-to-all"

    def sent(terms):
        return [term for term in terms if term.kind == kind]

    assert sum(term.count for term in sent(found.terms)) == sum(
        t.count for t in sent(found.compiled)
    )
    if factor == "null":  # in buffers for the worst case; and so is everything else
        assert found.differences() == {}
    else:
        assert sum(t.bytes for t in sent(found.terms)) == sum(t.bytes for t in sent(found.compiled))


def test_an_all_to_all_sends_a_share_of_the_slots(tiny):
    """Each device keeps its own part, and capacity decides how many slots there are."""

    def moved(*settings):
        cfg = tiny(*SMALL, "mesh.expert=8", "sharding.rules=ep", *settings)
        terms = predict(cfg, make_mesh(cfg.mesh), "cpu")
        return sum(t.moved for t in terms if t.kind == "all-to-all")

    tokens, D, layers = 16 * 32 // 8, 32, 2
    # One expert on each device: a token sends one copy at most to any of the seven others.
    assert moved() == layers * 4 * 7 * tokens * D * 4
    # Half of the even share of 2 tokens of 8 experts: an eighth of each row for each of 8 experts.
    assert moved("model.ffn.capacity_factor=0.5") == layers * 4 * 7 * tokens // 8 * D * 4


def test_what_is_only_bounded_is_said(tiny):
    cfg = tiny(*SMALL, "mesh.expert=8")
    (note,) = notes(cfg, make_mesh(cfg.mesh), "tpu")
    assert "ragged" in note and not notes(cfg, make_mesh(cfg.mesh), "cpu")


def test_experts_that_qwix_stores_run_on_one_accelerator_alone():
    device = jax.sharding.AbstractDevice(device_kind="TPU v5", num_cores=None, platform="tpu")
    nothing: Any = None  # neither layout nor rules are looked at
    params: Any = {"gate": 2}
    args: Any = (lambda x, params, layout: (x, params), 1, params, {"gate": None}, nothing)
    for size in (1, 2):
        mesh = jax.sharding.AbstractMesh((size,), ("data",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            if size == 1:
                assert on_each_device(*args, rules=nothing, regather=False) == (1, params)
            else:
                with pytest.raises(UserError, match="stored by Qwix"):
                    on_each_device(*args, rules=nothing, regather=False)


def test_ragged_slices_meet():
    """Where each device's rows for each expert begin, at both ends: the receiver's groups are whole."""
    rng = np.random.default_rng(0)
    W, E, D = 4, 8, 3
    sizes_WE = rng.integers(0, 4, (W, E))
    sizes_WE[:, 5] = 0
    plans = [ragged_slices(jnp.array(sizes_WE), me) for me in range(W)]
    rows = [rng.normal(size=(sizes.sum(), D)) for sizes in sizes_WE]

    def send(arrays, way, size):
        """`jax.lax.ragged_all_to_all`, as its documentation defines it."""
        out = [np.zeros((size, D)) for _ in range(W)]
        for me in range(W):
            first, count, to, _ = (np.asarray(x) for x in plans[me][way])
            for i in range(E):
                to_device = i // (E // W)
                theirs = plans[to_device][way].recv_sizes[me * (E // W) + i % (E // W)]
                assert theirs == count[i]
                out[to_device][to[i] : to[i] + count[i]] = arrays[me][
                    first[i] : first[i] + count[i]
                ]
        return out

    there = send(rows, 0, sizes_WE.sum())
    for me in range(W):
        want = []
        for e in range(me * (E // W), (me + 1) * (E // W)):
            for source, sizes in enumerate(sizes_WE):
                want.append(rows[source][sizes[:e].sum() : sizes[: e + 1].sum()])
        want = np.concatenate(want)
        np.testing.assert_array_equal(there[me][: len(want)], want)
    for got, want in zip(send(there, 1, sizes_WE.sum()), rows, strict=True):
        np.testing.assert_array_equal(got[: len(want)], want)
