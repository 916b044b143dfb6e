"""Runs an exercise's checks on one answer, and picks the hint that fits its mistake."""

import dataclasses
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

from minitext.book.grading import raising
from minitext.book.grading.registry import Check, Exercise
from minitext.book.grading.trial import Failure, Trial, distance
from minitext.book.grading.watch import Watched


class Refused(BaseException):
    """A verdict that doesn't come from a check; the message is for the learner."""


class Gone(BaseException):
    """The answering process has ended, or sends what it may not: the grading of this answer is over."""


@dataclasses.dataclass
class CheckResult:
    """The result of one check: `message` is empty if it passed; `observed` is never shown.

    `cause` says what an exception or a None is usually about, for a mistake that no mutant makes.
    """

    name: str
    passed: bool
    message: str = ""
    observed: Any = None
    cause: str = ""


@dataclasses.dataclass(eq=False)
class Attempt:
    """One answer and the results of its checks so far.

    Attributes:
        exercise: the exercise to check.
        fn: the answer.
        seed: together with the check's name, the seed of `t.rng`.
        learner: `t.learner`.
        source: file name in the answer's frames, which tells its errors from the check's.
        swallow: exceptions that count as the answer's; SystemExit always does.
        before_check: called with each check's name.
        results: results of the checks run so far, by name.
        untouched: whether the stub's own NotImplementedError was raised; no further check runs then.
        seconds: how long the checks took.
    """

    exercise: Exercise
    fn: Any
    seed: int
    learner: int
    source: str = ""
    swallow: type[BaseException] = Exception
    before_check: Callable[[str], None] = lambda name: None
    results: dict[str, CheckResult] = dataclasses.field(default_factory=dict)
    untouched: bool = False
    seconds: float = 0.0

    @property
    def checks(self) -> list[CheckResult]:
        """The results so far, in the checks' order."""
        names = [check.name for check in self.exercise.checks]
        return [self.results[name] for name in names if name in self.results]

    @property
    def failing(self) -> list[CheckResult]:
        """The checks that failed so far."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """True when every check was run and passed."""
        return len(self.checks) == len(self.exercise.checks) and not self.failing

    def run(self, to_first_failure: bool = False) -> "Attempt":
        """Runs the checks that haven't run yet, all of them or until one fails."""
        for check in self.exercise.checks:
            result = self.run_check(check)
            if self.untouched or (to_first_failure and result is not None and not result.passed):
                break
        return self

    def run_check(self, check: Check) -> CheckResult | None:
        """The result of one check, run at most once; None for an untouched stub."""
        if check.name not in self.results:
            begun = time.perf_counter()
            self.before_check(check.name)
            result = self._result(check)
            if result is not None:
                self.results[check.name] = result
            self.seconds += time.perf_counter() - begun
        return self.results.get(check.name)

    def _result(self, check: Check) -> CheckResult | None:
        trial = Trial(self.seed, self.learner, f"{self.exercise.id}/{check.name}")
        fn = Watched(self.fn)
        try:
            check.run(fn, trial)
        except Failure as failure:
            cause = raising.nothing(True in fn.none) if failure.observed == ("value", None) else ""
            return CheckResult(check.name, False, str(failure), failure.observed, cause)
        except Gone:
            raise
        except (self.swallow, SystemExit, NotImplementedError) as error:
            if isinstance(error, NotImplementedError) and error.args == (self.exercise.id,):
                self.untouched = True
                return None
            return raised(check.name, error, self.fn, self.source, True in fn.none)
        if not trial.comparisons:
            text = "this check compared nothing; that is the exercise's fault, please report it"
            return CheckResult(check.name, False, text, "no comparison")
        return CheckResult(check.name, True)


def raised(name: str, error: BaseException, fn: Any, source: str, none: bool) -> CheckResult:
    """The result of a check in which the answer raised: the exception, and the answer's line that raised it.

    `none` says whether what the answer returned last was None.
    """
    kind = type(error).__name__
    text = str(error).strip().split("\n")[0][:300]
    message = f"{kind}: {text}" if text else kind
    if isinstance(error, SystemExit):
        message = f"the answer called sys.exit({error.code!r})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if source and frame.filename == source]
    line = getattr(error, "line", 0) if hasattr(error, "origin") else lines[-1] if lines else 0
    if line:
        message += f" (line {line} of {source})"
    notes = getattr(error, "__notes__", [])
    told = [note for note in notes if note.startswith(("called with ", "want "))]
    message = "; ".join([message, *told])
    cause = raising.cause(kind, text, own=bool(line) or not source, none=none)
    return CheckResult(name, False, message, ("raised", kind, _anonymous(text, fn)), cause)


def _anonymous(text: str, fn: Any) -> str:
    """An exception's message without the parts that differ between two answers with the same mistake."""
    name = getattr(fn, "__name__", "")
    text = re.sub(rf"\b{re.escape(name)}\b", "fn", text) if name else text
    text = re.sub(r"\S+\.py:\d+(:\d+)?|<ipython\S+>|line \d+", "", text)
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def attempt_mutants(exercise: Exercise, seed: int, learner: int) -> list[Attempt]:
    """The exercise's mutants, in order, with the same seed; `match` runs as many of their checks as it needs."""
    return [Attempt(exercise, mutant.fn, seed, learner) for mutant in exercise.mutants]


def choose_hint(attempt: Attempt) -> str:
    """The hint for a failed answer: its mutant's, or else that of its exception, or else the exercise's first."""
    exercise = attempt.exercise
    index = match(attempt, attempt_mutants(exercise, attempt.seed, attempt.learner))
    if index is not None:
        return exercise.mutants[index].hint
    return attempt.failing[0].cause or exercise.hints[0]


def match(attempt: Attempt, mutants: list[Attempt]) -> int | None:
    """Index of the mutant that makes the same mistake as an answer, or None.

    It is the mutant that first fails the same check with the same value or exception, if the answer fails all the
    checks that the mutant fails, most of them with the same value: two mistakes may agree by chance in one check. Among
    several, one that fails the same set of checks is preferred, then the nearest in all observed values. If there is
    none and the answer raised, it is the only mutant that raises the same type of exception in the same checks. Any
    other wrong value is another mistake. Each mutant runs only as far as this comparison needs.
    """
    failing = attempt.run(to_first_failure=True).failing
    if not failing:
        return None
    first, compare = failing[0], attempt.exercise.compare
    rivals = []
    for index, mutant in enumerate(mutants):
        if not _fails_like(mutant, first):
            continue
        if attempt not in mutants[: index + 1] and _same(attempt, mutant, first):
            return index
        rivals.append(index)
    seen = {index: mutants[index].results[first.name] for index in rivals}
    near = [i for i in rivals if distance(first.observed, seen[i].observed) <= compare]
    if [mutants[index] for index in near] == [attempt]:  # a mutant that is tried out
        return near[0]
    names = [check.name for check in attempt.run().failing]
    near = [index for index in near if _makes(attempt, mutants[index].run())]
    if near:
        return min((_unlike(attempt, mutants[index]), index) for index in near)[-1]
    alike = [
        index
        for index in rivals
        if _kind(seen[index]) == _kind(first) != ""
        and [check.name for check in mutants[index].run().failing] == names
    ]
    return alike[0] if len(alike) == 1 else None


def _fails_like(mutant: Attempt, first: CheckResult) -> bool:
    """Whether a mutant fails the check that an answer fails first as the answer does, and passes the ones before it.

    That check runs before those: most mutants need no other.
    """
    place = [check.name for check in mutant.exercise.checks].index(first.name)
    before = {check.name for check in mutant.exercise.checks[:place]}
    if any(check.name in before for check in mutant.failing):
        return False
    seen = mutant.run_check(mutant.exercise.checks[place])
    if seen is None or seen.passed:
        return False
    near = distance(first.observed, seen.observed) <= mutant.exercise.compare
    if not near and not _kind(seen) == _kind(first) != "":
        return False
    return mutant.run(to_first_failure=True).failing[0].name == first.name


def _same(attempt: Attempt, mutant: Attempt, first: CheckResult) -> bool:
    """Whether two answers fail the same checks with the same values, the first of them `first`."""
    if distance(first.observed, mutant.results[first.name].observed) > 0:
        return False
    return _unlike(attempt.run(), mutant.run()) == (False, 0.0)


def _makes(attempt: Attempt, mutant: Attempt) -> bool:
    """Whether an answer fails all the checks that a mutant fails, and most of them with the same value or exception.

    Two exceptions of one type count as the same: their messages are each author's own.
    """
    seen = {check.name: check for check in attempt.failing}
    if not all(check.name in seen for check in mutant.failing):
        return False
    same = [
        distance(seen[c.name].observed, c.observed) <= attempt.exercise.compare
        or _kind(c) == _kind(seen[c.name]) != ""
        for c in mutant.failing
    ]
    return 2 * sum(same) > len(same)


def _unlike(a: Attempt, b: Attempt) -> tuple[bool, float]:
    """How much two failed answers differ: whether other checks fail, then the distance of the observed values."""
    seen = {check.name: check.observed for check in b.failing}
    far = [min(1.0, distance(c.observed, seen.get(c.name))) for c in a.failing]
    return set(seen) != {check.name for check in a.failing}, sum(far)


def _kind(check: CheckResult) -> str:
    """The type of the exception that failed a check, or "" for a wrong value."""
    seen = check.observed
    return seen[1] if isinstance(seen, tuple) and seen[:1] == ("raised",) else ""
