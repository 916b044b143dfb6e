"""Finds a learner's answers in a folder of files or in the cells of a notebook."""

import ast
import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path

from minitext.book.grading import registry, source
from minitext.book.grading.registry import Exercise
from minitext.book.grading.source import Piece
from minitext.errors import UserError
from minitext.files import open_file

MAGIC = re.compile(r"^([ \t]*)[%!][^\n]*", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A learner's answer to one exercise.

    Attributes:
        pieces: its source.
        filename: the file's name in messages.
        folder: an extra folder that the answer may import from.
        fault: why it can't be graded, in one line; "" if it can.
        attempted: False if it is missing or still the stub.
    """

    pieces: tuple[Piece, ...] = ()
    filename: str = "answer.py"
    folder: str = ""
    fault: str = ""
    attempted: bool = True


def answers_folder(root: Path, named: Path | None) -> Path:
    """The folder of the learner's files: the named one, or ./exercises, or the checkout's own.

    Raises:
        UserError: if there is none.
    """
    if named is not None:
        if not registry.chapter_files(named, ""):
            raise UserError(
                f"no answers in {named}: it has no file like ch05_optimizers.py; "
                f"copy the stubs with `minitext grade --start {named}`"
            )
        return named
    places = [Path("exercises")]
    if root != registry.PACKAGE / "_exercises":  # those belong to the package, not to the learner
        places.append(root)
    for place in places:
        if registry.chapter_files(place, ""):
            return place
    raise UserError("no answers here: `minitext grade --start` copies the stubs to ./exercises")


def start(root: Path, folder: Path) -> tuple[list[Path], list[Path]]:
    """Writes the stubs to a folder. Returns (copied, already there and left as they are).

    Raises:
        UserError: if the folder cannot be written.
    """
    copied, kept = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in registry.chapter_files(root, "solutions"):
            target = folder / path.name
            if target.exists():
                kept.append(target)
            else:
                stub = source.stub(path.read_text(encoding="utf-8"))
                target.write_text(stub, encoding="utf-8")
                copied.append(target)
    except OSError as error:
        raise UserError(f"cannot write the stubs to {folder}: {error.strerror}") from None
    return copied, kept


def from_folder(folder: Path, root: Path, exercises: Iterable[Exercise]) -> dict[str, Answer]:
    """The answers to `exercises` in a folder's `chNN_name.py` files, by id."""
    return {exercise.id: _from_file(folder, root, exercise) for exercise in exercises}


def _from_file(folder: Path, root: Path, exercise: Exercise) -> Answer:
    path = folder / f"{exercise.stem}.py"
    if not path.is_file():
        return Answer(filename=path.name, attempted=False)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        return Answer(fault=f"cannot read {path}: {error}")
    section = source.sections(text).get(exercise.id)
    untouched = section is not None and source.same_code(section, _stub(root, exercise)[1])
    pieces = tuple(source.split(text))
    return Answer(pieces, path.name, str(folder.resolve()), attempted=not untouched)


def _stub(root: Path, exercise: Exercise) -> tuple[str, str]:
    """The preamble of an exercise's file, and its stub."""
    text = (root / "solutions" / f"{exercise.stem}.py").read_text(encoding="utf-8")
    return source.preamble(text), source.sections(source.stub(text))[exercise.id]


def from_notebook(path: Path, root: Path, exercises: Iterable[Exercise]) -> dict[str, Answer]:
    """The answers to `exercises` in a notebook's cells, by id; exercises without a cell are left out.

    An exercise's own cell is marked by its metadata. If that is still the stub and other cells define the function,
    the last of those counts.

    Raises:
        UserError: if the file isn't a notebook.
    """
    cells = _code_cells(path)
    answers = {}
    for exercise in exercises:
        marked = [i for i, (name, _) in enumerate(cells) if name == exercise.id]
        if not marked:
            continue
        preamble, stub = _stub(root, exercise)
        stubs = (stub, f"{preamble}\n{stub}")
        touched = [i for i in marked if not any(source.same_code(cells[i][1], s) for s in stubs)]
        if not touched:
            touched = [
                i
                for i, (name, code) in enumerate(cells)
                if not name and _defines(code, exercise.function)
            ]
        own = (touched or marked)[-1]
        texts = [(exercise.id if i == own else "", code) for i, (_, code) in enumerate(cells)]
        # The empty first piece: unlike a file, a notebook has no lines that belong to every exercise.
        pieces = tuple(Piece(id, code) for id, code in [("", ""), *texts])
        name, folder = f"{path.name}[{exercise.id}]", str(path.resolve().parent)
        answers[exercise.id] = Answer(pieces, name, folder, attempted=bool(touched))
    return answers


def _code_cells(path: Path) -> list[tuple[str, str]]:
    """The (exercise id or "", source) of each code cell; magics and shell lines become `pass`."""
    try:
        with open_file(path) as file:
            book = json.loads(file.read())
        found = []
        for cell in book["cells"]:
            if cell["cell_type"] != "code":
                continue
            code = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
            found.append((str(cell.get("metadata", {}).get("exercise", "")), _python(code)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is not a Jupyter notebook: name one that ends in .ipynb") from None
    return found


def _python(code: str) -> str:
    """The code of a cell with `pass` for its magics and shell lines; a line of Python may begin with % too."""
    if code.lstrip().startswith("%%"):
        return ""
    try:
        Piece("", code).parse()
    except SyntaxError:
        return MAGIC.sub(r"\1pass", code)
    return code


def _defines(code: str, name: str) -> bool:
    try:
        body = Piece("", code).parse().body
    except SyntaxError:
        return False
    kinds = (ast.FunctionDef, ast.ClassDef)
    return any(isinstance(statement, kinds) and statement.name == name for statement in body)
