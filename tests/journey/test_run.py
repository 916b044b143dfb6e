"""The journey itself: refused before it begins, resumed wherever it was killed, and the same at its end."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minitext.errors import UserError
from minitext.journey import dial, lessons, report
from minitext.journey.run import STAGES, check_stages, run_journey
from minitext.journey.stages import QUANTIZED
from minitext.journey.trip import Result, Trip, thinned
from tests.conftest import QUICK_FLAGS

ALL = ("mesh.data=8",)  # the devices that tests have
TOKENS = 40  # for each parameter: enough for batches of eight rows


def trip_in(folder, depth=3, **more):
    more = {"settings": ALL} | more
    return Trip(folder, dial.recipe(depth, TOKENS), tuple(dial.study_of(depth, TOKENS)), **more)


def test_stages_run_in_their_order_whatever_they_are_named_in():
    assert check_stages(["serve", "data", "sft"]) == ("data", "sft", "serve")
    assert check_stages([]) == tuple(STAGES)
    with pytest.raises(
        UserError, match=r"--stages sftt: no stage has this name \(did you mean sft\?\)"
    ):
        check_stages(["sftt"])


def test_every_stage_has_a_section_and_a_title():
    assert set(report.SECTIONS) == set(report.TITLES) == set(STAGES)


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["evaluate"], "evaluate needs what data, tokenizer, scaling, pretrain leave"),
        (["data", "scaling"], "scaling needs what tokenizer leave"),
    ],
)  # fmt: skip
def test_stages_without_what_they_need_are_refused_and_leave_nothing(tmp_path, names, fault):
    with pytest.raises(UserError, match=fault):
        run_journey(trip_in(tmp_path / "j"), names)
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize(
    "settings", [("data.source=files", "data.path=/nowhere"), ("mesh.data=1", "mesh.tensor=7")]
)
def test_text_and_meshes_are_checked_before_anything_is_written(tmp_path, settings):
    with pytest.raises(UserError):
        run_journey(trip_in(tmp_path / "j", settings=settings))
    assert not (tmp_path / "j").exists()


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"has files in it and no journey.json"):
        run_journey(trip_in(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_first_stages_run_once_and_another_dial_is_refused(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(f"number {number} of 1234 lines, and no other\n" * 400)
    words = (*ALL, "data.source=files", f"data.path={text}")
    trip = trip_in(tmp_path / "j", settings=words, quick=True)
    page = run_journey(trip, ["data", "tokenizer"])
    before = {path: path.stat().st_mtime_ns for path in trip.directory.glob("*/stage.json")}
    assert len(before) == 2 and "<h2>Tokenizer</h2>" in page.read_text()
    run_journey(trip, ["data", "tokenizer"])
    assert before == {path: path.stat().st_mtime_ns for path in trip.directory.glob("*/stage.json")}
    assert trip.figures("tokenizer")["example"][-6:] == ["3", "7", "+", "5", "8", "?"]
    with pytest.raises(
        UserError, match="holds a journey of depth 3 with a different recipe and study"
    ):
        run_journey(trip_in(tmp_path / "j", 4, settings=words, quick=True))
    (trip.of("data") / "stage.json").write_text("[]")
    with pytest.raises(UserError, match=r"is not what was written: delete it"):
        run_journey(trip)


def test_attempts_keep_their_time_also_those_that_were_killed(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2]); from tests.journey.test_run import trip_in;"
        "from pathlib import Path; t = trip_in(Path(sys.argv[1]));\n"
        "with t.attempt('data'): print('in', flush=True); time.sleep(60)"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), root], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    time.sleep(1.5)
    process.kill()
    process.wait()
    trip = trip_in(tmp_path)
    with trip.attempt("data"):
        pass
    with pytest.raises(KeyError), trip.attempt("data"):
        raise KeyError
    killed, whole, failed = trip.attempts()
    assert (killed.done, whole.done, failed.done) == (False, True, False)
    assert 0.4 < killed.seconds < 30 and whole.seconds < 5


def test_results_are_read_as_they_were_written(tmp_path):
    trip = trip_in(tmp_path)
    trip.of("data").mkdir()
    assert trip.result("data") is None
    trip.write("data", Result({"bytes": 3}, {"a": 0.5}))
    assert trip.result("data") == Result({"bytes": 3}, {"a": 0.5})
    with pytest.raises(UserError, match="stage tokenizer of .* is not done"):
        trip.figures("tokenizer")


@pytest.mark.parametrize("count", [0, 1, 160, 161, 1000])
def test_thinned_curves_end_where_they_ended(count):
    found = thinned(list(range(count)))
    assert len(found) <= 160 and found[-1:] == list(range(count))[-1:]
    assert all(a < b for a, b in itertools.pairwise(found))


def test_no_held_out_sum_is_taught(tmp_path):
    counts = lessons.write_lessons(tmp_path, 9000)
    held_out = {record["prompt"] for record in lessons.questions("validation")}
    for name in (lessons.TAUGHT, lessons.SUMS):
        seen = {json.loads(line)["prompt"] for line in (tmp_path / name).read_text().splitlines()}
        assert len(seen) == counts["train"] and not seen & held_out
    assert len(held_out) == counts["held_out"]


# --- the whole way


def command(folder, **more):
    words = ["journey", "--depth", "3", "--quick", "--run", str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS}
    return subprocess.Popen([sys.executable, "-m", "minitext", *words], env=environment, **more)


def figures(folder):
    return json.loads((folder / "report.json").read_text())["figures"]


@pytest.mark.audit
@pytest.mark.timeout(7200)
def test_killed_at_five_random_moments_it_ends_with_the_same_report(tmp_path):
    """Also: every stage leaves what it should, and no server is left behind."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert command(straight).wait() == 0
    rng, names, kills = random.Random(int(time.time())), list(STAGES), []
    for name in sorted(rng.sample(names, 5), key=names.index):
        process, after = command(killed), rng.uniform(0, 3)
        while not (killed / name).exists():
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(after)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        kills.append((name, round(after, 2)))
    print("killed in stages, after seconds:", kills)
    assert command(killed).wait() == 0
    assert figures(killed) == figures(straight)
    times = json.loads((killed / "report.json").read_text())["times"]["stages"]
    assert sum(t["interrupted"] for t in times.values()) >= 1
    for name in STAGES:
        assert f'id="{name}"' in (killed / "report.html").read_text()
    assert (killed / "prediction.json").stat().st_mtime < (
        killed / "pretrain" / "stage.json"
    ).stat().st_mtime
    assert (killed / "quantize" / QUANTIZED[0] / "config.yml").exists()
    time.sleep(5)
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(p)]
    assert not left


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""
