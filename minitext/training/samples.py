"""Text samples while training: how the model continues the first validation text, at the start, middle and end.

Chapters: 6.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.text import Text

from minitext.checkpoint import leaves, stacks
from minitext.config.config import Config
from minitext.data.batches import Batches
from minitext.data.tokenizer import Tokenizer
from minitext.distributed import job
from minitext.inference.generate import Sampling, generate
from minitext.sharding.mesh import make_mesh
from minitext.training.step import TrainState

PROMPT_TOKENS = 32  # of validation text, before each sample


@dataclass
class Samples:
    """An action of the loop that prints a sample and appends it to samples.txt.

    Attributes:
      cfg: the run's configuration.
      directory: the run directory.
      held_out: validation batches; the first row of the first gives the prompt.
      tokenizer: the run's.
      console: where to print.
    """

    cfg: Config
    directory: Path
    held_out: Batches
    tokenizer: Tokenizer
    console: Console
    event = "sample"
    is_timed = False

    def is_due(self, step: int, stop: bool) -> bool:
        """After the first step (its line should not wait for sampling to compile), the middle one and the last."""
        train = self.cfg.train
        return train.sample_tokens > 0 and step in (1, (train.steps + 1) // 2, train.steps)

    def __call__(self, step: int, state: TrainState) -> None:
        """Generates on one device and prints."""
        cfg, tokenizer = self.cfg, self.tokenizer
        rows = jax.device_get(next(iter(self.held_out))["tokens"].addressable_shards[0].data)
        prompt = rows[0, :PROMPT_TOKENS].tolist()
        # One row cannot be split over a batch axis, so the parameters come to one device.
        params = stacks.as_one_stack(leaves.gather(state.model_params))
        if not job.is_first():
            return
        params = jax.device_put(params, jax.local_devices()[0])
        # Scanned, whatever training does: for so few tokens, compiling takes most of the time.
        model = cfg.model.model_copy(update={"scan_layers": True})
        with jax.set_mesh(make_mesh(devices=jax.local_devices()[:1])):
            following = generate(
                model, params, prompt, max_tokens=cfg.train.sample_tokens, stop_id=tokenizer.eod_id,
                sampling=Sampling(temperature=0.8, top_k=40), seed=cfg.train.seed,
            )  # fmt: skip
            tokens = list(following)
        before, after = tokenizer.decode(prompt), tokenizer.decode(tokens)
        self.console.rule(f"sample at step {step}", style="dim")
        self.console.print(Text.assemble((before, "dim"), (after, "bold")))
        self.console.rule(style="dim")
        with (self.directory / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(f"--- step {step}\n{before}|{after}\n")
