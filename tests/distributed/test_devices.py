"""Choosing devices happens before JAX starts, so each case is a process of its own."""

import contextlib
import mmap
import os
import platform
import subprocess
import sys

import pytest

from minitext.distributed import devices
from minitext.errors import UserError


def start(call, **environment):
    code = f"from minitext.distributed import devices; devices.start({call})\n"
    code += "import jax; print(jax.device_count(), jax.default_backend())"
    clean = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_without_an_accelerator_it_is_the_cpu_and_quiet():
    out, err = start("")
    assert out == "1 cpu\n"
    assert err == ""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_kept():
    code = """if True:
        import resource, sys
        from minitext.distributed import devices
        devices.start(keep_memory=sys.argv[1] == "True")
        import jax, jax.numpy as jnp
        f = jax.jit(lambda x: jnp.sum((x @ x) @ jnp.tanh(x @ x.T)))
        x = jnp.ones((512, 512))
        for _ in range(3):
            f(x).block_until_ready()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(3):
            f(x).block_until_ready()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    kept, given_back = (
        int(subprocess.check_output([sys.executable, "-c", code, keep], env=clean, text=True))
        for keep in ("True", "False")
    )
    assert 10 * kept < given_back


def test_devices_can_be_simulated():
    assert start("simulate=4")[0] == "4 cpu\n"


def test_too_late_is_said(monkeypatch):
    import jax

    from minitext.distributed import devices
    from minitext.errors import UserError

    assert jax.devices()
    with pytest.raises(UserError, match="3 simulated devices"):
        devices.start(3)
    assert jax.device_count() == 8


def test_a_file_of_any_name_may_be_in_memory(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9"
    with open(path, "w+b") as file:
        file.write(b"x")
        file.flush()
        with mmap.mmap(file.fileno(), 1), contextlib.suppress(UserError):  # libtpu may be there too
            devices.check_profiler()
