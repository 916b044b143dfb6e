"""What this machine is and what minitext can do on it, for bug reports and the curious."""

import importlib.metadata
import platform
import sys

import jax
import psutil

from minitext import hardware
from minitext.compiler.targets import libtpu_advice
from minitext.distributed.devices import has_gpu_plugin
from minitext.files import cache_dir


def examine() -> dict[str, str]:
    """Returns facts about the machine, the versions and the abilities, as lines to print."""
    devices = jax.devices()
    chip = hardware.find_chip(devices[0])
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "libtpu")
    versions = {name: _version(name) for name in packages}
    memory = psutil.virtual_memory()
    return {
        "minitext": _version("minitext") or "not installed",
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "chip": chip.name if chip else "not in minitext.hardware.CHIPS",
        "matmul peak (f32)": f"{hardware.measure_matmul_peak('float32') / 1e9:.0f} GFLOP/s, measured",
        "memory": f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free",
        "cache": str(cache_dir()),
        "compile for TPU": "yes" if versions["libtpu"] else f"no: {libtpu_advice()}",
        "compile for GPU": "yes" if has_gpu_plugin() else "no: pip install 'minitext[aot-gpu]'",
        **{name: version or "not installed" for name, version in versions.items()},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
