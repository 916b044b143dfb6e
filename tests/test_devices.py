"""Choosing devices happens before JAX starts, so each case is a process of its own."""

import os
import subprocess
import sys

import pytest


def start(call, **environment):
    code = f"from minitext import devices; devices.start({call})\n"
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


def test_devices_can_be_simulated():
    assert start("simulate=4")[0] == "4 cpu\n"


def test_too_late_is_said(monkeypatch):
    import jax

    from minitext import devices
    from minitext.errors import UserError

    with pytest.raises(UserError, match="3 simulated devices"):
        devices.start(3)
    assert jax.device_count() == 8
