"""The machine code of TPU kernels: what each unit of the chip does, bundle by bundle.

A TPU core runs bundles, one each cycle unless it waits: a bundle starts operations on several units at once, and what
the compiler could not place in one goes into the next (Jouppi et al. 2021, "Ten Lessons From Three Generations Shaped
Google's TPUv4i"). For each kernel libtpu writes down its final bundles, and how many units of each kind are busy in
each: from the bundle after an operation starts, for as long as the unit can take no other. A product keeps a matrix
unit of a v5e busy for 16 bundles, an elementwise operation a vector slot for one. `compile_kernels` lowers a function
here and compiles it in a process of its own, since libtpu reads its flags only once.

Counts are static: a bundle in a loop or a branch counts once, however often it runs. The body of a kernel's grid is
such a loop; most kernels unroll the others.

Chapters: 16, 17, 19.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minitext.errors import DoesNotFit, UserError
from minitext.hw import CHIPS
from minitext.kernels import cases
from minitext.mesh import AXES
from minitext.targets import Target, topology_devices

SECONDS = 300  # that the compiler may take for one function

# libtpu's columns of each unit; the first says what share of its capacity is used.
UNITS: dict[str, tuple[str, ...]] = {
    "MXU": ("MATMUL", "MATPUSH"),  # the matrix units: products, and the weights pushed into them
    "VALU": ("VALU",),  # elementwise arithmetic on vector registers
    "XLU": ("XLU",),  # moves between lanes: transposes, reductions, rotations
    "EUP": ("EUP",),  # exponentials and other transcendental functions
    "loads": ("VLOAD",),  # VMEM to vector registers
    "stores": ("VSTORE",),
    "scalar": ("SALU",),
}
FILL, SPILL = "VLOAD:FILL", "VSTORE:SPILL"  # libtpu counts them among loads and stores, too


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code on one chip.

    Attributes:
      name: what the kernel was called in `pallas_call`.
      chip: the chip's name.
      capacity: how many units the core has of each of libtpu's columns.
      busy: [bundles, columns] how many of them are busy, columns in the order of `capacity`.
      depth: [bundles] how many loops a bundle's first operation lies in; the grid is the first.
      code: the bundles' text, comments left out.
      vmem_bytes: vector memory for blocks, scratch and spilled registers.
      spilled_bytes: the part of it for spilled registers.
    """

    name: str
    chip: str
    capacity: Mapping[str, int]
    busy: np.ndarray = field(repr=False, compare=False)
    depth: np.ndarray = field(repr=False, compare=False)
    code: tuple[str, ...] = field(repr=False)
    vmem_bytes: int
    spilled_bytes: int

    @property
    def bundles(self) -> int:
        """Bundles in all."""
        return len(self.code)

    @property
    def step_bundles(self) -> int:
        """Bundles in loops: those of one step of the grid, or all where the grid has a single step."""
        return int(np.count_nonzero(self.depth)) or self.bundles

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
        """The share of a unit's capacity that is busy: with four matrix units, one that never rests makes a quarter."""
        column = UNITS[unit][0]
        return float(self._column(column).mean()) / self.capacity[column]

    def strip(self, parts: int = 64) -> dict[str, list[float]]:
        """The share of bundles in which each unit is busy, in about `parts` stretches of the kernel, in order."""
        cuts = np.linspace(0, self.bundles, min(parts, self.bundles) + 1).astype(int)[:-1]
        lengths = np.diff([*cuts, self.bundles])
        return {
            unit: (np.add.reduceat(self.uses(unit), cuts, dtype=int) / lengths).tolist()
            for unit in UNITS
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as JSON-able values, without the code."""
        return {
            "kernel": self.name, "chip": self.chip, "bundles": self.bundles, "step_bundles": self.step_bundles,
            **{f"{unit}_share".lower(): round(self.share(unit), 4) for unit in UNITS},
            "mxu_occupancy": round(self.occupancy("MXU"), 4), "spills": self.spills, "fills": self.fills,
            "vmem_bytes": self.vmem_bytes, "spilled_bytes": self.spilled_bytes,
        }  # fmt: skip

    def _column(self, name: str) -> np.ndarray:
        return self.busy[:, list(self.capacity).index(name)]


def compile_kernels(fn: Callable, *args: Any, chip: str) -> tuple[Kernel, ...]:
    """Compiles a function for one TPU chip and reads the machine code of the Pallas kernels in it.

    Compile the kernel alone: what else the function does is compiled too, and not reported.

    Args:
      fn: the function; jitted or not.
      args: its arguments; arrays or ShapeDtypeStructs.
      chip: the name of a TPU in `minitext.hw.CHIPS`.

    Returns:
      The kernels in the order in which they run. A kernel called several times comes as often.

    Raises:
      DoesNotFit: if a kernel needs more vector memory than it may use.
      UserError: if the chip is no TPU of the table, libtpu is not installed, the compiler refuses the program, or
        there is no kernel in it.
    """
    module = lower(fn, *args, chip=chip)
    with tempfile.TemporaryDirectory(prefix="minitext-llo-") as folder:
        _run_compiler(module, chip, Path(folder))
        return read_dump(Path(folder), chip)


def compile_case(name: str, chip: str, **blocks: int) -> tuple[Kernel, ...]:
    """Compiles a kernel of `minitext.kernels.cases` for one TPU chip and reads its machine code.

    Raises:
      UserError: as `compile_kernels`, and if the kernel's own checks refuse the blocks.
    """
    case = cases.make(name, **blocks)
    try:
        return compile_kernels(case.fn, *case.args, chip=chip)
    except ValueError as error:
        raise UserError(f"{name} refuses its blocks: {str(error).splitlines()[0]}") from error


def lower(fn: Callable, *args: Any, chip: str) -> bytes:
    """Lowers a function for one chip as `jax.jit` would there, without the chip or its compiler.

    The mesh in use while the function is traced has one device of that kind, so `minitext.kernels` and Pallas see it.

    Returns:
      The StableHLO module as MLIR bytecode; a Pallas kernel in it is a custom call that holds Mosaic's program.

    Raises:
      UserError: if the chip is no TPU of the table.
    """
    import jax
    from jax.interpreters import mlir
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    row = CHIPS.get(chip)
    if row is None or row.platform != "tpu":
        known = ", ".join(name for name, row in CHIPS.items() if row.platform == "tpu")
        raise UserError(f"chip={chip} is no TPU of the table: choose among {known}")
    device = AbstractDevice(device_kind=row.device_kinds[0], num_cores=None, platform="tpu")
    ones, types = (1,) * len(AXES), (AxisType.Explicit,) * len(AXES)
    with jax.sharding.use_abstract_mesh(AbstractMesh(ones, AXES, types, abstract_device=device)):
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        lowered = jax.jit(fn).trace(*structs).lower(lowering_platforms=("tpu",))
    return mlir.module_to_bytecode(lowered.compiler_ir())  # pyright: ignore[reportArgumentType]


def read_dump(folder: Path, chip: str) -> tuple[Kernel, ...]:
    """Reads what libtpu has written of the kernels of one program.

    Raises:
      UserError: if a file is missing or holds something else.
    """
    program = _read(folder, "hlo.txt")
    names = re.findall(r'%([\w.\-]+) = [^\n]*custom_call_target="tpu_custom_call"', program)
    if not names:
        raise UserError(
            "there is no Pallas kernel in the program: compile the function that calls pallas_call"
        )
    report = re.search(
        r"const DATA =\s*(\{.*?\});\s*$", _read(folder, "vmem_report.html"), re.S | re.M
    )
    memory = json.loads(report[1]).get("hlo_breakdowns", {}) if report else {}
    kernels = []
    for name in names:
        capacity, busy = _read_use(
            _read(folder, f"{name}-*final_hlo-static-per-bundle-utilization.txt")
        )
        depth, code = _read_code(
            _read(folder, f"{name}-*final_bundles.txt", without="schedule-analysis")
        )
        if len(code) != len(busy) or name not in memory:
            raise UserError(
                f"{name}: libtpu's dumps have {len(code)} bundles and {len(busy)} rows of use"
                f"{'' if name in memory else ', and no report of its memory'}: is libtpu newer than 0.0.51?"
            )
        allocations = [a for block in memory[name]["blocks"] for a in block["allocations"]]
        spilled = sum(a["size"] for a in allocations if a["tag"] == "SPILL")
        plain = re.sub(r"\.\d+$", "", name)
        kernels.append(
            Kernel(plain, chip, capacity, busy, depth, code, memory[name]["total_size"], spilled)
        )
    return tuple(kernels)


def _read(folder: Path, pattern: str, without: str = "\0") -> str:
    """Returns the text of the one file whose name, after libtpu's number of the module, is as the pattern says."""
    found = [path for path in sorted(folder.glob(f"*-{pattern}")) if without not in path.name]
    if not found:
        raise UserError(f"libtpu wrote no file *-{pattern}: is libtpu newer than 0.0.51?")
    return found[-1].read_text(errors="replace")


def _read_use(text: str) -> tuple[dict[str, int], np.ndarray]:
    """Reads libtpu's table of busy units: the capacity of each column, and [bundles, columns]."""
    match = re.search(r"== CAPAC\w+:\n(.+)\n([\d ]+)\n== UTILIZATION:\n([\d\s]*)", text)
    columns = [name.strip() for name in match[1].split(",")] if match else []
    missing = {column for unit in UNITS.values() for column in unit} | {FILL, SPILL}
    missing -= set(columns)
    if match is None or missing:
        raise UserError(f"libtpu's table of use has no columns {', '.join(sorted(missing))}")
    capacity = dict(zip(columns, map(int, match[2].split()), strict=True))
    return capacity, np.array(match[3].split(), np.uint8).reshape(-1, len(columns))


# An address, a loop's or branch's label, one > for each loop around, and the bundle's first line.
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *([> ]*)\{(.*)")


def _read_code(text: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Reads final bundles: [bundles] loops around each, and the text of each."""
    depth: list[int] = []
    code: list[str] = []
    for line in re.sub(r"/\*.*?\*/", "", text, flags=re.S).splitlines():
        if match := _BUNDLE.match(line):
            # An empty bundle, which waits, has no mark.
            depth.append(
                match[1].count(">") or (depth[-1] if depth and match[2].strip() == "}" else 0)
            )
            code.append(match[2])
        elif code:
            code[-1] += line
    return np.array(depth), tuple(" ".join(bundle.rpartition("}")[0].split()) for bundle in code)


def _run_compiler(module: bytes, chip: str, folder: Path) -> None:
    """Compiles a module in a process whose libtpu writes its dumps into a folder."""
    source = folder / "module.mlir"
    source.write_bytes(module)
    # Labels that begin so are those of the finished code; a whole dump is twenty times as large.
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.*"
    package = str(Path(__file__).parent.parent)
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "minitext.llo", chip, str(source)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the compiler took more than {SECONDS} s for {chip}") from error
    if done.returncode == 0:
        return
    said = done.stderr.strip().splitlines() or ["nothing"]
    if done.returncode == UserError.exit_code:
        raise UserError(said[-1])
    if done.returncode == DoesNotFit.exit_code:
        raise DoesNotFit(said[-1])
    crash = next((line for line in said if re.match(r"F\d{4} |.*Check failed", line)), said[-1])
    raise UserError(f"the compiler for {chip} stopped with {done.returncode}: {crash[:300]}")


def _compile_file(chip: str, file: str) -> None:
    """Compiles an MLIR module for one device of a chip; this is the other process's whole work."""
    import jax
    from jax.extend.mlir import ir
    from jax.interpreters import mlir
    from jaxlib import xla_client

    row = CHIPS[chip]
    device = topology_devices(Target(row, (1,) * (row.links // 2)))[0]
    with mlir.make_ir_context():
        module = ir.Module.parse(Path(file).read_bytes())
    options = xla_client.CompileOptions()
    options.executable_build_options.use_shardy_partitioner = True
    try:
        device.client.compile(module, xla_client.DeviceList((device,)), options)
    except jax.errors.JaxRuntimeError as error:
        raise _refusal(str(error), chip) from None


def _refusal(message: str, chip: str) -> UserError:
    """Makes one line of what the compiler says."""
    found = re.search(
        r"space vmem.*?%([\w\-]+).*?Scoped allocation with size (\S+) and limit (\S+)",
        message,
        re.S,
    )
    if found:
        return DoesNotFit(
            f"{found[1]} needs {found[2]}iB of vector memory and may use {found[3]}iB on {chip}: choose smaller "
            "blocks, or raise vmem_limit_bytes in pltpu.CompilerParams"
        )
    lines = [re.sub(r"^[A-Z_]+: ", "", line.strip()) for line in message.splitlines()]
    reason = next((line for line in lines if line and not re.fullmatch(r"E\d+: \w+:", line)), "")
    return UserError(f"the compiler for {chip} refuses the program: {reason[:400]}")


if __name__ == "__main__":
    try:
        _compile_file(*sys.argv[1:])
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
