"""A run: its directory, the loop that trains in it, and reading it back.

    runs/NAME/
      config.yml       the resolved configuration; `minitext train config=runs/NAME/config.yml` resumes
      tokenizer.json   so that text can be generated where the training text is not
      metrics.jsonl    one object a step
      tensorboard/     the same as TensorBoard events
      samples.txt      text sampled at start, middle and end
      checkpoints/     state, data position and configuration, by step

Chapters: 6, 8.
"""

import contextlib
import datetime
import errno
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.text import Text

from minitext import hw
from minitext.checkpoint import Checkpointer
from minitext.config import Config, load_config, to_yaml
from minitext.data import make_batches
from minitext.errors import UserError
from minitext.generate import Sampling, generate
from minitext.mesh import make_mesh
from minitext.metrics import Meter, MetricsWriter, progress_bar, status_line
from minitext.model import count_flops, count_params
from minitext.tokenizer import load_tokenizer, make_tokenizer
from minitext.train import (
    abstract_state,
    check_mesh,
    evaluate,
    init_state,
    make_eval_step,
    make_train_step,
)

PROMPT_TOKENS = 32  # of validation text, in front of each sample

# What may differ between a run and the configuration that resumes it: how long and how it trains, not what it is.
RESUMABLE = ("train.steps", "train.save_every", "train.eval_every", "train.eval_batches", "train.sample_tokens",
             "train.microbatches", "model.scan_layers", "model.remat", "model.attention.impl", "optim.",
             "mesh.", "sharding.", "checkpoint.", "run.")  # fmt: skip


class Interrupted(Exception):
    """Training was stopped by Ctrl-C after saving; the message says how to resume."""


def train(cfg: Config, console: Console | None = None) -> Path:
    """Trains to the last step in the run directory, resuming from its newest checkpoint if it has one.

    Args:
      cfg: the resolved configuration.
      console: where to print; stderr by default.

    Returns:
      The run directory.

    Raises:
      UserError: for a mesh, data or directory that can't be used, or a disk that can't be written.
      Interrupted: after Ctrl-C, when the state is saved.
    """
    console = console or Console(stderr=True)
    name = cfg.run.name or datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    cfg = cfg.replace({"run.name": name})
    directory = Path(cfg.run.dir) / name
    mesh = make_mesh(cfg.mesh)
    check_mesh(cfg, mesh)
    _check_same_run(cfg, directory)
    # All the data a run needs is found or refused before the directory exists.
    known = directory / "tokenizer.json"
    tokenizer = (
        load_tokenizer(known) if known.is_file() else make_tokenizer(cfg.data, cfg.model.vocab)
    )
    sizes = {
        "vocab": cfg.model.vocab,
        "global_batch": cfg.train.global_batch,
        "tokenizer": tokenizer,
    }
    batches = make_batches(cfg.data, mesh, **sizes)
    held_out = make_batches(cfg.data, mesh, **sizes, split="validation")
    with disk_errors(directory), jax.set_mesh(mesh):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yml").write_text(to_yaml(cfg), encoding="utf-8")
        tokenizer.save(known)
        with Checkpointer(directory / "checkpoints", keep=cfg.checkpoint.keep) as checkpointer:
            restored = checkpointer.restore(abstract_state(cfg, mesh))
            if restored is None:
                state, start = init_state(cfg, mesh), 0
            else:
                state, start = restored.state, restored.step
                batches.set_state(restored.data_state)
            _introduce(cfg, mesh, directory, start, batches.floor, console)
            if start < cfg.train.steps:
                with MetricsWriter(directory, after_step=start) as writer:
                    loop = _Loop(
                        cfg,
                        mesh,
                        directory,
                        batches,
                        held_out,
                        tokenizer,
                        checkpointer,
                        writer,
                        console,
                    )
                    loop.run(state, start)
    return directory


class _Loop:
    """The loop of one run: dispatch step n, then write down step n-1."""

    def __init__(
        self, cfg, mesh, directory, batches, held_out, tokenizer, checkpointer, writer, console
    ):
        self.cfg, self.mesh, self.directory, self.console = cfg, mesh, directory, console
        self.batches, self.held_out, self.tokenizer = batches, held_out, tokenizer
        self.checkpointer, self.writer = checkpointer, writer
        first_row = next(iter(held_out))["tokens"].addressable_shards[0].data[0]
        self.prompt = jax.device_get(first_row)[:PROMPT_TOKENS].tolist()
        flops = count_flops(cfg.model, cfg.train.global_batch * cfg.data.seq_len, cfg.data.seq_len)
        self.meter = Meter(flops, peak_flops(cfg, mesh))
        self.train_step, self.eval_step = make_train_step(cfg, mesh), make_eval_step(cfg)
        self.stop = False

    def run(self, state, start: int) -> None:
        cfg = self.cfg.train
        with progress_bar(self.console) as bar, _on_interrupt(self._ask_to_stop):
            self.bar, self.task = (
                bar,
                bar.add_task("train", total=cfg.steps, completed=start, status="compiling"),
            )
            if start == 0:
                self._sample(state, 0)
            self.meter.skip()
            pending, saved = None, start
            for step in range(start + 1, cfg.steps + 1):
                state, metrics = self.train_step(state, next(self.batches))
                # Reading a metric waits for its step; the step before this one is done or nearly so.
                if pending is not None:
                    self._record(*pending, {})
                pending = (step, metrics)
                last = step == cfg.steps or self.stop
                extra = {}
                if last or step % cfg.eval_every == 0:
                    jax.block_until_ready(metrics)
                    extra = self._evaluate(state)
                if last or step % cfg.save_every == 0 or extra:
                    self._record(*pending, extra)
                    pending = None
                if last or step % cfg.save_every == 0:
                    self.checkpointer.save(
                        step, state, self.batches.get_state(), self.cfg.model_dump(mode="json")
                    )
                    saved = step
                if step == (cfg.steps + 1) // 2 or step == cfg.steps:
                    self._sample(state, step)
                if extra or last:
                    self.meter.skip()
                if self.stop:
                    break
        self.checkpointer.wait()
        if saved < cfg.steps:
            raise Interrupted(
                f"stopped after step {saved}, saved; resume with: {resume_command(self.directory)}"
            )

    def _record(self, step: int, metrics: dict[str, jax.Array], extra: dict[str, float]) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        record = {"step": step} | values | {"tokens": int(values["tokens"])} | extra
        record |= self.meter.lap(self.cfg.train.global_batch * self.cfg.data.seq_len)
        self.writer.write(record)
        self.bar.update(self.task, completed=step, status=status_line(record, self.batches.floor))

    def _evaluate(self, state) -> dict[str, float]:
        cfg = self.cfg
        loss = evaluate(self.eval_step, state.params, self.held_out, cfg.train.eval_batches)
        floor = f"  (floor {self.batches.floor:.4f})" if self.batches.floor else ""
        self.bar.console.print(
            f"step {int(state.step):>6}  validation loss {loss:.4f} nats/token{floor}",
            highlight=False,
        )
        return {"val_loss": loss}

    def _sample(self, state, step: int) -> None:
        cfg = self.cfg
        if not cfg.train.sample_tokens:
            return
        params = on_one_device(state.params)
        tokenizer, prompt = self.tokenizer, self.prompt
        with jax.set_mesh(make_mesh(devices=jax.local_devices()[:1])):
            tokens = list(generate(
                cfg.model, params, prompt, max_tokens=cfg.train.sample_tokens, stop_id=tokenizer.eod_id,
                how=Sampling(temperature=0.8, top_k=40), seed=cfg.train.seed,
            ))  # fmt: skip
        before, after = tokenizer.decode(prompt), tokenizer.decode(tokens)
        self.bar.console.rule(f"sample at step {step}", style="dim")
        self.bar.console.print(Text.assemble((before, "dim"), (after, "bold")))
        self.bar.console.rule(style="dim")
        with (self.directory / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(f"--- step {step}\n{before}|{after}\n")
        self.meter.skip()

    def _ask_to_stop(self) -> None:
        self.stop = True
        self.bar.console.print(
            "stopping after this step; Ctrl-C again to stop at once without saving"
        )


def load_run(directory: Path | str) -> tuple[Config, Any, Any, int]:
    """Reads a run's configuration, parameters (on one device), tokenizer and step.

    Raises:
      UserError: if the directory holds no run or no usable checkpoint.
    """
    directory = Path(directory)
    if not (directory / "config.yml").is_file():
        raise UserError(
            f"{directory} is not a run directory (it has no config.yml): name one, such as runs/NAME"
        )
    cfg = load_config(None, [f"config={directory / 'config.yml'}"])
    mesh = make_mesh(devices=jax.devices()[:1])
    with Checkpointer(directory / "checkpoints") as checkpointer:
        restored = checkpointer.restore(abstract_state(cfg, mesh))
    if restored is None:
        raise UserError(
            f"{directory} has no checkpoint yet: train it with {resume_command(directory)}"
        )
    return cfg, restored.state.params, load_tokenizer(directory / "tokenizer.json"), restored.step


def on_one_device(params: Any) -> Any:
    """Gathers parameters to the first local device; sampling one row cannot be spread over a batch axis."""
    return jax.device_put(jax.device_get(params), jax.local_devices()[0])


def peak_flops(cfg: Config, mesh) -> float:
    """Returns the matmul peak of the mesh's devices together, in FLOP/s.

    Simulated CPU devices share one machine, whose measured peak counts once; chips in the table count by their data
    sheet.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return hw.measure_matmul_peak(cfg.model.dtype)
    chip = hw.find_chip(device)
    kind = {"bfloat16": "bf16"}.get(cfg.model.dtype, "f32")
    if chip is None or kind not in chip.flops:
        return hw.measure_matmul_peak(cfg.model.dtype) * mesh.size
    return chip.peak(kind) * mesh.size


def resume_command(directory: Path | str) -> str:
    """Returns the command that resumes a run."""
    return f"minitext train config={Path(directory) / 'config.yml'}"


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turns a disk that is full or can't be written into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EROFS,
            errno.EACCES,
            errno.EPERM,
            errno.ENOTDIR,
            errno.EEXIST,
        ):
            raise UserError(
                f"cannot write to {directory} ({error.strerror}): checkpoints already saved are intact; make room or "
                f"choose another run.dir, then resume with: {resume_command(directory)}"
            ) from error
        raise


def _check_same_run(cfg: Config, directory: Path) -> None:
    """Refuses a directory that holds a run of another model or of other data."""
    if not (directory / "config.yml").is_file():
        return
    old = load_config(None, [f"config={directory / 'config.yml'}"])
    mine, theirs = _flat(cfg.model_dump()), _flat(old.model_dump())
    for key, value in mine.items():
        if not key.startswith(RESUMABLE) and theirs.get(key) != value:
            raise UserError(
                f"{directory} holds a run with {key}={theirs.get(key)}, not {value}: choose another run.name, or "
                f"resume it with: {resume_command(directory)}"
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def _introduce(cfg, mesh, directory, start, floor, console) -> None:
    shape = " x ".join(f"{a}={n}" for a, n in mesh.shape.items() if n > 1) or "1 device"
    console.print(
        f"[bold]{directory}[/]  {count_params(cfg.model) / 1e6:.1f}M parameters, {shape}, "
        f"{cfg.train.global_batch} x {cfg.data.seq_len} tokens a step, source {cfg.data.source}", highlight=False,
    )  # fmt: skip
    if floor:
        console.print(
            f"entropy rate of the source (no model can do better): {floor:.4f} nats/token",
            highlight=False,
        )
    if start >= cfg.train.steps:
        console.print(
            f"already trained to step {start}: set train.steps higher to go on, or another run.name"
        )
    elif start:
        console.print(f"resuming after step {start}")


@contextlib.contextmanager
def _on_interrupt(ask) -> Iterator[None]:
    """Calls `ask` at the first Ctrl-C; the second one interrupts as usual."""
    before = signal.getsignal(signal.SIGINT)

    def handle(*_):
        signal.signal(signal.SIGINT, before)
        ask()

    try:
        signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread (a notebook's widget, a test): no handler can be set
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def evaluate_run(directory: Path | str, overrides: list[str]) -> dict[str, Any]:
    """Measures a run's loss on all of its validation rows, or on other data that `overrides` name.

    Returns:
      `step`, `loss` in nats per token, `perplexity`, `bits_per_byte`, `tokens` (targets), and `floor`.
    """
    cfg, params, tokenizer, step = load_run(directory)
    cfg = load_config(None, [f"config={Path(directory) / 'config.yml'}", *overrides])
    mesh = make_mesh(devices=jax.devices()[:1])
    rows = make_batches(
        cfg.data, mesh, vocab=cfg.model.vocab, global_batch=cfg.train.global_batch, split="validation",
        tokenizer=tokenizer,
    )  # fmt: skip
    nll, tokens, size = 0.0, 0.0, 0
    eval_step = make_eval_step(cfg)
    with jax.set_mesh(mesh):
        for batch in track(
            rows, description="evaluating", console=Console(stderr=True), transient=True
        ):
            part, count = eval_step(params, batch)
            nll, tokens = nll + float(part), tokens + float(count)
            targets = jax.device_get(batch["targets"])[jax.device_get(batch["loss_mask"]) != 0]
            text = tokenizer.decode(targets)
            # Where a row cuts a character its bytes decode to U+FFFD, three bytes for one.
            size += len(text.encode()) - 2 * text.count("\ufffd")
    loss = nll / max(tokens, 1.0)
    return {
        "step": step, "loss": loss, "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nll / math.log(2) / max(size, 1), "tokens": int(tokens), "floor": rows.floor,
    }  # fmt: skip
