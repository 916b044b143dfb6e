"""The cache directory: entries that are written once, whole, and then only read.

Everything in it can be made again: tokens, tokenizers, compiled programs, this machine's measured speed.

Chapters: 7.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minitext.errors import UserError

FORMAT = 1  # part of every fingerprint: raise it when what an entry holds changes


def cache_dir() -> Path:
    """Returns `$MINITEXT_CACHE`, or `~/.cache/minitext`; it need not exist yet."""
    return Path(os.path.expanduser(os.environ.get("MINITEXT_CACHE") or "~/.cache/minitext"))


def fingerprint(*parts: Any) -> str:
    """Returns 16 hexadecimal digits that stand for `parts` (anything JSON can hold)."""
    text = json.dumps([FORMAT, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def entry(name: str) -> Path:
    """Returns the path of the cache entry `name`, whether or not it exists, in a directory that can be written.

    Raises:
        UserError: the cache directory cannot be made or written to.
    """
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise _unusable(root, error) from error
    return root / name


@contextmanager
def new_entry(path: Path) -> Iterator[Path]:
    """Gives a directory to write in, which becomes `path` when the block ends without an error.

    Two processes may write the same entry at once: the first to finish provides it, the other's
    work is thrown away. A reader never sees half an entry.

    Raises:
        UserError: the directory cannot be written, for instance because the disk is full.
    """
    new: Path | None = None
    try:
        new = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        yield new
        try:
            new.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    except OSError as error:
        raise _unusable(path.parent, error) from error
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)


def _unusable(root: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot use the cache directory {root}: {error.strerror}: set the environment variable "
        "MINITEXT_CACHE to a directory you can write to"
    )
