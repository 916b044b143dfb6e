"""The commands that teach a trained model more: post-training.

Chapters: 26.
"""

import shlex
import sys
import time
from typing import Annotated

import typer

from minitext import files
from minitext.cli.arguments import Json, RunDir, answer, start
from minitext.distributed.devices import simulate_for
from minitext.errors import UserError

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


def grpo(directory: RunDir, settings: Changes = None) -> None:
    """Let a run answer prompts and learn from rewards: minitext grpo RUN data.path=FILE.

    FILE is a .jsonl or .parquet with a prompt in each record, and what the reward reads, such as answer.
    objective.rewards=[{name: exact}] names functions of this package or of yours, as FILE.py:FUNCTION.
    """
    tune(directory, "grpo", settings or [])


def ppo(directory: RunDir, settings: Changes = None) -> None:
    """Do the same with a value head, which learns to expect rewards token by token: minitext ppo RUN data.path=FILE."""
    tune(directory, "ppo", settings or [])


def preview(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="whose tokenizer and template: a run, a Hugging Face folder, or byte",
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH] [KEY=VALUE]...",
            help=".jsonl or .parquet of conversations or pairs, then settings such as data.seq_len=512",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=0, max=10_000, help="rows to show")] = 2,
    as_json: Json = False,
) -> None:
    """Show what training would see of conversations: tokens, which of them are learned, and what is left out."""
    from minitext.data import preview
    from minitext.post_training import recipes
    from minitext.terminal import print_tables

    files.local_path(source)
    paths = [word for word in words or [] if "=" not in word]
    if len(paths) > 1:
        raise UserError(f"one PATH at most: got {', '.join(map(repr, paths))}")
    settings = [f"data.path={path}" for path in paths]
    settings += [word for word in words or [] if "=" in word]
    found = recipes.preview(source, settings, rows)
    answer(found, as_json, lambda found: print_tables(*preview.shown(found)))
    if not as_json:
        what = "pairs" if found.pairs else "conversations"
        print(f"{found.used:,} {what} in {found.total:,} rows to train on", file=sys.stderr)


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
    # Kept memory would be that of several steps, one for each thread: three times as much, and no faster.
    start(simulate, join=True)
    from minitext.distributed import job
    from minitext.post_training.tasks import task_of
    from minitext.training import run as training
    from minitext.training.stopping import Interrupted

    cfg = recipes.with_steps(cfg)
    heading = (
        f"{recipe} of {run}: {cfg.train.steps:,} steps of {cfg.train.global_batch} rows of "
        f"{cfg.data.seq_len:,} tokens, learning rate {cfg.optim.learning_rate:g}"
    )
    try:
        made = training.train(cfg, began=began, task=task_of(cfg), heading=heading)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        raise typer.Exit(stop.exit_code) from None
    if job.is_first():
        shown = shlex.quote(str(made))
        print(f"done; try: minitext generate {shown} --chat 'Hello'", file=sys.stderr)
