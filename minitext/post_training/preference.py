"""Losses on pairs: which of two answers to a prompt a model should prefer.

A row of the batch is a pair: its first segment is the prompt with the chosen answer, its second the prompt with the
rejected one, and `loss_mask` is 1 for the answers' tokens alone. So both answers take one forward pass, and no pair is
ever divided between devices.

    name    paper                   what has to become large                        compares with a reference
    dpo     Rafailov et al. 2023    log-likelihood ratio to the reference           yes
    ipo     Azar et al. 2024        the same per token, up to 1 / (2 beta)          yes
    orpo    Hong et al. 2024        odds, beside the likelihood of the chosen       no
    simpo   Meng et al. 2024        log-likelihood per token, by a margin           no

The reference is the model that training starts from. With adapters it's the model without them, which takes no memory.

Chapters: 26.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from minitext.config.config import Config
from minitext.config.objective import PreferenceConfig
from minitext.models.lora import without_lora
from minitext.training.objective import Batch, Objective, token_logps
from minitext.training.step import model_def
from minitext.training.task import Task

CHOSEN, REJECTED = 1, 2  # segments of a row


class Answers(NamedTuple):
    """The log-probabilities of the answers of each pair, in nats, [B] float32.

    Attributes:
      chosen: of the chosen answer, summed over its tokens.
      rejected: of the rejected answer.
      chosen_tokens: how many tokens the chosen answer has, at least 1.
      rejected_tokens: the same for the rejected one.
    """

    chosen: jax.Array
    rejected: jax.Array
    chosen_tokens: jax.Array
    rejected_tokens: jax.Array

    def means(self) -> tuple[jax.Array, jax.Array]:
        """Returns the mean over the tokens of the chosen and of the rejected answers."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def sum_answers(logp_BT: jax.Array, segment_ids_BT: jax.Array, loss_mask_BT: jax.Array) -> Answers:
    """Sums the log-probabilities [B, T] of targets over each answer of rows that are pairs."""
    sums, counts = [], []
    for segment in (CHOSEN, REJECTED):
        mask_BT = (loss_mask_BT != 0) & (segment_ids_BT == segment)
        sums.append(jnp.sum(jnp.where(mask_BT, logp_BT, 0.0), axis=1))
        counts.append(jnp.maximum(jnp.sum(mask_BT, axis=1), 1).astype(jnp.float32))
    return Answers(*sums, *counts)


def _dpo(cfg: PreferenceConfig, policy: Answers, reference: Answers) -> tuple[jax.Array, jax.Array]:
    reward = cfg.beta * (policy.chosen - reference.chosen)
    margin = reward - cfg.beta * (policy.rejected - reference.rejected)
    wrong = cfg.label_smoothing
    loss = -(1 - wrong) * jax.nn.log_sigmoid(margin) - wrong * jax.nn.log_sigmoid(-margin)
    return loss, margin


def _ipo(cfg: PreferenceConfig, policy: Answers, reference: Answers) -> tuple[jax.Array, jax.Array]:
    # Means, as the authors' experiments have them; sums would want less of a token the longer an answer is.
    (chosen, rejected), (was_chosen, was_rejected) = policy.means(), reference.means()
    ratio = (chosen - was_chosen) - (rejected - was_rejected)
    return jnp.square(ratio - 1 / (2 * cfg.beta)), ratio


def _orpo(cfg: PreferenceConfig, policy: Answers, _: Answers) -> tuple[jax.Array, jax.Array]:
    chosen, rejected = policy.means()
    margin = _log_odds(chosen) - _log_odds(rejected)
    return -chosen - cfg.beta * jax.nn.log_sigmoid(margin), margin


def _simpo(cfg: PreferenceConfig, policy: Answers, _: Answers) -> tuple[jax.Array, jax.Array]:
    chosen, rejected = policy.means()
    margin = cfg.beta * (chosen - rejected)
    return -jax.nn.log_sigmoid(margin - cfg.margin), margin


def _log_odds(logp: jax.Array) -> jax.Array:
    """Returns ln(p / (1 - p)) for ln p; of a p that rounds to 1, the odds of the next smaller number."""
    logp = jnp.minimum(logp, -1e-7)
    return logp - jnp.log(-jnp.expm1(logp))


class Loss(NamedTuple):
    """A row of the table.

    Attributes:
      of: (settings, policy, reference) -> the loss and the margin of each pair, [B]. A pair is right if its margin is
        above 0.
      compares: whether it uses the reference.
    """

    of: Callable[[PreferenceConfig, Answers, Answers], tuple[jax.Array, jax.Array]]
    compares: bool


LOSSES = {
    "dpo": Loss(_dpo, True),
    "ipo": Loss(_ipo, True),
    "orpo": Loss(_orpo, False),
    "simpo": Loss(_simpo, False),
}


def preferences(cfg: Config) -> Objective:
    """Returns the objective of a configuration with `objective.kind=preference`.

    It reports, as means over pairs: `loss`; `accuracy`, the share of pairs whose margin is above 0; `margin`, which is
    that of the rewards in dpo and simpo, of log-likelihood ratios per token in ipo, and of log odds in orpo; and the
    log-probabilities of both answers, `chosen_logp` and `rejected_logp`, in nats per answer.
    """
    settings = cfg.objective
    assert isinstance(settings, PreferenceConfig)
    loss = LOSSES[settings.loss]

    def summed(model, x_BTD, batch):
        seen = batch["segment_ids"], batch["loss_mask"]
        policy = sum_answers(token_logps(cfg, model, x_BTD, batch), *seen)
        reference = sum_answers(batch["ref_logp"], *seen) if loss.compares else policy
        loss_B, margin_B = loss.of(settings, policy, reference)
        pair_B = _pairs(batch)
        values = {
            "loss": loss_B,
            "accuracy": (margin_B > 0).astype(jnp.float32),
            "margin": margin_B,
            "chosen_logp": policy.chosen,
            "rejected_logp": policy.rejected,
        }
        sums = {name: jnp.sum(jnp.where(pair_B, x_B, 0.0)) for name, x_B in values.items()}
        return sums["loss"], sums

    def weight(batch):
        return jnp.sum(_pairs(batch).astype(jnp.float32))

    return Objective(summed, weight, add_reference(cfg) if loss.compares else None)


def _pairs(batch: Batch) -> jax.Array:
    """Returns which rows are pairs, [B]; others fill up the last batch."""
    return jnp.any(batch["loss_mask"] != 0, axis=1)


def add_reference(cfg: Config) -> Callable[[object, Batch], Batch]:
    """Returns a function of (reference parameters, batch) that adds the targets' `ref_logp`, [B, T] float32."""
    graphdef = model_def(cfg.model_copy(update={"model": without_lora(cfg.model)}))

    def prepare(reference, batch):
        model = nnx.merge(graphdef, reference)
        x_BTD = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])[0]
        logp_BT = token_logps(cfg, model, x_BTD, batch)
        return {**batch, "ref_logp": jax.lax.stop_gradient(logp_BT)}

    return prepare


class Preferences(Task):
    """Training on pairs of answers."""

    kind = "preference"

    def objective(self, cfg: Config) -> Objective:
        """Returns the loss that `objective.loss` names."""
        return preferences(cfg)

    def needs_reference(self, cfg: Config) -> bool:
        """Returns whether that loss compares with the model that training starts from."""
        assert isinstance(cfg.objective, PreferenceConfig)
        return LOSSES[cfg.objective.loss].compares
