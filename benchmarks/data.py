"""The input pipeline of minitext: is it fast enough for the model, and how much memory does a large text take?

    python benchmarks/data.py

Speed: tokens/s of `make_batches` on the standard library's text, rows cut, packed and placed on the device, against
the tokens/s that the preset laptop trains on, in turns in one process; and the train step fed by the pipeline against
the same step on one batch over and over. Memory: a text file of a gigabyte and one of a tenth of it, each opened in
fresh processes, first with an empty cache, so that it is tokenised, and then with the tokens there. Growth is what the
process's peak (ru_maxrss) rises from after its imports until 200 batches were read; pages of the tokens' file that
were touched are part of it, though the system takes them back when it needs them, so what is kept without them is given too.
"""

import contextlib
import json
import resource
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import psutil
from common import busy, in_subprocess, parser, ratio, write_record

BATCHES = 200  # read in a turn, and from a large file
SIZES = (0.1, 1.0)  # of --gigabytes


def start():
    """Returns the preset laptop's configuration, a mesh of one device, and a function that opens the batches."""
    from minitext.distributed import devices

    devices.start(keep_memory=True)  # as `minitext train` does; before JAX is imported
    import jax

    from minitext.config.config import load_config
    from minitext.data.batches import make_batches
    from minitext.sharding.mesh import make_mesh

    cfg = load_config("laptop", [])
    mesh = make_mesh(devices=jax.devices()[:1])

    def open_batches(**changes):
        data = cfg.replace({f"data.{key}": value for key, value in changes.items()}).data
        return make_batches(data, mesh, vocab=cfg.model.vocab, global_batch=cfg.train.global_batch)

    return cfg, mesh, open_batches


def speed(rounds, steps):
    """Seconds a batch of the pipeline alone, of steps on one batch, and of steps that the pipeline feeds, by round."""
    cfg, mesh, open_batches = start()
    import jax

    from minitext.training.step import init_state, make_train_step

    batches = open_batches()
    train_step, state = make_train_step(cfg, mesh), init_state(cfg, mesh)
    same = next(batches)

    def train(count, next_batch):
        nonlocal state
        begin = time.perf_counter()
        for _ in range(count):
            state, metrics = train_step(state, next_batch())
        float(metrics["loss"])
        return (time.perf_counter() - begin) / count

    def read(count):
        begin = time.perf_counter()
        for _ in range(count):
            jax.block_until_ready(next(batches))
        return (time.perf_counter() - begin) / count

    turn = {
        "pipeline": lambda: read(BATCHES),
        "one batch": lambda: train(steps, lambda: same),
        "fed": lambda: train(steps, lambda: next(batches)),
    }
    seconds, others = {name: [] for name in turn}, []
    with jax.set_mesh(mesh):
        train(steps, lambda: same)
        for i in range(rounds):
            others.append(busy())
            for name in list(seconds)[:: 1 if i % 2 == 0 else -1]:
                seconds[name].append(turn[name]())
            print(
                f"round {i + 1}/{rounds}  "
                + ", ".join(f"{name} {taken[-1] * 1e3:.2f} ms" for name, taken in seconds.items()),
                file=sys.stderr,
            )
    rates = {
        name: batches.tokens_per_batch / statistics.median(taken) for name, taken in seconds.items()
    }
    batches.close()
    return {
        "tokens_per_second": rates, "pipeline_over_model": ratio(seconds["one batch"], seconds["pipeline"]),
        "fed_step_over_step": ratio(seconds["fed"], seconds["one batch"]), "busy": others, "seconds": seconds,
    }  # fmt: skip


def write_text(path, size):
    """Writes so many bytes of the standard library's text, its lines numbered so that no two are alike."""
    lines = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines += file.read_text(encoding="utf-8", errors="ignore").splitlines()
    done = number = 0
    with path.open("w", encoding="utf-8") as file:
        while done < size:
            chunk = "".join(f"{number + i} {line}\n" for i, line in enumerate(lines))
            number += len(lines)
            done += file.write(chunk[: size - done])


def peak_bytes():
    """Returns the most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


@contextlib.contextmanager
def watch_own_bytes():
    """Gives a list whose last item is the most memory that was no page of a file, looked at every few milliseconds."""
    most, done = [0], threading.Event()

    def look():
        while not done.wait(0.005):
            info = psutil.Process().memory_info()
            most.append(max(most[-1], info.rss - getattr(info, "shared", 0)))

    thread = threading.Thread(target=look)
    thread.start()
    yield most
    done.set()
    thread.join()


def open_text(path):
    """In a fresh process: opens a text file as a source and reads batches; returns seconds and bytes."""
    _, _, open_batches = start()
    next(open_batches(source="grammar"))  # brings in what any batch needs
    with watch_own_bytes() as before:
        time.sleep(0.05)
    peak, begin = peak_bytes(), time.perf_counter()
    with watch_own_bytes() as during:
        batches = open_batches(source="files", path=path)
        next(batches)
        seconds = time.perf_counter() - begin
        for _ in range(BATCHES):
            next(batches)
        batches.close()
    return {
        "first_batch_s": seconds, "peak_bytes": peak_bytes(), "growth_bytes": peak_bytes() - peak,
        "growth_without_file_pages_bytes": during[-1] - before[-1],
    }  # fmt: skip


def memory(folder, gigabytes):
    """Opens a small and a large file, with an empty and with a full cache."""
    results = []
    for size in (share * gigabytes for share in SIZES):
        path = Path(folder, f"{size:g}.txt")
        print(f"writing a text of {size:g} GB", flush=True)
        write_text(path, int(size * 1e9))
        cache = str(Path(folder, f"cache-{size:g}"))
        for state in ("empty cache", "full cache"):
            result = in_subprocess(__file__, {"open": str(path)}, MINITEXT_CACHE=cache)
            results.append({"gigabytes": size, "cache": state, **result})
            print(
                f"{size:g} GB, {state}: first batch after {result['first_batch_s']:.2f} s, peak memory "
                f"{result['peak_bytes'] / 1e6:.0f} MB, {result['growth_bytes'] / 1e6:.0f} of them for the data, "
                f"{result['growth_without_file_pages_bytes'] / 1e6:.0f} of these no pages of a file",
                flush=True,
            )
        path.unlink()
    return results


def main():
    cli = parser(__doc__)
    cli.add_argument(
        "--gigabytes", type=float, default=1, help="size of the large text (default 1)"
    )
    cli.add_argument("--rounds", type=int, default=5, help="turns of the speed part (default 5)")
    cli.add_argument("--steps", type=int, default=20, help="train steps in a turn (default 20)")
    cli.add_argument(
        "--folder",
        type=Path,
        help="where to write the texts, 3 bytes per byte (default: temporary)",
    )
    args = cli.parse_args()
    if args.case and "open" in args.case:
        print(json.dumps(open_text(args.case["open"])))
        return
    if args.case:
        print(json.dumps(speed(**args.case)))
        return
    # This process imports no JAX: a child's ru_maxrss starts at its parent's size.
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        opened = memory(folder, args.gigabytes)
    figures = in_subprocess(__file__, {"rounds": args.rounds, "steps": args.steps})
    rates = figures["tokens_per_second"]
    print(
        f"pipeline {rates['pipeline']:,.0f} tokens/s, {figures['pipeline_over_model']:.0f} times the model's "
        f"{rates['one batch']:,.0f}; a step fed by it takes {figures['fed_step_over_step']:.3f} of a step's time"
    )
    write_record(args.output, "data", f"{args.gigabytes:g}GB", {"opened": opened, **figures})


if __name__ == "__main__":
    main()
