"""What watching a run costs: step times with nothing watched, with the ledger, and with a trace, taking turns in one run.

    python benchmarks/observability.py
    python benchmarks/observability.py --rounds 20 --settings model.layers=2 train.global_batch=4

The run is `minitext train` itself. It changes state every few steps: `bare` (no ledger, no annotations, no reading of
memory), `ledger` (what every run does) and `trace` (that, and JAX's profiler is on). The first steps of a turn, in which
the profiler starts or writes its file, are left out. A ratio is the median over rounds of the ratio of a round's median
step times, so that a slow spell of the machine falls on all three; that of `bare` to the `bare` of the round before says
how far chance goes. What the ledger does in a step is timed by itself as well, which other work on the machine disturbs
little.
"""

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from common import busy, in_subprocess, parser, spread, write_record

STATES = "bare", "ledger", "trace"
LEFT_OUT = 2  # steps at the start of a turn


class Turns:
    """Switches the state of a training loop as it asks for batches, and takes the time between."""

    def __init__(self, folder, steps, rounds):
        self.folder, self.steps, self.rounds = folder, steps, rounds
        self.state, self.seen, self.last = "bare", 0, 0.0
        self.times = {state: [[] for _ in range(rounds)] for state in STATES}

    def next_batch(self):
        import jax

        now, per_round = time.perf_counter(), len(STATES) * self.steps
        i = self.seen - self.steps  # the first turn warms up
        if 0 <= i < per_round * self.rounds and i % self.steps > LEFT_OUT:
            self.times[self.state][i // per_round].append(now - self.last)
        self.seen, i = self.seen + 1, i + 1
        if i >= 0 and i % self.steps == 0 and i < per_round * self.rounds:
            if self.state == "trace":
                jax.profiler.stop_trace()
            turn, number = divmod(i // self.steps, len(STATES))
            self.state = STATES[:: 1 if turn % 2 == 0 else -1][number]
            if self.state == "trace":
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0
                jax.profiler.start_trace(self.folder, profiler_options=options)
        elif i == per_round * self.rounds and self.state == "trace":
            jax.profiler.stop_trace()
            self.state = "bare"
        self.last = time.perf_counter()


def measure(case):
    """Trains, and returns the step times of every round and state, and what the ledger takes by itself."""
    from rich.console import Console

    from minitext import devices, load_config

    devices.start(keep_memory=True)
    import jax

    from minitext import loop, run
    from minitext.data import Batches
    from minitext.goodput import Ledger

    rounds, steps = case["rounds"], case["steps"]
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(Path(folder) / "traces", steps, rounds)
        total = (rounds * len(STATES) + 1) * steps + 1
        cfg = load_config("laptop", [
            f"run.dir={folder}", f"train.steps={total}", f"train.save_every={total}", f"train.eval_every={total}",
            "train.sample_tokens=0", "train.eval_batches=1", *case["settings"],
        ])  # fmt: skip

        def unless_bare(work, otherwise):
            return lambda *a, **k: otherwise() if turns.state == "bare" else work(*a, **k)

        next_batch = Batches.__next__

        def next_and_switch(self):
            turns.next_batch()
            return next_batch(self)

        with contextlib.ExitStack() as stack:
            for place, name, otherwise in (
                (Ledger, "lap", lambda: None),
                (loop, "memory_in_use", dict),
            ):
                instead = unless_bare(getattr(place, name), otherwise)
                stack.enter_context(mock.patch.object(place, name, instead))
            annotations = {
                name: unless_bare(getattr(jax.profiler, name), contextlib.nullcontext)
                for name in ("StepTraceAnnotation", "TraceAnnotation")
            }
            # The loop's own, not those that JAX uses inside.
            its_jax = SimpleNamespace(**vars(jax) | {"profiler": SimpleNamespace(**annotations)})
            stack.enter_context(mock.patch.object(loop, "jax", its_jax))
            stack.enter_context(mock.patch.object(Batches, "__next__", next_and_switch))
            run.train(cfg, Console(quiet=True))
        return {"seconds": turns.times, "alone": alone(Path(folder))}


def alone(folder, steps=20_000):
    """Seconds that the ledger, the annotations and the reading of memory take in one step, with nothing to watch."""
    import jax

    from minitext.goodput import Ledger
    from minitext.metrics import memory_in_use

    ready = jax.numpy.ones(()).block_until_ready()
    with Ledger(folder) as ledger:
        start = time.perf_counter()
        for step in range(steps):
            with jax.profiler.TraceAnnotation("data_wait"):
                pass
            ledger.lap("data_wait", step, ready)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                pass
            ledger.lap("step", step)
            memory_in_use()
            ledger.lap("save", step)
            ledger.lap("log", step, ready)
        return (time.perf_counter() - start) / steps


def main():
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=12, help="turns of each state")
    command.add_argument("--steps", type=int, default=12, help="steps in a turn")
    command.add_argument(
        "--settings", nargs="*", default=[], metavar="KEY=VALUE", help="of the run"
    )
    args = command.parse_args()
    if args.case:
        import json

        print(json.dumps(measure(args.case)))
        return
    before = busy()
    case = {"rounds": args.rounds, "steps": args.steps, "settings": args.settings}
    found = in_subprocess(__file__, case)
    medians = {s: [statistics.median(r) for r in rounds] for s, rounds in found["seconds"].items()}
    bare = medians["bare"]

    def ratio(a, b):
        return statistics.median(x / y for x, y in zip(a, b, strict=True))

    figures = {
        **case,
        "busy_before_and_after": [before, busy()],
        "step_seconds": {state: spread(values) for state, values in medians.items()},
        "ratio_ledger": ratio(medians["ledger"], bare),
        "ratio_trace": ratio(medians["trace"], bare),
        "ratio_bare_to_the_round_before": ratio(bare[1:], bare[:-1]),
        "ledger_alone_seconds": found["alone"],
        "ledger_alone_share_of_step": found["alone"] / statistics.median(bare),
        "seconds": found["seconds"],
    }
    for name in figures:
        if name.startswith(("ratio", "ledger")):
            print(f"{name}: {figures[name]:.5f}")
    write_record(args.output, "observability", "", figures)


if __name__ == "__main__":
    main()
