"""What watching a run costs: step times with nothing watched, with the ledger, and with a trace, taking turns in one run.

    python benchmarks/observability.py
    python benchmarks/observability.py --shape laptop --rounds 50

The run is `minitext train` itself, with the preset laptop and with the shape of 10.7M parameters that the other
benchmarks use. A round is four steps in an order drawn anew for each: one `bare` (no ledger, no annotations, no reading
of memory), one with the `ledger` (what every run does), one in a `trace` (the ledger and JAX's profiler, with the options
of `minitext.observability.profiler`), and one as `control`, which is bare once more: how far it lies from `bare` is chance. Between
steps the loop waits for the device, as at the edges of a trace; there the profiler starts, and writes its file. So no
work of the loop is hidden behind the device's, as most of it is in a run.

A ratio is the median over the rounds of a step's time over that of the bare one: a machine that is slower for some
seconds slows down both. Its interval holds 90% of the medians of rounds drawn again with replacement. The time that the
loop's thread spends in the ledger and in reading memory is measured in place, too, and a traced step's events are counted.
"""

import contextlib
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from common import busy, in_subprocess, parser, spread, write_record

STATES = "bare", "ledger", "control", "trace"
WARM_UP = 20  # steps
SHAPES = {
    "laptop": {"settings": [], "rounds": 900},
    "10.7M": {
        "settings": [
            "model.layers=6", "model.embed=384", "model.heads=6", "model.kv_heads=6", "model.mlp=1024",
            "data.seq_len=256", "train.global_batch=8",
        ],
        "rounds": 100,
    },
}  # fmt: skip


class Turns:
    """An action of the loop, in place of a trace window: switches its state between steps and times each step."""

    event, is_timed = "profile", False

    def __init__(self, folder, rounds):
        rng = np.random.default_rng(0)
        order = [state for _ in range(rounds) for state in rng.permutation(STATES)]
        self.states = dict(enumerate(order, WARM_UP + 1))  # by step
        self.folder, self.state, self.began = folder, "control", 0.0
        self.seconds = {state: [] for state in STATES}  # of a step
        self.spent = dict.fromkeys(STATES, 0.0)  # in what is not done in bare steps

    def is_due(self, step, stop):
        return True

    def __call__(self, step, state):
        import jax

        if step in self.states:
            self.seconds[self.state].append(time.perf_counter() - self.began)
        if self.state == "trace":
            jax.profiler.stop_trace()
        self.state = self.states.get(step + 1, "control")
        if self.state == "trace":
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, profiler_options=options)
        self.began = time.perf_counter()

    def unless_bare(self, work, otherwise):
        """`work` in the states that are watched, with its time taken; else `otherwise`."""

        def run(*args, **options):
            if self.state in ("bare", "control"):
                return otherwise()
            start = time.perf_counter()
            result = work(*args, **options)
            self.spent[self.state] += time.perf_counter() - start
            return result

        return run


def count_events(folder):
    """The events of the newest trace."""
    from minitext.observability import xplane

    return sum(
        len(line.events) for plane in xplane.read(xplane.find(folder)) for line in plane.lines
    )


def measure(case):
    """Trains, and returns the seconds of every step by its state, those spent in the ledger, and a traced step's events."""
    from rich.console import Console

    from minitext import load_config
    from minitext.distributed import devices

    devices.start(keep_memory=True)
    import jax

    from minitext.observability.goodput import Ledger
    from minitext.observability.metrics import MemoryReader
    from minitext.training import loop, run

    rounds = case["rounds"]
    total = WARM_UP + rounds * len(STATES) + 1  # the last ends with an evaluation and a save
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        turns = Turns(Path(folder) / "traces", rounds)
        stack.enter_context(mock.patch.object(run, "_trace", lambda *_: (turns,)))
        for place, name, otherwise in (
            (Ledger, "lap", lambda: None),
            (MemoryReader, "in_use", dict),
        ):
            instead = turns.unless_bare(getattr(place, name), otherwise)
            stack.enter_context(mock.patch.object(place, name, instead))
        annotations = {
            name: turns.unless_bare(getattr(jax.profiler, name), contextlib.nullcontext)
            for name in ("StepTraceAnnotation", "TraceAnnotation")
        }
        # The loop's own, not those that JAX uses inside.
        its_jax = SimpleNamespace(**vars(jax) | {"profiler": SimpleNamespace(**annotations)})
        stack.enter_context(mock.patch.object(loop, "jax", its_jax))
        cfg = load_config("laptop", [
            f"run.dir={folder}", f"train.steps={total}", f"train.save_every={total}", f"train.eval_every={total}",
            "train.sample_tokens=0", "train.eval_batches=1", *case["settings"],
        ])  # fmt: skip
        run.train(cfg, Console(quiet=True))
        return {
            "seconds": turns.seconds,
            "ledger_seconds_a_step": turns.spent["ledger"] / rounds,
            "events_a_step": count_events(turns.folder),
        }


def ratio(seconds, bare, draws=2000):
    """The median over rounds of the ratio of two steps' seconds, and where 90% of redrawn medians lie."""
    ratios = np.divide(seconds, bare)
    redrawn = np.random.default_rng(0).choice(ratios, (draws, len(ratios)))
    interval = np.quantile(np.median(redrawn, axis=1), [0.05, 0.95])
    return float(np.median(ratios)), interval.tolist()


def main():
    command = parser(__doc__)
    command.add_argument("--shape", choices=SHAPES, help="one of them (default: each)")
    command.add_argument("--rounds", type=int, help="of four steps (default 900; of 10.7M 100)")
    args = command.parse_args()
    if args.case:
        print(json.dumps(measure(args.case)))
        return
    for shape in [args.shape] if args.shape else SHAPES:
        case = SHAPES[shape] | ({"rounds": args.rounds} if args.rounds else {})
        before = busy()
        found = in_subprocess(__file__, case)
        seconds = found["seconds"]
        ratios = {state: ratio(seconds[state], seconds["bare"]) for state in STATES[1:]}
        step_seconds = {state: spread(times) for state, times in seconds.items()}
        share = found["ledger_seconds_a_step"] / step_seconds["bare"]["median"]
        print(
            f"{shape}, {case['rounds']} rounds, a step takes {step_seconds['bare']['median']:.3f} s"
        )
        for state, (r, (low, high)) in ratios.items():
            print(f"{state} over bare: {r:.4f}, between {low:.4f} and {high:.4f}")
        print(f"the loop's thread in the ledger: {share:.3%} of a step")
        print(f"a traced step has {found['events_a_step']:,} events")
        write_record(args.output, "observability", shape, {
            "shape": shape,
            **case,
            "busy_before_and_after": [before, busy()],
            "step_seconds": step_seconds,
            "ratios": {state: {"ratio": r, "interval": interval} for state, (r, interval) in ratios.items()},
            "ledger_share_of_step": share,
            **found,
        })  # fmt: skip


if __name__ == "__main__":
    main()
