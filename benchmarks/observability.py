"""What watching a run costs: step times with nothing watched, with the ledger, and with a trace, taking turns in one run.

    python benchmarks/observability.py
    python benchmarks/observability.py --rounds 20 --settings model.layers=2 train.global_batch=4

The run is `minitext train` itself. In a round's first turn each step has one of three states at random: `bare` (no ledger, no
annotations, no reading of memory), `ledger` (what every run does) and `control`, which is bare once more: how far it lies
from `bare` is chance. The round's second turn is `trace`, the ledger and JAX's profiler. The first steps of a turn, in
which the profiler starts or writes its file, are left out. What else a machine does only makes steps longer, so a ratio
is that of lower quartiles, over all rounds; its interval holds 90% of the ratios of rounds drawn again with replacement.
Chance is as large as 1% of a step, so the time that the loop's thread spends in the ledger and in reading memory is
measured in place, too.
"""

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from common import busy, in_subprocess, parser, spread, write_record

UNTRACED = "bare", "ledger", "control"
STATES = *UNTRACED, "trace"
LEFT_OUT = 2  # steps at the start of a turn


class Turns:
    """Switches the state of a training loop as it asks for batches, and takes the time between."""

    def __init__(self, folder, steps, rounds):
        self.folder, self.steps, self.rounds = folder, steps, rounds
        self.state, self.seen, self.last = "control", 0, 0.0
        self.times = {state: [[] for _ in range(rounds)] for state in STATES}
        self.rng = np.random.default_rng(0)
        self.spent, self.counts = dict.fromkeys(STATES, 0.0), dict.fromkeys(STATES, 0)

    def next_batch(self):
        now = time.perf_counter()
        turn, step = divmod(self.seen, self.steps)  # the first turn warms up
        if 0 < turn <= 2 * self.rounds and step > LEFT_OUT:
            self.times[self.state][(turn - 1) // 2].append(now - self.last)
        self.seen += 1
        self.counts[self.state] += 1
        self.switch(self.seen // self.steps)
        self.last = time.perf_counter()

    def switch(self, turn):
        """Sets the state of a turn's next step: turns of odd number are untraced, those of even number traced."""
        import jax

        if turn % 2 or not 0 < turn <= 2 * self.rounds:
            if self.state == "trace":
                jax.profiler.stop_trace()
            self.state = UNTRACED[self.rng.integers(3)]
        elif self.state != "trace":
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self.state = "trace"


def measure(case):
    """Trains, and returns the step times of every round and state, and the seconds a step spent in the ledger."""
    from rich.console import Console

    from minitext import devices, load_config

    devices.start(keep_memory=True)
    import jax

    from minitext import loop, run
    from minitext.data import Batches
    from minitext.goodput import Ledger
    from minitext.metrics import MemoryReader

    rounds, steps = case["rounds"], case["steps"]
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(Path(folder) / "traces", steps, rounds)
        total = (2 * rounds + 1) * steps + 1
        cfg = load_config("laptop", [
            f"run.dir={folder}", f"train.steps={total}", f"train.save_every={total}", f"train.eval_every={total}",
            "train.sample_tokens=0", "train.eval_batches=1", *case["settings"],
        ])  # fmt: skip

        def unless_bare(work, otherwise):
            def run(*args, **options):
                if turns.state not in ("ledger", "trace"):
                    return otherwise()
                start = time.perf_counter()
                result = work(*args, **options)
                turns.spent[turns.state] += time.perf_counter() - start
                return result

            return run

        next_batch = Batches.__next__

        def next_and_switch(self):
            turns.next_batch()
            return next_batch(self)

        with contextlib.ExitStack() as stack:
            for place, name, otherwise in (
                (Ledger, "lap", lambda: None),
                (MemoryReader, "in_use", dict),
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
        return {"seconds": turns.times, "in_place": turns.spent["ledger"] / turns.counts["ledger"]}


def ratio(times, bare, draws=2000):
    """The ratio of lower quartiles of step times, lists by rounds, and where 90% of redrawn ratios lie."""

    def of(rounds):
        quartiles = (
            np.quantile(np.concatenate([t[i] for i in rounds]), 0.25) for t in (times, bare)
        )
        return float(np.divide(*quartiles))

    rng = np.random.default_rng(0)
    count = len(bare)
    redrawn = [of(rng.integers(0, count, count)) for _ in range(draws)]
    return of(range(count)), np.quantile(redrawn, [0.05, 0.95]).tolist()


def main():
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=120, help="turns without and with a trace")
    command.add_argument("--steps", type=int, default=9, help="steps in a turn")
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
    times = found["seconds"]
    steps = {state: [t for turn in turns for t in turn] for state, turns in times.items()}
    ratios = {state: ratio(times[state], times["bare"]) for state in STATES[1:]}

    figures = {
        **case,
        "busy_before_and_after": [before, busy()],
        "step_seconds": {state: spread(values) for state, values in steps.items()},
        "ratios": {
            state: {"ratio": r, "interval": interval} for state, (r, interval) in ratios.items()
        },
        "ledger_seconds_a_step": found["in_place"],
        "ledger_share_of_step": found["in_place"] / statistics.median(steps["bare"]),
        "seconds": found["seconds"],
    }
    for state, (r, (low, high)) in ratios.items():
        print(f"{state} over bare: {r:.4f}, between {low:.4f} and {high:.4f}")
    print(f"the loop's thread in the ledger: {figures['ledger_share_of_step']:.3%} of a step")
    write_record(args.output, "observability", "", figures)


if __name__ == "__main__":
    main()
