"""Targets: what a name means, and the ahead-of-time devices it gives."""

import importlib.util
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.mesh_utils import create_hybrid_device_mesh

from minitext.compiler import targets
from minitext.compiler.targets import (
    fit_slices,
    parse_target,
    target_of,
    topology_devices,
    topology_mesh,
)
from minitext.config.config import load_config
from minitext.config.sections import MeshConfig, SlicesConfig
from minitext.errors import UserError
from minitext.hardware import find_chip
from minitext.sharding.mesh import AXES, abstract_mesh, make_mesh

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")


@pytest.mark.parametrize(
    ("text", "shape", "devices", "wrap"),
    [
        ("v5e:2x2", (2, 2), 4, [False, False, False]),
        ("v5e:4x16", (4, 16), 64, [False, True, False]),
        (" v6e:16x16  slices=3 ", (16, 16), 768, [True, True, False]),
        ("v4:2x2x1", (2, 2, 1), 4, [False] * 3),
        ("v5p:4x4x4", (4, 4, 4), 64, [True] * 3),
        ("v5p:4x4x2", (4, 4, 2), 32, [False] * 3),
        ("tpu7x:2x2x1", (2, 2, 1), 8, [False] * 3),
        ("h100:1x2x8", (1, 2, 8), 16, None),
        ("h100:2x8", (1, 2, 8), 16, None),
    ],
)
def test_targets(text, shape, devices, wrap):
    target = parse_target(text)
    assert (target.shape, target.devices) == (shape, devices)
    assert parse_target(str(target)) == target
    assert wrap is None or target.wrap() == wrap


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not CHIP:SHAPE"),
        ("v5e", "target=v5e:2x2"),
        ("v5e:2x2 slices=0", "slices=0 is not a number of slices: choose 1 or more"),
        ("v5e:2x2 slices=-2", "slices=-2 is not a number"),
        ("v5e:2x2 slices=", "slices= is not a number"),
        ("v5e:2x2 slices=2 3", "not CHIP:SHAPE"),
        ("v7x:2x2x1", "did you mean tpu7x?"),
        ("b200:1x1x8", "choose among v4, v5e, v5p, v6e, tpu7x, h100"),
        ("v5e:0x2", "takes 2 sizes"),
        ("v5e:2x2x2", "takes 2 sizes of 1 or more, such as v5e:4x4"),
        ("v5p:2x2", "takes 3 sizes"),
        ("v5p:999999x1x1", "at most 100,000"),
        ("h100:2x1x8", "1 x hosts x GPUs"),
        ("h100:1x1x8 slices=2", "GPUs have no slices"),
        ("h100:8", "takes 3 sizes.*or 1x8"),
    ],
)
def test_bad_targets(text, words):
    with pytest.raises(UserError, match=words) as caught:
        parse_target(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("system", "machine", "advice"),
    [
        ("Linux", "x86_64", r"pip install 'minitext\[aot\]'$"),
        ("Darwin", "arm64", "only, and this is Darwin on arm64: Colab"),
        ("Linux", "aarch64", "only, and this is Linux on aarch64: Colab"),
    ],
)
def test_without_libtpu_it_says_what_would_help_here(monkeypatch, system, machine, advice):
    monkeypatch.setattr(targets.platform, "system", lambda: system)
    monkeypatch.setattr(targets.platform, "machine", lambda: machine)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"^compiling for TPUs needs libtpu: .*{advice}"):
        topology_mesh("v5e:2x2")


@given(st.text() | st.from_regex(r"\A(v5e|v5p|h100|x):[0-9x ]{0,12}( slices=[0-9]{0,3})?"))
def test_any_text_is_a_target_or_a_line(text):
    try:
        assert parse_target(text).devices >= 1
    except UserError as error:
        assert len(str(error).splitlines()) == 1


@needs_libtpu
@pytest.mark.parametrize("text", ["v5e:2x4", "v5p:2x2x4", "v6e:4x4 slices=2", "tpu7x:2x2x1"])
def test_a_mesh_tells_its_target(text):
    assert target_of(topology_mesh(text)) == parse_target(text)


def test_only_tpus_have_a_target():
    assert target_of(make_mesh()) is None and target_of(abstract_mesh()) is None


@needs_libtpu
@pytest.mark.parametrize(
    "text",
    ["v4:2x2x1", "v5e:2x2", "v5e:1x1", "v5p:4x4x4", "v6e:4x4", "tpu7x:2x2x1", "v5e:2x2 slices=2"],
)
def test_devices_are_those_of_the_target(text):
    target = parse_target(text)
    devices = topology_devices(target)
    assert len(devices) == target.devices
    assert {find_chip(device) for device in devices} == {target.chip}
    assert {device.platform for device in devices} == {"tpu"}


@needs_libtpu
def test_a_shape_that_hosts_cannot_build():
    with pytest.raises(UserError, match=r"target=v5e:3x3: .*not divisible"):
        topology_devices(parse_target("v5e:3x3"))


def test_compilers_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'minitext\[aot\]'"):
        topology_devices(parse_target("v5e:2x2"))
    if (
        not os.path.exists("/dev/nvidiactl")
        and importlib.util.find_spec("jax_cuda13_plugin") is None
    ):
        with pytest.raises(UserError, match=r"pip install 'minitext\[aot-gpu\]'"):
            topology_devices(parse_target("h100:1x1x8"))


@needs_libtpu
def test_mesh_has_the_axes_of_every_mesh():
    mesh = topology_mesh("v5e:2x4", MeshConfig(data=2, fsdp=-1))
    assert mesh.axis_names == AXES and mesh.size == 8
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 4}
    with pytest.raises(UserError, match="mesh data=3"):
        topology_mesh("v5e:2x4", MeshConfig(data=3))


@needs_libtpu
def test_slices_lie_along_one_axis():
    for axes, across in (
        ({"data": 4, "fsdp": 8}, "data"),
        ({"data": 1, "fsdp": 32}, "fsdp"),
        ({"data": 1, "stage": 2, "fsdp": 16}, "stage"),
    ):
        mesh = topology_mesh("v5e:4x4 slices=2", MeshConfig(**axes))
        assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | axes
        slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
        first, second = np.split(slices, 2, axis=AXES.index(across))
        assert not first.any() and second.all()
    with pytest.raises(
        UserError, match=r"3 slices divide none of mesh.data=1, mesh.stage=1 and mesh.fsdp=1"
    ):
        topology_mesh("v5e:4x4 slices=3", MeshConfig(data=1, tensor=48))


@needs_libtpu
def test_several_axes_cross_as_in_jax():
    sizes, factors = {"data": 2, "fsdp": 8, "tensor": 2}, {"data": 2, "fsdp": 2}
    cfg = MeshConfig(**sizes, dcn=SlicesConfig(**factors))
    devices = topology_devices(parse_target("v5e:2x4 slices=4"))
    between = [factors.get(axis, 1) for axis in AXES]
    within = [sizes.get(axis, 1) // factor for axis, factor in zip(AXES, between, strict=True)]
    want = create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    assert (make_mesh(cfg, devices).devices == want).all()
    # The order in which the devices come doesn't matter.
    assert (make_mesh(cfg, devices[::-1]).devices == want).all()
    with pytest.raises(UserError, match=r"mesh.dcn.data=2 x mesh.dcn.fsdp=2 is for 4 slices"):
        make_mesh(cfg, topology_devices(parse_target("v5e:4x4 slices=2")))
    with pytest.raises(UserError, match=r"is for 4 slices and there is 1"):
        make_mesh(cfg, topology_devices(parse_target("v5e:4x8")))


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ([], {"mesh.data": 3, "train.global_batch": 1056}),  # 1024 is no multiple of 3 x 16
        (["train.global_batch=4"], {"mesh.data": 3}),
        (["mesh.fsdp=24", "mesh.data=2"], {"train.global_batch": 1056}),
        (["mesh.data=-1", "mesh.fsdp=4"], {"train.global_batch": 1056}),
        (["mesh.fsdp=5"], {}),  # divides no slice: the mesh says so
        (["mesh.stage=3"], {}),  # stages lie across the slices
        (["mesh.dcn.fsdp=3"], {"train.global_batch": 1056}),
    ],
)
def test_slices_are_replicas_unless_a_mesh_is_named(settings, changed):
    cfg = load_config("llama2-70b", settings)
    fitted, found = fit_slices(cfg, parse_target("v5e:4x4 slices=3"))
    assert found == changed
    assert fitted == (cfg.replace(changed) if changed else cfg)
    assert fit_slices(cfg, parse_target("v5e:4x4")) == (cfg, {})
