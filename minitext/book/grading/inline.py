"""`check("05.adamw", adamw)` in a notebook: one friendly verdict, whatever goes wrong.

Chapters: none.
"""

import ast
import inspect
import secrets
import threading
from typing import Any

from minitext.book.grading import evaluate, registry, runner, source
from minitext.book.grading.answers import Answer
from minitext.book.grading.registry import Exercise
from minitext.book.grading.report import FAILED, NOT_ATTEMPTED, PASSED, Result
from minitext.errors import UserError


def check(id: str, fn: Any = None) -> None:
    """Checks the learner's function for an exercise such as "05.adamw" and prints the verdict; never raises."""
    try:
        print(verdict(str(id), fn))
    except UserError as error:
        print(error)
    except KeyboardInterrupt:
        print(f"{id}: interrupted, nothing was graded.")
    except BaseException as error:
        print(f"{id}: the checker failed with {type(error).__name__}: {error}. Please report it.")


def verdict(id: str, fn: Any) -> str:
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
    result = _grade(exercise, fn)
    name = f"{id} {exercise.title}"
    if result.status == NOT_ATTEMPTED:
        return f"{name}: not attempted yet. Replace `raise NotImplementedError` in the cell above."
    total = len(exercise.checks)
    if result.status == PASSED:
        return f"{name}: passed. All {total} checks pass, {exercise.points} points."
    lines = [f"{name}: not yet, {result.good} of {total} checks pass.", result.explanation()]
    lines += [f"Hint: {result.hint}"] if result.hint else []
    return "\n".join(lines)


def _grade(exercise: Exercise, fn: Any) -> Result:
    import jax

    cell = _cell_of(fn)
    if cell and exercise.forbid:
        used = source.forbidden(ast.parse(cell), exercise.forbid)
        if used:
            return Result(exercise, FAILED, f"this exercise must be solved without {used}")
    seed, learner = secrets.randbits(31), registry.learner_number()
    if exercise.devices > jax.device_count():
        if not cell:
            raise UserError(
                f"{exercise.id} needs {exercise.devices} devices: put "
                f"setup(devices={exercise.devices}) in the first cell"
            )
        answer = Answer((source.Piece("", cell),), "your cell")
        grading = runner.Grading(registry.exercises_root(), seed, learner)
        return runner.grade_one(grading, exercise, answer, threading.Event())
    file = getattr(_code(fn), "co_filename", "")
    attempt = evaluate.Attempt(exercise, fn, seed, learner, file).run()
    if attempt.untouched:
        return Result(exercise, NOT_ATTEMPTED)
    status = PASSED if attempt.passed else FAILED
    hint = "" if attempt.passed else evaluate.choose_hint(attempt)
    checks = [(check.name, check.passed, check.message) for check in attempt.checks]
    return Result(exercise, status, checks=checks, hint=hint, seconds=attempt.seconds)


def _code(fn: Any) -> Any:
    try:
        return getattr(inspect.unwrap(fn), "__code__", None)
    except (ValueError, TypeError):
        return None


def _cell_of(fn: Any) -> str:
    """The whole source of the cell (or file) that defines `fn`, or "" if it isn't available."""
    try:
        code = "".join(inspect.findsource(inspect.unwrap(fn))[0])
        ast.parse(code)
    except (OSError, TypeError, ValueError, SyntaxError):
        return ""
    return code
