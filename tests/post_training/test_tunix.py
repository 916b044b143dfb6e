"""Tunix on our models: its losses, gradients and curves are ours, and it learns from answers that our engine draws."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from minitext.data.tokenizer import ByteTokenizer, train_bpe
from minitext.errors import UserError
from minitext.models.transformer import Transformer
from minitext.post_training.preference import preferences
from minitext.post_training.tunix import (
    TunixCritic,
    TunixTokenizer,
    as_tunix,
    packed_loss,
    place_model,
    plain_params,
    read_run,
    write_run,
)
from minitext.sharding.mesh import AXES, make_mesh
from minitext.training.optim import make_optimizer
from minitext.training.run import train
from minitext.training.run_dir import load_run
from minitext.training.step import init_state, make_train_step

part = functools.partial(
    pytest.importorskip,
    reason="needs minitext[tunix] in an environment of its own: make test-tunix",
)
qwix, utils, rl_cluster = part("qwix"), part("tunix.sft.utils"), part("tunix.rl.rl_cluster")
dpo_trainer, grpo_learner = part("tunix.sft.dpo.dpo_trainer"), part("tunix.rl.grpo.grpo_learner")
peft_trainer, ppo_learner = part("tunix.sft.peft_trainer"), part("tunix.rl.ppo.ppo_learner")
TokenizerAdapter = part("tunix.generate.tokenizer_adapter").TokenizerAdapter
RolloutConfig = part("tunix.rl.rollout.base_rollout").RolloutConfig
EngineRollout = part("minitext.post_training.tunix_rollout").EngineRollout
PeftTrainer, TrainingConfig = peft_trainer.PeftTrainer, peft_trainer.TrainingConfig

PAD = 255
SFT = [
    "model.vocab=260", "model.kv_heads=4", "model.dtype=float32", "train.steps=8", "optim.warmup_steps=2",
    "optim.learning_rate=3e-3",  "optim.weight_decay=0", "data.seq_len=16",
    "train.global_batch=8",
]  # fmt: skip
EXACT = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def cfg(tiny):
    return tiny(*SFT)


def new_model(cfg, seed=0):
    return Transformer(cfg.model, rngs=nnx.Rngs(seed))


def with_adapters(model, alpha=8.0):
    provider = qwix.LoraProvider(module_path="model/blocks/.*", rank=4, alpha=alpha)
    tokens = jnp.zeros((2, 5), jnp.int32)
    return qwix.apply_lora_to_model(as_tunix(model, alpha), provider, tokens, rngs=nnx.Rngs(1))


def conversations(cfg, count, packed):
    """Batches of ours: texts of random lengths, of which the second half is learned; maybe two in a row."""
    rng = np.random.default_rng(0)
    B, T = cfg.train.global_batch, cfg.data.seq_len
    for _ in range(count):
        ints = ("tokens", "targets", "positions", "segment_ids")
        batch = {name: np.zeros((B, T), np.int32) for name in ints}
        batch["loss_mask"] = np.zeros((B, T), np.float32)
        for row in range(B):
            start = 0
            for segment in (1, 2) if packed else (1,):
                size = rng.integers(4, T // 2 if packed else T)
                ids, part = rng.integers(0, PAD, size + 1), slice(start, start + size)
                batch["tokens"][row, part], batch["targets"][row, part] = ids[:-1], ids[1:]
                batch["positions"][row, part], batch["segment_ids"][row, part] = (
                    range(size),
                    segment,
                )
                batch["loss_mask"][row, start + size // 2 : start + size] = 1
                start += size
        yield batch


def as_tunix_input(batch):
    """Rows of one text in the form that Tunix's own loss takes; it tells padding by a mask."""
    real = batch["segment_ids"] != 0
    tokens = np.where(real, batch["tokens"], PAD)
    last = real.sum(axis=1)
    tokens = np.pad(tokens, ((0, 0), (0, 1)), constant_values=PAD)
    for row, end in enumerate(last):
        tokens[row, end] = batch["targets"][row, end - 1]
    mask = np.pad(batch["loss_mask"], ((0, 0), (1, 0))).astype(np.int32)
    return peft_trainer.TrainingInput(input_tokens=tokens, input_mask=mask)


def seen(inputs):
    real = inputs.input_tokens != PAD
    return {
        "input_tokens": inputs.input_tokens, "input_mask": inputs.input_mask,
        "positions": utils.build_positions_from_mask(real),
        "attention_mask": utils.make_causal_attn_mask(real),
    }  # fmt: skip


def curve(trainer, data):
    """Trains and returns the loss of each step."""
    losses = []
    nothing = lambda *_: None  # noqa: E731
    hooks = types.SimpleNamespace(
        on_train_start=nothing, on_train_end=nothing, on_train_step_start=nothing,
        on_train_step_end=lambda _, step, loss: losses.append(float(loss)),
    )  # fmt: skip
    trainer.with_training_hooks(hooks)
    trainer.train(data)
    return losses


def trained(cfg, actor, batches, *, own_loss):
    config = TrainingConfig(eval_every_n_steps=10**6, max_steps=len(batches))
    trainer = PeftTrainer(actor, make_optimizer(cfg.optim, cfg.train.steps), config)
    if own_loss:
        return curve(trainer.with_gen_model_input_fn(seen), map(as_tunix_input, batches))
    return curve(trainer.with_loss_fn(packed_loss), batches)


def ours(cfg, batches):
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        state, step, losses = init_state(cfg, mesh), make_train_step(cfg, mesh), []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses, state.params


def arrays_of(params):
    return {path: np.asarray(x.get_value()) for path, x in nnx.to_flat_state(params)}


def assert_equal_params(got, want, **close):
    got, want = arrays_of(got), arrays_of(want)
    assert got.keys() == want.keys()
    for path, x in want.items():
        np.testing.assert_allclose(got[path], x, err_msg=str(path), **close)


def test_a_padded_or_packed_mask_is_our_segments(cfg):
    """Every text has the logits that it has alone."""
    model = new_model(cfg)
    actor, rng = as_tunix(model), np.random.default_rng(0)
    tokens = rng.integers(0, PAD, (3, 16)).astype(np.int32)
    real = np.ones((3, 16), bool)
    real[0, :5], real[1, 11:] = False, False
    mask = np.array(utils.make_causal_attn_mask(jnp.asarray(real)))
    mask[2, 9:, :9] = False  # two texts in a row
    positions = np.array(utils.build_positions_from_mask(jnp.asarray(real)))
    positions[2, 9:] -= 9
    got = jax.jit(lambda *x: actor(*x)[0])(tokens, positions, None, mask)
    for row, part in [(0, slice(5, 16)), (1, slice(0, 11)), (2, slice(0, 9)), (2, slice(9, 16))]:
        alone = model(tokens[row : row + 1, part])[0]
        np.testing.assert_allclose(got[row, part], alone, rtol=1e-4, atol=1e-5)


def test_other_masks_are_refused_and_never_misread(cfg):
    actor, tokens = as_tunix(new_model(cfg)), jnp.zeros((2, 8), jnp.int32)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((8, 8), bool)), (2, 8, 8))
    for wrong in (jnp.ones((8, 8), bool), causal[0] & ~jnp.tri(8, 8, -4, bool)):
        mask = causal.at[1].set(wrong)
        with pytest.raises(UserError, match="row 1 of the attention mask is not causal"):
            actor(tokens, None, None, mask)
        logits = jax.jit(lambda mask: actor(tokens, None, None, mask)[0])(mask)
        assert jnp.isfinite(logits[0]).all() and jnp.isnan(logits[1]).all()
    with pytest.raises(UserError, match="rollout_engine=EngineRollout"):
        actor(tokens, None, {"layer_0": tokens}, causal)


@pytest.mark.parametrize("own_loss", [True, False], ids=["its own loss", "our packed batches"])
def test_full_fine_tuning_is_ours(cfg, own_loss):
    """The same optimizer gives the same losses and the same parameters."""
    batches = list(conversations(cfg, cfg.train.steps, packed=not own_loss))
    want, params = ours(cfg, batches)
    actor = as_tunix(new_model(cfg))
    got = trained(cfg, actor, batches, own_loss=own_loss)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert_equal_params(plain_params(actor), params, rtol=1e-3, atol=1e-4)


def test_adapters_of_qwix_begin_as_the_model_and_end_in_its_weights(cfg):
    batches = list(conversations(cfg, 6, packed=False))
    want, _ = ours(cfg, batches[:1])
    model = new_model(cfg)
    actor = with_adapters(model)
    fixed = arrays_of(nnx.state(model, nnx.Param))
    batches = [batches[0], *batches[1:5], batches[0]]
    got = trained(cfg, actor, batches, own_loss=True)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    assert got[-1] < got[0] - 0.01
    after = arrays_of(nnx.state(actor.model, nnx.Param))
    for path, x in fixed.items():
        np.testing.assert_array_equal(after[path], x)
    plain = nnx.merge(nnx.graphdef(model), plain_params(actor))
    tokens = jnp.asarray(batches[0]["tokens"])
    np.testing.assert_allclose(plain(tokens), actor(tokens)[0], **EXACT)
    del actor.alpha
    actor.alpha = None
    with pytest.raises(UserError, match="give as_tunix their alpha"):
        plain_params(actor)


def test_what_tunix_trains_becomes_a_run(tiny, tmp_path):
    cfg = tiny(*SFT, "model.lora.rank=0", f"run.dir={tmp_path}", "run.name=base", "train.steps=1")
    train(cfg)
    model, tokenizer = read_run(tmp_path / "base")
    assert tokenizer.decode(tokenizer.encode("é a")) == "é a"
    actor = with_adapters(model)
    trained(cfg, actor, list(conversations(cfg, 2, packed=False)), own_loss=True)
    write_run(actor, tmp_path / "base", tmp_path / "after", 3)
    found, params, _, step = load_run(tmp_path / "after")
    assert (found.model, step) == (cfg.model, 3)
    tokens = jnp.arange(32).reshape(2, 16)
    plain = nnx.merge(nnx.graphdef(new_model(cfg)), params)
    np.testing.assert_allclose(plain(tokens), actor(tokens)[0], **EXACT)
    with pytest.raises(UserError, match="after exists: name a directory"):
        write_run(actor, tmp_path / "base", tmp_path / "after", 3)
    other = as_tunix(new_model(tiny(*SFT, "model.mlp=32")))
    with pytest.raises(UserError, match="this is not the model of"):
        write_run(other, tmp_path / "base", tmp_path / "other", 3)


def pairs(rng, count, prompt=6, answer=5):
    """Prompts with two answers each, of random lengths."""
    lengths = rng.integers(2, prompt + 1, count), *rng.integers(1, answer + 1, (2, count))
    return [tuple(rng.integers(0, PAD, n) for n in one) for one in zip(*lengths, strict=True)]


def padded(texts, size, *, left):
    ids = np.full((len(texts), size), PAD, np.int32)
    for row, text in zip(ids, texts, strict=True):
        part = slice(size - len(text), size) if left else slice(0, len(text))
        row[part] = text
    return ids, (ids != PAD).astype(np.int32)


def in_one_row(pair, T):
    """A pair as a row of ours."""
    row = {
        name: np.zeros(T, np.int32) for name in ("tokens", "targets", "positions", "segment_ids")
    }
    row["loss_mask"], at = np.zeros(T, np.float32), 0
    for segment, answer in enumerate(pair[1:], start=1):
        ids = np.concatenate([pair[0], answer])
        part = slice(at, at + len(ids) - 1)
        row["tokens"][part], row["targets"][part] = ids[:-1], ids[1:]
        row["positions"][part], row["segment_ids"][part] = range(len(ids) - 1), segment
        row["loss_mask"][part.stop - len(answer) : part.stop] = 1
        at = part.stop
    return row


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_our_preference_objective(tiny, smoothing):
    """The loss of a step and all gradients, which plain gradient descent of rate 1 shows as the change."""
    words = ["objective.kind=preference", "data.source=preferences", "data.path=pairs.jsonl"]
    cfg = tiny(
        *SFT,
        *words,
        "objective.beta=0.5",
        f"objective.label_smoothing={smoothing}",
        "data.seq_len=24",
    )
    found = pairs(np.random.default_rng(0), cfg.train.global_batch)
    model, reference = new_model(cfg), new_model(cfg, seed=1)
    before, objective = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param)), preferences(cfg)
    rows = [in_one_row(pair, cfg.data.seq_len) for pair in found]
    batch = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
    assert objective.prepare is not None
    batch = objective.prepare(nnx.state(reference, nnx.Param), batch)

    def mean(params):
        one = nnx.merge(nnx.graphdef(model), params)
        x_BTD = one.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])[0]
        return objective.summed(one, x_BTD, batch)[0] / objective.weight(batch)

    loss, grads = jax.jit(jax.value_and_grad(mean))(before)
    prompts, chosen, rejected = zip(*found, strict=True)
    config = dpo_trainer.DPOTrainingConfig(
        eval_every_n_steps=10**6, max_steps=1, beta=0.5, label_smoothing=smoothing
    )
    actor = as_tunix(model)
    trainer = dpo_trainer.DPOTrainer(actor, as_tunix(reference), optax.sgd(1.0), config)
    (p, pm), (c, cm), (r, rm) = (
        padded(texts, 6, left=left) for texts, left in ((prompts, True), (chosen, False), (rejected, False))
    )  # fmt: skip
    one = dpo_trainer.TrainingInput(p, pm, c, cm, r, rm)
    got = curve(trainer, [one])
    np.testing.assert_allclose(got, [float(loss)], rtol=1e-5)
    change = jax.tree.map(lambda new, old: old - new, plain_params(actor), before)
    assert_equal_params(change, grads, rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module")
def spelling(cfg):
    """Returns a function that makes a model which writes the letters a to h, whatever the prompt."""
    rng, batches = np.random.default_rng(0), []
    shape = cfg.train.global_batch, cfg.data.seq_len
    for _ in range(60):
        ids = 97 + rng.integers(0, 8, (shape[0], shape[1] + 1))
        ids[:, 0] = rng.integers(0, PAD, shape[0])
        batch = {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "positions": np.tile(range(shape[1]), (shape[0], 1)),
        }
        ones = {"segment_ids": np.ones(shape, np.int32), "loss_mask": np.ones(shape, np.float32)}
        batches.append({**batch, **ones})
    actor = as_tunix(new_model(cfg))
    config = TrainingConfig(eval_every_n_steps=10**6, max_steps=len(batches))
    curve(PeftTrainer(actor, optax.adam(1e-2), config).with_loss_fn(packed_loss), batches)
    graphdef, state = nnx.split(actor.model)
    return lambda: nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


def auto_mesh(devices, axis):
    shape = [len(devices) if name == axis else 1 for name in AXES]
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def learn(actor, make_learner, where, *, critic=None, steps, prompts=8, rate=5e-3):
    """Rewards answers for their share of the letters a and b, and returns the mean of each step, and the cluster."""
    train_mesh, rollout_mesh = where
    Role, means = rl_cluster.Role, []

    def reward(prompts, completions, **_):
        found = [sum(x in "ab" for x in text) / 4 for text in completions]
        means.append(float(np.mean(found)))
        return found

    roles = dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.CRITIC), train_mesh)
    config = rl_cluster.ClusterConfig(
        role_to_mesh={**roles, Role.ROLLOUT: rollout_mesh}, rollout_engine=EngineRollout,
        training_config=rl_cluster.RLTrainingConfig(
            eval_every_n_steps=10**6, max_steps=steps, mini_batch_size=prompts,
            actor_optimizer=optax.adam(rate), critic_optimizer=optax.adam(rate),
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=4, max_prompt_length=4, temperature=1.0, return_logprobs=True
        ),
    )  # fmt: skip
    cluster = rl_cluster.RLCluster(
        actor=place_model(actor, train_mesh),
        critic=critic and place_model(critic, train_mesh), cluster_config=config,
        tokenizer=TunixTokenizer(ByteTokenizer(), actor.model.cfg.vocab),
    )  # fmt: skip
    data = [
        {"prompts": np.array([f"{i % 10}{j % 10}=" for j in range(prompts)])} for i in range(steps)
    ]
    make_learner(cluster, reward).train(data)
    return means, cluster


def grpo(cluster, reward):
    return grpo_learner.GRPOLearner(
        cluster, grpo_learner.GRPOConfig(num_generations=8, beta=0.0), reward
    )


def ppo(cluster, reward):
    whole = lambda **x: [float(r >= 0.5) for r in reward(**x)]  # noqa: E731 (Tunix rounds rewards)
    return ppo_learner.PPOLearner(cluster, ppo_learner.PPOConfig(beta=0.0), whole)


def assert_same_policy(cluster):
    """The engine draws from the newest weights: what it says of its answers is what the trainer's model says."""
    rollout, config = cluster.rollout, cluster.get_rollout_config(rl_cluster.Mode.TRAIN)
    drawn = rollout.generate(["12=", "3="], config)
    answers, _ = padded(drawn.tokens, 4, left=False)
    prompts = jnp.asarray(drawn.left_padded_prompt_tokens)
    trainers = cluster.get_actor_per_token_logps(
        prompts, jnp.asarray(answers), rollout.pad_id(), rollout.eos_id()
    )
    mine = rollout.get_per_token_logps(prompts, jnp.asarray(answers))
    for row, logprobs in enumerate(drawn.logprobs):
        for said in (trainers, mine):
            np.testing.assert_allclose(said[row, : len(logprobs)], logprobs, rtol=1e-3, atol=1e-4)


def one_device():
    return (auto_mesh(jax.devices()[:1], "fsdp"),) * 2


def two_meshes():
    return auto_mesh(jax.devices()[:4], "fsdp"), auto_mesh(jax.devices()[4:], "tensor")


def test_grpo_learns_from_the_engine_on_one_device_or_two_meshes(spelling):
    """Trained on four devices and drawn on four others, the rewards are those of one device."""
    means, cluster = learn(as_tunix(spelling()), grpo, two_meshes(), steps=10)
    assert means[0] < 0.4 and np.mean(means[-3:]) > 0.8
    assert_same_policy(cluster)
    optimizer = cluster.actor_trainer.optimizer
    divided = [x.sharding.spec for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim > 1]
    assert any("fsdp" in spec for spec in divided)
    alone, _ = learn(as_tunix(spelling()), grpo, one_device(), steps=4)
    np.testing.assert_allclose(alone, means[:4], atol=0.02)


def test_grpo_trains_adapters_of_qwix(spelling):
    actor = with_adapters(spelling())
    fixed = arrays_of(nnx.state(actor.model, lambda _, x: type(x) is nnx.Param))
    means, cluster = learn(actor, grpo, one_device(), steps=16, rate=1e-2)
    assert np.mean(means[-6:]) > np.mean(means[:4]) + 0.08
    assert_same_policy(cluster)
    after = nnx.state(cluster.actor_trainer.model.model, lambda _, x: type(x) is nnx.Param)
    for path, x in arrays_of(after).items():
        np.testing.assert_array_equal(x, fixed[path])


def test_ppo_learns_with_our_model_as_critic(spelling):
    critic = TunixCritic(spelling())
    means, cluster = learn(
        as_tunix(spelling()), ppo, one_device(), critic=critic, steps=10, prompts=64
    )
    assert means[0] < 0.4 and np.mean(means[-3:]) > 0.6
    assert_same_policy(cluster)
    assert np.abs(cluster.critic_trainer.model.head.get_value()).max() > 0


def test_answers_are_in_tunix_form(cfg):
    """Prompts to the left, the end as a token of the answer, draws of their own, and repeatable by the seed."""
    tokenizer = TokenizerAdapter(TunixTokenizer(ByteTokenizer(), cfg.model.vocab))
    config = RolloutConfig(
        max_tokens_to_generate=40, max_prompt_length=6, return_logprobs=True, temperature=1.0
    )
    mesh = auto_mesh(jax.devices()[:1], "fsdp")
    make = functools.partial(EngineRollout, as_tunix(new_model(cfg)), tokenizer, mesh, config)
    rollout = make()
    ends = dataclasses.replace(config, eos_tokens=list(range(0, 250, 2)))
    first = rollout.generate(["ab"] * 6 + ["abcdef"], ends)
    assert len({tuple(x) for x in first.tokens[:6]}) == 6
    assert first.left_padded_prompt_tokens[:, -2:].tolist() == [[97, 98]] * 6 + [[101, 102]]
    assert (first.left_padded_prompt_tokens[0, :-2] == rollout.pad_id()).all()
    for tokens, logprobs in zip(first.tokens, first.logprobs, strict=True):
        assert len(tokens) == len(logprobs) and len(tokens) <= 40
        assert all(x % 2 or x >= 250 for x in tokens[:-1])
        assert len(tokens) == 40 or (tokens[-1] % 2 == 0 and tokens[-1] < 250)
    again = make().generate(["ab"] * 6 + ["abcdef"], ends)
    assert [x.tolist() for x in again.tokens] == [x.tolist() for x in first.tokens]
    second = rollout.generate(["ab"] * 6 + ["abcdef"], ends)
    assert [x.tolist() for x in second.tokens] != [x.tolist() for x in first.tokens]
    with pytest.raises(UserError, match="a prompt has 7 tokens: set max_prompt_length=7"):
        rollout.generate(["abcdefg"], config)


def test_padding_is_an_id_without_text():
    bytes_, bpe = ByteTokenizer(), train_bpe(["ab abc ab abc"] * 9, 260)
    assert TunixTokenizer(bytes_, 300).pad_id() == 299
    for tokenizer in (bytes_, bpe):
        mine = TokenizerAdapter(TunixTokenizer(tokenizer, tokenizer.vocab_size))
        assert mine.pad_id() not in mine.encode("".join(map(chr, range(0xD7FF))))
        assert mine.decode([mine.pad_id(), *mine.encode("ab"), mine.eos_id()]) == "ab"
        assert mine.bos_id() is None and mine.eos_id() == tokenizer.eod_id
    full = types.SimpleNamespace(vocab_size=300, no_text=None)
    with pytest.raises(UserError, match="name one for padding with pad="):
        TunixTokenizer(full, 300)  # pyright: ignore[reportArgumentType]
    assert TunixTokenizer(full, 300, pad=7).pad_id() == 7  # pyright: ignore[reportArgumentType]
