"""Runs the chapters as their readers do, in environments made from what a reader is told to type and nothing else.

    python benchmarks/notebooks.py [CHAPTER ...] [--environment setup lab lowest] [--python 3.11 3.12]

    setup    what the chapter's own setup cell installs, in the latest versions, for each Python of --python. This
             checkout's wheel takes the place of the repository's address. Colab has Python 3.12.
    lab      what `make lab` installs, made by make in a copy of the checkout
    lowest   the lowest versions that pyproject.toml allows, in which tests run too

Chapters whose setup cells install the same share an environment. A notebook runs with an empty home and none of this
shell's settings, in an empty folder (under `lab` in the copy's folder notebooks/, as JupyterLab would run it), and then
`minitext train` and `generate` do. All of it takes two hours. Environments are made in --folder and stay there; each
takes 2 GB less what uv shares with its cache. Needs uv (pip install uv) and a package index.

A record keeps each chapter's last pass. Chapters that are not run now keep their row of the record before.
"""

import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
PACKAGES = (
    "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "datasets", "numpy", "matplotlib",
    "ipykernel",
)  # fmt: skip
Job = Callable[
    [Path], tuple[float, str | None]
]  # of an environment's Python: seconds, and what failed
LIMIT = 1800  # seconds for a notebook, a command or the tests
# What runs with the lowest versions besides the chapters: a test file from each room that stands on another library.
TESTS = (
    "tests/config", "tests/models", "tests/data", "tests/checkpoint", "tests/training/test_step.py",
    "tests/training/test_optim.py", "tests/compiler/test_targets.py", "tests/kernels/test_simulator.py",
)  # fmt: skip

EXECUTE = """
import sys, traceback
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
try:
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
except nbclient.exceptions.CellExecutionError as error:
    print(error, file=sys.stderr)
    sys.exit(f"{error.ename}: {error.evalue}".strip(": ").splitlines()[0])
"""
VERSIONS = """
import json, platform, sys
from importlib import metadata
here = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in metadata.distributions()}
print(json.dumps({"python": platform.python_version()} | {n: here[n] for n in sys.argv[1:] if n in here}))
"""


# ---------------------------------------------------------------------------- environments


def install_words(notebook: Path) -> tuple[tuple[str, ...], ...]:
    """What the notebook's first code cell gives to `pip install`, the repository's package first."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    setup = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))
    found = re.findall(r"^\s*%pip install (.+)$", setup, flags=re.MULTILINE)
    if not found or "git+" not in found[0]:
        sys.exit(f"{notebook.name}: its setup cell installs nothing from the repository")
    return tuple(tuple(word for word in shlex.split(line) if word != "-q") for line in found)


def uv(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "uv", *words, "--quiet"], check=True, cwd=ROOT)


def with_uv(folder: Path, python: str, *installs: tuple[str, ...]) -> Path:
    """Makes an environment with what `uv pip install` is told, a call for each, and returns its Python."""
    uv("venv", "--clear", "--python", python, folder)
    for words in installs:
        uv("pip", "install", "--python", folder / "bin" / "python", *words)
    return folder / "bin" / "python"


def with_make(folder: Path) -> Path:
    """Copies the checkout as git sees it, lets make install what `make lab` needs there, and returns that Python."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, done.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    shell = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    python = f"PYTHON={sys.executable}"
    subprocess.run(["make", "-C", folder, python, ".venv/book"], check=True, env=shell)
    return folder / ".venv" / "bin" / "python"


def versions(python: Path) -> dict[str, str]:
    command = [python, "-c", VERSIONS, *PACKAGES]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


# ---------------------------------------------------------------------------- what runs in them


def run(python: Path, folder: Path | None, *commands: list) -> tuple[float, str | None]:
    """Runs commands one after another in a folder, or an empty one, as a reader would who has only this environment.

    Returns the seconds, and the last line of the one that failed.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as empty:
        shell = {
            "PATH": os.pathsep.join([str(python.parent), os.defpath]),
            "HOME": home,
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",  # what was printed stands before the error that followed
        }
        for command in commands:
            try:
                done = subprocess.run(
                    [python, *command], cwd=folder or empty, env=shell, timeout=LIMIT,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return time.perf_counter() - began, f"not done after {LIMIT} s"
            if done.returncode:
                print(done.stdout, file=sys.stderr)
                lines = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).strip().splitlines()
                return time.perf_counter() - began, lines[-1] if lines else f"{done.returncode}"
    return time.perf_counter() - began, None


def chapter(notebook: Path, folder: Path | None, python: Path) -> tuple[float, str | None]:
    return run(python, folder, ["-c", EXECUTE, notebook])


def commands(python: Path) -> tuple[float, str | None]:
    train = ["-m", "minitext", "train", "laptop", "train.steps=3", "run.name=a"]
    write = ["-m", "minitext", "generate", "runs/a", "--prompt", "def ", "--max-tokens", "8"]
    return run(python, None, train, write)


def tests(python: Path) -> tuple[float, str | None]:
    marks = "not audit and not book and not gpu_aot and not slow"
    return run(python, ROOT, ["-m", "pytest", "-p", "no:xdist", "-m", marks, *TESTS])


# ---------------------------------------------------------------------------- the record


def rows_before(results: Path, details: str) -> dict[str, dict]:
    """The rows of this environment's newest record."""
    found = sorted(results.glob(f"notebooks-{details}-*.json"))
    return json.loads(found[-1].read_text(encoding="utf-8"))["rows"] if found else {}


def row(before: dict | None, installed: dict[str, str], seconds: float, error: str | None) -> dict:
    """What is known of a chapter now: when and with what it last passed, and how it failed if it did not now."""
    now = {"date": datetime.date.today().isoformat(), "versions": installed}
    if error is None:
        return {"passed": {**now, "seconds": round(seconds, 1)}, "failed": None}
    return {"passed": (before or {}).get("passed"), "failed": {**now, "error": error}}


def measure(results: Path, kind: str, jobs: dict[str, tuple[Path, Job]]) -> bool:
    """Runs jobs and writes the record. Returns whether all passed."""
    installed = {python: versions(python) for python, _ in jobs.values()}
    minor = ".".join(next(iter(installed.values()))["python"].split(".")[:2])
    details = f"{kind}-py{minor}"
    rows, good = rows_before(results, details), True
    for name, (python, job) in jobs.items():
        seconds, error = job(python)
        good &= error is None
        print(f"{details} {name}: {error or 'passed'}, {seconds:.0f} s", flush=True)
        rows[name] = row(rows.get(name), installed[python], seconds, error)
        figures = {"environment": kind, "python": minor, "rows": dict(sorted(rows.items()))}
        # The versions are those of the rows; this process has others.
        machine = common.machine() | {"versions": {}}
        # Rows come from several runs, each with chapters and folders of its own.
        command = f"python benchmarks/notebooks.py --environment {kind}"
        command += f" --python {minor}" if kind == "setup" else ""
        record = {"command": command, "machine": machine, **figures}
        common.write_record(results, "notebooks", details, record)
    return good


def environments(
    kind: str, python: str, asked: dict[str, tuple[tuple[str, ...], ...]], folder: Path
) -> dict[str, Path]:
    """Makes a kind's environments, and returns the Python of each chapter's."""
    if kind == "lab":
        return dict.fromkeys(asked, with_make(folder / "lab"))
    (wheel,) = (folder / "wheel").glob("*.whl")
    lowest = ("--resolution", "lowest-direct", f"minitext[test] @ {wheel.as_uri()}")
    pythons = {}
    for installs in sorted(set(asked.values())):
        where = folder / f"{kind}-{Path(python).name}-{len(pythons)}"
        first, *further = installs
        ours = tuple(re.sub(r"git\+\S+", wheel.as_uri(), word) for word in first)
        together = (*(lowest if kind == "lowest" else ()), *ours)
        pythons[installs] = with_uv(where, python, together, *further)
    return {name: pythons[installs] for name, installs in asked.items()}


def main() -> None:
    made = common.parser(__doc__ or "")
    made.add_argument("chapters", nargs="*", help="such as 01 15; all by default")
    kinds = ("setup", "lab", "lowest")
    made.add_argument("--environment", nargs="+", choices=kinds, default=kinds)
    made.add_argument("--python", nargs="+", default=["3.11", "3.12"], help="for setup")
    made.add_argument("--folder", type=Path, default=ROOT / ".venv-notebooks")
    args = made.parse_args()
    every = {path.stem[:2]: path for path in NOTEBOOKS}
    if missing := set(args.chapters) - set(every):
        made.error(f"no chapter {', '.join(sorted(missing))}: choose among {', '.join(every)}")
    notebooks = {name: every[name] for name in args.chapters or every}
    asked = {name: install_words(path) for name, path in notebooks.items()}
    folder = args.folder.resolve()
    uv("build", "--wheel", "--clear", "--out-dir", folder / "wheel")

    good = True
    for kind in args.environment:
        for python in args.python if kind == "setup" else [sys.executable]:
            pythons = environments(kind, python, asked, folder)
            where = folder / "lab" / "notebooks" if kind == "lab" else None
            jobs: dict[str, tuple[Path, Job]] = {
                name: (pythons[name], partial(chapter, path, where))
                for name, path in notebooks.items()
            }
            jobs["train, generate"] = next(iter(pythons.values())), commands
            if kind == "lowest":
                jobs["tests"] = next(iter(pythons.values())), tests
            good &= measure(args.output, kind, jobs)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
