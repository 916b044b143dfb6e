"""Meshes: devices arranged along named axes.

Every mesh has the same six axes in the same order, most of them usually of size one, so that code and sharding rules
never ask which axes exist. All axes are Explicit: an array's type says how it is sharded, and an operation whose
result could be sharded in two ways is refused until the code chooses.

Chapters: 9.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from minitext.config import MeshConfig
from minitext.errors import UserError

AXES = tuple(MeshConfig().sizes())
BATCH_AXES = ("data", "fsdp", "expert")  # the batch is split over all of these


def resolve_axes(cfg: MeshConfig, device_count: int) -> dict[str, int]:
    """Returns the size of every axis for this many devices.

    Args:
      cfg: the configured axes; one may be -1.
      device_count: devices to arrange.

    Raises:
      UserError: if the sizes do not multiply to the number of devices.
    """
    sizes = cfg.sizes()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shown = (
        " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "all axes 1"
    )
    mend = f"change mesh.*, or set mesh.simulate={fixed} to try it on simulated CPU devices"
    if device_count % fixed or (device_count != fixed and -1 not in sizes.values()):
        raise UserError(
            f"mesh {shown} needs {'a multiple of ' if -1 in sizes.values() else ''}{fixed} device(s) and there "
            f"are {device_count}: {mend}"
        )
    return {name: device_count // fixed if size == -1 else size for name, size in sizes.items()}


def make_mesh(cfg: MeshConfig | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges devices in a mesh with the axes `AXES`, all Explicit.

    Args:
      cfg: sizes of the axes; by default all devices lie along `data`.
      devices: real, simulated or ahead-of-time devices; by default all that JAX sees.

    Raises:
      UserError: if the sizes do not fit the number of devices.
    """
    cfg = cfg or MeshConfig()
    if devices is None:
        devices = jax.devices()
    sizes = resolve_axes(cfg, len(devices))
    # make_mesh orders the devices of a TPU slice so that neighbours on an axis are neighbours on the interconnect.
    return jax.make_mesh(
        tuple(sizes.values()),
        AXES,
        axis_types=(AxisType.Explicit,) * len(AXES),
        devices=list(devices),
    )
