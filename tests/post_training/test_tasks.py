"""Every kind of objective has a task."""

import pytest

from minitext.config.config import layout
from minitext.post_training.tasks import task_of

WORDS = {
    "lm": [],
    "preference": ["data.source=preferences", "data.path=pairs.jsonl"],
    "grpo": ["data.source=prompts", "data.path=prompts.jsonl"],
    "ppo": ["data.source=prompts", "data.path=prompts.jsonl", "model.value_head=true"],
}


@pytest.mark.parametrize("kind", layout().variants["objective"])
def test_the_task_is_that_of_the_configuration(tiny, kind):
    cfg = tiny(f"objective.kind={kind}", *WORDS[kind])
    assert task_of(cfg).kind == kind
    assert task_of(cfg).objective(cfg).summed is not None
