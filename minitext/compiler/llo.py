"""The machine code of TPU kernels: what each unit of the chip does, bundle by bundle.

A TPU core runs bundles, each of which starts operations on several units at once; what the compiler cannot place in one
goes into the next (Jouppi et al. 2021, "Ten Lessons From Three Generations Shaped Google's TPUv4i"). A bundle takes one
cycle, or more where its text says so: the compiler knows how long units are busy, and adds cycles in which nothing
starts to the bundle before them. libtpu dumps each kernel's final bundles, and which units are busy in each bundle and
in each cycle. A unit is busy from the cycle after an operation starts until it can take another: a product of 16 rows
keeps one of a v5e's four matrix units busy for 16 cycles, an elementwise operation a vector slot for one. Waiting for
copies from HBM is not included.

Counts are static: a bundle in a loop or a branch counts once, however often it runs. The body of a kernel's grid is
such a loop; most kernels unroll the others.

Chapters: 16, 17, 19.
"""

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minitext.compiler.llo_compiler import lower, write_dump
from minitext.errors import UserError
from minitext.kernels import cases
from minitext.terminal import print_tables, show_bytes, table

# libtpu's columns for each unit; the first says what share of its capacity is used.
UNITS: dict[str, tuple[str, ...]] = {
    "MXU": ("MATMUL", "MATPUSH"),  # the matrix units: products, and the weights pushed into them
    "VALU": ("VALU",),  # elementwise arithmetic on vector registers
    "XLU": ("XLU",),  # moves between lanes: transposes, reductions, rotations
    "EUP": ("EUP",),  # exponentials and other transcendental functions
    "loads": ("VLOAD",),  # VMEM to vector registers
    "stores": ("VSTORE",),
    "scalar": ("SALU",),
}
FILL, SPILL = "VLOAD:FILL", "VSTORE:SPILL"  # libtpu also counts them as loads and stores


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code on one chip.

    Attributes:
      name: the kernel's name in `pallas_call`.
      chip: the chip's name.
      capacity: how many units the core has for each of libtpu's columns.
      busy: [bundles, columns] how many of them are busy, columns in the order of `capacity`.
      schedule: [cycles, columns] the same for each cycle.
      depth: [bundles] how many loops surround a bundle's first operation; the grid is the outermost.
      code: the bundles' text without comments.
      vmem_bytes: vector memory for blocks, scratch and spilled registers.
      spilled_bytes: the part of it for spilled registers.
    """

    name: str
    chip: str
    capacity: Mapping[str, int]
    busy: np.ndarray = field(repr=False, compare=False)
    schedule: np.ndarray = field(repr=False, compare=False)
    depth: np.ndarray = field(repr=False, compare=False)
    code: tuple[str, ...] = field(repr=False)
    vmem_bytes: int
    spilled_bytes: int

    @property
    def bundles(self) -> int:
        """Total number of bundles."""
        return len(self.code)

    @property
    def cycles(self) -> int:
        """Cycles if each bundle runs once and none waits for a copy."""
        return len(self.schedule)

    @property
    def step_cycles(self) -> int:
        """Cycles of one step of the grid, which is the bundles in loops, or all if the grid has a single step."""
        once = int(np.count_nonzero(self.depth == 0))
        return self.cycles - once if once < self.bundles else self.cycles

    @property
    def spills(self) -> int:
        """Vector registers stored to VMEM because there are too few."""
        return int(self._column(SPILL).sum())

    @property
    def fills(self) -> int:
        """Vector registers loaded back."""
        return int(self._column(FILL).sum())

    def uses(self, unit: str) -> np.ndarray:
        """[bundles] whether a unit of `UNITS` is busy in each."""
        return np.any([self._column(column) > 0 for column in UNITS[unit]], axis=0)

    def share(self, unit: str) -> float:
        """The share of all bundles in which a unit of `UNITS` is busy."""
        return float(self.uses(unit).mean())

    def occupancy(self, unit: str) -> float:
        """The busy share of a unit's capacity over all cycles: one of four matrix units is a quarter."""
        column = UNITS[unit][0]
        busy = self.schedule[:, list(self.capacity).index(column)]
        return float(busy.mean()) / self.capacity[column]

    def strip(self, parts: int = 64) -> dict[str, list[float]]:
        """The share of bundles in which each unit is busy, in about `parts` stretches of the kernel, in order."""
        cuts = np.linspace(0, self.bundles, min(parts, self.bundles) + 1).astype(int)[:-1]
        lengths = np.diff([*cuts, self.bundles])
        return {
            unit: (np.add.reduceat(self.uses(unit), cuts, dtype=int) / lengths).tolist()
            for unit in UNITS
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as JSON values, without the code."""
        return {
            "kernel": self.name, "chip": self.chip, "bundles": self.bundles,
            "cycles": self.cycles, "step_cycles": self.step_cycles,
            **{f"{unit}_share".lower(): round(self.share(unit), 4) for unit in UNITS},
            "mxu_occupancy": round(self.occupancy("MXU"), 4), "spills": self.spills, "fills": self.fills,
            "vmem_bytes": self.vmem_bytes, "spilled_bytes": self.spilled_bytes,
        }  # fmt: skip

    def _column(self, name: str) -> np.ndarray:
        return self.busy[:, list(self.capacity).index(name)]


def compile_kernels(fn: Callable, *args: Any, chip: str) -> tuple[Kernel, ...]:
    """Compiles a function for one TPU chip and reads the machine code of the Pallas kernels in it.

    Pass the kernel alone: whatever else the function does is compiled too, but not reported.

    Args:
      fn: the function; jitted or not.
      args: its arguments; arrays or ShapeDtypeStructs.
      chip: the name of a TPU in `minitext.hardware.CHIPS`.

    Returns:
      The kernels in the order in which they run, once per call.

    Raises:
      DoesNotFit: if a kernel needs more vector memory than it may use.
      UserError: if the chip is not a TPU of the table, libtpu is not installed, the compiler refuses the program, or
        the program has no kernel.
    """
    module = lower(fn, *args, chip=chip)
    with tempfile.TemporaryDirectory(prefix="minitext-llo-") as folder:
        write_dump(module, chip, Path(folder))
        return read_dump(Path(folder), chip)


def compile_case(name: str, chip: str, **blocks: int) -> tuple[Kernel, ...]:
    """Compiles a kernel of `minitext.kernels.cases` for one TPU chip and reads its machine code.

    Raises:
      UserError: see `compile_kernels`; also if the kernel's own checks refuse the blocks.
    """
    case = cases.make(name, **blocks)
    try:
        return compile_kernels(case.fn, *case.args, chip=chip)
    except ValueError as error:
        raise UserError(f"{name} refuses its blocks: {str(error).splitlines()[0]}") from error


def read_dump(folder: Path, chip: str) -> tuple[Kernel, ...]:
    """Parses libtpu's dump of the kernels of one program.

    Raises:
      UserError: if a file is missing or holds something else.
    """
    program = _read(folder, "hlo.txt")
    names = _kernel_names(program)
    if not names:
        raise UserError(
            "there is no Pallas kernel in the program: compile the function that calls pallas_call"
        )
    report = re.search(
        r"const DATA =\s*(\{.*?\});\s*$", _read(folder, "vmem_report.html"), re.S | re.M
    )
    said = json.loads(report[1]) if report else {}
    # A kernel that takes no vector memory isn't in the report, which has null if that's true of all.
    memory = (said["hlo_breakdowns"] or {}) if "hlo_breakdowns" in said else None
    kernels = []
    for name in names:
        use = "hlo-static-per-bundle-utilization.txt"
        capacity, busy = _read_use(_read(folder, f"{name}-*-final_{use}"))
        _, schedule = _read_use(_read(folder, f"{name}-*-pre-delay_{use}"))
        depth, code = _read_code(_read(folder, f"{name}-[0-9][0-9]-final_bundles.txt"))
        if len(code) != len(busy) or memory is None:
            raise UserError(
                f"{name}: libtpu's dumps have {len(code)} bundles and {len(busy)} rows of use"
                f"{', and no report of its memory' if memory is None else ''}: is libtpu newer than 0.0.51?"
            )
        used = memory.get(name, {"blocks": [], "total_size": 0})
        allocations = [a for block in used["blocks"] for a in block["allocations"]]
        spilled = sum(a["size"] for a in allocations if a["tag"] == "SPILL")
        plain, total = re.sub(r"\.\d+$", "", name), used["total_size"]
        kernels.append(Kernel(plain, chip, capacity, busy, schedule, depth, code, total, spilled))
    return tuple(kernels)


def _kernel_names(program: str) -> list[str]:
    """Returns the names under which libtpu dumps the kernels of a program, in the order of its text.

    In a loop, where `jax.lax.map` and `jax.vmap` over prefetched scalars put it, a kernel may be fused with what is
    around it; its dump then has the name of the fusion.
    """
    found = re.findall(r"%([\w.\-]+) = [^\n]* fusion\([^\n]*calls=%([\w.\-]+)", program)
    fusions = {computation: name for name, computation in found}
    names, computation = [], ""
    for line in program.splitlines():
        if begun := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            computation = begun[1]
        elif found := re.match(
            r' +(?:ROOT )?%([\w.\-]+) = .*custom_call_target="tpu_custom_call"', line
        ):
            names.append(fusions.get(computation, found[1]))
    return names


def _read(folder: Path, pattern: str) -> str:
    """Returns the text of the file whose name matches the pattern after libtpu's number of the module."""
    found = sorted(folder.glob(f"*-{pattern}"))
    if not found:
        raise UserError(f"libtpu wrote no file *-{pattern}: is libtpu newer than 0.0.51?")
    return found[-1].read_text(errors="replace")


def _read_use(text: str) -> tuple[dict[str, int], np.ndarray]:
    """Parses libtpu's table of busy units: the capacity of each column, and [bundles, columns]."""
    match = re.search(r"== CAPAC\w+:\n(.+)\n([\d ]+)\n== UTILIZATION:\n([\d\s]*)", text)
    columns = [name.strip() for name in match[1].split(",")] if match else []
    missing = {FILL, SPILL}.union(*UNITS.values()) - set(columns)
    if match is None or missing:
        raise UserError(f"libtpu's table of use has no columns {', '.join(sorted(missing))}")
    capacity = dict(zip(columns, map(int, match[2].split()), strict=True))
    return capacity, np.array(match[3].split(), np.uint8).reshape(-1, len(columns))


# An address, a loop's or branch's label, one > for each surrounding loop, and the bundle's first line.
BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +([A-Z]{2})? *: *([> ]*)\{(.*)")


def _read_code(text: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Parses final bundles: [bundles] loops around each, and the text of each."""
    depth: list[int] = []
    code: list[str] = []
    for line in re.sub(r"/\*.*?\*/", "", text, flags=re.S).splitlines():
        if match := BUNDLE.match(line):
            _, marks, bundle = match.groups()
            # An empty bundle, which only waits, is unmarked.
            before = depth[-1] if depth and bundle.strip() == "}" else 0
            depth.append(marks.count(">") or before)
            code.append(bundle)
        elif code:
            code[-1] += line
    return np.array(depth), tuple(" ".join(bundle.rpartition("}")[0].split()) for bundle in code)


BARS = " ▁▂▃▄▅▆▇█"
PARTS = 96  # stretches of a kernel in its strip


def print_kernels(kernels: list[Kernel], *, strips: bool) -> None:
    """Prints a table of kernels, and below it the strips of their units, on stdout."""
    rows = [
        (
            kernel.name, kernel.chip, f"{kernel.bundles:,}", f"{kernel.cycles:,}",
            *(f"{kernel.share(unit):.0%}" for unit in UNITS),
            f"{kernel.occupancy('MXU'):.0%}", f"{kernel.spills:,}", f"{kernel.fills:,}", show_bytes(kernel.vmem_bytes),
        )
        for kernel in kernels
    ]  # fmt: skip
    heads = ("kernel", "chip", "bundles", "cycles", *UNITS, "MXU filled", "spills", "fills", "VMEM")
    print_tables(
        table(heads, rows, right=tuple(range(2, len(heads)))),
        *(_strip(kernel) for kernel in kernels if strips),
        "units: share of bundles in which one is busy; filled: share of all matrix units' cycles\n"
        "a bundle in a loop or a branch counts once",
    )


def _strip(kernel: Kernel) -> Any:
    rows = []
    for unit, shares in kernel.strip(PARTS).items():
        # A blank means none at all, the lowest bar anything above that.
        bars = "".join(BARS[-int(-share * (len(BARS) - 1) // 1)] for share in shares)
        rows.append((unit, bars))
    return table((kernel.name, f"{kernel.bundles:,} bundles from first to last"), rows, right=())
