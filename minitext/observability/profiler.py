"""What JAX can record about a run, set by the `profile` section: a trace of some steps, and the compiler's dumps.

    RUN/profile/     a trace in XProf's format (an `.xplane.pb`); with several processes, each one's in `process-N`
    RUN/hlo/         `profile.dump_hlo`: the train step's programs as XLA's passes leave them, as text
    RUN/llo/         `profile.dump_llo`: on TPUs, the machine code of each of their operations

`minitext profile RUN` summarises the trace (`minitext.observability.profile_report`). With `profile.port`, other tools
such as XProf can ask a running process to trace its next seconds.

Chapters: 20.
"""

import os
import re
import socket
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from minitext.config.config import Config
from minitext.distributed import devices
from minitext.errors import UserError

TRACES, HLO, LLO = "profile", "hlo", "llo"


def dump_programs(cfg: Config) -> None:
    """Sets the flags for `profile.dump_hlo` and `profile.dump_llo`; JAX's backend must not have started.

    The machine code of a large model's step takes gigabytes. A program loaded from the compilation cache isn't
    compiled, so it leaves no dump: turn the cache off.

    Raises:
      UserError: if the run directory's path has a space, at which the compilers end a flag.
    """
    directory = (Path(cfg.run.dir) / str(cfg.run.name)).absolute()
    if re.search(r"\s", str(directory)):
        raise UserError(
            f"the compiler can't write into {directory}, whose path has a space: choose a run.dir and a run.name "
            "without one"
        )
    if cfg.profile.dump_hlo:
        # Only the train step: every small setup program would leave a dozen files too.
        step_only = "--xla_dump_hlo_as_text --xla_dump_hlo_module_re=train_step"
        _add_flags("XLA_FLAGS", f"--xla_dump_to={directory / HLO} {step_only}")
    if cfg.profile.dump_llo:
        text = "--xla_jf_dump_llo_text=true"
        _add_flags("LIBTPU_INIT_ARGS", f"--xla_jf_dump_to={directory / LLO} {text}")


def _add_flags(variable: str, flags: str) -> None:
    os.environ[variable] = f"{os.environ.get(variable, '')} {flags}".strip()


def check(cfg: Config, directory: Path, platform: str) -> None:
    """Checks that what the configuration asks for can be recorded here.

    Args:
      cfg: the configuration.
      directory: the run directory.
      platform: of the mesh's devices, such as `tpu`.

    Raises:
      UserError: for a trace in a process that compiled for TPUs, a port that is in use, dumps requested after JAX read
        its flags, or machine code on anything but a TPU.
    """
    if cfg.profile.first_step is not None or cfg.profile.port is not None:
        devices.check_profiler()
    if cfg.profile.port is not None:
        _check_port(cfg.profile.port)
    if cfg.profile.dump_llo and platform != "tpu":
        raise UserError(
            f"profile.dump_llo=true on {platform}: only TPUs have LLO; set profile.dump_hlo=true, or compile single "
            "kernels for TPUs with: minitext llo"
        )
    hlo = cfg.profile.dump_hlo, HLO, "XLA_FLAGS"
    llo = cfg.profile.dump_llo, LLO, "LIBTPU_INIT_ARGS"
    for asked, folder, flags in (hlo, llo):
        path = (directory / folder).absolute()
        if asked and f"dump_to={path}" not in os.environ.get(flags, ""):
            raise UserError(
                f"profile.dump_{folder}=true came after JAX had read its flags: start the run with the command "
                "minitext train, which sets them first"
            )


class Window(AbstractContextManager):
    """The trace window: `profile.steps` steps of a run, starting with `profile.first_step`.

    An action of the training loop: after an edge of the window the loop has waited for the device, so the trace holds
    whole steps and no part of another. `switch` is also called before the first step.

    Args:
      cfg: the configuration.
      directory: the run directory.
    """

    event, is_timed = "profile", False

    def __init__(self, cfg: Config, directory: Path):
        first, self._running = cfg.profile.first_step, False
        self._before = self._last = -1
        if first is not None:
            self._before, self._last = first - 1, first + cfg.profile.steps - 1
            # Otherwise the cache could return this program with the operation names of an older compilation.
            jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        self.folder = directory / TRACES
        if jax.process_count() > 1:
            self.folder /= f"process-{jax.process_index()}"
        if cfg.profile.port is not None:
            jax.profiler.start_server(_port(cfg.profile.port))

    def is_due(self, step: int, stop: bool) -> bool:
        """Whether tracing starts or ends after this step."""
        return step == self._before or (self._running and step == self._last)

    def __call__(self, step: int, state: object) -> None:
        """Starts or ends the trace."""
        self.switch(step)

    def switch(self, step: int) -> None:
        """Starts or ends the trace if the step is an edge.

        A run resumed inside the window traces the rest of it.
        """
        if not self._running and self._before <= step < self._last:
            options = jax.profiler.ProfileOptions()
            # Python's calls would fill most of the trace and slow down the run being measured.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self._running = True
        elif self._running and step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes the trace if one is in progress, for example when training stops inside the window."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def __exit__(self, *_: object) -> None:
        self.close()


def _port(first: int) -> int:
    """This process's port: processes on one machine can't share one."""
    return first + jax.process_index()


def _check_port(first: int) -> None:
    """Checked here because JAX would only log that the port is in use, and run without a server."""
    try:
        socket.create_server(("", _port(first))).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"profile.port={first}: cannot listen on port {_port(first)} ({error}): choose another, or null"
        ) from error
