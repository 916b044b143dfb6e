"""Files that a crash or a full disk doesn't spoil: atomic writes, sealed folders, and the cache directory.

Every path that a user can name, in a setting, a command or an environment variable, passes through `local_path`, which
refuses the addresses of buckets and web pages.

`draft`, and what is built on it, writes a file or folder whole or not at all. `seal` also lists a folder's files with
their checksums, and `verify` checks them: file systems report few of the ways to lose bytes, so a file that a power
failure cut short or a failing disk changed is usually read without an error.

Chapters: 8.
"""

import collections
import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from minitext.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1  # part of every fingerprint: raise it when the content of cache entries changes

P = TypeVar("P", bound=str | os.PathLike[str] | None)
# One slash is enough, because `pathlib` makes gs:/bucket of gs://bucket; one letter isn't: C:/ is a drive.
ADDRESS = re.compile(r"(?i:(gs|gcs)|(s3[an]?)|[a-z][a-z0-9+.-]+):/+([^/]*)/*(.*)", re.DOTALL)


class UnreadableFile(UserError):
    """A file that can't be read: the message begins with its path."""


class NotLocal(UserError, ValueError):
    """An address where a path should be. A `ValueError` too, as pydantic's validators need it."""


def local_path(path: P) -> P:
    """Returns a path as it is, if some file or folder could have it: not the address of a bucket or of a web page.

    minitext reads and writes through the operating system's files. Without this check `gs://bucket/runs` would be a
    folder called `gs:` in the current one. Checkpoints are committed by renaming a folder, which the mounts named here
    can do and Mountpoint for S3 can't (book/limits.md).

    Raises:
        NotLocal: it is an address; the message says how to mount a bucket and what to name instead. Or it's empty, too
            long, or has a control character.
    """
    if not (found := ADDRESS.match(str(path))):
        if path is not None and (problem := path_problem(str(path))):
            raise NotLocal(f"{shorten(str(path))} {problem}: name a file or folder")
        return path
    google, amazon, bucket, rest = found.groups()
    bucket = bucket or "BUCKET"
    mounted = f"/mnt/{bucket}"
    if google or amazon:
        rclone = f"rclone mount --vfs-cache-mode writes s3:{bucket}"
        mount = f"{f'gcsfuse --rename-dir-limit=100000 {bucket}' if google else rclone} {mounted}"
        fix = f"is in a bucket: mount it, for instance with `{mount}`, and name {mounted}/{rest}"
    else:
        fix = "is an address: copy the files to this machine, or mount them, and name their path"
    raise NotLocal(f"{path} {fix.rstrip('/')}")


@contextlib.contextmanager
def draft(path: Path) -> Iterator[Path]:
    """Gives a name beside `path` for a new file or folder, which becomes `path` if the block ends without an error.

    A killed process or a power failure leaves the old file or the new one, never half of one. After an error the
    draft is deleted.

    Raises:
        OSError: it can't be flushed or renamed, for instance because `path` is a folder with files in it.
    """
    # A name of its own, because other processes may write `path` too; and short, because names have a limit.
    new = path.with_name(f".{path.name[:50]}-{secrets.token_hex(4)}")
    try:
        yield new
        for file in [new, *new.rglob("*")]:
            sync(file)
        new.replace(path)
        sync(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):
            new.unlink()


def write(path: Path, text: str) -> None:
    """Writes a text file as a `draft`."""
    with draft(path) as new:
        new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder to write in, a `draft` of `path`; makes the folders above."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # of a file in a folder's place the system would say this
        raise NotADirectoryError(
            errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename
        ) from None
    with draft(path) as new:
        new.mkdir()
        yield new


def path_problem(path: str) -> str | None:
    """Says why no file can have this path, such as `is empty`; None if one could.

    File systems allow 255 bytes for a name and Linux 4,095 for a path. Control characters are allowed, NUL aside, but
    nobody means to type them.
    """
    if not path.strip():
        return "is empty"
    if any(unicodedata.category(character) == "Cc" for character in path):
        return "has a control character"
    try:
        names = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        return "has half a character"
    if (longest := max(map(len, names))) > 255:
        return f"has a name of {longest} bytes, and 255 is the limit"
    length = sum(map(len, names)) + len(names) - 1
    return f"has {length} bytes, and 4095 is the limit" if length > 4095 else None


def check_new_file(what: str, path: str | Path) -> None:
    """Refuses, before anything is computed, a file that couldn't be written afterwards.

    Args:
        what: the option that names it, for the message.
        path: of the file, which may exist.

    Raises:
        UserError: if the path is an address, a folder, a pipe or a device, or no file can be made beside it.
    """
    local_path(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            # A pipe might wait for ever, and a device would be replaced by a file.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise IsADirectoryError
        # Try it: permissions say nothing to root, or of a read-only file system.
        if not str(path).endswith("/"):
            with tempfile.TemporaryFile(dir=Path(path).absolute().parent):
                return
    except OSError:
        pass
    raise UserError(
        f"{what} {shorten(str(path))} cannot be written: name a file in a folder that is there"
    )


def shorten(text: str) -> str:
    """Returns a text for an error's line: printable, in quotes if it's blank, and without its middle if it's long."""
    if not text.strip():
        return repr(text)
    text = text if len(text) <= 120 else f"{text[:60]}...{text[-40:]}"
    return text if text.isprintable() else ascii(text)[1:-1]


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Returns `$MINITEXT_CACHE`, or `~/.cache/minitext`; it need not exist yet.

    Raises:
        UserError: it's an address, or in the home of a user that there isn't.
    """
    named = local_path(os.environ.get("MINITEXT_CACHE") or "~/.cache/minitext")
    if (found := os.path.expanduser(named)).startswith("~"):
        raise UserError(
            f"the cache directory {named} is in no user's home: set the environment variable MINITEXT_CACHE to a "
            "directory you can write to"
        )
    return Path(found)


def fingerprint(*parts: Any) -> str:
    """Returns 16 hexadecimal digits that identify `parts` (anything JSON can hold)."""
    text = json.dumps([FORMAT, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def new_cache_entry(path: Path) -> Iterator[Path]:
    """Gives a `new_folder` for an entry of the cache.

    If two processes write the same entry at once, the first to finish provides it and the other's is thrown away.

    Raises:
        UserError: the cache can't be written, for instance because the disk is full.
    """
    try:
        with new_folder(path) as new:
            yield new
    except OSError as error:
        if path.is_dir():
            return  # another process was faster
        raise UserError(
            f"cannot use the cache directory {path.parent}: {error.strerror}: set the environment variable "
            "MINITEXT_CACHE to a directory you can write to"
        ) from error


def read_cache(name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of the cache; {} if it is missing or damaged."""
    try:
        found = json.loads((cache_dir() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_cache(name: str, entries: Mapping[str, Any]) -> None:
    """Writes such a file, if the disk lets it."""
    with contextlib.suppress(OSError):  # at worst the same work is done again next time
        cache_dir().mkdir(parents=True, exist_ok=True)
        write(cache_dir() / name, json.dumps(dict(entries), indent=1))


def read_text(path: Path, limit: int) -> str:
    """Reads a text file that somebody else wrote.

    Args:
        path: of the file.
        limit: in bytes; a longer file isn't read.

    Raises:
        UnreadableFile: it can't be read, is too long, or isn't UTF-8.
    """
    shown = shorten(str(path))
    with open_file(path) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise UnreadableFile(
            f"{shown} has more than {limit:,} bytes, too many for a file of this kind: name another"
        )
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"{shown} is not UTF-8 (byte {error.start} is 0x{text[error.start]:02x}): name a text file, or convert it"
        ) from error


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that somebody named, to read its bytes; a pipe, which might wait for ever, isn't one.

    Raises:
        UnreadableFile: it can't be opened or read, or is a folder, a pipe or a device.
    """
    shown = shorten(str(path))
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UnreadableFile(f"{shown} is not a file: name one")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UnreadableFile(
            f"{shown} cannot be read ({error.strerror}): name a file that can"
        ) from error


def read_json(path: Path, limit: int) -> Any:
    """Reads a JSON file that somebody else wrote.

    Args:
        path: of the file.
        limit: in bytes; a longer file isn't read.

    Raises:
        UnreadableFile: it can't be read, is too long or too deep, has a name twice, or isn't JSON.
    """
    text, shown = read_text(path, limit), shorten(str(path))
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise UnreadableFile(f"{shown} is nested too deep: correct it") from error
    except ValueError as error:
        raise UnreadableFile(
            f"{shown} is not JSON ({shorten(str(error))}): correct it, or name another file"
        ) from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice} is there twice")
    return found


def seal(directory: Path) -> None:
    """Flushes every file and folder in `directory` to the disk, and last of all writes the manifest.

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
    """Reads every file that the manifest lists; other files don't matter.

    Returns:
        None if all are as they were sealed, else the first fault: the file and what is wrong with it.
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
    # Hashing releases the interpreter's lock, so threads use all cores.
    with futures.ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: _fault(directory / name, files[name]), files)
        return next(
            (f"{name} {fault}" for name, fault in zip(files, faults, strict=True) if fault), None
        )


def _fault(path: Path, sealed: dict[str, Any]) -> str | None:
    try:
        found = _measure(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found["size"] != sealed["size"]:
        return f"has {found['size']} bytes, not {sealed['size']}"
    return "was altered (its SHA-256 is another)" if found != sealed else None


def _measure(path: Path, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


def _manifest(files: dict[str, Any]) -> str:
    # It has a checksum of its own and is compared as text, so that no altered byte of it goes unseen.
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1) + "\n"


def explain(error: BaseException, fix: str = "choose a run.dir that can be written") -> str | None:
    """Says what the operating system refused and how to fix it; None if the error is of another kind.

    TensorStore, which writes the arrays, gives the system's error number only in its message.

    Args:
        error: what was raised.
        fix: what to do, besides freeing space on a full disk.
    """
    found = re.search(r"os_error_code='(\d+)'", str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    if number is None:
        return None
    space = "free some space or " if number in (errno.ENOSPC, errno.EDQUOT) else ""
    name = errno.errorcode.get(number, number)
    return f"{os.strerror(number)} ({name}): {space}{fix}"


def has_open_files(folder: Path) -> bool:
    """Whether this process has open files there, deleted ones included, which still take space. Linux only."""
    names = []
    with contextlib.suppress(OSError):  # no /proc
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed in the meantime
                names.append(os.readlink(descriptor))
    # The system names a file by its path without links.
    return any(name.startswith(f"{folder.resolve()}{os.sep}") for name in names)
