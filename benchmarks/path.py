"""How far one reads to follow a run: the functions and files of ours that `minitext train laptop` enters.

    python benchmarks/path.py [--label NAME]

The command line's own `main` runs two steps on the CPU under `sys.setprofile` and `threading.setprofile`, and the counts
are taken three times: before the first train step is called; when it has been traced, compiled and dispatched, so with
the model's own code; and when the first checkpoint is on disk (the text sampled after step 1 comes before that). A run
before it, not counted, fills the caches.

- A function is a `def`, `async def` or `lambda` in a file of the package; generator functions count, and each counts once
  however often it's called. Comprehensions and generator expressions are counted apart, since newer Pythons inline most
  of them. The bodies of modules and classes don't count, nor do functions that a library makes, such as the `__init__`
  of a dataclass.
- A change of file is a function that calls a function in another of our files, directly or through a library such as
  JAX. Each such pair counts once; returns don't count.
- Modules are those of the package that are imported by then, whether the run enters them or not.

To trace another checkout of the package, put it first: `PYTHONPATH=../other python benchmarks/path.py --label before`.
The script looks at three names: `jax.profiler.StepTraceAnnotation`, in which the loop dispatches a step, and the methods
`save` and `wait` of `Checkpointer`.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from common import in_subprocess, parser, write_record

STAGES = {
    "before_step": "before the first step",
    "first_step": "first step dispatched",
    "first_save": "first save on disk",
}


class Trace:
    """What a run entered, in order, and the counts at each stage.

    Attributes:
      stages: stage -> counts; filled as the run passes them.
    """

    def __init__(self, package: Path):
        self.package = str(package) + os.sep
        self.entered: dict[CodeType, None] = {}
        self.crossed: set[tuple[CodeType, CodeType]] = set()
        self.stages: dict[str, dict[str, Any]] = {}
        self.loop: FrameType | None = None  # the frame that dispatches steps
        self.saved = False

    def ours(self, code: CodeType) -> bool:
        """Whether this is a function of the package, and no body of a module or class."""
        return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_filename.startswith(
            self.package
        )

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """The profile function."""
        code = frame.f_code
        if event == "call":
            if self.loop is None and code.co_qualname == "StepTraceAnnotation.__init__":
                self.loop = frame.f_back
                self.reach("before_step")
            if self.ours(code):
                if self.loop is not None and frame.f_back is self.loop:
                    self.reach("first_step")  # what the loop itself calls next
                self.enter(frame)
        elif event == "return" and self.ours(code):
            if frame is self.loop:
                self.reach("first_step")
            if code.co_qualname == "Checkpointer.save":
                self.saved = True
            elif code.co_qualname == "Checkpointer.wait" and self.saved:
                self.reach("first_save")

    def enter(self, frame: FrameType) -> None:
        """Notes a call, and its nearest caller in the package if that is in another file."""
        code, above = frame.f_code, frame.f_back
        self.entered.setdefault(code)
        while above is not None and (not self.ours(above.f_code) or inline(above.f_code)):
            above = above.f_back
        if above is not None and not inline(code) and above.f_code.co_filename != code.co_filename:
            self.crossed.add((above.f_code, code))

    def reach(self, stage: str) -> None:
        """Takes the counts, the first time that the stage is reached."""
        if stage in self.stages:
            return
        functions = [code for code in list(self.entered) if not inline(code)]
        files: dict[str, int] = {}
        for code in functions:
            name = code.co_filename.removeprefix(self.package)
            files[name] = files.get(name, 0) + 1
        self.stages[stage] = {
            "functions": len(functions),
            "comprehensions": len(self.entered) - len(functions),
            "files": len(files),
            "file_changes": len(self.crossed),
            "modules": sum(name.partition(".")[0] == "minitext" for name in list(sys.modules)),
            "functions_by_file": files,
        }


def inline(code: CodeType) -> bool:
    """Whether this is a comprehension or a generator expression."""
    return code.co_name.startswith("<") and code.co_name != "<lambda>"


def trace(words: list[str]) -> dict[str, Any]:
    """Runs `minitext WORDS` in this process and returns the counts of each stage."""
    import importlib.util

    # Found and not imported: importing is a part of the run.
    package = Path(importlib.util.find_spec("minitext").origin).parent
    tracing = Trace(package)
    sys.argv = ["minitext", *words]
    threading.setprofile(tracing)
    sys.setprofile(tracing)
    try:
        from minitext.__main__ import main

        main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    for stage, meaning in STAGES.items():
        if stage not in tracing.stages:
            sys.exit(
                f"the run ended and no {meaning} was seen: a name that path.py looks at has changed"
            )
    return {"commit": commit_of(package), "stages": tracing.stages}


def commit_of(package: Path) -> str | None:
    """The commit of the checkout that the package is in, with "-dirty" if files were changed."""
    command = ["git", "-C", str(package), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def report(stages: dict[str, dict[str, Any]]) -> str:
    """The counts, then the files in the order in which the run first enters them."""
    lines = [
        f"{STAGES[stage]}: {counts['functions']} functions (and {counts['comprehensions']} comprehensions) in "
        f"{counts['files']} files, {counts['file_changes']} changes of file, {counts['modules']} modules imported"
        for stage, counts in stages.items()
    ]
    by_stage = [stages[stage]["functions_by_file"] for stage in STAGES]
    lines += ["", "functions by each of these, file in the order of first entry"]
    lines += [
        "".join(f"{files.get(name, 0):6}" for files in by_stage) + f"  {name}"
        for name in by_stage[-1]
    ]
    return "\n".join(lines)


def main():
    cli = parser(__doc__)
    cli.add_argument("--label", default="", help="a word for the record's name, such as before")
    args = cli.parse_args()
    if args.case:
        print("\n" + json.dumps(trace(args.case["words"])))
        return
    words = ["train", "laptop", "train.steps=2", "train.save_every=1"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"JAX_PLATFORMS": "cpu", "MINITEXT_CACHE": f"{folder}/cache"}
        for name in ("first", "counted"):
            case = {"words": [*words, f"run.dir={folder}/{name}"]}
            found = in_subprocess(__file__, case, **environment)
    print(report(found["stages"]))
    run = " ".join(["minitext", *words])
    write_record(args.output, "path", args.label, {"label": args.label, "run": run, **found})


if __name__ == "__main__":
    main()
