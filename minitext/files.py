"""What a checkpoint asks of the disk: flushed files, a manifest of them, errors explained.

`seal` writes the manifest last, after everything it lists is on the disk; `verify` tells whether
the directory is still what was sealed. A file system reports few of the ways in which bytes are
lost: a file cut short by a power failure or changed on a failing disk reads without an error.

Chapters: 8.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minitext.errors import UserError

MANIFEST = "manifest.json"


def seal(directory: Path) -> None:
    """Flushes every file and folder under `directory` to the disk and writes the manifest.

    Raises:
        OSError: a file can't be read or the manifest can't be written.
    """
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    files = {path.relative_to(directory).as_posix(): _measure(path, sync=True) for path in paths}
    manifest = directory / MANIFEST
    manifest.write_text(_manifest(files), encoding="utf-8")
    sync(manifest)
    for folder in [*directory.rglob("*/"), directory]:
        sync(folder)


def verify(directory: str | os.PathLike[str]) -> str | None:
    """Reads every file that the manifest lists.

    Files that it doesn't list are of no concern.

    Returns:
        None when all are as they were sealed, else the first fault: the file and what is wrong.
    """
    directory = Path(directory)
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
        files = json.loads(text)["files"]
        whole = text == _manifest(files)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        return f"{MANIFEST} is not what was written"
    # Hashing releases the interpreter's lock, so threads use the cores.
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: _fault(directory / name, files[name]), files)
        found = [f"{name} {fault}" for name, fault in zip(files, faults, strict=True) if fault]
    return found[0] if found else None


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to write in, which becomes `path`, whole on the disk, when the block ends without an error.

    After an error it is removed.

    Raises:
        OSError: it can't be made, or renamed because there is something at `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield new
        new.chmod(0o755)  # mkdtemp's is for this user alone
        for file in [new, *new.rglob("*")]:
            sync(file)
        new.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write(path: Path, text: str) -> None:
    """Writes a text file so that a killed process, or a power failure, leaves the old file or the new one.

    Raises:
        OSError: the file can't be written.
    """
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_open_files(folder: Path) -> bool:
    """Whether this process has files open there, deleted ones too, which still take space; False where not known."""
    try:
        descriptors = list(Path("/proc/self/fd").iterdir())
    except OSError:  # not Linux
        return False
    names = []
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            names.append(os.readlink(descriptor))
    return any(name.startswith(f"{folder}{os.sep}") for name in names)


def explain(error: BaseException) -> str | None:
    """What the operating system refused and how to mend it; None when that isn't the error.

    TensorStore, which writes the arrays, has the system's error number only in its message.
    """
    found = re.search(r"os_error_code='(\d+)'", str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    if number is None:
        return None
    full = number in (errno.ENOSPC, errno.EDQUOT)
    mend = f"{'free some space or ' if full else ''}choose a run.dir that can be written"
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)}): {mend}"


def _fault(path: Path, sealed: dict[str, Any]) -> str | None:
    try:
        found = _measure(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found["size"] != sealed["size"]:
        return f"has {found['size']} bytes, not {sealed['size']}"
    if found != sealed:
        return "was altered (its SHA-256 is another)"
    return None


def _measure(path: Path, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


def _manifest(files: dict[str, Any]) -> str:
    # With its own checksum, and compared as text, so that no altered byte of it goes unseen.
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1) + "\n"


FORMAT = 1  # part of every fingerprint: raise it when what an entry holds changes


def cache_dir() -> Path:
    """Returns `$MINITEXT_CACHE`, or `~/.cache/minitext`; it need not exist yet."""
    return Path(os.path.expanduser(os.environ.get("MINITEXT_CACHE") or "~/.cache/minitext"))


def fingerprint(*parts: Any) -> str:
    """Returns 16 hexadecimal digits that stand for `parts` (anything JSON can hold)."""
    text = json.dumps([FORMAT, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cache_entry(name: str) -> Path:
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
def new_cache_entry(path: Path) -> Iterator[Path]:
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
