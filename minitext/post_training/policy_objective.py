"""The objectives of GRPO and PPO for the train step, and what the trainer says of answers before it learns from them.

Chapters: 26.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from minitext.config.config import Config
from minitext.config.objective import PPOConfig, RolloutConfig
from minitext.errors import UserError
from minitext.models.lora import without_lora
from minitext.models.transformer import Transformer
from minitext.post_training.policy_loss import (
    clipped_ratio_loss,
    clipped_value_loss,
    entropy,
    kl_estimate,
)
from minitext.sharding.rules import RULES
from minitext.training.loss import cross_entropy, masked_sum
from minitext.training.objective import Batch, Objective
from minitext.training.step import model_def


def rollout_config(cfg: Config) -> RolloutConfig:
    """Returns the objective's settings, which are those of GRPO or PPO."""
    assert isinstance(cfg.objective, RolloutConfig)
    return cfg.objective


def check_objective(cfg: Config, _mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError for settings that don't go with learning from a model's own answers."""
    rl = rollout_config(cfg)
    wrong = {
        "train.loss_impl": (cfg.train.loss_impl, "xla"),
        "train.loss_chunks": (cfg.train.loss_chunks, 1),
        "train.z_loss": (cfg.train.z_loss, 0.0),
    }
    for key, (value, right) in wrong.items():
        if value != right:
            raise UserError(
                f"{key}={value} is not for objective.kind={cfg.objective.kind}: set {key}={right}"
            )
    if rl.answers % cfg.train.global_batch:
        raise UserError(
            f"objective.prompts={rl.prompts} x objective.group={rl.group} are {rl.answers} answers, which are not "
            f"divisible by train.global_batch={cfg.train.global_batch}: set it to {rl.answers} or a divisor of it"
        )
    if rl.max_tokens > cfg.data.seq_len:
        raise UserError(
            f"objective.max_tokens={rl.max_tokens} leaves no room for a prompt in rows of data.seq_len="
            f"{cfg.data.seq_len}: raise data.seq_len"
        )
    if isinstance(rl, PPOConfig) and cfg.model.lora.rank:
        raise UserError(
            f"model.lora.rank={cfg.model.lora.rank} trains adapters alone, and objective.kind=ppo a value head: set "
            "model.lora.rank=0, or objective.kind=grpo"
        )
    if cfg.model.value_head != isinstance(rl, PPOConfig):
        needs = "needs" if isinstance(rl, PPOConfig) else "has no use for"
        raise UserError(
            f"objective.kind={cfg.objective.kind} {needs} a value head: set model.value_head="
            f"{str(isinstance(rl, PPOConfig)).lower()}"
        )


def updates(cfg: Config) -> int:
    """Returns the steps that are made with the answers of one set of parameters."""
    rl = rollout_config(cfg)
    return rl.iterations * rl.answers // cfg.train.global_batch


def make_objective(cfg: Config) -> Objective:
    """Returns the objective of `cfg.objective`: the clipped ratio, the divergence, the entropy, and PPO's values.

    The sums to report are weighted so that, divided by `Objective.weight`, they are means over the answers' tokens:
    `kl`, `entropy`, `clip_share`, `ratio`, and `value_loss`.
    """
    rl = rollout_config(cfg)
    ppo = rl if isinstance(rl, PPOConfig) else None

    def weight(batch: Batch) -> jax.Array:
        return loss_weight(rl, batch)

    def summed(model: Transformer, x_BTD: jax.Array, batch: Batch):
        logits_BTV = model.logits(x_BTD) / rl.temperature
        logp_BT = -cross_entropy(logits_BTV, batch["targets"])
        clipped = clipped_ratio_loss(
            logp_BT, batch["old_logp"], batch["advantages"], clip=rl.clip, clip_high=rl.clip_high
        )
        entropy_BT, loss_BT = entropy(logits_BTV), clipped.loss
        means = {"entropy": entropy_BT, "clip_share": clipped.clipped, "ratio": clipped.ratio}
        if rl.kl:
            means["kl"] = kl_estimate(logp_BT, batch["ref_logp"])
        if rl.kl and not ppo:  # PPO has it in the rewards
            loss_BT = loss_BT + rl.kl * means["kl"]
        if rl.entropy:
            loss_BT = loss_BT - rl.entropy * entropy_BT
        if ppo:
            old = batch["old_values"], batch["returns"]
            means["value_loss"] = clipped_value_loss(model.values(x_BTD), *old, clip=ppo.value_clip)
            loss_BT = loss_BT + ppo.value_weight * means["value_loss"]
        loss = masked_sum(batch["token_weight"] * loss_BT, batch["loss_mask"])
        share_BT = batch["token_share"]
        sums = {name: masked_sum(share_BT * x_BT, share_BT) for name, x_BT in means.items()}
        return loss, {"loss": loss, **sums}

    return Objective(summed, weight, arrays=arrays(rl))


def loss_weight(rl: RolloutConfig, batch: Any) -> Any:
    """Returns by what sums over a batch are divided, a float32 scalar: of `jax.Array`s, or of numpy's."""
    if rl.weighting == "constant":
        return (batch["loss_mask"] != 0).any(axis=1).sum().astype("float32")  # answers
    return batch["token_weight"].sum()


def token_share(rl: RolloutConfig, batch: Any) -> Any:
    """Returns what sums of means over the answers' tokens are weighted with, [B, T]: `loss_weight` / tokens each."""
    mask_BT = batch["loss_mask"]
    return mask_BT * (loss_weight(rl, batch) / max(mask_BT.sum(), 1.0))


def arrays(rl: RolloutConfig) -> tuple[str, ...]:
    """Returns the names of the arrays [B, T] that batches have besides those of language modelling."""
    names = ("old_logp", "advantages", "token_weight", "token_share")
    names += ("ref_logp",) if rl.kl else ()
    return names + (("old_values", "returns") if isinstance(rl, PPOConfig) else ())


def make_scorer(cfg: Config, *, reference: bool = False) -> Callable[[Any, Batch], Batch]:
    """Returns a jitted function of (parameters, batch) that says what a model finds of the batch's targets.

    Args:
      cfg: the configuration.
      reference: whether the model is the one that training starts from, without adapters and value head.

    Returns:
      A dict of arrays [B, T] float32: `logp`, the log-probabilities; `scaled_logp`, those at `objective.temperature`;
      and of a model with a value head `values`.
    """
    rl, rules = rollout_config(cfg), RULES[cfg.sharding.rules]
    if reference:
        plain = without_lora(cfg.model).model_copy(update={"value_head": False})
        cfg = cfg.model_copy(update={"model": plain})
    graphdef = model_def(cfg)

    def score(params: Any, batch: Batch) -> Batch:
        batch = {name: rules.shard(x, "batch", "seq") for name, x in batch.items()}
        model = nnx.merge(graphdef, params)
        x_BTD, _, _ = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
        logits_BTV = model.logits(x_BTD)
        logp_BT = -cross_entropy(logits_BTV, batch["targets"])
        found = {"logp": logp_BT, "scaled_logp": logp_BT}
        if rl.temperature != 1:
            scaled_BTV = logits_BTV / rl.temperature
            found["scaled_logp"] = -cross_entropy(scaled_BTV, batch["targets"])
        if cfg.model.value_head:
            found["values"] = model.values(x_BTD)
        return found

    return jax.jit(score)
