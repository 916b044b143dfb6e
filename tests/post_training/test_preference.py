"""Preferences: each loss is its formula, on every layout, and the model learns what the pairs ask."""

import dataclasses
import itertools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from minitext.checkpoint.checkpointer import Checkpointer
from minitext.errors import UserError
from minitext.observability.metrics import read_metrics
from minitext.post_training import recipes
from minitext.post_training.preference import LOSSES, Answers, preferences, sum_answers
from minitext.post_training.tasks import task_of
from minitext.sharding.mesh import make_mesh
from minitext.training import run as training
from minitext.training.step import abstract_batch, init_state, make_eval_step, make_train_step
from minitext.training.stopping import Interrupted, Stopper
from tests.conftest import audit_but
from tests.training.test_quantize_run import write_run

PAIRS = [
    "objective.kind=preference", "data.source=preferences", "data.path=pairs.jsonl", "model.layers=1",
]  # fmt: skip


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def formula(cfg, policy, reference):
    """The losses in float64, from the papers."""
    c, r, nc, nr = (np.asarray(x, np.float64) for x in policy)
    rc, rr, *_ = (np.asarray(x, np.float64) for x in reference)
    if cfg.loss == "dpo":  # Rafailov et al. 2023, equation 7; smoothed as in Mitchell 2023
        h = cfg.beta * ((c - rc) - (r - rr))
        e = cfg.label_smoothing
        return -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)
    if cfg.loss == "ipo":  # Azar et al. 2024, equation 17, per token
        return (((c - rc) / nc - (r - rr) / nr) - 1 / (2 * cfg.beta)) ** 2
    if cfg.loss == "simpo":  # Meng et al. 2024, equation 6
        return -log_sigmoid(cfg.beta * (c / nc - r / nr) - cfg.margin)
    odds = [
        np.log(np.exp(x) / -np.expm1(x)) for x in (c / nc, r / nr)
    ]  # Hong et al. 2024, equations 4 to 7
    return -c / nc - cfg.beta * log_sigmoid(odds[0] - odds[1])


SETTINGS = [
    ["objective.loss=dpo"],
    ["objective.loss=dpo", "objective.beta=0.7", "objective.label_smoothing=0.2"],
    ["objective.loss=ipo", "objective.beta=0.3"],
    ["objective.loss=orpo", "objective.beta=0.25"],
    ["objective.loss=simpo", "objective.beta=2.5", "objective.margin=1.2"],
]


@pytest.mark.parametrize("words", SETTINGS, ids=lambda words: words[0][15:])
def test_losses_are_their_formulas(tiny, words):
    cfg = tiny(*PAIRS, *words).objective
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 40, (2, 500)).astype(np.float32)
    for size in (0.05, 1.0, 9.0):
        policy = Answers(*-(counts * rng.gamma(1, size, counts.shape)).astype(np.float32), *counts)
        reference = Answers(
            *-(counts * rng.gamma(1, size, counts.shape)).astype(np.float32), *counts
        )
        loss, margin = jax.jit(lambda *x: LOSSES[cfg.loss].of(cfg, *x))(policy, reference)
        want = formula(cfg, policy, reference)
        np.testing.assert_allclose(loss, want, rtol=2e-5, atol=1e-5)
        better = Answers(policy.chosen + 1e-2, *policy[1:])
        lower, larger = LOSSES[cfg.loss].of(cfg, better, reference)
        assert np.all(np.asarray(larger) >= np.asarray(margin))
        if cfg.loss == "dpo" and not cfg.label_smoothing:
            assert np.all(np.asarray(lower) <= np.asarray(loss))


@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_answers_have_finite_losses_and_gradients(tiny, loss):
    cfg = tiny(*PAIRS, f"objective.loss={loss}").objective
    values = np.array([*itertools.product([0.0, -1e-9, -1.0, -90.0, -3e3], repeat=2)], np.float32)
    policy = Answers(*values.T, *np.ones((2, len(values)), np.float32))
    reference = Answers(*values.T[::-1], *np.ones((2, len(values)), np.float32))

    def total(policy):
        return jnp.sum(LOSSES[loss].of(cfg, policy, reference)[0])

    loss_sum, grads = jax.value_and_grad(total)(policy)
    assert np.isfinite(loss_sum) and all(np.isfinite(g).all() for g in grads)


def test_answers_are_summed_apart_and_prompts_do_not_count():
    logp = np.arange(12, dtype=np.float32).reshape(2, 6)
    segments = np.array([[1, 1, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0]])
    mask = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    found = sum_answers(logp, segments, mask)
    np.testing.assert_array_equal(found.chosen, [3, 0])
    np.testing.assert_array_equal(found.rejected, [4, 0])
    np.testing.assert_array_equal(found.chosen_tokens, [2, 1])
    np.testing.assert_array_equal(found.rejected_tokens, [1, 1])


def pair_batch(cfg, mesh, seed, last=0):
    """Rows of pairs: one prompt, and two answers of which the chosen one has small tokens; `last` rows are empty."""
    rng = np.random.default_rng(seed)
    B, T = cfg.train.global_batch, cfg.data.seq_len
    rows = {
        name: np.zeros((B, T), np.int32)
        for name in ("tokens", "targets", "positions", "segment_ids")
    }
    rows["loss_mask"] = np.zeros((B, T), np.float32)
    for b in range(B - last):
        prompt, at = rng.integers(0, 256, rng.integers(1, 5)), 0
        for segment, low in ((1, 0), (2, 128)):
            text = np.concatenate([prompt, rng.integers(low, low + 64, rng.integers(1, 11))])
            n = len(text) - 1
            where = slice(at, at + n)
            rows["tokens"][b, where], rows["targets"][b, where] = text[:-1], text[1:]
            rows["positions"][b, where], rows["segment_ids"][b, where] = np.arange(n), segment
            rows["loss_mask"][b, at + len(prompt) - 1 : at + n] = 1
            at += n
    like = abstract_batch(cfg, mesh)
    return {k: jax.device_put(v, like[k].sharding) for k, v in rows.items()}


def run(cfg, mesh, steps=2, last=0):
    batches = [pair_batch(cfg, mesh, seed, last) for seed in range(steps)]
    objective = preferences(cfg)
    with jax.set_mesh(mesh):
        state = init_state(cfg, mesh)
        if LOSSES[cfg.objective.loss].compares:
            state = dataclasses.replace(state, reference=jax.tree.map(jnp.copy, state.params))
        step, found = make_train_step(cfg, mesh, objective), []
        for batch in batches:
            state, metrics = step(state, batch)
            found.append(jax.device_get(metrics))
        values, weight = make_eval_step(cfg, objective)(state, pair_batch(cfg, mesh, 99))
    return found, {name: float(x / weight) for name, x in values.items()}


FAST = ["optim.learning_rate=3e-3", "optim.warmup_steps=0"]


@pytest.mark.parametrize("loss", audit_but(["dpo", "orpo"], LOSSES))
def test_every_loss_learns_what_the_pairs_ask(tiny, loss):
    beta = {"simpo": 2.0, "orpo": 1.0}.get(loss, 0.1)
    cfg = tiny(*PAIRS, *FAST, f"objective.loss={loss}", f"objective.beta={beta}", "train.steps=40")
    found, held_out = run(cfg, make_mesh(devices=jax.devices()[:1]), steps=40)
    losses = [float(metrics["loss"]) for metrics in found]
    # Of ten batches, since each has other pairs: simpo's first ones happen to be easy.
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    if loss == "dpo":  # the reference is where training starts
        np.testing.assert_allclose(found[0]["loss"], np.log(2), rtol=1e-5)
        assert found[0]["accuracy"] < 1
        assert abs(found[0]["margin"]) < 1e-4 < abs(found[1]["margin"])
    assert held_out["accuracy"] > 0.9 and held_out["margin"] > 0


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["mesh.fsdp=4", "mesh.tensor=2", "mesh.data=1", "train.loss_chunks=2"],
            marks=pytest.mark.audit,
        ),
        ["mesh.data=2", "mesh.context=2", "train.microbatches=2"],
        pytest.param(
            [
                "mesh.stage=2",
                "mesh.data=2",
                "mesh.fsdp=2",
                "pipeline.schedule=1f1b",
                "model.layers=2",
            ],
            marks=pytest.mark.audit,
        ),
    ],
    ids=["fsdp and tensor", "context and microbatches", "1f1b"],
)
def test_pairs_are_the_same_on_every_layout(tiny, words):
    cfg = tiny(*PAIRS, *FAST, *words)
    layers = f"model.layers={cfg.model.layers}"
    alone = tiny(*PAIRS, *FAST, layers)
    want, want_held = run(alone, make_mesh(devices=jax.devices()[:1]), last=3)
    devices = jax.devices()[: math.prod(cfg.mesh.sizes().values())]
    got, got_held = run(cfg, make_mesh(cfg.mesh, devices), last=3)
    for name in (
        "loss",
        "margin",
        "accuracy",
        "chosen_logp",
        "rejected_logp",
        "grad_norm",
        "tokens",
    ):
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(got_held["loss"], want_held["loss"], rtol=1e-3)


def pairs_file(path, count, seed=0):
    """Greetings that are chosen if they are polite; 128 of them are held out by the run."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for _ in range(count):
            name = "".join(rng.choice([*"abcdefgh"], 3))
            pair = {"prompt": f"hi {name}", "chosen": f"good day {name}", "rejected": f"go {name}"}
            file.write(json.dumps(pair) + "\n")


@pytest.mark.audit
@pytest.mark.parametrize("lora", [pytest.param(0, marks=pytest.mark.audit), 4])
def test_a_run_learns_from_a_file_of_pairs_and_goes_on_after_a_stop(tmp_path, lora):
    pairs_file(tmp_path / "pairs.jsonl", 200)
    write_run(tmp_path / "base", "data.seq_len=128", "model.layers=1")
    words = [
        f"data.path={tmp_path / 'pairs.jsonl'}", f"run.dir={tmp_path}", "train.steps=16", "train.save_every=4",
        "train.eval_every=8", "optim.learning_rate=3e-3", f"model.lora.rank={lora}",
        "data.validation_fraction=0.2", "model.scan_layers=false",
    ]  # fmt: skip
    whole, cut = (
        recipes.new_config(tmp_path / "base", "dpo", [*words, f"run.name={n}"])
        for n in ("whole", "cut")
    )
    lines = read_metrics(run_of(whole))
    np.testing.assert_allclose(lines[0]["loss"], np.log(2), rtol=1e-4)
    assert lines[-1]["val_accuracy"] > 0.75 and lines[-1]["val_margin"] > lines[7]["val_margin"] > 0
    run_of(cut, stop=5)
    again = read_metrics(run_of(cut))
    for key in ("loss", "margin", "accuracy", "grad_norm"):
        assert [line[key] for line in again] == [line[key] for line in lines]


def run_of(cfg, stop=None):
    """Trains; with `stop` a signal seems to come in that step."""
    if stop is None:
        return training.train(cfg, Console(quiet=True), task=task_of(cfg))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stopper, "last", lambda self, step: step >= stop)
        patch.setattr(Stopper, "number", 2, raising=False)
        with pytest.raises(Interrupted):
            training.train(cfg, Console(quiet=True), task=task_of(cfg))
    return None


def test_a_run_that_resumes_compares_with_the_model_that_it_started_from(tmp_path):
    """Also when the run it came from has been trained on in the meantime."""
    pairs_file(tmp_path / "pairs.jsonl", 40)
    cfg, params = write_run(tmp_path / "base", "data.seq_len=128", "model.layers=1")
    words = [
        f"data.path={tmp_path / 'pairs.jsonl'}", f"run.dir={tmp_path}", "run.name=a", "train.steps=2",
        "train.global_batch=8", "train.save_every=1", "optim.learning_rate=1e-5", "data.validation_fraction=0.2",
        "model.scan_layers=false",
    ]  # fmt: skip
    preferring = recipes.new_config(tmp_path / "base", "dpo", words)
    run_of(preferring, stop=1)
    other = jax.tree.map(lambda x: 1.5 * x, params)
    with Checkpointer(tmp_path / "base" / "checkpoints") as checkpointer:
        checkpointer.save(4, {"params": other}, {}, cfg.model_dump(mode="json"), wait=True)
    lines = read_metrics(run_of(preferring))
    np.testing.assert_allclose(
        lines[1]["loss"], np.log(2), rtol=1e-2
    )  # the policy has hardly moved
    shutil.rmtree(tmp_path / "base" / "checkpoints" / "3")
    with pytest.raises(UserError, match="a compares with step 3 of .* which is not there"):
        run_of(preferring.replace({"train.steps": 3}))
