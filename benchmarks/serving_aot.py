"""The serving engine's programs, compiled for chips that are not here.

    python benchmarks/serving_aot.py [--only v5e v6e h100]

Prefill and decode of whole models, every layer, with 32 texts of 2,048 tokens (8 where memory asks for fewer) and parts of 256
tokens of a prompt. The record holds what the compiler says: memory, collectives, seconds, calls of the paged attention
kernel, and copies of the cache. h100 needs JAX's CUDA plugin: pip install '.[aot-gpu]'.
"""

import dataclasses
import json

from common import in_subprocess, parser, write_record

CASES = {
    "v5e": [("llama3-8b", "v5e:2x4", 32), ("qwen3-30b-a3b", "v5e:2x2", 8)],
    "v6e": [("llama3-8b", "v6e:2x4", 32), ("qwen3-30b-a3b", "v6e:2x2", 32)],
    "h100": [("llama3-8b", "h100:1x1x1", 32), ("qwen3-30b-a3b", "h100:1x1x2", 32)],
}


def compile_case(name, target, texts):
    """One model on one target in this process."""
    from minitext.distributed import devices

    devices.start()
    from minitext.config.config import load_config
    from minitext.inference.compile import compile_serving
    from minitext.inference.engine import EngineOptions

    found = compile_serving(load_config(name).model, target, EngineOptions(max_sequences=texts))
    return {
        name: dataclasses.asdict(program) | {"report": program.report.to_json()}
        for name, program in found.items()
    }


def main():
    cli = parser(__doc__)
    cli.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="these chips")
    args = cli.parse_args()
    if args.case:
        print(json.dumps(compile_case(**args.case)))
        return
    runs = []
    for name, target, texts in [case for chip in args.only for case in CASES[chip]]:
        case = {"name": name, "target": target, "texts": texts}
        found = in_subprocess(__file__, case)
        runs.append(case | found)
        for program, said in found.items():
            report = said["report"]
            print(
                f"{name} on {target}, {program}: fits={report['fits']}, {report['total_bytes'] / 2**30:.2f} GiB of "
                f"{report['available_bytes'] / 2**30:.2f}, compiled in {report['compile_seconds']:.1f} s, "
                f"{said['kernels']} kernel calls, {said['cache_copies']} copies of the cache",
                flush=True,
            )
    write_record(args.output, "serving_aot", "-".join(args.only), {"runs": runs})


if __name__ == "__main__":
    main()
