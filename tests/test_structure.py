"""The architecture, guarded: what may import what, and that book and package name each other."""

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minitext"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.md"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# From the top down: a room imports only rooms to the right of it. The last four are files, the ground.
ROOMS = (
    "cli", "book", "journey", "post_training", "perf", "training", "inference", "observability", "models", "data",
    "compiler", "sharding", "kernels", "checkpoint", "distributed", "config", "hardware", "terminal", "files", "errors",
)  # fmt: skip
GROUND = ROOMS[-4:]


def name_of(path: Path) -> str:
    """A file's dotted name: `minitext.models.layers`; a folder's own for its `__init__`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in SOURCES}


def room(name: str) -> str:
    """The room of a module, or "" for the package's own two files."""
    return (
        name.split(".")[1] if name.startswith("minitext.") and name != "minitext.__main__" else ""
    )


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> set[str]:
    """Full names of everything a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules_in(names: set[str]) -> set[str]:
    """Which of the package's modules these names are, or are in."""
    found = set()
    for name in names:
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found |= {name} - {"", "minitext"}
    return found


def test_every_room_is_in_the_order():
    assert {room(name) for name in MODULES} - {""} == set(ROOMS)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"minitext", "minitext.__main__"}))
def test_imports_point_down(name):
    for other in modules_in(imports(MODULES[name])):
        assert ROOMS.index(room(other)) >= ROOMS.index(room(name)), (
            f"{name} imports {other}, which is in a room above it"
        )


def test_no_imports_go_in_a_circle():
    """Not even inside a room, and not even where a function imports."""
    below = {name: modules_in(imports(path)) - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(below[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(below):
        visit(name, ())


def test_states_and_optimizers_are_pytrees_to_us():
    """Checkpoints, optimizers and metrics never see a model."""
    for name, path in MODULES.items():
        pytrees = ("minitext.training.optim", "minitext.observability.metrics")
        if room(name) == "checkpoint" or name in pytrees:
            seen = modules_in(imports(path))
            assert not {other for other in seen if room(other) == "models"}, name


def test_kernel_files_import_only_jax():
    allowed = {
        "jax",
        "numpy",
        "math",
        "functools",
        "operator",
        "typing",
        "collections",
        "dataclasses",
    }
    for path in (PACKAGE / "kernels").glob("*/*.py"):
        names = {
            i for i in imports(path) if not i.startswith(("minitext.kernels", "minitext.errors"))
        }
        assert {i.split(".")[0] for i in names} <= allowed, path


def test_only_book_and_figures_know_ipython_and_matplotlib():
    for name, path in MODULES.items():
        words = {i.split(".")[0] for i in imports(path)}
        if room(name) != "book" and name != "minitext.perf.figures":
            assert not words & {"IPython", "matplotlib"}, name


def test_functions_stay_readable():
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node, clean=False)
                lines = node.end_lineno - node.lineno - (doc.count("\n") + 1 if doc else 0)
                assert lines <= 60, f"{path.name}: {node.name} has {lines} lines"


def test_there_is_no_room_for_odds_and_ends():
    assert not [p for p in SOURCES if p.stem in ("utils", "util", "helpers", "misc", "common")]


def test_rooms_say_what_they_are_for():
    for name in set(ROOMS) - set(GROUND):
        doc = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
        assert "ay import" in doc, f"{name} does not say what it may import"


def test_rooms_export_what_exists():
    """A name that is also a file of its room would be one or the other, as imports happen to go."""
    for name in set(ROOMS) - set(GROUND):
        package = importlib.import_module(f"minitext.{name}")
        files = {path.stem for path in (PACKAGE / name).iterdir()}
        for public in dir(package) if name != "kernels" else ():
            assert getattr(package, public) is not None, f"{name}.{public}"
            assert public not in files, f"{name} exports {public}, which is a file of it"


def test_a_kernels_folder_does_not_hide_its_function():
    from minitext import kernels

    for op, _ in kernels.IMPLEMENTATIONS:
        for path in (PACKAGE / "kernels" / op).glob("*.py"):
            importlib.import_module(f"minitext.kernels.{op}.{path.stem}")
        assert callable(getattr(kernels, op)), op


def test_every_test_file_mirrors_a_module():
    """`tests/ROOM/test_NAME.py` is about `minitext/ROOM/NAME.py`, or about a folder of that name."""
    about_more = {
        "structure",
        "book",
        "book_chapters",
        "book_sources",
        "wheel",
        "crash",
        "crash_processes",
        "hostile",
    }
    about_more |= {"book_sync"}  # book/sync.py, a script of the checkout
    about_more |= {"benchmarks", "kernels/gpu"}  # all GPU kernels, which one job compiles
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = path.relative_to(ROOT / "tests").with_suffix("").as_posix().replace("test_", "")
        if name not in about_more and not name.startswith("book/grading"):
            source = PACKAGE / name
            assert source.is_dir() or source.with_suffix(".py").exists(), name


def test_every_module_is_tested():
    tested = {
        p.relative_to(ROOT / "tests").as_posix().replace("test_", "").removesuffix(".py")
        for p in (ROOT / "tests").rglob("test_*.py")
    }
    names = {name.removeprefix("minitext.").replace(".", "/") for name in MODULES}
    assert set(TESTED_WITH) <= names and set(TESTED_WITH.values()) <= tested
    for name in MODULES:
        where = name.removeprefix("minitext.").replace(".", "/")
        within = {where.rpartition("/")[0], TESTED_WITH.get(where, where)}
        if MODULES[name].name not in ("__init__.py", "__main__.py"):
            assert within & tested or where.startswith("book/grading") or where in UNTESTED, name


UNTESTED = {"errors"}
# Modules whose behaviour is tested through another.
TESTED_WITH = {
    "checkpoint/gguf": "checkpoint/weights",
    "checkpoint/leaves": "checkpoint/checkpointer",
    "checkpoint/maxtext": "training/maxtext",
    "cli/bridge": "perf/maxtext",
    "config/maxtext_model": "config/maxtext_map",
    "models/maxtext_names": "training/maxtext",
    "checkpoint/safetensors": "checkpoint/weights",
    "checkpoint/stored": "checkpoint/weights",
    "cli/arguments": "cli/main",
    "cli/journey": "journey/run",
    "cli/launching": "cli/main",
    "cli/reports": "cli/main",
    "cli/running": "cli/main",
    "cli/serving": "cli/main",
    "cli/setup": "cli/main",
    "cli/tuning": "cli/main",
    "cli/watching": "cli/main",
    "compiler/llo_compiler": "compiler/llo",
    "config/data": "config/config",
    "config/model": "config/config",
    "config/rope": "models/rope",
    "config/section": "config/config",
    "config/sections": "config/config",
    "data/array_record": "data/rows",
    "data/grammar": "data/batches",
    "data/conversation_file": "data/conversation_rows",
    "data/packing": "data/batches",
    "data/placement": "data/batches",
    "data/preview": "data/conversation_rows",
    "data/sources": "data/batches",
    "data/streaming": "data/batches",
    "data/text_files": "data/batches",
    "data/token_file": "data/batches",
    "distributed/launch/local": "distributed/launch",
    "distributed/launch/schedulers": "distributed/launch",
    "book/layouts": "book/equality",
    "book/pipeline_trace": "sharding/pipeline",
    "data/chat_template": "data/chat",
    "data/gguf_tokenizer": "training/interchange",
    "inference/batching": "inference/artefact_server",
    "inference/cpu_decode": "inference/generate",
    "inference/grammar_check": "inference/engine",
    "inference/http_server": "inference/server",
    "inference/model_store": "inference/artefact_server",
    "inference/open_inference": "inference/artefact_server",
    "inference/export": "inference/artefact",
    "inference/shipped/generate": "inference/artefact",
    "inference/shipped/load": "inference/artefact",
    "inference/protocol": "inference/server",
    "inference/requests": "inference/engine",
    "inference/sampling": "inference/engine",
    "inference/structured": "inference/engine",
    "models/paged": "inference/engine",
    "inference/server_metrics": "inference/server",
    "kernels/block_shapes": "perf/tune",
    "kernels/cases": "compiler/llo",
    "kernels/per_device": "kernels/gpu",
    "kernels/tiles_gpu": "kernels/gpu",
    "kernels/tiles_tpu": "kernels/matmul",
    "models/flops": "models/transformer",
    "models/gguf_names": "training/interchange",
    "observability/device_time": "observability/profiler",
    "models/hf_keys": "models/families",
    "observability/goodput_export": "observability/goodput",
    "observability/gpu_launches": "observability/profiler",
    "observability/profile_report": "observability/profiler",
    "observability/xplane": "observability/profiler",
    "perf/comms_audit": "perf/comms",
    "perf/figures": "book/notebook",
    "perf/product_types": "models/quantization",
    "perf/sizes": "perf/memory",
    "sharding/check": "training/step",
    "sharding/pipeline_schedule": "sharding/pipeline",
    "sharding/pipeline_stages": "sharding/pipeline",
    "post_training/prompts": "post_training/rollouts",
    "post_training/sampler": "post_training/rollouts",
    "training/artefact_run": "training/model_card",
    "training/calibration": "training/quantize_run",
    "training/loop": "training/run",
    "training/samples": "training/run",
    "training/saving": "training/run",
    "config/quantization": "models/quantization",
    "kernels/linear/cpu": "models/layers",
    "kernels/linear/padded": "models/layers",
    "kernels/linear/sharded": "models/layers",
    "kernels/linear/xla": "models/layers",
    "post_training/tunix_rollout": "post_training/tunix",
    "journey/exam": "journey/run",
    "journey/lessons": "journey/run",
    "journey/serving": "journey/run",
    "journey/stages": "journey/run",
    "journey/trip": "journey/run",
    "journey/chart": "journey/report",
}


# --- dependencies


def declared(*extras: str) -> set[str]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[<>=\[ ]", line)[0].lower() for line in lines}
    return names - {"minitext"}


MODULE_OF = {
    "protobuf": "google", "orbax-checkpoint": "orbax", "pyyaml": "yaml", "jax": "jax", "google-tunix": "tunix",
}  # fmt: skip


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
        word = commands.get(name, MODULE_OF.get(name, name))
        assert word in text or word.replace("-", "_") in text, f"{name} is not used"


def test_imports_are_declared():
    standard = sys.stdlib_module_names
    known = {
        MODULE_OF.get(n, n.replace("-", "_")).lower()
        for n in declared(
            "book",
            "aot",
            "tfds",
            "tune",
            "goodput",
            "convert",
            "onnx",
            "parity",
            "serve",
            "eval",
            "qwix",
            "tunix",
            "journey",
        )
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
        "ml_dtypes",
        "cloudpickle",
        "pydantic_core",
        "starlette",
    }
    for path in SOURCES:
        # What an artefact takes along runs beside its own files.
        beside = {p.stem for p in path.parent.iterdir()} if path.parent.name == "shipped" else set()
        for name in {i.split(".")[0].lower() for i in imports(path)}:
            assert name in standard or name in known | beside, f"{path.name} imports {name}"


def test_what_setup_cells_install_brings_the_compiler_for_tpus():
    extras = PROJECT["optional-dependencies"]
    assert "minitext[aot]" in extras["book"] and extras["aot"][0].startswith("libtpu")
    for path in NOTEBOOKS:
        assert '"minitext[book] @ git+' in path.read_text(), path.name


def test_pinned_versions_name_no_index():
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text and " @ " not in text and "--" not in text
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in text.splitlines() if line}
    assert {n.replace("_", "-") for n in declared("book", "aot", "test", "dev")} <= pinned


# --- the book and the package name each other


def chapters_of(path: Path) -> set[int]:
    """The chapters that a module's docstring names (Chapters: 4, 6.); a line that can't be read is an error."""
    doc = ast.get_docstring(parsed(path)) or ""
    assert doc, f"{path.name} has no docstring"
    line = re.search(r"^Chapters: (.*)\.$", doc, re.M)
    return {int(number) for number in line[1].split(",")} if line else set()


def modules_of(notebook: Path) -> set[str]:
    found = re.search(r"^\*\*Modules:\*\* (.+)$", notebook.read_text(), re.M)
    assert found, f"{notebook.name} lists no modules"
    return set(re.findall(r"`minitext\.([\w.]+)`", found[1]))


def test_modules_name_chapters_and_chapters_name_modules():
    written = {int(n.name[:2]): modules_of(n) for n in NOTEBOOKS}
    for path in SOURCES:
        name = name_of(path).removeprefix("minitext.")
        if name in ("minitext", "__main__", "config.presets"):
            continue
        above = {".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 2)}
        for chapter in chapters_of(path) & set(written):
            assert above & written[chapter], f"chapter {chapter} does not list {name}"
    for chapter, names in written.items():
        for name in names:
            path = PACKAGE / (name.replace(".", "/") + ".py")
            path = path if path.exists() else PACKAGE / name.replace(".", "/") / "__init__.py"
            assert chapter in chapters_of(path), f"minitext.{name} does not name chapter {chapter}"


@functools.cache
def read_notebook(path):
    import jupytext  # for seconds: it compiles a grammar

    return jupytext.read(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_paired_and_hold_no_outputs(path):
    pair = json.loads(path.with_suffix(".ipynb").read_text())
    text = read_notebook(path)
    assert [c["cell_type"] for c in pair["cells"]] == [c["cell_type"] for c in text.cells]
    for cell, source in zip(pair["cells"], text.cells, strict=True):
        assert "".join(cell["source"]) == source["source"]
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_every_notebook_has_its_pair():
    assert {p.stem for p in NOTEBOOKS} == {p.stem for p in (ROOT / "notebooks").glob("*.ipynb")}


@functools.cache
def public_names() -> set[str]:
    names = set()
    for path in SOURCES:
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                names.add(node.name)
    return names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_chapters_define_nothing_the_package_defines(path):
    """A naive version has a name of its own; the package's code is shown, never pasted.

    Exercises are the learner's own and may be called what the field calls them.
    """
    public = public_names()
    for cell in read_notebook(path).cells:
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
    """Beyond JAX, `import minitext` costs under 0.2 s of CPU time; the command line's help imports no JAX."""
    code = (
        "import jax, time; t = time.process_time(); import minitext; print(time.process_time() - t)"
    )
    assert float(subprocess.check_output([sys.executable, "-c", code])) < 0.2
    code = "import sys, minitext.cli; print(sorted({'jax', 'flax', 'orbax', 'datasets'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
