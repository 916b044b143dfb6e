"""Exercises: what an exercise is, where they are stored, and how to find one by its id.

A checks file (`exercises/checks/chNN_name.py`) creates `Exercise` objects and attaches checks and mutants to them with
decorators. Nothing here imports JAX, so listing exercises stays cheap.
"""

import dataclasses
import getpass
import hashlib
import importlib.util
import os
import re
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from minitext.book.grading.source import sections
from minitext.errors import UserError, did_you_mean
from minitext.files import local_path

ID_PATTERN = re.compile(r"\d\d\.[a-z][a-z0-9_]*")
PACKAGE = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Check:
    """One named check of an exercise; `run(fn, trial)` raises if the answer is wrong."""

    name: str
    run: Callable[[Any, Any], None]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A plausible wrong answer and the hint for it."""

    name: str
    hint: str
    fn: Any


@dataclasses.dataclass(eq=False)
class Exercise:
    """One graded exercise.

    Attributes:
        id: `NN.name`, where NN is the chapter.
        title: its name in the notebook's heading and the grader's table.
        function: name of the learner's function (or class), which the checks receive.
        minutes: stated time for the learner, 10 to 40.
        points: awarded if every check passes, otherwise none.
        statement: MyST Markdown, printed in the notebook above the stub.
        hints: three, each stronger than the last.
        devices: number of (simulated) devices the answer sees.
        processes: number of processes its checks run at a time (`peers`); 1 if none.
        seconds: time limit for all the checks of one answer, without imports. It is CPU time; an answer that only
            waits has three times as long.
        memory_gib: limit on the resident memory of the answer's process.
        forbid: dotted names of modules or functions that the answer may not use.
        compare: how close an observed value must be to a mutant's, relative to its largest entry, for the two to count
            as the same mistake.

    Raises:
        ValueError: if a field breaks these rules; for authors of exercises.
    """

    id: str
    title: str
    function: str
    minutes: int
    points: int
    statement: str
    hints: tuple[str, ...]
    devices: int = 1
    processes: int = 1
    seconds: float = 60.0
    memory_gib: float = 3.0
    forbid: tuple[str, ...] = ()
    compare: float = 1e-4
    checks: list[Check] = dataclasses.field(default_factory=list)
    mutants: list[Mutant] = dataclasses.field(default_factory=list)
    stem: str = ""

    def __post_init__(self) -> None:
        if not ID_PATTERN.fullmatch(self.id):
            raise ValueError(f"exercise id {self.id!r} must look like '05.adamw'")
        if not 10 <= self.minutes <= 40:
            raise ValueError(f"{self.id}: minutes={self.minutes} must be between 10 and 40")
        if len(self.hints) != 3:
            raise ValueError(f"{self.id}: {len(self.hints)} hints, want three of growing strength")
        if self.points < 1 or self.devices < 1 or not self.statement.strip():
            raise ValueError(f"{self.id}: points, devices and statement must not be empty")
        if not self.function.isidentifier():
            raise ValueError(f"{self.id}: function={self.function!r} is not a name")

    @property
    def chapter(self) -> str:
        """The two digits of the chapter."""
        return self.id[:2]

    def check(self, name: str) -> Callable[[Callable], Callable]:
        """Decorator: adds `def _(fn, t)` as the next check, with a name for the learner."""
        return lambda run: self._add(self.checks, Check(name, run), run)

    def mutant(self, hint: str) -> Callable[[Any], Any]:
        """Decorator: adds a wrong answer (a function or class) and the hint for it."""

        def add(fn: Any) -> Any:
            name = getattr(fn, "__name__", f"mutant{len(self.mutants) + 1}")
            return self._add(self.mutants, Mutant(name, hint, fn), fn)

        return add

    def _add(self, known: list, new: Check | Mutant, fn: Any) -> Any:
        if any(one.name == new.name for one in known):
            kind = type(new).__name__.lower()
            raise ValueError(f"{self.id}: two {kind}s are called {new.name!r}")
        known.append(new)
        return fn


def exercises_root() -> Path:
    """The folder with `solutions/` and `checks/`: MINITEXT_EXERCISES, or else the checkout's or the wheel's.

    Raises:
        UserError: if none of them has a `checks` folder.
    """
    named = os.environ.get("MINITEXT_EXERCISES")
    usual = [PACKAGE.parent / "exercises", PACKAGE / "_exercises"]
    places = [Path(local_path(named))] if named else usual
    for place in places:
        if (place / "checks").is_dir():
            return place.resolve()
    raise UserError(f"no exercises here: {places[0]} has no folder 'checks'; reinstall minitext")


def chapter_files(root: Path, kind: str) -> list[Path]:
    """The `chNN_*.py` files of `root/kind`; kind is "checks", "solutions", or "" for the stubs."""
    return sorted((root / kind).glob("ch[0-9][0-9]_*.py"))


def load_module(path: Path) -> types.ModuleType:
    """Runs a checks file as a module that can't be imported afterwards."""
    spec = importlib.util.spec_from_file_location(f"minitext_checks_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exercises_of(module: types.ModuleType, stem: str) -> list[Exercise]:
    """The module's `Exercise` objects in order of definition."""
    found = list({id(x): x for x in vars(module).values() if isinstance(x, Exercise)}.values())
    for exercise in found:
        exercise.stem = stem
        if exercise.chapter != stem[2:4]:
            raise ValueError(f"{exercise.id} is defined in {stem}.py, a file of another chapter")
        if not exercise.checks:
            raise ValueError(f"{exercise.id} has no checks")
    return found


def load_exercises(root: Path, chapters: Iterable[str] | None = None) -> dict[str, Exercise]:
    """The exercises of all chapters, or of the named ones ("05"), by id and in the book's order."""
    wanted = None if chapters is None else set(chapters)
    found: dict[str, Exercise] = {}
    for path in chapter_files(root, "checks"):
        if wanted is not None and path.stem[2:4] not in wanted:
            continue
        for exercise in exercises_of(load_module(path), path.stem):
            if exercise.id in found:
                raise ValueError(f"two exercises are called {exercise.id!r}")
            found[exercise.id] = exercise
    return found


def known_ids(root: Path) -> list[str]:
    """Every exercise id, read from the solutions' marker lines without running them."""
    files = chapter_files(root, "solutions")
    return [name for path in files for name in sections(path.read_text(encoding="utf-8"))]


def select(root: Path, names: Iterable[str]) -> dict[str, Exercise]:
    """The exercises named by "05" (a chapter) or "05.adamw"; all of them if no name is given.

    Raises:
        UserError: for an unknown name, with the nearest known ones.
    """
    names = list(names)
    ids = known_ids(root)
    chapters = sorted({name[:2] for name in ids})
    for name in names:
        if name not in ids and name not in chapters:
            fix = did_you_mean(name, ids + chapters) or f"; chapters: {', '.join(chapters)}"
            raise UserError(f"no exercise called {name!r}{fix}")
    loaded = load_exercises(root, {name[:2] for name in names} if names else None)
    if not names:
        return loaded
    missing = [name for name in names if "." in name and name not in loaded]
    if missing:
        raise UserError(f"exercise {missing[0]!r} has a solution but no checks under {root}")
    return {i: e for i, e in loaded.items() if i in names or e.chapter in names}


def learner_name() -> str:
    """MINITEXT_LEARNER, or else the user's name, or "learner" if there is none, as in some containers."""
    try:
        return os.environ.get("MINITEXT_LEARNER") or getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "learner"


def learner_number(name: str | None = None) -> int:
    """A number from 0 to 2**31 - 1 that is always the same for a learner: `t.learner` in checks."""
    text = (name or learner_name()).encode(errors="surrogateescape")  # a shell may give any bytes
    digest = hashlib.sha256(text).digest()
    return int.from_bytes(digest[:4], "big") >> 1
