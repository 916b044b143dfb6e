"""The whole objectives of GRPO and PPO, against float64 formulas from the model's logits, whole and in microbatches."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from minitext.config.config import load_config
from minitext.post_training.policy_loss import token_weights
from minitext.post_training.policy_objective import make_objective, token_share
from minitext.sharding.mesh import make_mesh
from minitext.training.step import abstract_state, init_state, make_step_fn, model_def
from tests.conftest import TINY

B, T, V = 8, 8, 260


def config(kind, *more):
    return load_config(
        "laptop",
        [
            *TINY, "model.layers=1", f"model.vocab={V}", f"data.seq_len={T}", f"train.global_batch={B}",
            "data.source=prompts", "data.path=a.jsonl", f"objective.kind={kind}",
            f"model.value_head={str(kind == 'ppo').lower()}",
            "objective.max_tokens=6", "objective.prompts=2", "objective.group=4", "objective.clip=0.01",
            "objective.clip_high=0.02", "objective.kl=0.3", "objective.entropy=0.05", "model.dtype=float32",
            *more,
        ],
    )  # fmt: skip


def batch_of(how):
    rng = np.random.default_rng(0)
    start, end = rng.integers(0, 3, B), rng.integers(4, T + 1, B)
    places = np.arange(T)
    mask = ((places >= start[:, None]) & (places < end[:, None])).astype(np.float32)
    mask[3] = 0  # an answer that was dropped
    real = (places < end[:, None]).astype(np.int32)
    noise = lambda: (rng.normal(size=(B, T)) * mask).astype(np.float32)  # noqa: E731
    return {
        "tokens": rng.integers(0, V, (B, T), np.int32) * real, "targets": rng.integers(0, V, (B, T), np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)), "segment_ids": real, "loss_mask": mask,
        "advantages": noise(), "old_logp": -5.56 * mask + 0.02 * noise(), "ref_logp": -5.5 * mask + 0.3 * noise(),
        "token_weight": token_weights(mask, how, 6), "old_values": 0.1 * noise(), "returns": noise(),
    }  # fmt: skip


def by_formula(cfg, params, batch, how):
    """The loss and the means, from the model's logits in float64, token by token."""
    ppo, rl = cfg.objective.kind == "ppo", cfg.objective

    @jax.jit
    def forward(params):
        model = nnx.merge(model_def(cfg), params)
        x = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])[0]
        return model.logits(x), model.values(x) if ppo else None

    logits, values = (None if x is None else np.array(x, np.float64) for x in forward(params))
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    total, sums = 0.0, {"kl": [], "entropy": [], "clip_share": [], "ratio": [], "value_loss": []}
    for b, t in zip(*np.nonzero(batch["loss_mask"]), strict=True):
        new, A = logp[b, t, batch["targets"][b, t]], float(batch["advantages"][b, t])
        ratio = np.exp(new - float(batch["old_logp"][b, t]))
        bounded = min(max(ratio, 0.99), 1.02)
        apart = float(batch["ref_logp"][b, t]) - new
        kl, entropy = np.exp(apart) - apart - 1, -(np.exp(logp[b, t]) * logp[b, t]).sum()
        loss = -min(ratio * A, bounded * A) - 0.05 * entropy + (0 if ppo else 0.3 * kl)
        found = {
            "kl": kl,
            "entropy": entropy,
            "ratio": ratio,
            "clip_share": bounded * A < ratio * A,
        }
        if ppo:
            old, R = float(batch["old_values"][b, t]), float(batch["returns"][b, t])
            near = min(max(values[b, t], old - 0.2), old + 0.2)
            found["value_loss"] = max((values[b, t] - R) ** 2, (near - R) ** 2) / 2
            loss += rl.value_weight * found["value_loss"]
        for name, value in found.items():
            sums[name].append(value)
        tokens = batch["loss_mask"].sum()
        share = {
            "token": 1 / tokens,
            "sequence": 1 / 7 / batch["loss_mask"][b].sum(),
            "constant": 1 / 7 / 6,
        }
        total += share[how] * loss
    return {"loss": total, **{name: np.mean(x) for name, x in sums.items() if x}}


@pytest.mark.parametrize(
    ("kind", "how", "mesh"),
    [
        pytest.param("grpo", "token", (), marks=pytest.mark.audit),
        pytest.param(
            "grpo",
            "sequence",
            ("mesh.fsdp=2", "mesh.tensor=2", "mesh.data=1"),
            marks=pytest.mark.audit,
        ),
        pytest.param("grpo", "constant", (), marks=pytest.mark.audit),
        ("ppo", "sequence", ("mesh.fsdp=2", "mesh.tensor=2", "mesh.data=1")),
    ],
)
def test_objectives_are_their_formulas(kind, how, mesh):
    words = f"objective.weighting={how}", "train.microbatches=2"
    cfg, batch = config(kind, *words, *mesh), batch_of(how)
    batch["token_share"] = token_share(cfg.objective, batch).astype(np.float32)
    alone = make_mesh(devices=jax.devices()[:1])
    moved = lambda params: jax.tree.map(lambda x: x + 0.01, params)  # noqa: E731  # of a value head, too
    with jax.set_mesh(alone):
        state = init_state(cfg, alone)
        state = dataclasses.replace(state, params=moved(state.params))
        want = by_formula(cfg, state.params, batch, how)
    there = make_mesh(cfg.mesh, devices=jax.devices()[: 4 if mesh else 1])
    with jax.set_mesh(there):
        shardings = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, there))
        state = jax.device_put(state, shardings)
        step = jax.jit(make_step_fn(cfg, there, make_objective(cfg)))
        placed = jax.device_put(
            batch, jax.sharding.NamedSharding(there, jax.P(("data", "fsdp", "expert")))
        )
        metrics = jax.device_get(step(state, placed)[1])
    assert metrics["tokens"] == batch["loss_mask"].sum()
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert 0 < want["clip_share"] < 1
