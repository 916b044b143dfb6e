"""Truncates files of a run's newest checkpoint in turn and trains on; prints what was seen, as JSON.

Usage: crash_damage.py RUN (some|all) SETTINGS... `some` are the files that say what is there and one of each folder of
arrays. The run itself is left alone: each attempt works on a copy.
"""

import io
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from rich.console import Console

from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config.config import load_config
from minitext.distributed import devices
from minitext.training.run import train


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def main() -> None:
    run, which, settings = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    copy = run.with_name("copy")
    cfg = load_config("laptop", [*settings, f"run.dir={run.parent}", "run.name=copy"])
    newest = Checkpointer(run / "checkpoints").steps()[-1]
    whole = run / "checkpoints" / str(newest)
    names = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    if which == "some":
        arrays = {name.parent: name for name in reversed(names) if name.parent.name == "d"}
        names = [
            name
            for name in names
            if len(name.parts) == 1 or name.name == "_METADATA" or name in arrays.values()
        ]
    devices.use_compilation_cache()
    warnings = Warnings()
    logging.getLogger("minitext").addHandler(warnings)
    seen = []
    for i, name in enumerate(names):
        shutil.copytree(run, copy)
        damaged = copy / "checkpoints" / str(newest) / name
        size = damaged.stat().st_size
        os.truncate(damaged, (0, size // 2, size - 1)[i % 3])
        warnings.lines.clear()
        printed = io.StringIO()
        train(cfg, Console(file=printed, width=200))
        checkpoints = copy / "checkpoints"
        seen.append({
            "file": str(name),
            "warnings": list(warnings.lines),
            "printed": printed.getvalue(),
            "metrics": (copy / "metrics.jsonl").read_text(),
            "checkpoints": sorted(p.name for p in checkpoints.iterdir()),
            "fault": Checkpointer(checkpoints).verify(newest),
        })  # fmt: skip
        shutil.rmtree(copy)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
