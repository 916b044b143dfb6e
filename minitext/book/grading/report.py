"""Grading results as a table, as JSON, and as Gradescope's results file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from minitext.book.grading.registry import Exercise
from minitext.errors import UserError
from minitext.terminal import table

PASSED, FAILED, NOT_ATTEMPTED = "passed", "failed", "not attempted"


@dataclasses.dataclass
class Result:
    """The verdict on one exercise.

    Attributes:
        exercise: what was graded.
        status: "passed", "failed" or "not attempted".
        message: the reason, if it isn't a check's (time, memory, syntax); else "".
        checks: (name, passed, message) of each check that ran.
        hint: one hint for a failed exercise.
        seconds: how long the checks took.
        output: the last part of what the answer printed.
    """

    exercise: Exercise
    status: str
    message: str = ""
    checks: list[tuple[str, bool, str]] = dataclasses.field(default_factory=list)
    hint: str = ""
    seconds: float = 0.0
    output: str = ""

    @property
    def points(self) -> int:
        """All of the exercise's points if every check passed, otherwise none."""
        return self.exercise.points if self.status == PASSED else 0

    @property
    def good(self) -> int:
        """How many checks passed."""
        return sum(passed for _, passed, _ in self.checks)

    @property
    def first_failing(self) -> tuple[str, str] | None:
        """(name, message) of the first failed check."""
        return next(((name, text) for name, passed, text in self.checks if not passed), None)

    def explanation(self) -> str:
        """What a learner reads below the table: the first failing check, and the message."""
        first = self.first_failing
        failing = [] if first is None else ["first failing check: {}\n{}".format(*first)]
        said = "\n".join(failing + [self.message] * bool(self.message))
        # An answer's own words must not move the cursor, for instance to write over the table.
        return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in said)


def as_json(results: list[Result], seed: int, learner: str) -> dict[str, Any]:
    """The report as a JSON-able dict."""
    from minitext import __version__

    return {
        "minitext": __version__,
        "seed": seed,
        "learner": learner,
        "passed": all(result.status == PASSED for result in results),
        "points": sum(result.points for result in results),
        "max_points": sum(result.exercise.points for result in results),
        "exercises": [_exercise(result) for result in results],
    }


def _exercise(result: Result) -> dict[str, Any]:
    first = result.first_failing
    return {
        "id": result.exercise.id,
        "title": result.exercise.title,
        "status": result.status,
        "points": result.points,
        "max_points": result.exercise.points,
        "message": result.message,
        "first_failing": None if first is None else {"check": first[0], "message": first[1]},
        "hint": result.hint,
        "checks": [{"name": n, "passed": p, "message": m} for n, p, m in result.checks],
        "seconds": round(result.seconds, 3),
        "output": result.output,
    }


def as_gradescope(results: list[Result], seed: int) -> dict[str, Any]:
    """Gradescope's `results.json`, one test per exercise.

    Source: https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format
    """
    tests = []
    for result in results:
        text = result.explanation() or result.status
        tests.append(
            {
                "number": result.exercise.id,
                "name": result.exercise.title,
                "score": float(result.points),
                "max_score": float(result.exercise.points),
                "status": "passed" if result.status == PASSED else "failed",
                "output": f"{text}\nHint: {result.hint}" if result.hint else text,
                "output_format": "text",
                "tags": [f"chapter {result.exercise.chapter}"],
                "visibility": "visible",
            }
        )
    return {
        "score": float(sum(result.points for result in results)),
        "execution_time": round(sum(result.seconds for result in results)),
        "output": f"Repeat this grading with: minitext grade --seed {seed}",
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }


def write_json(path: str, report: dict[str, Any]) -> None:
    """Writes a report to a file, or to standard output if `path` is "-".

    Raises:
        UserError: if the file cannot be written.
    """
    text = json.dumps(report, indent=1)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the report to {path}: {error.strerror}") from None


def print_table(console: Any, results: list[Result], seed: int) -> None:
    """Prints one line per exercise, the points, then the first failing check and one hint each."""
    from rich.markup import escape
    from rich.padding import Padding

    rows = []
    for r in results:
        tried = r.status != NOT_ATTEMPTED
        tally = f"{r.good}/{len(r.exercise.checks)}" if tried else ""
        seconds = f"{r.seconds:.1f}" if tried else ""
        points = f"{r.points}/{r.exercise.points}"
        rows.append((r.exercise.id, r.exercise.title, r.status, tally, seconds, points))
    total = f"{sum(r.points for r in results)}/{sum(r.exercise.points for r in results)}"
    heads = ("exercise", "title", "verdict", "checks", "seconds", "points")
    made = table(heads, [*rows, ("", "total", "", "", "", total)], right=(3, 4, 5))
    _print(console, made, {PASSED: "green", FAILED: "red", NOT_ATTEMPTED: "yellow"}, wrap="title")
    for r in results:
        if r.status == FAILED:
            console.print(f"\n[bold]{r.exercise.id}[/] {escape(r.exercise.title)}")
            text = escape(r.explanation() + (f"\nhint: {r.hint}" if r.hint else ""))
            console.print(Padding(text, (0, 0, 0, 2)), highlight=False)
    if any(r.status != NOT_ATTEMPTED for r in results):
        console.print(f"\nTo repeat with the same numbers: --seed {seed}", style="dim")


def print_rows(console: Any, rows: list[tuple]) -> bool:
    """Prints the rows of `runner.try_out` on a Rich console; returns True if every row passed."""
    from rich.markup import escape

    verdicts = {True: "as it should", False: "wrong"}
    shown = [(id, kind, name, verdicts[ok], f"{t:.1f}") for id, kind, name, ok, _, t in rows]
    made = table(("exercise", "kind", "name", "verdict", "seconds"), shown, right=(4,))
    _print(console, made, {verdicts[True]: "green", verdicts[False]: "red"})
    for exercise, kind, name, passed, message, _ in rows:
        if not passed:
            console.print(f"[bold]{exercise}[/] {kind} {escape(name)}: {escape(message)}")
    good = sum(row[3] for row in rows)
    console.print(f"{good} of {len(rows)} as they should be")
    return bool(rows) and good == len(rows)


def _print(console: Any, made: Any, colors: dict[str, str], wrap: str = "") -> None:
    """Prints a table with coloured verdicts; only the column `wrap` may break its lines."""
    for column in made.columns:
        column.no_wrap = column.header != wrap
        if column.header == "verdict":
            for cell in column.cells:
                cell.style = colors.get(cell.plain, "")
    console.print(made)
