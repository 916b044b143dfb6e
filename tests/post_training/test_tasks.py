"""Every kind of objective has a task."""

import pytest

from minitext.config.config import layout
from minitext.post_training.tasks import TASKS, task_of


def test_every_kind_has_a_task():
    assert set(TASKS) == set(layout().variants["objective"])
    assert all(task.kind == kind for kind, task in TASKS.items())


@pytest.mark.parametrize("kind", ["lm"])
def test_the_task_is_that_of_the_configuration(tiny, kind):
    cfg = tiny(f"objective.kind={kind}")
    assert task_of(cfg).kind == kind
    assert task_of(cfg).objective(cfg).prepare is None
