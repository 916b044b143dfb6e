"""Choosing block shapes: measured on the chip, or ranked by compiled code where only the compiler is available.

Without the chip each candidate is compiled, and dropped if it does not fit into vector memory. The others are ranked by
the longer of two times: that of the bundles of all steps of the grid, and that of the copies between HBM and vector
memory. Neither accounts for late copies or for branches that run in few steps, so the ranking is an estimate: measure
the candidates near its top.

Chapters: 16.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from minitext.compiler import llo
from minitext.errors import UserError
from minitext.hardware import CHIPS, Chip, find_chip
from minitext.kernels import cases
from minitext.kernels.block_shapes import BLOCKS
from minitext.terminal import print_tables, show_bytes, table


@dataclass(frozen=True)
class Candidate:
    """One block shape with its time.

    Attributes:
      blocks: length of each block.
      seconds: the operation's time, measured or estimated; infinite if it cannot run.
      measured: whether the time was measured.
      refusal: why it cannot run, or "".
      steps: steps of the grid, summed over the kernels (only estimates have this and the following).
      cycles: cycles of one step, summed over the kernels.
      mxu_share: share of bundles in which a matrix unit is busy.
      spills: spilled vector registers.
      vmem_bytes: vector memory of the kernel that needs the most.
    """

    blocks: dict[str, int]
    seconds: float = math.inf
    measured: bool = False
    refusal: str = ""
    steps: int = 0
    cycles: int = 0
    mxu_share: float = 0.0
    spills: int = 0
    vmem_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the candidate as JSON values; an infinite time is None."""
        return asdict(self) | {"seconds": self.seconds if math.isfinite(self.seconds) else None}


def tune(
    op: str, chip: str, done: Callable[[int, int], None] = lambda n, of: None
) -> list[Candidate]:
    """Tries the block shapes of `minitext.kernels.cases.SWEEPS` for an operation on a chip.

    Args:
      op: the operation's name there.
      chip: a chip's name; if JAX runs on it, candidates are measured.
      done: called with the candidates done and their total number.

    Returns:
      The candidates, fastest first; those that cannot run last.

    Raises:
      UserError: if the operation has no sweep, or this machine lacks the chip and it is not a TPU.
    """
    if op not in cases.SWEEPS:
        raise UserError(f"nothing to tune for {op!r}: choose among {', '.join(cases.SWEEPS)}")
    if chip not in CHIPS:
        raise UserError(f"there is no chip {chip!r}: choose among {', '.join(CHIPS)}")
    if find_chip(jax.devices()[0]) == CHIPS[chip]:
        return measure(op)
    if CHIPS[chip].platform != "tpu":
        raise UserError(
            f"chip={chip} is not here, and its compiler does not show bundles: run this on one"
        )
    names, lengths = zip(*cases.SWEEPS[op].items(), strict=True)
    shapes = [dict(zip(names, row, strict=True)) for row in itertools.product(*lengths)]
    found: list[Candidate] = []
    # Each candidate is compiled in its own process; these threads only wait.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for candidate in pool.map(lambda blocks: estimate(op, CHIPS[chip], blocks), shapes):
            found.append(candidate)
            done(len(found), len(shapes))
    return sorted(found, key=lambda candidate: candidate.seconds)


def estimate(op: str, chip: Chip, blocks: dict[str, int]) -> Candidate:
    """Compiles an operation with one block shape for a TPU and estimates its time."""
    case = cases.make(op, **blocks)
    try:
        kernels = llo.compile_case(op, chip.name, **blocks)
    except UserError as error:
        return Candidate(blocks, refusal=str(error))
    runs = [case.steps] * len(kernels) if case.steps else count_steps(case.fn, case.args, kernels)
    cycles = sum(steps * kernel.step_cycles for steps, kernel in zip(runs, kernels, strict=True))
    bundles = sum(kernel.bundles for kernel in kernels)
    return Candidate(
        blocks,
        # On one device, whose cores share the steps.
        max(
            cycles / chip.clock / chip.device_cores,
            case.hbm_bytes / (chip.hbm_bandwidth / chip.devices),
        ),
        steps=sum(runs),
        cycles=sum(kernel.step_cycles for kernel in kernels),
        mxu_share=sum(kernel.bundles * kernel.share("MXU") for kernel in kernels) / bundles,
        spills=sum(kernel.spills for kernel in kernels),
        vmem_bytes=max(kernel.vmem_bytes for kernel in kernels),
    )


def count_steps(fn: Callable, args: tuple, kernels: tuple[llo.Kernel, ...]) -> list[int]:
    """Returns the steps of each kernel's grid, from the function's jaxpr.

    Raises:
      UserError: if a grid depends on values, or kernels share a name.
    """
    found = list(_grids(jax.make_jaxpr(fn)(*args).jaxpr))
    if len(found) == len(kernels) == 1:
        found = [(kernels[0].name, found[0][1])]
    grids = dict(found)
    if len(grids) != len(kernels) or grids.keys() != {kernel.name for kernel in kernels}:
        raise UserError(
            f"kernels {', '.join(k.name for k in kernels)} are ambiguous: give each its own name"
        )
    for name, grid in grids.items():
        if not all(isinstance(size, int) for size in grid):
            raise UserError(
                f"the grid of {name} depends on values: its case has to state the number of steps"
            )
    return [math.prod(grids[kernel.name]) for kernel in kernels]


def _grids(jaxpr: Any) -> Iterator[tuple[str, tuple]]:
    """Yields the names and grids of the Pallas calls in a jaxpr, in order."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["name"] or "", eqn.params["grid_mapping"].grid
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from _grids(inner)


def measure(op: str) -> list[Candidate]:
    """Measures the block shapes of an operation on JAX's default device, with tune-jax.

    Returns:
      The candidates that ran, the fastest first.

    Raises:
      UserError: if tune-jax is not installed, or no candidate runs.
    """
    try:
        import tune_jax  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError(
            "measuring block shapes needs tune-jax: pip install 'minitext[tune]'"
        ) from error

    def run(*args: jax.Array, **blocks: int) -> Any:
        return cases.make(op, **blocks).fn(*args)

    tuned = tune_jax.tune(run, hyperparams=cases.SWEEPS[op], max_workers=os.cpu_count() or 1)
    try:
        tuned(*(_value(arg) for arg in cases.make(op).args))
    except ValueError as error:
        raise UserError(f"no block shape of {op} runs here: {error}") from error
    return [
        Candidate(dict(r.hyperparams), r.t_mean, measured=True)
        for r in tuned.timing_results.values()
    ]


def _value(arg: Any) -> jax.Array:
    """Returns an argument with values: those given, or normally distributed ones."""
    if isinstance(arg, jax.ShapeDtypeStruct):
        return jax.random.normal(jax.random.key(0), arg.shape, arg.dtype)
    return jax.numpy.asarray(arg)


def print_candidates(op: str, chip: str, found: list[Candidate]) -> None:
    """Prints the candidates, best first, and the table's present entry, on stdout."""
    rows = [
        (
            _show(c.blocks), f"{c.seconds * 1e3:,.3f}",
            *(("",) * 5 if c.measured else (
                f"{c.steps:,}", f"{c.cycles:,}", f"{c.mxu_share:.0%}", f"{c.spills:,}", show_bytes(c.vmem_bytes)
            )),
        )
        for c in found if not c.refusal
    ]  # fmt: skip
    how = "measured" if any(c.measured for c in found) else "estimated"
    heads = ("blocks", f"ms, {how}", "steps", "cycles of one", "MXU", "spills", "VMEM")
    refused = [(_show(c.blocks), c.refusal) for c in found if c.refusal]
    print_tables(
        f"{op} on {chip}",
        table(heads, rows, right=(1, 2, 3, 4, 5, 6)),
        *([table(("refused", "why"), refused, right=())] if refused else []),
        f"the table has {BLOCKS.get((op, chip), 'no row')}; best here: {best(op, found).blocks}",
    )


def _show(blocks: dict[str, int]) -> str:
    return " ".join(f"{name}={length}" for name, length in blocks.items())


def best(op: str, found: list[Candidate]) -> Candidate:
    """Returns the first candidate.

    Raises:
      UserError: if none can run.
    """
    if not found or found[0].refusal:
        raise UserError(
            f"no block shape of {op} can run: {found[0].refusal if found else 'none was tried'}"
        )
    return found[0]
