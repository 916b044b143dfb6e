"""Walks a journey: stage after stage, each skipped if it is done, and the report at the end.

Read `run_journey` first.

Chapters: 27.
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from minitext import hardware
from minitext.errors import UserError, did_you_mean
from minitext.journey import report, stages
from minitext.journey.trip import Result, Trip
from minitext.training.claim import Claim
from minitext.training.run_dir import disk_errors


class Stage(NamedTuple):
    """A stage.

    Attributes:
      what: it does, for a line on the terminal.
      work: how it is done.
      overhead: seconds on two cores beside its FLOPs, for the time left.
      trains: whether it goes on from checkpoints if it is started again.
    """

    what: str
    work: Callable[[Trip], Result]
    overhead: float
    trains: bool = False


STAGES = {
    "data": Stage("finds the text and writes the sums", stages.gather, 3),
    "tokenizer": Stage("learns a tokenizer and packs the text", stages.tokenize, 8),
    "scaling": Stage("trains small models and predicts the large one", stages.study, 60, True),
    "pretrain": Stage("trains the model on the text", stages.pretrain, 25, True),
    "evaluate": Stage("measures it on held-out text", stages.evaluate, 15),
    "sft": Stage("teaches it to answer", stages.fine_tune, 40, True),
    "grpo": Stage("rewards right answers", stages.reward, 60, True),
    "quantize": Stage("stores its weights in 8 and 4 bits", stages.quantize, 30),
    "export": Stage("writes it for other programs", stages.export, 10),
    "serve": Stage("serves it and asks it as a client", stages.serve, 25),
}
USED = 0.4  # share of the machine's peak that training reaches, until it is measured


def check_stages(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the named stages in their order; all, if none is named.

    Raises:
      UserError: for a name that no stage has.
    """
    for name in names:
        if name not in STAGES:
            hint = did_you_mean(name, STAGES)
            raise UserError(f"--stages {name}: no stage has this name{hint}: {', '.join(STAGES)}")
    return tuple(name for name in STAGES if not names or name in names)


def run_journey(trip: Trip, names: Sequence[str] = ()) -> Path:
    """Runs the stages that are not done, and writes the report of all that are.

    Args:
      trip: where, and how large everything is.
      names: of stages to run; all, if none is named. One needs what those before it left.

    Returns:
      The report.

    Raises:
      UserError: for another journey's folder, a stage whose predecessor is missing, or what a stage raises.
      Interrupted: after SIGTERM or Ctrl-C while a stage trains, once its state is saved.
    """
    chosen = check_stages(names)
    trip.check()
    _check_order(trip, chosen)
    stages.check(trip)
    with disk_errors(trip.directory), Claim(trip.directory) as claim:
        trip.begin()
        claim.begin()
        for name in chosen:
            if trip.result(name) is None:
                _run(trip, name)
                report.write(trip, tuple(STAGES))  # even of an unfinished journey
        return report.write(trip, tuple(STAGES))


def _check_order(trip: Trip, chosen: Sequence[str]) -> None:
    """Refuses stages whose predecessors are neither done nor among them."""
    for number, name in enumerate(STAGES):
        before = list(STAGES)[:number]
        missing = [b for b in before if b not in chosen and trip.result(b) is None]
        if name in chosen and missing:
            raise UserError(
                f"--stages: {name} needs what {', '.join(missing)} leave in {trip.directory}: add them, or leave out "
                "--stages"
            )


def _run(trip: Trip, name: str) -> None:
    stage, number = STAGES[name], list(STAGES).index(name) + 1
    folder = trip.of(name)
    left = time_left(trip)
    _say(f"[{number:>2}/{len(STAGES)}] {name}: {stage.what} ({_minutes(left)} to go)")
    if not stage.trains:
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with trip.attempt(name):
        found = stage.work(trip)
        trip.write(name, found)
    _say(f"        {name}: done in {time.perf_counter() - began:,.0f} s{_found(name, found)}")


def _found(name: str, result: Result) -> str:
    """Returns what is worth a line of a stage's figures."""
    f = result.figures
    match name:
        case "tokenizer":
            return f"; {f['tokens']:,} tokens of {f['bytes_per_token']:.2f} bytes"
        case "scaling":
            p = f["prediction"]
            between = f" (from {p['low']:.3f} to {p['high']:.3f})" if len(f["points"]) > 2 else ""
            return f"; predicted loss {p['loss']:.3f}{between}"
        case "evaluate":
            return f"; loss {f['loss']:.3f}, predicted {f['predicted']:.3f}: {f['error']:+.1%}"
        case "sft" | "grpo":
            right = f["answers"]["held_out"]
            return f"; right answers: sampled {right['sampled']:.1%}, greedy {right['greedy']:.1%}"
        case "serve":
            first = f["asked"][0]
            return f"; {first['question']} {first['answer']} ({result.times['answers'][0] * 1e3:.0f} ms)"
    return ""


def time_left(trip: Trip) -> float:
    """Returns about how many seconds the stages that are not done will take.

    A training stage takes its FLOPs at the rate that the one before it reached, or at a share of the machine's peak.
    """
    rates, left = [], 0.0
    planned = stages.planned_flops(trip)
    for name, flops in planned.items():
        if found := trip.result(name):
            rates.append(flops / max(found.times["seconds"].get("step", 0.0), 1e-3))
    if not rates:
        rates.append(USED * (hardware.peak_flops(jax.devices(), trip.recipe.dtype) or 1e11))
    for name, stage in STAGES.items():
        if trip.result(name) is None:
            left += stage.overhead + planned.get(name, 0.0) / rates[-1]
    return left


def _minutes(seconds: float) -> str:
    return f"about {max(1, round(seconds / 60))} min"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
