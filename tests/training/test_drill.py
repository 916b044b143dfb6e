"""A drill on real jobs: every second has a cause, nothing is lost that mustn't be, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from minitext.errors import UserError
from minitext.observability.downtime import Attempt, Strike, account
from minitext.observability.goodput import Event
from minitext.perf.figures import plot_downtime
from minitext.training import drill, faults
from tests.conftest import QUICK_FLAGS

ROOT = Path(__file__).parents[2]


def start_drill(folder, *words):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS}
    command = [sys.executable, "-m", "minitext", "drill", "--devices", "1", *map(str, words)]
    return subprocess.Popen(
        [*command, f"run.dir={folder}", "run.name=run"], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def left_of(folder):
    """Processes that name the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:  # it has ended
            continue
    return found


def check(found, save_every):
    assert found["failures"] == [] and found["curve_equal"] and found["state_equal"]
    assert found["accounted"] >= 0.98
    assert sum(found["seconds"].values()) == pytest.approx(found["wall"])
    for one in found["faults"]:
        if one["kind"] in ("slow", "freeze") and one["over"] is not None:
            assert one["repeated"] == 0 and one["noticed"] is None
        else:
            assert one["repeated"] <= save_every * (2 if one["kind"] == "tear" else 1)
            assert one["kind"] == "unplanned" or 0 <= one["seconds_to_notice"] < 90


@pytest.mark.audit
@pytest.mark.timeout(600)
def test_a_kill_and_a_slow_spell(tmp_path):
    process = start_drill(
        tmp_path, "--processes", 1, "--faults", 2, "--kinds", "kill,slow", "--seed", 1,
        "train.save_every=5", "--json", "--plot", tmp_path / "drill.svg",
    )  # fmt: skip
    out, err = process.communicate()
    assert process.returncode == 0, err
    found = json.loads(out)
    check(found, 5)
    assert sorted(one["kind"] for one in found["faults"]) == ["kill", "slow"]
    assert found["steps"] == faults.least_steps(2, 5) and found["seconds"]["start-up"] > 0
    (slow,) = [one for one in found["faults"] if one["kind"] == "slow"]
    assert slow["seconds"].keys() <= {"slow"} and slow["over"] > slow["at"]
    assert json.loads((tmp_path / "run" / drill.RECORD).read_text()) == found
    assert (tmp_path / "drill.svg").read_text().count("kill") and not left_of(tmp_path)
    assert "fault 2 of 2" in err and "Traceback" not in err


@pytest.mark.audit
@pytest.mark.timeout(7200)
def test_fifty_faults_lose_nothing_beyond_the_interval(tmp_path):
    process = start_drill(tmp_path, "--faults", 50, "--seed", time.time_ns() % 10**6, "--json")
    out, err = process.communicate()
    assert process.returncode == 0, out[-3000:] + err
    found = json.loads(out)
    check(found, 10)
    planned = [one for one in found["faults"] if one["kind"] != "unplanned"]
    assert len(planned) == 50 and {one["kind"] for one in planned} == set(faults.KINDS)
    assert not left_of(tmp_path)


@pytest.mark.audit
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_drill_that_is_ended_leaves_no_process(tmp_path, number):
    process = start_drill(tmp_path, "--faults", 3, "--kinds", "freeze", "--seed", 5)
    for line in process.stderr:
        if line.startswith("fault "):
            break
    processes = left_of(tmp_path)
    assert any(one.status() == psutil.STATUS_STOPPED for one in processes)
    process.send_signal(number)
    code = process.wait(timeout=60)
    assert code == {signal.SIGINT: 130, signal.SIGKILL: -9}.get(number, 128 + signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive and not left_of(tmp_path)


@pytest.mark.audit
@pytest.mark.timeout(900)
def test_a_job_that_fails_without_a_fault_is_refused(tmp_path):
    words = ["--processes", 1, "--faults", 1, "optim.learning_rate=1e30"]
    process = start_drill(tmp_path, *words)
    _, err = process.communicate()
    assert process.returncode == 2 and "the job fails without a fault: " in err.splitlines()[-1], (
        err
    )
    assert not left_of(tmp_path)


@pytest.mark.parametrize("code, kept", [(2, []), (3, []), (1, ["run"])])
def test_what_training_refuses_leaves_no_folder_and_a_crash_leaves_its_output(
    tmp_path, monkeypatch, code, kept
):
    program = f"import sys; print('error: no such mesh', file=sys.stderr); sys.exit({code})"
    monkeypatch.setattr(faults, "PROGRAM", ("-c", program))
    with pytest.raises(UserError, match="no such mesh"):
        drill.drill(["mesh.fsdp=3"], tmp_path / "runs" / "run", [], processes=1, save_every=5)
    assert [path.name for path in tmp_path.glob("runs/*")] == kept


def made(resumed=5, allowed=5, gap=0.0):
    kill = Strike("kill", 12.0, 0, step=10, allowed=allowed, noticed=12.5)
    events = [Event("step", 1.0 + n, 1.0, n + 1) for n in range(10)]
    events += [Event("step", 20.0 + gap + n, 1.0, resumed + 1 + n) for n in range(12 - resumed)]
    attempts = [
        Attempt(0, 13, 0, [(n, 1.0) for n in range(1, 11)], [kill], True),
        Attempt(20, 40 + gap, resumed, [(n, 1.0) for n in range(resumed + 1, 13)]),
    ]
    found = account(attempts, events)
    return drill.Drill("d", ("train",), allowed, 1, found, 20.0, True, True)


def test_what_did_not_hold_is_said(capsys):
    assert made().failures == []
    assert "10 steps were repeated, and 5 are allowed" in " ".join(made(resumed=0).failures)
    for fault in ({"curve_equal": False}, {"state_equal": False}):
        (said,) = replace(made(), **fault).failures
        assert "is not that of the undisturbed run" in said
    (said,) = replace(made(), planned=2).failures
    assert "1 of 2 faults came" in said
    calm = account([Attempt(0, 13)], [Event("step", 0.0, 13.0, 1)])
    assert replace(made(), downtime=calm).failures == ["0 of 1 faults came before the run ended"]
    drill.print_drill(made(resumed=0))
    shown = capsys.readouterr().out
    assert "FAILED: kill at step 10" in shown and "goodput" in shown and "restart" in shown
    drill.print_drill(replace(made(), directory="/a[/b]"))
    assert "/a[/b]" in capsys.readouterr().out
    figure = plot_downtime(made().downtime)
    assert "kill" in [text.get_text() for text in figure.axes[0].texts]
