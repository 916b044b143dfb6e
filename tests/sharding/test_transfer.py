"""Moving arrays between devices: the same numbers, laid out as asked, and the host isn't on the way."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from minitext.config.sections import MeshConfig
from minitext.inference.engine import Engine, EngineOptions
from minitext.inference.requests import Request
from minitext.sharding import transfer
from minitext.sharding.mesh import make_mesh
from minitext.sharding.transfer import NO_MESH, move
from minitext.training.step import abstract_batch, init_state, make_train_step
from tests.conftest import audit_but

ROWS, COLUMNS, BOTH, WHOLE = (
    PartitionSpec(*spec) for spec in (("y",), (None, "y"), ("x", "y"), ())
)


def layout(devices, spec, kind=AxisType.Explicit):
    """Shardings of a matrix, divided as the spec says, and of a vector, over a mesh of 2 by half the devices."""
    if spec is None:
        return (SingleDeviceSharding(jax.devices()[devices[0]]),) * 2
    there = np.array([jax.devices()[i] for i in devices]).reshape(2 if len(devices) > 1 else 1, -1)
    mesh = Mesh(there, ("x", "y"), axis_types=(kind, kind))
    return NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec("x"))


LAYOUTS = {
    "four by rows": ((0, 1, 2, 3), ROWS, AxisType.Auto),
    "four by columns": ((0, 1, 2, 3), COLUMNS),
    "four in another order": ((3, 1, 0, 2), BOTH),
    "four others": ((4, 5, 6, 7), COLUMNS),
    "half of them": ((2, 3, 4, 5), ROWS, AxisType.Auto),
    "all": (range(8), BOTH),
    "all whole": (range(8), WHOLE),
    "one": ((5,), None),
    "one as a mesh": ((0,), ROWS),
}


@pytest.mark.parametrize("name", audit_but(["four by rows", "all", "one"], LAYOUTS))
def test_moved_arrays_are_the_same_and_never_on_the_host(name):
    arrays = jnp.arange(64.0).reshape(8, 8), jnp.arange(16.0)
    old = jax.device_put(arrays, layout(*LAYOUTS[name]))
    for other in LAYOUTS:
        shardings = layout(*LAYOUTS[other])
        move(old, shardings)  # compiles, which puts constants on devices
        with (
            jax.transfer_guard_device_to_host("disallow_explicit"),
            jax.transfer_guard_host_to_device("disallow_explicit"),
        ):
            new = move(old, shardings)
        for x, want, sharding in zip(new, arrays, shardings, strict=True):
            np.testing.assert_array_equal(x, want, err_msg=other)
            assert x.sharding == sharding and x.committed
            mesh = getattr(sharding, "mesh", NO_MESH)
            assert jax.typeof(x).sharding.mesh == mesh.abstract_mesh


@pytest.mark.parametrize(
    ("old", "new", "spec"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 3), WHOLE),
        ((5, 3), (3,), WHOLE),
        ((4, 5, 0, 1), (4, 5, 0, 1), BOTH),
        ((0, 1, 2, 3), (2, 3), PartitionSpec("x")),
    ],
)
def test_an_array_that_is_there_is_not_copied(old, new, spec):
    there = lambda x: {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}  # noqa: E731
    rows = jax.device_put(jnp.arange(64.0).reshape(8, 8), layout(old, spec)[0])
    target = layout(new, spec)[0] if len(new) > 1 else layout(new, None)[0]
    moved = move(rows, target)
    held = {shard.device: shard.index for shard in rows.addressable_shards}
    same = all(held[s.device] == s.index for s in moved.addressable_shards)
    assert same == (new != (2, 3))
    assert (there(moved).items() <= there(rows).items()) == same
    np.testing.assert_array_equal(moved, np.arange(64.0).reshape(8, 8))
    jax.jit(lambda x: x + 1, donate_argnums=0)(rows)
    assert moved.is_deleted() == same


@pytest.mark.parametrize(("devices", "axes"), [(4, ("x", "y")), (8, ("x", "y")), (8, "x")])
def test_no_device_makes_whole_arrays_on_the_way(devices, axes, monkeypatch):
    """From rows on many devices to columns on half of them, as from FSDP to an engine that splits heads."""
    reshard, programs = transfer._reshard, []

    def watched(tree, shardings):
        compiled = jax.jit(lambda tree: tree, out_shardings=shardings).lower(tree).compile()
        programs.append(compiled.memory_analysis().temp_size_in_bytes)
        return reshard(tree, shardings)

    monkeypatch.setattr(transfer, "_reshard", watched)
    arrays = [jnp.arange(float(128 * 128)).reshape(128, 128) + i for i in range(8)]
    old = jax.device_put(arrays, layout(range(devices), PartitionSpec(axes))[0])
    mesh = Mesh(np.array(jax.devices()[: devices // 2]), "y")
    new = move(old, [NamedSharding(mesh, COLUMNS)] * 8)
    np.testing.assert_array_equal(new, arrays)
    parts = sum(x.nbytes for x in arrays) // mesh.size
    assert programs and max(programs) < parts


def test_jax_alone_goes_through_the_host():
    """Why `move` exists: no device has a column of what is divided by rows."""
    old = jax.device_put(jnp.eye(8), layout(*LAYOUTS["four by rows"])[0])
    with (
        jax.transfer_guard_host_to_device("disallow_explicit"),
        pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"),
    ):
        jax.device_put(old, layout(*LAYOUTS["four others"])[0])


@pytest.mark.audit  # in `make test`, test_rollouts has a trainer and an engine that divide the weights in two ways
def test_four_devices_train_and_four_others_answer(tiny):
    """One process has both meshes. The answers after each step are those of an engine on one device."""
    cfg = tiny(
        "model.vocab=64",
        "model.kv_heads=4",
        "model.dtype=float32",
        "optim.learning_rate=5e-2",
        "optim.warmup_steps=0",
    )
    trains = make_mesh(MeshConfig(fsdp=4, data=1), jax.devices()[:4])
    answers = make_mesh(MeshConfig(tensor=4, data=1), jax.devices()[4:])
    state, step = init_state(cfg, trains), make_train_step(cfg, trains)
    options = EngineOptions(max_length=32, max_sequences=4, page_tokens=8)
    far = Engine(cfg.model, state.params, options, mesh=answers)
    near = Engine(cfg.model, state.params, options)
    rng, texts = np.random.default_rng(0), []
    for _ in range(3):
        batch = {
            name: jax.device_put(rng.integers(0, 64, x.shape).astype(x.dtype), x.sharding)
            for name, x in abstract_batch(cfg, trains).items()
        }
        batch["loss_mask"] = jnp.ones_like(batch["loss_mask"])
        batch["segment_ids"] = jnp.ones_like(batch["segment_ids"])
        with jax.set_mesh(trains):
            state, _ = step(state, batch)
        heard = []
        for engine in (far, near):
            engine.load(state.params)
            said: list = []
            engine.submit(Request((1, 2, 3), 12, temperature=0.7, seed=5), said.append)
            while engine.step():
                pass
            heard.append([event.token for event in said])
        assert heard[0] == heard[1]
        texts.append(heard[0])
    assert {device.id for x in far.arrays for device in x.devices()} == {4, 5, 6, 7}
    assert all(a != b for a, b in itertools.pairwise(texts))
