"""Training speed on this machine's CPU: minitext against Hugging Face Llama in PyTorch, the same shape, one run.

    pip install torch==2.13.0 && pip install -e '.[bench]'    (on Linux, PyTorch's CPU build is enough)
    python benchmarks/train_cpu.py

A step is forward, backward, clipping and AdamW on a batch of 2,048 tokens that stays the same; parameters and moments
are float32, norms don't decay, and the rate is constant. With `--dtype best` every side computes in float32 and in
bfloat16 and its better one counts. Shares are model FLOPs (a causal token sees half the keys) over the machine's f32
matmul peak, which is measured in every round.
"""

import itertools
import statistics
import time

from common import Side, busy, matmul_peak, parser, ratio, serve, spread, turns, write_record

TOKENS = 2048  # in a step
WARM_UP = 12  # steps at least; in the first ones the C library still asks the system for memory
HOPELESS = 4  # times slower than the other type in the warm-up: not measured further
# What `minitext train` does to the C library, as environment variables of glibc.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",
}
SHAPES = {
    "0.9M": {"layers": 4, "embed": 128, "heads": 4, "mlp": 384, "vocab": 320},
    "10.7M": {"layers": 6, "embed": 384, "heads": 6, "mlp": 1024, "vocab": 256},
    "50M": {"layers": 8, "embed": 704, "heads": 11, "mlp": 1984, "vocab": 320},
}
SEQ_LENS = (64, 256, 1024)
SYSTEMS = ("minitext", "torch eager", "torch compile")


def config(case):
    """Returns minitext's configuration of a case: the preset laptop, reshaped, with PyTorch's optimizer."""
    from minitext.config.config import load_config

    return load_config("laptop", [
        *(f"model.{key}={case[key]}" for key in ("layers", "embed", "heads", "mlp", "vocab", "dtype")),
        f"train.global_batch={case['batch']}", f"data.seq_len={case['seq_len']}",
        "optim.learning_rate=3e-4", "optim.schedule=constant", "optim.warmup_steps=0",
    ])  # fmt: skip


def minitext_step(case):
    """Returns a function that takes one step of minitext's own jitted train step and waits for it."""
    from minitext.distributed import devices

    devices.start(keep_memory=True)  # as `minitext train` does; before JAX is imported
    import jax
    import numpy as np

    from minitext.sharding.mesh import make_mesh
    from minitext.training.step import abstract_batch, init_state, make_train_step

    cfg = config(case)
    mesh = make_mesh(devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    B, T = case["batch"], case["seq_len"]
    arrays = {
        "tokens": rng.integers(0, case["vocab"], (B, T)),
        "targets": rng.integers(0, case["vocab"], (B, T)),
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


def torch_step(case, compiled):
    """Returns a function that takes one step of Hugging Face's Llama with PyTorch's fused AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case["vocab"], hidden_size=case["embed"], intermediate_size=case["mlp"],
        num_hidden_layers=case["layers"], num_attention_heads=case["heads"], num_key_value_heads=case["heads"],
        max_position_embeddings=case["seq_len"], tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    tokens = torch.randint(0, case["vocab"], (case["batch"], case["seq_len"]))
    forward = torch.compile(model) if compiled else model
    half = case["dtype"] == "bfloat16"

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def start(name, case):
    """Builds one side, such as "torch eager float32", and warms it up; it then trains as many steps as it is asked for."""
    system, case["dtype"] = name.rsplit(" ", 1)
    step = (
        minitext_step(case) if system == "minitext" else torch_step(case, system == "torch compile")
    )

    def train(steps):
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        return seconds

    warm = train(WARM_UP)
    while sum(warm[1:]) < 3:  # seconds; the first one compiles
        warm += train(1)
    return train, min(warm)


def start_sides(systems, dtypes, case, environment):
    """Starts every system in every type; a type that is hopeless on its system is only noted, with its warm-up time."""
    sides, left_out = {}, {}
    for system in systems:
        found = {}
        for name in (f"{system} {dtype}" for dtype in dtypes):
            print(f"starting {name}", flush=True)
            ours = system == "minitext"
            found[name] = Side(__file__, name, case, **({} if ours else environment))
        least = min(side.ready for side in found.values())
        for name, side in found.items():
            if side.ready > HOPELESS * least:
                side.close()
                left_out[name] = side.ready * 1e3
                print(f"{name} left out: {left_out[name]:.1f} ms/step in its warm-up")
            else:
                sides[name] = side
    return sides, left_out


def measure(shape, seq_len, systems, dtypes, rounds, steps, environment):
    """Alternates the sides of one case; returns its record."""
    from minitext.distributed import devices
    from minitext.models.flops import count_flops, count_params

    devices.start()
    case = {**SHAPES[shape], "batch": TOKENS // seq_len, "seq_len": seq_len}
    model = config(case | {"dtype": "float32"}).model
    sides, left_out = start_sides(systems, dtypes, case, environment)
    seconds, peaks, others = {name: [] for name in sides}, [], []
    for i in range(rounds):
        others.append(busy())
        peaks.append(matmul_peak())
        for side in turns(sides, i):
            seconds[side.name].append(side.ask(steps))
            ms = statistics.median(seconds[side.name][-1]) * 1e3
            print(f"round {i + 1}/{rounds}  {side.name:<22} {ms:8.1f} ms/step", flush=True)
    for side in sides.values():
        side.close()
    flops = count_flops(model, TOKENS, seq_len)
    print(f"others took {statistics.median(others):.0%} of the cores (at most {max(others):.0%})")
    return {
        "shape": shape, **case, "parameters": count_params(model), "flops_per_step": flops,
        "torch_environment": environment, **summary(seconds, peaks, flops), "left_out_ms_per_step": left_out,
        "peak_flops": peaks, "busy": others, "seconds": seconds,
    }  # fmt: skip


def summary(seconds, peaks, flops):
    """Medians of all steps, and shares and ratios by round; the better type of a system stands for it in the ratios."""
    medians = {name: statistics.median(itertools.chain(*parts)) for name, parts in seconds.items()}
    rounds = {name: [statistics.median(part) for part in parts] for name, parts in seconds.items()}
    shares = {
        name: spread([flops / s / peak for s, peak in zip(values, peaks, strict=True)])
        for name, values in rounds.items()
    }
    best = {}
    for name in sorted(medians, key=medians.get):
        best.setdefault(name.rsplit(" ", 1)[0], name)
    ours = best.pop("minitext")
    ratios = {name: ratio(rounds[name], rounds[ours]) for name in best.values()}
    print(f"f32 matmul peak {statistics.median(peaks) / 1e9:.0f} GFLOP/s")
    for name, s in medians.items():
        against = f"   {ours} is {ratios[name]:.2f}x as fast" if name in ratios else ""
        print(
            f"{name:<22} {s * 1e3:8.1f} ms/step {TOKENS / s:9.0f} tokens/s, "
            f"{shares[name]['median']:4.0%} of peak (least {shares[name]['min']:.0%}){against}"
        )
    return {
        "ms_per_step": {name: s * 1e3 for name, s in medians.items()},
        "tokens_per_second": {name: TOKENS / s for name, s in medians.items()},
        "peak_share": shares,
        "best": [ours, *best.values()],
        "speed_ratio": ratios,
    }


def main():
    cli = parser(__doc__)
    cli.add_argument("--shape", choices=SHAPES, default="10.7M")
    cli.add_argument("--seq-len", type=int, choices=SEQ_LENS, default=256)
    cli.add_argument("--dtype", choices=("f32", "best"), default="f32")
    cli.add_argument("--all", action="store_true", help="every shape and length, --dtype best")
    cli.add_argument("--rounds", type=int, help="turns of each side (default 8; with --all 4)")
    cli.add_argument("--steps", type=int, help="steps in a turn (default 4; with --all 3)")
    cli.add_argument(
        "--without-compile",
        action="store_true",
        help="leave torch.compile out (needs a C++ compiler)",
    )
    cli.add_argument(
        "--torch-keeps-memory",
        action="store_true",
        help="let PyTorch's processes keep the memory they free, as minitext's do",
    )
    args = cli.parse_args()
    if args.serve:
        serve(lambda: start(args.serve, args.case))
        return
    systems = [s for s in SYSTEMS if not (args.without_compile and s == "torch compile")]
    rounds, steps = args.rounds or (4 if args.all else 8), args.steps or (3 if args.all else 4)
    cases = itertools.product(SHAPES, SEQ_LENS) if args.all else [(args.shape, args.seq_len)]
    kind = "best" if args.all else args.dtype
    dtypes = ("float32", "bfloat16") if kind == "best" else ("float32",)
    environment = KEEP_MEMORY if args.torch_keeps_memory else {}
    for shape, seq_len in cases:
        print(f"{shape}, {TOKENS // seq_len} x {seq_len} tokens a step")
        figures = measure(shape, seq_len, systems, dtypes, rounds, steps, environment)
        write_record(args.output, "train_cpu", f"{shape}-seq{seq_len}-{kind}", figures)


if __name__ == "__main__":
    main()
