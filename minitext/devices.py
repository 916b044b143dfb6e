"""Which devices JAX starts with: the accelerator if there is one, else the CPU, whole or in simulated parts.

Must run before JAX starts its backends; importing JAX is early enough.

Chapters: 9.
"""

import contextlib
import glob
import importlib.util
import os
import pkgutil

from minitext.errors import UserError

_GPU_PLUGINS = ("xla_cuda", "xla_rocm")
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def start(simulate: int | None = None) -> None:
    """Chooses JAX's platform and the number of CPU devices.

    A platform named in the environment variable `JAX_PLATFORMS` is kept. Otherwise JAX runs on the accelerator if
    one is there, and on the CPU if there is none or if simulated devices are asked for. Calling it again with the
    same number changes nothing.

    Args:
      simulate: CPU devices to simulate; None takes what is there.

    Raises:
      UserError: if JAX had already started with another number of devices, or runs on another platform.
    """
    if "JAX_PLATFORMS" not in os.environ and (simulate or not accelerator_is_visible()):
        os.environ["JAX_PLATFORMS"] = "cpu"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms == "cpu":
        # With libtpu installed, which compiling for TPUs needs, JAX would look for a TPU and warn at length that
        # there is none; and a second process would die on libtpu's lock file.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    import jax

    if platforms:
        jax.config.update("jax_platforms", platforms)  # JAX read the variable when it was imported
    if simulate is None:
        return
    with contextlib.suppress(RuntimeError):  # JAX has started: what it has may be enough
        jax.config.update("jax_num_cpu_devices", simulate)
    if len(jax.devices()) != simulate:
        raise UserError(
            f"{simulate} simulated devices were asked for and JAX runs with {len(jax.devices())} "
            f"{jax.default_backend()} device(s): unset JAX_PLATFORMS and XLA_FLAGS, and ask before JAX starts "
            "(in a notebook: restart the kernel and run the first cell first)"
        )


def accelerator_is_visible() -> bool:
    """Returns whether JAX could find a TPU or GPU, told from files and plugins without starting JAX."""
    if importlib.util.find_spec("libtpu") and any(glob.glob(pattern) for pattern in _TPU_FILES):
        return True
    return has_gpu_plugin() and any(os.path.exists(p) for p in _GPU_FILES)


def has_gpu_plugin() -> bool:
    """Returns whether JAX's CUDA or ROCm plugin is installed; it compiles for GPUs also where none is."""
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None or plugins.submodule_search_locations is None:
        return False
    names = [module.name for module in pkgutil.iter_modules(plugins.submodule_search_locations)]
    return any(name.startswith(_GPU_PLUGINS) for name in names)


def use_compilation_cache() -> None:
    """Keeps compiled programs in the cache directory, so that a second start skips compilation."""
    import jax

    from minitext.cache import cache_dir

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
