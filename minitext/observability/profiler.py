"""What JAX can record of a run, by the keys of the section `profile`: a trace of some steps, and the compiler's dumps.

    RUN/profile/     one trace in XProf's format (an `.xplane.pb`); of several processes each in `process-N`
    RUN/hlo/         `profile.dump_hlo`: the train step's programs as XLA's passes leave them, as text
    RUN/llo/         `profile.dump_llo`: on TPUs the machine code of each of their operations

`minitext profile RUN` summarises the trace (`minitext.observability.profile_report`). With `profile.port` other tools, such as XProf,
ask a running process for a trace of the next seconds.

Chapters: 20.
"""

import os
import socket
from pathlib import Path

import jax

from minitext.config.config import Config
from minitext.distributed import devices
from minitext.errors import UserError

TRACES, HLO, LLO = "profile", "hlo", "llo"


def dump_programs(cfg: Config) -> None:
    """Sets the flags that `profile.dump_hlo` and `profile.dump_llo` ask for; JAX's backend must not have started.

    The machine code of a large model's step takes gigabytes. What is taken from the compilation cache is not compiled,
    and leaves no dump: do without the cache.
    """
    directory = Path(cfg.run.dir) / str(cfg.run.name)
    # Of the train step alone: every little program of set-up would have its dozen of files.
    flags = [f"--xla_dump_to={(directory / HLO).absolute()}", "--xla_dump_hlo_as_text"]
    flags.append("--xla_dump_hlo_module_re=train_step")
    if cfg.profile.dump_hlo:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    flags = [f"--xla_jf_dump_to={(directory / LLO).absolute()}", "--xla_jf_dump_llo_text=true"]
    if cfg.profile.dump_llo:
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([given, *flags]).strip()


def check(cfg: Config, directory: Path, platform: str) -> None:
    """Refuses what can't be recorded here.

    Args:
      cfg: the configuration.
      directory: the run directory.
      platform: of the mesh's devices, such as `tpu`.

    Raises:
      UserError: for a trace in a process that compiled for TPUs, a port that is taken, dumps that were asked for too
        late, or machine code of anything but a TPU.
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
    flags = os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", "")
    wanted = (cfg.profile.dump_hlo, HLO), (cfg.profile.dump_llo, LLO)
    for (asked, folder), given in zip(wanted, flags, strict=True):
        if asked and f"dump_to={(directory / folder).absolute()}" not in given:
            raise UserError(
                f"profile.dump_{folder}=true came when JAX had read its flags: start the run with the command minitext "
                "train, which sets them first"
            )


class Window:
    """The steps of a run that are traced: `profile.steps` of them from `profile.first_step` on.

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
            # Else the cache may hold the same program under the names that it had when it was compiled.
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

        A run that was resumed inside the window traces the rest of it.
        """
        if not self._running and self._before <= step < self._last:
            options = jax.profiler.ProfileOptions()
            # Python's calls would be most of the trace, and slow down what is measured.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self._running = True
        elif self._running and step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes the trace if one is under way, as when training is stopped inside the window."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _port(first: int) -> int:
    """Processes of one machine can't share a port."""
    return first + jax.process_index()


def _check_port(first: int) -> None:
    """JAX would only log that a port is taken, and train without a server."""
    try:
        socket.create_server(("", _port(first))).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"profile.port={first}: port {_port(first)} cannot be listened on ({error}): choose another, or null"
        ) from error
