"""GRPO and PPO as tasks of a run: where their batches come from, and how the model is judged along the way.

Chapters: 26.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from minitext.config.config import Config
from minitext.data.batches import Batches
from minitext.data.chat import Chat
from minitext.data.placement import Split
from minitext.data.tokenizer import Tokenizer
from minitext.distributed import job
from minitext.errors import UserError
from minitext.post_training.policy_objective import (
    check_objective,
    make_objective,
    rollout_config,
)
from minitext.post_training.prompts import open_prompts
from minitext.post_training.reward_workers import RewardWorkers
from minitext.post_training.rollouts import Rollouts
from minitext.post_training.sampler import Sampler
from minitext.training.loop import Action
from minitext.training.objective import Objective
from minitext.training.step import TrainState
from minitext.training.task import Task

SHOWN = 4  # answers in a sample


class Reinforce(Task):
    """Learning from rewards for the model's own answers. Use one for one run: it keeps the run's engine.

    Args:
      kind: grpo or ppo.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rollouts: dict[Split, Rollouts] = {}

    def objective(self, cfg: Config) -> Objective:
        """Returns what a step minimises."""
        return make_objective(cfg)

    def check(self, cfg: Config, mesh: Mesh) -> None:
        """Raises UserError for settings that can't be used, before the run directory exists."""
        check_objective(cfg, mesh)

    def needs_reference(self, cfg: Config) -> bool:
        """Returns whether answers are compared with the model that training starts from."""
        return rollout_config(cfg).kl > 0

    def batches(
        self, cfg: Config, mesh: Mesh, tokenizer: Tokenizer, chat: Chat | None, split: Split
    ) -> Batches:
        """Returns the rollouts of one part of the prompts; both parts share an engine and the processes that reward."""
        assert chat is not None  # of data.source=prompts
        rl = rollout_config(cfg)
        prompts = open_prompts(cfg, tokenizer, chat, split)
        if len(set(job.share("prompts", prompts.digest))) > 1:
            raise UserError(
                f"data.path={cfg.data.path}: the processes read different prompts: give all of them the same file"
            )
        other = next(iter(self.rollouts.values()), None)
        sampler = other.sampler if other else Sampler(cfg, mesh, chat.stops)
        limits = rl.reward_seconds, rl.failed_reward
        workers = other.workers if other else RewardWorkers(rl.rewards, *limits)
        made = Rollouts(cfg, mesh, prompts, tokenizer, sampler, workers)
        self.rollouts[split] = made
        return made

    def validation(
        self, cfg: Config, held_out: Batches, say: Callable[[str], None]
    ) -> Callable[[int, TrainState], dict[str, float]]:
        """Returns a function that answers held-out prompts, once as in training and once with the likeliest tokens."""
        assert isinstance(held_out, Rollouts)

        def validate(step: int, state: TrainState) -> dict[str, float]:
            count = cfg.train.eval_batches * rollout_config(cfg).prompts
            found = {f"val_{name}": x for name, x in held_out.measure(state, count).items()}
            say(
                f"step {step:>6}  held out: reward {found['val_reward']:.3f}, correct {found['val_correct']:.1%}; "
                f"greedy {found['val_reward_greedy']:.3f}, {found['val_correct_greedy']:.1%}"
            )
            return found

        return validate

    def samples(
        self,
        cfg: Config,
        directory: Path,
        held_out: Batches,
        tokenizer: Tokenizer,
        console: Console,
    ) -> Action:
        """Returns the action that prints some of the answers last drawn."""
        return Answers(cfg, directory, self.rollouts["train"], console)


@dataclass
class Answers:
    """An action of the loop that prints answers with their rewards and appends them to samples.txt.

    Attributes:
      cfg: the run's configuration.
      directory: the run directory.
      rollouts: those that are trained on.
      console: where to print.
    """

    cfg: Config
    directory: Path
    rollouts: Rollouts
    console: Console
    event: str = field(default="sample", init=False)
    is_timed: bool = field(default=False, init=False)

    def is_due(self, step: int, stop: bool) -> bool:
        """After the first step, the middle one and the last, unless `train.sample_tokens` is 0."""
        train = self.cfg.train
        return train.sample_tokens > 0 and step in (1, (train.steps + 1) // 2, train.steps)

    def __call__(self, step: int, state: TrainState) -> None:
        """Prints the first answers to the first prompt of the last rollout."""
        drawn = self.rollouts.last
        if drawn is None or not job.is_first():  # None: drawn before the run was resumed
            return
        prompt = self.rollouts.tokenizer.decode(self.rollouts.prompts.tokens[drawn.prompts[0]])
        shown = min(SHOWN, rollout_config(self.cfg).group)
        lines = list(zip(drawn.texts[:shown], drawn.rewards[:shown], strict=True))
        self.console.rule(f"answers before step {step}", style="dim")
        for text, reward in lines:
            self.console.print(
                Text.assemble((prompt, "dim"), (text, "bold"), (f"  {reward:.3f}", "green"))
            )
        self.console.rule(style="dim")
        with (self.directory / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(f"--- step {step}\n")
            file.writelines(f"{prompt}|{text}\treward {reward:.4f}\n" for text, reward in lines)
