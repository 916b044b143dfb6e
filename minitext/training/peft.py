"""Adapters to and from the files of Hugging Face's peft: adapter_config.json and adapter_model.safetensors.

Chapters: 26.
"""

import json
from pathlib import Path

import jax
import numpy as np

from minitext import files
from minitext.checkpoint import safetensors
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.checkpoint.weights import open_weights
from minitext.config.config import Config, to_yaml
from minitext.data.tokenizer import load_tokenizer
from minitext.errors import UserError
from minitext.models import convert, families, peft_names
from minitext.sharding.mesh import make_mesh
from minitext.training import base, model_card
from minitext.training.interchange import CONFIG_LIMIT, longest_text
from minitext.training.run_dir import (
    CHECKPOINTS,
    CONFIG,
    PUBLISHED,
    TOKENIZER,
    carry_published,
    nothing_saved,
    read_config,
    read_parameters,
)
from minitext.training.step import abstract_state

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_peft(
    directory: Path | str, target: Path | str, licence: str = model_card.UNKNOWN
) -> int:
    """Writes a run's newest adapters as a folder that peft and vLLM read, whole or not at all; with a model card.

    Returns:
      The step that was exported.

    Raises:
      UserError: if the run has no adapters, or ones that the family has no names for; or the target exists or can't be
        written.
    """
    directory, target = Path(directory), Path(files.local_path(target))
    if target.exists():
        raise UserError(f"{target} exists: name a directory that does not")
    cfg = read_config(directory)
    if not cfg.model.lora.rank:
        raise UserError(f"{directory} has no adapters: export it with --format hf")
    family = _family(cfg, directory)
    table = peft_names.table(cfg.model, family)
    restored = read_parameters(directory, cfg, make_mesh(devices=jax.devices()[:1]))
    params = restored.state["params"]
    tensors = {
        name: (shape, convert.DTYPES["float32"])
        for name, shape in convert.tensors(table, params).items()
    }
    try:
        with files.new_folder(target) as new:
            said = peft_names.describe(cfg.model, family)
            files.write(new / SETTINGS, json.dumps(said, indent=2))
            arrays = (np.asarray(x, np.float32) for x in convert.values(table, params))
            safetensors.write(new / WEIGHTS, tensors, arrays, {"format": "pt"})
            size, stored = model_card.measure(params)
            card = model_card.card(
                directory, cfg, restored.step, form="peft", size=size, dtype=stored, licence=licence
            )
            files.write(new / model_card.CARD, card)
    except OSError as error:
        fix = "name a directory where one can be made"
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error
    return restored.step


def import_peft(source: Path | str, directory: Path | str, beside: Path | str) -> int:
    """Makes a run directory of adapters in peft's format, whole or not at all.

    Args:
      source: the folder with them.
      directory: the run directory to make.
      beside: the run whose newest weights they are for.

    Returns:
      How many numbers they are.

    Raises:
      UserError: for files that are damaged or not understood, or adapters of another model.
    """
    source, beside = Path(files.local_path(source)), Path(beside)
    target = Path(files.local_path(directory))
    if target.exists():
        raise UserError(f"{target} exists: name a directory that does not")
    values = files.read_json(source / SETTINGS, CONFIG_LIMIT)
    if not isinstance(values, dict):
        raise UserError(f"{source / SETTINGS} has no keys with values: copy it again")
    theirs = read_config(beside)
    family = _family(theirs, beside)
    with open_weights(source / WEIGHTS) as weights:
        try:
            lora = peft_names.lora_config(values, weights.names(), theirs.model, family)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
        cfg = theirs.replace({
            "model.lora.rank": lora.rank, "model.lora.alpha": lora.alpha, "model.lora.modules": lora.modules,
            "checkpoint.load_parameters": str(beside), "checkpoint.load_full_state": None,
        })  # fmt: skip
        like = abstract_state(cfg, make_mesh(devices=jax.devices()[:1])).params
        params = convert.load(weights, peft_names.table(cfg.model, family), like)
    with Checkpointer(beside / CHECKPOINTS) as checkpointer:
        step = checkpointer.latest()
    if step is None:
        raise nothing_saved(beside)
    try:
        with files.new_folder(target) as new:
            files.write(new / CONFIG, to_yaml(cfg))
            load_tokenizer(beside / TOKENIZER).save(new / TOKENIZER)
            carry_published(beside, new)
            base.write(new, base.identify(beside / CHECKPOINTS / str(step), step))
            with Checkpointer(new / CHECKPOINTS) as checkpointer:
                config = cfg.model_dump(mode="json")
                checkpointer.save(0, {"params": params}, {}, config, wait=True)
    except OSError as error:
        fix = "name a directory where one can be made"
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error
    return sum(x.size for x in jax.tree.leaves(params))


def _family(cfg: Config, directory: Path) -> str:
    """Returns the names that a run's model has elsewhere: those it came with, if it was imported."""
    came, first = directory / PUBLISHED, "llama"
    if (came / "config.json").exists():
        first = families.family_of(files.read_json(came / "config.json", CONFIG_LIMIT))
    plain = peft_names.plain(cfg.model)
    return families.to_hf(plain, longest_text(cfg, came), first)["model_type"]
