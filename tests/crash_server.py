"""Runs commands in forked children, each a process of its own that a test can kill.

Importing takes longer than a short training. This process imports everything but starts no JAX backend, and forks one
child for each line on its stdin: a JSON object with `args`, `output`, a file for the child's stdout and stderr, and
`folder`, where it runs, and `env`, variables to set, or to unset if null. It answers with the child's process id and,
when the child has ended, with its exit code (negative for a signal) and the seconds that processors spent on it. `args`
are those of `minitext`, or `sh -c COMMAND`, or a Python script and its arguments.
"""

import atexit
import gc
import json
import os
import runpy
import sys
import threading

import jax
import orbax.checkpoint  # noqa: F401
import tensorboard.compat.proto.event_pb2
import tensorboard.summary.writer.record_writer  # noqa: F401

from minitext.cli import main as cli
from minitext.distributed import devices
from minitext.files import cache_dir
from minitext.training import run  # noqa: F401


def cache_everything() -> None:
    """In place of the package's own: also programs that compile in less than a tenth of a second."""
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def child(args: list[str], output: str, folder: str, env: dict[str, str | None]) -> None:
    os.chdir(folder)
    for name, value in env.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if args[0] == "sh":
        os.execvp(args[0], args)
    devices.use_compilation_cache = cache_everything
    if args[0].endswith(".py"):
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")
    else:
        sys.argv = ["minitext", *args]
        try:
            cli.main()
        except SystemExit as end:
            if end.code == 2:
                leave(2)
            raise


def leave(code: int) -> None:
    """Ends a refused command as Python does, except for freeing each object, which takes longer than all the rest."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    gc.freeze()  # children that collected garbage here would copy all of this process's memory
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return child(**json.loads(line))
        print(pid, flush=True)
        _, status, used = os.wait4(pid, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
    return None


if __name__ == "__main__":
    main()
