"""One process of the jobs that test_distributed.py starts: python job.py WHAT DIRECTORY [SETTING]..."""

import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from minitext.checkpoint import leaves
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config.config import load_config
from minitext.data.batches import make_batches
from minitext.distributed import devices, job
from minitext.sharding.mesh import make_mesh
from minitext.training import run
from minitext.training.step import abstract_state


def train(cfg, directory):
    run.train(cfg, Console(quiet=True))
    order(cfg, directory)


def order(cfg, directory):
    """Writes the first batches, whole, as this job makes them."""
    batches = make_batches(
        cfg.data, make_mesh(cfg.mesh), vocab=cfg.model.vocab, global_batch=cfg.train.global_batch
    )
    read = [leaves.gather(next(batches)) for _ in range(3)]
    batches.close()
    if job.is_first():
        arrays = {f"{i}.{name}": x for i, batch in enumerate(read) for name, x in batch.items()}
        np.savez(directory / "batches.npz", **arrays)


def restore(cfg, directory):
    """Writes the newest checkpoint's state, as this job reads it."""
    with jax.set_mesh(mesh := make_mesh(cfg.mesh)):
        found = Checkpointer(directory / cfg.run.name / "checkpoints").restore(
            abstract_state(cfg, mesh)
        )
    state = leaves.named(leaves.gather(found.state))
    if job.is_first():
        np.savez(directory / "state.npz", **state)


def talk(cfg, directory):
    """What processes tell each other, each process's view in a file of its own."""
    index = jax.process_index()
    values = [job.agree("square", (index + turn) ** 2) for turn in range(3)]
    missing = ""
    if index == 0:
        try:
            job.barrier("late", 0.5)
        except job.JobFailed as error:
            missing = str(error)
    (directory / f"{index}.txt").write_text(f"{values}\n{missing}\n{job.name_of(1)}")


if __name__ == "__main__":
    what, directory, *settings = sys.argv[1:]
    devices.start(join=True)
    {"train": train, "order": order, "restore": restore, "talk": talk}[what](
        load_config("laptop", settings), Path(directory)
    )
    job.finish()
