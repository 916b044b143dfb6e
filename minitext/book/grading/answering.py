"""The answering process: runs one answer, and serves the calls of the process that decides.

It is forked from the deciding process before that has read any check, so it starts at once, has JAX loaded, and holds
nothing that an answer should not see.
"""

import os
import resource
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minitext.book.grading import confine, evaluate, source
from minitext.book.grading.evaluate import Refused
from minitext.book.grading.registry import PACKAGE, Exercise

ANSWER_MODULE = "answer"  # module name under which a learner's source runs
FILE_BYTES = 2**30  # the largest file that an answer may write
HIDDEN = ("solutions", "checks", "notebooks", "book", ".git", "_exercises", "_build")


def load(pieces: list[source.Piece], exercise: Any, filename: str, registered: bool) -> Any:
    """Runs an answer's source as the module `answer` and returns the exercise's function.

    `exercise` needs `id`, `function` and `forbid`. `registered` puts the module in `sys.modules`.

    Raises:
        Refused: if it doesn't parse, uses something forbidden, or doesn't define the function.
    """
    try:
        tree = source.compose(pieces, exercise.id, filename)
        used = source.forbidden(tree, exercise.forbid)
        if used:
            raise Refused(f"this exercise must be solved without {used}")
        code = compile(tree, filename, "exec", dont_inherit=True)
    except (SyntaxError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line} of {filename})" if line else ""
        raise Refused(f"not Python: {getattr(error, 'msg', error)}{where}") from None
    module = types.ModuleType(ANSWER_MODULE)
    if registered:  # dataclasses and pickle look up their module
        sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        if isinstance(error, NotImplementedError) and error.args == (exercise.id,):
            return _stub(exercise.id)
        result = evaluate.raised("", error, None, filename, none=False)
        raise Refused(f"the file fails when it is run: {result.message}") from None
    _look_for_forbidden(module, exercise)
    fn = vars(module).get(exercise.function)
    if not callable(fn):
        raise Refused(f"there is no function {exercise.function!r} in {filename}")
    return fn


def _stub(id: str) -> Callable:
    def untouched(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(id)

    return untouched


def _look_for_forbidden(module: types.ModuleType, exercise: Exercise) -> None:
    """Catches what the syntax doesn't show: a forbidden module or function under another name."""
    for name, value in vars(module).items():
        home = value.__name__ if isinstance(value, types.ModuleType) else None
        home = home or f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', '')}"
        if any(f"{home}.".startswith(f"{forbidden}.") for forbidden in exercise.forbid):
            raise Refused(f"this exercise must be solved without {home} (your {name!r})")


def start(job: dict[str, Any], join: Callable[[], None] | None = None) -> tuple[int, socket.socket]:
    """Forks the answering process of a job; returns its process id and this side of the connection.

    `join` joins it to others of its kind, for which it keeps the network.
    """
    here, there = socket.socketpair()
    pid = confine.fork_inside(lambda: _answer(job, there, join), network=join is not None)
    there.close()
    return pid, here


def _answer(
    job: dict[str, Any], connection: socket.socket, join: Callable[[], None] | None
) -> None:
    kept, shown = os.dup(connection.fileno()), os.dup(sys.stderr.fileno())
    connection.detach()
    os.dup2(kept, 3)
    os.dup2(shown, 4)
    os.closerange(5, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = sys.stderr = os.fdopen(4, "w", buffering=1, closefd=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    if join is not None:
        join()
    root = Path(job["root"])
    roots = (root, root.parent, PACKAGE, PACKAGE.parent)
    hidden = [place / name for place in roots for name in HIDDEN if (place / name).is_dir()]
    hidden = [h for h in hidden if h != PACKAGE / "book"]
    if job["folder"]:  # an answer may import the learner's other files
        sys.path.append(job["folder"])
    for name in ("MINITEXT_EXERCISES", "MINITEXT_LEARNER"):
        os.environ.pop(name, None)
    # A cache of compiled programs is only given where all answers are trusted.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    writable = [Path.cwd(), *([Path(cache)] if cache else [])]
    confine.restrict_files(confine.readable_places(hidden), writable)
    confine.forbid_by_audit(hidden)

    from minitext.book.grading.remote import End, line_in

    end = End(socket.socket(fileno=3), trusted=False, line_of=line_in(job["filename"]))
    exercise = types.SimpleNamespace(**job["exercise"])
    pieces = [source.Piece(*piece) for piece in job["pieces"]]
    try:
        fn = load(pieces, exercise, job["filename"], registered=True)
    except Refused as error:
        end._send(["refused", str(error)])
        os._exit(0)
    end._send(["loaded", end.lend(fn)])
    end.serve()
