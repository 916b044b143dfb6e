"""Training speed on this machine's CPU: minitext against Hugging Face Llama in PyTorch, the same shape, one run.

    pip install torch==2.13.0 && pip install -e '.[bench]'    (on Linux, PyTorch's CPU build is enough)
    python benchmarks/train_cpu.py

Every side is a process of its own that builds the model, takes warm-up steps, and then trains a few steps whenever it
is told to. The sides take turns, so that whatever else the machine does falls on all of them. A step is forward,
backward, clipping and AdamW in float32 on a batch that stays the same.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

SHAPES = {
    "10.7M": {
        "layers": 6,
        "embed": 384,
        "heads": 6,
        "mlp": 1024,
        "vocab": 256,
        "batch": 8,
        "seq_len": 256,
    },
}
WARM_UP = 3


def minitext_step(shape):
    """Returns a function that takes one step of minitext's own jitted train step and waits for it."""
    import jax
    import numpy as np

    from minitext import devices
    from minitext.config import load_config
    from minitext.mesh import make_mesh
    from minitext.train import abstract_batch, init_state, make_train_step

    devices.start()
    cfg = load_config("laptop", [
        *(f"model.{key}={shape[key]}" for key in ("layers", "embed", "heads", "mlp", "vocab")),
        f"train.global_batch={shape['batch']}", f"data.seq_len={shape['seq_len']}",
    ])  # fmt: skip
    mesh = make_mesh(devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    B, T = shape["batch"], shape["seq_len"]
    arrays = {
        "tokens": rng.integers(0, shape["vocab"], (B, T)),
        "targets": rng.integers(0, shape["vocab"], (B, T)),
        "positions": np.arange(T)[None].repeat(B, 0),
        "segment_ids": np.ones((B, T)),
        "loss_mask": np.ones((B, T)),
    }
    wanted = abstract_batch(cfg, mesh)
    batch = {
        k: jax.device_put(v.astype(wanted[k].dtype), wanted[k].sharding) for k, v in arrays.items()
    }
    train_step, state = make_train_step(cfg, mesh), init_state(cfg, mesh)

    def step():
        nonlocal state
        with jax.set_mesh(mesh):
            state, metrics = train_step(state, batch)
            return float(metrics["loss"])

    return step


def torch_step(shape, compiled):
    """Returns a function that takes one step of Hugging Face's Llama with PyTorch's AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["embed"], intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["heads"],
        max_position_embeddings=shape["seq_len"], tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.randint(0, shape["vocab"], (shape["batch"], shape["seq_len"]))
    forward = torch.compile(model) if compiled else model

    def step():
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


SIDES = {
    "minitext": minitext_step,
    "torch eager": lambda shape: torch_step(shape, compiled=False),
    "torch compile": lambda shape: torch_step(shape, compiled=True),
}


def serve(side, shape):
    """The life of one side: build, warm up, then train as many steps as each line on stdin says."""
    answers, sys.stdout = sys.stdout, sys.stderr
    step = SIDES[side](shape)
    for _ in range(WARM_UP):
        step()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), file=answers, flush=True)


class Side:
    """A running side, as seen from the process that measures."""

    def __init__(self, name, shape):
        command = [sys.executable, __file__, "--serve", name, "--shape", shape]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.process.stdout.readline().strip() != "ready":
            sys.exit(f"{name} did not start: see its messages above")
        self.seconds = []

    def run(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self.seconds.append(json.loads(self.process.stdout.readline()))


def measure(shape_name, names, rounds, steps):
    """Alternates the sides; returns seconds of every step by side and round."""
    sides = {name: Side(name, shape_name) for name in names}
    for i in range(rounds):
        order = list(sides) if i % 2 == 0 else list(sides)[::-1]
        for name in order:
            sides[name].run(steps)
            print(
                f"round {i + 1}/{rounds}  {name:<14} {statistics.median(sides[name].seconds[-1]) * 1e3:7.0f} ms/step"
            )
    for side in sides.values():
        side.process.stdin.close()
        side.process.wait()
    return {name: side.seconds for name, side in sides.items()}


def machine():
    """Returns what the figures were taken on."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    packages = ("minitext", "jax", "jaxlib", "flax", "optax", "torch", "transformers")
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="10.7M")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side (default 8)")
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn (default 4)")
    parser.add_argument(
        "--without-compile",
        action="store_true",
        help="leave torch.compile out (needs a C++ compiler)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON"
    )
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, SHAPES[args.shape])
        return
    names = [name for name in SIDES if not (args.without_compile and name == "torch compile")]
    seconds = measure(args.shape, names, args.rounds, args.steps)
    medians = {
        name: statistics.median(s for part in parts for s in part)
        for name, parts in seconds.items()
    }
    tokens = SHAPES[args.shape]["batch"] * SHAPES[args.shape]["seq_len"]
    # A ratio per round, then its median: a slow spell of the machine falls on one round of every side.
    rounds = {name: [statistics.median(part) for part in parts] for name, parts in seconds.items()}
    ratios = {
        name: statistics.median(theirs / ours for theirs, ours in zip(rounds[name], rounds["minitext"], strict=True))
        for name in names if name != "minitext"
    }  # fmt: skip
    for name in names:
        against = f"   minitext is {ratios[name]:.2f}x as fast" if name in ratios else ""
        print(
            f"{name:<14} {medians[name] * 1e3:7.0f} ms/step {tokens / medians[name]:8.0f} tokens/s{against}"
        )
    date = datetime.date.today().isoformat()
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"train_cpu-{args.shape}-{date}.json"
    record = {
        "benchmark": "train_cpu", "date": date, "command": "python benchmarks/train_cpu.py " + " ".join(sys.argv[1:]),
        "machine": machine(), "shape": args.shape, **SHAPES[args.shape], "ms_per_step": {n: m * 1e3 for n, m in medians.items()},
        "speed_ratio": ratios, "seconds": seconds,
    }  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
