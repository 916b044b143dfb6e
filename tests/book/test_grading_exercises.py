"""The course's own exercises: solutions score, stubs don't count, mutants show their own hints."""

import random

import pytest

from minitext.book.grading import registry, runner

ROOT = registry.exercises_root()
IDS = registry.known_ids(ROOT)
CHAPTERS = sorted({name[:2] for name in IDS})


def test_every_solution_has_checks_and_every_exercise_keeps_the_rules():
    exercises = registry.load_exercises(ROOT)
    assert sorted(exercises) == sorted(IDS)
    for exercise in exercises.values():
        assert len(exercise.mutants) >= 3, exercise.id
        # Two mistakes that no check can tell apart share one hint; a general hint repeats none.
        hints = list(exercise.hints) + sorted({mutant.hint for mutant in exercise.mutants})
        assert len(set(hints)) == len(hints), f"{exercise.id}: two hints are the same"
        assert all(hint.strip() for hint in hints), exercise.id
        assert exercise.seconds <= 120 and exercise.memory_gib <= 4, exercise.id


@pytest.mark.audit
@pytest.mark.timeout(900)  # a minute by itself; cores may be shared
@pytest.mark.parametrize("nth", range(20))
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_solutions_score_stubs_do_not_count_and_mutants_show_their_hints(chapter, nth, request):
    audit = request.config.getoption("--hypothesis-seed")  # that `make audit` draws and prints
    seed = random.Random(f"{audit}/{nth}").getrandbits(31)
    exercises = registry.select(ROOT, [chapter]).values()
    grading = runner.Grading(ROOT, seed, registry.learner_number("a learner"), jobs=2)
    kinds = ("solution", "stub", "mutant") if nth == 0 else ("solution", "mutant")
    rows = runner.try_out(grading, exercises, kinds, lambda done, total: None)
    assert len(rows) == sum(len(kinds) - 1 + len(exercise.mutants) for exercise in exercises)
    wrong = [f"{id} {kind} {name}: {text}" for id, kind, name, good, text, _ in rows if not good]
    assert not wrong, f"seed {seed}:\n" + "\n".join(wrong)
