"""What a run trains for: its objective, where its batches come from, and how it is judged along the way.

`Task` is pretraining and supervised fine-tuning. Post-training has others, and everything else about a run is the same.

Chapters: 6, 26.
"""

import functools
from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh
from rich.console import Console

from minitext.config.config import Config
from minitext.data.batches import Batches, make_batches
from minitext.data.chat import Chat
from minitext.data.placement import Split
from minitext.data.tokenizer import Tokenizer
from minitext.training.loop import Action
from minitext.training.objective import Objective, language_modelling
from minitext.training.samples import Samples
from minitext.training.step import TrainState, evaluate, make_eval_step


class Task:
    """Pretraining and supervised fine-tuning: cross-entropy on batches of text.

    Attributes:
      kind: that of `objective` in its configurations.
    """

    kind = "lm"

    def objective(self, cfg: Config) -> Objective:
        """Returns what a step minimises."""
        return language_modelling(cfg)

    def check(self, cfg: Config, mesh: Mesh) -> None:
        """Raises UserError for settings that can't be used, before the run directory exists."""

    def needs_reference(self, cfg: Config) -> bool:
        """Returns whether the objective compares with the model that training starts from."""
        return False

    def batches(
        self, cfg: Config, mesh: Mesh, tokenizer: Tokenizer, chat: Chat | None, split: Split
    ) -> Batches:
        """Returns the batches to train on, or those to validate on."""
        return make_batches(
            cfg.data, mesh, vocab=cfg.model.vocab, tokenizer=tokenizer, chat=chat,
            global_batch=cfg.train.global_batch, split=split,
        )  # fmt: skip

    def validation(
        self, cfg: Config, held_out: Batches, say: Callable[[str], None]
    ) -> Callable[[int, TrainState], dict[str, float]]:
        """Returns a function of (step, state) that measures and prints; its numbers go into the step's line."""
        make = functools.cache(lambda: make_eval_step(cfg, self.objective(cfg)))

        def validate(step: int, state: TrainState) -> dict[str, float]:
            found = evaluate(make(), state, held_out, cfg.train.eval_batches)
            floor = f"  (floor {held_out.floor:.4f})" if held_out.floor else ""
            loss, rest = found["loss"], {k: v for k, v in found.items() if k != "loss"}
            others = "".join(
                f"  {name.replace('_', ' ')} {value:.3f}" for name, value in rest.items()
            )
            unit = "" if rest else " nats/token"
            say(f"step {step:>6}  validation loss {loss:.4f}{unit}{floor}{others}")
            return {f"val_{name}": value for name, value in found.items()}

        return validate

    def samples(
        self,
        cfg: Config,
        directory: Path,
        held_out: Batches,
        tokenizer: Tokenizer,
        console: Console,
    ) -> Action:
        """Returns the action that prints what the model writes."""
        return Samples(cfg, directory, held_out, tokenizer, console)


PRETRAINING = Task()
