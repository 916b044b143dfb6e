"""The training loop of one run: dispatch a step, write down the one before, evaluate, sample, save.

The loop dispatches step n and then writes down step n-1, so that the device never waits for a metric to be read; input
is prepared in a background thread, and checkpoints are written in one.

Chapters: 6.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from minitext import hardware
from minitext.checkpoint import leaves, stacks
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.checkpoint.emergency import LocalCopies
from minitext.config.config import Config
from minitext.data.batches import Batches
from minitext.data.tokenizer import Tokenizer
from minitext.distributed import job
from minitext.inference.generate import Sampling, generate
from minitext.models.flops import count_flops
from minitext.observability.goodput import Ledger
from minitext.observability.metrics import (
    MemoryReader,
    Meter,
    MetricsWriter,
    progress_bar,
    status_line,
)
from minitext.observability.profiler import Window
from minitext.sharding.mesh import make_mesh
from minitext.training.compile import make_or_load_step
from minitext.training.nonfinite import Guard
from minitext.training.step import Batch, Metrics, TrainState, evaluate, make_eval_step
from minitext.training.stopping import Interrupted, Stopper
from minitext.training.watchdog import Watchdog

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 32  # of validation text, in front of each sample


class Dispatched(NamedTuple):
    """A step whose results the device still computes."""

    step: int
    metrics: Metrics
    batch: Batch  # kept until its loss is known to be a number


@dataclass
class Loop:
    """The loop of one run and what it talks to."""

    cfg: Config
    mesh: Mesh
    directory: Path
    batches: Batches
    held_out: Batches
    tokenizer: Tokenizer
    checkpointer: Checkpointer
    writer: MetricsWriter | None  # None where another process writes
    ledger: Ledger
    window: Window
    copies: LocalCopies | None = None
    memory: MemoryReader = field(default_factory=MemoryReader)

    def run(self, state: TrainState, start: int, console: Console) -> None:
        """Trains from step `start` to the last, or until it is asked to stop.

        Raises:
          Interrupted: after SIGTERM or Ctrl-C, when the state is saved.
          NonFinite: for a loss, gradient or parameter that is no number.
        """
        cfg = self.cfg.train
        self.ledger.lap("init", start)
        eval_step, meter = make_eval_step(self.cfg), self._meter()
        say = functools.partial(console.print, highlight=False)
        stopper = Stopper(say, job.board("stop"))
        watchdog = Watchdog(self.directory, jax.process_index(), logger.warning, cfg.hang_seconds)
        guard = Guard(self.directory, cfg.on_nan, self.tokenizer, say)
        with progress_bar(console) as bar, stopper, watchdog:
            task = bar.add_task("train", total=cfg.steps, completed=start, status="compiling")

            def write(line: dict[str, Any], batch: Batch) -> None:
                if self.writer:
                    self.writer.write(line)
                status = status_line(line, self.batches.floor)
                bar.update(task, completed=line["step"], status=status)
                watchdog.step_ended()
                guard.check(line, batch)

            # Here, since a signal that comes while the step is compiled has to wait for it.
            train_step = make_or_load_step(self.cfg, self.mesh)
            self.ledger.lap("compile", start + 1)
            self.window.switch(start)
            step, pending = start, None  # the step that was dispatched and not yet written down
            for step in range(start + 1, cfg.steps + 1):
                with jax.profiler.TraceAnnotation("data_wait"):
                    batch = next(self.batches)
                self.ledger.lap("data_wait", step, pending and pending.metrics["loss"])
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    state, metrics = train_step(state, batch)
                if step == start + 1:
                    self.ledger.lap("compile", step)
                if pending is not None:
                    write(self._read(pending, meter), pending.batch)
                pending = Dispatched(step, metrics, batch)
                stop = stopper.last(step)
                due = self._due(step, stop)
                if due:
                    line, pending = self._read(pending, meter), None
                    if "evaluation" in due:
                        line["val_loss"] = self._validate(eval_step, state, step, bar)
                        meter.skip()  # the time of an evaluation is no step's
                    write(line, batch)
                self.ledger.lap("log", step, pending and pending.metrics["loss"])
                for name, saver in (("save", self.checkpointer), ("copy", self.copies)):
                    if name in due and saver is not None:
                        guard.check_parameters(step, state.params)
                        self._save(saver, step, state)
                if "sample" in due:
                    self._sample(state, step, bar)
                    meter.skip()
                    self.ledger.lap("sample", step)
                if self.window.switch(step):
                    meter.skip()
                    self.ledger.lap("profile", step)
                if stop:
                    break
            self.checkpointer.wait()
            self.ledger.lap("save", step)
        if step < cfg.steps:
            raise Interrupted(step, self.directory, stopper.number)

    def _due(self, step: int, stop: bool) -> set[str]:
        """What is to be done after a step, for which its results are awaited."""
        cfg = self.cfg.train
        last = step == cfg.steps
        save = last or stop or step % cfg.save_every == 0
        wanted = {
            "evaluation": last or step % cfg.eval_every == 0,
            "save": save,
            "copy": self.copies is not None and self.copies.is_due(step) and not save,
            # The first sample comes after one step, since the first line should not wait for it to compile.
            "sample": last or step in (1, (cfg.steps + 1) // 2),
            "trace": self.window.is_edge(step),
        }
        return {name for name, now in wanted.items() if now}

    def _meter(self) -> Meter:
        tokens, seq_len = self.cfg.train.global_batch * self.cfg.data.seq_len, self.cfg.data.seq_len
        flops = count_flops(self.cfg.model, tokens, seq_len)
        return Meter(tokens, flops, peak_flops(self.cfg, self.mesh))

    def _read(self, one: Dispatched, meter: Meter) -> dict[str, Any]:
        """Waits for a step and returns the line to write of it."""
        metrics = jax.device_get(one.metrics)
        rates = meter.lap() | self.memory.in_use()
        self.ledger.lap("step", one.step)
        # A step is written down only when the save before it is on the disk, so that a kill never costs
        # more lines than lie between two saves. Meanwhile the device is a step or two ahead.
        self.checkpointer.wait()
        self.ledger.lap("save", one.step)
        numbers = {name: float(value) for name, value in metrics.items()}
        # Of a batch that is no numbers even the count may be none.
        numbers["tokens"] = int(np.nan_to_num(metrics["tokens"]))
        return {"step": one.step, **numbers, **rates}

    def _validate(self, eval_step: Callable, state: TrainState, step: int, bar: Progress) -> float:
        """Measures and prints the validation loss."""
        loss = evaluate(eval_step, state.params, self.held_out, self.cfg.train.eval_batches)
        floor = f"  (floor {self.batches.floor:.4f})" if self.batches.floor else ""
        text = f"step {step:>6}  validation loss {loss:.4f} nats/token{floor}"
        bar.console.print(text, highlight=False)
        self.ledger.lap("evaluation", step)
        return loss

    def _save(self, saver: Checkpointer | LocalCopies, step: int, state: TrainState) -> None:
        # The line of a step is written before the step is saved: a run that is killed in between
        # has a line too many, which resuming removes, and never one too few. So it is with the ledger.
        self.ledger.flush()
        saver.save(step, state, self.batches.get_state(), self.cfg.model_dump(mode="json"))
        self.ledger.lap("save", step)

    def _sample(self, state: TrainState, step: int, bar: Progress) -> None:
        """Prints how the model goes on from the first validation text, and keeps it in samples.txt."""
        cfg = self.cfg
        if not cfg.train.sample_tokens:
            return
        rows = jax.device_get(next(iter(self.held_out))["tokens"].addressable_shards[0].data)
        prompt = rows[0, :PROMPT_TOKENS].tolist()
        # One row cannot be spread over a batch axis: the parameters come to one device.
        params = stacks.as_one_stack(leaves.gather(state.params))
        if not job.is_first():
            return
        params = jax.device_put(params, jax.local_devices()[0])
        with jax.set_mesh(make_mesh(devices=jax.local_devices()[:1])):
            tokens = list(
                generate(
                    # Scanned, whatever training does: for so few tokens compiling is what takes time.
                    cfg.model.model_copy(update={"scan_layers": True}),
                    params,
                    prompt,
                    max_tokens=cfg.train.sample_tokens,
                    stop_id=self.tokenizer.eod_id,
                    how=Sampling(temperature=0.8, top_k=40),
                    seed=cfg.train.seed,
                )
            )
        before, after = self.tokenizer.decode(prompt), self.tokenizer.decode(tokens)
        bar.console.rule(f"sample at step {step}", style="dim")
        bar.console.print(Text.assemble((before, "dim"), (after, "bold")))
        bar.console.rule(style="dim")
        with (self.directory / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(f"--- step {step}\n{before}|{after}\n")


def peak_flops(cfg: Config, mesh: Mesh) -> float:
    """Returns the matmul peak of the mesh's devices together, in FLOP/s.

    Simulated CPU devices share one machine, whose measured peak counts once; chips in the table
    count by their data sheet.
    """
    device: Any = mesh.devices.flat[0]
    if device.platform == "cpu":
        return hardware.measure_matmul_peak(cfg.model.dtype)
    chip = hardware.find_chip(device)
    kind = "bf16" if cfg.model.dtype == "bfloat16" else "f32"
    if chip is None or kind not in chip.flops:
        return hardware.measure_matmul_peak(cfg.model.dtype) * mesh.size
    return chip.peak(kind) * mesh.size / chip.devices
