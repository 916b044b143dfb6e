"""Predicted steps: what the numbers mean, bad input, and one small step compiled for real chips."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest

from minitext.compiler.targets import parse_target
from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.hardware import CHIPS
from minitext.perf.step_schedule import Event, Machine, Walk
from minitext.perf.step_time import StepTime, predict_preset, predict_program, print_step_time

SMALL = ["model.layers=2", "mesh.data=1", "mesh.fsdp=-1"]
PARTS = {"compute": 1.0, "kernels": 0.5, "ici": 0.5, "dcn": 0.0, "dma": 0.0, "host": 0.0}
STEP = StepTime(
    target="v5e:2x4", chips=8, seconds=2.0, lower=1.5, upper=3.0, parts=PARTS, busy=PARTS, tokens=3200, flops=1e15,
    peak=197e12, events=(Event("a", "compute", 0.0, 1.0), Event("w", "loop", 0.0, 2.0, 9)),
)  # fmt: skip


def test_rates_are_of_one_chip():
    assert STEP.tokens_per_second == 3200 / 2 / 8
    assert STEP.mfu == pytest.approx(1e15 / (8 * 197e12) / 2)
    assert math.fsum(STEP.shares.values()) == pytest.approx(1)
    assert json.loads(json.dumps(STEP.to_json()))["tokens_per_second_per_chip"] == 200


def test_what_crosses_slices_is_said(capsys):
    print_step_time(STEP)
    assert "slices" not in capsys.readouterr().out
    sliced = dataclasses.replace(STEP, across={"data": 2, "fsdp": 4}, sent_across=3 * 2.0**20)
    print_step_time(sliced)
    said = (
        "across slices: mesh.data by 2 and mesh.fsdp by 4; each device sends 3.00 MiB to the others"
    )
    assert said in capsys.readouterr().out
    assert sliced.to_json()["across"] == {"data": 2, "fsdp": 4}


def test_tokens_are_those_of_the_batch_that_slices_round_up(monkeypatch):
    walk = Walk(Machine(CHIPS["v5e"], (2, 2), (False, False), ()))
    walk.clock = 1.0
    monkeypatch.setattr("minitext.perf.step_time.predict_step", lambda *args: walk)
    cfg, target = load_config("laptop", ["data.seq_len=64"]), parse_target("v5e:2x2 slices=3")
    assert cfg.train.global_batch == 8
    assert predict_program("", cfg, target).tokens == 12 * 64


def test_the_schedule_is_drawn():
    from minitext.perf.figures import plot_schedule

    (axes,) = plot_schedule(STEP.events).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute"]
    assert [text.get_text() for text in axes.texts] == ["8 more iterations"]


def test_only_tpus_have_a_schedule():
    with pytest.raises(UserError, match=r"h100:1x1x8.*choose a TPU"):
        predict_preset(load_config("laptop", SMALL), "h100:1x1x8")


def test_text_that_is_no_program_is_refused():
    with pytest.raises(UserError, match="no entry computation"):
        predict_program("HloModule cut", load_config("laptop", SMALL), parse_target("v5e:2x4"))


def test_the_command_names_what_is_missing():
    command = [sys.executable, "-m", "minitext", "predict", "laptop"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "name one target" in done.stderr and not done.stdout


@pytest.mark.audit
def test_a_small_step_compiled_for_eight_chips(tmp_path):
    """More work takes longer, the interval holds the estimate, and the kept text gives the same answer."""
    cfg = load_config("laptop", SMALL)
    found = predict_preset(cfg, "v5e:2x4", tmp_path / "step.txt")
    assert 0 < found.lower <= found.seconds <= found.upper
    assert math.fsum(found.parts.values()) == pytest.approx(found.seconds)
    assert 0 < found.mfu < 1 and found.busy["ici"] > 0
    again = predict_program((tmp_path / "step.txt").read_text(), cfg, parse_target("v5e:2x4"))
    assert again == found
    deeper = load_config("laptop", [*SMALL, "model.layers=8", "model.scan_layers=true"])
    looped = predict_preset(deeper, "v5e:2x4")
    assert looped.seconds > 2 * found.seconds
    assert any(event.queue == "loop" and event.trips == 8 for event in looped.events)
