"""The training loop: dispatch a step, log the one before, and between steps do whatever is due.

The loop dispatches step n and then logs step n-1, so the device never waits for a metric to be read. A background
thread prepares the input, and another writes checkpoints.

Chapters: 6.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from minitext.checkpoint.checkpointer import Checkpointer
from minitext.config.sections import TrainConfig
from minitext.data.batches import Batches
from minitext.observability.goodput import Ledger
from minitext.observability.metrics import MemoryReader, Meter
from minitext.training.objective import Batch
from minitext.training.step import Metrics, TrainState
from minitext.training.stopping import Stopper

Line = dict[str, Any]  # of metrics.jsonl


class Dispatched(NamedTuple):
    """A step whose results the device may still be computing."""

    step: int
    metrics: Metrics
    batch: Batch  # kept until its loss is known to be finite
    about: Mapping[str, float]  # what is known of the batch


class Action(Protocol):
    """Something that happens between two steps: saving, sampling text, starting a trace.

    Attributes:
      event: the kind of time it takes, one of `goodput.KINDS`.
      is_timed: whether the metrics count its time as part of the next step.
    """

    event: str
    is_timed: bool

    def is_due(self, step: int, stop: bool) -> bool:
        """Returns whether to act after this step; `stop` says that a signal makes it the last."""
        ...

    def __call__(self, step: int, state: TrainState) -> None:
        """Acts, with the results of the step computed."""
        ...


@dataclass
class Loop:
    """The loop of one run, and what it calls.

    Attributes:
      cfg: how many steps, and how often to measure the validation loss.
      train_step: (state, batch) -> (state, metrics).
      batches: what to train on.
      validate: (step, state) -> what was measured on the held-out data, such as `val_loss`.
      writers: called with each step's line and its batch, in order.
      actions: asked after each step whether they are due, and then called in order.
      meter: turns times into rates.
      stopper: knows whether a signal asked to stop.
      checkpointer: waited for before a line is written.
      ledger: records where the time goes.
    """

    cfg: TrainConfig
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    batches: Batches
    validate: Callable[[int, TrainState], dict[str, float]]
    writers: Sequence[Callable[[Line, Batch], None]]
    actions: Sequence[Action]
    meter: Meter
    stopper: Stopper
    checkpointer: Checkpointer
    ledger: Ledger
    memory: MemoryReader = field(default_factory=MemoryReader)

    def run(self, state: TrainState, start: int) -> int:
        """Trains from step `start` to the last, or until a signal asks to stop; returns the last step taken.

        Raises:
          NonFinite: if a writer or an action meets a loss, gradient or parameter that is not finite.
        """
        step, pending = start, None  # the step that was dispatched and isn't logged yet
        for step in range(start + 1, self.cfg.steps + 1):
            with jax.profiler.TraceAnnotation("data_wait"):
                batch = self.batches.take(state)
            self.ledger.lap("data_wait", step, pending and pending.metrics["loss"])
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = self.train_step(state, batch)
            if step == start + 1:
                self.ledger.lap("compile", step)
            if pending is not None:
                self._write(self._read(pending), pending.batch)
            pending = Dispatched(step, metrics, batch, self.batches.about)
            stop = self.stopper.last(step)
            evaluates = step == self.cfg.steps or step % self.cfg.eval_every == 0
            due = [action for action in self.actions if action.is_due(step, stop)]
            if evaluates or due:
                line, pending = self._read(pending), None
                if evaluates:
                    line |= self.validate(step, state)
                    self.ledger.lap("evaluation", step)
                    self.meter.skip()
                # A step's line is written before the step is saved. A run that is killed in between has a line too
                # many, which resuming removes, and never one too few. The same goes for the ledger.
                self._write(line, batch)
            self.ledger.lap("log", step, pending and pending.metrics["loss"])
            for action in due:
                action(step, state)
                self.ledger.lap(action.event, step)
                if not action.is_timed:
                    self.meter.skip()
            if stop:
                break
        self.checkpointer.wait()
        self.ledger.lap("save", step)
        return step

    def _read(self, one: Dispatched) -> Line:
        """Waits for a step and returns the line to write about it."""
        metrics = jax.device_get(one.metrics)
        rates = self.meter.lap() | self.memory.in_use()
        self.ledger.lap("step", one.step)
        # Lines wait until the save before them is on disk, so a kill never costs more lines than there are steps
        # between two saves. Meanwhile the device is a step or two ahead.
        self.checkpointer.wait()
        self.ledger.lap("save", one.step)
        numbers = {name: float(value) for name, value in metrics.items()}
        # In a batch of NaNs even the count may be NaN.
        numbers["tokens"] = int(np.nan_to_num(metrics["tokens"]))
        return {"step": one.step, **numbers, **one.about, **rates}

    def _write(self, line: Line, batch: Batch) -> None:
        for write in self.writers:
            write(line, batch)
