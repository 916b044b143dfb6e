"""Training speed on one GPU: model FLOPs utilisation of minitext's train step.

    pip install -e '.[aot-gpu]'
    python benchmarks/train_gpu.py --quick      (one small shape)
    python benchmarks/train_gpu.py
    python benchmarks/train_gpu.py --shapes 1B --seq-lens 4096
    python benchmarks/train_gpu.py train.global_batch=12 --shapes 1B --seq-lens 4096    (three times the rows)

It can't run on a machine without a GPU, such as the one where minitext is developed: it then prints one line and exits
with 2. Shapes of about 0.3B, 1B and 3B parameters train on rows of 2,048, 4,096 and 8,192 tokens, 16,384 tokens a
step, with bfloat16 compute, float32 parameters, AdamW, unrolled layers and logits and loss in one kernel, by each
implementation of attention; settings of a configuration change that. A case keeps as much as fits: it is tried with
nothing recomputed, then with all but matmuls, then with everything, and last with one row at a time. One process has
the GPU's memory, so cases run one after another, each in its own. MFU is model FLOPs (a causal token sees half the
keys, nothing recomputed counts) over the data sheet's dense bfloat16 peak in `minitext.hardware`; the matmul peak
measured in the same process is given with it. As in a run, the steps of a round follow one another without waiting for
their metrics.
"""

import json
import statistics
import time

from common import in_subprocess, matmul_peak, no_gpu, parser, require_gpu, write_record

TOKENS = 16_384  # in a step, unless a setting says otherwise
WARM_UP = 3
STEPS = 5  # of a round
SHAPES = {
    "0.3B": {"layers": 20, "embed": 1024, "heads": 8, "mlp": 2816},
    "1B": {"layers": 18, "embed": 2048, "heads": 16, "mlp": 5632},
    "3B": {"layers": 28, "embed": 3072, "heads": 24, "kv_heads": 8, "mlp": 8192},
}
SEQ_LENS = (2048, 4096, 8192)
ATTENTION = ("cudnn", "pallas_gpu", "xla")
# From what is fastest to what needs least memory.
MEMORY = (
    {"model.remat": "none"},
    {"model.remat": "dots"},
    {"model.remat": "full"},
    {"model.remat": "full", "train.microbatches": "rows"},
)


def config(case):
    """Returns the configuration of a case."""
    from minitext.config.config import load_config

    rows = TOKENS // case["seq_len"]
    memory = {key: rows if value == "rows" else value for key, value in case["memory"].items()}
    return load_config("laptop", [
        *(f"model.{key}={value}" for key, value in SHAPES[case["shape"]].items()),
        "model.vocab=32000", "model.dtype=bfloat16", "model.scan_layers=false",
        f"model.attention.impl={case['attention']}", f"data.seq_len={case['seq_len']}", f"train.global_batch={rows}",
        "train.loss_impl=auto", *(f"{key}={value}" for key, value in memory.items()), *case["settings"],
    ])  # fmt: skip


def train(cfg, rounds):
    """Times train steps on random tokens; returns each round's seconds a step, and the first step's seconds."""
    import jax
    import numpy as np

    from minitext.sharding.mesh import make_mesh
    from minitext.training.step import abstract_batch, init_state, make_train_step

    mesh = make_mesh(devices=jax.devices()[:1])
    B, T = cfg.train.global_batch, cfg.data.seq_len
    tokens = np.random.default_rng(0).integers(0, cfg.model.vocab, (B, T + 1))
    arrays = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": np.arange(T)[None].repeat(B, 0),
        "segment_ids": np.ones((B, T)), "loss_mask": np.ones((B, T)),
    }  # fmt: skip
    batch = {
        name: jax.device_put(arrays[name].astype(x.dtype), x.sharding)
        for name, x in abstract_batch(cfg, mesh).items()
    }
    train_step, state = make_train_step(cfg, mesh), init_state(cfg, mesh)

    def timed(steps):
        nonlocal state
        begin = time.perf_counter()
        for _ in range(steps):
            state, metrics = train_step(state, batch)
        float(metrics["loss"])
        return (time.perf_counter() - begin) / steps

    with jax.set_mesh(mesh):
        first, _ = timed(1), timed(WARM_UP)
        return [timed(STEPS) for _ in range(rounds)], first


def measure(case):
    """In a fresh process: one case on the GPU, or the reason why there are no figures."""
    import jax

    if jax.default_backend() != "gpu":
        return {"no_gpu": True}
    from minitext import hardware
    from minitext.models.flops import count_flops, count_params

    cfg, device = config(case), jax.devices()[0]
    try:
        seconds, first = train(cfg, case["rounds"])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"out_of_memory": True}
    step, chip = statistics.median(seconds), hardware.find_chip(device)
    tokens = cfg.train.global_batch * cfg.data.seq_len
    rate = count_flops(cfg.model, tokens, cfg.data.seq_len) / step
    measured = matmul_peak("bfloat16")
    return {
        "device": device.device_kind, "parameters": count_params(cfg.model), "ms_per_step": step * 1e3,
        "tokens_per_step": tokens, "tokens_per_second": tokens / step, "model_flops_per_second": rate,
        "mfu": rate / (chip.peak("bf16") / chip.devices) if chip else None,
        "measured_peak_flops": measured, "share_of_measured_peak": rate / measured,
        "memory_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "first_step_s": first, "seconds": seconds,
    }  # fmt: skip


def first_that_fits(case, remat):
    """Runs a case with ever less memory until it fits; returns its figures, or None."""
    for memory in MEMORY[[memory["model.remat"] for memory in MEMORY].index(remat) :]:
        figures = in_subprocess(
            __file__, case | {"memory": memory}, XLA_PYTHON_CLIENT_MEM_FRACTION="0.95"
        )
        if figures.get("no_gpu"):
            no_gpu(__file__)
        if not figures.get("out_of_memory"):
            return {**case, "memory": memory, **figures}
    return None


def main():
    cli = parser(__doc__)
    cli.add_argument("--quick", action="store_true", help="only 0.3B at 2,048 tokens")
    cli.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    cli.add_argument("--seq-lens", nargs="+", type=int, choices=SEQ_LENS, default=SEQ_LENS)
    cli.add_argument("--attention", nargs="+", choices=ATTENTION, default=ATTENTION)
    cli.add_argument(
        "--remat", choices=("none", "dots", "full"), default="none", help="where to begin"
    )
    cli.add_argument("--rounds", type=int, default=5, help=f"rounds of {STEPS} steps (default 5)")
    cli.add_argument("settings", nargs="*", help="more settings, before the options")
    args = cli.parse_args()
    require_gpu(__file__)
    if args.case:
        print(json.dumps(measure(args.case)))
        return
    results = []
    for shape in args.shapes[: 1 if args.quick else None]:
        for seq_len in args.seq_lens[: 1 if args.quick else None]:
            for kind in args.attention:
                case = {
                    "shape": shape,
                    "seq_len": seq_len,
                    "attention": kind,
                    "rounds": args.rounds,
                    "settings": args.settings,
                }
                found = first_that_fits(case, args.remat)
                results.append(found or {**case, "out_of_memory": True})
                name = f"{shape:<5} {seq_len:>5} tokens, {kind:<6}"
                if found is None:
                    print(f"{name} does not fit", flush=True)
                    continue
                mfu = "unknown" if found["mfu"] is None else f"{found['mfu']:.1%}"
                kept = ", ".join(f"{key.split('.')[1]}={v}" for key, v in found["memory"].items())
                print(
                    f"{name} {found['ms_per_step']:8.1f} ms/step {found['tokens_per_second']:9,.0f} tokens/s, MFU {mfu}, "
                    f"{found['share_of_measured_peak']:.1%} of the measured peak ({kept})",
                    flush=True,
                )
    write_record(args.output, "train_gpu", "quick" if args.quick else "", {"results": results})


if __name__ == "__main__":
    main()
