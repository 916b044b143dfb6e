"""Every kind of objective has a task, and pretraining imports none of the others."""

import subprocess
import sys

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


def test_pretraining_imports_no_engine():
    code = (
        "import sys, minitext as mt; from minitext.post_training.tasks import task_of; "
        "task_of(mt.load_config('laptop')); "
        "print([m for m in sys.modules if 'engine' in m and m.startswith('minitext')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
