"""Exercises about several processes: a guarded worker starts these, and nothing else; they are guarded too."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What a guarded worker does, in a process of its own: the guard stays for life.
WORKER = """
import json, subprocess, sys
from pathlib import Path

from minitext.book.grading import peers
from minitext.book.grading.trial import Failure


def body(say, fn, secret):
    import jax, numpy as np
    from jax.experimental import multihost_utils

    index = jax.process_index()
    say(["begun", index])
    every = np.asarray(multihost_utils.process_allgather(np.int32(fn(index)))).tolist()
    refused = []
    bind = lambda: __import__("socket").socket().bind(("127.0.0.1", 0))
    for attempt in (lambda: open(secret), lambda: subprocess.run(["true"]), bind):
        try:
            attempt()
        except PermissionError as error:
            refused.append(str(error))
    if index == 1:
        raise KeyError("of process 1 alone")
    return every, refused, jax.local_device_count()


peers.guard([Path(sys.argv[1])], "answer.py")
both = peers.run_in_processes(body, lambda x: 10 * x + 1, sys.argv[1] + "/secret", processes=2, devices=3, seconds=60)
first, second = both
found = {"value": first.value, "error": second.error}
found |= {"said": [peer.said for peer in both], "done": [peer.done for peer in both]}
try:
    peers.returned([first, second])
except Failure as failure:
    found["told"] = str(failure)
command, env = peers._command, peers._environment
found["refused"] = 0
others = [(["true"], env), (command + ["more"], env), (command[:-1], env)]
for words, kept in [*others, (command, env | {"PYTHONPATH": "."})]:
    try:
        subprocess.Popen(words, env=kept)
    except PermissionError:
        found["refused"] += 1
print(json.dumps(found))
"""


def test_a_guarded_worker_starts_guarded_processes_and_no_others(tmp_path):
    (tmp_path / "secret").write_text("a solution")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path)], env=env, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    every, refused, devices = found["value"]
    assert (every, devices) == ([1, 11], 3)
    assert found["said"] == [[["begun", 0]], [["begun", 1]]]
    assert found["done"] == [True, False] and found["error"][0] == "KeyError"
    assert found["told"].startswith("process 1 of 2 raised KeyError")
    assert [words.split(": ", 1)[1] for words in refused] == [
        "opening the solutions or the checks",
        "starting or signalling a process (subprocess.Popen)",
        "the network (socket.bind)",
    ]
    assert found["refused"] == 4
