"""A live view of a run in the terminal, made from the files that the run writes.

It never contacts the training process, which may run on another machine that shares the disk. `read_status` reads the
run directory, and `draw_status` lays out what it found.

Chapters: 20.
"""

import contextlib
import itertools
import math
import shlex
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from minitext.config.config import load_config
from minitext.observability import goodput, metrics

BARS = "▁▂▃▄▅▆▇█"
POINTS = 60  # width of the loss curve, in characters
# A run is silent if it wrote nothing for so long, or for the time of ten steps if that is longer.
SILENT_SECONDS = 60.0
SILENT_COMPILING = 1800.0  # the limit before a job's first step


@dataclass(frozen=True)
class Status:
    """The state of a run.

    Attributes:
      directory: the run directory.
      state: `waiting` for the run to begin, `starting` (no step of this job yet), `running`, `silent` (overdue for a
        new line), `finished`, or `stopped` before its last step.
      quiet: seconds since the run wrote anything.
      step: the last recorded step.
      steps: number of steps of the whole run.
      eta: seconds that the remaining steps should take at the pace of the last ones, or None.
      metrics: the last step's record.
      losses: the loss of every step.
      val_loss: the last validation loss, or None; NaN and infinity as text.
      goodput: share of the wall time in steps that count, or None.
      checkpoint: step of the newest checkpoint, or None.
      checkpoint_age: seconds since it was written, or None.
    """

    directory: str
    state: Literal["waiting", "starting", "running", "silent", "finished", "stopped"]
    quiet: float = 0.0
    step: int = 0
    steps: int | None = None
    eta: float | None = None
    metrics: dict[str, Any] | None = None
    losses: tuple[float, ...] = ()
    val_loss: float | str | None = None
    goodput: float | None = None
    checkpoint: int | None = None
    checkpoint_age: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns everything except the losses, for json.dumps."""
        return {key: value for key, value in asdict(self).items() if key != "losses"}


def read_status(directory: Path | str, now: float | None = None) -> Status:
    """Reads the state of a run.

    Args:
      directory: the run directory, which need not exist yet.
      now: seconds since 1970; by default the current time.
    """
    directory, now = Path(directory), time.time() if now is None else now
    events = goodput.read_events(directory)
    if not events:
        return Status(str(directory), "waiting")
    lines = metrics.read_metrics(directory)
    last: dict[str, Any] = lines[-1] if lines else {}
    paths = directory / goodput.EVENTS, directory / metrics.FILE
    quiet = now - max(path.stat().st_mtime for path in paths if path.exists())
    config = directory / "config.yml"
    steps = load_config(None, [f"config={config}"]).train.steps if config.exists() else None
    step, pace = last.get("step", 0), _pace(lines)
    left = None if steps is None else steps - step
    saved = _checkpoints(directory)
    newest = max(saved, default=None)
    return Status(
        directory=str(directory),
        state=_state(events, left, quiet, pace),
        quiet=max(0.0, quiet),
        step=step,
        steps=steps,
        eta=None if left is None or pace is None else left * pace,
        metrics=last or None,
        losses=tuple(r["loss"] for r in lines if isinstance(r.get("loss"), float)),
        val_loss=next((r["val_loss"] for r in reversed(lines) if "val_loss" in r), None),
        goodput=goodput.account(events).goodput,
        checkpoint=newest,
        checkpoint_age=None if newest is None else max(0.0, now - saved[newest]),
    )


def _state(events: list[goodput.Event], left: int | None, quiet: float, pace: float | None) -> Any:
    if events[-1].event == "job_end":
        return "stopped" if left is None or left > 0 else "finished"
    job = events[max(i for i, e in enumerate(events) if e.event == "job_start" or i == 0) :]
    if not any(e.event == "step" for e in job):
        return "starting" if quiet < SILENT_COMPILING else "silent"
    return "running" if quiet < max(SILENT_SECONDS, 10 * (pace or 0.0)) else "silent"


def _pace(lines: list[dict[str, Any]]) -> float | None:
    """Mean seconds of the last twenty steps: enough that one slow step doesn't dominate."""
    times = [r["seconds"] for r in lines[-20:] if isinstance(r.get("seconds"), float)]
    return sum(times) / len(times) if times else None


def _checkpoints(directory: Path) -> dict[int, float]:
    """Step of each checkpoint -> when it was written."""
    folder = directory / "checkpoints"
    if not folder.is_dir():
        return {}
    found = {}
    for path in folder.iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(FileNotFoundError):  # training has just deleted it
                found[int(path.name)] = path.stat().st_mtime
    return found


def sparkline(values: tuple[float, ...], width: int = POINTS) -> str:
    """Draws values as block characters, each the mean of a stretch, scaled from the lowest mean to the highest."""
    values = tuple(filter(math.isfinite, values))
    if not values:
        return ""
    n = min(width, len(values))
    edges = [i * len(values) // n for i in range(n + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    rise = (high - low) or 1.0
    return "".join(BARS[round((mean - low) / rise * (len(BARS) - 1))] for mean in means)


def span(seconds: float) -> str:
    """Formats a duration for people, such as `2 h 05 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} days {whole % 86400 // 3600} h"


def draw_status(status: Status) -> Panel:
    """Lays out a status for the terminal."""
    says = {
        "waiting": "waiting for the run to begin",
        "starting": f"starting: no step of this job yet, {span(status.quiet)} since the last event",
        "running": "running",
        "silent": f"silent for {span(status.quiet)}: killed, hung, or on a disk that doesn't respond",
        "finished": "finished",
        "stopped": f"stopped; resume with: minitext train {shlex.quote(f'config={status.directory}/config.yml')}",
    }
    color = {"running": "green", "finished": "green", "silent": "red"}.get(status.state, "yellow")
    title, said = Text(status.directory, style="bold"), Text(says[status.state], style=color)
    if status.state == "waiting":
        return Panel(said, title=title)
    parts: list[Any] = [said]
    if status.steps:
        eta = "" if not status.eta else f"  {span(status.eta)} left"
        bar = Table.grid()  # a bar on its own doesn't end its line
        bar.add_row(ProgressBar(total=status.steps, completed=status.step, width=POINTS))
        parts += [Text(f"step {status.step:,} of {status.steps:,}{eta}"), bar]
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(status):
        table.add_row(Text(name, style="dim"), value)
    return Panel(Group(*parts, table, Text(metrics.MFU, style="dim")), title=title)


def _rows(status: Status) -> list[tuple[str, str]]:
    line, rows = status.metrics or {}, []

    def add(name: str, value: Any, form: str, scale: float = 1.0) -> None:
        if isinstance(value, (int, float)):
            rows.append((name, form.format(value * scale)))
        elif value is not None:  # NaN and infinity are stored as text
            rows.append((name, str(value)))

    add("loss", line.get("loss"), "{:.4f} nats/token")
    if status.losses:
        rows.append(("", sparkline(status.losses)))
    add("validation loss", status.val_loss, "{:.4f} nats/token")
    add("gradient norm", line.get("grad_norm"), "{:.3f}")
    add("tokens/s", line.get("tokens_per_second"), "{:,.0f}")
    add("step", line.get("seconds"), "{:,.1f} ms", 1e3)
    add("MFU", line.get("mfu"), "{:.1%}")
    if status.goodput is not None:
        rows.append(("goodput", f"{status.goodput:.1%}"))
    add("host memory", line.get("host_bytes"), "{:,.2f} GiB", 2**-30)
    add("device memory", line.get("device_bytes"), "{:,.2f} GiB", 2**-30)
    saved = "none yet"
    if status.checkpoint is not None and status.checkpoint_age is not None:
        saved = f"step {status.checkpoint:,}, {span(status.checkpoint_age)} ago"
    rows.append(("last checkpoint", saved))
    return rows


def watch(directory: Path | str, every: float = 1.0, console: Console | None = None) -> Status:
    """Shows a run, waiting for it if need be, until it ends or Ctrl-C is pressed. Returns its last status."""
    status, took = read_status(directory), 0.0
    with Live(draw_status(status), console=console, auto_refresh=False) as live:
        while status.state not in ("finished", "stopped"):
            time.sleep(max(every, 10 * took))  # reading a long run's files takes a while
            start = time.perf_counter()
            status = read_status(directory)
            took = time.perf_counter() - start
            live.update(draw_status(status), refresh=True)
    return status
