"""Compile targets: named chips, which this machine need not have, as JAX devices and meshes.

Chapters: 16, 22.
"""

import contextlib
import glob
import importlib.util
import math
import os
import platform
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh

from minitext.config.config import Config
from minitext.config.sections import MeshConfig
from minitext.errors import UserError, did_you_mean
from minitext.hardware import CHIPS, Chip, find_chip
from minitext.sharding.mesh import BATCH_AXES, make_mesh, resolve_axes

EXAMPLES = "target=v5e:2x2, target=v5p:4x4x4, target=v5e:16x16 slices=2 or target=h100:2x8"
KNOWN = (*(name for name, chip in CHIPS.items() if chip.platform == "tpu"), "h100")
MAX_DEVICES = 100_000

# Without a TPU, libtpu would ask Google's metadata server which machine this is, and log long warnings.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

# What the CUDA compiler would otherwise ask the GPU: NVIDIA's figures for the H100 SXM, as the text form of XLA's
# GpuTargetConfigProto.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class Target:
    """Chips to compile for.

    Attributes:
      chip: the kind of chip.
      shape: TPU chips along each dimension of a slice; for GPUs 1 x hosts x GPUs of a host.
      slices: TPU slices, joined by the data-centre network.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        text = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        return text if self.slices == 1 else f"{text} slices={self.slices}"

    @property
    def devices(self) -> int:
        """JAX devices in all slices together."""
        return math.prod(self.shape) * self.slices * self.chip.devices

    @property
    def is_flat(self) -> bool:
        """Whether its chips form two dimensions."""
        return self.chip.links == 4

    @property
    def is_torus(self) -> bool:
        """Whether a slice wraps around in all its dimensions."""
        return all(self.wrap()[: len(self.shape)])

    def wrap(self) -> list[bool]:
        """Returns which dimensions of a TPU slice wrap around.

        Slices of v4, v5p and tpu7x are tori if they consist of whole 4x4x4 cubes; a slice of v5e or v6e is a ring along
        a dimension of 16 (cloud.google.com/tpu/docs; Austin et al. 2025, "How to Scale Your Model", part 2). The
        compiler needs to know: for a 4x4x4 slice of v5p without wraparound it turns every all-gather into an
        all-reduce.
        """
        shape = (*self.shape, 1)[:3]
        if self.chip.links == 6:
            return [all(size % 4 == 0 for size in shape)] * 3
        return [size == 16 for size in shape]


def parse_target(text: str) -> Target:
    """Reads a target such as `v5e:2x2`, `v5e:16x16 slices=2` or `h100:2x8` (short for 1x2x8).

    Raises:
      UserError: for an unknown chip or an invalid shape, in one line.
    """
    match = re.fullmatch(r"([\w.\-]+):(\w*)(?: +slices=(\S*))?", text.strip(), re.ASCII)
    if match is None:
        shown = ascii(text)[1:-1][:40]
        raise UserError(f"target={shown} is not CHIP:SHAPE: write for instance {EXAMPLES}")
    name, shape, count = match.groups(default="1")
    if not re.fullmatch(r"[1-9]\d{0,4}", count, re.ASCII):
        raise UserError(
            f"slices={ascii(count)[1:-1][:20]} is not a number of slices: choose 1 or more, such as slices=2"
        )
    slices = int(count)
    if name not in KNOWN:
        hint = did_you_mean(name, KNOWN)
        raise UserError(f"unknown chip {name!r}{hint}: choose among {', '.join(KNOWN)}")
    chip = CHIPS[name]
    # A chip has two links along each dimension. libtpu crashes on a size of 0.
    dims = chip.links // 2 if chip.platform == "tpu" else 3
    size = r"[1-9]\d{0,5}"
    if chip.platform == "gpu" and re.fullmatch(f"{size}x{size}", shape):
        shape = f"1x{shape}"
    if not re.fullmatch("x".join([size] * dims), shape):
        gpus = "1x1x8 (1 x hosts x GPUs of a host), or 1x8"
        example = gpus if chip.platform == "gpu" else "4x4x4"[: 2 * dims - 1]
        raise UserError(
            f"target={name}:{shape[:40]}: {name} takes {dims} sizes of 1 or more, such as {name}:{example}"
        )
    target = Target(chip, tuple(int(size) for size in shape.split("x")), slices)
    if target.devices > MAX_DEVICES:
        raise UserError(
            f"target={target}: {target.devices:,} devices; choose at most {MAX_DEVICES:,}"
        )
    if chip.platform == "gpu" and (slices > 1 or target.shape[0] > 1):
        raise UserError(
            f"target={target}: GPUs have no slices and come as 1 x hosts x GPUs of a host, such as "
            f"{name}:1x2x8 or {name}:2x8"
        )
    return target


def target_of(mesh: Mesh | AbstractMesh) -> Target | None:
    """Returns the TPUs of a mesh by their coordinates, or None for other devices and for an abstract mesh.

    A mesh of only some devices of a slice counts as the smallest slice from its first corner on.
    """
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
    chip = find_chip(devices[0]) if devices else None
    if chip is None or chip.platform != "tpu":
        return None
    ends = (max(at) + 1 for at in zip(*(device.coords for device in devices), strict=True))
    shape = tuple(ends)[: chip.links // 2]
    return Target(chip, shape, len({getattr(device, "slice_index", 0) for device in devices}))


def is_free(cfg: Config, key: str) -> bool:
    """Whether a key has a default's or a preset's value, which neither the command line nor a file set."""
    return cfg.provenance(key).partition(" ")[0] in ("default", "preset")


def fit_slices(cfg: Config, target: Target) -> tuple[Config, dict[str, int]]:
    """Gives a configuration the mesh and the batch that a target of several slices needs.

    Only the data-centre network joins slices, so each one is a replica: `mesh.data` becomes the number of slices, or
    `mesh.dcn.data` if `mesh.dcn` says which axes cross, and the other axes stay within a slice. The batch is rounded up
    until all devices share it evenly. Keys set on the command line or in a file stay; a preset's values, made for one
    slice, change.

    Returns:
      The configuration, and the changed keys with their new values.
    """
    if target.slices == 1:
        return cfg, {}
    changed: dict[str, int] = {}
    data = cfg.mesh.dcn.data if cfg.mesh.dcn.factors() else target.slices
    if is_free(cfg, "mesh.data") and cfg.mesh.data not in (-1, data) and cfg.mesh.stage == 1:
        wanted = cfg.mesh.model_copy(update={"data": data})
        with contextlib.suppress(UserError):  # the other axes leave no room: make_mesh reports it
            resolve_axes(wanted, target.devices)
            changed["mesh.data"] = data
    cfg = cfg.replace(changed) if changed else cfg
    with contextlib.suppress(UserError):
        axes = resolve_axes(cfg.mesh, target.devices)
        ways = math.prod(axes[axis] for axis in BATCH_AXES) * cfg.train.microbatches
        if is_free(cfg, "train.global_batch") and cfg.train.global_batch % ways:
            changed["train.global_batch"] = math.ceil(cfg.train.global_batch / ways) * ways
    return (cfg.replace(changed) if changed else cfg), changed


def topology_devices(target: Target) -> list[Any]:
    """Returns a target's JAX devices, without any such chip and without allocating anything.

    Raises:
      UserError: if the target's compiler is not installed, or its chips don't come in that shape.
    """
    try:
        return _gpu_devices(target) if target.chip.platform == "gpu" else _tpu_devices(target)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"target={target}: {reason}; write for instance {EXAMPLES}") from error


def topology_mesh(target: str | Target, mesh_cfg: MeshConfig | None = None) -> Mesh:
    """Returns a mesh over a target's devices, with the axes of `minitext.sharding.mesh.AXES`.

    Args:
      target: such as `v5p:4x4x4`; see `parse_target`.
      mesh_cfg: sizes of the axes; by default all devices are along `data`.

    Raises:
      UserError: for a bad target, a compiler that is not installed, or axes that don't fit the devices.
    """
    parsed = parse_target(target) if isinstance(target, str) else target
    return make_mesh(mesh_cfg, topology_devices(parsed))


def libtpu_advice() -> str:
    """Says how to get libtpu on this machine. Its wheels are for Linux on x86-64 alone."""
    here = platform.system(), platform.machine()
    if here == ("Linux", "x86_64"):
        return "pip install 'minitext[aot]'"
    return f"it exists for Linux on x86-64 only, and this is {here[0]} on {here[1]}: Colab has such machines"


def _tpu_devices(target: Target) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"compiling for TPUs needs libtpu: {libtpu_advice()}")
    # libtpu takes a lock file, which would crash a second process.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        for name, value in _WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
    options: dict[str, Any] = {"wrap": target.wrap()}
    if target.slices > 1:
        options["num_slices"] = target.slices
    if target.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # else a chip's two cores are two devices
    shape = str(target).partition(" ")[0]
    return list(topologies.get_topology_desc(shape, "tpu", **options).devices)


def _gpu_devices(target: Target) -> list[Any]:
    shape = "x".join(map(str, target.shape))
    try:
        topology = topologies.get_topology_desc(
            target.chip.name, "cuda", target_config=_H100, topology=shape
        )
    except NotImplementedError:
        raise UserError(
            "compiling for GPUs needs JAX's CUDA plugin: pip install 'minitext[aot-gpu]'"
        ) from None
    return list(topology.devices)
