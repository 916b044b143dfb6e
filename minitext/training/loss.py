"""Cross-entropy, summed and counted per token.

A loss is kept as a sum and a count until the very end: microbatches, devices and processes hold different numbers of
target tokens, and a mean of their means would weight the tokens unequally.

Chapters: 6.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from minitext import kernels
from minitext.sharding.rules import ShardingRules, flatten_tokens


@jax.named_scope("loss")
def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, *, z_loss: float = 0.0
) -> jax.Array:
    """Returns the negative log-likelihood of every target, in nats.

    Args:
      logits_BTV: [B, T, V] float32.
      targets_BT: [B, T] integers below V.
      z_loss: weight of the squared logsumexp, which keeps logits near zero (Chowdhery et al. 2022).

    Returns:
      [B, T] float32.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    # A masked sum instead of a gather: it stays local when the vocabulary is sharded, and fuses with the logsumexp.
    # The iota is sharded like the logits; `arange` would be the whole vocabulary on every device.
    sharding = jax.typeof(logits_BTV).sharding
    id_BTV = jax.lax.broadcasted_iota(
        jnp.int32, logits_BTV.shape, 2, out_sharding=None if sharding.mesh.empty else sharding
    )
    hit_BTV = id_BTV == targets_BT[:, :, None]
    target_BT = jnp.sum(jnp.where(hit_BTV, logits_BTV, 0.0), axis=-1)
    return normalizer_BT - target_BT + z_loss * jnp.square(normalizer_BT)


def masked_sum(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Returns the sum of the values where the mask is not 0, as a float32 scalar."""
    return jnp.sum(jnp.where(mask_BT != 0, values_BT, 0.0))


@jax.named_scope("loss")
def fused_sums(
    x_BTD: jax.Array,
    w_DV: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    z_loss: float,
    impl: str,
    rules: ShardingRules,
) -> tuple[jax.Array, jax.Array]:
    """Returns the masked sums of the loss, with and without z-loss, from a kernel that needn't store logits.

    Args:
      x_BTD: [B, T, D] hidden states, rows whole on their devices.
      w_DV: [D, V] output layer, of the same type.
      targets_BT: [B, T] integers below V.
      mask_BT: [B, T], 0 where a target doesn't count.
      z_loss: weight of the squared logsumexp.
      impl: of `minitext.kernels.linear_cross_entropy`.
      rules: how tokens are sharded.
    """
    x_XD, targets_X, mask_X = (flatten_tokens(x, rules) for x in (x_BTD, targets_BT, mask_BT))
    nll_X, normalizer_X = kernels.linear_cross_entropy(x_XD, w_DV, targets_X, impl=impl)
    nll = masked_sum(nll_X, mask_X)
    return nll + z_loss * masked_sum(jnp.square(normalizer_X), mask_X), nll


def sum_in_chunks(
    sums: Callable[..., tuple[jax.Array, jax.Array]],
    x_BTD: jax.Array,
    *per_token_BT: jax.Array,
    chunks: int,
    rules: ShardingRules,
) -> tuple[jax.Array, jax.Array]:
    """Adds up `sums(x_BtD, *per_token_Bt)` over chunks of the sequence, each recomputed in the backward pass.

    Logits, t*V numbers for each row, exist for one chunk at a time. The chunks' gradients of an unsharded parameter are
    added up in float32, and weights sharded by fsdp are gathered again for each chunk.

    Args:
      sums: returns two float32 scalars.
      x_BTD: [B, T, D] hidden states.
      per_token_BT: [B, T] arrays.
      chunks: how many; it divides the tokens of a row that a device holds.
      rules: how tokens are sharded.
    """

    @jax.checkpoint
    def add(total, chunk):
        return jax.tree.map(jnp.add, total, sums(*chunk)), None

    arrays = _chunks(x_BTD, per_token_BT, chunks, rules)
    return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros(())), arrays)[0]


def map_in_chunks(
    fn: Callable[..., Any],
    x_BTD: jax.Array,
    *per_token_BT: jax.Array,
    chunks: int,
    rules: ShardingRules,
) -> Any:
    """Returns the arrays [B, T] of `fn(x_BtD, *per_token_Bt)`, computed by chunks as `sum_in_chunks` does."""
    if chunks == 1:
        return fn(x_BTD, *per_token_BT)

    @jax.checkpoint
    def one(_, chunk):
        return None, fn(*chunk)

    def join(x_MBt):
        x_BtM, out = jnp.moveaxis(x_MBt, 0, 2), rules.out("batch", "seq")
        return jax.lax.reshape(x_BtM, x_BTD.shape[:2], out_sharding=out)

    arrays = _chunks(x_BTD, per_token_BT, chunks, rules)
    return jax.tree.map(join, jax.lax.scan(one, None, arrays)[1])


def _chunks(
    x_BTD: jax.Array, per_token_BT: Sequence[jax.Array], chunks: int, rules: ShardingRules
) -> tuple[jax.Array, ...]:
    """Returns the arrays as [M, B, T / M, ...]: token t is in chunk t % M, so every device keeps its own tokens."""

    def split(x, *names):
        (B, T, *rest), M = x.shape, chunks
        out = rules.out(*names[:2], None, *names[2:])
        return jnp.moveaxis(jax.lax.reshape(x, (B, T // M, M, *rest), out_sharding=out), 2, 0)

    return (
        split(x_BTD, "batch", "residual", "act"),
        *(split(x, "batch", "seq") for x in per_token_BT),
    )
