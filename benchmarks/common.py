"""What the benchmarks share: sides that take turns, the machine's own limits, and the record that is written.

A side is one of the things compared. It runs in a process of its own, which builds what it measures, warms up, and
then answers each request, one JSON line each way. The sides take turns, so that whatever else the machine does falls
on all of them.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

PACKAGES = ("minitext", "jax", "jaxlib", "flax", "optax", "numpy", "qwix", "torch", "transformers")


# ---------------------------------------------------------------------------- sides


class Side:
    """A running side, as seen from the process that measures.

    Attributes:
      name: the side's name, which `serve` is given too.
      ready: what it said when it was warm.
    """

    def __init__(self, script: str, name: str, case: dict[str, Any], **environment: str):
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, script, "--serve", name, "--case", json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.ready = self._answer()

    def ask(self, request: Any) -> Any:
        time.sleep(
            0.3
        )  # OpenMP's threads keep their cores for up to 0.2 s after the side before has answered
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the side {self.name!r} ended: see its messages above")
        return json.loads(line)


def serve(start: Callable[[], tuple[Callable[[Any], Any], Any]]) -> None:
    """The life of one side: `start` builds and warms up and returns (a function of a request, what to say when warm)."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    work, ready = start()
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(work(json.loads(line))), file=answers, flush=True)


def turns(sides: dict[str, Side], i: int) -> list[Side]:
    """The sides in the order of round i: every other round backwards, so that none is always first."""
    return list(sides.values())[:: 1 if i % 2 == 0 else -1]


def ratio(theirs: list[float], ours: list[float]) -> float:
    """The median of the ratios of each round: a slow spell of the machine falls on one round of every side."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def spread(values: list[float]) -> dict[str, float]:
    """Least and median of some figures."""
    return {"min": min(values), "median": statistics.median(values)}


def in_subprocess(script: str, case: dict[str, Any], **environment: str) -> Any:
    """Runs `script --case CASE` in a fresh process and returns the last line it prints, read as JSON."""
    done = subprocess.run(
        [sys.executable, script, "--case", json.dumps(case)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    if done.returncode:
        sys.exit(f"{Path(script).name} failed on {case}: see its messages above")
    return json.loads(done.stdout.splitlines()[-1])


def kept_case(script: str, path: Path, case: dict[str, Any]) -> Any:
    """Returns what `in_subprocess` does, from a file if the case has run before; else writes the file."""
    if not path.exists():
        path.write_text(json.dumps(in_subprocess(script, case)))
    return json.loads(path.read_text())


# ---------------------------------------------------------------------------- the machine


def busy() -> float:
    """The share of the cores that others take while everything here waits.

    It should be near 0. PyTorch's threads wait for each other in every operation, so a core that is taken away costs it
    more than it costs JAX, and a ratio taken on a busy machine says little.
    """
    import psutil

    return psutil.cpu_percent(0.5) / 100


def machine() -> dict[str, Any]:
    """What the figures were taken on, and how busy it was."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "busy": busy(),
        "python": platform.python_version(),
        "versions": installed,
    }


def matmul_peak(dtype: str = "float32") -> float:
    """The matmul peak of JAX's device now, in FLOP/s; what minitext's cache keeps of it is left alone."""
    from minitext import hardware

    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, MINITEXT_CACHE=cache):
        return hardware.measure_matmul_peak(dtype)


def read_bandwidth(size: int) -> float:
    """The best rate, in bytes/s, at which JAX's CPU sums an array of so many bytes on all cores."""
    import jax
    import jax.numpy as jnp

    total = jax.jit(jnp.sum)
    x = jnp.ones((1024, size // 4096), jnp.float32)
    total(x).block_until_ready()
    best, deadline = 0.0, time.perf_counter() + 0.5
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        total(x).block_until_ready()
        best = max(best, x.nbytes / (time.perf_counter() - start))
    return best


# ---------------------------------------------------------------------------- the command and its record


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes; `--serve` and `--case` are how a benchmark starts its own processes."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON"
    )
    made.add_argument("--serve", help=argparse.SUPPRESS)
    made.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    return made


def require_gpu(script: str) -> None:
    """Ends the process in one line, with 2, if JAX's plugin or a GPU isn't there; JAX isn't started."""
    from minitext.distributed import devices

    if not devices.accelerator_is_visible():
        no_gpu(script)


def no_gpu(script: str) -> NoReturn:
    """Ends the process because JAX finds no GPU."""
    name = Path(script).stem
    print(f"{name} needs a GPU and JAX's CUDA plugin, and JAX finds none here", file=sys.stderr)
    sys.exit(2)


def write_record(folder: Path, benchmark: str, details: str, figures: dict[str, Any]) -> Path:
    """Writes the dated JSON of one benchmark: BENCHMARK-DETAILS-DATE.json, or BENCHMARK-DATE.json without details."""
    date = datetime.date.today().isoformat()
    record = {
        "benchmark": benchmark,
        "date": date,
        "command": " ".join(["python", f"benchmarks/{benchmark}.py", *sys.argv[1:]]),
        "machine": machine(),
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("-".join(filter(None, (benchmark, details, date))) + ".json")
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return path
