"""Which run a run's adapters belong to: its checkpoint, by step and by what it holds.

A run with adapters saves them alone, so each start reads the other weights again. They must be the same ones.

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
    """Returns the base of a run's adapters, or None if the run has none yet.

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
    """Notes the base of a run's adapters."""
    files.write(directory / NAME, json.dumps(base._asdict()))
