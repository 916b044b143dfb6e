"""Exercises about several processes: each runs the check in one process and the answer in another."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What the deciding process of such an exercise does, in a process of its own: it forks.
WORKER = """
import json, re, sys

from minitext.book.grading import answering, confine, peers
from minitext.book.grading.trial import Failure

ANSWER = '''
import os, socket, subprocess, sys
from pathlib import Path

import jax

def answer(index, secret):
    refused = []
    bind = lambda: socket.socket().bind(("127.0.0.1", 0))
    for attempt in (lambda: open(secret), lambda: subprocess.run(["true"]), bind):
        try:
            attempt()
        except PermissionError as error:
            refused.append(str(error))
    return 10 * index + 1, refused, [jax.process_index(), jax.process_count(), jax.local_device_count()]
'''


def body(say, fn, secret):
    import jax, numpy as np
    from jax.experimental import multihost_utils

    index = jax.process_index()
    say(["begun", index])
    value, refused, place = fn(index, secret)
    every = np.asarray(multihost_utils.process_allgather(np.int32(value))).tolist()
    if index == 1:
        raise KeyError("of process 1 alone")
    return every, refused, place, "answer" in sys.modules


if __name__ == "__main__":
    root = sys.argv[1]
    exercise = {"id": "90.peers", "function": "answer", "forbid": ()}
    job = {"root": root, "folder": "", "filename": "answer.py", "pieces": [["", ANSWER, 1]], "exercise": exercise}
    peers.answer = job | {"words": []}
    pid, connection = answering.start(job)
    fn = peers.remote_function(peers.answer, connection)
    both = peers.run_in_processes(body, fn, root + "/solutions/secret", processes=2, devices=3, seconds=60)
    first, second = both
    found = {"value": first.value, "error": second.error}
    found |= {"said": [peer.said for peer in both], "done": [peer.done for peer in both]}
    try:
        peers.returned([first, second])
    except Failure as failure:
        found["told"] = str(failure)
    print(json.dumps(found))
"""


def test_answers_of_several_processes_run_beside_their_checks(tmp_path):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "secret").write_text("a solution")
    env = os.environ | {"PYTHONPATH": str(ROOT), "http_proxy": "http://127.0.0.1:9"}
    out = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout.strip().split("\n")[-1])
    every, refused, place, loaded = found["value"]
    assert (every, place, loaded) == ([1, 11], [0, 2, 3], False)
    assert found["said"] == [[["begun", 0]], [["begun", 1]]]
    assert found["done"] == [True, False] and found["error"][0] == "KeyError"
    assert found["told"].startswith("process 1 of 2 raised KeyError")
    assert [words.split(": ", 1)[1] for words in refused] == [
        "opening the solutions or the checks",
        "starting or signalling a process (subprocess.Popen)",
        "the network (socket.bind)",
    ]
