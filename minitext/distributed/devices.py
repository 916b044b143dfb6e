"""Starting JAX: on the accelerator if there is one, otherwise on the CPU, as one device or as several simulated ones.

`start` must run before JAX starts its backends; JAX may already be imported.

Chapters: 9.
"""

import contextlib
import ctypes
import gc
import glob
import importlib.util
import math
import os
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minitext.distributed import job
from minitext.distributed.cluster import find_cluster, number
from minitext.errors import UserError

MOST_SIMULATED = 1024  # CPU devices, the limit of mesh.simulate too
_GPU_PLUGINS = ("xla_cuda", "xla_rocm")
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def start(simulate: int | None = None, *, keep_memory: bool = False, join: bool = False) -> None:
    """Chooses JAX's platform and the number of CPU devices, and makes Python collect garbage less often.

    JAX_PLATFORMS is kept if it is set. Otherwise JAX runs on the accelerator if there is one, and on the CPU if there
    is none or simulated devices are asked for. Calling it again with the same number changes nothing.

    Args:
      simulate: CPU devices to simulate, in all processes together; None takes what is there.
      keep_memory: on the CPU, keep the memory that a program frees for the next one: a training step gets a quarter
        faster, and compiling slower by as much.
      join: join the job of several processes that the environment describes, if there is one.

    Raises:
      UserError: if JAX had already started with another number of devices, or runs on another platform; or if
        JAX_PLATFORMS names GPUs and JAX has no plugin for them.
    """
    # Importing JAX and tracing make hundreds of thousands of objects that stay, and few cycles. By default Python
    # collects after every 700 more, which would take a quarter of the time until the first step.
    gc.set_threshold(50_000, 20, 100)
    if "JAX_PLATFORMS" not in os.environ and (simulate or not accelerator_is_visible()):
        os.environ["JAX_PLATFORMS"] = "cpu"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if {"cuda", "gpu", "rocm"} & set(platforms.split(",")) and not has_gpu_plugin():
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX's plugin for GPUs isn't installed: unset it, or install the plugin"
        )
    if platforms == "cpu":
        # With libtpu installed, which compiling for TPUs needs, JAX would look for a TPU and warn at length that
        # there is none; and a second process would die on libtpu's lock file.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        if keep_memory:
            _keep_freed_memory()
    import jax

    if platforms:
        jax.config.update("jax_platforms", platforms)  # JAX read the variable when it was imported
    cluster = find_cluster() if join else None
    here, launched = simulate, number(os.environ, "MINITEXT_LOCAL_DEVICES", 1, 0)
    if join and launched:
        here, simulate = launched, None  # the launcher decides, and the mesh takes what there is
    elif cluster is not None and cluster.processes is not None and simulate is not None:
        here = simulate // cluster.processes
        if simulate % cluster.processes:
            raise UserError(
                f"{simulate} simulated devices cannot be shared by {cluster.processes} processes: set mesh.simulate, "
                f"or the sizes of the mesh, to a multiple of {cluster.processes}"
            )
    if here is not None:
        with contextlib.suppress(RuntimeError):  # JAX has started: it may have enough devices
            jax.config.update("jax_num_cpu_devices", here)
    if cluster is not None:
        job.start(cluster)
    if simulate is not None and len(jax.devices()) != simulate:
        raise UserError(
            f"{simulate} simulated devices were asked for and JAX runs with {len(jax.devices())} "
            f"{jax.default_backend()} device(s): unset JAX_PLATFORMS and XLA_FLAGS, and ask before JAX starts "
            "(in a notebook: restart the kernel and run the first cell first)"
        )


def simulate_for(sizes: Sequence[int], asked: int | None) -> int | None:
    """Returns how many CPU devices to simulate for a mesh: as asked, or without an accelerator as many as it needs.

    Args:
      sizes: of the mesh's axes; -1 takes what is there.
      asked: `mesh.simulate`.

    Raises:
      UserError: if the mesh needs more than can be simulated.
    """
    needed = math.prod(size for size in sizes if size != -1)
    on_cpu = os.environ.get("JAX_PLATFORMS", "" if accelerator_is_visible() else "cpu") == "cpu"
    if asked or needed == 1 or not on_cpu:
        return asked
    if needed > MOST_SIMULATED:
        raise UserError(
            f"the sizes of the mesh, mesh.*, ask for {needed:,} devices, and a CPU can simulate {MOST_SIMULATED:,}: "
            "make them smaller, or let minitext compile, comms or predict compile for chips, as in target=v5p:8x8x16"
        )
    return needed


def accelerator_is_visible() -> bool:
    """Returns whether JAX could find a TPU or GPU, judging by files and plugins, without starting JAX."""
    tpu = importlib.util.find_spec("libtpu") is not None and any(map(glob.glob, _TPU_FILES))
    return tpu or (has_gpu_plugin() and any(map(os.path.exists, _GPU_FILES)))


def has_gpu_plugin() -> bool:
    """Returns whether JAX's CUDA or ROCm plugin is installed; it compiles for GPUs even on machines without one."""
    plugins = importlib.util.find_spec("jax_plugins")
    paths = plugins.submodule_search_locations if plugins else None
    return any(module.name.startswith(_GPU_PLUGINS) for module in pkgutil.iter_modules(paths or []))


def _keep_freed_memory() -> None:
    """Makes glibc (the C library of most Linux systems) keep large blocks that are freed.

    XLA's CPU backend allocates a program's temporaries at each call. glibc maps and unmaps blocks of that size, so
    every step pays for page faults on all of them. With one arena that neither maps nor trims, the pages stay and the
    process never shrinks; but the compiler's threads then wait for each other to allocate. See mallopt(3).
    """
    TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(ARENA_MAX, 1)  # other arenas can't hold such blocks, and would map them


def check_profiler() -> None:
    """Refuses to profile if libtpu is loaded without a TPU: JAX would start libtpu's profiler too, which crashes.

    Raises:
      UserError: in a process that has compiled for TPUs.
    """
    import jax

    maps = Path("/proc/self/maps")
    if jax.default_backend() != "tpu" and maps.exists() and b"libtpu.so" in maps.read_bytes():
        raise UserError(
            "this process has compiled for TPUs, and libtpu's profiler would crash it: start a new one (in a notebook, "
            "restart the kernel) and profile before anything is compiled for TPUs"
        )


def use_compilation_cache() -> None:
    """Keeps compiled programs in the cache directory, so that a second start skips compilation."""
    import jax

    from minitext.files import cache_dir

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def quick_compile(platform: str) -> dict[str, Any]:
    """Returns compiler options for programs whose speed doesn't matter; on CPUs they compile in a third of the time.

    They switch off LLVM's optimisations, XLA's newer fusion emitters, and splitting into modules for many cores. The
    program computes and sends the same. Other platforms have no such options.
    """
    if platform != "cpu":
        return {}
    import jax

    options = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    if jax.__version_info__ < (0, 11):  # later ones have no others
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def compile_quickly() -> None:
    """Makes XLA compile all that this process and those forked from it run on the CPU with `quick_compile`'s options.

    It must be called before JAX starts its backends: XLA reads its flags once. The environment stays as it is, because
    libtpu refuses flags that it doesn't know.
    """
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    before = os.environ.get("XLA_FLAGS")
    flags = [f"--{name}={str(value).lower()}" for name, value in quick_compile("cpu").items()]
    os.environ["XLA_FLAGS"] = " ".join([*filter(None, [before]), *flags])
    xla_client.CompileOptions().executable_build_options.debug_options  # noqa: B018 - reads the flags
    os.environ.pop("XLA_FLAGS") if before is None else os.environ.update(XLA_FLAGS=before)
