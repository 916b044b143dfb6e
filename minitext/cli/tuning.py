"""The commands that teach a trained model more: post-training.

Chapters: 26.
"""

import sys
import time
from typing import Annotated

import typer

from minitext.cli.arguments import RunDir, start
from minitext.distributed.devices import simulate_for

Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="settings, such as data.path=FILE"),
]


def sft(directory: RunDir, settings: Changes = None) -> None:
    """Fine-tune a run on conversations: minitext sft RUN data.path=FILE trains on what the assistant says in them.

    FILE is a .jsonl or .parquet of messages, or of prompt and completion; data.hf_name=NAME reads a dataset instead.
    The new run has the model and tokenizer of RUN. Ctrl-C saves, and the same command goes on.
    """
    tune(directory, "sft", settings or [])


def dpo(directory: RunDir, settings: Changes = None) -> None:
    """Teach a run which of two answers to prefer: minitext dpo RUN data.path=FILE.

    FILE is a .jsonl or .parquet of prompt, chosen and rejected; data.hf_name=NAME reads a dataset instead.
    objective.loss=dpo, ipo, orpo or simpo chooses the loss.
    """
    tune(directory, "dpo", settings or [])


def tune(run: str, recipe: str, settings: list[str]) -> None:
    """Makes the configuration of a recipe, trains, and says how to try the result.

    Args:
      run: the run to begin with.
      recipe: its name, such as sft.
      settings: `key=value` of the command line.
    """
    began = time.time()
    from minitext.post_training import recipes

    cfg = recipes.new_config(run, recipe, settings)
    simulate = simulate_for(list(cfg.mesh.sizes().values()), cfg.mesh.simulate)
    start(simulate, keep_memory=True, join=True)
    from minitext.distributed import job
    from minitext.post_training.tasks import task_of
    from minitext.training import run as training
    from minitext.training.stopping import Interrupted

    cfg = recipes.with_steps(cfg)
    if job.is_first():
        print(
            f"{recipe} of {run}: {cfg.train.steps:,} steps of {cfg.train.global_batch} rows of "
            f"{cfg.data.seq_len:,} tokens, learning rate {cfg.optim.learning_rate:g}",
            file=sys.stderr,
        )
    try:
        made = training.train(cfg, began=began, task=task_of(cfg))
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        raise typer.Exit(stop.exit_code) from None
    if job.is_first():
        print(f"done; try: minitext generate {made} --chat 'Hello'", file=sys.stderr)
