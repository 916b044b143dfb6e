"""Grades answers: one in a notebook (`check`), many in worker processes, and the maintainers' test of the exercises."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from minitext.book.grading import evaluate, registry, source
from minitext.book.grading.answers import Answer
from minitext.book.grading.process import Worker
from minitext.book.grading.registry import Exercise
from minitext.book.grading.report import FAILED, NOT_ATTEMPTED, PASSED, Result
from minitext.errors import UserError

TRY_TOGETHER = 3  # trusted exercises per process: saves imports, and still keeps all cores busy
Progress = Callable[[int, int], None]  # called with (done, total) processes


@dataclasses.dataclass(frozen=True)
class Grading:
    """What all gradings of one command share.

    Attributes:
        root: the folder with `solutions/` and `checks/`.
        seed: seed of the checks' random inputs.
        learner: the learner's number.
        jobs: how many processes run at a time.
        cache: folder for compiled programs, shared by processes that trust each other.
    """

    root: Path
    seed: int
    learner: int
    jobs: int = 1
    cache: str = ""

    def job(self, mode: str, exercise: Exercise) -> dict[str, Any]:
        """The fields that every worker's job has."""
        shared = {"root": str(self.root), "seed": self.seed, "learner": self.learner}
        return shared | {"mode": mode, "stem": exercise.stem}


def grade_one(
    grading: Grading, exercise: Exercise, answer: Answer, stop: threading.Event
) -> Result:
    """Grades one answer in its own process."""
    if not answer.attempted:
        return Result(exercise, NOT_ATTEMPTED)
    if answer.fault:
        return Result(exercise, FAILED, answer.fault)
    job = grading.job("answer", exercise) | {
        "id": exercise.id,
        "pieces": [[piece.id, piece.text, piece.line] for piece in answer.pieces],
        "filename": answer.filename,
        "folder": answer.folder,
        "exercise": {"id": exercise.id, "function": exercise.function, "forbid": exercise.forbid},
    }
    limits = exercise.seconds, exercise.memory_gib
    worker = Worker(job, exercise.devices, *limits, grading.cache).run(stop)
    found = {message["kind"]: message for message in worker.messages}
    if "result" not in found:
        where = f" in the check {found['check']['name']!r}" if "check" in found else ""
        hint = exercise.hints[0] if "check" in found else ""
        return Result(exercise, FAILED, worker.death + where, hint=hint, output=worker.output)
    result = found["result"]
    status, checks = result["status"], [tuple(check) for check in result["checks"]]
    hint = found.get("hint", {}).get("hint", exercise.hints[0] if checks else "")
    hint = hint if status == FAILED else ""
    said, seconds = result["message"], result["seconds"]
    return Result(exercise, status, said, checks, hint, seconds, worker.output)


def grade_many(
    grading: Grading, tasks: Iterable[tuple[Exercise, Answer]], progress: Progress
) -> list[Result]:
    """Grades many answers; the results are in the order of the tasks."""
    calls = [functools.partial(grade_one, grading, *task) for task in tasks]
    return _in_parallel(calls, grading.jobs, progress)


def try_out(
    grading: Grading, exercises: Iterable[Exercise], kinds: Collection[str], progress: Progress
) -> list[tuple]:
    """The maintainers' test: solutions score, stubs are not attempted, mutants show their hints.

    Solutions are graded like a learner's answers, each in a guarded process. Stubs and mutants of up to three
    exercises share a process. `kinds` are some of "solution", "stub" and "mutant".

    Returns:
        Rows (exercise, kind, name, passed, message, seconds).
    """
    exercises = list(exercises)
    with tempfile.TemporaryDirectory(prefix="minitext-grade-") as cache:
        grading = dataclasses.replace(grading, cache=cache)
        calls: list[Callable] = []
        if "solution" in kinds:
            calls += [functools.partial(_try_solution, grading, exercise) for exercise in exercises]
        if "stub" in kinds or "mutant" in kinds:
            calls += [functools.partial(_try_group, grading, g, kinds) for g in _groups(exercises)]
        found = _in_parallel(calls, grading.jobs, progress)
    order = [exercise.id for exercise in exercises]
    return sorted((row for rows in found for row in rows), key=lambda row: order.index(row[0]))


def _groups(exercises: list[Exercise]) -> list[list[Exercise]]:
    """Groups of up to three exercises with the same file and number of devices."""
    alike: dict[tuple[str, int], list[Exercise]] = {}
    for exercise in exercises:
        alike.setdefault((exercise.stem, exercise.devices), []).append(exercise)
    n = TRY_TOGETHER
    return [group[i : i + n] for group in alike.values() for i in range(0, len(group), n)]


def _try_solution(grading: Grading, exercise: Exercise, stop: threading.Event) -> list[tuple]:
    path = grading.root / "solutions" / f"{exercise.stem}.py"
    pieces = source.split(path.read_text(encoding="utf-8"))
    result = grade_one(grading, exercise, Answer(tuple(pieces), path.name), stop)
    good = result.status == PASSED
    text = "" if good else result.explanation() or result.status
    return [(exercise.id, "solution", exercise.function, good, text, result.seconds)]


def _try_group(
    grading: Grading, group: list[Exercise], kinds: Collection[str], stop: threading.Event
) -> list[tuple]:
    job = grading.job("try_out", group[0])
    job |= {"ids": [exercise.id for exercise in group], "kinds": list(kinds)}
    seconds = max(exercise.seconds * (2 + len(exercise.mutants)) for exercise in group)
    memory = max(exercise.memory_gib for exercise in group) + 1.0  # one process runs them all
    worker = Worker(job, group[0].devices, seconds, memory, grading.cache).run(stop)
    rows = [tuple(row) for m in worker.messages if m["kind"] == "result" for row in m["rows"]]
    if worker.death:
        seen = {row[0] for row in rows}
        first = next((e.id for e in group if e.id not in seen), group[-1].id)
        tail = worker.output.strip().split("\n")[-1]
        rows.append((first, "worker", "-", False, f"{worker.death}; {tail}", 0.0))
    return rows


def _in_parallel(calls: list[Callable], jobs: int, progress: Progress) -> list:
    """Runs the calls in threads, each of which watches one process; Ctrl-C stops them all."""
    if os.name != "posix":
        raise UserError("minitext grade needs Linux or macOS; on Windows run it inside WSL")
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        futures = [pool.submit(call, stop) for call in calls]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(done, len(futures))
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def check(id: str, fn: Any = None) -> None:
    """Checks the learner's function for an exercise such as "05.adamw" and prints the verdict; never raises."""
    try:
        print(_verdict(str(id), fn))
    except UserError as error:
        print(error)
    except KeyboardInterrupt:
        print(f"{id}: interrupted, nothing was graded.")
    except BaseException as error:
        print(f"{id}: the checker failed with {type(error).__name__}: {error}. Please report it.")


def _verdict(id: str, fn: Any) -> str:
    """The text that `check` prints.

    Raises:
        UserError: if there is no such exercise, or `fn` isn't a function.
    """
    root = registry.exercises_root()
    if not registry.ID_PATTERN.fullmatch(id):
        near = next((name for name in registry.known_ids(root) if id in (name[3:], name[:2])), None)
        example = f'check("{near}", ...)' if near else 'check("05.adamw", adamw)'
        raise UserError(f"{id!r} is not an exercise's id; write it like {example}")
    exercise = registry.select(root, [id])[id]
    if not callable(fn):
        raise UserError(f"{id}: pass your function: check({id!r}, {exercise.function})")
    result = _grade_here(exercise, fn)
    name = f"{id} {exercise.title}"
    if result.status == NOT_ATTEMPTED:
        return f"{name}: not attempted yet. Replace `raise NotImplementedError` in the cell above."
    total = len(exercise.checks)
    if result.status == PASSED:
        return f"{name}: passed. All {total} checks pass, {exercise.points} points."
    lines = [f"{name}: not yet, {result.good} of {total} checks pass.", result.explanation()]
    lines += [f"Hint: {result.hint}"] if result.hint else []
    return "\n".join(lines)


def _grade_here(exercise: Exercise, fn: Any) -> Result:
    import jax

    cell = _cell_of(fn)
    if cell and exercise.forbid:
        used = source.forbidden(ast.parse(cell), exercise.forbid)
        if used:
            return Result(exercise, FAILED, f"this exercise must be solved without {used}")
    seed, learner, file = secrets.randbits(31), registry.learner_number(), ""
    if exercise.devices > jax.device_count():
        if not cell:
            raise UserError(
                f"{exercise.id} needs {exercise.devices} devices: put "
                f"setup(devices={exercise.devices}) in the first cell"
            )
        answer = Answer((source.Piece("", cell),), "your cell")
        grading = Grading(registry.exercises_root(), seed, learner)
        return grade_one(grading, exercise, answer, threading.Event())
    with contextlib.suppress(ValueError, TypeError):  # wrappers in a circle
        file = getattr(getattr(inspect.unwrap(fn), "__code__", None), "co_filename", "")
    attempt = evaluate.Attempt(exercise, fn, seed, learner, file).run()
    if attempt.untouched:
        return Result(exercise, NOT_ATTEMPTED)
    status = PASSED if attempt.passed else FAILED
    hint = "" if attempt.passed else evaluate.choose_hint(attempt)
    checks = [(check.name, check.passed, check.message) for check in attempt.checks]
    return Result(exercise, status, checks=checks, hint=hint, seconds=attempt.seconds)


def _cell_of(fn: Any) -> str:
    """The whole source of the cell (or file) that defines `fn`, or "" if it isn't available."""
    try:
        code = "".join(inspect.findsource(inspect.unwrap(fn))[0])
        ast.parse(code)
    except (OSError, TypeError, ValueError, SyntaxError):
        return ""
    return code
