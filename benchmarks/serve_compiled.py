"""Compiling the engine's two programs for chips that aren't here: do they fit, by which kernels, and how fast at best.

    python benchmarks/serve_compiled.py

Decode and prefill of Llama 3 8B and Qwen3-30B-A3B are compiled for TPU v5e, TPU v6e and the H100, each model for as few
chips as hold it, in a process of its own. The tokens/s are those of the roofline: an upper bound. Needs libtpu (pip
install 'minitext[aot]') and no chip.
"""

import json
import resource
import subprocess
import sys
import time

from common import parser, write_record

TEXTS = 32  # at once
# Preset, target, settings. Qwen3 has four key heads, so at most four chips share it: of a v5e's only in 8 bits.
CASES = [
    ("llama3-8b", "v5e:2x4", []),
    ("llama3-8b", "v6e:1x1", []),
    ("llama3-8b", "h100:1x1x1", []),
    ("qwen3-30b-a3b", "v5e:2x2", ["model.storage=[{dtype: int8}]"]),
    ("qwen3-30b-a3b", "v6e:2x2", []),
    ("qwen3-30b-a3b", "h100:1x1x1", []),
]


def compile_one(case):
    """In a fresh process: predicts and compiles one preset for one target; returns what was found and the clock's."""
    from minitext.config.config import load_config
    from minitext.distributed import devices
    from minitext.perf.serving import predict_serving

    devices.start()
    begin, cpu = time.perf_counter(), time.process_time()
    found = predict_serving(
        load_config(case["preset"], case["settings"]), case["target"], texts=TEXTS, context=2048, prompt=1024,
        compile=True,
    ).to_json()  # fmt: skip
    kept = (
        "target", "chips", "tensor", "texts", "context", "prompt", "fits", "kernels", "decode", "prefill",
        "tokens_per_second_per_chip", "prompt_tokens_per_second_per_chip",
    )  # fmt: skip
    programs = {
        name: {key: report[key] for key in ("total_bytes", "available_bytes", "compile_seconds", "collectives")}
        for name, report in found["reports"].items()
    }  # fmt: skip
    return {name: found[name] for name in kept} | {
        "preset": case["preset"],
        "settings": case["settings"],
        "programs": programs,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "process_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main():
    cli = parser(__doc__)
    args = cli.parse_args()
    if args.case:
        print(json.dumps(compile_one(args.case)))
        return
    results = []
    for preset, target, settings in CASES:
        case = json.dumps({"preset": preset, "target": target, "settings": settings})
        command = [sys.executable, __file__, "--case", case]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{preset} {target} failed: see its messages above")
        found = json.loads(done.stdout.splitlines()[-1])
        results.append(found)
        most = max(program["total_bytes"] for program in found["programs"].values())
        room = found["programs"]["decode"]["available_bytes"]
        print(
            f"{preset} {target}: {'fits' if found['fits'] else 'too large'}, {most / 2**30:.2f} of {room / 2**30:.2f} "
            f"GiB, decode calls {found['kernels']['decode']}, {found['seconds']:.0f} s ({found['cpu_seconds']:.0f} s "
            f"of CPU), at best {found['tokens_per_second_per_chip']:,.0f} tokens/s a chip, bound by "
            f"{found['decode']['limit']}",
            flush=True,
        )
    write_record(args.output, "serve_compiled", "", {"results": results})


if __name__ == "__main__":
    main()
