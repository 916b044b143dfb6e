"""What every test starts from: CPU, eight simulated devices, caches of its own."""

import os
import tempfile

# The first process of a session makes the folder; its workers and the commands they start share it.
os.environ.setdefault("MINITEXT_CACHE", tempfile.mkdtemp(prefix="minitext-test-"))

import hypothesis
import jax
import pytest

import minitext as mt
from minitext.config.sections import MeshConfig
from minitext.distributed import devices
from minitext.kernels import dispatch
from minitext.sharding.mesh import make_mesh

# Tests compile small programs most of the time. This process does it quickly, and so do commands that are given
# QUICK_FLAGS. Others don't see them: libtpu refuses flags that it doesn't know.
QUICK_FLAGS = " ".join(f"--{k}={str(v).lower()}" for k, v in devices.quick_compile("cpu").items())
FLAGS = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = f"{FLAGS or ''} {QUICK_FLAGS}"
devices.start(8)
os.environ.pop("XLA_FLAGS") if FLAGS is None else os.environ.update(XLA_FLAGS=FLAGS)
devices.use_compilation_cache()
# The first example of a property compiles; how long that takes says nothing about the property.
hypothesis.settings.register_profile("minitext", deadline=None)
hypothesis.settings.load_profile("minitext")

TINY = [
    "model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "data.seq_len=32",
    "train.global_batch=8", "train.sample_tokens=0", "data.source=grammar",
]  # fmt: skip


def audit_but(kept, cases):
    """Parametrises with all cases, of which `make test` runs those kept and `make audit` the others."""
    assert set(kept) <= set(cases)
    return [
        pytest.param(case, id=str(case), marks=() if case in kept else pytest.mark.audit)
        for case in cases
    ]


@pytest.fixture
def one_device():
    """A mesh of one device, set for the test."""
    mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="session")
def tiny():
    """Returns a function giving the tiny configuration with further overrides."""
    return lambda *overrides: mt.load_config("laptop", [*TINY, *overrides])


@pytest.fixture(scope="module")
def as_on_a_tpu():
    """Makes `kernels` take a TPU's implementations, which the tests that use it simulate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "platform", lambda: "tpu")
        yield
