"""Messages between the deciding and the answering process: what they carry, and what is refused."""

import collections
import socket
import subprocess
import sys

import numpy as np
import pytest

from minitext.book.grading import wire
from minitext.book.grading.remote import End


@pytest.fixture
def end():
    here, there = socket.socketpair()
    with here, there:
        yield End(here, trusted=True)


def test_the_deciding_process_starts_without_jax():
    code = "import sys, minitext.book.grading.worker; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_nothing_of_the_deciding_side_can_be_passed_off_as_shared(end):
    kept = {"points": 4}
    _, number, *_ = end.lend(kept)
    codec = wire.Codec(end)
    assert codec.decode(["yours", number]) is kept
    with pytest.raises(wire.Unfit):
        codec.decode(["new", 1, ["yours", number]])
    with pytest.raises(wire.Unfit):
        end._apply(codec, [[1, ["dict", []]]])
    assert kept == {"points": 4}


@pytest.mark.parametrize(
    "message", [[], ["no"], [["no"]], {}, ["new", 1, ["no"]], ["new", 1, [[]]]]
)
def test_a_message_of_an_unknown_form_is_refused(end, message):
    with pytest.raises(wire.Unfit):
        wire.Codec(end).decode(message)


@pytest.mark.parametrize(
    ("x", "change"),
    [
        ([1, [2]], lambda x: x.append(3)),
        ([1000, [2]], lambda x: x.reverse()),
        (collections.deque([1]), lambda x: x.rotate(1) or x.append(0)),
        ({"a": 1, "b": []}, lambda x: x.update(b=[])),
        ({"a": 1}, lambda x: x.clear()),
        ({1, 2}, lambda x: x.add(3)),
        (bytearray(b"ab"), lambda x: x.reverse()),
        (np.zeros(3), lambda x: x.__setitem__(1, -0.0)),
        (np.array([None, 1], object), lambda x: x.__setitem__(0, 1)),
    ],
)  # fmt: skip
def test_a_change_in_place_is_seen(x, change):
    seen = wire.snapshot(x)
    assert wire.is_as(x, seen)
    change(x)
    assert not wire.is_as(x, seen)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_derivative_of_ones_own_may_stand_under_shard_map(check_vma):
    import jax
    from jax._src import core
    from jax.sharding import PartitionSpec as P

    from minitext.book.grading.wire_jax import custom_params

    @jax.custom_vjp
    def counted(x):
        return 2 * x

    counted.defvjp(lambda x: (2 * x, x), lambda x, g: (0 * x + 1,))
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("stage",), axis_types=kinds, devices=jax.devices()[:4])
    along = {"mesh": mesh, "in_specs": P("stage"), "out_specs": P("stage"), "check_vma": check_vma}
    x = np.arange(8.0, dtype=np.float32)
    traced = jax.make_jaxpr(jax.shard_map(counted, **along))(x)
    (eqn,) = traced.eqns[0].params["jaxpr"].eqns
    given = {"rule": wire.Derivative(eqn), **eqn.params}
    # Outside of any mesh, which is where an answer is read.
    params = custom_params("custom_vjp_call", given)
    assert params["call_jaxpr"].out_avals == eqn.params["call_jaxpr"].out_avals
    body = traced.eqns[0].params["jaxpr"].replace(eqns=[eqn.replace(params=params)])
    read = core.jaxpr_as_fun(core.ClosedJaxpr(body, []))
    again = jax.jit(jax.shard_map(lambda x: read(x)[0], **along))
    np.testing.assert_array_equal(again(x), 2 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: again(x).sum() * 5)(x), np.ones(8))
