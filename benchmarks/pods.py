"""Compiling whole pods on this machine: does the step fit, how long does the compiler take, what goes over which network.

    python benchmarks/pods.py

The train step of Llama 2 70B is compiled for 64 v5p chips, for 2 slices of 256 v5e chips, and for 199 of them, which
are 50,944 chips; that of GPT-3 for 256 v6e chips. Each is compiled in a process of its own. If many slices take the
compiler more than --limit seconds, fewer are tried, and the record says for how many it was done. Needs libtpu (pip
install 'minitext[aot]') and no TPU.
"""

import json
import resource
import subprocess
import sys
import time

from common import parser, write_record

SLICES = 199, 64, 16
# Preset, settings, and targets: fewer slices where the first take too long.
CASES = [
    ("llama2-70b", ["train.global_batch=256"], ["v5p:4x4x4"]),
    ("llama2-70b", ["train.global_batch=512"], ["v5e:16x16 slices=2"]),
    ("llama2-70b", [], [f"v5e:16x16 slices={n}" for n in SLICES]),
    ("gpt3-175b", [], ["v6e:16x16"]),
]


def compile_one(case):
    """In a fresh process: compiles one preset for one target; returns what the report and the clock say."""
    from minitext.config.config import load_config
    from minitext.distributed import devices
    from minitext.training import compile

    devices.start()
    begin, cpu = time.perf_counter(), time.process_time()
    report = compile.compile_preset(load_config(case["preset"], case["settings"]), case["target"])
    found = report.to_json()
    kept = (
        "target", "devices", "slices", "mesh", "changed", "fits", "total_bytes", "available_bytes", "argument_bytes",
        "temp_bytes", "lower_seconds", "compile_seconds", "collectives", "networks", "advice",
    )  # fmt: skip
    return {name: found[name] for name in kept} | {
        "preset": case["preset"],
        "settings": case["settings"],
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "process_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def first_within(limit, preset, settings, targets):
    """Compiles for the first target that takes no more than `limit` seconds; returns None if none does."""
    gave_up = []
    for target in targets:
        case = json.dumps({"preset": preset, "settings": settings, "target": target})
        command = [sys.executable, __file__, "--case", case]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            print(f"{preset} {target}: not done after {limit} s", flush=True)
            gave_up.append(target)
            continue
        if done.returncode:
            sys.exit(f"{preset} {target} failed: see its messages above")
        return json.loads(done.stdout.splitlines()[-1]) | {"gave_up": gave_up}
    return None


def main():
    cli = parser(__doc__)
    cli.add_argument("--limit", type=int, default=600, help="seconds for one compilation")
    args = cli.parse_args()
    if args.case:
        print(json.dumps(compile_one(args.case)))
        return
    results = []
    for case in CASES:
        if (found := first_within(args.limit, *case)) is None:
            continue
        results.append(found)
        within, across = (found["networks"][name]["sent"] / 1e9 for name in ("ici", "dcn"))
        print(
            f"{found['preset']} {found['target']}: {found['devices']:,} devices, "
            f"{'fits' if found['fits'] else 'too large'}, {found['total_bytes'] / 2**30:.2f} of "
            f"{found['available_bytes'] / 2**30:.2f} GiB, a device sends {within:,.1f} GB within and {across:,.2f} GB "
            f"across slices, {found['seconds']:.0f} s ({found['cpu_seconds']:.0f} s of CPU)",
            flush=True,
        )
    write_record(args.output, "pods", "", {"limit_s": args.limit, "results": results})


if __name__ == "__main__":
    main()
