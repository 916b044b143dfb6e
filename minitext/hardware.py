"""Hardware: one table of chips, and this machine's own measured matmul peak and bandwidth.

`CHIPS` holds what rooflines, MFU and memory budgets are computed from. The figures are the makers'
own, for dense arithmetic; each row says where they stand. Makers write GB where HBM stacks come in
powers of two: sizes here are bytes, and those of TPUs agree with JAX's own table.

Chapters: 3.
"""

import contextlib
import os
import platform as machine
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minitext.errors import UserError
from minitext.files import read_cache, write_cache

GIB = 2**30
ANY = "any"  # platform of a program that `jax.export` lowers for several
LINK_SECONDS = 1e-6  # that data needs for a hop over ICI ("How to Scale Your Model", part 3)
DAY = 86400.0  # seconds


@dataclass(frozen=True)
class Chip:
    """What one accelerator chip can do. Rates are peaks per second and per chip.

    Attributes:
      name: name used in targets, such as `v5p` or `h100`.
      platform: JAX's name of the platform, `tpu` or `gpu`.
      device_kinds: what `jax.Device.device_kind` says on this chip.
      flops: dense matmul peak in FLOP/s (a multiply-add counts two) by input type: `bf16`, `f8`,
        `int8`, `tf32`. A type that the matrix unit does not take natively is absent.
      hbm_bytes: size of the chip's memory in bytes.
      hbm_bandwidth: bytes/s between the chip and its memory.
      link_bandwidth: bytes/s of one ICI or NVLink link in one direction.
      links: number of such links of a chip.
      vmem_bytes: vector memory of one TensorCore in bytes (TPU only).
      devices: JAX devices that a chip shows; its memory and peak are shared evenly between them.
      clock: cycles per second of a core (TPU only): a chip's peak over what all its cores' matrix units do in a cycle
        (four of 128 x 128 in each core, four of 256 x 256 worth in v6e and tpu7x; a multiply-add counts two).
      link_rate: bytes/s of one ICI link in one direction that programs reach (TPU only; "How to Scale Your Model",
        part 2). Google's figure is `link_bandwidth`.
      host_bandwidth: bytes/s in one direction between the chip and its host, over PCIe (TPU only; part 2 there, which
        says nothing of tpu7x: taken as v6e's).
      dcn_bandwidth: bytes/s that the chip sends over the data-centre network, its share of the host's (TPU only;
        Google's documents of the chip; v4 from part 2 there).
      program_bytes: memory in bytes that a program may use on one JAX device, None where not known.
        TPU: the limit that libtpu 0.0.51 states when a program is too large; the rest is the
        runtime's. GPU: what the driver reports.
      source: where the figures stand.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    flops: Mapping[str, float] = field(hash=False)
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    links: int
    source: str
    vmem_bytes: int | None = None
    devices: int = 1
    program_bytes: int | None = None
    clock: float = 0.0
    link_rate: float = 0.0
    host_bandwidth: float = 0.0
    dcn_bandwidth: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def peak(self, dtype: str = "bf16") -> float:
        """Returns the dense matmul peak in FLOP/s of the whole chip for a type.

        Args:
          dtype: a key of `flops`, or JAX's name of the type (`bfloat16`, `float8_e4m3fn`). float32
            counts as bf16 on a TPU and as tf32 on a GPU: JAX's default precision multiplies so.

        Raises:
          UserError: if the chip has no native matmul of that type.
        """
        key = {"bfloat16": "bf16", "float16": "bf16"}.get(dtype, dtype)
        if key == "float32":
            key = "bf16" if self.platform == "tpu" else "tf32"
        if key.startswith("float8"):
            key = "f8"
        if key not in self.flops:
            known = ", ".join(self.flops)
            raise UserError(f"{self.name} has no {dtype} matmul: choose among {known}")
        return self.flops[key]

    @property
    def cores(self) -> int:
        """TensorCores of a TPU chip: two but for the light ones, which have four links."""
        return 2 if self.links == 6 else 1

    @property
    def device_cores(self) -> int:
        """TensorCores of one JAX device: they share the steps of a kernel's grid and the vector memory it may use."""
        return self.cores // self.devices

    @property
    def usable_bytes(self) -> int:
        """Memory in bytes that a program may use on one JAX device."""
        return self.program_bytes or self.hbm_bytes // self.devices


def _gib(value: float) -> int:
    return round(value * GIB)


# ICI: Google's documents give the sum over a chip's links and both directions; a link's one-way
# rate is that sum over twice the links. v4 has no such figure there: it is from the paper.
_TPUS = (
    Chip(
        "v4", "tpu", ("TPU v4",), {"bf16": 275e12, "int8": 275e12},
        _gib(32), 1.2e12, 50e9, 6, vmem_bytes=16 * 2**20, program_bytes=_gib(30.75),
        clock=1.05e9, link_rate=45e9, host_bandwidth=16e9, dcn_bandwidth=6.25e9,
        source="cloud.google.com/tpu/docs/v4; ICI: arXiv:2304.01433; VMEM: JAX tpu_info",
    ),
    Chip(
        "v5e", "tpu", ("TPU v5 lite", "TPU v5e"), {"bf16": 197e12, "int8": 393e12},
        _gib(16), 819e9, 50e9, 4, vmem_bytes=128 * 2**20, program_bytes=_gib(15.75),
        clock=1.5e9, link_rate=45e9, host_bandwidth=16e9, dcn_bandwidth=3.125e9,
        source="cloud.google.com/tpu/docs/v5e; VMEM: JAX tpu_info",
    ),
    Chip(
        "v5p", "tpu", ("TPU v5", "TPU v5p"), {"bf16": 459e12, "int8": 918e12},
        _gib(96), 2.765e12, 100e9, 6, vmem_bytes=64 * 2**20, program_bytes=_gib(95.73),
        clock=1.75e9, link_rate=90e9, host_bandwidth=16e9, dcn_bandwidth=6.25e9,
        source="cloud.google.com/tpu/docs/v5p (HBM there 95 GB); int8, HBM, VMEM: JAX tpu_info",
    ),
    Chip(
        "v6e", "tpu", ("TPU v6 lite", "TPU v6e"), {"bf16": 918e12, "f8": 918e12, "int8": 1836e12},
        _gib(32), 1.64e12, 100e9, 4, vmem_bytes=128 * 2**20, program_bytes=_gib(31.24),
        clock=1.75e9, link_rate=90e9, host_bandwidth=32e9, dcn_bandwidth=12.5e9,
        source="cloud.google.com/tpu/docs/v6e and tpu7x (f8); VMEM: JAX tpu_info",
    ),
    Chip(
        "tpu7x", "tpu", ("TPU7x",), {"bf16": 2307e12, "f8": 4614e12},
        _gib(192), 7.38e12, 100e9, 6, vmem_bytes=64 * 2**20, devices=2, program_bytes=_gib(94.74),
        clock=2.2e9, link_rate=90e9, host_bandwidth=32e9, dcn_bandwidth=12.5e9,
        source="cloud.google.com/tpu/docs/tpu7x; VMEM: JAX tpu_info",
    ),
)  # fmt: skip

# NVIDIA's data sheets print figures with 2:4 sparsity; these are without. A chip's NVLink figure
# there counts both directions of all its links.
_GPUS = (
    Chip(
        "a100-80", "gpu", ("NVIDIA A100-SXM4-80GB",),
        {"bf16": 312e12, "int8": 624e12, "tf32": 156e12},
        _gib(80), 2.039e12, 25e9, 12,
        source="NVIDIA A100 data sheet (A100 80GB SXM)",
    ),
    Chip(
        "h100", "gpu", ("NVIDIA H100 80GB HBM3",),
        {"bf16": 989e12, "f8": 1979e12, "int8": 1979e12, "tf32": 494e12},
        _gib(80), 3.35e12, 25e9, 18, program_bytes=84_978_434_048,
        source="NVIDIA H100 data sheet (H100 SXM)",
    ),
    Chip(
        "h200", "gpu", ("NVIDIA H200",),
        {"bf16": 989e12, "f8": 1979e12, "int8": 1979e12, "tf32": 494e12},
        _gib(141), 4.8e12, 25e9, 18,
        source="NVIDIA H200 data sheet (H200 SXM)",
    ),
    Chip(
        "b200", "gpu", ("NVIDIA B200",),
        {"bf16": 2250e12, "f8": 4500e12, "int8": 4500e12, "tf32": 1100e12},
        _gib(180), 8e12, 50e9, 18,
        source="NVIDIA Blackwell architecture brief; memory: HGX B200 data sheet (1.44 TB / 8)",
    ),
)  # fmt: skip

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (*_TPUS, *_GPUS)})


def find_chip(device: Any) -> Chip | None:
    """Returns the row of a `jax.Device`, real or ahead-of-time, or None if the table has none."""
    return next((chip for chip in CHIPS.values() if device.device_kind in chip.device_kinds), None)


def memory_bytes(device: Any) -> int | None:
    """Returns the bytes that a `jax.Device` of this process has for programs, or None if that isn't known.

    The CPU's devices share the machine's memory evenly, or the part of it that a container may use.
    """
    if device.platform == "cpu":
        import jax
        import psutil

        limits = [psutil.virtual_memory().total]
        for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups, version 2 and 1
            with contextlib.suppress(OSError, ValueError):  # none, or "max"
                limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
        return min(limits) // jax.local_device_count()
    stats, chip = device.memory_stats() or {}, find_chip(device)
    return stats.get("bytes_limit") or (chip.usable_bytes if chip else None)


def measure_matmul_peak(dtype: str = "float32", *, refresh: bool = False) -> float:
    """Measures the matmul peak of JAX's default device, in FLOP/s.

    Square products of several sizes are timed for about a second in all and the fastest counts, at
    JAX's default precision. The result is kept in `$MINITEXT_CACHE` (or `~/.cache/minitext`), one
    entry for each processor, number of usable cores, JAX version and type, so later calls cost
    nothing. After a day it is measured again and the better of the two counts: the machine may have
    been busy.

    Args:
      dtype: JAX's name of the inputs' type, such as `float32` or `bfloat16`.
      refresh: measure again, for instance because the machine was busy the last time.

    Raises:
      UserError: if `dtype` is no floating-point type of JAX's.
    """
    import jax
    import jax.numpy as jnp

    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or not jnp.issubdtype(kind, jnp.floating):
        raise UserError(f"{dtype!r} is not a floating-point type: choose float32 or bfloat16")
    big = jax.devices()[0].platform != "cpu"
    return _measured("matmul_peak", kind.name, lambda: _best_matmul_rate(kind, big=big), refresh)


def measure_bandwidth(*, refresh: bool = False) -> float:
    """Measures how fast JAX's default device reads and writes its memory, in bytes/s.

    Adding 1 to an array much larger than a processor's caches is timed for a while and the fastest
    counts: half of the bytes are read and half written. The result is kept as that of
    `measure_matmul_peak` is.
    """
    import jax

    size = 2**28 if jax.devices()[0].platform == "cpu" else 2**31
    return _measured("bandwidth", f"{size} bytes", lambda: _best_copy_rate(size), refresh)


def _measured(what: str, case: str, measure: Callable[[], float], refresh: bool) -> float:
    """Returns the best rate of this machine known from the cache, measured (again) if a day has passed."""
    import jax

    key = " | ".join((_machine(jax.devices()[0]), f"jax {jax.__version__}", case))
    known = read_cache(f"{what}.json")
    match known.get(key):
        case [float(rate), float(measured)]:
            pass
        case _:
            rate, measured = 0.0, 0.0
    if refresh or time.time() - measured > DAY:
        rate = max(rate, measure())
        write_cache(f"{what}.json", known | {key: (rate, time.time())})
    return rate


def _best_copy_rate(size: int) -> float:
    """Returns the best bytes/s of adding 1 to a float32 array, `size` bytes read and written together."""
    import jax
    import jax.numpy as jnp

    # With donation the array would be changed in place, which programs seldom do.
    add = jax.jit(lambda x: x + 1)
    x = jnp.zeros(size // 8, jnp.float32)
    add(x).block_until_ready()  # compiles
    best, deadline = 0.0, time.perf_counter() + 0.5
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        add(x).block_until_ready()
        best = max(best, size / (time.perf_counter() - start))
    return best


def _best_matmul_rate(dtype: Any, *, big: bool) -> float:
    """Returns the best FLOP/s over sizes and repeats; `big`: sizes that fill an accelerator."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    multiply = jax.jit(jnp.matmul)
    best = 0.0
    for n in (4096, 8192) if big else (512, 1024, 2048):
        # By NumPy: JAX would compile a generator for each size, which takes longer than the products.
        x = jnp.asarray(np.random.default_rng(n).standard_normal((n, n), np.float32), dtype)
        multiply(x, x).block_until_ready()  # compiles
        # Dispatch costs tens of microseconds, so each timing covers enough calls to last 10 ms.
        start = time.perf_counter()
        multiply(x, x).block_until_ready()
        calls = max(1, round(0.01 / max(time.perf_counter() - start, 1e-6)))
        deadline = time.perf_counter() + 0.35
        while time.perf_counter() < deadline:
            start = time.perf_counter()
            for _ in range(calls):
                y = multiply(x, x)
            y.block_until_ready()
            best = max(best, calls * 2 * n**3 / (time.perf_counter() - start))
    return best


def _machine(device: Any) -> str:
    """Names what does the arithmetic: the accelerator, or the processor and its usable cores."""
    if device.platform != "cpu":
        return device.device_kind
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found = re.search(r"model name\s*:\s*(.+)", text)
    except OSError:
        found = None
    name = found.group(1).strip() if found else machine.processor() or machine.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name} x {cores}"


def peak_flops(devices: Iterable[Any], dtype: str) -> float:
    """Returns the matmul peak of a mesh's devices together, in FLOP/s.

    Simulated CPU devices share one machine, whose measured peak counts once. Chips in the table count by their data
    sheet; others are measured.

    Args:
      devices: of one kind.
      dtype: what the model computes in, `float32` or `bfloat16`.
    """
    devices = list(devices)
    if devices[0].platform == "cpu":
        return measure_matmul_peak(dtype)
    chip, kind = find_chip(devices[0]), "bf16" if dtype == "bfloat16" else "f32"
    if chip is None or kind not in chip.flops:
        return measure_matmul_peak(dtype) * len(devices)
    return chip.peak(kind) * len(devices) / chip.devices


def platform() -> str:
    """Returns `cpu`, `gpu` or `tpu`: that of the mesh in use, which ahead of time is not this machine's.

    While a program is traced for several platforms (`any_platform`) it is `ANY`.
    """
    import jax

    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def any_platform() -> Any:
    """Returns a mesh without devices; while it's set, `platform()` is `ANY`, and programs are the same for all."""
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(device_kind=ANY, num_cores=None, platform=ANY)
    return AbstractMesh((), (), abstract_device=device)
