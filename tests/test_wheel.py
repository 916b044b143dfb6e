"""The wheel, away from the checkout: it trains, and its exercises come along."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import QUICK_FLAGS

ROOT = Path(__file__).parent.parent
TINY = ["model.layers=1", "model.embed=16", "model.heads=2", "model.mlp=16", "data.seq_len=32", "train.global_batch=4",
        "train.steps=5", "train.eval_batches=1", "train.sample_tokens=4"]  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        ROOT,
    ]
    subprocess.run(command, check=True)
    (found,) = folder.glob("minitext-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Returns a function that runs Python with the wheel's package and nothing of the checkout."""
    site, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        site,
        wheel,
    ]
    subprocess.run(install, check=True)

    def run(*words):
        environment = os.environ | {"PYTHONPATH": str(site), "XLA_FLAGS": QUICK_FLAGS}
        done = subprocess.run(
            [sys.executable, *words], cwd=elsewhere, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("-c", "import minitext; print(minitext.__file__)")
    assert where.startswith(str(site))
    return run


def test_it_holds_the_package_and_the_exercises_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert all(n.startswith(("minitext/", "minitext-")) for n in names)
    chapter = "ch04_transformer.py"
    parts = [f"_exercises/{folder}{chapter}" for folder in ("", "checks/", "solutions/")]
    for part in ("config/presets/laptop.yml", *parts):
        assert f"minitext/{part}" in names
    assert not [n for n in names if n.endswith((".pyc", ".ipynb"))]


@pytest.mark.audit
def test_it_trains_and_writes_text(installed):
    installed("-m", "minitext", "train", "run.name=a", *TINY)
    out = installed(
        "-m", "minitext", "generate", "runs/a", "--prompt", "def ", "--max-tokens", "4", "--json"
    )
    assert '"step": 5' in out


def test_its_exercises_are_found(installed):
    read = (
        "from minitext.book.grading import registry; root = registry.exercises_root(); "
        "print(root, *registry.load_exercises(root, ['04']))"
    )
    root, *ids = installed("-c", read).split()
    assert root.endswith("/minitext/_exercises") and "04.rms_norm" in ids


@pytest.mark.audit
def test_its_grader_passes_its_own_test(installed):
    installed("-m", "minitext", "grade", "04.rms_norm", "--solutions")
