"""A trained run becomes one whose weights are stored in fewer bits.

Parameters are read one after another, and each is quantized a layer at a time. So the memory is that of the new run's
parameters, and of a few copies of the largest old one.

Chapters: 25.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import ValidationError

from minitext import files, terminal
from minitext.checkpoint import leaves, stored
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config import yaml_text
from minitext.config.config import Config
from minitext.config.quantization import STORAGE_PRESETS, StorageRule
from minitext.data.tokenizer import load_tokenizer
from minitext.errors import UserError, did_you_mean, rule_of
from minitext.models.gptq import store_calibrated
from minitext.models.quantization import Quantized
from minitext.models.quantized_storage import PACKED, StoredWeight, restore, store, stored_weights
from minitext.models.transformer import Transformer
from minitext.sharding.mesh import make_mesh
from minitext.training import calibration
from minitext.training.run_dir import (
    CHECKPOINTS,
    TOKENIZER,
    load_run,
    nothing_saved,
    read_config,
    write_parameters,
)
from minitext.training.step import abstract_state

PARAMS = "params."  # what names of parameters in a checkpoint begin with


class StoredError(NamedTuple):
    """How well a weight is stored, over all layers of its stack.

    Attributes:
      weight: the path of its module and its name, such as blocks/ffn/gate/w.
      kind: the type of the stored numbers, or float32.
      numbers: how many.
      before: bytes in float32.
      after: bytes as stored.
      error: the distance of the stored weight from the float32 one, in parts of its length; 0 if it is as it was.
      worst: the same of the layer with the largest.
      layer: the number of this layer in its stack; None of a weight that isn't stacked.
    """

    weight: str
    kind: str
    numbers: int
    before: int
    after: int
    error: float = 0.0
    worst: float = 0.0
    layer: int | None = None


def read_rules(text: str) -> tuple[StorageRule, ...]:
    """Returns storage rules by the name of a preset, from a YAML file, or from YAML itself.

    Args:
      text: a name of `STORAGE_PRESETS`, a path that ends in .yml or .yaml, or such as `[{module: .*, dtype: int8}]`.

    Raises:
      UserError: if it is none of these, or a rule is wrong.
    """
    if text in STORAGE_PRESETS:
        return STORAGE_PRESETS[text]
    said, where = text, "--rules"
    if text.endswith((".yml", ".yaml")):
        where = files.shorten(text)
        said = files.read_text(Path(files.local_path(text)), yaml_text.LIMIT)
    try:
        found = yaml_text.parse(said)
    except yaml_text.BadYAML as error:
        raise UserError(f"--rules {files.shorten(text)} {error}: correct it") from error
    known = ", ".join(STORAGE_PRESETS)
    if isinstance(found, str):
        hint = did_you_mean(found, STORAGE_PRESETS)
        raise UserError(
            f"--rules {files.shorten(found)}: no preset has this name{hint}: choose among {known}, or write rules "
            "such as '[{module: blocks/.*, dtype: int4, block: 32}]'"
        )
    if not isinstance(found, list) or not found or not all(isinstance(x, dict) for x in found):
        raise UserError(
            f"{where}: {files.shorten(said)} is not a list of rules: write one such as "
            "'[{module: blocks/.*, dtype: int4, block: 32}]'"
        )
    rules = []
    for number, rule in enumerate(found):
        try:
            rules.append(StorageRule.model_validate(rule))
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            reason = rule_of(problem)
            if problem["type"] == "extra_forbidden":
                reason = f"unknown key{did_you_mean(key, StorageRule.model_fields)}"
            value = f"{key}={files.shorten(str(problem['input']))}: " if key else ""
            raise UserError(f"{where}: rule {number}: {value}{reason}") from error
    return tuple(rules)


def quantize_run(
    directory: Path | str,
    target: Path | str,
    rules: Sequence[StorageRule],
    calibrate: str | None = None,
) -> list[StoredError]:
    """Makes a run directory whose weights are stored as rules say, whole or not at all.

    Args:
      directory: a run with float32 weights.
      target: the run directory to make.
      rules: as in `model.storage`.
      calibrate: a text file, or `calibration.OWN` for the run's own text: projections in 4 bits are rounded for what
        they see in it (`minitext.models.gptq`), for which the whole model and its inputs' moments are in memory. None:
        every weight is rounded to the nearest number.

    Returns:
      A row for each parameter, in the order of the checkpoint.

    Raises:
      UserError: if a rule doesn't fit the model, a weight is infinite or NaN, the run is quantized already, has
        adapters or holds no usable checkpoint, or the target exists or can't be written.
    """
    target = Path(files.local_path(target))
    if target.exists():
        raise UserError(f"{target} exists: name a directory that does not")
    cfg = read_config(directory)
    if cfg.model.lora.rank:
        raise UserError(
            f"{directory} has adapters alone, beside the weights of another run: export it, which adds them to these, "
            "and quantize what is exported"
        )
    there = stored_config(cfg, rules, str(directory))
    mesh = make_mesh(devices=jax.devices()[:1])
    like = abstract_state(there, mesh).params
    weights, values, rows = abstract_weights(there), {}, []
    tokenizer = load_tokenizer(Path(directory) / TOKENIZER)
    moments = {} if calibrate is None else _moments(directory, calibrate, weights)
    with Checkpointer(Path(directory) / CHECKPOINTS) as checkpointer:
        whole = {"params": abstract_state(cfg, mesh).params}
        if (found := checkpointer.read_each(whole)) is None:
            raise nothing_saved(directory)
        step, parameters = found
        total, done = sum(x.size for x in jax.tree.leaves(whole)), 0
        with terminal.of_slow_work(total, f"quantizing {directory}") as advance:
            for name, w in parameters:
                name = name.removeprefix(PARAMS)
                made, row = quantize_parameter(name, w, weights.get(name), moments.get(name))
                values |= made
                rows.append(row)
                advance(done := done + w.size)
    params = leaves.rebuild(like, values)
    write_parameters(directory, target, there, params, tokenizer, step)
    return rows


def stored_config(cfg: Config, rules: Sequence[StorageRule], directory: str) -> Config:
    """Returns a run's configuration with its weights stored as rules say, and no products quantized.

    Raises:
      UserError: if they are stored in fewer bits already.
    """
    if cfg.model.is_stored:
        raise UserError(
            f"{directory} is quantized already: name the run that it was made of, whose weights are float32"
        )
    model = cfg.model.model_copy(update={"storage": tuple(rules), "quantization": ()})
    return cfg.model_copy(update={"model": model})


def abstract_weights(cfg: Config) -> dict[str, StoredWeight]:
    """Returns the weights that a model stores in fewer bits, by their names in a checkpoint, without their numbers."""
    model = nnx.eval_shape(lambda: Transformer(cfg.model, rngs=nnx.Rngs(0)))
    return {path.replace("/", "."): weight for path, weight in stored_weights(model)}


def quantize_parameter(
    name: str, w: np.ndarray, weight: StoredWeight | None, moments: np.ndarray | None = None
) -> tuple[dict[str, Any], StoredError]:
    """Quantizes a parameter, a layer at a time.

    Args:
      name: in the checkpoint.
      w: float32, perhaps with a leading dimension of layers.
      weight: how it is stored; None: as it is.
      moments: of its inputs in each layer, [L, D, D], to be rounded for; None: to the nearest number.

    Returns:
      What the new checkpoint has, by name, and the parameter's row in the table.

    Raises:
      UserError: if a number is infinite or NaN.
    """
    path = name.replace(".", "/")
    if weight is None:
        return {name: w}, StoredError(path, str(w.dtype), w.size, w.nbytes, w.nbytes)
    if stored.has_nonfinite(w):
        raise UserError(
            f"{name} has numbers that are NaN or infinite, which have no scale: exempt it with --rules "
            f"'[{{module: {path.rpartition('/')[0]}, dtype: none}}, ...]', or use an earlier checkpoint"
        )
    one = partial(_quantize_layer, kind=weight.kind, block=weight.block, axis=weight.axis)
    is_stacked = w.ndim > len(weight.axes)
    layers = w if is_stacked else w[None]
    seen = [None] * len(layers) if moments is None else moments
    made = [jax.device_get(one(*pair)) for pair in zip(layers, seen, strict=True)]
    parts = [
        np.stack(part) if is_stacked else part[0]
        for part in zip(*(m[0] for m in made), strict=True)
    ]
    squares = np.array([m[1] for m in made], np.float64)
    errors = np.sqrt(squares[:, 0] / np.maximum(squares[:, 1], np.finfo(np.float64).tiny))
    total = np.sqrt(squares[:, 0].sum() / max(squares[:, 1].sum(), np.finfo(np.float64).tiny))
    row = StoredError(
        path, weight.kind, w.size, w.nbytes, sum(part.nbytes for part in parts),
        float(total), float(errors.max()), int(errors.argmax()) if is_stacked else None,
    )  # fmt: skip
    return dict(zip((f"{name}.values", f"{name}.scale"), parts, strict=True)), row


def _quantize_layer(
    w: np.ndarray, moments: np.ndarray | None, *, kind: str, block: int | None, axis: int
) -> tuple[Quantized, jax.Array]:
    """Returns a layer's weight as stored, and the squared lengths of the error and of the weight."""
    w_DF = jnp.asarray(w)
    if moments is None:
        found = _store(w_DF, kind=kind, block=block, axis=axis)
    else:
        found = store_calibrated(w_DF, moments, kind=kind, block=block)
    return found, _squares(w_DF, found, kind=kind, block=block, axis=axis)


_store = jax.jit(store, static_argnames=("kind", "block", "axis"))


@partial(jax.jit, static_argnames=("kind", "block", "axis"))
def _squares(w: jax.Array, found: Quantized, *, kind: str, block: int | None, axis: int):
    error = w - restore(found, kind, w.shape[axis], block, axis)
    return jnp.stack([jnp.sum(error**2), jnp.sum(w**2)])


def _moments(
    directory: Path | str, source: str, weights: Mapping[str, StoredWeight]
) -> dict[str, np.ndarray]:
    """Returns the moments of the inputs of projections in 4 bits, by their names."""
    named = [name for name, weight in weights.items() if weight.kind in PACKED and weight.block]
    useless = UserError(
        "--calibrate has no effect: it rounds projections in blocks of 4 bits, such as --rules int4"
    )
    if not named:
        raise useless
    cfg, params, tokenizer, _ = load_run(directory)
    found = calibration.input_moments(cfg, params, calibration.read_rows(source, cfg, tokenizer))
    if not (kept := {name: moments for name, moments in found.items() if name in named}):
        raise useless
    return kept


def print_errors(rows: Sequence[StoredError]) -> None:
    """Prints a row for each weight, with those that stayed as they were together, and the sizes, on stdout."""

    def cells(row: StoredError) -> tuple[str, ...]:
        worst = f"{row.worst:.3%}" + ("" if row.layer is None else f" (layer {row.layer})")
        sizes = terminal.show_bytes(row.before), terminal.show_bytes(row.after)
        return row.weight, row.kind, f"{row.numbers:,}", *sizes, f"{row.error:.3%}", worst

    kept = [row for row in rows if row.kind == "float32"]
    table = [cells(row) for row in rows if row.kind != "float32"]
    if kept:
        size = terminal.show_bytes(sum(row.after for row in kept))
        table.append(
            ("others", "float32", f"{sum(r.numbers for r in kept):,}", size, size, "0", "")
        )
    heads = ("weight", "stored as", "numbers", "before", "after", "error", "worst layer")
    terminal.print_tables(terminal.table(heads, table, right=(2, 3, 4, 5)))
    before, after = sum(row.before for row in rows), sum(row.after for row in rows)
    bits = 8 * after / sum(row.numbers for row in rows)
    print(
        f"{terminal.show_bytes(before)} became {terminal.show_bytes(after)}: {before / after:.2f} times smaller, "
        f"{bits:.2f} bits for each number"
    )


class Scheme(NamedTuple):
    """What a way to store a run's weights costs and keeps.

    Attributes:
      name: of the preset.
      bytes: of all parameters.
      loss: nats per token of the text.
      perplexity: of it.
    """

    name: str
    bytes: int
    loss: float
    perplexity: float


def sweep(
    directory: Path | str, text: str | None = None, calibrate: str | None = None
) -> list[Scheme]:
    """Measures a run's perplexity with its weights in float32 and as each of `STORAGE_PRESETS` stores them.

    Args:
      directory: a run with float32 weights.
      text: a text file to measure; None: the run's validation text. At most `calibration.ROWS` rows of data.seq_len
        tokens are read.
      calibrate: as in `quantize_run`; then presets with 4 bits are also measured calibrated.

    Raises:
      UserError: what `quantize_run` raises, or if the text can't be read.
    """
    cfg = read_config(directory)
    for rules in STORAGE_PRESETS.values():
        stored_config(cfg, rules, str(directory))
    _, params, tokenizer, _ = load_run(directory)
    rows_BT = calibration.read_rows(text or calibration.VALIDATION, cfg, tokenizer)
    moments: dict[str, np.ndarray] = {}
    if calibrate is not None:
        seen = calibration.read_rows(calibrate, cfg, tokenizer)
        moments = calibration.input_moments(cfg, params, seen)
    tried: list[tuple[str, tuple[StorageRule, ...], dict[str, np.ndarray]]] = [("float32", (), {})]
    for name, rules in STORAGE_PRESETS.items():
        tried.append((name, rules, {}))
        if moments and any(rule.dtype in PACKED for rule in rules):
            tried.append((f"{name} calibrated", rules, moments))
    found = []
    with terminal.of_slow_work(len(tried), "measuring") as advance:
        for number, (name, rules, seen) in enumerate(tried):
            there = stored_config(cfg, rules, str(directory))
            stored_params = store_parameters(there, params, seen)
            size = sum(x.nbytes for x in jax.tree.leaves(stored_params))
            loss = _loss(there, stored_params, rows_BT)
            found.append(Scheme(name, size, loss, float(np.exp(loss))))
            advance(number + 1)
    return found


def store_parameters(cfg: Config, params: Any, moments: Mapping[str, np.ndarray] = {}) -> Any:
    """Returns float32 parameters as `model.storage` of a configuration stores them.

    Args:
      cfg: the configuration of the stored run.
      params: parameters in memory.
      moments: as `calibration.input_moments` returns them, for the weights that are to be rounded for them.

    Raises:
      UserError: if a number is infinite or NaN.
    """
    model = nnx.eval_shape(lambda: Transformer(cfg.model, rngs=nnx.Rngs(0)))
    weights, values = abstract_weights(cfg), {}
    for name, w in leaves.named(params).items():
        weight = weights.get(name)
        is_packed = weight is not None and weight.kind in PACKED and weight.block is not None
        seen = moments.get(name) if is_packed else None
        values |= quantize_parameter(name, np.asarray(w), weight, seen)[0]
    return leaves.rebuild(nnx.state(model), values)


def _loss(cfg: Config, params: Any, rows_BT: np.ndarray) -> float:
    """Returns the mean loss of the tokens after each row's first, in nats."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg.model, rngs=nnx.Rngs(0))))

    @jax.jit
    def total(params, rows_BT):
        logits_BTV = nnx.merge(graphdef, params)(rows_BT[:, :-1])
        return -jnp.sum(
            jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), rows_BT[:, 1:, None], axis=2)
        )

    sums = [float(total(params, jnp.asarray(row[None]))) for row in rows_BT]
    return sum(sums) / (rows_BT.shape[0] * (rows_BT.shape[1] - 1))


def print_sweep(found: Sequence[Scheme]) -> None:
    """Prints a row for each scheme on stdout."""
    rows = [
        (
            s.name, terminal.show_bytes(s.bytes), f"{found[0].bytes / s.bytes:.2f}x", f"{s.loss:.4f}",
            f"{s.perplexity:.3f}", f"{s.perplexity / found[0].perplexity - 1:+.2%}",
        )
        for s in found
    ]  # fmt: skip
    heads = ("stored as", "bytes", "smaller", "loss", "perplexity", "against float32")
    terminal.print_tables(terminal.table(heads, rows, right=(1, 2, 3, 4, 5)))
