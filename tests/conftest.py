"""What every test starts from: CPU, eight simulated devices, caches of its own."""

import collections
import fcntl
import functools
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# The first process of a session makes the folder; its workers and the commands they start share it.
os.environ.setdefault("MINITEXT_CACHE", MADE := tempfile.mkdtemp(prefix="minitext-test-"))

import hypothesis
import jax
import pytest
from jax._src.interpreters import mlir
from rich.console import Console

import minitext as mt
from minitext import files, hardware
from minitext.config.sections import MeshConfig
from minitext.distributed import devices
from minitext.kernels import dispatch
from minitext.sharding.mesh import make_mesh

# Each worker, and each command that tests start, would otherwise compile all sources again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests compile small programs most of the time. This process does it quickly, and so do commands that are given
# QUICK_FLAGS. Others don't see them: libtpu refuses flags that it doesn't know.
QUICK_FLAGS = " ".join(f"--{k}={str(v).lower()}" for k, v in devices.quick_compile("cpu").items())
devices.compile_quickly()
devices.start(8)
devices.use_compilation_cache()


def _share_contexts(make, programs=1000):
    """Returns a function that calls `make` once for so many programs; old contexts go, with what they hold."""
    count = itertools.count()
    made = functools.lru_cache(maxsize=1)(lambda _: make())
    return lambda: made(next(count) // programs)


# JAX makes an MLIR context for each program that it lowers, which takes 3.5 ms, and fills it with the same types and
# operations. Tests lower tens of thousands: shared contexts save a fifth of their time.
mlir.make_ir_context = _share_contexts(mlir.make_ir_context)

# `make test` tries the same examples each time; `make audit` searches, from a seed that it prints. How long a first
# example compiles says nothing about a property. Shrinking may take as long as a test may run, so a failing example is
# shown as it was found: `--hypothesis-profile=shrink --timeout=0` shrinks it.
_AS_FOUND = tuple(phase for phase in hypothesis.Phase if phase.name not in ("shrink", "explain"))
_PROFILES = {
    "test": {"phases": _AS_FOUND, "derandomize": True},
    "search": {"phases": _AS_FOUND, "derandomize": False},
    "shrink": {"derandomize": True},
}
for _name, _options in _PROFILES.items():
    hypothesis.settings.register_profile(_name, deadline=None, database=None, **_options)
hypothesis.settings.load_profile("test")

TINY = [
    "model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "data.seq_len=32",
    "train.global_batch=8", "train.sample_tokens=0", "data.source=grammar",
]  # fmt: skip


def pytest_collection_modifyitems(items):
    """Puts files with slow tests first, then those with many tests, so that no core waits for one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    count = collections.Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -count[item.path]))


def pytest_unconfigure():
    """Removes the folder that this process made, which in a worker nobody used, and lets a worker end at once.

    Pytest then collects garbage in full, which takes seconds over all that the tests compiled; a worker that is not
    done 5 s after the last test is interrupted, wherever it is.
    """
    gc.freeze()
    shutil.rmtree(MADE, ignore_errors=True)


def audit_but(kept, cases):
    """Parametrises with all cases, of which `make test` runs those kept and `make audit` the others."""
    assert all(case in cases for case in kept)
    return [
        pytest.param(case, id=str(case), marks=() if case in kept else pytest.mark.audit)
        for case in cases
    ]


def use_cache(patch, folder):
    """Makes an empty cache directory the one in use, but for this machine's peak, whose measurement takes seconds."""
    hardware.measure_matmul_peak()
    folder.mkdir()
    shutil.copy(files.cache_dir() / "matmul_peak.json", folder)
    patch.setenv("MINITEXT_CACHE", str(folder))


class Server:
    """`crash_server.py` in a process of its own, under the command `prefix`."""

    def __init__(self, *prefix):
        here = Path(__file__).parent
        env = os.environ | {
            "PYTHONPATH": str(here.parent), "JAX_PLATFORMS": "cpu", "COLUMNS": "300", "XLA_FLAGS": QUICK_FLAGS,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(here / "crash_server.py")],
            env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        assert self.answers.readline() == "ready\n"

    def start(self, *args, output, folder=".", env=None):
        words = [str(arg) for arg in args]
        output, folder = str(Path(output).absolute()), str(folder)
        request = {"args": words, "output": output, "folder": folder, "env": env or {}}
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        return int(self.answers.readline())

    def wait(self):
        code, seconds = self.answers.readline().split()
        self.seconds = float(seconds)  # of processors, for the command that ended
        return int(code)

    def run(self, *args, output, folder="."):
        self.start(*args, output=output, folder=folder)
        return self.wait(), Path(output).read_text()

    def close(self):
        self.requests.close()
        self.process.wait()


@pytest.fixture
def minitext(monkeypatch, capsys):
    """Runs the command line in this process; returns exit code, stdout and stderr."""
    from minitext.cli import main

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["minitext", *map(str, words)])
        try:
            main.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def server():
    """A server for commands, which imports everything once."""
    server = Server()
    yield server
    server.close()


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


@pytest.fixture(scope="session")
def adapted(tiny, tmp_path_factory):
    """A folder with a trained run, and a run with adapters beside it of six steps, saved after three.

    It's for all files that need such runs. A test that changes them works on copies. Workers share it: the first that
    asks makes the runs.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # each worker has a folder of its own in it
    folder = root / "adapted"
    with open(root / "adapted.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tuned" / "checkpoints" / "6").exists():
            _make_adapted(folder, tiny)
    return folder


def _make_adapted(folder, tiny):
    from minitext.training import run

    cfg = tiny(f"run.dir={folder}", "run.name=base", "train.steps=3")
    run.train(cfg, Console(quiet=True))
    values = {
        "run.name": "tuned", "train.steps": 6, "train.save_every": 3, "optim.learning_rate": 0.01,
        "model.lora.rank": 4, "model.lora.alpha": 8.0, "checkpoint.load_parameters": f"{folder}/base",
    }  # fmt: skip
    run.train(cfg.replace(values), Console(quiet=True))


@pytest.fixture(scope="module")
def as_on_a_tpu():
    """Makes `kernels` take a TPU's implementations, which the tests that use it simulate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "platform", lambda: "tpu")
        yield
