"""The ledger and its account: shares sum to the wall time, whatever a kill or a clock change did to the lines."""

import datetime
import itertools
import json
import math
import os
import sys
import types

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from minitext.errors import UserError
from minitext.observability import goodput, goodput_export
from minitext.observability.goodput import KINDS, Event, Ledger, account, measure, read_events
from minitext.training import run

WRITTEN = sorted(set(KINDS) - {"lost", "other", "idle"})


def job(start, *events, began=1.0):
    """A job's start followed by contiguous events of the given kinds, seconds and steps."""
    found = [Event("job_start", start, began)]
    for kind, seconds, step in events:
        last = found[-1]
        found.append(Event(kind, last.start + last.seconds, seconds, step))
    return found


def steps(first, last, seconds=2.0):
    return [("step", seconds, n) for n in range(first, last + 1)]


events = st.lists(
    st.builds(
        Event,
        st.sampled_from(WRITTEN),
        st.floats(0, 1e4),
        st.floats(0, 1e3),
        st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=30,
)


@given(events)
def test_shares_sum_to_the_wall_time_whatever_the_clock_did(events):
    """Events overlap here, leave gaps and run backwards."""
    found = account(events)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert math.isclose(sum(found.seconds.values()), found.wall, abs_tol=1e-6)
    assert found.wall == 0 or math.isclose(sum(map(found.share, KINDS)), 1)
    assert 0 <= found.goodput <= 1
    assert math.isclose(sum(s.seconds for s in found.spans), found.wall, abs_tol=1e-6)
    assert found.jobs == max(1, sum(e.event == "job_start" for e in events[1:]) + 1)


@given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 10), st.floats(0, 100))
def test_only_what_a_kill_undid_is_lost(done, saved, more, idle):
    saved = min(saved, done)
    first = job(0.0, *steps(1, done))
    second = job(
        first[-1].start + 2 + idle, ("restore", 0.5, saved), *steps(saved + 1, done + more)
    )
    found = account(first + second)
    assert found.lost_steps == done - saved and found.steps == done + more
    assert math.isclose(found.seconds["lost"], 2.0 * (done - saved))
    assert math.isclose(found.seconds["step"], 2.0 * (done + more))
    assert math.isclose(found.seconds["idle"], idle, abs_tol=1e-6)
    assert found.jobs == 2


def test_utilisation_covers_only_steps_although_the_first_line_includes_a_compilation():
    """At peak speed a step takes 0.5 s. Here it takes 2 s, and the first line includes 30 s of compilation."""
    lines = [{"step": n, "seconds": s, "mfu": 0.5 / s} for n, s in ((1, 32.0), (2, 2.0), (3, 2.0))]
    found = account(job(0, ("compile", 30.0, 1), *steps(1, 3)), lines)
    assert math.isclose(found.mfu, 0.25)
    assert math.isclose(found.mfu_of_wall, 3 * 0.5 / found.wall)
    assert account(job(0, ("compile", 30.0, 1)), lines).mfu is None


def test_steps_are_lost_to_the_later_job_that_goes_back_furthest():
    jobs = job(0.0, *steps(1, 8)), job(100.0, *steps(7, 9)), job(200.0, *steps(5, 10))
    found = account([event for one in jobs for event in one])
    # Steps 5 to 8 of the first job are repeated, and all of the second.
    assert (found.lost_steps, found.steps) == (7, 10)


def test_a_job_that_begins_before_the_last_one_ended_leaves_no_idle_time():
    found = account(job(1000.0, *steps(1, 3)) + job(10.0, *steps(4, 6)))
    assert found.seconds["idle"] == 0 and found.wall == 2 * (1 + 3 * 2)


@given(st.data())
def test_any_cut_of_the_file_leaves_the_lines_before_it(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("cut")
    whole = job(5.0, *steps(1, 4))
    text = "".join(json.dumps(event._asdict()) + "\n" for event in whole).encode()
    at = data.draw(st.integers(0, len(text)))
    (directory / goodput.EVENTS).write_bytes(text[:at])
    ends_whole = text[at : at + 1] == b"\n"  # only the end of the line is missing
    kept = whole[: text[:at].count(b"\n") + ends_whole]
    assert read_events(directory) == kept
    # The next job's ledger continues below, and the cut-off line doesn't swallow its first line.
    with Ledger(directory):
        pass
    names = [event.event for event in read_events(directory)]
    assert names == [*(event.event for event in kept), "job_start", "job_end"]


@pytest.mark.parametrize(
    "line",
    ["", "[]", "null", '{"event": "step"}', '{"event": "lunch", "start": 1, "seconds": 1}', "\0\0",
     '{"event": "step", "start": 1, "seconds": NaN}', '{"event": "step", "start": 1, "seconds": -1}'],
)  # fmt: skip
def test_lines_that_are_not_events_are_skipped(tmp_path, line):
    good = '{"event": "step", "start": 1.0, "seconds": 2.0, "step": 3}'
    (tmp_path / goodput.EVENTS).write_text(f"{line}\n{good}\n{line}")
    assert read_events(tmp_path) == [Event("step", 1.0, 2.0, 3)]


def test_events_are_contiguous_and_short_ones_count_toward_the_next(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(goodput.time, "time", lambda: 1100.0)
    with Ledger(tmp_path) as ledger:
        for seconds, event in ((2.0, "compile"), (0.0005, "save"), (0.9995, "step")):
            now[0] += seconds
            ledger.lap(event, 1)
    found = read_events(tmp_path)
    assert [e.event for e in found] == ["job_start", "compile", "step", "job_end"]
    for before, after in itertools.pairwise(found):
        assert math.isclose(before.start + before.seconds, after.start)
    assert found[0].start == 1100.0
    assert [e.seconds for e in found] == pytest.approx([0, 2, 1, 0])


def test_a_wait_belongs_to_the_step_while_the_device_computes(tmp_path):
    class Busy:
        def is_ready(self):
            return False

    with Ledger(tmp_path, began=1.0) as ledger:
        ledger.lap("data_wait", 1, Busy())
        ledger.lap("step", 1, jax.numpy.ones(()).block_until_ready())
    assert [e.event for e in read_events(tmp_path)] == ["job_start", "step", "job_end"]


def test_other_processes_write_nothing(tmp_path):
    with Ledger(tmp_path, writes=False) as ledger:
        ledger.lap("step", 1)
    assert not list(tmp_path.iterdir())


def test_lines_are_written_together(tmp_path, monkeypatch):
    calls = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda *args: calls.append(args) or write(*args))
    with Ledger(tmp_path) as ledger:
        before = len(calls)
        for step in range(1000):
            ledger.lap("step", step)
        assert len(calls) - before < 100  # once a second
    assert sum(e.event == "step" for e in read_events(tmp_path)) == 1000


# --- a run


@pytest.fixture(scope="module")
def resumed(tiny, tmp_path_factory):
    """A run of seven steps that lost its checkpoint of step 6, so a second job resumed after step 3."""
    import shutil

    quick = [
        "model.layers=1",
        "train.save_every=3",
        "train.eval_every=4",
        "train.eval_batches=1",
        "run.name=a",
    ]
    directory = tmp_path_factory.mktemp("runs")
    cfg = tiny(*quick, f"run.dir={directory}", "train.steps=6")
    path = run.train(cfg, Console(quiet=True))
    shutil.rmtree(path / "checkpoints" / "6")
    run.train(cfg.replace({"train.steps": 7}), Console(quiet=True))
    return path


def test_the_loop_records_what_it_did(resumed):
    found = measure(resumed)
    assert (found.jobs, found.steps, found.lost_steps) == (2, 7, 3)
    for kind in ("step", "lost", "compile", "evaluation", "save", "restore", "init", "job_start"):
        assert found.seconds[kind] > 0, kind
    assert found.seconds["other"] < 1e-3  # only rounding: the loop's events leave no gap
    assert found.mfu is not None and 0 < found.mfu_of_wall < found.mfu
    starts = [e.start for e in read_events(resumed)]
    assert starts == sorted(starts)


def test_goodput_is_printed_as_json_and_drawn(resumed, capsys, tmp_path):
    from minitext.cli import watching

    watching.goodput(str(resumed), None, None, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (
        math.isclose(sum(told["shares"].values()), 1) and told["goodput"] == told["shares"]["step"]
    )
    watching.goodput(str(resumed), str(tmp_path / "goodput.svg"), None, as_json=False)
    assert "MFU = model FLOPs" in capsys.readouterr().out
    assert "goodput" in (tmp_path / "goodput.svg").read_text()


def test_an_unreadable_ledger_is_a_one_line_error(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"\xff\n[1]\n")
    with pytest.raises(UserError, match="no event that can be read"):
        measure(tmp_path)


def test_a_directory_without_a_ledger_is_a_one_line_error(tmp_path):
    for ask in (measure, lambda directory: goodput_export.replay(directory, None)):
        with pytest.raises(UserError, match="runs/NAME"):
            ask(tmp_path)


# --- ml-goodput-measurement; its recorder has these methods in 0.2


class Recorder:
    """Records the calls; the library itself isn't installed here."""

    METHODS = ("job_start", "job_end", "step_start", "tpu_init_start", "tpu_init_end", "data_loading_start",
               "data_loading_end", "training_preparation_start", "training_preparation_end",
               "custom_badput_event_start", "custom_badput_event_end")  # fmt: skip

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        method = name.removeprefix("record_").removesuffix("_time")
        assert method in self.METHODS
        return lambda *args: self.calls.append((method, *args))


def test_the_ledger_is_replayed_in_order(resumed):
    recorder = Recorder()
    assert goodput_export.replay(resumed, recorder) == len(read_events(resumed))
    names = [call[0] for call in recorder.calls]
    assert names.count("job_start") == names.count("job_end") == 2
    assert [call[1] for call in recorder.calls if call[0] == "step_start"] == [
        1, 2, 3, 4, 5, 6, 4, 5, 6, 7,
    ]  # fmt: skip
    for kind in ("tpu_init", "data_loading", "training_preparation", "custom_badput_event"):
        assert names.count(f"{kind}_start") == names.count(f"{kind}_end")
    times = [next(a for a in call[1:] if hasattr(a, "tzinfo")) for call in recorder.calls]
    rounding = datetime.timedelta(microseconds=2)
    assert all(before <= after + rounding for before, after in itertools.pairwise(times))


def test_without_the_library_recording_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_goodput_measurement", None)
    exceptions = types.ModuleType("google.auth.exceptions")
    exceptions.DefaultCredentialsError = OSError
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", exceptions)
    with pytest.raises(UserError, match=r"pip install 'minitext\[goodput\]'"):
        goodput_export.make_recorder("a")
