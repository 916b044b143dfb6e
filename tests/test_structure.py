"""The architecture, guarded: what may import what, how long files are, and that book and package name each other."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minitext"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.md"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Lowest first; a module imports only from layers below its own, or from its own folder or row.
LAYERS = [
    {"errors", "cache", "progress"},
    {"schema", "hw", "environment", "cluster", "heartbeat"},
    {"config", "devices", "disk", "distributed"},
    {"mesh", "cost", "hlo", "buffers", "targets", "compile_report", "leaves", "stacks"}
    | {"replica_groups"},
    {"sharding"},
    {"kernels", "layers", "parallel"},
    {"attention", "ffn", "mla", "moe"},
    {"model", "tokenizer", "data", "checkpoint", "metrics", "loss", "optim", "mesh_check"}
    | {"nonfinite"}
    | {"goodput", "profile", "xplane", "device_time", "profile_report", "goodput_export", "watch"},
    {"train", "generate"},
    {"aot", "comms", "comms_report", "comms_sizes", "memory", "step_memory", "roofline"}
    | {
        "shard_report",
        "equality",
        "rundir",
        "run",
        "loop",
        "stopping",
        "watchdog",
        "emergency",
        "grading",
        "doctor",
        "launch",
        "llo",
        "llo_compiler",
        "llo_report",
        "tune",
        "schedule_text",
        "step_schedule",
        "kernel_time",
        "step_time",
    }
    | {"advice", "executable", "plan", "plan_times"},
    {"figures", "timelines", "notebook", "cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILE_LIMIT, KERNEL_LIMIT = 330, 400


def room(path: Path) -> str:
    """The module or folder of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Full names of every module a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top_level_imports(path: Path) -> set[str]:
    """First words of what a file imports when it is imported."""
    tree = ast.parse(path.read_text())
    names = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    return {
        n.split(".")[0]
        for n in names | {n.module for n in tree.body if isinstance(n, ast.ImportFrom) and n.module}
    }


def test_every_room_has_a_level():
    rooms = {room(path) for path in SOURCES} - {"__init__", "configs"}
    assert rooms == set(LEVEL)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    here = room(path)
    if here in ("__init__", "configs"):
        return
    for name in imports(path):
        words = name.split(".")
        if words[0] == "minitext" and len(words) > 1 and words[1] in LEVEL and words[1] != here:
            # schema's `replace` is the one call upwards: a frozen configuration gives its own changed copy.
            if (here, words[1]) == ("schema", "config"):
                continue
            assert LEVEL[words[1]] <= LEVEL[here], f"{here} imports {words[1]}, which is above it"


def test_pytree_rooms_never_see_the_model():
    for name in ("checkpoint", "optim", "metrics", "leaves", "stacks", "disk"):
        assert not any(
            i.startswith(("minitext.model", "minitext.train"))
            for i in imports(PACKAGE / f"{name}.py")
        )


def test_kernel_files_import_only_jax():
    for path in (PACKAGE / "kernels").glob("*.py"):
        # Not kernels: the tables of them, which also name chips and read their rows, and the simulator.
        if path.name in ("__init__.py", "cases.py", "block_shapes.py", "simulator.py"):
            continue
        allowed = {"jax", "numpy", "math", "functools", "operator", "typing", "collections"}
        allowed |= {"dataclasses"}
        names = {
            i for i in imports(path) if not i.startswith(("minitext.kernels", "minitext.errors"))
        }
        assert {i.split(".")[0] for i in names} <= allowed, path


def test_only_notebook_and_figures_know_ipython_and_matplotlib():
    for path in SOURCES:
        words = {i.split(".")[0] for i in imports(path)}
        if path.name not in ("notebook.py", "figures.py", "timelines.py"):
            assert not words & {"IPython", "matplotlib"}, path


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_readable(path):
    limit = KERNEL_LIMIT if room(path) == "kernels" else FILE_LIMIT
    assert len(path.read_text().splitlines()) <= limit


def test_functions_stay_readable():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node, clean=False)
                lines = node.end_lineno - node.lineno - (doc.count("\n") + 1 if doc else 0)
                assert lines <= 60, f"{path.name}: {node.name} has {lines} lines"


def test_there_is_no_room_for_odds_and_ends():
    assert not [p for p in SOURCES if p.stem in ("utils", "util", "helpers", "misc", "common")]


def test_every_test_file_mirrors_a_module():
    rooms = set(LEVEL) | {"structure", "book", "wheel", "crash", "exercises", "benchmarks"}
    rooms |= {path.stem for path in (PACKAGE / "parallel").glob("*.py")}
    # One test file for all implementations of an operation.
    rooms |= {re.sub("_(xla|tpu|gpu)$", "", p.stem) for p in (PACKAGE / "kernels").glob("*.py")}
    for path in (ROOT / "tests").glob("test_*.py"):
        assert any(path.stem.removeprefix("test_").startswith(name) for name in rooms), path.name


def test_every_module_is_tested():
    tested = {p.stem.removeprefix("test_") for p in (ROOT / "tests").glob("test_*.py")}
    for name in set(LEVEL) - {"__main__", "errors", "cache"}:
        assert any(t.startswith(name) for t in tested) or name in TESTED_WITH, name


# Modules whose behaviour is tested through the module that they were divided from.
TESTED_WITH = {
    "schema": "config",
    "environment": "cluster",
    "advice": "aot",
    "plan_times": "plan",
    "targets": "aot",
    "compile_report": "aot",
    "step_memory": "memory",
    "comms_report": "comms",
    "comms_sizes": "comms",
    "disk": "checkpoint",
    "leaves": "checkpoint",
    "parallel": "pipeline",
    "figures": "notebook",
    "timelines": "goodput",
    "loop": "run",
    "mesh_check": "train",
    "llo_compiler": "llo",
    "llo_report": "llo",
    "device_time": "profile",
    "xplane": "profile",
    "profile_report": "profile",
    "goodput_export": "goodput",
}


# --- dependencies


def declared(*extras: str) -> set[str]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[<>=\[ ]", line)[0].lower() for line in lines}
    return names - {"minitext"}


MODULE_OF = {"orbax-checkpoint": "orbax", "pyyaml": "yaml", "jax": "jax"}


def test_every_dependency_is_imported():
    used = {i.split(".")[0].lower() for path in SOURCES for i in imports(path)}
    for name in declared():
        assert MODULE_OF.get(name, name.replace("-", "_")).lower() in used, (
            f"{name} is not imported"
        )


def test_every_extra_earns_its_line():
    """What the extras bring is imported by the tests, the book or the notebooks, or is a command the Makefile calls."""
    text = "".join(
        p.read_text()
        for folder in ("tests", "book", "benchmarks")
        for p in (ROOT / folder).rglob("*.py")
    )
    text += "".join(
        p.read_text()
        for p in [
            *SOURCES,
            ROOT / "Makefile",
            ROOT / ".pre-commit-config.yaml",
            ROOT / "_config.yml",
        ]
    )
    text += "".join(p.read_text() for p in (ROOT / ".github").rglob("*.yml"))
    commands = {
        "jupyterlab": "jupyter lab",
        "pytest-xdist": "-n 2",
        "hatchling": "build-isolation",
        "pytest-timeout": "timeout",
        "ipykernel": "kernel",
    }
    for name in declared(*PROJECT["optional-dependencies"]) - declared():
        word = commands.get(name, name)
        assert word in text or word.replace("-", "_") in text, f"{name} is not used"


def test_imports_are_declared():
    standard = sys.stdlib_module_names
    known = {
        MODULE_OF.get(n, n.replace("-", "_")).lower()
        for n in declared("book", "aot", "tfds", "tune", "goodput")
    }
    # Installed with what is declared: jaxlib and ml_dtypes with jax, pyarrow with datasets, and so on.
    known |= {
        "minitext",
        "jaxlib",
        "pyarrow",
        "myst_nb",
        "ipython",
        "pygments",
        "nbformat",
        "jax_plugins",
        "google",
        "cloudpickle",
    }
    for path in SOURCES:
        for name in {i.split(".")[0].lower() for i in imports(path)}:
            assert name in standard or name in known, f"{path.name} imports {name}"


def test_pinned_versions_name_no_index():
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text and " @ " not in text and "--" not in text
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in text.splitlines() if line}
    assert {n.replace("_", "-") for n in declared("book", "aot", "test", "dev")} <= pinned


# --- the book and the package name each other


def chapters_of(path: Path) -> set[int]:
    found = re.search(
        r"^Chapters: ([\d, ]+|none)\.$", ast.get_docstring(ast.parse(path.read_text())) or "", re.M
    )
    assert found, f"{path.name} does not say which chapters build it (Chapters: 4, 6.)"
    return set() if found[1] == "none" else {int(n) for n in found[1].split(",")}


def modules_of(notebook: Path) -> set[str]:
    found = re.search(r"^\*\*Modules:\*\* (.+)$", notebook.read_text(), re.M)
    assert found, f"{notebook.name} lists no modules"
    return set(re.findall(r"`minitext\.([\w.]+)`", found[1]))


def test_modules_name_chapters_and_chapters_name_modules():
    written = {int(n.name[:2]): modules_of(n) for n in NOTEBOOKS}
    for path in SOURCES:
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if name in ("__init__", "__main__", "configs"):
            continue
        for chapter in chapters_of(path) & set(written):
            assert name in written[chapter] or name.split(".")[0] in written[chapter], (
                f"chapter {chapter} does not list {name}"
            )
    for chapter, names in written.items():
        for name in names:
            path = PACKAGE / (name.replace(".", "/") + ".py")
            path = path if path.exists() else PACKAGE / name.replace(".", "/") / "__init__.py"
            assert chapter in chapters_of(path), f"minitext.{name} does not name chapter {chapter}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_paired_and_hold_no_outputs(path):
    pair = json.loads(path.with_suffix(".ipynb").read_text())
    text = jupytext.read(path)
    assert [c["cell_type"] for c in pair["cells"]] == [c["cell_type"] for c in text.cells]
    for cell, source in zip(pair["cells"], text.cells, strict=True):
        assert "".join(cell["source"]) == source["source"]
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_every_notebook_has_its_pair():
    assert {p.stem for p in NOTEBOOKS} == {p.stem for p in (ROOT / "notebooks").glob("*.ipynb")}


def public_names() -> set[str]:
    names = set()
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                names.add(node.name)
    return names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_chapters_define_nothing_the_package_defines(path):
    """A naive version has a name of its own; the package's code is shown, never pasted.

    Exercises are the learner's own and may be called what the field calls them.
    """
    public = public_names()
    for cell in jupytext.read(path).cells:
        if cell["cell_type"] != "code" or "exercise" in cell["metadata"].get("tags", []):
            continue
        code = "\n".join(
            line for line in cell["source"].splitlines() if not line.lstrip().startswith(("%", "!"))
        )
        code = code.replace("except ModuleNotFoundError:", "except ModuleNotFoundError:\n    pass")
        for node in ast.parse(code).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.name not in public, (
                    f"{path.name} defines {node.name}, which minitext has"
                )


def test_nothing_is_skipped_or_allowed_to_fail_in_a_chapter():
    for path in NOTEBOOKS:
        text = path.read_text()
        for word in ("raises-exception", "skip-execution", "allow_errors"):
            assert word not in text, path.name


# --- one address, and no trace of any machine

KINDS = {".py", ".md", ".yml", ".toml", ".txt", ".ipynb", ".json", ".bib", ".css", ""}
LISTED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout
TEXTS = [p for p in map(Path, LISTED.split("\0")) if p.suffix in KINDS and (ROOT / p).is_file()]


def test_the_repository_has_one_address():
    address = PROJECT["urls"]["Repository"]
    for path in TEXTS:
        for found in re.findall(
            r"https://github\.com/[\w-]*minitext[\w-]*/[\w-]+", (ROOT / path).read_text()
        ):
            assert found == address, path


def test_no_file_names_a_build_machine_or_an_index():
    for path in TEXTS:
        if path.name == "test_structure.py":
            continue
        text = (ROOT / path).read_text()
        for word in ("/work/main", "/root/", "pypi.org/simple", "--index-url", "file:///"):
            assert word not in text, f"{path} holds {word}"


# --- the public surface


def test_public_names_exist_and_are_documented():
    package = importlib.import_module("minitext")
    for name in package.__all__:
        assert getattr(package, name).__doc__, name


def test_import_is_cheap():
    """Beyond JAX, `import minitext` costs under 0.2 s (best of three); the command line's help imports no JAX."""
    code = (
        "import jax, time; t = time.perf_counter(); import minitext; print(time.perf_counter() - t)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    assert min(times) < 0.2
    code = "import sys, minitext.cli; print(sorted({'jax', 'flax', 'orbax', 'datasets'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
