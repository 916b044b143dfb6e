"""Training a run: the run directory, its newest checkpoint, the data, and the loop over them.

Ctrl-C saves and says how to resume; running again in the same directory goes on where the newest checkpoint stands,
bit for bit.

Chapters: 6.
"""

import datetime
import functools
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from minitext import disk, executable
from minitext.checkpoint import Checkpointer
from minitext.config import Config, to_yaml
from minitext.data import Batches, make_batches
from minitext.errors import UserError
from minitext.loop import Interrupted as Interrupted
from minitext.loop import Loop
from minitext.mesh import make_mesh
from minitext.mesh_check import check_mesh
from minitext.metrics import MetricsWriter
from minitext.model import count_params
from minitext.rundir import (
    CHECKPOINTS,
    CONFIG,
    TOKENIZER,
    check_same_run,
    disk_errors,
    first_state,
    read_config,
)
from minitext.tokenizer import load_tokenizer, make_tokenizer
from minitext.train import abstract_state


def train(cfg: Config, console: Console | None = None) -> Path:
    """Trains to the last step in the run directory, resuming from its newest checkpoint if it has one.

    Args:
      cfg: the resolved configuration.
      console: where to print; stderr by default.

    Returns:
      The run directory.

    Raises:
      UserError: for a mesh, data or directory that can't be used, or a disk that can't be written.
      Interrupted: after Ctrl-C, when the state is saved.
    """
    console = console or Console(stderr=True)
    name = cfg.run.name or datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    cfg = cfg.replace({"run.name": name})
    directory = Path(cfg.run.dir) / name
    mesh = make_mesh(cfg.mesh)
    # Everything that can be refused is refused before the directory exists.
    check_mesh(cfg, mesh)
    check_same_run(cfg, directory)
    if cfg.train.executable is not None:
        executable.check(cfg, mesh)
    if source := cfg.checkpoint.load_full_state or cfg.checkpoint.load_parameters:
        read_config(source)
    known = directory / TOKENIZER
    tokenizer = (
        load_tokenizer(known) if known.exists() else make_tokenizer(cfg.data, cfg.model.vocab)
    )
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
        with Checkpointer(directory / CHECKPOINTS, keep, keep_every) as checkpointer:
            restored = checkpointer.restore(abstract_state(cfg, mesh))
            if restored is None:
                state, start = first_state(cfg, mesh, batches)
            else:
                state, start = restored.state, restored.step
                batches.set_state(restored.data_state)
            _check_enough(cfg, batches, start)
            # Written last: what was refused must not be what the command to resume reads.
            disk.write(directory / CONFIG, to_yaml(cfg))
            if not known.exists():
                tokenizer.save(known)
            _introduce(cfg, mesh, directory, start, batches.floor, console)
            if start < cfg.train.steps:
                with MetricsWriter(directory, after_step=start) as writer:
                    Loop(
                        cfg, mesh, directory, batches, held_out, tokenizer, checkpointer, writer
                    ).run(state, start, console)
    return directory


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
