"""Watching: what a run's files say about it at each point of its life."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from minitext.config.config import load_config, to_yaml
from minitext.observability import watch
from minitext.observability.watch import BARS, read_status, span, sparkline


def write(directory, steps=10, written=0, last=("step",), began=1000.0, age=5.0, **more):
    """A run directory with a line and an event for each one-second step; the newest file is `age` seconds old."""
    directory.mkdir(exist_ok=True)
    (directory / "config.yml").write_text(to_yaml(load_config("laptop", [f"train.steps={steps}"])))
    events = [("job_start", None), *(("step", n) for n in range(1, written + 1))]
    events += [(name, None) for name in last if name != "step"]
    rows = [
        {"event": e, "start": began + i, "seconds": 1.0, "step": n}
        for i, (e, n) in enumerate(events)
    ]
    lines = [
        {"step": n, "loss": 5.0 / n, "seconds": 1.0, "tokens_per_second": 640.0, "mfu": 0.5}
        for n in range(1, written + 1)
    ]
    if lines:
        lines[-1] |= more
    now = began + len(events)
    for name, records in (("events.jsonl", rows), ("metrics.jsonl", lines)):
        path = directory / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        os.utime(path, (now - age, now - age))
    return directory, now


def text(status):
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(watch.draw_status(status))
    return console.export_text()


def test_a_run_that_has_not_begun_is_waited_for(tmp_path):
    status = read_status(tmp_path / "none")
    assert status.state == "waiting" and "waiting for the run" in text(status)


@pytest.mark.parametrize(
    ("written", "last", "age", "state"),
    [
        (0, (), 100, "starting"),  # compiling may take long
        (0, (), 7200, "silent"),
        (4, (), 5, "running"),
        (4, (), 59, "running"),
        (4, (), 61, "silent"),
        (4, ("job_end",), 7200, "stopped"),
        (10, ("job_end",), 7200, "finished"),
    ],
)
def test_the_state_follows_from_what_was_written_and_when(tmp_path, written, last, age, state):
    status = read_status(*write(tmp_path, written=written, last=last, age=age))
    assert (status.state, status.step, status.steps) == (state, written, 10)
    assert status.quiet == pytest.approx(age)
    says = text(status)
    assert {"stopped": "resume with", "silent": "silent for"}.get(state, state) in says


def test_slow_steps_may_be_silent_for_longer(tmp_path):
    status = read_status(*write(tmp_path, written=4, age=100, seconds=600.0))
    assert status.state == "running"  # the mean of the last steps is 150 s


def test_a_frame_shows_everything(tmp_path):
    directory, now = write(
        tmp_path, written=4, host_bytes=3 * 2**30, device_bytes=2**34, val_loss=1.5
    )
    for name in ("2", "4", "3.1.tmp"):
        (directory / "checkpoints" / name).mkdir(parents=True)
        os.utime(directory / "checkpoints" / name, (now - 90, now - 90))
    status = read_status(directory, now)
    assert status.eta == 6.0 and status.checkpoint == 4
    says = text(status)
    for words in (
        "step 4 of 10", "6 s left", "1.2500 nats", "1.5000 nats", "640", "50.0%", "80.0%", "3.00 GiB", "16.00 GiB",
        "step 4, 1 min 30 s ago", "MFU = model FLOPs", BARS[-1], BARS[0],
    ):  # fmt: skip
        assert words in says, words
    assert json.loads(json.dumps(status.to_json()))["goodput"] == 0.8


def test_a_loss_that_is_not_a_number_is_shown(tmp_path):
    status = read_status(*write(tmp_path, written=3, loss="nan", val_loss="inf"))
    assert " nan" in text(status) and " inf" in text(status) and len(status.losses) == 2


def test_a_directory_in_brackets_is_shown_as_it_is(tmp_path):
    (tmp_path / "[old" / "a[").mkdir(parents=True)
    directory, now = write(tmp_path / "[old" / "a[" / "b]", written=1)
    assert "/[old/a[/b]" in text(read_status(directory, now))


def test_a_checkpoint_that_is_deleted_meanwhile_does_not_count(tmp_path, monkeypatch):
    directory, now = write(tmp_path, written=4)
    for name in "24":
        (directory / "checkpoints" / name).mkdir(parents=True)

    def until_it_is_gone(folder):
        yield from [folder / "2", folder / "4"]

    monkeypatch.setattr(watch.Path, "iterdir", until_it_is_gone)
    (directory / "checkpoints" / "2").rmdir()
    assert read_status(directory, now).checkpoint == 4


def test_it_follows_a_run_to_its_end(tmp_path, monkeypatch):
    """The run begins after the watch, and trains between two readings."""
    looks = iter([
        lambda: write(tmp_path, written=0), lambda: write(tmp_path, written=6),
        lambda: write(tmp_path, written=10, last=("job_end",)),
    ])  # fmt: skip
    monkeypatch.setattr(watch.time, "sleep", lambda _: next(looks)())
    console = Console(width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    assert watch.watch(tmp_path, console=console).state == "finished"
    assert next(looks, None) is None


@given(
    st.lists(st.floats(-1e100, 1e100) | st.sampled_from([float("nan"), float("inf")])),
    st.integers(1, 80),
)
def test_a_curve_is_never_longer_than_its_line(values, width):
    found = sparkline(tuple(values), width)
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    assert len(found) == min(width, len(finite)) and set(found) <= set(BARS)


def test_a_curve_falls_where_the_loss_does():
    assert sparkline(tuple(range(8, 0, -1))) == BARS[::-1]


def test_durations_are_readable():
    shown = [span(s) for s in (0.4, 59.9, 60, 3599, 3600, 2 * 86400 + 3600)]
    assert shown == ["0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 days 1 h"]
