"""Start-up and compile time of minitext: how long until the first step, and what the compiler's time depends on.

    python benchmarks/compile.py

Three parts. (a) From typing `minitext train laptop` to the first step's line in metrics.jsonl, with an empty cache
(tokens, matmul peak and compiled programs are all made) and with the cache that this left; the files of the run tell
when each phase ends, and what importing libraries takes is told apart. (b) Trace, lower and compile time of the train step by depth, with layers scanned and unrolled,
and trace and lower time of the whole Llama 2 70B step for 64 v5p chips, where libtpu is installed. (c) The same by the
number of simulated devices. Every figure is taken in a fresh process, several times in turns; medians count.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import in_subprocess, parser, write_record

SMALL = {
    "model.embed": 128, "model.heads": 4, "model.mlp": 384, "data.seq_len": 256, "train.global_batch": 8,
    "data.source": "grammar",
}  # fmt: skip
# What a run has written when a phase of its start is over.
PHASES = {
    "imports, data": "config.yml",  # made when the text is tokenised
    "parameters": "metrics.jsonl",  # opened when they are drawn
    "train step": "metrics.jsonl",  # has a line
}


def first_step(cache, runs, name):
    """Starts `minitext train`; returns the seconds after which each phase was over, counted from the start."""
    command = [
        sys.executable, "-m", "minitext", "train", "laptop", "train.steps=4", f"run.dir={runs}", f"run.name={name}",
    ]  # fmt: skip
    environment = os.environ | {"MINITEXT_CACHE": str(cache)}
    begin = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    done, waiting = {}, list(PHASES.items())
    while waiting and process.poll() is None:
        phase, file = waiting[0]
        path = Path(runs, name, file)
        if path.exists() and (phase != "train step" or path.stat().st_size):
            done[phase] = time.perf_counter() - begin
            waiting.pop(0)
        time.sleep(0.002)
    process.terminate()
    said = process.communicate()[1]
    if waiting:
        sys.exit(f"{' '.join(command)} ended before its first step:\n{said}")
    return done


def library_imports(cache, runs, name):
    """Runs the same with Python's own timer of imports; returns the seconds in modules that are not minitext's.

    Those of Python itself, which starts before it can time anything, are added from a run of nothing.
    """
    command = [
        sys.executable, "-X", "importtime", "-m", "minitext", "train", "laptop", "train.steps=1",
        f"run.dir={runs}", f"run.name={name}",
    ]  # fmt: skip
    environment = os.environ | {"MINITEXT_CACHE": str(cache)}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=True)
    microseconds = 0
    for line in done.stderr.splitlines():
        fields = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and fields[0].strip().isdigit():
            module = fields[2].strip()
            microseconds += 0 if module.split(".")[0] == "minitext" else int(fields[0])
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    return microseconds / 1e6 + time.perf_counter() - begin


def until_first_step(rounds):
    """Part (a), in turns: the libraries' imports alone, with an empty cache, with a full one."""
    imports, cold, warm = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds):
            cache = Path(folder, f"cache{i}")
            cold.append(first_step(cache, folder, f"cold{i}"))
            warm.append(first_step(cache, folder, f"warm{i}"))
            imports.append(library_imports(cache, folder, f"imports{i}"))
            print(
                f"round {i + 1}/{rounds}  libraries {imports[-1]:.2f} s, first step after "
                f"{cold[-1]['train step']:.2f} s cold, {warm[-1]['train step']:.2f} s warm",
                flush=True,
            )
    report = {"libraries_s": statistics.median(imports), "rounds": {"cold": cold, "warm": warm}}
    for kind, taken in (("cold", cold), ("warm", warm)):
        ends = {phase: statistics.median(t[phase] for t in taken) for phase in PHASES}
        starts = [0, *list(ends.values())[:-1]]
        phases = {
            phase: end - start for (phase, end), start in zip(ends.items(), starts, strict=True)
        }
        total = ends["train step"]
        report[kind] = {
            "total_s": total,
            "own_s": total - report["libraries_s"],
            "phases_s": phases,
        }
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())
        print(
            f"{kind}: {total:.2f} s, {report[kind]['own_s']:.2f} of them minitext's own ({parts})"
        )
    return report


def stages(case):
    """In a fresh process: traces, lowers and compiles one train step; returns the seconds of each."""
    from minitext.compiler.targets import topology_mesh
    from minitext.config.config import load_config
    from minitext.distributed import devices
    from minitext.sharding.mesh import make_mesh
    from minitext.training.step import abstract_batch, abstract_state, make_train_step

    devices.start(case.get("devices"), keep_memory=True)  # as `minitext train` does
    cfg = load_config(case["preset"], [f"{key}={value}" for key, value in case["settings"].items()])
    target = case.get("target")
    mesh = topology_mesh(target, cfg.mesh) if target else make_mesh(cfg.mesh)
    args = abstract_state(cfg, mesh), abstract_batch(cfg, mesh)
    import jax

    with jax.set_mesh(mesh):
        begin = time.perf_counter()
        traced = make_train_step(cfg, mesh).trace(*args)
        traced_at = time.perf_counter()
        lowered = traced.lower()
        lowered_at = time.perf_counter()
        seconds = {"trace": traced_at - begin, "lower": lowered_at - traced_at}
        if not target:
            lowered.compile()
            seconds["compile"] = time.perf_counter() - lowered_at
    return seconds


def cases(depths, unrolled, sizes):
    """Returns the cases of parts (b) and (c) by name."""
    found = {}
    for scan, layers in [*((True, n) for n in depths), *((False, n) for n in unrolled)]:
        settings = SMALL | {"model.layers": layers, "model.scan_layers": scan}
        name = f"{layers} layers, {'scanned' if scan else 'unrolled'}"
        found[name] = {"preset": "laptop", "settings": settings, "devices": 1}
    for size in sizes:
        settings = SMALL | {"model.scan_layers": True, "mesh.data": 1, "mesh.fsdp": size}
        found[f"4 layers, {size} devices"] = {
            "preset": "laptop",
            "settings": settings,
            "devices": size,
        }
    found["llama2-70b, v5p:4x4x4"] = {"preset": "llama2-70b", "settings": {}, "target": "v5p:4x4x4"}
    return found


def by_case(rounds, wanted):
    """Parts (b) and (c): the median seconds of each stage by case."""
    from importlib.util import find_spec

    if not find_spec("libtpu"):
        wanted = {name: case for name, case in wanted.items() if "target" not in case}
        print("libtpu is not installed: llama2-70b is left out")
    taken = {name: [] for name in wanted}
    for i in range(rounds):
        for name, case in wanted.items():
            taken[name].append(in_subprocess(__file__, case, JAX_PLATFORMS="cpu"))
            parts = ", ".join(f"{stage} {s:.2f}" for stage, s in taken[name][-1].items())
            print(f"round {i + 1}/{rounds}  {name:<24} {parts} s", flush=True)
    return {
        name: {f"{stage}_s": statistics.median(s[stage] for s in rows) for stage in rows[0]}
        for name, rows in taken.items()
    }


def main():
    cli = parser(__doc__)
    cli.add_argument("--rounds", type=int, default=3, help="turns of everything (default 3)")
    cli.add_argument("--depths", type=int, nargs="*", default=(8, 32, 80), help="layers, scanned")
    cli.add_argument("--unrolled", type=int, nargs="*", default=(8, 32), help="layers, unrolled")
    cli.add_argument("--devices", type=int, nargs="*", default=(1, 2, 4, 8), help="simulated")
    args = cli.parse_args()
    if args.case:
        print(json.dumps(stages(args.case)))
        return
    start = until_first_step(args.rounds)
    steps = by_case(args.rounds, cases(args.depths, args.unrolled, args.devices))
    for name, seconds in steps.items():
        print(f"{name:<24} " + ", ".join(f"{stage} {s:.2f}" for stage, s in seconds.items()))
    write_record(args.output, "compile", "", {"first_step": start, "train_step": steps})


if __name__ == "__main__":
    main()
