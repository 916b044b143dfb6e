"""Training a run: the run directory, its newest checkpoint, the data, and the loop over them.

Ctrl-C saves and says how to resume; running again in the same directory goes on where the newest checkpoint stands,
bit for bit.

Chapters: 6.
"""

import contextlib
import datetime
import functools
import json
import time
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from minitext import files
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.checkpoint.emergency import LocalCopies, restore_newest
from minitext.config.config import Config, flatten, to_yaml
from minitext.data.batches import Batches, make_batches
from minitext.data.rows import make_tokenizer
from minitext.data.tokenizer import Tokenizer, load_tokenizer
from minitext.distributed import job
from minitext.errors import UserError
from minitext.models.flops import count_params
from minitext.observability import profiler
from minitext.observability.goodput import Ledger
from minitext.observability.metrics import MetricsWriter
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import make_mesh
from minitext.training.compile import check_executable
from minitext.training.loop import Loop
from minitext.training.run_dir import (
    CHECKPOINTS,
    CONFIG,
    TOKENIZER,
    check_same_run,
    disk_errors,
    first_state,
    read_config,
    resume_command,
)
from minitext.training.step import abstract_state


def train(cfg: Config, console: Console | None = None, began: float | None = None) -> Path:
    """Trains to the last step in the run directory, resuming from its newest checkpoint if it has one.

    Args:
      cfg: the resolved configuration.
      console: where to print; stderr by default.
      began: when the job began, in seconds since 1970, for its ledger; by default when this is called.

    Returns:
      The run directory.

    Raises:
      UserError: for a mesh, data or directory that can't be used, or a disk that can't be written.
      Interrupted: after SIGTERM or Ctrl-C, when the state is saved.
    """
    console = console or Console(stderr=True, quiet=not job.is_first())
    began = began or time.time()
    cfg, directory = _join(cfg)
    mesh = make_mesh(cfg.mesh)
    # Everything that can be refused is refused before the directory exists.
    check_mesh(cfg, mesh)
    check_same_run(cfg, directory)
    profiler.check(cfg, directory, mesh.devices.flat[0].platform)
    if cfg.train.executable is not None:
        check_executable(cfg, mesh)
    if source := cfg.checkpoint.load_full_state or cfg.checkpoint.load_parameters:
        read_config(source)
    known = directory / TOKENIZER
    tokenizer = _open_tokenizer(cfg, known)
    make = functools.partial(
        make_batches,
        cfg.data,
        mesh,
        vocab=cfg.model.vocab,
        global_batch=cfg.train.global_batch,
        tokenizer=tokenizer,
    )
    batches, held_out = make(), make(split="validation")
    if not directory.exists():
        _check_enough(cfg, batches, 0)
    with disk_errors(directory), jax.set_mesh(mesh):
        directory.mkdir(parents=True, exist_ok=True)
        keep, keep_every = cfg.checkpoint.keep, cfg.checkpoint.keep_every
        first = job.is_first()  # of several processes: it writes what is written once
        with (
            Ledger(directory, began, writes=first) as ledger,
            Checkpointer(directory / CHECKPOINTS, keep, keep_every) as checkpointer,
            _local_copies(cfg, directory) as copies,
        ):
            restored = restore_newest(checkpointer, copies, abstract_state(cfg, mesh))
            if restored is None:
                state, start = first_state(cfg, mesh, batches)
            else:
                state, start = restored.state, restored.step
                batches.set_state(restored.data_state)
            ledger.lap("init" if restored is None else "restore", start)
            _check_enough(cfg, batches, start)
            # Written last: what was refused must not be what the command to resume reads.
            if first:
                files.write(directory / CONFIG, to_yaml(cfg))
                if not known.exists():
                    tokenizer.save(known)
            _introduce(cfg, mesh, directory, start, batches.floor, console)
            if start < cfg.train.steps:
                writes = MetricsWriter(directory, start) if first else contextlib.nullcontext()
                with writes as writer, profiler.Window(cfg, directory) as window:
                    Loop(
                        cfg, mesh, directory, batches, held_out, tokenizer, checkpointer, writer,
                        ledger, window, copies,
                    ).run(state, start, console)  # fmt: skip
    return directory


def _join(cfg: Config) -> tuple[Config, Path]:
    """Gives the run its name, by default the time of day, and sees that all processes want the same."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = cfg.run.name or job.share("run name", now)[0]
    cfg = cfg.replace({"run.name": name})
    _check_agreement(cfg)
    directory = Path(cfg.run.dir) / name
    job.advise(f"resume with: {resume_command(directory)}")
    return cfg, directory


def _open_tokenizer(cfg: Config, known: Path) -> Tokenizer:
    """The run's own if it has one, so that its model reads the same ids."""
    return load_tokenizer(known) if known.exists() else make_tokenizer(cfg.data, cfg.model.vocab)


def _local_copies(
    cfg: Config, directory: Path
) -> contextlib.AbstractContextManager[LocalCopies | None]:
    where, new = cfg.checkpoint.local_dir, not (directory / CONFIG).exists()
    if where is None:
        return contextlib.nullcontext()
    return LocalCopies(where, cfg.checkpoint.local_every, directory, new)


def _check_agreement(cfg: Config) -> None:
    """Refuses to train where processes were started with different settings."""
    texts = job.share("settings", json.dumps(flatten(cfg.model_dump(mode="json"))))
    ours, theirs = json.loads(texts[0]), [json.loads(text) for text in texts]
    for index, settings in enumerate(theirs):
        for key in sorted(ours.keys() | settings.keys()):
            if ours.get(key) != settings.get(key):
                raise UserError(
                    f"{job.name_of(index)} was started with {key}={settings.get(key)}, process 0 with "
                    f"{key}={ours.get(key)}: start all processes with the same command"
                )


def _check_enough(cfg: Config, batches: Batches, start: int) -> None:
    left = batches.left()
    if left is not None and start + left < cfg.train.steps:
        raise UserError(
            f"data.epochs={cfg.data.epochs} ends after step {start + left:,}, before train.steps="
            f"{cfg.train.steps}: set train.steps={start + left} or raise data.epochs"
        )


def _introduce(
    cfg: Config, mesh: Mesh, directory: Path, start: int, floor: float | None, console: Console
) -> None:
    shape = " x ".join(f"{a}={n}" for a, n in mesh.shape.items() if n > 1) or "1 device"
    active = count_params(cfg.model, active=True)
    of_these = f" ({active / 1e6:.1f}M active)" if active < count_params(cfg.model) else ""
    lines = [
        f"[bold]{directory}[/]  {count_params(cfg.model) / 1e6:.1f}M parameters{of_these}, {shape}, "
        f"{cfg.train.global_batch} x {cfg.data.seq_len} tokens a step, source {cfg.data.source}"
    ]
    if floor:
        lines.append(
            f"entropy rate of the source, below which no model can go: {floor:.4f} nats/token"
        )
    if start >= cfg.train.steps:
        lines.append(f"already trained to step {start}: set train.steps higher to go on")
    elif start:
        lines.append(f"resuming after step {start}")
    console.print("\n".join(lines), highlight=False)
