"""What a run records: `metrics.jsonl`, TensorBoard events, and the text of the progress bar.

Chapters: 6, 20.
"""

import contextlib
import json
import math
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from minitext import files


class MetricsWriter(AbstractContextManager):
    """Appends one JSON object per step to `metrics.jsonl` and the same scalars to TensorBoard.

    Args:
      directory: the run directory.
      after_step: the step that a resumed run starts from. Lines of later steps are removed, because this run will write
        those steps again, and so is a half-written last line.
    """

    def __init__(self, directory: Path, after_step: int = 0):
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.path = Path(directory) / FILE
        kept = [r for r in read_metrics(directory) if r["step"] <= after_step]
        files.write(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self._file = self.path.open("a", encoding="utf-8")
        events = Path(directory) / "tensorboard"
        events.mkdir(exist_ok=True)
        # Not EventFileWriter: its thread would keep a full disk to itself until the run ends.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._events = RecordWriter((events / name).open("xb"))
        self._proto: Any = event_pb2  # its classes are created at import
        self._write_event(file_version="brain.Event:2")
        # Makes TensorBoard discard what an earlier, killed process wrote for these steps.
        started = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._write_event(step=after_step + 1, session_log=started)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one step's record, which has at least `step`; NaN and infinity become strings."""
        safe = {
            k: v if not isinstance(v, float) or math.isfinite(v) else str(v)
            for k, v in record.items()
        }
        self._file.write(json.dumps(safe) + "\n")
        self._file.flush()
        summary = self._proto.Event().summary
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                summary.value.add(tag=name, simple_value=value)
        self._write_event(step=record["step"], summary=summary)

    def _write_event(self, **fields: Any) -> None:
        event = self._proto.Event(wall_time=time.time(), **fields)
        self._events.write(event.SerializeToString())
        self._events.flush()

    def close(self) -> None:
        """Closes both files."""
        self._file.close()
        self._events.close()

    def __exit__(self, *_):
        self.close()


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects in a file of JSON lines, skipping any other line, such as one that a kill cut off."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def read_metrics(directory: Path | str) -> list[dict[str, Any]]:
    """Reads the records of a run's `metrics.jsonl`, skipping lines without a step."""
    records = read_json_lines(Path(directory) / FILE)
    return [record for record in records if isinstance(record.get("step"), int)]


FILE = "metrics.jsonl"
MFU = "MFU = model FLOPs of a step / (seconds of the step x peak FLOP/s of all devices)"


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Returns the model FLOPs utilisation (Chowdhery et al. 2022, appendix B); the whole package uses this formula.

    MFU = model FLOPs of a step / (seconds of the step x peak FLOP/s of all devices).

    Args:
      flops: of one step, from `minitext.models.flops.count_flops`: forward and backward, half of the attention square,
        without the recomputation of rematerialisation.
      seconds: from the end of one step to the end of the next, including the wait for data.
      peak: dense matmul FLOP/s of all devices together, in the model's compute dtype.
    """
    return flops / seconds / peak


class Meter:
    """Converts the time between steps to rates.

    Args:
      tokens: tokens in a step.
      flops: model FLOPs of a step.
      peak: FLOP/s of all devices together, or None if unknown.
    """

    def __init__(self, tokens: int, flops: float, peak: float | None):
        self.tokens, self.flops, self.peak = tokens, flops, peak
        self._last = time.perf_counter()

    def lap(self, steps: int = 1) -> dict[str, float]:
        """Returns the mean rates of the `steps` steps since the last lap.

        Returns:
          `seconds` of a step, `tokens_per_second` and, with a known peak, `mfu`.
        """
        now = time.perf_counter()
        seconds, self._last = (now - self._last) / steps, now
        rates = {"tokens_per_second": self.tokens / seconds, "seconds": seconds}
        return rates | ({"mfu": mfu(self.flops, seconds, self.peak)} if self.peak else {})

    def skip(self) -> None:
        """Leaves out the time since the last lap, for work that isn't a step, such as sampling text."""
        self._last = time.perf_counter()


class MemoryReader:
    """Reads memory use, at most once a second: a reading took 0.3 ms on an AMD EPYC whose cores all computed."""

    def __init__(self) -> None:
        self._read, self._found = -math.inf, {}

    def in_use(self) -> dict[str, int]:
        """Returns this process's `host_bytes` and, if it is known, the first device's peak as `device_bytes`."""
        now = time.monotonic()
        if now - self._read > 1.0:
            import jax
            import psutil

            stats = jax.local_devices()[0].memory_stats() or {}
            self._read, self._found = now, {"host_bytes": psutil.Process().memory_info().rss}
            if "peak_bytes_in_use" in stats:
                self._found["device_bytes"] = stats["peak_bytes_in_use"]
        return self._found


def progress_bar(console: Console) -> Progress:
    """Returns the training progress bar: steps, loss, speed, utilisation and time left."""
    return Progress(
        TextColumn("[bold]step {task.completed}/{task.total}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        refresh_per_second=4,
    )


def status_line(record: Mapping[str, float], floor: float | None = None) -> str:
    """Returns the progress bar's text, e.g. `loss 1.42  18,304 tokens/s  MFU 41%`.

    For a mixture of experts, `load` is what the least and the most loaded expert of any layer got, as a fraction of an
    even share.
    """
    parts = [f"loss {record['loss']:.3f}"]
    if floor is not None:
        parts[0] += f" (floor {floor:.3f})"
    if "val_loss" in record:
        parts.append(f"val {record['val_loss']:.3f}")
    if "margin" in record:
        parts.append(f"margin {record['margin']:.3f}  accuracy {record['accuracy']:.0%}")
    if "reward" in record:
        parts.append(f"reward {record['reward']:.3f}  correct {record['correct']:.0%}")
        parts.append(f"{record['answer_tokens']:.0f} tokens an answer")
        parts += [f"{name} {record[name]:.3f}" for name in ("kl", "entropy") if name in record]
    if "expert_load_max" in record:
        low, high = record["expert_load_min"], record["expert_load_max"]
        parts.append(f"load {low:.2f}-{high:.2f}")
        if record["dropped"]:
            parts[-1] += f", {record['dropped']:.1%} dropped"
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.0%}")
    return "  ".join(parts)
