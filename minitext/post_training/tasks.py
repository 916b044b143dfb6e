"""Which task a configuration asks for. Each is imported when it is needed: pretraining has no use for rewards.

Chapters: 26.
"""

from minitext.config.config import Config
from minitext.training.task import PRETRAINING, Task


def task_of(cfg: Config) -> Task:
    """Returns the task of a configuration's `objective.kind`, for one run."""
    match cfg.objective.kind:
        case "lm":
            return PRETRAINING
        case "preference":
            from minitext.post_training.preference import Preferences

            return Preferences()
        case "grpo" | "ppo":
            from minitext.post_training.reinforce import Reinforce

            return Reinforce(cfg.objective.kind)
