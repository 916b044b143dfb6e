"""Answers drawn by the engine, and the batches that are made of them."""

import dataclasses

import jax
import numpy as np
import pytest

import minitext as mt
from minitext.data.arithmetic import make_sums, write_records
from minitext.data.chat import open_template
from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError
from minitext.post_training.reinforce import Reinforce
from minitext.sharding.mesh import make_mesh
from minitext.training.step import init_state

TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}
{%- endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
T = 16


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Returns a function of settings that gives (configuration, mesh, state, rollouts)."""
    folder, made = tmp_path_factory.mktemp("sums"), []
    write_records(folder / "sums.jsonl", make_sums("train")[:40])
    (folder / "plain.jinja").write_text(TEMPLATE)

    def build(*words, kind="grpo", devices=1):
        cfg = mt.load_config(
            "laptop",
            [
                "model.layers=1", "model.embed=32", "model.heads=4", "model.kv_heads=4", "model.mlp=64",
                "model.vocab=260", f"data.path={folder}/sums.jsonl", "data.source=prompts",
                f"data.chat_template={folder}/plain.jinja", f"data.seq_len={T}", "train.global_batch=8",
                "train.sample_tokens=0", f"objective.kind={kind}", "objective.prompts=4",
                "objective.group=4", "objective.max_tokens=6", f"model.value_head={kind == 'ppo'}",
                "objective.rewards=[{name: length, argument: '6'}]", *words,
            ],
        )  # fmt: skip
        mesh = make_mesh(cfg.mesh, devices=jax.devices()[:devices])
        task = Reinforce(kind)
        task.check(cfg, mesh)
        tokenizer = ByteTokenizer()
        rollouts = task.batches(cfg, mesh, tokenizer, open_template(cfg.data, tokenizer), "train")
        sampler = rollouts.sampler
        sampler.options = dataclasses.replace(sampler.options, row_sizes=(16,))  # one program
        made.append(rollouts)
        return cfg, mesh, init_state(cfg, mesh), rollouts

    yield build
    for rollouts in made:
        rollouts.close()


def take(mesh, rollouts, state):
    with jax.set_mesh(mesh):
        return {name: np.asarray(x) for name, x in rollouts.take(state).items()}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), marks=pytest.mark.audit),
        ("mesh.fsdp=4", "mesh.data=1", "objective.engine_devices=4", "objective.temperature=0.7"),
    ],
    ids=["one device", "fsdp 4, engine tensor 4"],
)
def test_engine_and_trainer_agree_on_what_was_drawn(make, words):
    """Within 1e-4 in float32 at the same weights, also where they divide the weights in different ways."""
    _, mesh, state, rollouts = make(*words, "model.dtype=float32", devices=4 if words else 1)
    batch = take(mesh, rollouts, state)
    assert 0 <= rollouts.about["logp_mismatch_max"] < 1e-4
    mask = batch["loss_mask"] != 0
    assert mask.any() and (batch["old_logp"][mask] < 0).all()
    # What the engine drew with other weights isn't what the trainer finds likely.
    moved = jax.tree.map(lambda x: x * 1.5, state.params)
    rollouts.score, score = lambda _, batch: score(moved, batch), rollouts.score
    rollouts.update = 0
    take(mesh, rollouts, state)
    assert rollouts.about["logp_mismatch_max"] > 1e-2


@pytest.mark.audit
def test_mismatch_of_bfloat16_is_reported(make):
    _, mesh, state, rollouts = make("model.dtype=bfloat16")
    take(mesh, rollouts, state)
    assert rollouts.about["logp_mismatch"] <= rollouts.about["logp_mismatch_max"] < 0.2


def test_a_row_is_a_prompt_and_its_answer(make):
    _, mesh, state, rollouts = make("objective.weighting=token")
    batch = take(mesh, rollouts, state)
    drawn = rollouts.last
    parts = [batch, take(mesh, rollouts, state)]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in batch}
    assert rows["tokens"].shape == (16, T)
    seen = set()
    for row in range(16):
        real, mask = rows["segment_ids"][row] == 1, rows["loss_mask"][row] != 0
        ids = [*rows["tokens"][row, real], rows["targets"][row, real][-1]]
        text = ByteTokenizer().decode(ids)
        answer = rows["targets"][row, mask]
        assert len(answer) <= 6 and (len(answer) == 6 or answer[-1] == 256)
        assert text.startswith(tuple(rollouts.prompts.records[i]["prompt"] for i in drawn.prompts))
        assert rows["positions"][row, real].tolist() == list(range(real.sum()))
        assert not rows["advantages"][row, ~mask].any() and not rows["old_logp"][row, ~mask].any()
        seen.add(text)
    texts = {
        rollouts.prompts.records[drawn.prompts[i // 4]]["prompt"] + text
        for i, text in enumerate(drawn.texts)
    }
    assert seen == texts  # every answer is in one of the two batches
    assert rows["token_weight"].sum() == rows["loss_mask"].sum()


def test_batches_follow_from_seed_and_parameters(make):
    """A second run gives the same, and so does one that goes on within a rollout."""
    words = "objective.iterations=2", "objective.kl=0.1"
    _, mesh, state, rollouts = make(*words)
    state = dataclasses.replace(state, reference=state.params)
    positions, batches = [], []
    for _ in range(6):
        positions.append(rollouts.get_state())
        batches.append(take(mesh, rollouts, state))
    assert "rows" not in positions[0] and "rows" in positions[3] and "rows" not in positions[4]
    for start in (0, 3, 5):
        _, _, _, again = make(*words)
        again.set_state(positions[start])
        for batch in batches[start:]:
            found = take(mesh, again, state)
            assert all(np.array_equal(found[name], x) for name, x in batch.items())
    assert not np.array_equal(batches[0]["tokens"], batches[4]["tokens"])
    # All answers are trained on in each iteration.
    for first in (0, 2):
        weights = [b["advantages"].sum() for b in batches[first : first + 2]]
        assert np.isfinite(weights).all()


def test_groups_without_differences_are_replaced(make):
    """Most answers of this model are cut off, so many groups have equal rewards."""
    rewards = "objective.rewards=[{name: format, argument: '[^5]*'}]"
    _, mesh, state, kept = make(rewards, "train.global_batch=16")
    take(mesh, kept, state)
    assert kept.about["no_signal"] > 0
    _, mesh, state, dropped = make(rewards, "train.global_batch=16", "objective.dynamic_rounds=0")
    batch = take(mesh, dropped, state)
    live = batch["loss_mask"].any(axis=1)
    assert live.sum() == 16 * (1 - kept.about["no_signal"])
    _, mesh, state, filled = make(rewards, "train.global_batch=16", "objective.dynamic_rounds=50")
    batch = take(mesh, filled, state)
    assert batch["loss_mask"].any(axis=1).all() and filled.next_prompt > 4


def test_values_make_ppos_advantages(make):
    _, mesh, state, rollouts = make("train.global_batch=16", "objective.whiten=false", kind="ppo")
    batch = take(mesh, rollouts, state)
    mask = batch["loss_mask"] != 0
    assert not batch["old_values"].any()  # a new head expects nothing
    # With nothing expected, the surprise at the end is all: it decays towards the beginning.
    for row in np.flatnonzero(mask.any(axis=1)):
        own = batch["advantages"][row, mask[row]]
        np.testing.assert_allclose(own, own[-1] * 0.95 ** np.arange(len(own))[::-1], rtol=1e-5)
    np.testing.assert_allclose(batch["returns"][mask], batch["advantages"][mask], rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("objective.max_tokens=12",), "none of 38 prompts for train has at most 5 tokens"),
        (("train.global_batch=5",), "16 answers, which are not divisible by train.global_batch=5"),
        (("objective.rewards=[{name: lenght}]",), "did you mean length"),
        (("objective.rewards=[{name: length, argument: x}]",), "is not a number of characters"),
        (("objective.rewards=[{nam: exact, name: exact}]",), "nam=exact .*: unknown key"),
        (("objective.prompts=1000000000000",), "tokens, and memory keeps"),
        (("objective.temperature=1e-300",), "choose 0.001 or more"),
        (("objective.engine_devices=2",), "objective.engine_devices=2: there are 1"),
        (("objective.max_tokens=17",), "leaves no room for a prompt"),
        (("train.loss_chunks=2",), "train.loss_chunks=2 is not for objective.kind=grpo"),
        (("model.value_head=true",), "has no use for a value head: set model.value_head=false"),
        (("objective.group=1",), "leaves nothing to compare"),
        (("objective.old_logp=engine", "objective.temperature=0.5"), "at temperature 1"),
        (("objective.rewards=[{name: exact, weight: 0}]",), "no part with a weight"),
        (("data.source=stdlib", "data.path=null", "data.chat_template=null"), "prompts are what"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_line(make, words, problem):
    with pytest.raises(UserError, match=problem) as caught:
        make(*words)
    assert "\n" not in str(caught.value)
