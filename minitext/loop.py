"""The training loop of one run: dispatch a step, write down the one before, evaluate, sample, save.

The loop dispatches step n and then writes down step n-1, so that the device never waits for a metric to be read; input
is prepared in a background thread, and checkpoints are written in one.

Chapters: 6.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from minitext import executable, hw, stacks
from minitext.checkpoint import Checkpointer
from minitext.config import Config
from minitext.data import Batches
from minitext.generate import Sampling, generate
from minitext.mesh import make_mesh
from minitext.metrics import Meter, MetricsWriter, progress_bar, status_line
from minitext.model import count_flops
from minitext.rundir import resume_command
from minitext.tokenizer import Tokenizer
from minitext.train import TrainState, evaluate, make_eval_step

PROMPT_TOKENS = 32  # of validation text, in front of each sample


class Interrupted(Exception):
    """Training was stopped by Ctrl-C after saving; the message says how to resume."""


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
    writer: MetricsWriter
    stop: bool = False

    def run(self, state: TrainState, start: int, console: Console) -> None:
        """Trains from step `start` to the last, or until it is asked to stop.

        Raises:
          Interrupted: after Ctrl-C, when the state is saved.
        """
        cfg = self.cfg.train
        train_step, eval_step = executable.train_step(self.cfg, self.mesh), make_eval_step(self.cfg)
        tokens = cfg.global_batch * self.cfg.data.seq_len
        flops = count_flops(self.cfg.model, tokens, self.cfg.data.seq_len)
        meter = Meter(tokens, flops, peak_flops(self.cfg, self.mesh))
        with progress_bar(console) as bar, _on_interrupt(lambda: self._ask_to_stop(bar)):
            task = bar.add_task("train", total=cfg.steps, completed=start, status="compiling")
            step, pending = start, []  # steps that were dispatched and not yet written down
            for step in range(start + 1, cfg.steps + 1):
                state, metrics = train_step(state, next(self.batches))
                pending.append((step, metrics))
                stop = self.stop  # read once: a Ctrl-C from here on ends the step after this one
                last = step == cfg.steps
                evaluate_now = last or step % cfg.eval_every == 0
                save_now = last or stop or step % cfg.save_every == 0
                # The first sample comes after one step, since the first line should not wait for it to compile.
                sample_now = last or step in (1, (cfg.steps + 1) // 2)
                everything = evaluate_now or save_now or sample_now
                due, pending = (pending, []) if everything else (pending[:-1], pending[-1:])
                lines = self._settle(due, meter)
                if evaluate_now:
                    loss = evaluate(eval_step, state.params, self.held_out, cfg.eval_batches)
                    self._say_validation(step, loss, bar)
                    lines[-1]["val_loss"] = loss
                    meter.skip()  # the time of an evaluation is no step's
                for line in lines:
                    self.writer.write(line)
                    status = status_line(line, self.batches.floor)
                    bar.update(task, completed=line["step"], status=status)
                if save_now:
                    # The line of a step is written before the step is saved: a run that is killed in between
                    # has a line too many, which resuming removes, and never one too few.
                    config = self.cfg.model_dump(mode="json")
                    self.checkpointer.save(step, state, self.batches.get_state(), config)
                if sample_now:
                    self._sample(state, step, bar)
                    meter.skip()
                if stop:
                    break
        self.checkpointer.wait()
        if step < cfg.steps:
            raise Interrupted(
                f"stopped after step {step} and saved; resume with: {resume_command(self.directory)}"
            )

    def _settle(self, steps: list[tuple[int, Any]], meter: Meter) -> list[dict[str, Any]]:
        """Waits for `steps`, pairs of number and metrics, and returns the lines to write of them."""
        if not steps:
            return []
        values = jax.device_get([metrics for _, metrics in steps])
        rates = meter.lap(len(steps))
        # A step is written down only when the save before it is on the disk, so that a kill never costs
        # more lines than lie between two saves. Meanwhile the device is a step or two ahead.
        self.checkpointer.wait()
        lines = []
        for (step, _), metrics in zip(steps, values, strict=True):
            numbers = {name: float(value) for name, value in metrics.items()}
            lines.append({"step": step, **numbers, "tokens": int(metrics["tokens"]), **rates})
        return lines

    def _say_validation(self, step: int, loss: float, bar: Progress) -> None:
        floor = f"  (floor {self.batches.floor:.4f})" if self.batches.floor else ""
        text = f"step {step:>6}  validation loss {loss:.4f} nats/token{floor}"
        bar.console.print(text, highlight=False)

    def _sample(self, state: TrainState, step: int, bar: Progress) -> None:
        """Prints how the model goes on from the first validation text, and keeps it in samples.txt."""
        cfg = self.cfg
        if not cfg.train.sample_tokens:
            return
        rows = jax.device_get(next(iter(self.held_out))["tokens"].addressable_shards[0].data)
        prompt = rows[0, :PROMPT_TOKENS].tolist()
        # One row cannot be spread over a batch axis: the parameters come to one device.
        params = stacks.as_one_stack(jax.device_get(state.params))
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

    def _ask_to_stop(self, bar: Progress) -> None:
        self.stop = True
        bar.console.print("stopping after this step; Ctrl-C again stops at once without saving")


def peak_flops(cfg: Config, mesh: Mesh) -> float:
    """Returns the matmul peak of the mesh's devices together, in FLOP/s.

    Simulated CPU devices share one machine, whose measured peak counts once; chips in the table
    count by their data sheet.
    """
    device: Any = mesh.devices.flat[0]
    if device.platform == "cpu":
        return hw.measure_matmul_peak(cfg.model.dtype)
    chip = hw.find_chip(device)
    kind = "bf16" if cfg.model.dtype == "bfloat16" else "f32"
    if chip is None or kind not in chip.flops:
        return hw.measure_matmul_peak(cfg.model.dtype) * mesh.size
    return chip.peak(kind) * mesh.size / chip.devices


@contextlib.contextmanager
def _on_interrupt(ask: Callable[[], None]) -> Iterator[None]:
    """Calls `ask` at the first Ctrl-C; the second one interrupts as usual."""
    before = signal.getsignal(signal.SIGINT)

    def handle(*_):
        signal.signal(signal.SIGINT, before)
        ask()

    try:
        signal.signal(signal.SIGINT, handle)
    except ValueError:  # not in the main thread, where no handler can be set and none is needed
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
