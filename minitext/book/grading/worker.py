"""The deciding process: grades one answer, or tries out the maintainers' stubs and mutants.

`process` starts it as `python -m minitext.book.grading.worker FD`. It reads its job from standard input and writes JSON
lines to FD. No line of the learner's runs here: `answering` runs the answer in a process forked for it, which has
neither FD nor the checks.
"""

import contextlib
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minitext.book.grading import answering, confine, evaluate, process, registry, source
from minitext.book.grading.registry import Exercise
from minitext.book.grading.remote import End

PATIENCE = 2.0  # seconds for an answering process that closed its connection to end
Send = Callable[..., None]


def _sender(fd: int) -> Send:
    def send(kind: str, **fields: Any) -> None:
        data = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]

    return send


def grade_answer(job: dict, send: Send) -> None:
    """Grades one answer: sends `ready`, a `check` before each check, `result`, and perhaps `hint`."""
    if any("jax" in text for _, text, _ in job["pieces"]):  # both processes need it: imported once
        _prepare_jax()
    pid, connection = answering.start(job)  # before any check is read
    confine.adopt_orphans()
    root, begun = Path(job["root"]), ""
    checks = registry.load_module(root / "checks" / f"{job['stem']}.py")
    if "jax" in sys.modules:
        _prepare_jax()
    exercise = next(e for e in registry.exercises_of(checks, job["stem"]) if e.id == job["id"])
    send("ready")
    words = frozenset(re.findall(r"[A-Za-z_]\w*", exercise.statement))
    if exercise.processes > 1:
        from minitext.book.grading import peers

        peers.answer = job | {"words": sorted(words)}
    end = End(connection, trusted=True, readable=words.__contains__)

    def before_check(name: str) -> None:
        nonlocal begun
        begun = name
        send("check", name=name)

    try:
        fn = end.loaded()
        attempt = evaluate.Attempt(
            exercise,
            fn,
            job["seed"],
            job["learner"],
            job["filename"],
            swallow=BaseException,
            before_check=before_check,
        ).run()
    except (evaluate.Refused, evaluate.Gone) as error:
        told = str(error)
        if isinstance(error, evaluate.Gone):
            told = _ended(pid) or told
            told += f" in the check {begun!r}" if begun else ""
        _end_all(pid)
        hint = exercise.hints[0] if begun else ""
        send("result", status="failed", message=told, checks=[], seconds=0.0)
        if hint:
            send("hint", hint=hint)
        return
    _end_all(pid)
    rows = [[check.name, check.passed, check.message] for check in attempt.checks]
    status = "not attempted" if attempt.untouched else "passed" if attempt.passed else "failed"
    send("result", status=status, message="", checks=rows, seconds=attempt.seconds)
    if status == "failed":
        send("hint", hint=evaluate.choose_hint(attempt))


def _prepare_jax() -> None:
    """Imports what calls between the processes need of JAX; before JAX starts."""
    from minitext.book.grading import tracing, wire_jax  # noqa: F401
    from minitext.distributed.devices import compile_quickly

    compile_quickly()


def _ended(pid: int) -> str:
    """How the answering process ended, or "" if it goes on."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return process.how_it_ended(os.waitstatus_to_exitcode(status))
        time.sleep(0.01)
    return ""


def _end_all(pid: int) -> None:
    """Kills the answering process, and collects it with whatever it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    while children := process.children():
        for child in children:
            process.end(child)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def try_out(job: dict, send: Send) -> None:
    """The maintainers' test of one file's stubs and mutants: sends each exercise's rows as a `result`.

    A row is (exercise, kind, name, passed, message, seconds).
    """
    root, stem = Path(job["root"]), job["stem"]
    text = (root / "solutions" / f"{stem}.py").read_text(encoding="utf-8")
    stubs = source.split(source.stub(text))
    _prepare_jax()
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
        fn = answering.load(pieces, exercise, f"{job['stem']}.py", registered=False)
        attempt = evaluate.Attempt(exercise, fn, job["seed"], job["learner"]).run()
    except evaluate.Refused as error:
        return ["stub", name, False, str(error), 0.0]
    good = attempt.untouched and not attempt.checks
    return ["stub", name, good, "" if good else "counts as an attempt", attempt.seconds]


def _try_mutants(job: dict, exercise: Exercise) -> list[list]:
    attempts = evaluate.attempt_mutants(exercise, job["seed"], job["learner"])
    for attempt in attempts:  # `match` compares these first failures, and runs little more
        attempt.run(to_first_failure=True)
    rows = []
    for mutant, attempt in zip(exercise.mutants, attempts, strict=True):
        chosen = evaluate.match(attempt, attempts)
        shown, text = None if chosen is None else exercise.mutants[chosen], ""
        if not attempt.failing:
            text = "passes every check"
        elif shown is None or shown.hint != mutant.hint:  # two may make one mistake in two ways
            other = "the first hint" if shown is None else f"of {shown.name}"
            first = attempt.failing[0]
            text = f"the hint shown is not its own but {other} ({first.name}: {first.message})"
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
    send = _sender(int(sys.argv[1]))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    (grade_answer if job["mode"] == "answer" else try_out)(job, send)
    send("done")
    os._exit(0)


if __name__ == "__main__":
    main()
