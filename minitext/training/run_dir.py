"""A run directory: what is in it, whether it can be resumed, and how to read it.

    runs/NAME/
      config.yml       the resolved configuration; `minitext train config=runs/NAME/config.yml` resumes
      tokenizer.json   to generate text where the training text isn't
      published/       of a model that was imported: the files that it came with besides its weights
      metrics.jsonl    one object a step
      events.jsonl     where the time went (`minitext.observability.goodput`)
      profile/         a trace of some steps, if asked for (`minitext.observability.profiler`)
      tensorboard/     the same as TensorBoard events
      samples.txt      text sampled at the start, middle and end
      lock             who trains here (`minitext.training.claim`)
      checkpoints/     state, position in the data and configuration, by step
      base.json        the checkpoint that adapters or the objective need (`minitext.training.base`)

Chapters: 6, 8, 26.
"""

import contextlib
import dataclasses
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from minitext import files, terminal
from minitext.checkpoint.checkpointer import Checkpointer, Restored
from minitext.config.config import Config, flatten, load_config, to_yaml
from minitext.config.data import CHATS
from minitext.data.batches import Batches, make_batches
from minitext.data.chat import Chat, open_template, read_chat
from minitext.data.rows import make_tokenizer
from minitext.data.tokenizer import PublishedTokenizer, Tokenizer, load_tokenizer
from minitext.distributed import job
from minitext.errors import UserError
from minitext.models.lora import merge, merged_config, without_lora
from minitext.sharding.mesh import make_mesh
from minitext.training import base, model_card
from minitext.training.capacity import check_memory
from minitext.training.step import (
    TrainState,
    abstract_state,
    init_state,
    make_eval_step,
    model_def,
)

CONFIG, TOKENIZER, CHECKPOINTS, PUBLISHED = (
    "config.yml",
    "tokenizer.json",
    "checkpoints",
    "published",
)
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
CARRIED_LIMIT = 64 << 20  # bytes of a file; the largest tokenizers have 33 MB

# What may change when a run resumes: how long and how it trains, not the model or the data.
RESUMABLE = (
    "train.steps", "data.epochs", "train.save_every", "train.eval_every", "train.eval_batches",
    "train.sample_tokens", "train.microbatches", "train.on_nan", "train.hang_seconds",
    "train.executable", "model.scan_layers", "model.remat", "model.attention.impl",
    "model.attention.context", "optim.", "mesh.", "sharding.", "checkpoint.", "profile.", "run.",
)  # fmt: skip


# What may change when a run is evaluated: the data, and how the loss is computed, not what it is.
EVALUABLE = (
    "data.", "train.global_batch", "train.loss_chunks", "train.loss_impl", "model.dtype", "model.attention.impl",
)  # fmt: skip


def resume_command(directory: Path | str) -> str:
    """Returns the command that resumes a run, as a shell takes it."""
    return f"minitext train {shlex.quote(f'config={Path(directory) / CONFIG}')}"


def read_config(directory: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Reads a run's configuration, with overrides on top.

    Raises:
      UserError: if the directory is no run directory.
    """
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise UserError(
            f"{directory} is not a run directory (it has no {CONFIG}): name one, such as runs/NAME"
        )
    return load_config(None, [f"config={path}", *overrides])


def check_same_run(cfg: Config, directory: Path) -> None:
    """Refuses to train in a directory that holds a run of another model or of other data.

    Raises:
      UserError: naming the first key that differs.
    """
    if not (directory / CONFIG).is_file():
        return
    theirs = flatten(read_config(directory).model_dump())
    for key, value in flatten(cfg.model_dump()).items():
        if not key.startswith(RESUMABLE) and theirs.get(key) != value:
            raise UserError(
                f"{directory} holds a run with {key}={theirs.get(key)}, not {value}: choose another "
                f"run.name, or resume it as it is with: {resume_command(directory)}"
            )


def carry(source: Path, target: Path, names: Sequence[str] = CARRIED) -> None:
    """Copies the files that a published model came with from folder to folder, those that are there.

    Raises:
      UserError: for a file that can't be read or is too long.
      OSError: if the target can't be written.
    """
    for name in names:
        if (source / name).is_file():
            files.write(target / name, files.read_text(source / name, CARRIED_LIMIT))


def carry_published(source: Path, target: Path) -> None:
    """Copies a run's folder `published` to another run, whole or not at all; most runs have none.

    Raises:
      UserError: for a file that can't be read or is too long.
      OSError: if the target can't be written.
    """
    if (source / PUBLISHED).is_dir() and not (target / PUBLISHED).exists():
        with files.new_folder(target / PUBLISHED) as new:
            carry(source / PUBLISHED, new, ("config.json", *CARRIED))


def open_tokenizer(cfg: Config, directory: Path) -> Tokenizer:
    """Opens the tokenizer of a run, or of the model that it starts from, or makes one.

    Raises:
      UserError: if it can't be read or made.
    """
    if (path := directory / TOKENIZER).exists():
        return load_tokenizer(path)
    return published_tokenizer(cfg) or make_tokenizer(cfg.data, cfg.model.vocab)


def open_chat(cfg: Config, directory: Path, tokenizer: Tokenizer) -> Chat | None:
    """Returns how a run renders conversations; None if it reads none.

    That is the template that the run has already; or the one in data.chat_template; or that of the model it starts
    from; or a plain one.

    Raises:
      UserError: if it can't be read.
    """
    if cfg.data.source not in CHATS:
        return None
    own, source = (
        directory / PUBLISHED,
        cfg.checkpoint.load_full_state or cfg.checkpoint.load_parameters,
    )
    if (own / "chat_template.jinja").exists():  # which training wrote, also of data.chat_template
        return read_chat(own, tokenizer)
    if source is None:
        return open_template(cfg.data, tokenizer)
    return open_template(cfg.data, tokenizer, Path(source) / PUBLISHED)


def published_tokenizer(cfg: Config) -> Tokenizer | None:
    """Returns the tokenizer of the published model that training starts from, whose ids are the model's; or None.

    Conversations are always read with the tokenizer of the model that they teach.

    Raises:
      UserError: if it can't be read, or has more ids than the model.
    """
    source = cfg.checkpoint.load_full_state or cfg.checkpoint.load_parameters
    if not source:
        return None
    path = Path(source) / TOKENIZER
    # A run has one; without it, conversations would be read with another.
    lost = cfg.data.source in CHATS and (Path(source) / CONFIG).exists()
    if not path.exists() and not lost:
        return None
    tokenizer = load_tokenizer(path)
    if not isinstance(tokenizer, PublishedTokenizer) and cfg.data.source not in CHATS:
        return None
    if tokenizer.vocab_size > cfg.model.vocab:
        raise UserError(
            f"model.vocab={cfg.model.vocab} is too small for the {tokenizer.vocab_size} ids of {path}: set the model "
            f"as {source} has it, with config={Path(source) / CONFIG}"
        )
    return tokenizer


def load_run(directory: Path | str, mesh: Mesh | None = None) -> tuple[Config, Any, Tokenizer, int]:
    """Reads a run's configuration, parameters, tokenizer and step; if it has adapters, its base's parameters too.

    A value head is left behind: only training has a use for it.

    Args:
      directory: of the run.
      mesh: devices that share the parameters by heads and features (its axis `tensor`); None: the first device.

    Raises:
      UserError: if the directory holds no run or no usable checkpoint, or its base is gone or another one.
    """
    cfg = _without_head(read_config(directory))
    if mesh is None:
        restored = _read_whole(directory, cfg, make_mesh(devices=jax.devices()[:1]))
        # Through the host: device_put alone would keep the mesh in their types, and they are used without one.
        params = jax.device_put(jax.device_get(restored.state["params"]), jax.devices()[0])
    else:
        divided = cfg.sharding.model_copy(update={"rules": "tp"})
        there = cfg.model_copy(update={"sharding": divided})
        restored = _read_whole(directory, there, mesh)
        params = restored.state["params"]
    return cfg, params, load_tokenizer(Path(directory) / TOKENIZER), restored.step


def load_adapters(directory: Path | str, source: Path | str) -> tuple[Config, Any]:
    """Reads a run's configuration and its adapters alone, for the weights of another run.

    Args:
      directory: of the run with adapters.
      source: the run whose newest weights they are for.

    Raises:
      UserError: if the run has no adapters, or others were trained beside them.
    """
    cfg = read_config(directory)
    if not cfg.model.lora.rank:
        raise UserError(f"{directory} has no adapters: train some with model.lora.rank=8")
    with Checkpointer(Path(source) / CHECKPOINTS) as checkpointer:
        step = checkpointer.latest()
    if step is None:
        raise nothing_saved(source)
    if base.read(Path(directory)) != base.identify(Path(source) / CHECKPOINTS / str(step), step):
        raise UserError(
            f"the adapters of {directory} were trained beside {cfg.checkpoint.load_parameters}, and {source} at step "
            f"{step} is not that checkpoint: name it, or train adapters beside this one"
        )
    mesh = make_mesh(devices=jax.devices()[:1])
    return cfg, read_parameters(directory, cfg, mesh).state["params"]


def load_merged(directory: Path | str) -> tuple[Config, Any, Tokenizer, int]:
    """Returns what `load_run` does, of a run with adapters the model in which they are merged, in float32."""
    cfg, params, tokenizer, step = load_run(directory)
    if cfg.model.lora.rank:
        params = jax.jit(partial(_merged, cfg))(params)
        alone = cfg.checkpoint.model_copy(update={"load_parameters": None})
        cfg = cfg.model_copy(update={"model": merged_config(cfg.model), "checkpoint": alone})
    return cfg, params, tokenizer, step


def first_state(cfg: Config, mesh: Mesh, batches: Batches) -> tuple[TrainState, int]:
    """Returns a new run's first state and its step: another run's state or parameters, or freshly drawn ones.

    Continuing from another run's full state on the same data also moves `batches` to that run's position.

    Raises:
      UserError: if the directory named by `checkpoint.load_*` holds no usable checkpoint, or another model's.
    """
    if source := cfg.checkpoint.load_full_state:
        theirs = read_config(source)
        with Checkpointer(Path(source) / CHECKPOINTS) as checkpointer:
            restored = checkpointer.restore(abstract_state(cfg, mesh).saved)
        if restored is None:
            raise nothing_saved(source)
        if theirs.data.model_copy(update={"epochs": cfg.data.epochs}) == cfg.data:
            batches.set_state(restored.data_state)
        return restored.state, restored.step
    state, source = init_state(cfg, mesh, frozen=False), cfg.checkpoint.load_parameters
    if source and not cfg.model.lora.rank:
        has_head = read_config(source).model.value_head
        restored = _read_merged(source, cfg if has_head else _without_head(cfg), mesh)
        # A value head that isn't there begins as it was drawn.
        params = nnx.merge_state(state.params, restored.state["params"])
        state = dataclasses.replace(state, params=params)
    return state, 0


def complete_state(cfg: Config, mesh: Mesh, state: TrainState, reference: bool) -> TrainState:
    """Returns the state with what checkpoints don't have, read from the run that training started from.

    Args:
      cfg: the run's configuration.
      mesh: the devices.
      state: the new or restored state.
      reference: whether the objective compares with the model that training started from.

    Raises:
      UserError: if that model is needed and `checkpoint.load_parameters` isn't set, or can't be read.
    """
    source = cfg.checkpoint.load_parameters
    if cfg.model.lora.rank:  # the reference is then the model without adapters
        directory = Path(cfg.run.dir) / str(cfg.run.name)
        frozen, found = _read_base(directory, cfg, mesh)
        if job.is_first():
            base.write(directory, found)
        return dataclasses.replace(state, frozen=frozen)
    if not reference:
        return state
    if source is None:
        raise UserError(
            f"objective.kind={cfg.objective.kind} compares with the model that training starts from: name its run in "
            "checkpoint.load_parameters"
        )
    directory = Path(cfg.run.dir) / str(cfg.run.name)
    said = f"{directory} compares with", "start from"
    reference, found = _read_same(directory, source, _without_head(cfg), mesh, *said)
    if job.is_first():
        base.write(directory, found)
    return dataclasses.replace(state, reference=reference)


def _without_head(cfg: Config) -> Config:
    model = cfg.model.model_copy(update={"value_head": False})
    return cfg.model_copy(update={"model": model})


def export_run(directory: Path | str, target: Path | str, licence: str = model_card.UNKNOWN) -> int:
    """Writes a run's newest parameters, configuration and tokenizer, whole or not at all; adapters are merged.

    `minitext generate`, `minitext eval` and `checkpoint.load_parameters` read the result. A model card is beside it,
    which names the licence.

    Returns:
      The step that was exported.

    Raises:
      UserError: if the directory holds no usable checkpoint, or the target exists or can't be written.
    """
    target = Path(files.local_path(target))
    if target.exists():
        raise UserError(f"{target} exists: name a directory that does not")
    cfg, params, tokenizer, step = load_merged(directory)
    size, stored = model_card.measure(params)
    card = model_card.card(
        directory, cfg, step, form="orbax", size=size, dtype=stored, licence=licence
    )
    write_parameters(directory, target, cfg, params, tokenizer, step, card)
    return step


def write_parameters(
    directory: Path | str,
    target: Path,
    cfg: Config,
    params: Any,
    tokenizer: Tokenizer,
    step: int,
    card: str | None = None,
) -> None:
    """Writes a run directory with parameters alone, whole or not at all.

    Args:
      directory: the run from which they come, whose published files go along.
      target: the directory to make.
      cfg: its configuration.
      params: its parameters.
      tokenizer: its tokenizer.
      step: of the parameters.
      card: their model card, if they get one.

    Raises:
      UserError: if the target can't be written.
    """
    try:
        with files.new_folder(target) as new:
            files.write(new / CONFIG, to_yaml(cfg))
            if card is not None:
                files.write(new / model_card.CARD, card)
            tokenizer.save(new / TOKENIZER)
            carry_published(Path(directory), new)
            largest = max(x.nbytes for x in jax.tree.leaves(params))
            with Checkpointer(new / CHECKPOINTS, at_once=largest) as checkpointer:
                state, config = {"params": params}, cfg.model_dump(mode="json")
                checkpointer.save(step, state, {}, config, wait=True)
    except OSError as error:
        fix = "name a directory where one can be made"
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error


def read_parameters(
    directory: Path | str, cfg: Config, mesh: Mesh, step: int | None = None
) -> Restored:
    """Reads the newest parameters alone that a run has saved, as {"params": ...} laid out on the mesh.

    Of a run with adapters these are the adapters.

    Args:
      directory: the run.
      cfg: its configuration, or of another run with the same model.
      mesh: the devices.
      step: the step to read; by default the newest undamaged one.

    Raises:
      UserError: if there is none, or of another model.
    """
    with Checkpointer(Path(directory) / CHECKPOINTS) as checkpointer:
        wanted = {"params": abstract_state(cfg, mesh).params}
        restored = checkpointer.restore(wanted, step, partial=True)
    if restored is None:
        raise nothing_saved(directory)
    return restored


def _read_whole(
    directory: Path | str, cfg: Config, mesh: Mesh, step: int | None = None
) -> Restored:
    """Reads what `read_parameters` does, and if the run has adapters the other parameters from its base."""
    restored = read_parameters(directory, cfg, mesh, step)
    if not cfg.model.lora.rank:
        return restored
    frozen, _ = _read_base(Path(directory), cfg, mesh)
    return restored._replace(state={"params": nnx.merge_state(frozen, restored.state["params"])})


def _read_merged(
    directory: Path | str, cfg: Config, mesh: Mesh, step: int | None = None
) -> Restored:
    """Reads the parameters of `cfg`'s model, which has no adapters, from a run that may have some: they are merged."""
    theirs = read_config(directory)
    if not theirs.model.lora.rank:
        return read_parameters(directory, cfg, mesh, step)
    if cfg.model.is_stored:
        raise UserError(
            f"{directory} has adapters, which can't be added to weights in fewer bits: name another run, or export "
            "this one, which adds them, and quantize what is exported"
        )
    sections = {"model": theirs.model, "checkpoint": theirs.checkpoint}
    there = cfg.model_copy(update=sections)
    restored = _read_whole(directory, there, mesh, step)
    wanted = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, mesh).params)
    add = jax.jit(partial(_merged, there), out_shardings=wanted)
    with jax.set_mesh(mesh):
        return restored._replace(state={"params": add(restored.state["params"])})


def _merged(cfg: Config, params: Any) -> Any:
    """Returns parameters with the adapters added to the weights."""
    model = nnx.merge(model_def(cfg), params)
    merge(model)
    return nnx.state(model)


def _read_base(directory: Path, cfg: Config, mesh: Mesh) -> tuple[Any, base.Base]:
    """Reads the parameters beside a run's adapters, and what tells them from others.

    Raises:
      UserError: if they can't be read, or aren't those with which the adapters were trained.
    """
    source = cfg.checkpoint.load_parameters
    if source is None or not (Path(source) / CONFIG).is_file():
        raise UserError(
            f"{directory} has adapters beside the weights of checkpoint.load_parameters={source}, which is not a run "
            f"directory: put it back, or name where it is in {directory / CONFIG}"
        )
    there = _without_head(cfg.model_copy(update={"model": without_lora(cfg.model)}))
    said = f"the adapters of {directory} belong to", "train adapters beside"
    return _read_same(directory, source, there, mesh, *said)


def _read_same(
    directory: Path, source: str, cfg: Config, mesh: Mesh, belongs: str, begin: str
) -> tuple[Any, base.Base]:
    """Reads parameters from another run's checkpoint: the newest, or the one from which they were read before.

    Args:
      directory: the run that needs them, which may have noted the checkpoint.
      source: the run that has them.
      cfg: of the model that they make.
      mesh: the devices.
      belongs: for errors, the words before `step 3 of runs/NAME`.
      begin: for errors, how one would begin with another checkpoint.

    Raises:
      UserError: if they can't be read, or the checkpoint is gone or has other content.
    """
    known, checkpoints = base.read(directory), Path(source) / CHECKPOINTS
    step = known.step if known else None
    if known and not (checkpoints / str(step)).is_dir():
        raise UserError(
            f"{belongs} step {step} of {source}, which is not there: put it back, or {begin} what is there in another "
            "run.name"
        )
    restored = _read_merged(source, cfg, mesh, step)
    found = base.identify(checkpoints / str(restored.step), restored.step)
    if known and found != known:
        raise UserError(
            f"{belongs} another step {step} than {source} has now: put that back, or {begin} this one in another "
            "run.name"
        )
    return restored.state["params"], found


def nothing_saved(directory: Path | str) -> UserError:
    """The error for a run without a checkpoint."""
    return UserError(
        f"{directory} has no checkpoint yet: train it with {resume_command(directory)}"
    )


def evaluate_run(directory: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Measures a run's loss on all its validation rows, or on other data named by overrides.

    Returns:
      `step`, `loss` in nats per token, `perplexity`, `bits_per_byte`, `tokens` (targets), and
      `floor` (None where the entropy rate is unknown).

    Raises:
      UserError: what `load_run` raises, or for an override that would have no effect.
      DoesNotFit: for batches that are too large.
    """
    cfg = read_config(directory, overrides)
    theirs = flatten(read_config(directory).model_dump())
    for key, value in flatten(cfg.model_dump()).items():
        fixed = key == "data.tokenizer" or not key.startswith(EVALUABLE)
        if fixed and theirs.get(key) != value:
            raise UserError(
                f"{key}={value} would have no effect on {directory}, a run with {key}={theirs.get(key)}: to evaluate, "
                "set data.* or train.global_batch alone"
            )
    mesh = make_mesh(devices=jax.devices()[:1])
    check_memory(cfg, mesh, training=False)
    _, params, tokenizer, step = load_run(directory)
    rows = make_batches(
        cfg.data,
        mesh,
        vocab=cfg.model.vocab,
        global_batch=cfg.train.global_batch,
        split="validation",
        tokenizer=tokenizer,
        chat=open_chat(cfg, Path(directory), tokenizer),
    )
    nll, tokens, size = 0.0, 0.0, 0
    eval_step, state = make_eval_step(cfg), TrainState(jnp.asarray(step), params, None)
    with jax.set_mesh(mesh), terminal.bar() as bar:
        for batch in bar.track(rows, description="evaluating"):
            part, count = eval_step(state, batch)
            nll, tokens = nll + float(part["loss"]), tokens + float(count)
            targets = jax.device_get(batch["targets"])[jax.device_get(batch["loss_mask"]) != 0]
            size += tokenizer.count_bytes(targets)
    loss = nll / max(tokens, 1.0)
    return {
        "step": step,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nll / math.log(2) / max(size, 1),
        "tokens": int(tokens),
        "floor": rows.floor,
    }


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turns the error of a full or read-only disk into one line.

    Raises:
      UserError: naming the directory, the cause, and the command that resumes.
    """
    try:
        yield
    except OSError as error:
        saved = (
            f"; checkpoints already saved are intact, resume with: {resume_command(directory)}"
            if os.path.exists(directory / CONFIG)
            else ""
        )
        cause = files.explain(error) or str(error)
        raise UserError(f"cannot write to {directory}: {cause}{saved}") from error
