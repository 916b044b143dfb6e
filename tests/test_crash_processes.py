"""A job of two processes whose processes are killed goes on as if nothing had happened: three kills of thirty."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.audit
@pytest.mark.timeout(900)
def test_three_kills_cost_no_more_than_the_interval(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "kills.py", "--kills", "3", "--steps", "200"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--output", tmp_path], env=env, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("kills-3-*.json")
    record = json.loads(path.read_text())
    assert record["lines_compared"] == 200 and len(record["each"]) == 3
    assert record["most_steps_lost"] <= record["save_every"]
    assert record["longest_seconds_to_end"] < 60
