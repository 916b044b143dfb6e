"""What training computed before the package was divided into rooms, and whether it still does.

    python tests/record.py write    # on the commit to compare with
    python tests/record.py          # prints every difference; exit code 1 where there is one

Fifty losses of two presets as `minitext train` writes them, and for every layout of the equality matrix the losses of
three steps, the operations of the compiled program, its collectives with their types, and its memory.
"""

import collections
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from minitext.distributed import devices

devices.start(8)

import jax

import minitext as mt
from minitext.book.equality import packed_batch
from minitext.book.layouts import EXPERT_LAYOUTS, LAYOUTS
from minitext.training.step import abstract_batch, abstract_state

FILE = Path(__file__).with_name("record.json")
SIZES = [
    "model.layers=4", "model.embed=32", "model.heads=8", "model.kv_heads=4", "model.mlp=64", "model.vocab=256",
    "model.scan_layers=true", "data.seq_len=32", "train.global_batch=16", "mesh.data=1", "train.sample_tokens=0",
    "data.source=grammar",
]  # fmt: skip
EXPERTS = ["model.ffn.kind=moe", "model.ffn.experts=8", "model.ffn.experts_per_token=2"]
COLLECTIVE = re.compile(
    r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(?:-start)?\("
)


def train(preset: str) -> list[float]:
    """Fifty losses of a preset, by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            preset,
            f"run.dir={folder}",
            "run.name=x",
            "train.steps=50",
            "train.sample_tokens=0",
        ]
        subprocess.run([sys.executable, "-m", "minitext", "train", *words], check=True)
        lines = (Path(folder) / "x" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def layout(words: list[str]) -> dict:
    """Losses of three steps, and what the compiled program is made of."""
    cfg = mt.load_config("laptop", [*SIZES, *words])
    mesh = mt.make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        step = mt.make_train_step(cfg, mesh)
        program = step.lower(abstract_state(cfg, mesh), abstract_batch(cfg, mesh)).compile()
        text, memory, state, losses = (
            program.as_text(),
            program.memory_analysis(),
            mt.init_state(cfg, mesh),
            [],
        )
        for seed in range(3):
            state, metrics = program(state, packed_batch(cfg, mesh, seed))
            losses.append(float(metrics["loss"]))
    operations = collections.Counter(
        re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = .*? ([a-z][a-z\-]*)\(", text, re.M)
    )
    collectives = collections.Counter(f"{kind} {made}" for made, kind in COLLECTIVE.findall(text))
    return {
        "losses": losses,
        "operations": dict(sorted(operations.items())),
        "collectives": dict(sorted(collectives.items())),
        "bytes": [
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.temp_size_in_bytes,
        ],
    }


def measure() -> dict:
    """The whole record."""
    found = {"processor": processor(), "jax": jax.__version__}
    for preset in ("laptop", "moe-laptop"):
        found[f"train {preset}"] = {"losses": train(preset)}
    for name, words in LAYOUTS.items():
        found[f"layout {name}"] = layout(words.split())
    for name, words in EXPERT_LAYOUTS.items():
        found[f"expert layout {name}"] = layout([*EXPERTS, *words.split()])
    return found


def processor() -> str:
    """The processor's name: on another one sums round differently."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    flags = re.findall(r"flags\s*: (.*)", Path("/proc/cpuinfo").read_text())
    wide = [flag for flag in ("avx2", "avx512f", "amx_tile") if flags and flag in flags[0].split()]
    return " ".join([*names[:1], platform.machine(), *wide])


def differences(now: dict, then: dict) -> list[str]:
    """One line for each difference: in every bit on the record's processor, else losses to 1e-4."""
    same, lines = (now["processor"], now["jax"]) == (then["processor"], then["jax"]), []
    for name in then.keys() | now.keys():
        if name in ("processor", "jax"):
            continue
        a, b = now.get(name, {}), then.get(name, {})
        for part in sorted(a.keys() | b.keys()):
            x, y = a.get(part), b.get(part)
            if part == "losses" and not same and x and y:
                apart = max(abs(u - v) / abs(v) for u, v in zip(x, y, strict=True))
                lines += [f"{name}: losses differ by {apart:.1e}"] * (apart > 1e-4)
            elif x != y and (same or part == "bytes"):
                lines.append(f"{name}: {part}: {x} was {y}")
    return lines


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        FILE.write_text(json.dumps(measure(), indent=1) + "\n")
    else:
        found = differences(measure(), json.loads(FILE.read_text()))
        print("\n".join(found) or "as it was")
        sys.exit(bool(found))
