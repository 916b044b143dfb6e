"""What a run saves and resumes from: checkpoints on the shared disk, and copies on each process's own.

Chapters: 6, 8.
"""

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from minitext.checkpoint.checkpointer import Checkpointer
from minitext.checkpoint.emergency import LocalCopies, restore_newest
from minitext.config.config import Config
from minitext.data.batches import Batches
from minitext.distributed import job
from minitext.errors import UserError
from minitext.observability.goodput import Ledger
from minitext.training.nonfinite import Guard
from minitext.training.run_dir import CONFIG
from minitext.training.step import TrainState, abstract_state


def local_copies(
    cfg: Config, directory: Path
) -> contextlib.AbstractContextManager[LocalCopies | None]:
    """Returns the process's own copies if `checkpoint.local_dir` asks for them.

    Raises:
      UserError: if it names a file, a folder in one, or a folder that can't be made or written.
    """
    where, is_new = cfg.checkpoint.local_dir, not (directory / CONFIG).exists()
    if where is None:
        return contextlib.nullcontext()
    for path in (Path(where), *Path(where).parents):
        if os.path.isfile(path):
            raise UserError(
                f"checkpoint.local_dir={where}: {path} is a file: name a folder on each process's own disk"
            )
    try:
        Path(where).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as error:
        raise UserError(
            f"checkpoint.local_dir={where} cannot be written ({error.strerror}): name a folder on each process's own "
            "disk"
        ) from error
    return LocalCopies(where, cfg.checkpoint.local_every, directory, is_new)


def restore(
    cfg: Config,
    mesh: Mesh,
    checkpointer: Checkpointer,
    copies: LocalCopies | None,
    batches: Batches,
) -> tuple[TrainState, int] | None:
    """Returns the run's newest state and its step, and moves `batches` to where it was; None for a new run."""
    if copies is None and not job.joined() and checkpointer.latest() is None:
        return None
    restored = restore_newest(checkpointer, copies, abstract_state(cfg, mesh).saved)
    if restored is None:
        return None
    batches.set_state(restored.data_state)
    return restored.state, restored.step


@dataclass
class Save:
    """An action of the loop: saves the state every `train.save_every` steps, and at the end.

    Attributes:
      cfg: the run's configuration.
      batches: their position is saved with the state.
      guard: refuses parameters that aren't finite.
      ledger: flushed before each save.
      saver: where the state goes.
    """

    cfg: Config
    batches: Batches
    guard: Guard
    ledger: Ledger
    saver: Checkpointer | LocalCopies
    event = "save"
    is_timed = True

    def is_due(self, step: int, stop: bool) -> bool:
        """Whether to save after this step."""
        train = self.cfg.train
        return stop or step == train.steps or step % train.save_every == 0

    def __call__(self, step: int, state: TrainState) -> None:
        """Starts the save; the arrays are written in the background."""
        self.guard.check_parameters(step, state.params)
        self.ledger.flush()  # a kill must not take steps from the ledger that a checkpoint has
        config = self.cfg.model_dump(mode="json")
        self.saver.save(step, state.saved, self.batches.get_state(), config)


class SaveCopy(Save):
    """Writes the process's own copies, when no save to the shared disk is due."""

    def is_due(self, step: int, stop: bool) -> bool:
        """Whether to copy after this step."""
        assert not isinstance(self.saver, Checkpointer)
        return self.saver.is_due(step) and not super().is_due(step, stop)


def make_saves(
    cfg: Config,
    batches: Batches,
    guard: Guard,
    ledger: Ledger,
    checkpointer: Checkpointer,
    copies: LocalCopies | None,
) -> list[Save]:
    """Returns the actions that save a run; `copies` are this process's own, if it makes any."""
    saves = [Save(cfg, batches, guard, ledger, checkpointer)]
    return saves if copies is None else [*saves, SaveCopy(cfg, batches, guard, ledger, copies)]
