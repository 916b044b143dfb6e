"""How a process starts: on the accelerator if there is one, else on the CPU, whole or in simulated parts.

Must run before JAX starts its backends; importing JAX is early enough.

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

_GPU_PLUGINS = ("xla_cuda", "xla_rocm")
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def start(simulate: int | None = None, *, keep_memory: bool = False, join: bool = False) -> None:
    """Chooses JAX's platform and the number of CPU devices, and lets Python collect garbage less often.

    A platform named in the environment variable `JAX_PLATFORMS` is kept. Otherwise JAX runs on the accelerator if
    one is there, and on the CPU if there is none or if simulated devices are asked for. Calling it again with the
    same number changes nothing.

    Args:
      simulate: CPU devices to simulate, over all processes; None takes what is there.
      keep_memory: on the CPU, keep the memory that a program frees for the next one: a training step is a quarter
        faster, compiling slower by as much.
      join: join the job of several processes that the environment tells of, if it does.

    Raises:
      UserError: if JAX had already started with another number of devices, or runs on another platform.
    """
    # Importing JAX and tracing make hundreds of thousands of objects that stay, and few cycles. Python's collector,
    # which by default looks at them after every 700 more, would take a quarter of the time until the first step.
    gc.set_threshold(50_000, 20, 100)
    if "JAX_PLATFORMS" not in os.environ and (simulate or not accelerator_is_visible()):
        os.environ["JAX_PLATFORMS"] = "cpu"
    platforms = os.environ.get("JAX_PLATFORMS", "")
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
    here, told = simulate, number(os.environ, "MINITEXT_LOCAL_DEVICES", 1, 0)
    if join and told:
        here, simulate = told, None  # the launcher's word: the mesh takes what there is
    elif cluster is not None and cluster.processes is not None and simulate is not None:
        here = simulate // cluster.processes
        if simulate % cluster.processes:
            raise UserError(
                f"{simulate} simulated devices cannot be shared by {cluster.processes} processes: set mesh.simulate, "
                f"or the sizes of the mesh, to a multiple of {cluster.processes}"
            )
    if here is not None:
        with contextlib.suppress(RuntimeError):  # JAX has started: what it has may be enough
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
    """Returns how many CPU devices to simulate for a mesh: as asked, or, without an accelerator, as it needs.

    Args:
      sizes: of the mesh's axes; -1 takes what is there.
      asked: `mesh.simulate`.
    """
    needed = math.prod(size for size in sizes if size != -1)
    on_cpu = os.environ.get("JAX_PLATFORMS", "" if accelerator_is_visible() else "cpu") == "cpu"
    return asked if asked or needed == 1 or not on_cpu else needed


def accelerator_is_visible() -> bool:
    """Returns whether JAX could find a TPU or GPU, told from files and plugins without starting JAX."""
    if importlib.util.find_spec("libtpu") and any(glob.glob(pattern) for pattern in _TPU_FILES):
        return True
    return has_gpu_plugin() and any(os.path.exists(p) for p in _GPU_FILES)


def _keep_freed_memory() -> None:
    """Makes the C library keep large blocks that are freed, where it is glibc (Linux).

    XLA's CPU backend asks for a program's temporaries anew at each call. glibc maps blocks of that size and unmaps
    them, so that every step pays for page faults on all of them. With one arena that neither maps nor trims, the
    pages stay, and the process keeps its largest size; but the compiler's threads then wait for each other to
    allocate. mallopt(3) describes the numbers.
    """
    TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(ARENA_MAX, 1)  # other arenas can't hold such blocks, and would map them


def has_gpu_plugin() -> bool:
    """Returns whether JAX's CUDA or ROCm plugin is installed; it compiles for GPUs also where none is."""
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None or plugins.submodule_search_locations is None:
        return False
    names = [module.name for module in pkgutil.iter_modules(plugins.submodule_search_locations)]
    return any(name.startswith(_GPU_PLUGINS) for name in names)


def check_profiler() -> None:
    """Refuses to profile where libtpu is loaded and no TPU is there: its profiler, which JAX then starts too, crashes.

    Raises:
      UserError: in a process that has compiled for TPUs.
    """
    import jax

    maps = Path("/proc/self/maps")
    if jax.default_backend() != "tpu" and maps.exists() and "libtpu.so" in maps.read_text():
        raise UserError(
            "this process has compiled for TPUs, and libtpu's profiler would crash it: start a new one (in a notebook, "
            "restart the kernel) and profile before anything is compiled for TPUs"
        )


def use_compilation_cache() -> None:
    """Keeps compiled programs in the cache directory, so that a second start skips compilation."""
    import jax

    from minitext.files import cache_dir

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def quick_compile(platform: str) -> dict[str, Any]:
    """Returns compiler options for programs whose speed is of no interest: on CPUs they compile in a third of the time.

    They do without LLVM's optimisations, XLA's newer way of making fusions, and small modules for many cores. What is
    computed and sent is the same. For other platforms there are none.
    """
    if platform != "cpu":
        return {}
    return {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
