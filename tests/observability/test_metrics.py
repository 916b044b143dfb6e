"""What a run records, and what a killed run leaves half-written."""

import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from minitext.observability.metrics import (
    MemoryReader,
    Meter,
    MetricsWriter,
    read_metrics,
    status_line,
)


def test_written_lines_are_read_back(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.write({"step": step, "loss": 1.5 / step})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 0.75}]


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path):
    """Also when it resumes within the second in which it was killed."""
    for after, steps in ((0, (1, 2, 3, 4)), (2, (3, 4))):
        with MetricsWriter(tmp_path, after_step=after) as writer:
            for step in steps:
                writer.write({"step": step, "loss": after + step / 4, "lr": 10**40, "note": "x"})
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert curves.Tags()["scalars"] == ["loss", "lr"]
    found = [(event.step, event.value) for event in curves.Scalars("loss")]
    assert found == [(1, 0.25), (2, 0.5), (3, 2.75), (4, 3.0)]


def test_resuming_removes_later_and_half_written_lines(tmp_path):
    lines = [json.dumps({"step": s, "loss": 1.0}) for s in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "lo')
    assert len(read_metrics(tmp_path)) == 4
    with MetricsWriter(tmp_path, after_step=2) as writer:
        writer.write({"step": 3, "loss": 2.0})
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_numbers_that_json_lacks_become_text(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": "nan", "grad_norm": "inf"}]


@given(
    st.lists(
        st.binary(max_size=20) | st.sampled_from([b"[1]", b'{"step": "x"}', b"{}", b"9" * 9999])
    )
)
def test_lines_that_are_not_a_step_s_are_skipped(lines):
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"step": 7}']))
        assert read_metrics(directory) == [{"step": 7}]


def test_a_missing_file_means_no_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").rmdir()
    assert read_metrics(tmp_path) == []


def test_meter_divides_work_by_time(monkeypatch):
    clock = iter([10.0, 12.0, 20.0, 21.0, 24.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter = Meter(tokens=100, flops=60.0, peak=120.0)
    assert meter.lap() == {"seconds": 2.0, "tokens_per_second": 50.0, "mfu": 0.25}
    meter.skip()
    assert meter.lap()["seconds"] == 1.0
    assert meter.lap(steps=3) == {"seconds": 1.0, "tokens_per_second": 100.0, "mfu": 0.5}


@pytest.mark.parametrize("floor", [None, 0.5])
def test_status_line_shows_what_is_known(floor):
    line = status_line({"loss": 1.25, "tokens_per_second": 1234.5, "mfu": 0.5}, floor)
    assert "loss 1.250" in line and "1,234 tokens/s" in line and "MFU 50%" in line
    assert ("floor 0.500" in line) == (floor is not None)


def test_status_line_shows_what_a_model_prefers():
    line = status_line({"loss": 0.5, "margin": 1.25, "accuracy": 0.875, "tokens_per_second": 10.0})
    assert "margin 1.250  accuracy 88%" in line


def test_status_line_shows_the_load_of_experts():
    record = {
        "loss": 1.0,
        "tokens_per_second": 1.0,
        "expert_load_min": 0.5,
        "expert_load_max": 1.75,
    }
    assert "load 0.50-1.75  1 tokens/s" in status_line({**record, "dropped": 0.0})
    assert "load 0.50-1.75, 2.5% dropped" in status_line({**record, "dropped": 0.025})


def test_memory_is_read_once_a_second(monkeypatch):
    clock = iter([10.0, 10.9, 11.1])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    held = iter([3, 5])
    monkeypatch.setattr(
        "psutil.Process",
        lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(held))),
    )
    reader = MemoryReader()
    assert [reader.in_use()["host_bytes"] for _ in range(3)] == [3, 3, 5]


def test_a_process_holds_more_than_jax_alone_takes():
    assert MemoryReader().in_use()["host_bytes"] > 2**26
