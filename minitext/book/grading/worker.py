"""The child process: grades one answer, or tries out the maintainers' stubs and mutants.

`process` starts it as `python -m minitext.book.grading.worker FD`. It reads its job and a nonce from standard input
before any of the learner's code runs, and writes JSON lines with the nonce to FD.
"""

import json
import os
import resource
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minitext.book.grading import evaluate, guard, peers, registry, source
from minitext.book.grading.registry import Exercise

FILE_BYTES = 2**30  # the largest file that an answer may write


class Refused(BaseException):
    """A verdict that doesn't come from a check; the message is for the learner."""


def _sender(fd: int, nonce: str) -> Callable[..., None]:
    # Bound here, so an answer that replaces json.dumps or os.write has no effect.
    write, dumps = os.write, json.JSONEncoder().encode

    def send(kind: str, **fields: Any) -> None:
        data = dumps({"nonce": nonce, "kind": kind, **fields}).encode() + b"\n"
        while data:
            data = data[write(fd, data) :]

    return send


def load(pieces: list[source.Piece], exercise: Exercise, filename: str, guarded: bool) -> Any:
    """Runs an answer's source as the module `answer` and returns the exercise's function.

    Raises:
        Refused: if it doesn't parse, uses something forbidden, or doesn't define the function.
    """
    try:
        tree = source.compose(pieces, exercise.id, filename)
        used = source.forbidden(tree, exercise.forbid)
        if used:
            raise Refused(f"this exercise must be solved without {used}")
        code = compile(tree, filename, "exec", dont_inherit=True)
    except (SyntaxError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line} of {filename})" if line else ""
        raise Refused(f"not Python: {getattr(error, 'msg', error)}{where}") from None
    module = types.ModuleType(evaluate.ANSWER_MODULE)
    if guarded:  # dataclasses and pickle look up their module
        sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        if isinstance(error, NotImplementedError) and error.args == (exercise.id,):
            return _stub(exercise.id)
        result = evaluate.raised("", error, None, filename)
        raise Refused(f"the file fails when it is run: {result.message}") from None
    _look_for_forbidden(module, exercise)
    fn = vars(module).get(exercise.function)
    if not callable(fn):
        raise Refused(f"there is no function {exercise.function!r} in {filename}")
    return fn


def _stub(id: str) -> Callable:
    def untouched(*args, **kwargs):
        raise NotImplementedError(id)

    return untouched


def _look_for_forbidden(module: types.ModuleType, exercise: Exercise) -> None:
    """Catches what the syntax doesn't show: a forbidden module or function under another name."""
    for name, value in vars(module).items():
        home = value.__name__ if isinstance(value, types.ModuleType) else None
        home = home or f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', '')}"
        if any(f"{home}.".startswith(f"{forbidden}.") for forbidden in exercise.forbid):
            raise Refused(f"this exercise must be solved without {home} (your {name!r})")


def grade_answer(job: dict, send: Callable[..., None]) -> None:
    """Grades one answer: sends `ready`, a `check` before each check, `result`, and perhaps `hint`."""
    root = Path(job["root"])
    checks = registry.load_module(root / "checks" / f"{job['stem']}.py")
    exercise = next(e for e in registry.exercises_of(checks, job["stem"]) if e.id == job["id"])
    pieces = [source.Piece(*piece) for piece in job["pieces"]]
    filename, seed, learner = job["filename"], job["seed"], job["learner"]
    if job["folder"]:  # an answer may import the learner's other files
        sys.path.append(job["folder"])
    broken = guard.Seal(exercise, checks).broken
    send("ready")
    protected = [root / "solutions", root / "checks"]
    (peers.guard if exercise.processes > 1 else guard.arm)(protected, filename)

    def verify() -> None:
        what = broken()
        if what:
            raise Refused(f"the answer changed the checker ({what}), so its result does not count")

    try:
        fn = load(pieces, exercise, filename, guarded=True)
        verify()
        attempt = evaluate.Attempt(
            exercise,
            fn,
            seed,
            learner,
            filename,
            swallow=BaseException,
            before_check=lambda name: send("check", name=name),
            after_check=verify,
        ).run()
    except Refused as error:
        send("result", status="failed", message=str(error), checks=[], seconds=0.0)
        return
    rows = [[check.name, check.passed, check.message] for check in attempt.checks]
    status = "not attempted" if attempt.untouched else "passed" if attempt.passed else "failed"
    send("result", status=status, message="", checks=rows, seconds=attempt.seconds)
    if status == "failed":
        send("hint", hint=evaluate.choose_hint(attempt))


def try_out(job: dict, send: Callable[..., None]) -> None:
    """The maintainers' test of one file's stubs and mutants: sends each exercise's rows as a `result`.

    A row is (exercise, kind, name, passed, message, seconds).
    """
    root, stem = Path(job["root"]), job["stem"]
    text = (root / "solutions" / f"{stem}.py").read_text(encoding="utf-8")
    stubs = source.split(source.stub(text))
    found = registry.exercises_of(registry.load_module(root / "checks" / f"{stem}.py"), stem)
    send("ready")
    for exercise in found:
        if exercise.id not in job["ids"]:
            continue
        rows = [_try_stub(job, exercise, stubs)] if "stub" in job["kinds"] else []
        if "mutant" in job["kinds"]:
            rows += _try_mutants(job, exercise)
        send("result", rows=[(exercise.id, *row) for row in rows])


def _try_stub(job: dict, exercise: Exercise, pieces: list[source.Piece]) -> list:
    name = exercise.function
    try:
        fn = load(pieces, exercise, f"{job['stem']}.py", guarded=False)
        attempt = evaluate.Attempt(exercise, fn, job["seed"], job["learner"]).run()
    except Refused as error:
        return ["stub", name, False, str(error), 0.0]
    good = attempt.untouched and not attempt.checks
    return ["stub", name, good, "" if good else "counts as an attempt", attempt.seconds]


def _try_mutants(job: dict, exercise: Exercise) -> list[list]:
    attempts = evaluate.attempt_mutants(exercise, job["seed"], job["learner"])
    rows = []
    for index, (mutant, attempt) in enumerate(zip(exercise.mutants, attempts, strict=True)):
        chosen = evaluate.match(attempt, attempts)
        text = ""
        if not attempt.failing:
            text = "passes every check"
        elif chosen != index:
            shown = "the first hint" if chosen is None else f"of {exercise.mutants[chosen].name}"
            first = attempt.failing[0]
            text = f"the hint shown is not its own but {shown} ({first.name}: {first.message})"
        rows.append(["mutant", mutant.name, not text, text, 0.0])
    for row, attempt in zip(rows, attempts, strict=True):
        row[-1] = attempt.seconds  # matching later mutants may have run more of this one's checks
    if len(exercise.mutants) < 3:
        text = f"{len(exercise.mutants)} mutants, want at least three"
        rows.append(["mutant", "-", False, text, 0.0])
    return rows


def main() -> None:
    """Reads the job, closes standard input and does the job; skips Python's own clean-up at exit."""
    job = json.load(sys.stdin)
    send = _sender(int(sys.argv[1]), job.pop("nonce"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    end = os._exit
    (grade_answer if job["mode"] == "answer" else try_out)(job, send)
    send("done")
    end(0)  # threads and exit handlers left behind by an answer don't get to run


if __name__ == "__main__":
    main()
