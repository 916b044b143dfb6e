"""Compiling whole pods on this machine: does the step fit, how long does the compiler take, what goes over which network.

    python benchmarks/pods.py

The train step of Llama 2 70B is compiled for 64 v5p chips, for 2 slices of 256 v5e chips, and for 199 of them, which
are 50,944 chips; --presets adds others. Each is compiled in a process of its own. If many slices take the compiler more
than --limit seconds, fewer are tried, and the record says for how many it was done. Needs libtpu (pip install
'minitext[aot]') and no TPU.
"""

import json
import resource
import subprocess
import sys
import time

from common import parser, write_record

SLICES = 199, 64, 16
# Preset -> targets, each with fewer slices to try if it takes too long.
CASES = {
    "llama2-70b": [
        ("v5p:4x4x4",),
        ("v5e:16x16 slices=2",),
        tuple(f"v5e:16x16 slices={n}" for n in SLICES),
    ],
    "gpt3-175b": [("v6e:16x16",)],
}


def compile_one(case):
    """In a fresh process: compiles one preset for one target; returns what the report and the clock say."""
    from minitext import aot, devices
    from minitext.config import load_config

    devices.start()
    begin, cpu = time.perf_counter(), time.process_time()
    report = aot.compile_preset(load_config(case["preset"]), case["target"])
    found = report.to_json()
    kept = (
        "target", "devices", "slices", "mesh", "changed", "fits", "total_bytes", "available_bytes", "argument_bytes",
        "temp_bytes", "lower_seconds", "compile_seconds", "collectives", "networks", "advice",
    )  # fmt: skip
    return {name: found[name] for name in kept} | {
        "preset": case["preset"],
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "process_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def first_within(limit, preset, targets):
    """Compiles for the first target that takes no more than `limit` seconds; returns None if none does."""
    gave_up = []
    for target in targets:
        case = json.dumps({"preset": preset, "target": target})
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
    cli.add_argument("--presets", nargs="+", default=["llama2-70b"], choices=CASES)
    cli.add_argument("--limit", type=int, default=600, help="seconds for one compilation")
    args = cli.parse_args()
    if args.case:
        print(json.dumps(compile_one(args.case)))
        return
    results = []
    for preset in args.presets:
        for targets in CASES[preset]:
            if (found := first_within(args.limit, preset, targets)) is None:
                continue
            results.append(found)
            dcn = found["networks"]["dcn"]["sent"] / 1e9
            print(
                f"{preset} {found['target']}: {found['devices']:,} devices, {'fits' if found['fits'] else 'too large'}, "
                f"{found['total_bytes'] / 2**30:.2f} of {found['available_bytes'] / 2**30:.2f} GiB, a device sends "
                f"{found['networks']['ici']['sent'] / 1e9:,.1f} GB within and {dcn:,.2f} GB across slices, "
                f"{found['seconds']:.0f} s ({found['cpu_seconds']:.0f} s of CPU)",
                flush=True,
            )
    write_record(args.output, "pods", "", {"limit_s": args.limit, "results": results})


if __name__ == "__main__":
    main()
