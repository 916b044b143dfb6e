"""`minitext maxtext explain` on all of MaxText's configurations, and on published recipes.

    python benchmarks/maxtext_explain.py FOLDER...

Each FOLDER is searched for `.yml` files of settings, scripts (`.sh`) that train, and pages (`.md`) with a MaxTextModel. The record says of each whether
it was read, whether minitext can build the model and if not what is missing, how many keys were mapped or named, and
what was predicted where the file names its chips. Nothing is compiled and no chip is needed. MaxText's own files come
with `git clone https://github.com/AI-Hypercomputer/maxtext`, recipes with the repository tpu-recipes beside it.
"""

import collections
import sys
import time
from pathlib import Path

from common import parser, write_record

# Files of MaxText's that are no settings of a run: of other tools, and lists of expressions.
OTHER = ("lora_module_path.yml", "k8s_manifest.yaml")


def sources(folder: Path):
    """Yields the files of a folder that could be read, with their names below it."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        settings = path.suffix == ".yml" and "configs" in path.parts and path.name not in OTHER
        text = path.read_text(errors="replace") if path.suffix in (".sh", ".md") else ""
        if settings or (path.suffix == ".sh" and ".yml" in text) or "MaxTextModel(" in text:
            yield name, path


def explain_one(name: str, path: Path) -> dict:
    """Explains one file."""
    from minitext.errors import UserError
    from minitext.perf import maxtext

    begin = time.process_time()
    try:
        found = maxtext.explain(str(path))
    except UserError as error:
        # The message begins with where the file is on this machine.
        return {
            "file": name,
            "error": str(error).replace(str(path), path.name).replace(str(path.parent), ""),
        }
    t = found.translation
    counts = dict(collections.Counter(key.status for key in t.keys))
    row = {
        "file": name,
        "keys": len(t.keys),
        **counts,
        "refused": t.refused,
        "target": t.machine.target,
    }
    row["unknown_keys"] = [key.name for key in t.keys if key.status == "unknown"]
    row["unnamed"] = [key.name for key in t.keys if not key.ours]
    if found.answers is not None:
        a = found.answers
        row |= {
            "parameters": a.parameters, "fits": a.fits, "memory_gib": round(a.memory / 2**30, 2),
            "step_s": [round(a.lower, 3), round(a.upper, 3)], "ici_gib": round(sum(a.ici.values()) / 2**30, 2),
            "dcn_gib": round(a.dcn / 2**30, 2),
        }  # fmt: skip
    row["notes"] = [note for note in t.notes if note.startswith("no prediction")]
    row["cpu_s"] = round(time.process_time() - begin, 2)
    return row


def main():
    """Explains all files of the folders, and writes the record."""
    arguments = parser(__doc__)
    arguments.add_argument("folders", nargs="+", type=Path)
    options = arguments.parse_args()
    from minitext.distributed import devices

    devices.start()
    rows = []
    for folder in options.folders:
        for name, path in sources(folder):
            rows.append(explain_one(name, path))
            row = rows[-1]
            print(
                name,
                row.get("error") or row.get("refused") or "mapped",
                row.get("step_s", ""),
                file=sys.stderr,
            )
    total = {
        "files": len(rows),
        "errors": sum("error" in row for row in rows),
        "refused": sum(bool(row.get("refused")) for row in rows),
        "predicted": sum("step_s" in row for row in rows),
        "keys": sum(row.get("keys", 0) for row in rows),
        "unnamed": sum(len(row.get("unnamed", ())) for row in rows),
        "unknown": sorted({key for row in rows for key in row.get("unknown_keys", ())}),
    }
    # The folders' names alone: the record says nothing of this machine's paths.
    sys.argv[1:] = [folder.name for folder in options.folders]
    write_record(options.output, "maxtext_explain", "", {"total": total, "rows": rows})


if __name__ == "__main__":
    main()
