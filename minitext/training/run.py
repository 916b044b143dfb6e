"""A training run from configuration to checkpoint. Read `train` from top to bottom.

Ctrl-C saves and prints how to resume. Running again in the same directory continues from the newest checkpoint, bit
for bit.

Chapters: 6.
"""

import contextlib
import datetime
import functools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape

from minitext import files, hardware
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config.config import Config, flatten, to_yaml
from minitext.config.sections import ProfileConfig
from minitext.data.batches import Batches
from minitext.data.chat import Chat, write_chat
from minitext.data.tokenizer import Tokenizer
from minitext.distributed import job
from minitext.errors import UserError
from minitext.models.flops import count_adapters, count_flops, count_params
from minitext.observability.goodput import Ledger
from minitext.observability.metrics import Meter, MetricsWriter, progress_bar, status_line
from minitext.sharding.mesh import make_mesh
from minitext.training.capacity import check_memory
from minitext.training.claim import Claim
from minitext.training.loop import Action, Line, Loop
from minitext.training.nonfinite import Guard
from minitext.training.objective import Batch, Objective
from minitext.training.run_dir import (
    CHECKPOINTS,
    CONFIG,
    PUBLISHED,
    TOKENIZER,
    carry_published,
    check_same_run,
    complete_state,
    disk_errors,
    first_state,
    open_chat,
    open_tokenizer,
    read_config,
    resume_command,
)
from minitext.training.saving import local_copies, make_saves, restore
from minitext.training.step import TrainState, check_trainable, make_train_step
from minitext.training.stopping import Interrupted, Stopper
from minitext.training.task import PRETRAINING, Task
from minitext.training.watchdog import STACKS, Watchdog

logger = logging.getLogger(__name__)


def train(
    cfg: Config,
    console: Console | None = None,
    began: float | None = None,
    task: Task = PRETRAINING,
    heading: str | None = None,
) -> Path:
    """Trains to the last step in the run directory, resuming from its newest checkpoint if there is one.

    Args:
      cfg: the resolved configuration.
      console: where to print; stderr by default.
      began: when the job began, in seconds since 1970, for its ledger; by default when this is called.
      task: what to train for; by default pretraining, or supervised fine-tuning if the data are conversations.
      heading: what to print first, once nothing can be refused any more.

    Returns:
      The run directory.

    Raises:
      UserError: for a mesh, data or directory that can't be used, or a disk that can't be written.
      DoesNotFit: for a model or batch that this machine's memory can't hold.
      RunDirLost: if another process trains in the run directory, or if the directory is deleted.
      Interrupted: after SIGTERM or Ctrl-C, once the state is saved.
      NonFinite: for a loss, gradient or parameter that isn't finite.
    """
    first = job.is_first()  # of several processes, the one that writes what is written once
    console, began = console or Console(stderr=True, quiet=not first), began or time.time()
    cfg = _name(cfg)
    directory = Path(cfg.run.dir) / str(cfg.run.name)
    mesh = make_mesh(cfg.mesh)
    _refuse(cfg, mesh, directory, task)
    tokenizer, chat, batches, held_out = _open_data(cfg, mesh, directory, task)
    with disk_errors(directory), jax.set_mesh(mesh), contextlib.ExitStack() as stack:
        claim = stack.enter_context(Claim(directory, first))
        ledger = stack.enter_context(Ledger(directory, began, writes=first))
        keep = cfg.checkpoint.keep, cfg.checkpoint.keep_every
        checkpointer = stack.enter_context(Checkpointer(directory / CHECKPOINTS, *keep))
        copies = stack.enter_context(local_copies(cfg, directory))
        restored = restore(cfg, mesh, checkpointer, copies, batches)
        state, start = restored or first_state(cfg, mesh, batches)
        ledger.lap("restore" if restored else "init", start)
        state = _complete(cfg, mesh, task, batches, state, start)
        if first:
            _write_config(cfg, directory, tokenizer, chat, batches)
        if heading is not None:
            console.print(heading, highlight=False, markup=False, soft_wrap=True)
        _introduce(cfg, mesh, directory, start, batches, console)
        if start < cfg.train.steps:
            say = functools.partial(console.print, highlight=False)
            guard = Guard(directory, cfg.train.on_nan, tokenizer, say)
            saves = make_saves(cfg, batches, guard, ledger, checkpointer, copies)
            samples = task.samples(cfg, directory, held_out, tokenizer, console)
            log = stack.enter_context(_log(cfg, directory, start, batches.floor, console))
            stopper = stack.enter_context(Stopper(say, job.board("stop")))
            watchdog = stack.enter_context(_watchdog(cfg, directory))
            ledger.lap("init", start)
            # After the stopper: a signal that arrives while the step compiles has to wait for it.
            train_step = _make_step(cfg, mesh, task.objective(cfg), state.reference)
            ledger.lap("compile", start + 1)
            loop = Loop(
                cfg.train,
                train_step,
                batches,
                validate=task.validation(cfg, held_out, say),
                writers=(claim.check, log, watchdog.step_ended, guard.check),
                actions=(*saves, samples, *_trace(cfg, directory, start, stack)),
                meter=_meter(cfg, mesh),
                stopper=stopper,
                checkpointer=checkpointer,
                ledger=ledger,
            )
            claim.begin()
            step = loop.run(state, start)
            claim.check()
            if step < cfg.train.steps:
                raise Interrupted(step, directory, stopper.number)
    return directory


def _name(cfg: Config) -> Config:
    """Names the run, by default after the time of day, and checks that all processes were given the same settings."""
    name = cfg.run.name or datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    if job.joined():
        name = job.share("run name", name)[0]
    cfg = cfg.replace({"run.name": name})
    if job.joined():
        _check_agreement(cfg)
        directory = Path(cfg.run.dir) / name
        job.advise(f"resume with: {resume_command(directory)}", directory / STACKS)
    return cfg


def _check_agreement(cfg: Config) -> None:
    texts = job.share("settings", json.dumps(flatten(cfg.model_dump(mode="json"))))
    ours, theirs = json.loads(texts[0]), [json.loads(text) for text in texts]
    for index, settings in enumerate(theirs):
        for key in sorted(ours.keys() | settings.keys()):
            if ours.get(key) != settings.get(key):
                raise UserError(
                    f"{job.name_of(index)} was started with {key}={settings.get(key)}, process 0 with "
                    f"{key}={ours.get(key)}: start all processes with the same command"
                )


def _refuse(cfg: Config, mesh: Mesh, directory: Path, task: Task) -> None:
    """Refuses everything that can be refused before the run directory exists."""
    if cfg.objective.kind != task.kind:
        raise UserError(
            f"objective.kind={cfg.objective.kind}, and the run is one of objective.kind={task.kind}: set that"
        )
    check_trainable(cfg, mesh)
    task.check(cfg, mesh)
    if cfg.model.lora.rank and cfg.checkpoint.load_parameters is None:
        raise UserError(
            f"model.lora.rank={cfg.model.lora.rank} trains adapters beside the weights of a run: name it in "
            "checkpoint.load_parameters"
        )
    check_memory(cfg, mesh)
    check_same_run(cfg, directory)
    if cfg.profile != ProfileConfig():
        from minitext.observability import profiler

        profiler.check(cfg, directory, mesh.devices.flat[0].platform)
    if cfg.train.executable is not None:
        from minitext.training.compile import check_executable

        check_executable(cfg, mesh)
    if source := cfg.checkpoint.load_full_state or cfg.checkpoint.load_parameters:
        read_config(source)


def _open_data(
    cfg: Config, mesh: Mesh, directory: Path, task: Task
) -> tuple[Tokenizer, Chat | None, Batches, Batches]:
    """Returns the tokenizer, how conversations are rendered, and the batches to train and to validate on."""
    tokenizer = open_tokenizer(cfg, directory)
    chat = open_chat(cfg, directory, tokenizer)
    make = functools.partial(task.batches, cfg, mesh, tokenizer, chat)
    batches, held_out = make("train"), make("validation")
    if not directory.exists():
        _check_enough(cfg, batches, 0)
    return tokenizer, chat, batches, held_out


def _check_enough(cfg: Config, batches: Batches, start: int) -> None:
    left = batches.left()
    if left is not None and start + left < cfg.train.steps:
        raise UserError(
            f"data.epochs={cfg.data.epochs} ends after step {start + left:,}, before train.steps="
            f"{cfg.train.steps}: set train.steps={start + left} or raise data.epochs"
        )


def _complete(
    cfg: Config, mesh: Mesh, task: Task, batches: Batches, state: TrainState, start: int
) -> TrainState:
    """Returns the state with what checkpoints don't have, if there are steps to take and data for them."""
    _check_enough(cfg, batches, start)
    if start >= cfg.train.steps:
        return state
    return complete_state(cfg, mesh, state, task.needs_reference(cfg))


def _write_config(
    cfg: Config, directory: Path, tokenizer: Tokenizer, chat: Chat | None, batches: Batches
) -> None:
    """Writes what the command that resumes reads; only now, when nothing can be refused any more."""
    if source := cfg.checkpoint.load_full_state or cfg.checkpoint.load_parameters:
        carry_published(Path(source), directory)
    files.write(directory / CONFIG, to_yaml(cfg))
    if not (directory / TOKENIZER).exists():
        tokenizer.save(directory / TOKENIZER)
    if chat is not None:  # so that `generate --chat` renders as training did
        write_chat(directory / PUBLISHED, chat, batches.turn_ends)


def _introduce(
    cfg: Config, mesh: Mesh, directory: Path, start: int, batches: Batches, console: Console
) -> None:
    shape = " x ".join(f"{a}={n}" for a, n in mesh.shape.items() if n > 1) or "1 device"
    total, active = count_params(cfg.model), count_params(cfg.model, active=True)
    of_these = f" ({active / 1e6:.1f}M active)" if active < total else ""
    if trained := count_adapters(cfg.model):
        of_these += f", of which {trained:,} in adapters are trained"
    lines = [
        f"[bold]{escape(str(directory))}[/]  {total / 1e6:.1f}M parameters{of_these}, {shape}, "
        f"{cfg.train.global_batch} x {cfg.data.seq_len} tokens a step, source {cfg.data.source}"
    ]
    if batches.floor:
        lines.append(
            f"entropy rate of the source, below which no model can go: {batches.floor:.4f} nats/token"
        )
    if start >= cfg.train.steps:
        lines.append(f"already trained to step {start}: set train.steps higher to go on")
    elif start:
        lines.append(f"resuming after step {start}")
    console.print("\n".join(lines), highlight=False)
    for line in batches.left_out:
        console.print(f"left out: {line}", highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _log(cfg: Config, directory: Path, start: int, floor: float | None, console: Console):
    """Gives a function that writes a step's line to metrics.jsonl, TensorBoard and the progress bar."""
    first = job.is_first()
    writes = MetricsWriter(directory, start) if first else contextlib.nullcontext()
    with writes as writer, progress_bar(console) as bar:
        task = bar.add_task("train", total=cfg.train.steps, completed=start, status="compiling")

        def log(line: Line, _: Batch) -> None:
            if writer is not None:
                writer.write(line)
            bar.update(task, completed=line["step"], status=status_line(line, floor))

        yield log


def _watchdog(cfg: Config, directory: Path) -> Watchdog:
    def end(why: str) -> None:
        job.abort(why if job.joined() else f"{why}; resume with: {resume_command(directory)}")

    return Watchdog(directory, jax.process_index(), logger.warning, cfg.train.hang_seconds, end)


def _make_step(cfg: Config, mesh: Mesh, objective: Objective, reference: Any) -> Callable:
    """Returns the train step, which compiles when first called; `make_or_load_step` says which ones are ready."""
    if cfg.train.executable is None and not job.joined() and not cfg.xla.options:
        return make_train_step(cfg, mesh, objective)
    from minitext.training.compile import make_or_load_step

    return make_or_load_step(cfg, mesh, objective, reference)


def _trace(
    cfg: Config, directory: Path, start: int, stack: contextlib.ExitStack
) -> tuple[Action, ...]:
    """Returns the action that records a trace, if one is asked for; it may begin at once."""
    if cfg.profile == ProfileConfig():
        return ()
    from minitext.observability.profiler import Window

    window = stack.enter_context(Window(cfg, directory))
    window.switch(start)
    return (window,)


def _meter(cfg: Config, mesh: Mesh) -> Meter:
    tokens, seq_len = cfg.train.global_batch * cfg.data.seq_len, cfg.data.seq_len
    peak = hardware.peak_flops(mesh.devices.flat, cfg.model.dtype)
    return Meter(tokens, count_flops(cfg.model, tokens, seq_len), peak)
