"""Shuts the process that answers in, with what the system offers.

On Linux: namespaces of its own (its processes end with it, and it sees no others), Landlock (it reads Python, JAX and
minitext, and writes only to its own folder) and no privileges. Whatever of this a system refuses is left out: the
verdict doesn't depend on it, since nothing of the answer runs where that is made. `forbid_by_audit` works everywhere,
and words what it refuses for the learner.
"""

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

_NEW_USER, _NEW_PID, _NEW_MOUNTS, _NEW_NET, _NEW_IPC = 1 << 28, 1 << 29, 1 << 17, 1 << 30, 1 << 27
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 36, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8
_CHANGES = sum(1 << bit for bit in range(4, 13))  # removing and making files of all kinds
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys", "/dev", "/opt")

_NETWORK = frozenset(
    f"socket.{name}"
    for name in ("connect", "bind", "getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo", "sendto", "sendmsg")
)  # fmt: skip
_PROCESSES = frozenset((
    "subprocess.Popen", "pty.spawn", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork",
    "os.forkpty", "os.kill", "os.killpg",
))  # fmt: skip
_FILES = frozenset(("open", "os.link", "os.symlink", "os.rename", "os.remove", "os.truncate"))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def adopt_orphans() -> None:
    """Makes the calling process the parent of whatever its descendants leave behind, and unreadable to them."""
    _prctl(_SET_SUBREAPER, 1)
    _prctl(_SET_DUMPABLE, 0)


def die_with_parent() -> None:
    """The calling process is killed when its parent ends."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def fork_inside(body: Callable[[], None], network: bool = False) -> int:
    """Runs `body` in a new process, in namespaces of its own where the system allows it; returns a process id.

    Waiting for that process gives the exit status of the one that runs `body`, and killing it kills that one too.
    """
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent()
        os.setsid()
        if _unshare(network):
            _go_inside()
        body()
    except BaseException:
        traceback.print_exc()  # shown with the answer's own output
    finally:
        os._exit(1)
    raise AssertionError


def _go_inside() -> None:
    """Forks into the new process namespace; returns there, while the calling process waits and ends likewise.

    The namespace's first process only waits: signals that it doesn't handle don't reach such a process.
    """
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        _close_from(3, read)
        status = int.from_bytes(os.read(read, 4), "little")
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(os.WEXITSTATUS(status))
    die_with_parent()
    body = os.fork()
    if body:
        _close_from(3, write)
        found, status = 0, 0
        while found != body:
            found, status = os.wait()
        os.write(write, status.to_bytes(4, "little"))
        os._exit(0)  # and all that is left in the namespace ends
    os.close(write)
    die_with_parent()


def _close_from(first: int, kept: int) -> None:
    os.closerange(first, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _unshare(network: bool) -> bool:
    if sys.platform != "linux":
        return False
    user, group = os.getuid(), os.getgid()
    kinds = _NEW_USER | _NEW_PID | _NEW_MOUNTS | _NEW_IPC | (0 if network else _NEW_NET)
    if _libc().unshare(kinds):
        return False
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
    with contextlib.suppress(OSError):
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


class _Rules(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _Below(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def restrict_files(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """From now on the process reads files only below the given folders, and writes only to some (Linux 5.13)."""
    if sys.platform != "linux":
        return
    libc = _libc()
    libc.prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), 0, 0, 0)
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return
    changes = _CHANGES | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    everything = _WRITE | _READ_FILE | _EXECUTE | changes
    rules = _Rules(everything, 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    handle = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    if handle < 0:
        return
    files = _READ_FILE | _EXECUTE
    allowed = {Path(name): files for name in _SYSTEM} | dict.fromkeys(readable, files)
    allowed |= {Path("/dev"): files | _WRITE} | dict.fromkeys(writable, everything)
    for path, rights in allowed.items():
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not path.is_dir():
                rights &= files | _WRITE | (1 << 14 if version >= 3 else 0)
            below = _Below(rights, descriptor)
            libc.syscall(_LANDLOCK_ADD, handle, 1, ctypes.byref(below), 0)
            os.close(descriptor)
    libc.syscall(_LANDLOCK_RESTRICT, handle, 0)
    os.close(handle)


def readable_places(hidden: Iterable[Path]) -> list[Path]:
    """Python's own folders and those it imports from, without what lies below `hidden`."""
    hidden = [path.resolve() for path in hidden]
    found: list[Path] = []

    def add(path: Path) -> None:
        if any(path == h or h in path.parents for h in hidden):
            return
        if any(path in h.parents for h in hidden):
            with contextlib.suppress(OSError):
                for inner in path.iterdir():
                    add(inner)
        else:
            found.append(path)

    for name in (sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path):
        if name and os.path.isdir(name) and Path(name).resolve() != Path("/"):
            add(Path(name).resolve())
    return found


def forbid_by_audit(hidden: Iterable[Path]) -> None:
    """Installs an audit hook for the life of the process: no network, no processes, no file below `hidden`."""
    folders = tuple(os.path.realpath(folder) + os.sep for folder in hidden)
    realpath, fsdecode = os.path.realpath, os.fsdecode

    def hook(event: str, args: tuple) -> None:
        what = ""
        if event in _FILES:
            for path in args[:2]:
                if isinstance(path, (str, bytes)) and (
                    realpath(fsdecode(path)) + os.sep
                ).startswith(folders):
                    what = "opening the solutions or the checks"
        elif event in _NETWORK:
            what = f"the network ({event})"
        elif event in _PROCESSES:
            what = f"starting or signalling a process ({event})"
        if what:
            raise PermissionError(f"refused while grading: {what}")

    sys.addaudithook(hook)
