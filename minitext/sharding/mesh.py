"""Meshes: devices arranged along named axes.

Every mesh has the same six axes in the same order, so code and sharding rules never ask which axes exist; most have
size one. All axes are Explicit: an array's type says how it is sharded, and JAX rejects an operation whose result could
be sharded in two ways until the code chooses one.

Chapters: 9.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from minitext.config.config import Config
from minitext.config.sections import MeshConfig
from minitext.distributed.devices import MOST_SIMULATED
from minitext.errors import UserError
from minitext.hardware import Chip

AXES = tuple(MeshConfig().sizes())
BATCH_AXES = ("data", "fsdp", "expert")  # the batch is split over all of these


def resolve_axes(cfg: MeshConfig, device_count: int) -> dict[str, int]:
    """Returns the size of every axis for this many devices.

    Args:
      cfg: the configured axes; one may be -1.
      device_count: devices to arrange.

    Raises:
      UserError: if the product of the sizes is not the number of devices.
    """
    sizes = cfg.sizes()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = -1 in sizes.values()
    if device_count % fixed or (device_count != fixed and not free):
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
        try_it = f", or set mesh.simulate={fixed} to try it on simulated CPU devices"
        raise UserError(
            f"mesh {shown or 'all axes 1'} needs {'a multiple of ' if free else ''}{fixed} device(s) and there "
            f"are {device_count}: change mesh.*{try_it if fixed <= MOST_SIMULATED else ''}"
        )
    return {name: device_count // fixed if size == -1 else size for name, size in sizes.items()}


def make_mesh(cfg: MeshConfig | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges devices in a mesh with the axes `AXES`, all Explicit.

    Devices that are neighbours on an axis are neighbours on the interconnect. TPU slices are connected only by the
    data-centre network, and `factors_across` says which axes cross it.

    Args:
      cfg: sizes of the axes; by default `data` has all devices.
      devices: real, simulated or ahead-of-time devices; by default all that JAX sees. CPUs are in no slice: with
        `mesh.dcn` they are taken for slices of equal size, in their order.

    Raises:
      UserError: if the sizes don't fit the number of devices or slices.
    """
    devices, cfg = list(jax.devices() if devices is None else devices), cfg or MeshConfig()
    sizes = resolve_axes(cfg, len(devices))
    types = (AxisType.Explicit,) * len(AXES)
    across = factors_across(cfg, sizes, count_slices(cfg, devices))
    if across:
        return Mesh(_arrange_slices(sizes, across, devices), AXES, axis_types=types)
    try:
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=types, devices=devices)
    except NotImplementedError as error:  # such as an axis of 8 in a torus of 4 x 4 x 4
        shown = " ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size > 1)
        raise UserError(
            f"{shown}: the network of these {len(devices)} chips has no such axes: choose other mesh.* sizes"
        ) from error


def abstract_mesh(cfg: MeshConfig | None = None, chip: Chip | None = None) -> AbstractMesh:
    """Returns a mesh without devices.

    Args:
      cfg: sizes of the axes, where -1 becomes 1; by default all are 1.
      chip: the kind of chip that kernels see as the mesh's device; by default none.
    """
    sizes = (max(1, size) for size in cfg.sizes().values()) if cfg else (1,) * len(AXES)
    device = chip and AbstractDevice(
        device_kind=chip.device_kinds[0], num_cores=None, platform=chip.platform
    )
    types = (AxisType.Explicit,) * len(AXES)
    return AbstractMesh(tuple(sizes), AXES, types, abstract_device=device)


def factors_across(cfg: MeshConfig, sizes: dict[str, int], slices: int) -> dict[str, int]:
    """Returns the axes that cross slices, each with the factor of its size that does: `mesh.dcn`.

    Without it one axis crosses: the first of `data`, `stage` and `fsdp` that can, which are ordered by how much they
    send.

    Args:
      cfg: the configured axes.
      sizes: the size of every axis, as `resolve_axes` returns it.
      slices: how many there are.

    Raises:
      UserError: if the factors don't multiply to the number of slices, or don't divide the sizes.
    """
    across = cfg.dcn.factors()
    if not across and slices > 1:
        able = [axis for axis in ("data", "stage", "fsdp") if sizes[axis] % slices == 0]
        if not able:
            raise UserError(
                f"{slices} slices divide none of mesh.data={sizes['data']}, mesh.stage={sizes['stage']} and "
                f"mesh.fsdp={sizes['fsdp']}: make one of them a multiple of {slices}, or let several axes cross, such "
                "as mesh.dcn.data=2 mesh.dcn.fsdp=2"
            )
        return {able[0]: slices}
    shown = " x ".join(f"mesh.dcn.{axis}={factor}" for axis, factor in across.items())
    if math.prod(across.values()) != slices:
        raise UserError(
            f"{shown} is for {math.prod(across.values())} slices and there {'is' if slices == 1 else 'are'} {slices}: "
            "change mesh.dcn.*"
        )
    for axis, factor in across.items():
        if sizes[axis] % factor:
            raise UserError(
                f"mesh.dcn.{axis}={factor} does not divide mesh.{axis}={sizes[axis]}, which counts the devices of all "
                f"slices: set mesh.{axis} to a multiple of {factor}"
            )
    return across


def show_factors(factors: Mapping[str, int]) -> str:
    """Writes axes that cross slices as `mesh.data by 2 and mesh.fsdp by 4`; nothing if there are none."""
    return " and ".join(f"mesh.{axis} by {factor}" for axis, factor in factors.items())


def with_slices(cfg: Config, sizes: dict[str, int], slices: int) -> Config:
    """Returns the configuration with `mesh.dcn` as it is by default; see `factors_across`."""
    if slices == 1:
        return cfg
    across = factors_across(cfg.mesh, sizes, slices)
    return cfg.replace({f"mesh.dcn.{axis}": factor for axis, factor in across.items()})


def count_slices(cfg: MeshConfig, devices: Sequence[Any]) -> int:
    """Returns how many slices devices form."""
    if devices[0].platform == "cpu":
        return math.prod(cfg.dcn.factors().values())
    return len({getattr(device, "slice_index", 0) for device in devices})


def _arrange_slices(
    sizes: dict[str, int], across: dict[str, int], devices: list[Any]
) -> np.ndarray:
    """Returns the devices as an array, where an axis's outer factor is its slices and the inner one is within them."""
    from jax.experimental import mesh_utils

    between = [across.get(axis, 1) for axis in sizes]
    within = [size // factor for size, factor in zip(sizes.values(), between, strict=True)]
    count = math.prod(between)
    in_order = sorted(devices, key=lambda device: getattr(device, "slice_index", 0))
    try:
        blocks = [
            mesh_utils.create_device_mesh(within, part, allow_split_physical_axes=True)
            for part in np.reshape(in_order, (count, -1)).tolist()
        ]
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"{count} slices: {error}: choose other mesh.* sizes") from error
    # One dimension for each factor, the two of an axis side by side.
    dims = np.arange(2 * len(sizes)).reshape(2, -1).T.flat
    return np.reshape(blocks, (*between, *within)).transpose(*dims).reshape(*sizes.values())
