"""Keeps generated files in sync with their source.

Generates, from `exercises/solutions` and `exercises/checks`, the stubs (`exercises/chNN_name.py`), the exercise blocks
and the install line of the notebooks (`notebooks/NN_name.md`), and the paired `.ipynb` without outputs:

    python book/sync.py [--check]

With `--check` it writes nothing, lists the files that are out of date, and exits 1 if there are any. `make sync` and
`make check` run it.
"""

import hashlib
import inspect
import re
import sys
import tomllib
from pathlib import Path

from minitext.book.grading import registry, source
from minitext.book.grading.registry import Exercise
from minitext.book.notebook import fenced
from minitext.errors import UserError

BLOCK = re.compile(
    r"^<!-- exercise (?P<id>\S+) -->\n(?P<body>.*?)^<!-- end exercise (?P<end>\S+) -->$",
    re.MULTILINE | re.DOTALL,
)
MARKS = re.compile(r"^<!-- (?:end )?exercise .*$", re.MULTILINE)
INSTALL = re.compile(r'(%pip install -q "minitext\[book\] @ git\+)[^"]*(")')
BOUNDARY = re.compile(r"^[ \t]*# (BEGIN|END) SOLUTION[^\n]*(\n|\Z)", re.MULTILINE)
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def block(exercise: Exercise, solution: str, preamble: str) -> str:
    """The MyST text between an exercise's two marker lines.

    `solution` is its section of the solutions file, with the BEGIN and END lines. `preamble` has that file's imports,
    which the cell repeats to be self-contained.
    """
    shown = BOUNDARY.sub("", solution)
    stub = source.stub(f"# EXERCISE {exercise.id}\n{solution}\n").split("\n", 1)[1]
    numbers = f"*{exercise.minutes} minutes, {exercise.points} points"
    if exercise.devices > 1:
        numbers += f", {exercise.devices} simulated devices"
    parts = [
        f"### Exercise {exercise.id}: {exercise.title}",
        f"{numbers}.*",
        inspect.cleandoc(exercise.statement),
        f"```{{code-cell}} ipython3\n:exercise: {exercise.id}\n:tags: [exercise]\n\n"
        f"{preamble + chr(10) * 3 if preamble else ''}{stub.strip()}\n```",
        f'```{{code-cell}} ipython3\ncheck("{exercise.id}", {exercise.function})\n```',
        *(_fold(f"Hint {n}", hint) for n, hint in enumerate(exercise.hints, 1)),
        _fold("Solution", fenced(shown.strip())),
    ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def _fold(title: str, body: str) -> str:
    # Plain HTML, because it folds everywhere: in the book, in Jupyter, on Colab and on GitHub.
    return f"<details>\n<summary>{title}</summary>\n\n{inspect.cleandoc(body)}\n\n</details>"


def notebook(
    path: Path,
    exercises: dict[str, Exercise],
    parts: dict[str, tuple[str, str]],
    url: str | None,
    faults: list[str],
) -> str:
    """The text that a chapter's `.md` should have; what this can't fix is appended to `faults`, one line each.

    `parts` has each exercise's section of the solutions file, and that file's preamble. `url` is the repository's, for
    the install line; None leaves that line alone.
    """
    text = path.read_text(encoding="utf-8")
    place = f"notebooks/{path.name}"
    seen: list[str] = []

    def fill(match: re.Match) -> str:
        name = match["id"]
        seen.append(name)
        if match["end"] != name or name not in exercises or name not in parts:
            faults.append(f"{place}: block {name!r} has no such exercise or no end line of its own")
            return match[0]
        body = block(exercises[name], *parts[name])
        return f"<!-- exercise {name} -->\n{body}<!-- end exercise {name} -->"

    filled = BLOCK.sub(fill, text)
    if len(MARKS.findall(text)) != 2 * len(seen):
        faults.append(f"{place}: a line '<!-- exercise ID -->' or its end line is missing")
    chapter = path.stem[:2]
    for name in sorted({i for i in exercises if i.startswith(chapter + ".")} - set(seen)):
        faults.append(f"{place}: no block for exercise {name}")
    first = CELL.search(filled)
    if first is None or "try:\n    import minitext\nexcept" not in first["body"]:
        faults.append(f"{place}: the first code cell is not the setup cell")
    return INSTALL.sub(rf"\g<1>{url}\g<2>", filled) if url else filled


def paired(markdown: str) -> str:
    """The `.ipynb` of a MyST notebook, without outputs and with cell ids derived from the cells' text."""
    import jupytext
    import nbformat

    book = jupytext.reads(markdown, fmt="md:myst")
    book.nbformat, book.nbformat_minor = 4, 5
    meta = book.metadata.setdefault("jupytext", {})
    meta.setdefault("formats", "md:myst,ipynb")
    meta.get("text_representation", {}).pop("jupytext_version", None)
    seen: dict[str, int] = {}
    for cell in book.cells:
        name = hashlib.sha256(f"{cell.cell_type}:{cell.source}".encode()).hexdigest()[:10]
        seen[name] = seen.get(name, 0) + 1
        cell.id = name if seen[name] == 1 else f"{name}-{seen[name]}"
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.writes(book, indent=1) + "\n"


def wanted(repository: Path, faults: list[str]) -> dict[Path, str]:
    """The text of every generated file of a checkout, by path; `faults` gets a line for each that can't be."""
    root = repository / "exercises"
    texts: dict[Path, str] = {}
    parts: dict[str, tuple[str, str]] = {}
    exercises: dict[str, Exercise] = {}
    for path in registry.chapter_files(root, "solutions"):
        try:
            text = path.read_text(encoding="utf-8")
            texts[root / path.name] = source.stub(text)
            head = source.preamble(text)
            parts |= {name: (part, head) for name, part in source.sections(text).items()}
            checks = root / "checks" / path.name
            found = registry.exercises_of(registry.load_module(checks), path.stem)
        except Exception as error:  # one author's unfinished file mustn't stop the others
            faults.append(f"exercises/*/{path.name}: {type(error).__name__}: {error}")
            continue
        names, solved = [exercise.id for exercise in found], list(source.sections(text))
        if names != solved:
            faults.append(f"exercises/*/{path.name}: solutions {solved}, checks {names}")
        exercises |= {exercise.id: exercise for exercise in found}
    for path in sorted(set(registry.chapter_files(root, "")) - set(texts)):
        faults.append(f"exercises/{path.name}: a stub without a solutions file")
    url = repository_url(repository)
    for path in sorted((repository / "notebooks").glob("[0-9][0-9]_*.md")):
        text = notebook(path, exercises, parts, url, faults)
        texts |= {path: text, path.with_suffix(".ipynb"): paired(text)}
    for path in sorted(set((repository / "notebooks").glob("*.ipynb")) - set(texts)):
        faults.append(f"notebooks/{path.name}: a notebook without its .md")
    return texts


def repository_url(repository: Path) -> str | None:
    """`[project.urls] Repository` in the checkout's pyproject.toml, or None if there is none."""
    path = repository / "pyproject.toml"
    if not path.is_file():
        return None
    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    return project.get("urls", {}).get("Repository")


def main(arguments: list[str]) -> int:
    """Writes the files that are out of date, or with `--check` only lists them. Returns the exit code."""
    if arguments not in ([], ["--check"]):
        print("usage: python book/sync.py [--check]", file=sys.stderr)
        return 2
    try:
        root = registry.exercises_root()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    faults: list[str] = []
    stale = []
    for path, text in wanted(root.parent, faults).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(root.parent))
            if not arguments:
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"out of step: {path}" if arguments else f"written: {path}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults or (arguments and stale) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
