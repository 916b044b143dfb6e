"""Runs from MaxText's checkpoints, and MaxText's checkpoints from runs.

MaxText's checkpoints hold parameters and don't name their model; the words that describe it there, such as
`model_name=llama3.1-8b` or the run's config.yml, do so here. An import changes no number: the run's model gets the
settings under which these weights mean the same. A run that was trained here or comes from Hugging Face may have other
settings; an export then multiplies its weights by the scales that MaxText keeps in them.

Chapters: 27.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from minitext import files, terminal
from minitext.checkpoint import leaves
from minitext.checkpoint import maxtext as checkpoints
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config import maxtext_command, maxtext_model
from minitext.config.config import Config, resolve, to_yaml
from minitext.config.model import GQAConfig, ModelConfig
from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError
from minitext.models import convert, maxtext_names
from minitext.models.hf_keys import differences, logit_factor
from minitext.sharding.check import check_sizes
from minitext.sharding.mesh import make_mesh
from minitext.training import interchange
from minitext.training.run_dir import CHECKPOINTS, CONFIG, PUBLISHED, TOKENIZER, carry, load_merged
from minitext.training.step import abstract_state

KEPT, KEPT_LIMIT = "maxtext.json", 1 << 20  # in a run's folder `published`: the words for its model
SCALES = (
    "q_norm",
    "k_norm",
    "norm",
    "norm_attention",
    "norm_ffn",
    "norm_attention_out",
    "norm_ffn_out",
)


class Imported(NamedTuple):
    """What was imported.

    Attributes:
      parameters: how many numbers.
      block: MaxText's decoder_block.
      is_scanned: whether its layers were stacked.
      left: what else the checkpoint holds, such as opt_state, which stays behind.
      peak_bytes: the largest memory that this process has had.
    """

    parameters: int
    block: str
    is_scanned: bool
    left: list[str]
    peak_bytes: int


def import_run(
    source: Path | str,
    directory: Path | str,
    words: Sequence[str],
    settings: Sequence[str] = (),
    tokenizer: Path | str | None = None,
    allow_nonfinite: bool = False,
) -> Imported:
    """Makes a run directory of a MaxText checkpoint, whole or not at all.

    Args:
      source: the checkpoint: its folder, one step of it, or `items`.
      directory: the run directory to make.
      words: what describes the model in MaxText: `key=value`, or a YAML file.
      settings: `key=value` of ours, such as the mesh onto which the parameters are read.
      tokenizer: a Hugging Face folder with tokenizer.json; by default texts are bytes.
      allow_nonfinite: whether infinite numbers and NaN are read as they are.

    Raises:
      UserError: for a checkpoint that is damaged, or of another model than the words describe, or a directory that
        exists or can't be written.
    """
    target = Path(files.local_path(directory))
    if target.exists():
        raise UserError(f"{target} exists: name a directory that does not")
    reading = maxtext_command.settings(list(words))
    values = reading.values
    keys = maxtext_model.model_keys(values, exact=True)
    cfg = interchange.configuration(keys, settings)
    block, pairs = str(values["decoder_block"]), maxtext_model.interleaves(values)
    table = maxtext_names.table(cfg.model, block, pairs)
    if tokenizer is None and cfg.model.vocab < ByteTokenizer.vocab_size:
        raise UserError(
            f"vocab_size={cfg.model.vocab} is too small for bytes as tokens: give --tokenizer with a folder"
        )
    text = (
        interchange.read_folder_tokenizer(Path(files.local_path(tokenizer)))
        if tokenizer
        else ByteTokenizer()
    )
    axis = maxtext_model.whole(values, "param_scan_axis")
    with checkpoints.open_checkpoint(source, axis) as weights:
        mesh = make_mesh(cfg.mesh)
        check_sizes(cfg, mesh)
        like = abstract_state(cfg, mesh).params
        _check_layers(weights, table)
        with terminal.of_slow_work(weights.size, f"reading {weights.path.name}") as advance:
            params = convert.load(weights, table, like, advance, allow_nonfinite)
        kept = {key: values[key] for key in _of_the_model(values)}
        _write_run(target, cfg, params, text, kept, tokenizer)
        left, scanned = weights.left, weights.is_scanned
    count = sum(x.size for x in leaves.named(params).values())
    return Imported(count, block, scanned, left, interchange.peak_bytes())


def _of_the_model(values: dict[str, Any]) -> list[str]:
    """Returns MaxText's keys that `model_keys` or the checkpoint's layout read."""
    of_training = (
        "steps",
        "learning_rate",
        "ici_",
        "dcn_",
        "dataset",
        "adam_",
        "hf_",
        "run_",
        "checkpoint",
    )
    return [
        key for key, value in values.items() if not key.startswith(of_training) and _is_plain(value)
    ]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool) or (
        isinstance(value, list) and all(isinstance(x, str | int | float) for x in value)
    )


def _check_layers(weights: checkpoints.MaxTextWeights, table: convert.Table) -> None:
    """Refuses a checkpoint with more or fewer layers in one line about layers, before one about some tensor."""
    wanted = {name for row in table.rows for _, name in row.sources()}
    there = {name.split("/")[1] for name in weights.tensors if name.count("/") > 2}
    needed = {name.split("/")[1] for name in wanted if name.count("/") > 2}
    if there != needed and (there < needed or there > needed):
        raise UserError(
            f"{weights.path} has {len(there)} layers, and the model needs {len(needed)}: correct model_name or "
            "base_num_decoder_layers, or param_scan_axis"
        )


def _write_run(
    target: Path,
    cfg: Config,
    params: Any,
    tokenizer: Any,
    kept: dict[str, Any],
    folder: Path | str | None,
) -> None:
    try:
        with files.new_folder(target) as new:
            files.write(new / CONFIG, to_yaml(cfg))
            tokenizer.save(new / TOKENIZER)
            (new / PUBLISHED).mkdir()
            files.write(new / PUBLISHED / KEPT, json.dumps(kept, indent=2))
            if folder is not None:
                carry(Path(folder), new / PUBLISHED)
            largest = max(x.nbytes for x in leaves.named(params).values())
            with Checkpointer(new / CHECKPOINTS, at_once=largest) as checkpointer:
                checkpointer.save(0, {"params": params}, {}, cfg.model_dump(mode="json"), wait=True)
    except OSError as error:
        fix = "name a directory where one can be made"
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error


class Exported(NamedTuple):
    """What was exported.

    Attributes:
      step: of the run.
      items: the folder for MaxText's load_parameters_path.
      words: MaxText's keys of the model, those that differ from its defaults.
      is_exact: whether every number is as in the run.
    """

    step: int
    items: Path
    words: dict[str, Any]
    is_exact: bool


def export_run(
    directory: Path | str, target: Path | str, scanned: bool = True, dtype: str = "float32"
) -> Exported:
    """Writes a run's newest parameters as MaxText loads them, and beside them the keys of its model.

    The folder gets `0/items`, for load_parameters_path, and model.yml, MaxText's settings of the model.

    Args:
      directory: the run.
      target: the folder to make.
      scanned: whether layers are stacked, as MaxText's scan_layers=true has them.
      dtype: float32 or bfloat16.

    Raises:
      UserError: if MaxText has no block for the model, or the target exists or can't be written.
    """
    target = Path(files.local_path(target))
    if target.exists():
        raise UserError(f"{target} exists: name a directory that does not")
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype {dtype}: choose float32 or bfloat16")
    cfg, params, _, step = load_merged(directory)
    if cfg.model.is_stored:
        raise UserError(f"{directory} is quantized: export the run that it was made of")
    values, model, factors = describe(cfg.model, _kept(Path(directory)))
    if factors:
        params = multiplied(params, factors)
    block = values["decoder_block"]
    table = maxtext_names.table(model, block, maxtext_model.interleaves(values))
    stacks, cycle = maxtext_names.scan(model, block)
    axis = int(values["param_scan_axis"])
    layers = model.layers // 2 if block == "gemma2" else model.layers
    form = (stacks, cycle, layers) if scanned else None
    try:
        with files.new_folder(target) as new:
            arrays = stacked_arrays(table, params, form, axis, dtype)
            (new / "0").mkdir()
            checkpoints.write_checkpoint(new / "0" / "items", arrays)
            words = _differing(values) | {"scan_layers": scanned, "weight_dtype": dtype}
            said = {"base_config": "base.yml", "override_model_config": True} | words
            files.write(new / "model.yml", yaml.safe_dump(said, sort_keys=False))
    except OSError as error:
        fix = "name a directory where one can be made"
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error
    return Exported(step, target / "0" / "items", words, not factors)


def stacked_arrays(
    table: convert.Table,
    params: Any,
    scan: tuple[tuple[str, ...], int, int] | None,
    axis: int,
    dtype: str,
) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint by name.

    Args:
      table: of `maxtext_names.table`.
      params: the parameters.
      scan: what `maxtext_names.scan` says, and the number of layers there; None: layers aren't stacked.
      axis: along which they are.
      dtype: a key of `convert.DTYPES`.
    """
    shapes, arrays = convert.tensors(table, params), dict[str, np.ndarray]()
    parts = {n: checkpoints.stacked_name(n, *scan) if scan else checkpoints.Part(n) for n in shapes}
    heights: dict[str, int] = {}
    for part in parts.values():
        if part.index is not None:
            heights[part.array] = max(heights.get(part.array, 0), part.index + 1)
    with terminal.of_slow_work(len(shapes), "writing") as advance:
        for (name, shape), tensor in zip(
            shapes.items(), convert.values(table, params, advance), strict=True
        ):
            part, numbers = parts[name], convert.rounded(tensor, dtype)
            if part.index is None:
                arrays[part.array] = numbers
                continue
            if part.array not in arrays:
                stacked = (*shape[:axis], heights[part.array], *shape[axis:])
                arrays[part.array] = np.empty(stacked, numbers.dtype)
            arrays[part.array][(slice(None),) * axis + (part.index,)] = numbers
    return arrays


def _kept(directory: Path) -> dict[str, Any] | None:
    path = directory / PUBLISHED / KEPT
    if not path.is_file():
        return None
    found = files.read_json(path, KEPT_LIMIT)
    return found if isinstance(found, dict) and "decoder_block" in found else None


def _differing(values: dict[str, Any]) -> dict[str, Any]:
    defaults = maxtext_model.facts()["defaults"]
    return {
        key: value for key, value in values.items() if key not in defaults or defaults[key] != value
    }


Factors = dict[
    str, tuple[float, float]
]  # end of a parameter's path -> what multiplies it, then what is added


def describe(
    model: ModelConfig, kept: dict[str, Any] | None = None
) -> tuple[dict[str, Any], ModelConfig, Factors]:
    """Returns MaxText's keys for a model, the same model with MaxText's scales, and what makes the weights its own.

    Args:
      model: the model.
      kept: the keys with which it came from MaxText, if it did.

    Raises:
      UserError: if none of MaxText's blocks has the model, naming what is in the way.
    """
    defaults = maxtext_model.facts()["defaults"]
    if kept is not None:
        values = defaults | kept
        try:
            if not differences(model, _model(values)):
                return values, model, {}
        except UserError:
            pass  # settings have changed since
    closest: tuple[int, str] | None = None
    for block in maxtext_model.likely_blocks(model):
        scaled, factors = _rescaled(model, block)
        values = defaults | maxtext_model.values_of(scaled, block)
        try:
            wrong = differences(scaled, _model(values))
        except UserError as error:
            wrong = [str(error)]
        if not wrong:
            return values, scaled, factors
        if closest is None or len(wrong) < closest[0]:
            closest = len(wrong), f"{block} lacks {', '.join(wrong)}"
    raise UserError(f"no block of MaxText's has this model: {closest[1] if closest else ''}")


def _model(values: dict[str, Any]) -> ModelConfig:
    return resolve([("MaxText", maxtext_model.model_keys(values, exact=True))]).model


def _rescaled(model: ModelConfig, block: str) -> tuple[ModelConfig, Factors]:
    """Returns the model with the scales that MaxText's block has, and what its weights are multiplied by for that."""
    factors: Factors = {}
    update: dict[str, Any] = {}
    a, embed, logits = model.attention, model.embed_scale or 1.0, logit_factor(model)
    if isinstance(a, GQAConfig) and block in maxtext_model.FOLDED:
        scale = a.scale or model.H**-0.5
        if scale != 1.0:
            factors |= {"attention.q.w": (scale, 0.0), "attention.q.b": (scale, 0.0)}
        update["attention"] = a.model_copy(update={"scale": 1.0})
    if embed != 1.0:
        factors["embed.table"] = embed, 0.0
        update["embed_scale"] = None
    if model.norm_offset:
        factors |= {f"{name}.scale": (1.0, 1.0) for name in SCALES}
        update["norm_offset"] = False
    if not model.tie_embeddings:
        update["logit_scale"] = None
        if logits != 1.0:
            factors["unembed.w"] = logits, 0.0
    else:
        rest = logits / embed  # the table's factor is in the logits too
        update["logit_scale"] = 1.0 if rest == 1.0 else None
        over = 1.0 if rest == 1.0 else rest * model.embed**0.5
        if abs(over - 1) > 1e-6:
            offset = factors.get("norm.scale", (1.0, 0.0))[1]
            factors["final norm.scale"] = over, offset * over
    return model.model_copy(update=update), factors


def multiplied(params: Any, factors: Factors) -> Any:
    """Returns parameters multiplied, and shifted, as `describe` says."""
    import jax

    def of(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        if name == "norm.scale" and "final norm.scale" in factors:
            times, more = factors["final norm.scale"]
            return x * times + more
        for end, (times, more) in factors.items():
            if name == end or name.endswith(f".{end}"):
                return x * times + more
        return x

    return jax.tree_util.tree_map_with_path(of, params)
