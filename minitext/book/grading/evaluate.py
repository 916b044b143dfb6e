"""Runs an exercise's checks on one answer, and picks the hint that its mistake needs.

Chapters: none.
"""

import dataclasses
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

from minitext.book.grading import compare
from minitext.book.grading.registry import Check, Exercise
from minitext.book.grading.trial import Trial

ANSWER_MODULE = "answer"  # name of the module that a learner's source is run as


@dataclasses.dataclass
class CheckResult:
    """What one check said: `message` is empty when it passed, `observed` is never shown."""

    name: str
    passed: bool
    message: str = ""
    observed: Any = None


@dataclasses.dataclass(eq=False)
class Attempt:
    """One answer and what the checks said of it so far.

    Attributes:
        exercise: what to check.
        fn: the answer.
        seed: with the check's name, the seed of `t.rng`.
        learner: `t.learner`.
        source: file name that the answer's frames have, to tell its errors from the check's.
        swallow: exceptions that count as the answer's; SystemExit always does.
        before_check: called with each check's name.
        after_check: called after each check; what it raises ends the evaluation.
        checks: results of the checks that were run, in order.
        untouched: the stub's own NotImplementedError was reached; no further check is run.
        seconds: what the checks took.
    """

    exercise: Exercise
    fn: Any
    seed: int
    learner: int
    source: str = ""
    swallow: type[BaseException] = Exception
    before_check: Callable[[str], None] = lambda name: None
    after_check: Callable[[], None] = lambda: None
    checks: list[CheckResult] = dataclasses.field(default_factory=list)
    untouched: bool = False
    seconds: float = 0.0

    @property
    def failing(self) -> list[CheckResult]:
        """The checks that failed so far."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """True when every check was run and passed."""
        return len(self.checks) == len(self.exercise.checks) and not self.failing

    def run(self, to_first_failure: bool = False) -> "Attempt":
        """Runs the checks that were not run yet, all or only until one has failed."""
        begun = time.perf_counter()
        for check in self.exercise.checks[len(self.checks) :]:
            if self.untouched or (to_first_failure and self.failing):
                break
            self.before_check(check.name)
            result = self._result(check)
            self.after_check()
            if result is not None:
                self.checks.append(result)
        self.seconds += time.perf_counter() - begun
        return self

    def _result(self, check: Check) -> CheckResult | None:
        try:
            return _run(check, self.exercise, self.fn, self.seed, self.learner)
        except compare.Failure as failure:
            return CheckResult(check.name, False, str(failure), failure.observed)
        except NotImplementedError as error:
            if error.args == (self.exercise.id,):
                self.untouched = True
                return None
            return raised(check.name, error, self.fn, self.source)
        except (self.swallow, SystemExit) as error:
            return raised(check.name, error, self.fn, self.source)


def _run(check: Check, exercise: Exercise, fn: Any, seed: int, learner: int) -> CheckResult:
    trial = Trial(seed, learner, f"{exercise.id}/{check.name}")
    check.run(fn, trial)
    if not trial.comparisons:
        text = "this check compared nothing; that is the exercise's fault, please report it"
        return CheckResult(check.name, False, text, "no comparison")
    return CheckResult(check.name, True)


def raised(name: str, error: BaseException, fn: Any, source: str) -> CheckResult:
    """The result of a check in which the answer raised: what, and on which of its lines."""
    kind = type(error).__name__
    text = str(error).strip().split("\n")[0][:300]
    message = f"{kind}: {text}" if text else kind
    if isinstance(error, SystemExit):
        message = f"the answer called sys.exit({error.code!r})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if source and frame.filename == source]
    if lines:
        message += f" (line {lines[-1]} of {source})"
    return CheckResult(name, False, message, ("raised", kind, _anonymous(text, fn)))


def _anonymous(text: str, fn: Any) -> str:
    """An exception's message without what differs between two answers with one mistake."""
    name = getattr(fn, "__name__", "")
    text = re.sub(rf"\b{re.escape(name)}\b", "fn", text) if name else text
    text = re.sub(r"\S+\.py:\d+(:\d+)?|<ipython\S+>|line \d+", "", text)
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def attempt_mutants(exercise: Exercise, seed: int, learner: int) -> list[Attempt]:
    """The exercise's mutants, in order, under the same seed; `match` runs what it needs of them."""
    return [Attempt(exercise, mutant.fn, seed, learner) for mutant in exercise.mutants]


def choose_hint(attempt: Attempt) -> str:
    """The hint for a failed answer: that of the mutant with the same mistake, else the first."""
    exercise = attempt.exercise
    index = match(attempt, attempt_mutants(exercise, attempt.seed, attempt.learner))
    return exercise.hints[0] if index is None else exercise.mutants[index].hint


def match(attempt: Attempt, mutants: list[Attempt]) -> int | None:
    """Index of the mutant whose mistake an answer shows, or None.

    First the mutant that fails the same first check with the same value (or exception); among
    several, one that fails the same checks, then the nearest in all values seen. Else, for an
    answer that raised, the only mutant that raises the same type of exception in the same checks.
    Other wrong values are another mistake. A mutant is run no further than this needs.
    """
    failing = attempt.run(to_first_failure=True).failing
    if not failing:
        return None
    first = failing[0]
    rivals = []
    for index, mutant in enumerate(mutants):
        seen = mutant.run(to_first_failure=True).failing
        if seen and seen[0].name == first.name:
            rivals.append((compare.distance(first.observed, seen[0].observed), index))
    near = [(far, index) for far, index in rivals if far <= attempt.exercise.compare]
    if len(near) == 1:
        return near[0][1]
    names = [check.name for check in attempt.run().failing]
    if near:
        return min((_unlike(attempt, mutants[i].run()), far, i) for far, i in near)[-1]
    if not _kind(first):
        return None
    alike = []
    for _, index in rivals:
        other = mutants[index].run().failing
        if [check.name for check in other] == names and _kind(other[0]) == _kind(first):
            alike.append(index)
    return alike[0] if len(alike) == 1 else None


def _unlike(a: Attempt, b: Attempt) -> tuple[bool, float]:
    """How much two failed answers differ: in the checks that fail, then in the values seen."""
    seen = {check.name: check.observed for check in b.failing}
    far = [min(1.0, compare.distance(c.observed, seen.get(c.name))) for c in a.failing]
    return set(seen) != {check.name for check in a.failing}, sum(far)


def _kind(check: CheckResult) -> str:
    """How a check failed: the exception's type, or "" for a wrong value."""
    seen = check.observed
    return seen[1] if isinstance(seen, tuple) and seen[:1] == ("raised",) else ""
