"""What a checkpoint costs: minitext's asynchronous save inside a loop of train steps, its size, and restoring it.

    python benchmarks/checkpoint.py

The state is that of the 10.7M shape (10.9M with the vocabulary of bytes): float32 parameters and Adam's two moments.
Steps wait for their loss, so what is timed is their own. In each round some steps run undisturbed, then
`Checkpointer.save` is called and steps go on until the checkpoint is committed: the call's time is what the loop stands
still, and the time those steps take beyond the undisturbed ones is what the writing takes from them. Then minitext's
own trainer runs with a save every few steps, and what a save costs it altogether is read from metrics.jsonl. Last, the
newest checkpoint is verified and restored, its files still in memory.
"""

import statistics
import tempfile
import time
from pathlib import Path

from common import busy, parser, spread, write_record

SHAPE = {"layers": 6, "embed": 384, "heads": 6, "mlp": 1024, "vocab": 320, "scan_layers": False}
BATCH, SEQ_LEN = 8, 256


def settings(shape):
    """Returns the settings that give the preset laptop the shape and the shortest possible run around the steps."""
    return [
        *(f"model.{key}={value}" for key, value in shape.items()),
        f"train.global_batch={BATCH}", f"data.seq_len={SEQ_LEN}", "data.source=grammar",
        "train.sample_tokens=0", "train.eval_every=1000000", "train.eval_batches=1",
    ]  # fmt: skip


def in_loop(cfg, folder, rounds, steps):
    """Saves in a loop of steps, round after round; then restores."""
    import jax

    from minitext.checkpoint.checkpointer import Checkpointer
    from minitext.data.batches import make_batches
    from minitext.sharding.mesh import make_mesh
    from minitext.training.step import abstract_state, init_state, make_train_step

    mesh = make_mesh(devices=jax.devices()[:1])
    batches = make_batches(cfg.data, mesh, vocab=cfg.model.vocab, global_batch=BATCH)
    train_step, state, count = make_train_step(cfg, mesh), init_state(cfg, mesh), 0

    def step():
        nonlocal state, count
        begin = time.perf_counter()
        state, metrics = train_step(state, next(batches))
        float(metrics["loss"])
        count += 1
        return time.perf_counter() - begin

    taken = []
    with jax.set_mesh(mesh), Checkpointer(folder) as checkpointer:
        step(), step()
        for i in range(rounds):
            undisturbed = [step() for _ in range(steps)]
            begin, saved = time.perf_counter(), count
            checkpointer.save(saved, state, batches.get_state(), cfg.model_dump(mode="json"))
            blocked = time.perf_counter() - begin
            beside = [step()]
            while saved not in checkpointer.steps():
                beside.append(step())
            checkpointer.wait()
            usual = statistics.median(undisturbed)
            taken.append({
                "step_s": usual, "blocked_s": blocked, "steps_until_committed": len(beside),
                "extra_s": sum(beside) - len(beside) * usual,
            })  # fmt: skip
            print(
                f"round {i + 1}/{rounds}  step {usual * 1e3:.0f} ms, save() {blocked * 1e3:.0f} ms, then "
                f"{len(beside)} steps, together {taken[-1]['extra_s'] * 1e3:+.0f} ms",
                flush=True,
            )
        size = sum(p.stat().st_size for p in Path(folder, str(saved)).rglob("*") if p.is_file())
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    batches.close()
    abstract, seconds = abstract_state(cfg, mesh), []
    for _ in range(rounds):
        with Checkpointer(folder) as checkpointer:
            begin = time.perf_counter()
            restored = checkpointer.restore(abstract)
            jax.block_until_ready(restored.state)
            seconds.append(time.perf_counter() - begin)
    return {"saves": taken, "array_bytes": arrays, "bytes_on_disk": size, "restore_s": seconds}


def in_trainer(cfg, folder, saves, every):
    """Trains with minitext's own loop; returns a step's median seconds and what each save but the first and last cost.

    Lines 2 to `every` after a save are undisturbed unless it is still being written, so their median is a step; what
    the lines from one save to the next take beyond that many steps is the cost of the save between them.
    """
    from minitext.observability.metrics import read_metrics
    from minitext.training import run

    cfg = cfg.replace({
        "run.dir": folder, "run.name": "trained", "train.steps": (saves + 2) * every, "train.save_every": every,
    })  # fmt: skip
    records = {r["step"]: r["seconds"] for r in read_metrics(run.train(cfg))}
    usual = statistics.median(s for step, s in records.items() if step > every)
    return usual, [
        sum(records[i * every + j] for j in range(1, every + 1)) - every * usual
        for i in range(1, saves + 1)
    ]


def main():
    cli = parser(__doc__)
    cli.add_argument("--rounds", type=int, default=5, help="saves of each kind (default 5)")
    cli.add_argument("--steps", type=int, default=6, help="undisturbed steps a round (default 6)")
    cli.add_argument("--layers", type=int, default=SHAPE["layers"])
    cli.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    args = cli.parse_args()
    from minitext.config.config import load_config
    from minitext.distributed import devices
    from minitext.models.flops import count_params

    devices.start(keep_memory=True)  # as `minitext train` does
    cfg = load_config("laptop", settings(SHAPE | {"layers": args.layers}))
    others = busy()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = in_loop(cfg, Path(folder, "checkpoints"), args.rounds, args.steps)
        usual, costs = in_trainer(cfg, folder, args.rounds, max(8, args.steps))
    taken = figures["saves"]
    step, blocked, extra = (
        statistics.median(t[key] for t in taken) for key in ("step_s", "blocked_s", "extra_s")
    )
    stored, arrays = figures["bytes_on_disk"], figures["array_bytes"]
    summary = {
        "step_ms": step * 1e3, "blocked_ms": blocked * 1e3, "blocked_share_of_step": blocked / step,
        "extra_ms_until_committed": extra * 1e3, "cost_share_of_step": (blocked + extra) / step,
        "trainer_step_ms": usual * 1e3, "trainer_cost_ms": {k: v * 1e3 for k, v in spread(costs).items()},
        "trainer_cost_share_of_step": statistics.median(costs) / usual,
        "bytes_on_disk_per_array_byte": stored / arrays, "restore_s": statistics.median(figures.pop("restore_s")),
    }  # fmt: skip
    print(
        f"{arrays / 1e6:.0f} MB of arrays, {stored / 1e6:.0f} MB on disk; save() blocks {blocked * 1e3:.0f} ms, "
        f"{blocked / step:.0%} of a step of {step * 1e3:.0f} ms; until it is committed the steps take "
        f"{extra * 1e3:+.0f} ms; in the trainer a save costs {statistics.median(costs) * 1e3:+.0f} ms on steps of "
        f"{usual * 1e3:.0f} ms; verified and restored in {summary['restore_s']:.2f} s"
    )
    write_record(args.output, "checkpoint", "10.7M" if args.layers == SHAPE["layers"] else f"{args.layers}-layers", {
        "shape": SHAPE | {"layers": args.layers}, "parameters": count_params(cfg.model), "busy_before": others,
        **summary, **figures, "trainer_costs_s": costs,
    })  # fmt: skip


if __name__ == "__main__":
    main()
