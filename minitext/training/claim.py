"""One training at a time in a run directory, which has to stay there; and none left behind that never began.

Process 0 of a job locks RUN/lock until it ends. The lock belongs to the process (flock(2)): however a process ends, the
system lets go of it, so none is ever left behind to be cleared by hand. The file itself stays.

Who sees the lock? Every process of the same machine, on any file system. Other machines see it on NFS, where Linux
makes it a lock of the server (unless the mount says `nolock` or `local_lock`), and on Lustre mounted with `flock`; not
through mounted buckets, such as those of gcsfuse. When a machine crashes, an NFS server takes up to about 90 seconds to
let go, so the refusal has exit code 1, with which a launcher tries again. Where a disk has no locks at all, a warning
says so. The other processes of a job need no lock: theirs is process 0's, and they end when it does.

Chapters: 8.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path

from minitext.errors import UserError

LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

logger = logging.getLogger(__name__)


class RunDirLost(UserError):
    """The run directory belongs to another training, or is gone: the same command may work later."""

    exit_code = 1


class Claim(AbstractContextManager):
    """Makes a run directory if need be, and keeps other trainings out of it.

    If the block ends with an error before `begin` was called, a directory that was made here is deleted again.

    Args:
      directory: the run directory.
      first: whether this is process 0, which holds the lock; for the others only the directory is made.

    Raises:
      RunDirLost: on entering, if another process trains there; on leaving with an error, if the directory is gone,
        because that explains it.
      OSError: if the directory can't be made or written.
    """

    def __init__(self, directory: Path, first: bool = True):
        self.directory, self.first = directory, first
        self._made: list[Path] = []
        self._begun = False
        self._file: int | None = None

    def __enter__(self) -> "Claim":
        if self.first:
            self._made = [p for p in (self.directory, *self.directory.parents) if not p.exists()]
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.first:
            self._file = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock(self._file)
            except BaseException:
                os.close(self._file)
                raise
            self._inode = os.fstat(self._file).st_ino
        return self

    def begin(self) -> None:
        """Says that training begins: from now on the directory stays, whatever happens."""
        self._begun = True

    def check(self, *_: object) -> None:
        """Raises RunDirLost if the directory isn't there any more, or is another; takes a few microseconds."""
        if self._file is None:
            return
        try:
            there = os.stat(self.directory / LOCK).st_ino == self._inode
        except (FileNotFoundError, NotADirectoryError):
            there = False
        if not there:
            raise RunDirLost(
                f"{self.directory} was deleted or moved while training wrote to it: what it held is lost unless you "
                "put it back"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _) -> None:
        try:
            if self._begun and isinstance(error, Exception) and not isinstance(error, RunDirLost):
                try:
                    self.check()
                except RunDirLost as lost:
                    raise lost from error
            elif error is not None and not self._begun and self.directory in self._made:
                shutil.rmtree(self.directory, ignore_errors=True)
                for parent in self._made[1:]:
                    with contextlib.suppress(
                        OSError
                    ):  # somebody else's folders may be in it by now
                        parent.rmdir()
        finally:
            if self._file is not None:
                os.close(self._file)

    def _lock(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
            raise RunDirLost(
                f"{self.directory} is in use, by {holder}: wait for its end, or choose another run.name"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%s is on a disk without locks (%s): see to it that only one training at a time writes there",
                self.directory, error.strerror,
            )  # fmt: skip
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(file, 0)
        os.pwrite(
            file, f"process {os.getpid()} on {os.uname().nodename} since {since}\n".encode(), 0
        )
