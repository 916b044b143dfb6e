"""A verdict on anyone's Pallas TPU kernel, without a TPU.

The kernel runs in the strict simulator: races, accesses out of bounds, memory that nothing initialized, values against
a reference. Then the real TPU compiler compiles it for the chips you name: bundles, how busy the matrix units are,
spilled registers, vector memory, each compared with a budget if you give one.

A file says what to judge. This is a whole one; `minitext judge FILE.py` runs it:

    import jax, jax.numpy as jnp
    from jax.experimental import pallas as pl

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    def kernel(x, y):                       # anything that calls pl.pallas_call; jitted, vmapped or differentiated
        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(body, grid=(x.shape[0] // 8,), in_specs=[block, block], out_specs=block,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)

    def example_inputs():                   # arrays: small ones, since a simulated access takes a millisecond
        return jnp.ones((16, 128)), jnp.arange(16 * 128.0).reshape(16, 128)

    def reference(x, y):                    # optional: what it should compute, in plain JAX or NumPy
        return x + y

Several kernels, or one at several shapes, or its gradient, are a list in place of the three functions:

    from minitext.perf.judge import Case

    CASES = [
        Case(kernel, example_inputs(), reference),
        Case(jax.vmap(kernel), (jnp.ones((3, 16, 128)), jnp.ones((3, 16, 128))), jax.vmap(reference), name="vmapped"),
    ]

The file is executed: judge only what you would run. It runs in a process of its own, with limits of time and memory;
these protect from mistakes, not from malice.

Chapters: 16.
"""

import contextlib
import importlib.util
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from minitext import files
from minitext.errors import DoesNotFit, UserError
from minitext.hardware import CHIPS
from minitext.terminal import print_tables, show_bytes, table

LIMIT = 2**20  # bytes of a file
SIMULATED = ("runs", "races", "bounds", "blocks", "initialized", "values")  # checks, in order
SEEDS = (0, 1, 2)  # orders of parallel steps that are tried
# Largest difference from the reference, relative to its largest entry; integers must be equal.
TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
OTHER_TOLERANCE = 0.1  # of smaller types
BUDGETS = {
    "vmem": "vector memory at most, such as vmem=12MiB",
    "spills": "spilled registers at most",
    "bundles": "bundles at most",
    "mxu": "share of bundles in which a matrix unit is busy, at least, such as mxu=50%",
}
_CONVENTION = (
    "define kernel(...) and example_inputs(), or CASES: minitext judge --help shows a whole file"
)


class Case(NamedTuple):
    """One kernel with inputs.

    Attributes:
      fn: the function that calls `pl.pallas_call`.
      inputs: its arguments: a tuple of pytrees of arrays.
      reference: what it should compute, a function of the same arguments; None: values aren't checked.
      name: for the table; by default the function's.
      tolerance: largest difference from the reference, relative to the reference's largest entry; None: by dtype.
      compile_inputs: arguments with the shapes to compile for, arrays or ShapeDtypeStructs; None: those of `inputs`.
    """

    fn: Callable
    inputs: tuple
    reference: Callable | None = None
    name: str = ""
    tolerance: float | None = None
    compile_inputs: tuple | None = None


@dataclass(frozen=True)
class Check:
    """One row of a verdict.

    Attributes:
      case: its name.
      check: what was checked: `runs`, `races`, `bounds`, `blocks`, `initialized`, `values`, `compiles` or a budget.
      passed: None if it could not be checked.
      said: what was found.
      chip: for which; "" in the simulator.
    """

    case: str
    check: str
    passed: bool | None
    said: str = ""
    chip: str = ""


@dataclass(frozen=True)
class Verdict:
    """What was found about a file.

    Attributes:
      file: its path.
      checks: the rows, in order.
      kernels: the machine code of each kernel: `minitext.compiler.llo.Kernel.to_json`, with its `case`.
    """

    file: str
    checks: tuple[Check, ...]
    kernels: tuple[dict[str, Any], ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(check.passed is False for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Returns everything, for json.dumps."""
        checks = [asdict(check) for check in self.checks]
        kernels = list(self.kernels)
        return {"file": self.file, "passed": self.passed, "checks": checks, "kernels": kernels}


def parse_budget(words: Sequence[str]) -> dict[str, float]:
    """Reads `vmem=12MiB`, `spills=0`, `bundles=4000` and `mxu=50%`; several may be joined by commas.

    Raises:
      UserError: for anything else.
    """
    units = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01}
    found: dict[str, float] = {}
    for word in ",".join(words).split(",") if words else []:
        name, _, value = word.partition("=")
        number = value.rstrip("KMGiB%")
        unit = value[len(number) :]
        fits = unit in {"vmem": ("", "KiB", "MiB", "GiB"), "mxu": ("", "%")}.get(name, ("",))
        digits = number.replace(".", "", 1)
        fits = fits and digits.isascii() and digits.isdigit()
        if name not in BUDGETS or not fits or (name == "mxu" and float(number) * units[unit] > 1):
            known = "; ".join(f"{key}: {what}" for key, what in BUDGETS.items())
            raise UserError(f"--budget {files.shorten(word)!r} is not a budget: {known}")
        if name in found:
            raise UserError(f"--budget {name} is given twice: give it once")
        found[name] = float(number) * units[unit]
    return found


def check_chips(text: str) -> list[str]:
    """Returns the names in `v5e,v6e`.

    Raises:
      UserError: if one isn't a TPU of the table.
    """
    known = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]
    for name in text.split(","):
        if name not in known:
            raise UserError(
                f"--chip {files.shorten(name)!r} is not a TPU that minitext knows: choose among {', '.join(known)}"
            )
    return text.split(",")


def judge(
    path: str,
    chips: Sequence[str] = ("v5e",),
    budget: Mapping[str, float] | None = None,
    *,
    seconds: float = 600,
    memory_gib: float = 8,
    say: Callable[[str], None] = lambda what: None,
) -> Verdict:
    """Judges the kernels of a file, which is executed in a process of its own.

    Args:
      path: of the file; see this module's docstring.
      chips: names of TPUs in `minitext.hardware.CHIPS` to compile for.
      budget: from `parse_budget`.
      seconds: for everything together.
      memory_gib: that the process and its children may have, in GiB.
      say: told what comes next.

    Raises:
      UserError: if the file can't be read or executed, names no kernel, or exceeds a limit.
    """
    text = files.read_text(Path(path), LIMIT)
    shown = files.shorten(path)
    try:
        compile(text, path, "exec")
    except SyntaxError as error:
        if error.lineno is None:
            raise UserError(f"{shown} is not Python: {error.msg}") from error
        raise UserError(f"{shown}:{error.lineno}: SyntaxError: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{shown} is not Python: {files.shorten(str(error))}") from error
    request = {"path": path, "chips": list(chips), "budget": dict(budget or {})}
    checks: list[Check] = []
    kernels: list[dict[str, Any]] = []
    for message in _messages(request, seconds, memory_gib, shown):
        if "refused" in message:
            raise UserError(message["refused"])
        if "next" in message:
            say(message["next"])
        if "check" in message:
            checks.append(Check(**message["check"]))
        if "kernel" in message:
            kernels.append(message["kernel"])
    return Verdict(path, tuple(checks), tuple(kernels))


def _messages(
    request: dict[str, Any], seconds: float, memory_gib: float, shown: str
) -> Iterator[dict[str, Any]]:
    """Starts the process that executes the file, and yields what it reports."""
    read, write = os.pipe()
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    env["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "minitext.perf.judge", str(write), json.dumps(request)],
            pass_fds=(write,),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            stderr=complaints,
            start_new_session=True,
        )
        os.close(write)
        try:
            for message in _lines(read, process, seconds, memory_gib, shown):
                yield message
                if "done" in message:  # threads and children of the file may go on
                    return
            process.wait()
            complaints.seek(0)
            raise UserError(f"{shown}: {_death(process.returncode, complaints.read())}")
        finally:
            os.close(read)
            _kill_group(process)


def _has_descriptor(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, AttributeError, ValueError):
        return False


def _lines(
    read: int, process: subprocess.Popen, seconds: float, memory_gib: float, shown: str
) -> Iterator[dict[str, Any]]:
    import psutil

    deadline, rest = time.monotonic() + seconds, b""
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        while True:
            if selector.select(0.2):
                if not (new := os.read(read, 1 << 16)):
                    return
                *lines, rest = (rest + new).split(b"\n")
                yield from (json.loads(line) for line in lines)
            if time.monotonic() > deadline:
                raise UserError(
                    f"{shown} took more than {seconds:g} s: look for a loop or a wait that never ends, choose smaller "
                    "inputs, or raise --seconds"
                )
            used = 0
            try:
                tree = psutil.Process(process.pid)
                for one in [tree, *tree.children(recursive=True)]:
                    used += one.memory_info().rss
            except psutil.Error:  # one has just ended
                continue
            if used > memory_gib * 2**30:
                raise UserError(
                    f"{shown} took more than {memory_gib:g} GiB of memory: choose smaller inputs, or raise --memory"
                )


def _death(code: int, complaints: bytes) -> str:
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    said = complaints.decode(errors="replace").strip().splitlines() or ["nothing"]
    return f"its process ended with exit code {code}, and said: {files.shorten(said[-1])}"


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ------------------------------------------------------------------- in the process that executes the file


def _work(descriptor: int, request: dict[str, Any]) -> None:
    """Executes the file, judges its cases, and reports in JSON lines."""

    def report(**message: Any) -> None:
        os.write(descriptor, (json.dumps(message) + "\n").encode())

    path = request["path"]
    try:
        cases = load_cases(path)
    except UserError as error:
        report(refused=str(error), done=True)
        return
    for case in cases:
        report(next=f"{case.name} in the simulator")
        for check in simulate_case(case, path):
            report(check=asdict(check))
        for chip in request["chips"]:
            report(next=f"{case.name} for {chip}")
            for found in compile_case(case, chip, request["budget"], path):
                if isinstance(found, Check):
                    report(check=asdict(found))
                else:
                    report(kernel=found)
    report(done=True)


def load_cases(path: str) -> list[Case]:
    """Executes a file and returns its cases, each with a name of its own.

    Raises:
      UserError: if it raises an error, or names no kernel.
    """
    sys.path.insert(0, str(Path(path).absolute().parent))
    spec = importlib.util.spec_from_file_location("judged", path)
    if spec is None or spec.loader is None:  # it has another ending than .py
        raise UserError(f"{files.shorten(path)} is not a .py file: name one")
    module = importlib.util.module_from_spec(spec)
    sys.modules["judged"] = module
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "CASES") and hasattr(module, "kernel"):
            if not callable(getattr(module, "example_inputs", None)):
                raise UserError(f"{files.shorten(path)} has no example_inputs(): {_CONVENTION}")
            inputs = module.example_inputs()
            inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
            given: Any = [Case(module.kernel, inputs, getattr(module, "reference", None))]
        else:
            given = getattr(module, "CASES", [])
            given = list(given) if isinstance(given, (tuple, list)) else [given]
    except UserError:
        raise
    except BaseException as error:
        raise UserError(locate(error, path)) from error
    if not given:
        raise UserError(f"{files.shorten(path)} names no kernel: {_CONVENTION}")
    names: dict[str, int] = {}
    found = []
    for number, case in enumerate(given):
        found.append(_complete(case, number, path, names))
    return found


def _complete(case: Any, number: int, path: str, names: dict[str, int]) -> Case:
    """Checks a case, and names it."""
    import jax

    shown = f"{files.shorten(path)}: CASES[{number}]"
    if not isinstance(case, Case) or not callable(case.fn) or not isinstance(case.inputs, tuple):
        raise UserError(f"{shown} is not a Case(fn, (input, ...), reference): {_CONVENTION}")
    tolerance = case.tolerance
    if tolerance is not None and not (
        isinstance(tolerance, (int, float)) and 0 <= tolerance < math.inf
    ):
        raise UserError(f"{shown} has tolerance={tolerance!r:.40}: give a number of at least 0")
    for leaf in jax.tree.leaves(case.inputs):
        if not hasattr(leaf, "__array__") and not isinstance(leaf, (int, float, bool)):
            raise UserError(
                f"{shown} has an input of type {type(leaf).__name__}: give arrays, which the simulator can compute with"
            )
    name = files.shorten(str(case.name or getattr(case.fn, "__name__", "kernel")))
    names[name] = names.get(name, 0) + 1
    # A number becomes an array, which has the shape and type that the compiler asks for.
    inputs = jax.tree.map(
        lambda leaf: leaf if hasattr(leaf, "__array__") else jax.numpy.asarray(leaf), case.inputs
    )
    return case._replace(name=name if names[name] == 1 else f"{name} {names[name]}", inputs=inputs)


def locate(error: BaseException, path: str) -> str:
    """Says in one line what went wrong, and where in the file."""
    here = Path(path).absolute()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == here]
    where = f"{files.shorten(path)}" + (f":{frames[-1].lineno}" if frames else "")
    lines = str(error).splitlines() or [""]
    reason = next((line for line in lines if line.strip()), "")
    return f"{where}: {type(error).__name__}: {reason.strip()[:300]}".rstrip(": ")


def simulate_case(case: Case, path: str) -> Iterator[Check]:
    """Runs a case in the strict simulator, and yields its verdicts.

    Each check is made on the way: the first fault ends the simulation, and what it prevents isn't checked.
    """
    from minitext.kernels.simulator import Fault

    try:
        runs = [_simulate(case, seed, "nan") for seed in SEEDS]
        zeros, _ = _simulate(case, SEEDS[0], "zero")
    except BaseException as error:
        is_fault = isinstance(error, Fault)
        failed = _kind(str(error)) if is_fault else "runs"
        said = str(error) if is_fault or isinstance(error, UserError) else locate(error, path)
        for name in SIMULATED:
            passed = False if name == failed else True if name == "runs" and is_fault else None
            yield Check(case.name, name, passed, said if name == failed else "not reached")
        return
    outputs, kernels = runs[0]
    if not kernels:
        why = "no Pallas kernel ran: does it pass interpret=True, have a grid of 0 steps, or call none?"
        yield Check(case.name, "runs", False, why)
        return
    yield Check(case.name, "runs", True, f"{kernels} kernel call{'s' * (kernels > 1)}")
    differences = [_first_difference(outputs, other) for other, _ in runs[1:]]
    by_order = next(filter(None, differences), None)
    said = f"{len(SEEDS)} orders of parallel steps, on two cores"
    if by_order:
        said = (
            f"{by_order} the order of parallel steps: a dimension that accumulates is 'arbitrary'"
        )
    yield Check(case.name, "races", by_order is None, said)
    yield Check(case.name, "bounds", True)
    yield Check(case.name, "blocks", True)
    unset, said = _first_difference(outputs, zeros), ""
    if unset:
        said = (
            f"{unset} memory that nothing wrote: scratch, an output, or the padding of a last block is read before it "
            "is set, or never set"
        )
    yield Check(case.name, "initialized", unset is None, said)
    # Where memory matters, values are those of memory that starts as zero.
    yield _check_values(case, zeros if unset else outputs, path)


def _kind(fault: str) -> str:
    """The check that a fault of the simulator belongs to."""
    if fault.startswith("race"):
        return "races"
    if "Revisited" in fault:
        return "blocks"
    lower = fault.lower()
    return "bounds" if "bounds" in lower or "block index" in lower else "runs"


def _simulate(case: Case, seed: int, uninitialized: Any) -> tuple[list[Any], int]:
    """The outputs' leaves as NumPy arrays, and how many kernels ran."""
    import jax
    import numpy as np

    from minitext.kernels.simulator import strict

    with strict(seed=seed, uninitialized=uninitialized) as runs:
        # A new function each time: JAX would reuse the program of another seed.
        out = jax.block_until_ready(jax.jit(lambda *args: case.fn(*args))(*case.inputs))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(out)], len(runs)


def _first_difference(first: Any, second: Any) -> str | None:
    """Says where two simulations' outputs differ, for a sentence that goes on with the reason; None if they don't."""
    import numpy as np

    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        shape = (*one.shape, one.dtype.itemsize)
        bits = [np.frombuffer(x.tobytes(), np.uint8).reshape(shape) for x in (one, other)]
        differ = np.argwhere((bits[0] != bits[1]).any(-1))
        if len(differ):
            where = f"[{', '.join(map(str, differ[0]))}]"
            count = f"{len(differ):,} of {one.size:,} entries"
            return f"output {number} at {where} ({count}) depends on"
    return None


def _check_values(case: Case, outputs: Any, path: str) -> Check:
    import jax
    import numpy as np

    if case.reference is None:
        return Check(case.name, "values", None, "no reference")
    try:
        wanted = [np.asarray(x) for x in jax.tree.leaves(case.reference(*case.inputs))]
    except BaseException as error:
        return Check(case.name, "values", False, f"in the reference, {locate(error, path)}")
    if len(wanted) != len(outputs):
        said = f"{len(outputs)} outputs, and the reference has {len(wanted)}"
        return Check(case.name, "values", False, said)
    worst = 0.0
    for number, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        if got.shape != want.shape:
            said = f"output {number} has shape {got.shape}, the reference's {want.shape}"
            return Check(case.name, "values", False, said)
        inexact = not jax.numpy.issubdtype(got.dtype, jax.numpy.integer) and got.dtype != np.bool_
        g, w = got.astype(np.float64), want.astype(np.float64)
        scale = float(np.max(np.abs(w[np.isfinite(w)]), initial=0.0)) or 1.0
        allowed = TOLERANCE.get(got.dtype.name, OTHER_TOLERANCE) if inexact else 0.0
        allowed = allowed if case.tolerance is None else case.tolerance
        with np.errstate(invalid="ignore"):
            error = np.where((g == w) | (np.isnan(g) & np.isnan(w)), 0.0, np.abs(g - w)) / scale
        error = np.where(np.isnan(error), np.inf, error)
        worst = max(worst, float(error.max(initial=0.0)))
        if error.size and error.max() > allowed:
            at = np.unravel_index(int(error.argmax()), error.shape)
            said = (
                f"output {number} at [{', '.join(map(str, at))}]: got {g[at]:.6g}, want {w[at]:.6g}; "
                f"{int((error > allowed).sum()):,} of {error.size:,} entries are off by more than {allowed:g} of the "
                "largest"
            )
            return Check(case.name, "values", False, said)
    return Check(case.name, "values", True, f"largest difference {worst:.1e} of the largest entry")


def compile_case(
    case: Case, chip: str, budget: Mapping[str, float], path: str
) -> Iterator[Check | dict[str, Any]]:
    """Compiles a case for a chip; yields its verdicts, and the figures of each kernel."""
    from minitext.compiler.llo import compile_kernels

    def check(name: str, passed: bool | None, said: str) -> Check:
        return Check(case.name, name, passed, said, chip)

    try:
        kernels = compile_kernels(case.fn, *(case.compile_inputs or case.inputs), chip=chip)
    except DoesNotFit as error:
        yield check("compiles", False, "")
        yield check("vmem", False, str(error))
        return
    except BaseException as error:
        said = str(error) if isinstance(error, UserError) else locate(error, path)
        yield check("compiles", False, said)
        return
    yield check("compiles", True, f"{len(kernels)} kernel{'s' * (len(kernels) > 1)}")
    for kernel in kernels:
        figures = kernel.to_json()
        yield {"case": case.name, **figures}
        yield from _within(case.name, chip, figures, budget)


def _within(
    case: str, chip: str, figures: Mapping[str, Any], budget: Mapping[str, float]
) -> Iterator[Check]:
    """Compares one kernel's figures with a budget."""
    name, vmem = figures["kernel"], figures["vmem_bytes"]
    if "vmem" not in budget:
        of = CHIPS[chip].vmem_bytes
        said = f"{name}: {show_bytes(vmem)}" + (f" of the core's {show_bytes(of)}" if of else "")
        yield Check(case, "vmem", True, said, chip)
    else:
        said = f"{name}: {show_bytes(vmem)} of {show_bytes(budget['vmem'])}"
        yield Check(case, "vmem", vmem <= budget["vmem"], said, chip)
    for key in ("spills", "bundles"):
        if key in budget:
            said = f"{name}: {figures[key]:,} of {budget[key]:,.0f}"
            yield Check(case, key, figures[key] <= budget[key], said, chip)
    if "mxu" in budget:
        share = figures["mxu_share"]
        said = f"{name}: {share:.1%} of bundles, at least {budget['mxu']:.1%}"
        yield Check(case, "mxu", share >= budget["mxu"], said, chip)


def print_verdict(found: Verdict) -> None:
    """Prints the checks, and the kernels' figures, on stdout."""
    words = {True: "pass", False: "FAIL", None: "-"}
    rows = [(c.case, c.check, c.chip, words[c.passed], c.said) for c in found.checks]
    figures = [
        (
            k["case"], k["kernel"], k["chip"], f"{k['bundles']:,}", f"{k['cycles']:,}", f"{k['mxu_share']:.0%}",
            f"{k['mxu_occupancy']:.0%}", f"{k['spills']:,}", f"{k['fills']:,}", show_bytes(k["vmem_bytes"]),
        )
        for k in found.kernels
    ]  # fmt: skip
    heads = ("case", "kernel", "chip", "bundles", "cycles", "MXU", "MXU filled", "spills", "fills")
    parts = [table(("case", "check", "chip", "verdict", "what was found"), rows, ())]
    if figures:
        parts.append(table((*heads, "VMEM"), figures, tuple(range(3, 10))))
    failed = sum(check.passed is False for check in found.checks)
    parts.append(
        f"{failed} check{'s' * (failed != 1)} failed" if failed else "every check that was made passed"
    )  # fmt: skip
    print_tables(*parts)


if __name__ == "__main__":
    from minitext.perf import judge as module  # the one that files import `Case` from

    module._work(int(sys.argv[1]), json.loads(sys.argv[2]))
