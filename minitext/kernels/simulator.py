"""The strict simulator: Pallas TPU kernels on the CPU, with every liberty that the hardware has.

JAX's TPU interpret mode keeps a simulated HBM, VMEM and SMEM. This module switches on all that it can
check (races, reads and writes out of bounds, memory that nobody wrote, any order of parallel steps),
makes one line of what it finds, and counts what a kernel loads and stores.

Chapters: 15.
"""

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # holds `races`
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax.experimental.pallas import tpu as pltpu


class Fault(Exception):
    """What the simulator refuses, in one line."""


class Run(NamedTuple):
    """One kernel's run.

    Attributes:
      visits: (core, grid point) of every step, in the order in which they began.
      accesses: JAX's record of what was read and written.
    """

    visits: list[tuple[int, tuple[int, ...]]]
    accesses: RaceDetectionState

    @property
    def loads(self) -> list[int]:
        """How many times a block, or a copy that the kernel started, left each array in HBM.

        Inputs come first, then outputs, in the order of the call. An array that is not divided into
        blocks counts once.
        """
        # An output is read once more, in full, when the kernel is over.
        return [
            len(self.accesses.reads[key]) - bool(self.accesses.writes[key]) for key in self._hbm()
        ]

    @property
    def stores(self) -> list[int]:
        """How many times a block, or a copy that the kernel started, reached each array in HBM."""
        return [len(self.accesses.writes[key]) for key in self._hbm()]

    def _hbm(self) -> list[tuple]:
        return sorted(key for key in list(self.accesses.reads) if key[0] == "hbm")


@contextlib.contextmanager
def strict(*, cores: int = 2, seed: int = 0) -> Iterator[list[Run]]:
    """Runs every Pallas call that is traced within it in the strict simulator.

    - VMEM, SMEM, outputs and what pads a last block begin as NaN, integers as their largest value.
    - A block or an index out of bounds is a fault, and so is a block of an output that a core comes back
      to after it went on to another.
    - Grid dimensions with `parallel` semantics are divided among the cores and visited in an order drawn
      from the seed; two accesses that nothing orders, one of them a write, are a race.
    - A copy that a kernel starts takes place when the kernel waits for it, and not earlier.

    It is slow: a second or so to trace a kernel, then a millisecond for each read and write.

    Args:
      cores: TensorCores of a chip: 2 as v4 and v5p have, 1 as v5e and v6e have.
      seed: of the order of parallel steps.

    Yields:
      A list that gets one `Run` for each Pallas call, as they begin.

    Raises:
      Fault: at the end, for the first race; where it happens, for anything else.
    """
    runs: list[Run] = []

    def record(token, point, core):
        if not runs or runs[-1].accesses is not interpreter.races:
            assert interpreter.races is not None
            runs.append(Run([], interpreter.races))
        runs[-1].visits.append((int(core), tuple(int(index) for index in point)))
        return token

    params = pltpu.InterpretParams(
        detect_races=True,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        num_cores_or_threads=cores,
        random_seed=seed,
        # A new function each time, so that no program of an earlier run is taken from JAX's caches.
        grid_point_recorder=record,
    )
    printed, log = io.StringIO(), logging.getLogger("jax._src.callback")
    log.addFilter(_is_not_ours)
    try:
        with contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(params):
            yield runs
            jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        if not (line := _explain(str(error))):
            raise
        raise Fault(line) from None
    finally:
        log.removeFilter(_is_not_ours)
        pltpu.reset_tpu_interpret_mode_state()
        races = [*_RACE.finditer(printed.getvalue())]
        print(_RACE.sub("", printed.getvalue()), end="")
    if races:
        raise Fault(_describe(races[0]))


_ACCESS = r"(read|write) of \('(\w+)', \d+, \d+, \d+\)\[(.*)\] from (\d+),\s*(\d+),?\s+(.*)\n"
_RACE = re.compile(rf"RACE DETECTED\n  {_ACCESS}  clock: .*\n  {_ACCESS}  clock: .*\n\n?")
_FIRST_COPY = 100  # copies take the place of devices in JAX's reports, and are numbered from here


def _is_not_ours(record: logging.LogRecord) -> bool:
    """A failing callback is logged with its traceback, which the Fault makes a line of."""
    return "io_callback" not in record.getMessage()


def _explain(message: str) -> str:
    """The last line of the simulator's traceback, or "" if the error is not its."""
    found = re.findall(r"^(?:IndexError|ValueError|RuntimeError): (.*)$", message, re.M)
    if not found or "interpret_pallas_call" not in message:
        return ""
    return _ranges(re.sub(r" on device \d+ \(core \d+\)", "", found[-1])).rstrip(" .")


def _describe(race: re.Match) -> str:
    # Which of the two came last, and so is reported first, differs from run to run.
    both = sorted(
        f"a {kind} of [{_ranges(where).strip('(),') or ':'}] by {_who(int(device), core, frame)}"
        for kind, _, where, device, core, frame in (race.groups()[:6], race.groups()[6:])
    )
    return f"race in {race[2].upper()}: {' and '.join(both)}, which nothing orders"


def _who(device: int, core: str, frame: str) -> str:
    who = "a copy" if device >= _FIRST_COPY else f"core {core}"
    line = re.search(r":(\d+)(?::\d+)? \((.*)\)", frame)
    return who + (f" (line {line[1]}, {line[2]})" if line else "")


def _ranges(text: str) -> str:
    return re.sub(r"slice\((\d+), (\d+), 1\)", r"\1:\2", text)
