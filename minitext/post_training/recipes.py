"""The configuration of a run that begins with another run's model.

A recipe is a YAML file of settings in `minitext/config/presets/recipes`, such as sft. It lies over what the new run
takes from the old one (its model, mesh and layout of parameters) and under the words of the command line.

Chapters: 26.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minitext.config.config import Config, flatten, load_recipe
from minitext.config.data import CHATS
from minitext.data.batches import make_batches
from minitext.data.chat import open_template
from minitext.data.preview import Preview, with_kind
from minitext.data.preview import preview as make_preview
from minitext.data.tokenizer import ByteTokenizer, load_tokenizer
from minitext.errors import UserError
from minitext.files import local_path
from minitext.training.interchange import longest_text, read_folder_tokenizer
from minitext.training.run_dir import (
    CONFIG,
    PUBLISHED,
    TOKENIZER,
    open_chat,
    open_tokenizer,
    read_config,
)

# What a new run takes from the one it begins with: the model, and how it's laid out and computed.
TAKEN = (
    "model.", "mesh.", "sharding.", "pipeline.", "data.seq_len", "data.tokenizer", "train.loss_chunks",
    "train.loss_impl",
)  # fmt: skip
LONGEST_ROW = 512  # of a run from a published model, which says how long its texts may be, unless data.seq_len is given
# Adapters want about ten times the learning rate of all weights (Schulman et al. 2025, "LoRA Without Regret").
ADAPTERS_RATE = 10
WARMUP_SHARE = 0.05  # of the steps, unless optim.warmup_steps is given


def new_config(run: Path | str, recipe: str, words: Sequence[str]) -> Config:
    """Resolves the configuration of a run that begins with another run's parameters.

    Args:
      run: the run, import or export to begin with.
      recipe: name of a recipe, such as sft.
      words: `key=value` of the command line.

    Returns:
      The configuration, with `checkpoint.load_parameters=RUN` and, by default, `run.name=RUN-RECIPE`.

    Raises:
      UserError: if `run` is no run directory.
      ConfigError: for a setting that can't be used.
    """
    local_path(run)
    for word in words:
        if word.startswith("config="):  # before the run is read
            local_path(word.partition("=")[2])
    if preset := [word for word in words if "=" not in word]:
        raise UserError(
            f"{preset[0]!r} is not key=value: the settings come from {run} and the recipe {recipe}"
        )
    directory, theirs = Path(run), read_config(run)
    taken = flatten(theirs.model_dump()).items()
    start: dict[str, Any] = {key: value for key, value in taken if key.startswith(TAKEN)}
    longest = min(longest_text(theirs, directory / PUBLISHED), LONGEST_ROW)
    start["data.seq_len"] = max(theirs.data.seq_len, longest)
    start["run.name"] = f"{directory.resolve().name}-{recipe}"
    start["checkpoint.load_parameters"] = str(directory)
    given = {word.partition("=")[0].strip() for word in words}
    # A number of steps is enough to say how long; then the recipe's epochs are no limit.
    limit = ["data.epochs=null"] if "train.steps" in given and "data.epochs" not in given else []
    cfg = load_recipe(recipe, [*limit, *words], start, f"run {run}")
    if cfg.data.source in CHATS and cfg.data.tokenizer != theirs.data.tokenizer:
        raise UserError(
            f"data.tokenizer={cfg.data.tokenizer} would have no effect, since conversations are read with the "
            f"tokenizer of {run}: leave it out"
        )
    key = "optim.learning_rate"
    if cfg.model.lora.rank and cfg.provenance(key) == f"recipe {recipe}":
        return cfg.replace({key: ADAPTERS_RATE * cfg.optim.learning_rate})
    return cfg


def preview(source: str, words: Sequence[str], rows: int) -> Preview:
    """Returns what training from a model would see of conversations.

    Args:
      source: whose tokenizer and template: a run, a Hugging Face folder, or `byte`.
      words: `key=value` of the command line; unless they have data.source, the first record says what the data is.
      rows: how many rows to return.

    Raises:
      UserError: if the source or the data can't be read.
    """
    given = {word.partition("=")[0].strip() for word in words}
    if source == "byte":
        cfg = load_recipe("sft", words, {}, "")
        tokenizer, folder = ByteTokenizer(), None
    elif (Path(source) / CONFIG).exists():
        cfg, folder = new_config(source, "sft", words), Path(source) / PUBLISHED
        tokenizer = load_tokenizer(Path(source) / TOKENIZER)
    else:
        cfg, folder = load_recipe("sft", words, {}, ""), Path(source)
        tokenizer = read_folder_tokenizer(folder)
    data = cfg.data if "data.source" in given else with_kind(cfg.data)
    return make_preview(data, tokenizer, open_template(data, tokenizer, folder), rows)


def with_steps(cfg: Config) -> Config:
    """Sets train.steps to the steps of `data.epochs` passes over the data, and a share of them as warm-up.

    What the command line or a file says stays. Reads and tokenizes the data, once for this and the run.

    Raises:
      UserError: if the data can't be read, or nothing of it is left to train on.
    """
    values: dict[str, Any] = {}
    steps = cfg.train.steps
    if cfg.provenance("train.steps") == "default" and cfg.data.epochs is not None:
        directory = Path(cfg.run.dir) / str(cfg.run.name)
        tokenizer = open_tokenizer(cfg, directory)
        batches = make_batches(
            cfg.data, vocab=cfg.model.vocab, global_batch=cfg.train.global_batch,
            tokenizer=tokenizer, chat=open_chat(cfg, directory, tokenizer),
        )  # fmt: skip
        steps = batches.left() or steps
        batches.close()
        values["train.steps"] = steps
    if cfg.provenance("optim.warmup_steps") == "default":
        values["optim.warmup_steps"] = math.ceil(WARMUP_SHARE * steps)
    return cfg.replace(values)
