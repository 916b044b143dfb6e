"""A strict simulator: it runs Pallas TPU kernels on the CPU and takes every liberty that the hardware has.

JAX's TPU interpret mode simulates HBM, VMEM and SMEM. This module turns on all of its checks (races, accesses out of
bounds, uninitialized memory, parallel steps in any order), reports what they find in one line, and counts what a
kernel loads and stores.

Chapters: 15.
"""

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # holds `races`
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax.experimental.pallas import tpu as pltpu

from minitext.errors import UserError


class Fault(Exception):
    """An error in a kernel, described in one line."""


class Run(NamedTuple):
    """One run of a kernel.

    Attributes:
      visits: (core, grid point) of every step, in the order in which the steps began.
      accesses: JAX's record of all reads and writes.
    """

    visits: list[tuple[int, tuple[int, ...]]]
    accesses: RaceDetectionState

    @property
    def loads(self) -> list[int]:
        """How many times each array in HBM was read, by loading a block or by a copy that the kernel started.

        Inputs come first, then outputs, in the order of the call. An array that isn't divided into blocks counts once.
        """
        # Don't count that JAX reads each output in full when the kernel is done.
        return [
            len(self.accesses.reads[key]) - bool(self.accesses.writes[key]) for key in self._hbm()
        ]

    @property
    def stores(self) -> list[int]:
        """How many times each array in HBM was written, by storing a block or by a copy that the kernel started."""
        return [len(self.accesses.writes[key]) for key in self._hbm()]

    def _hbm(self) -> list[tuple]:
        return sorted(key for key in list(self.accesses.reads) if key[0] == "hbm")


@contextlib.contextmanager
def strict(
    *, cores: int = 2, seed: int = 0, uninitialized: Literal["nan", "zero"] = "nan"
) -> Iterator[list[Run]]:
    """Runs every Pallas call traced inside this context in the strict simulator.

    - VMEM, SMEM, outputs and the padding of a last block start as NaN; integers start as their largest value.
    - Blocks and indices must be in bounds, and a core must not return to a block of an output it has left.
    - Grid dimensions with `parallel` semantics are divided among the cores, in an order drawn from the seed. Two
      accesses that nothing orders are a race if one of them is a write.
    - A copy that a kernel starts happens when the kernel waits for it, and no earlier.

    It's slow: about a second to trace a kernel, then a millisecond for each read and write.

    Args:
      cores: TensorCores per chip: 2 as in v4 and v5p, 1 as in v5e and v6e.
      seed: determines the order of parallel steps.
      uninitialized: how memory starts. What a kernel returns must not depend on it.

    `jax.vmap` adds a dimension to the front of a kernel's grid, which is parallel.

    Yields:
      A list to which each Pallas call adds a `Run` when it begins.

    Raises:
      Fault: for the first race, at the end; for any other error, where it happens.
      UserError: for `jax.vmap` of a kernel that takes an array whole (`pl.ANY`), which JAX can't batch for TPUs either.
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
        uninitialized_memory=uninitialized,
        num_cores_or_threads=cores,
        random_seed=seed,
        # A new function each time, or JAX would reuse a program from its caches.
        grid_point_recorder=record,
    )
    printed, log = io.StringIO(), logging.getLogger("jax._src.callback")
    log.addFilter(_is_not_ours)
    try:
        with (
            contextlib.redirect_stdout(printed),
            pltpu.force_tpu_interpret_mode(params),
            _vmapped_dimensions_are_parallel(),
        ):
            yield runs
            jax.effects_barrier()
    except ValueError as error:
        if "does not have trivial BlockSpec" not in str(error):
            raise
        raise UserError(
            "jax.vmap of a kernel that takes an array whole (pl.ANY) can't be simulated, nor compiled for a TPU: use "
            "jax.lax.map"
        ) from None
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


@contextlib.contextmanager
def _vmapped_dimensions_are_parallel() -> Iterator[None]:
    """Adds the dimensions of `jax.vmap` to the kernel's own semantics, as Mosaic does and JAX's simulator doesn't."""
    original = interpreter._get_parallel_dim_semantics

    def complete(params, dimensions: int) -> tuple[bool, ...]:
        given = original(params, dimensions)
        return (True,) * (dimensions - len(given)) + given

    interpreter._get_parallel_dim_semantics = complete
    try:
        yield
    finally:
        interpreter._get_parallel_dim_semantics = original


# JAX 0.11 writes a core as (device, core); earlier ones without parentheses.
_ACCESS = r"(read|write) of \('(\w+)', \d+, \d+, \d+\)\[(.*)\] from \(?(\d+),\s*(\d+)\)?,?\s+(.*)\n"
_RACE = re.compile(rf"RACE DETECTED\n  {_ACCESS}  clock: .*\n  {_ACCESS}  clock: .*\n\n?")
_FIRST_COPY = 100  # JAX's reports give copies device numbers, from here on


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Drops the log of a failing callback: its traceback becomes the Fault's one line."""
    return "io_callback" not in record.getMessage()


def _explain(message: str) -> str:
    """Returns the last line of the simulator's traceback, or "" if it didn't raise the error."""
    found = re.findall(r"^(?:IndexError|ValueError|RuntimeError): (.*)$", message, re.M)
    if not found or "interpret_pallas_call" not in message:
        return ""
    return _ranges(re.sub(r" on device \d+ \(core \d+\)", "", found[-1])).rstrip(" .")


def _describe(race: re.Match) -> str:
    # Sorted, because which access came last, and is reported first, differs from run to run.
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
