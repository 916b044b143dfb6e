"""Which task a configuration asks for.

Chapters: 26.
"""

from minitext.config.config import Config
from minitext.post_training.preference import Preferences
from minitext.post_training.reinforce import Reinforce
from minitext.training.task import PRETRAINING, Task

TASKS: dict[str, Task] = {task.kind: task for task in (PRETRAINING, Preferences())}


def task_of(cfg: Config) -> Task:
    """Returns the task of a configuration's `objective.kind`."""
    kind = cfg.objective.kind
    return Reinforce(kind) if kind in ("grpo", "ppo") else TASKS[kind]
