"""Predicted step times beside those that MaxText publishes for the same models, chips and batches.

    python benchmarks/step_time.py [--programs DIR]

Each step is predicted twice: as it is, and with the compiler's options that are recommended for its chip
(minitext.compiler.options), as MaxText's recipes set them too.

Each step is compiled for chips that are not here, with the rows a chip and the rematerialisation of MaxText's recipe as
far as minitext has it, and its schedule is walked (minitext.perf.step_time). No constant is fitted to the published times.
But this isn't a blind test: they were known, and minitext's kernels and options were improved with them as a goal. The
errors hold more than the method: the programs are minitext's, of today's compiler, and the published ones are MaxText's,
of 2024 and 2025. Dense models, mixtures of experts and runs that offload to the host are kept apart.

Compiling takes minutes and some GB a case. With --programs the compiler's text is kept, and read if it is there.
"""

import statistics
from pathlib import Path

from common import in_subprocess, parser, write_record

TIERS = "maxtext.readthedocs.io, optimized models tiering (v5p)"
RECIPES = "github.com/AI-Hypercomputer/tpu-recipes, training/trillium"
CASES = {
    "llama2-70b": {
        "kind": "dense", "target": "v5p:8x8x8", "published_seconds": 4 * 4096 / 692, "source": TIERS,
        # Its policy save_dot_except_mlpwi keeps the products of attention and of the way down.
        "settings": ["train.global_batch=2048", "model.remat=names", "model.remat_save=[qkv,attention_out]"],
        "differs": "MaxText's script for this batch names the slice v5p-512, which has 256 chips; the table says 512 chips",
    },
    "gpt3-175b": {
        "kind": "dense", "target": "v6e:16x16", "published_seconds": 17.182, "source": f"{RECIPES}/GPT3-175B-MaxText/bf16",
        "settings": ["train.global_batch=768"],
        "differs": "gated feed-forward layers of as many parameters",
    },
    "mixtral-8x7b": {
        "kind": "experts", "target": "v5p:4x8x8", "published_seconds": 8 * 4096 / 2909, "source": TIERS,
        "settings": ["train.global_batch=2048"],
        "differs": "rows a chip are not published: eight, as in MaxText's recipe for v6e of the time; remat=full",
    },
    "llama3-8b": {
        "kind": "host offload", "target": "v6e:16x16", "published_seconds": 4.546, "source": f"{RECIPES}/Llama3.1-8B-MaxText/v6e-256",
        "settings": ["train.global_batch=1024", "data.seq_len=8192", "model.remat=full", "optim.offload=true"],
        "differs": "MaxText offloads activations and recomputes less; minitext offloads the optimizer's state and recomputes all",
    },
}  # fmt: skip


def predict(name, recommended, programs):
    """One case in this process: what `StepTime.to_json` says."""
    from minitext.distributed import devices

    devices.start()
    from minitext.compiler.targets import parse_target
    from minitext.config.config import load_config
    from minitext.perf.step_time import predict_preset, predict_program

    case = CASES[name]
    cfg = load_config(name, [*case["settings"], f"xla.recommended={recommended}"])
    text = Path(programs, f"{name}{'-recommended' * recommended}.txt") if programs else None
    if text is not None and text.exists():
        return predict_program(text.read_text(), cfg, parse_target(case["target"])).to_json()
    return predict_preset(cfg, case["target"], text).to_json()


def main():
    cli = parser(__doc__)
    cli.add_argument("--programs", type=Path, help="folder for the compiler's texts")
    cli.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="these cases")
    args = cli.parse_args()
    if args.case:
        import json

        print(json.dumps(predict(**args.case)))
        return
    runs, errors = {}, {}
    for name in args.only:
        programs = str(args.programs) if args.programs else None
        plain, found = (
            in_subprocess(__file__, {"name": name, "recommended": on, "programs": programs})
            for on in (False, True)
        )
        case = CASES[name]
        error = found["seconds"] / case["published_seconds"] - 1
        errors.setdefault(case["kind"], {})[name] = error
        inside = found["lower"] <= case["published_seconds"] <= found["upper"]
        runs[name] = case | {
            "predicted": found, "without_options": plain, "error": error, "published_in_interval": inside,
        }  # fmt: skip
        print(
            f"{name} ({case['kind']}) on {case['target']}: {found['seconds']:.2f} s [{found['lower']:.2f}, "
            f"{found['upper']:.2f}], without options {plain['seconds']:.2f}, published "
            f"{case['published_seconds']:.2f}: {error:+.1%}",
            flush=True,
        )
    summary = {
        kind: {"errors": of, "mean_absolute": statistics.mean(map(abs, of.values()))}
        for kind, of in errors.items()
    }
    write_record(args.output, "step_time", "", {"errors": summary, "runs": runs})


if __name__ == "__main__":
    main()
