"""Whole runs of GRPO and PPO: they learn, and a run that is killed goes on bit for bit."""

import json
import os
import random
import signal
import time

import jax
import numpy as np
import pytest

from minitext.config.config import load_config
from minitext.data.arithmetic import make_sums, write_records
from minitext.observability.metrics import read_metrics
from minitext.post_training.tasks import task_of
from minitext.training import run
from minitext.training.run_dir import load_run
from tests.conftest import TINY
from tests.distributed.test_job import finish, start, wait_for
from tests.training.test_quantize_run import write_run

TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}
{%- endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
REWARD = """def readable(record, answer):
    return sum(c != chr(0xfffd) for c in answer) / max(len(answer), 1)
"""
TIMING = {
    "tokens_per_second", "seconds", "mfu", "host_bytes", "device_bytes", "rollout_seconds", "scoring_seconds",
}  # fmt: skip


SMALL = [*TINY, "model.layers=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with prompts, a template, a reward, and a run to begin with."""
    folder = tmp_path_factory.mktemp("rl")
    write_records(folder / "sums.jsonl", make_sums("train")[:64])
    (folder / "plain.jinja").write_text(TEMPLATE)
    (folder / "mine.py").write_text(REWARD)
    write_run(folder / "base", *SMALL, preset="laptop")
    return folder


def words(folder, name, kind="grpo", *more):
    return [
        *SMALL, f"run.dir={folder}", f"run.name={name}", f"checkpoint.load_parameters={folder}/base",
        "data.source=prompts", f"data.path={folder}/sums.jsonl", f"data.chat_template={folder}/plain.jinja",
        "data.seq_len=16", f"objective.kind={kind}", f"model.value_head={str(kind == 'ppo').lower()}",
        "objective.max_tokens=6", "objective.prompts=8", "objective.group=4",
        f"objective.rewards=[{{name: '{folder}/mine.py:readable'}}, {{name: exact, weight: 0}}]",
        "optim.schedule=constant", "optim.warmup_steps=0", *more,
    ]  # fmt: skip


def train(folder, name, kind, *more):
    cfg = load_config("laptop", words(folder, name, kind, *more))
    return read_metrics(run.train(cfg, task=task_of(cfg)))


@pytest.mark.audit
def test_grpo_earns_more(folder):
    lines = train(
        folder, "grpo", "grpo", "train.global_batch=64", "train.steps=30", "optim.learning_rate=1e-2",
        "objective.kl=0.01", "objective.group=8", "train.eval_every=10", "train.eval_batches=1",
        "train.sample_tokens=1",
    )  # fmt: skip
    first, last = (np.mean([line["reward"] for line in part]) for part in (lines[:3], lines[-3:]))
    assert last > first + 0.2
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6) and lines[-1]["kl"] > 0.01
    assert lines[-1]["entropy"] < lines[0]["entropy"]
    names = {
        "reward_std", "correct", "clip_share", "answer_tokens", "no_signal", "logp_mismatch", "logp_mismatch_max",
        "reward_readable", "reward_exact", "reward_failures", "cut_off",
    }  # fmt: skip
    assert names <= set(lines[-1]) and {"val_reward", "val_correct_greedy"} <= set(lines[9])
    assert all(line["logp_mismatch_max"] < 1e-4 for line in lines)
    assert "reward 0." in (folder / "grpo/samples.txt").read_text()


@pytest.mark.audit
def test_ppo_learns_what_to_expect(folder):
    lines = train(
        folder, "ppo", "ppo", "train.global_batch=16", "train.steps=60", "optim.learning_rate=5e-3",
        "objective.group=1", "objective.prompts=32", "objective.iterations=2", "objective.kl=0.01",
        "train.eval_every=60", "train.eval_batches=1",
    )  # fmt: skip
    assert lines[-1]["value_error"] < 0.5 * lines[0]["value_error"]
    assert lines[-1]["value_loss"] < lines[0]["value_loss"]
    first, last = (np.mean([line["reward"] for line in part]) for part in (lines[:8], lines[-8:]))
    assert last > first + 0.1
    assert lines[0]["ratio"] == pytest.approx(1, abs=1e-5) and lines[3]["ratio"] != 1
    cfg, params, _, _ = load_run(folder / "ppo")  # the value head is only for training
    assert not cfg.model.value_head and "value" not in params


@pytest.fixture(scope="module")
def whole(server, folder):
    """A run that nothing disturbed; four of its steps use the answers of one set of parameters."""
    more = "train.steps=11", "train.save_every=3", "objective.iterations=2", "objective.kl=0.1"
    command = [
        "train",
        *words(folder, "whole", "grpo", "train.global_batch=16", *more, "train.eval_every=5"),
    ]
    code, printed = server.run(*command, output=folder / "output")
    assert code == 0, printed
    return command


def records(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [{name: line[name] for name in line if name not in TIMING} for line in lines]


@pytest.mark.audit
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_run_goes_on_bit_for_bit(server, folder, whole, seed):
    name = f"killed{seed}"
    command = [word.replace("run.name=whole", f"run.name={name}") for word in whole]
    at = random.Random(seed).uniform(1, 10)  # steps, and a part of one
    pid = server.start(*command, output=folder / f"{name}.txt")
    path, began = folder / name / "metrics.jsonl", None
    while os.path.exists(f"/proc/{pid}"):
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        if lines >= int(at):
            began = began or time.monotonic()
            if time.monotonic() - began > at % 1 * 0.1:
                os.kill(pid, signal.SIGKILL)
                break
        time.sleep(0.002)
    server.wait()
    code, printed = server.run(*command, output=folder / f"{name}.txt")
    assert code == 0, printed
    assert records(folder / name) == records(folder / "whole")
    ours, theirs = (load_run(folder / n)[1] for n in (name, "whole"))
    assert all(
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)
    )


# Three prompts are divided 1 to 2, and three steps use the answers of one set of parameters.
TWO = (
    "mesh.fsdp=2", "train.global_batch=16", "train.steps=8", "train.save_every=2", "train.eval_every=4",
    "train.eval_batches=1", "train.sample_tokens=1", "objective.prompts=3", "objective.group=16", "objective.kl=0.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def job(folder):
    """Starts a run of two processes with four devices each."""

    def begin(name):
        return start(2, 4, ["-m", "minitext", "train", *words(folder, name, "grpo", *TWO)])

    finish(begin("two"))
    return begin


@pytest.mark.audit
@pytest.mark.timeout(900)
def test_two_processes_draw_what_one_draws(folder, job):
    """Bit for bit with the first parameters; after a step those differ by rounding."""
    ours, theirs = read_metrics(folder / "two"), train(folder, "one", "grpo", *TWO)
    for line, other in zip(ours[:3], theirs[:3], strict=True):
        for name in (
            "reward",
            "reward_std",
            "correct",
            "answer_tokens",
            "cut_off",
            "no_signal",
            "reward_failures",
        ):
            assert line[name] == other[name], name
    for line, other in zip(ours, theirs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-4)
        assert line["logp_mismatch_max"] < 1e-4
    texts = [(folder / name / "samples.txt").read_text().split("---")[1] for name in ("one", "two")]
    assert texts[0] == texts[1] and texts[0].count("reward") == 4


@pytest.mark.audit
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_two_processes_that_are_killed_go_on_bit_for_bit(folder, job, seed):
    name, rng = f"two{seed}", random.Random(seed)
    at = rng.randint(1, 7)  # within a rollout, or between two
    killed = job(name)
    path = folder / name / "metrics.jsonl"
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= at, killed)
    for process in rng.sample(killed, 2):
        process.kill()
    for process in killed:
        process.communicate()
    finish(job(name))
    assert records(folder / name) == records(folder / "two")
    ours, theirs = (load_run(folder / n)[1] for n in (name, "two"))
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_array_equal(a, b)
