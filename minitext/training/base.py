"""Which checkpoint of another run a run needs at each start, by step and by what it holds.

A run with adapters saves them alone, so each start reads the other weights again. One whose objective compares with the
model that training started from reads that model again. They must be the same ones.

Chapters: 26.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from minitext import files
from minitext.errors import UserError

NAME, LIMIT = "base.json", 1 << 16


class Base(NamedTuple):
    """A checkpoint.

    Attributes:
      step: its step.
      digest: SHA-256 of its manifest, which has the size and hash of each of its files.
    """

    step: int
    digest: str


def identify(checkpoint: Path, step: int) -> Base:
    """Returns what tells a checkpoint from others, of its folder and step."""
    return Base(step, hashlib.sha256((checkpoint / files.MANIFEST).read_bytes()).hexdigest())


def read(directory: Path) -> Base | None:
    """Returns the checkpoint that a run needs, or None if it has noted none yet.

    Raises:
      UserError: if the file is damaged.
    """
    if not (path := directory / NAME).exists():
        return None
    found = files.read_json(path, LIMIT)
    try:
        return Base(int(found["step"]), str(found["digest"]))
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} does not say which base the adapters belong to: put back a copy of it"
        ) from None


def write(directory: Path, base: Base) -> None:
    """Notes the checkpoint that a run needs."""
    files.write(directory / NAME, json.dumps(base._asdict()))
