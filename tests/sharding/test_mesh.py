"""Meshes: sizes, the one free axis, and errors that say what would fit."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from minitext.config.sections import MeshConfig, SlicesConfig
from minitext.errors import UserError
from minitext.sharding.mesh import AXES, factors_across, make_mesh, resolve_axes


def test_all_axes_exist_and_are_explicit():
    mesh = make_mesh(MeshConfig(fsdp=4))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {
        "stage": 1,
        "data": 2,
        "fsdp": 4,
        "context": 1,
        "tensor": 1,
        "expert": 1,
    }
    assert set(mesh.axis_types) == {AxisType.Explicit}


def test_devices_may_be_given():
    assert make_mesh(devices=jax.devices()[:2]).shape["data"] == 2


@given(st.sampled_from(AXES), st.integers(1, 6), st.integers(1, 6), st.integers(1, 64))
def test_sizes_multiply_to_the_devices_or_are_refused(axis, data, size, count):
    cfg = MeshConfig(**({"data": data} | {axis: size}))
    sizes = cfg.sizes()
    try:
        resolved = resolve_axes(cfg, count)
    except UserError:
        assert resolve_axes(cfg, -1 * -1 * _product(sizes)) == sizes
        assert count != _product(sizes)
    else:
        assert _product(resolved) == count


@given(st.integers(1, 8), st.integers(1, 512))
def test_the_free_axis_takes_what_is_left(fsdp, count):
    cfg = MeshConfig(fsdp=fsdp)
    if count % fsdp:
        with pytest.raises(UserError, match=f"fsdp={fsdp}"):
            resolve_axes(cfg, count)
    else:
        assert resolve_axes(cfg, count)["data"] == count // fsdp


def test_a_mesh_that_does_not_fit_says_how_to_try_it():
    with pytest.raises(UserError, match=r"fsdp=3.*there are 8.*mesh\.simulate=3"):
        make_mesh(MeshConfig(data=1, fsdp=3))


def _product(sizes):
    total = 1
    for size in sizes.values():
        total *= size
    return total


def test_axes_that_the_network_does_not_have_are_refused():
    pytest.importorskip("libtpu")
    from minitext.compiler.targets import topology_mesh

    with pytest.raises(
        UserError, match=r"mesh.fsdp=8 mesh.expert=8: the network of these 64 chips"
    ):
        topology_mesh("v5p:4x4x4", MeshConfig(data=1, fsdp=8, expert=8))


def test_simulated_devices_are_slices_in_their_order():
    """Four slices of two devices: an axis's outer factor is its slices."""
    mesh = make_mesh(MeshConfig(data=4, fsdp=2, dcn=SlicesConfig(data=2, fsdp=2)))
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
    assert (ids // 2 == [[0, 1], [0, 1], [2, 3], [2, 3]]).all()
    assert (ids % 2 == [[0, 0], [1, 1], [0, 0], [1, 1]]).all()


@given(
    st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3]) for axis in AXES}),
    st.fixed_dictionaries({axis: st.sampled_from([1, 2, 4]) for axis in AXES}),
)
def test_each_axis_crosses_by_its_factor(factors, within):
    sizes = {axis: factors[axis] * within[axis] for axis in AXES}
    cfg, slices = MeshConfig(**sizes, dcn=SlicesConfig(**factors)), _product(factors)
    across = factors_across(cfg, sizes, slices)
    if any(factor > 1 for factor in factors.values()):
        assert {axis: across.get(axis, 1) for axis in AXES} == factors
        with pytest.raises(UserError, match=f"for {slices} slices and there are {slices + 1}"):
            factors_across(cfg, sizes, slices + 1)
    else:
        assert across == {}


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"mesh.dcn.data=3 does not divide mesh.data=8"):
        make_mesh(MeshConfig(dcn=SlicesConfig(data=3)))
