"""A run as an artefact: what `minitext export --format stablehlo` writes, to run anywhere that JAX is."""

import json
from pathlib import Path
from typing import Any

from minitext import files
from minitext.config.config import Config
from minitext.data.chat import read_chat
from minitext.data.tokenizer import Tokenizer
from minitext.training import model_card
from minitext.training.interchange import longest_text
from minitext.training.run_dir import CARRIED, CARRIED_LIMIT, PUBLISHED, load_merged


def export_artefact(
    directory: Path | str, target: Path | str, licence: str = model_card.UNKNOWN
) -> int:
    """Writes a run's newest parameters and the programs that generate text with them, whole or not at all.

    Args:
      directory: the run.
      target: the folder to make.
      licence: for the model card, README.md.

    Returns:
      The step that was exported.

    Raises:
      UserError: if the model can't be exported (`text_functions`), or the target exists or can't be written.
    """
    from minitext.inference import artefact, export
    from minitext.inference.shipped import generate

    cfg, params, tokenizer, step = load_merged(directory)
    functions, weights = export.text_functions(cfg.model, params)
    came = Path(directory) / PUBLISHED
    size, stored = model_card.measure(weights)
    card = model_card.card(
        directory, cfg, step, form="stablehlo", size=size, dtype=stored, licence=licence
    )
    program = Path(generate.__file__).read_text(encoding="utf-8")
    beside = {model_card.CARD: card, "generate.py": program, **tokenizer_files(came, tokenizer)}
    said = {**describe(cfg, came, tokenizer), "max_length": export.max_length(cfg.model)}
    artefact.save(
        target,
        functions,
        weights,
        name=Path(directory).resolve().name,
        version=str(step),
        about={"text": said},
        beside=beside,
    )
    return step


def describe(cfg: Config, came: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what a manifest says of a language model, apart from its arrays.

    Args:
      cfg: the run's configuration.
      came: the run's folder `published`, which may be missing.
      tokenizer: the run's.
    """
    chat = read_chat(came, tokenizer)
    return {
        "vocabulary": cfg.model.vocab,
        "context_length": longest_text(cfg, came),
        "end_token": tokenizer.eod_id,
        "stop_tokens": sorted({tokenizer.eod_id, *chat.stops}),
        "tokenizer": "tokenizer.json",
        "chat_template": chat.template,
    }


def tokenizer_files(came: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the files of a Hugging Face folder that hold tokenizer and chat template: name -> text."""
    names = [name for name in CARRIED if (came / name).is_file()]
    found = {name: files.read_text(came / name, CARRIED_LIMIT) for name in names}
    end = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.published_end()}
    made = {
        "tokenizer.json": json.dumps(tokenizer.published()),
        "tokenizer_config.json": json.dumps(end, indent=2),
    }
    return made | found
