"""Fifty faults on a job of two processes: what each cost, and whether every second of the wall time has a cause.

`minitext drill` does all of it: kill, freeze, slow down, tear a checkpoint, fill the disk, NaN. This script runs it and
writes the record. On a busy machine the seconds say little; steps repeated, the share accounted for and whether the
final state is equal bit for bit don't depend on it.

    python benchmarks/drill.py --faults 50 --seed 1
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

from common import parser, write_record


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--faults", type=int, default=50)
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "minitext", "drill", "--processes", "2", "--devices", "1"]
        command += ["--faults", str(args.faults), "--seed", str(args.seed), "--json"]
        command += [f"run.dir={folder}", "run.name=drill"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1) or not done.stdout:
            sys.exit(f"the drill ended with exit code {done.returncode}: see its messages above")
        found: dict[str, Any] = json.loads(done.stdout.replace(f"{folder}/", ""))
    each = found.pop("faults")
    figures = {
        "faults": len(each),
        "seed": args.seed,
        "by_kind": Counter(one["kind"] for one in each),
        "most_steps_repeated": {
            kind: max(one["repeated"] for one in each if one["kind"] == kind)
            for kind in sorted({one["kind"] for one in each})
        },
        "held": done.returncode == 0,
        **found,
        "each": each,
    }
    write_record(args.output, "drill", str(args.faults), figures)


if __name__ == "__main__":
    main()
