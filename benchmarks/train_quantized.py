"""Quantized training to the end: preset laptop, 700 steps, the same batches and the same first parameters.

    python benchmarks/train_quantized.py

Each run is a `minitext train` in a process of its own that computes in bfloat16, and in all but the first the products
that a rule names are quantized, forward and backward. The last validation loss is compared with bfloat16's. A CPU gains
no speed from narrow products, so no time is compared. Runs of as many steps that `--folder` already has are taken from
there.
"""

import json
import subprocess
import sys
from pathlib import Path

from common import parser, write_record

WORDS = ["model.dtype=bfloat16", "train.sample_tokens=0"]
RULES = {
    "bfloat16": [],
    "fp8": [{"module": ".*", "dtype": "fp8"}],
    "int8, gradients rounded at random": [{"module": ".*", "dtype": "int8", "stochastic": True}],
    "int8, output layer in bfloat16": [{"module": "blocks/.*", "dtype": "int8"}],
    "int8, rounded to the nearest": [{"module": ".*", "dtype": "int8"}],
}


def train(folder, name, rules, steps):
    """Trains one run, unless it's there; returns its validation losses by step."""
    run = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{steps}"
    command = [
        str(Path(sys.executable).parent / "minitext"), "train", "laptop", *WORDS, f"train.steps={steps}",
        f"model.quantization={json.dumps(rules)}", f"run.dir={folder}", f"run.name={run.name}",
    ]  # fmt: skip
    done = run / "done"
    if not done.exists():
        subprocess.run(command, check=True)
        done.touch()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


def main():
    cli = parser(__doc__)
    cli.add_argument("--steps", type=int, default=700)
    runs = Path("runs", "quantized")
    cli.add_argument(
        "--folder", type=Path, default=runs, help=f"where the runs are kept (default {runs})"
    )
    args = cli.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    cases = {}
    for name, rules in RULES.items():
        losses = train(args.folder.absolute(), name, rules, args.steps)
        last = losses[max(losses)]
        first = cases.get("bfloat16", {"validation_loss": last})["validation_loss"]
        over = last / first - 1
        cases[name] = {
            "rules": rules,
            "validation_loss": last,
            "over_bfloat16": over,
            "losses": losses,
        }
        print(f"{name:36} {last:.4f} ({over:+.2%})", flush=True)
    figures = {"preset": "laptop", "settings": WORDS, "steps": args.steps, "cases": cases}
    write_record(args.output, "train_quantized", "", figures)


if __name__ == "__main__":
    main()
