"""Keeps an answer from tampering with its own grading: an audit hook, and a seal on the checker.

Both protect against accidents and common ways of cheating, and make that one exercise fail with a clear verdict. They
aren't a sandbox for hostile native code: if you don't trust the learners, run the grader in a container.
"""

import importlib
import inspect
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minitext.book.grading.registry import Exercise

_NETWORK = frozenset(
    f"socket.{name}"
    for name in ("connect", "bind", "getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo", "sendto", "sendmsg")
)  # fmt: skip
_PROCESSES = frozenset((
    "subprocess.Popen", "pty.spawn", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork",
    "os.forkpty", "os.kill", "os.killpg",
))  # fmt: skip
_FILES = frozenset(("open", "os.link", "os.symlink", "os.rename", "os.remove", "os.truncate"))
_TRACING = frozenset(("sys.settrace", "sys.setprofile"))
_PEEKING = frozenset((
    "sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers", "gc.get_referents",
))  # fmt: skip
_FRAMES = frozenset(("tb_frame", "gi_frame", "cr_frame", "ag_frame"))
_SEALED = (
    "builtins", "math", "operator", "re", "json", "json.encoder", "os", "numpy", "numpy.testing", "numpy.linalg", "jax",
    "jax.numpy", "jax.lax", "jax.nn", "jax.tree", "jax.tree_util", "jax.random",
)  # fmt: skip


def arm(
    protected: Iterable[Path],
    source: str,
    peer: tuple[list[str], dict[str, str]] | None = None,
) -> None:
    """Installs the audit hook, which stays for the life of the process.

    From then on the process can't use the network, start or signal processes, or open a file under `protected`, and
    code from the file `source` can't inspect other code's frames.

    Args:
        protected: folders.
        source: the file name under which the answer is compiled.
        peer: exact command and environment of the only process that may be started; that process must guard itself.
    """
    folders = tuple(os.path.realpath(folder) + os.sep for folder in protected)
    getframe, realpath, fsdecode = sys._getframe, os.path.realpath, os.fsdecode
    allowed = peer and (peer[0][0], list(peer[0]), None, dict(peer[1]))
    looking = False

    def from_answer() -> bool:
        nonlocal looking
        if looking:  # this function's own access to the frames is audited too
            return False
        looking = True
        try:
            frame: types.FrameType | None = getframe(2)
            while frame is not None and frame.f_code.co_filename == inspect.__file__:
                frame = frame.f_back
            return frame is not None and frame.f_code.co_filename == source
        finally:
            looking = False

    def refused(event: str, args: tuple) -> str:
        if event in _FILES:
            for path in args[:2]:
                if isinstance(path, (str, bytes)) and realpath(fsdecode(path)).startswith(folders):
                    return "opening the solutions or the checks"
        elif event in _NETWORK:
            return f"the network ({event})"
        elif event in _PROCESSES and not (event == "subprocess.Popen" and args == allowed):
            return f"starting or signalling a process ({event})"
        elif event in _TRACING or (event == "object.__setattr__" and args[1] == "__code__"):
            return f"changing running code ({event})"
        return ""

    def hook(event: str, args: tuple) -> None:
        what = refused(event, args)
        peeks = event in _PEEKING or (event == "object.__getattr__" and args[1] in _FRAMES)
        if peeks and from_answer():
            what = f"looking into the checker ({event})"
        if what:
            raise PermissionError(f"refused while grading: {what}")

    sys.addaudithook(hook)


def _code(value: Any) -> Any:
    """The parts of a function that must stay unchanged, apart from its identity."""
    if isinstance(value, types.FunctionType):
        return (value.__code__, value.__defaults__, value.__kwdefaults__)
    return None


class Seal:
    """A snapshot of everything that a verdict depends on; `broken` names what has changed since.

    It covers the grader's modules and classes, the checks with the modules they use (including oracles), and the
    comparison functions of Python, NumPy and JAX.
    """

    def __init__(self, exercise: Exercise, checks: types.ModuleType):
        for name in ("numpy.testing", "asyncio"):  # NumPy and JAX import these later: too late
            importlib.import_module(name)
        self._modules: dict[str, types.ModuleType] = {}
        self._entries: list[tuple[str, Any, str, Any, Any]] = []
        self._checks = (exercise, tuple((check, check.run) for check in exercise.checks))
        self._codes = [(check.run, _code(check.run)) for check in exercise.checks]
        own = [name for name in sys.modules if name.startswith("minitext.book.grading")] + [
            "__main__"
        ]
        used = [
            getattr(v, "__module__", None) or getattr(v, "__name__", "")
            for v in vars(checks).values()
        ]
        oracles = [name for name in used if isinstance(name, str) and name.startswith("minitext")]
        for name in dict.fromkeys((*_SEALED, *own, *oracles)):
            if name in sys.modules:
                self._modules[name] = sys.modules[name]
                self._add(name, sys.modules[name], deep=name not in _SEALED or name[:4] == "json")
        self._add(checks.__name__, checks, deep=True)
        if "jax" in sys.modules:
            self._add("jax.Array", type(sys.modules["jax"].numpy.zeros(())), deep=False)

    def _add(self, path: str, owner: Any, deep: bool) -> None:
        for name, value in list(vars(owner).items()):
            if callable(value) or isinstance(value, types.ModuleType):
                self._entries.append((path, owner, name, value, _code(value)))
            if deep and isinstance(value, type) and value.__module__ == path:
                self._add(f"{path}.{name}", value, deep=False)

    def broken(self) -> str:
        """The dotted name of something that was changed, or ""."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return name
        for path, owner, name, value, code in self._entries:
            now = owner.__dict__.get(name)
            if now is not value or _code(now) != code:
                return f"{path}.{name}"
        exercise, checks = self._checks
        if tuple((check, check.run) for check in exercise.checks) != checks:
            return f"the checks of {exercise.id}"
        return next((f"a check of {exercise.id}" for f, c in self._codes if _code(f) != c), "")
