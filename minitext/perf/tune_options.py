"""A search for the compiler's options, remat policy and microbatches with which a step is fastest on named chips.

Every candidate is compiled, and the compiler's schedule says how long its step takes (`minitext.perf.step_time`). That
takes seconds for a small model and minutes for a large one, so the search is greedy: one dimension at a time it tries
all values with the best of the others, keeps the best, and ends when no dimension improves it, or with the budget.

The mesh stays as it is: `minitext plan` chooses that. So do the kernels' block shapes, which are a table by chip and
not part of a configuration: `minitext tune OP chip=CHIP --write` fills it.

A folder keeps each result as soon as it's known. The search depends on results alone, so a second one in the same
folder takes the same way without compiling again, and goes on where the first was stopped. Results of another
configuration, target or version of the compiler or this package stay in the file and aren't used.

Chapters: 22.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from pydantic import TypeAdapter, ValidationError

from minitext import files
from minitext.compiler.llo_compiler import why_it_stopped
from minitext.compiler.options import SCOPED_VMEM, SPARSE_CORE_COLLECTIVES, chosen
from minitext.compiler.targets import Target, fit_slices, is_free, parse_target, topology_mesh
from minitext.config.config import Config, load_config, to_yaml
from minitext.errors import UserError
from minitext.hardware import Chip
from minitext.perf import step_time
from minitext.sharding.check import check_mesh
from minitext.terminal import print_tables, show_bytes, table
from minitext.training import compile

RESULTS, BEST = "results.jsonl", "best.yml"
MOST_BYTES = 2**26  # of a file of results

# Values to try, each as the settings that it consists of.
REMAT = (
    {"model.remat": "none", "model.remat_save": ()},
    {"model.remat": "dots", "model.remat_save": ()},
    {"model.remat": "names", "model.remat_save": ("qkv", "attention_out")},
    {"model.remat": "names", "model.remat_save": ("qkv", "attention", "gate_up")},
    {"model.remat": "full", "model.remat_save": ()},
)
MICROBATCHES = (1, 2, 4, 8, 16)
VMEM_KIB = (32_768, 65_536, 98_304)
# Options that MaxText's recipes set together (`minitext.compiler.options.KNOWN` says what each does).
SETS: dict[str, dict[str, str]] = {
    "async_collective_fusion": {
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    },
    "sparse_core_collectives": SPARSE_CORE_COLLECTIVES,
    "all_gather_pipelining": {
        "xla_tpu_enable_ag_backward_pipelining": "true",
        "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
        "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    },
    "async_all_gather": {
        "xla_tpu_overlap_compute_collective_tc": "true",
        "xla_enable_async_all_gather": "true",
    },
    "early_all_reduce": {
        "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
        "xla_tpu_data_parallel_opt_different_sized_ops": "true",
    },
    "experimental_scheduler": {
        "xla_tpu_enable_all_experimental_scheduler_features": "true",
        "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
    },
    "early_barrier_removal": {"xla_tpu_aggressive_opt_barrier_removal": "ENABLED"},
}
WITH_SPARSE_CORES = ("v5p", "v6e", "tpu7x")

# Settings by dotted key; a compiler's option by its own name.
Changes = dict[str, Any]
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Result:
    """What the compiler made of one candidate.

    Attributes:
      key: identifies the program: its settings, its target, and the versions of everything that makes it.
      changes: what differs from the start.
      seconds: the best estimate of a step's time; None if the candidate does not fit or can't be compiled.
      lower: seconds if everything overlaps.
      upper: seconds if nothing overlaps.
      bytes: memory of one device; None if the compiler failed.
      refusal: why there is no time, or "".
      took: seconds until it was known.
    """

    key: str
    changes: dict[str, Any]
    seconds: float | None = None
    lower: float | None = None
    upper: float | None = None
    bytes: int | None = None
    refusal: str = ""
    took: float = 0.0

    @property
    def order(self) -> tuple[float, float, int]:
        """What results are ranked by: the fastest first, of those that don't fit the smallest, and fewer changes."""
        seconds, size = (
            math.inf if value is None else value for value in (self.seconds, self.bytes)
        )
        return seconds, size, len(self.changes)


_READ = TypeAdapter(Result)


class Store(contextlib.AbstractContextManager):
    """A folder's results, by key; it's locked as long as this is open.

    Raises:
      UserError: if the folder can't be written or isn't a tuning's, if another search uses it, or if a line of its file
        isn't a result.
    """

    def __init__(self, folder: Path):
        import fcntl  # Windows has none, and no libtpu either

        self.folder, path = folder, folder / RESULTS
        shown = files.shorten(str(folder))
        try:
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            if os.listdir(folder) and not path.is_file():
                raise UserError(
                    f"{shown} has files, and none is a {RESULTS}: name a folder that is new, empty or an earlier "
                    "search's with --save"
                )
            if (folder / BEST).is_dir():
                raise UserError(f"{shown}/{BEST} is a folder: name another folder with --save")
            self._file = path.open("a+b")
        except OSError as error:
            reason = files.explain(error, "name another folder with --save")
            raise UserError(f"cannot write {shown}: {reason}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"another search is at work in {shown}: wait for it, or name another folder with --save"
            ) from None
        self.found = {result.key: result for result in self._read()}

    def add(self, result: Result) -> None:
        """Keeps a result."""
        self._file.write(json.dumps(asdict(result)).encode() + b"\n")
        self._file.flush()
        self.found[result.key] = result

    def __exit__(self, *_: object) -> None:
        if not self.found:  # a start that can't be compiled leaves nothing
            (self.folder / RESULTS).unlink()
            with contextlib.suppress(OSError):  # somebody else's files are in it
                for folder in self._made:
                    folder.rmdir()
        self._file.close()

    def _read(self) -> Iterator[Result]:
        path = self.folder / RESULTS
        *lines, cut = files.read_text(path, MOST_BYTES).encode().split(b"\n")
        if cut:  # a kill cut it off
            self._file.truncate(self._file.seek(0, os.SEEK_END) - len(cut))
        for number, line in enumerate(lines, 1):
            try:
                yield _READ.validate_json(line)
            except ValidationError:
                raise UserError(
                    f"line {number} of {files.shorten(str(path))} is not a result: delete it, or name another folder "
                    "with --save"
                ) from None


def dimensions(cfg: Config, target: Target, mesh: Mesh) -> Iterator[list[Changes]]:
    """Yields what may change independently: for each such dimension its values, other than the start's.

    Settings of the command line or of a file aren't changed.
    """
    if is_free(cfg, "model.remat") and is_free(cfg, "model.remat_save"):
        yield [value for value in REMAT if not _has(cfg, value)]
    if is_free(cfg, "train.microbatches"):
        yield [{"train.microbatches": n} for n in MICROBATCHES if n != cfg.train.microbatches]
    on = {option.name: option.value for option in chosen(cfg.xla, mesh)}
    set_by_user = {name for name, _ in cfg.xla.pairs()}
    for values in _option_values(target.chip, on):
        found = [value for value in values if any(on.get(n) != v for n, v in value.items())]
        if found and not set_by_user & {name for value in found for name in value}:
            yield found


def _has(cfg: Config, value: Changes) -> bool:
    return all(getattr(cfg.model, key.removeprefix("model.")) == v for key, v in value.items())


def _option_values(chip: Chip, on: Mapping[str, str]) -> Iterator[list[Changes]]:
    most = (chip.vmem_bytes or 0) * chip.device_cores // 1024
    yield [{SCOPED_VMEM: str(kib)} for kib in VMEM_KIB if kib < most]
    for name, together in SETS.items():
        if name != "sparse_core_collectives" or chip.name in WITH_SPARSE_CORES:
            # What is on at the start can be left out.
            is_on = any(on.get(option) == "true" for option in _off(together))
            yield [together, *([_off(together)] if is_on else [])]


def _off(together: Mapping[str, str]) -> dict[str, str]:
    return {option: "false" for option, value in together.items() if value == "true"}


def apply(cfg: Config, changes: Changes) -> Config:
    """Returns the configuration with changes; options are added to those that it has.

    Raises:
      UserError: if the model or the batch doesn't allow them.
    """
    options = [f"{name}={changes[name]}" for name in sorted(changes) if name.startswith("xla_")]
    values = {key: value for key, value in changes.items() if not key.startswith("xla_")}
    if options:
        values["xla.options"] = (*cfg.xla.options, *options)
    return cfg.replace(values)


def show(changes: Changes) -> str:
    """Writes changes as settings, and sets of options by their names; `as it is` if there are none."""
    rest, words = changes, []
    for name, together in SETS.items():
        for sign, options in (("+", together), ("-", _off(together))):
            if options and options.items() <= rest.items():
                words.append(sign + name)
                rest = {key: value for key, value in rest.items() if key not in options}
    for key, value in rest.items():
        if key != "model.remat_save":
            words.append(f"{key}={value}")
        elif value:
            words.append(f"{key}=[{','.join(value)}]")
    return " ".join(words) or "as it is"


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Attributes:
      target: the chips.
      start: the configuration as it was given.
      ranked: all results, the best first; those without a time last.
      compiled: how many of them this search compiled; the others were in the folder.
      finished: whether no dimension improves the best; otherwise the budget ended the search.
      unused: results in the folder that this search didn't need.
      preset: the file with the best.
    """

    target: str
    start: Result
    ranked: tuple[Result, ...]
    compiled: int
    finished: bool
    unused: int
    preset: str

    @property
    def best(self) -> Result:
        """The fastest; if none fits, the smallest."""
        return self.ranked[0]

    def gain(self, result: Result) -> float | None:
        """Returns the share of the start's time that a candidate saves; None if one of the two has none."""
        if result.seconds is None or self.start.seconds is None:
            return None
        return 1 - result.seconds / self.start.seconds

    def to_json(self) -> dict[str, Any]:
        """Returns the search as JSON values."""
        rows = {
            "start": asdict(self.start),
            "ranked": [asdict(result) | {"gain": self.gain(result)} for result in self.ranked],
        }
        return asdict(self) | rows


class Search:
    """One search: what it looks for, and what it has found.

    Args:
      cfg: the start.
      target: TPUs such as `v5e:2x4`; see `minitext.compiler.targets.parse_target`.
      budget: how many candidates to try, those whose results are known included.
      progress: called with what is going on and the number of candidates done.

    Raises:
      UserError: for a bad target or one of GPUs, a mesh that fits neither the target nor the model, or if all that
        could be tried is set.
    """

    def __init__(self, cfg: Config, target: str, budget: int, progress: Progress):
        parsed = parse_target(target)
        step_time.check_target(parsed)
        self.cfg, self.target = fit_slices(cfg, parsed)[0], parsed
        self.mesh = topology_mesh(parsed, self.cfg.mesh)
        check_mesh(self.cfg, self.mesh)
        self.dimensions = list(dimensions(self.cfg, parsed, self.mesh))
        if not self.dimensions:
            raise UserError(
                "nothing is left to try: leave model.remat, train.microbatches or xla.options to the search"
            )
        self.budget, self.progress = budget, progress
        self.split = is_free(self.cfg, "train.microbatches")
        made_by = compile.describe(self.cfg, self.mesh) | {"target": str(parsed)}
        made_by |= {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
        self.made_by = {k: v for k, v in made_by.items() if k not in ("config", "settings")}
        self.tried: dict[str, Result] = {}
        self.compiled, self.spent = 0, False

    def run(self, store: Store) -> Tuning:
        """Searches, and writes the best as a preset whenever there is a better one.

        Args:
          store: keeps the results, and has those of earlier searches.

        Raises:
          UserError: if the start can't be compiled for another reason than its size.
        """
        self.store, unused = store, len(store.found)
        start = self._try({})
        assert start is not None  # the budget is at least 1
        best = start
        self._write(best, start)
        unimproved = 0
        for dimension in itertools.cycle(self.dimensions):
            better = self._improve(best, dimension)
            unimproved = unimproved + 1 if better is best else 1
            if better is not best:
                best = better
                self._write(best, start)
            if self.spent or unimproved >= len(self.dimensions):
                break
        ranked = sorted(self.tried.values(), key=lambda result: result.order)
        return Tuning(
            target=str(self.target),
            start=start,
            ranked=tuple(ranked),
            compiled=self.compiled,
            finished=not self.spent,
            unused=unused - (len(self.tried) - self.compiled),
            preset=str(self.store.folder / BEST),
        )

    def _improve(self, best: Result, dimension: list[Changes]) -> Result:
        """Tries all values of a dimension, the start's included, and returns the best result.

        What doesn't fit is tried in twice as many microbatches: recomputing less may be worth that.
        """
        keys = {key for value in dimension for key in value}
        others = {key: value for key, value in best.changes.items() if key not in keys}
        for value in ({}, *dimension):
            found = self._try(others | value)
            while found and found.bytes and found.seconds is None and self.split:
                parts = 2 * apply(self.cfg, found.changes).train.microbatches
                if parts > MICROBATCHES[-1]:
                    break
                found = self._try(found.changes | {"train.microbatches": parts})
            best = min(best, found or best, key=lambda result: result.order)
        return best

    def _try(self, changes: Changes) -> Result | None:
        """Returns what is known of a candidate or can be found out; None if it's impossible or the budget is spent."""
        try:
            cfg = apply(self.cfg, changes)
            check_mesh(cfg, self.mesh)
        except UserError:
            return None
        key = files.fingerprint(self.made_by, compile.settings(cfg))
        if key in self.tried:
            return self.tried[key]
        if len(self.tried) == self.budget:
            self.spent = True
            return None
        if key in self.store.found:
            result = dataclasses.replace(self.store.found[key], changes=dict(changes))
        else:
            self.progress(f"{self._standing()}{show(changes)}", len(self.tried))
            began = time.monotonic()
            found = compile_apart(cfg, str(self.target))
            took = time.monotonic() - began
            result = Result(key, dict(changes), took=took, **found)
            if not changes and result.bytes is None:
                raise UserError(result.refusal)
            self.store.add(result)
            self.compiled += 1
        self.tried[key] = result
        return result

    def _standing(self) -> str:
        """Says how fast the best is, and how long the rest of the budget would take."""
        if not self.tried:
            return ""
        best = min(self.tried.values(), key=lambda result: result.order)
        seconds = "nothing fits yet" if best.seconds is None else f"best {best.seconds:,.4g} s"
        mean = sum(result.took for result in self.tried.values()) / len(self.tried)
        minutes = mean * (self.budget - len(self.tried)) / 60
        return f"{seconds}, at most {minutes:,.0f} min left; now "

    def _write(self, best: Result, start: Result) -> None:
        """Writes the configuration of the best, complete: `config=FILE` reads it."""
        if best.seconds is None:
            return
        said = f"{self.target}: {best.seconds:,.4g} s a step as predicted; changed: {show(best.changes)}"
        before = f", {start.seconds:,.4g} s before" if start.seconds else ", which didn't fit"
        text = f"# {said}{before if best.changes else ''}\n{to_yaml(apply(self.cfg, best.changes))}"
        try:
            files.write(self.store.folder / BEST, text)
        except OSError as error:
            raise UserError(f"cannot write {self.store.folder / BEST}: {error.strerror}") from None


def compile_apart(cfg: Config, target: str) -> dict[str, Any]:
    """Compiles a step in a process of its own, so that its memory is given back and a crash ends nothing else.

    Returns:
      The fields of `Result` that say what came of it.
    """
    with tempfile.TemporaryDirectory(prefix="minitext-tune-") as folder:
        source, made = Path(folder, "candidate.yml"), Path(folder, "made.json")
        source.write_text(to_yaml(cfg), encoding="utf-8")
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", __name__, str(source), target, str(made)]
        # The compiler's dump goes into the same folder, which is removed even if that process is killed.
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "TMPDIR": folder}
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
        if done.returncode == 0:
            return json.loads(made.read_text())
    if done.returncode == UserError.exit_code:
        return {"refusal": done.stderr.strip().splitlines()[-1]}
    return {"refusal": why_it_stopped(done)}


def _compile_file(source: str, target: str, made: str) -> None:
    """Compiles a configuration and writes what came of it; this is all that the other process does."""
    from minitext.distributed import devices

    # The system ends this process with the one that waits for it, however that ends.
    ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    devices.start()
    cfg = load_config(None, [f"config={source}"])
    report, program = step_time.compile_program(cfg, target)
    found: dict[str, Any] = {"bytes": report.total_bytes}
    if report.fits:
        step = step_time.predict_program(program, cfg, parse_target(target))
        found |= {"seconds": step.seconds, "lower": step.lower, "upper": step.upper}
    else:
        has = show_bytes(report.available_bytes)
        found["refusal"] = f"does not fit: {show_bytes(report.total_bytes)} of {has}"
    Path(made).write_text(json.dumps(found))


def print_tuning(found: Tuning) -> None:
    """Prints the ranking on stdout."""
    rows, refused = [], []
    for result in found.ranked:
        gain = found.gain(result)
        if result.seconds is None:
            refused.append((show(result.changes), result.refusal))
        else:
            rows.append(
                (
                    f"{result.seconds:,.4g}", f"{result.lower:,.4g} to {result.upper:,.4g}",
                    show_bytes(result.bytes or 0), "" if gain is None else f"{gain:+.1%}", show(result.changes),
                )
            )  # fmt: skip
    heads = ("seconds a step", "interval", "memory", "gain", "changed")
    end = "no single change makes it faster" if found.finished else "the budget is spent"
    print_tables(
        f"{found.target}: {len(found.ranked)} candidates, {found.compiled} of them compiled now; {end}",
        table(heads, rows or [("none fits",)], right=(0, 1, 2, 3)),
        *([table(("refused", "why"), refused, right=())] if refused else []),
    )
    if found.unused:
        print(
            f"\n{found.unused} more results in the folder weren't needed: of other settings, targets or versions, or "
            "beyond the budget"
        )
    if found.best.seconds is not None:
        preset = shlex.quote(f"config={found.preset}")
        print(f"\nminitext predict {preset} target={found.target}")
        print(f"minitext train {preset}")


if __name__ == "__main__":
    try:
        _compile_file(*sys.argv[1:])
    except (UserError, jax.errors.JaxRuntimeError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())[:400]}\n")
        sys.exit(UserError.exit_code)
