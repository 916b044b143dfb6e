"""What a step minimises, apart from how it does: the step, the mesh and the loop are the same for all objectives.

An objective is a sum over a batch, and what this sum is divided by. Both are added up over microbatches and devices
before the division (`minitext.training.loss` says why).

Chapters: 6, 26.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from minitext import kernels
from minitext.config.config import Config
from minitext.errors import UserError
from minitext.models.transformer import Transformer
from minitext.sharding.rules import RULES, flatten_tokens, unflatten_tokens
from minitext.training.loss import (
    cross_entropy,
    fused_sums,
    map_in_chunks,
    masked_sum,
    sum_in_chunks,
)

Batch = dict[str, jax.Array]


class Objective(NamedTuple):
    """What a step minimises.

    Attributes:
      summed: (model, its hidden states [B, T, D], batch) -> the loss summed over the batch, and sums to report by name,
        `loss` among them; all float32 scalars.
      weight: batch -> the number by which sums are divided, such as that of the targets.
      prepare: (reference parameters, batch) -> batch with arrays that need another model than the one in training, such
        as a reference model's log-probabilities; None: nothing is added. No gradient flows through it.
      arrays: names of the arrays [B, T] in a batch besides those of language modelling; all are float32.
    """

    summed: Callable[[Transformer, jax.Array, Batch], tuple[jax.Array, dict[str, jax.Array]]]
    weight: Callable[[Batch], jax.Array]
    prepare: Callable[[Any, Batch], Batch] | None = None
    arrays: tuple[str, ...] = ()


def count_targets(batch: Batch) -> jax.Array:
    """Returns the number of targets that count, as a float32 scalar."""
    return jnp.sum(batch["loss_mask"].astype(jnp.float32))


def language_modelling(cfg: Config) -> Objective:
    """Returns the objective of pretraining and supervised fine-tuning: cross-entropy per target token.

    Raises:
      UserError: for a configuration of another objective.
    """
    if cfg.objective.kind != "lm":
        raise UserError(
            f"objective.kind={cfg.objective.kind} is not language modelling, whose step is asked for: set "
            "objective.kind=lm"
        )
    rules = RULES[cfg.sharding.rules]

    def fused(model, x_BTD, batch):
        w_DV, per_token = model.output_weight(x_BTD.dtype), (batch["targets"], batch["loss_mask"])
        loss, nll = fused_sums(
            x_BTD, w_DV, *per_token, z_loss=cfg.train.z_loss, impl=cfg.train.loss_impl, rules=rules
        )
        return loss, {"loss": nll}

    def summed(model, x_BTD, batch):
        def sums(x_BTD, targets_BT, mask_BT):
            logits_BTV = model.logits(x_BTD)
            nll = masked_sum(cross_entropy(logits_BTV, targets_BT), mask_BT)
            if not cfg.train.z_loss:
                return nll, nll
            total = cross_entropy(logits_BTV, targets_BT, z_loss=cfg.train.z_loss)
            return masked_sum(total, mask_BT), nll

        tokens, chunks = (x_BTD, batch["targets"], batch["loss_mask"]), cfg.train.loss_chunks
        if chunks == 1:
            loss, nll = sums(*tokens)
        else:
            loss, nll = sum_in_chunks(sums, *tokens, chunks=chunks, rules=rules)
        return loss, {"loss": nll}

    return Objective(summed if cfg.train.loss_impl == "xla" else fused, count_targets)


def token_logps(cfg: Config, model: Transformer, x_BTD: jax.Array, batch: Batch) -> jax.Array:
    """Returns the log-probability of each target, [B, T] float32 in nats, also where `loss_mask` is 0."""
    rules = RULES[cfg.sharding.rules]
    if cfg.train.loss_impl != "xla":
        w_DV = model.output_weight(x_BTD.dtype)
        x_XD, targets_X = (flatten_tokens(x, rules) for x in (x_BTD, batch["targets"]))
        nll_X, _ = kernels.linear_cross_entropy(x_XD, w_DV, targets_X, impl=cfg.train.loss_impl)
        return -unflatten_tokens(nll_X, len(x_BTD), sizes=(), rules=rules)

    def logps(x_BTD, targets_BT):
        return -cross_entropy(model.logits(x_BTD), targets_BT)

    chunks = cfg.train.loss_chunks
    return map_in_chunks(logps, x_BTD, batch["targets"], chunks=chunks, rules=rules)
