"""Runs an exercise's checks on one answer, and picks the hint that its mistake needs.

Chapters: none.
"""

import dataclasses
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

from minitext.grading import compare
from minitext.grading.registry import Check, Exercise
from minitext.grading.trial import Trial

ANSWER_MODULE = "answer"  # name of the module that a learner's source is run as


@dataclasses.dataclass
class CheckResult:
    """What one check said: `message` is empty when it passed, `observed` is never shown."""

    name: str
    passed: bool
    message: str = ""
    observed: Any = None


@dataclasses.dataclass
class Outcome:
    """What all checks of one exercise said of one answer."""

    checks: list[CheckResult]
    untouched: bool = False  # the stub's own NotImplementedError was reached
    seconds: float = 0.0

    @property
    def failing(self) -> list[CheckResult]:
        """The failed checks, in order."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """True when every check passed."""
        return bool(self.checks) and not self.failing and not self.untouched


def evaluate(
    exercise: Exercise,
    fn: Any,
    seed: int,
    learner: int,
    source: str = "",
    swallow: type[BaseException] = Exception,
    before_check: Callable[[str], None] = lambda name: None,
    after_check: Callable[[], None] = lambda: None,
) -> Outcome:
    """Runs every check of `exercise` on `fn`.

    Args:
        exercise: what to check.
        fn: the answer.
        seed: with the check's name, the seed of `t.rng`.
        learner: `t.learner`.
        source: file name that the answer's frames have, to tell its errors from the check's.
        swallow: exceptions that count as the answer's; SystemExit always does.
        before_check: called with each check's name.
        after_check: called after each check; what it raises ends the evaluation.

    Returns:
        The outcome. An answer that is still the stub stops at its first check.
    """
    begun = time.perf_counter()
    outcome = Outcome([])
    for check in exercise.checks:
        before_check(check.name)
        try:
            result = _run(check, exercise, fn, seed, learner)
        except compare.Failure as failure:
            result = CheckResult(check.name, False, str(failure), failure.observed)
        except NotImplementedError as error:
            if error.args == (exercise.id,):
                outcome.untouched = True
                break
            result = raised(check.name, error, fn, source)
        except (swallow, SystemExit) as error:
            result = raised(check.name, error, fn, source)
        after_check()
        outcome.checks.append(result)
    outcome.seconds = time.perf_counter() - begun
    return outcome


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


def evaluate_mutants(exercise: Exercise, seed: int, learner: int) -> list[Outcome]:
    """The outcome of each of the exercise's mutants, in order, under the same seed."""
    return [evaluate(exercise, mutant.fn, seed, learner) for mutant in exercise.mutants]


def choose_hint(exercise: Exercise, outcome: Outcome, mutants: list[Outcome]) -> str:
    """The hint for a failing answer.

    First the mutant that fails the same first check with the same value (or exception); among
    several, one that fails the same checks, then the nearest in all values seen. Else the first
    mutant that fails exactly the same checks in the same way (wrong value, or the same type of
    exception). Else the exercise's first hint.
    """
    index = match(exercise, outcome, mutants)
    return exercise.hints[0] if index is None else exercise.mutants[index].hint


def match(exercise: Exercise, outcome: Outcome, mutants: list[Outcome]) -> int | None:
    """Index of the mutant whose mistake the outcome shows, or None."""
    failing = outcome.failing
    if not failing:
        return None
    names = [check.name for check in failing]
    ranked = []
    for index, mutant in enumerate(mutants):
        if not mutant.failing or mutant.failing[0].name != names[0]:
            continue
        near = compare.distance(failing[0].observed, mutant.failing[0].observed)
        if near > exercise.compare:
            continue
        seen = {check.name: check.observed for check in mutant.failing}
        rest = sum(
            min(1.0, compare.distance(check.observed, seen.get(check.name))) for check in failing
        )
        ranked.append((set(seen) != set(names), near + rest, index))
    if ranked:
        return min(ranked)[-1]
    for index, mutant in enumerate(mutants):
        same_checks = [check.name for check in mutant.failing] == names
        if same_checks and _kind(mutant.failing[0]) == _kind(failing[0]):
            return index
    return None


def _kind(check: CheckResult) -> str:
    """How a check failed: the exception's type, or "" for a wrong value."""
    seen = check.observed
    return seen[1] if isinstance(seen, tuple) and seen[:1] == ("raised",) else ""
