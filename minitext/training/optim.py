"""Optimizers as chains of gradient transformations: clipping, a direction, weight decay, the scheduled rate.

Chapters: 5.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from minitext.config.sections import OptimConfig

# Coefficients of a*s + b*s^3 + c*s^5, which drives singular values towards 1 in five iterations (Jordan 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MUON_RMS = 0.2  # root mean square of an update: about AdamW's, so AdamW's rates and decay carry over (Liu et al. 2025)


def make_schedule(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step: linear warm-up, then one of four schedules.

    `cosine` and `linear` decay from the end of the warm-up; `wsd` (warm-up, stable, decay; Hu et al. 2024) stays at the
    peak and decays linearly over the last `decay_share` of the run; `constant` stays at the peak.

    Args:
      cfg: peak, warm-up and schedule.
      steps: steps in the whole run, where a decay reaches `min_ratio` of the peak.
    """
    peak, floor = cfg.learning_rate, cfg.learning_rate * cfg.min_ratio
    rest = max(1, steps - cfg.warmup_steps)
    decay = min(rest, max(1, round(cfg.decay_share * steps)))
    course = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=cfg.min_ratio),
        "linear": optax.linear_schedule(peak, floor, rest),
        "wsd": optax.linear_schedule(peak, floor, decay, transition_begin=rest - decay),
        "constant": optax.constant_schedule(peak),
    }[cfg.schedule]
    # The first step already has a rate: at zero it would be wasted.
    warmup = optax.linear_schedule(peak / (cfg.warmup_steps + 1), peak, cfg.warmup_steps)
    return optax.join_schedules([warmup, course], [cfg.warmup_steps])


def make_optimizer(cfg: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Returns clipping by global norm followed by the optimizer, with decoupled decay (Loshchilov and Hutter 2019).

    The state is float32, with the parameters' shapes and shardings. Matrices decay, norm scales don't.
    """
    update = optax.chain(
        DIRECTIONS[cfg.kind](cfg),
        optax.add_decayed_weights(cfg.weight_decay, decay_mask),
        optax.scale_by_learning_rate(make_schedule(cfg, steps)),
    )
    whole = optax.chain(optax.clip_by_global_norm(cfg.clip_norm), update)
    return optax.GradientTransformation(whole.init, jax.named_scope("optimizer")(whole.update))


def _adam(cfg: OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)


def _muon(cfg: OptimConfig) -> optax.GradientTransformation:
    """Orthogonalised Nesterov momentum for the layers' matrices (Jordan 2024), Adam for all other parameters.

    `optax.contrib.scale_by_muon` (optax 0.2.8) gives the same directions on one device, and a ShardingTypeError where a
    matrix is sharded over an Explicit mesh.
    """
    matrices = optax.chain(
        optax.trace(cfg.b1, nesterov=True),
        optax.stateless(lambda updates, _: jax.tree.map(orthogonalize, updates)),
    )
    return optax.partition({"muon": matrices, "adam": _adam(cfg)}, muon_labels)


# What each optimizer makes of a clipped gradient, before decay and learning rate.
DIRECTIONS: dict[str, Callable[[OptimConfig], optax.GradientTransformation]] = {
    "adamw": _adam,
    "sgd": lambda cfg: optax.trace(cfg.b1),
    "lion": lambda cfg: optax.scale_by_lion(cfg.b1, cfg.b2),  # Chen et al. 2023
    "muon": _muon,
}


def orthogonalize(update: jax.Array) -> jax.Array:
    """Moves the singular values of matrices close to 1, by five Newton-Schulz iterations.

    Args:
      update: [..., D, F] matrices, stacked along the leading dimensions.

    Returns:
      The same shape and sharding, scaled to a root mean square of about `MUON_RMS`. During the iterations every device
      holds whole matrices.
    """
    sharding = jax.typeof(update).sharding
    gathered = not sharding.mesh.empty
    x = jax.sharding.reshard(update, PartitionSpec()) if gathered else update
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else jnp.swapaxes(x, -2, -1)
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    x = x / jnp.maximum(norm, 1e-12)  # a matrix of zeros stays one
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = jnp.einsum("...DF,...EF->...DE", x, x)
        poly = b * gram + c * jnp.einsum("...DE,...EG->...DG", gram, gram)
        x = a * x + jnp.einsum("...DE,...EF->...DF", poly, x)
    x = MUON_RMS * math.sqrt(x.shape[-1]) * (x if wide else jnp.swapaxes(x, -2, -1))
    return jax.sharding.reshard(x, sharding) if gathered else x


def decay_mask(params: Any) -> Any:
    """Returns True for every parameter with at least two named dimensions.

    A stacked layer's scale is an [L, D] array with one named dimension, so this counts names, not ranks.
    """
    return _label(params, lambda names: len(names) >= 2)


def muon_labels(params: Any) -> Any:
    """Returns `muon` for matrices between layers, `adam` for scales, convolutions, embedding and output layer."""
    others = {"vocab", "taps"}
    return _label(params, lambda n: "muon" if len(n) >= 2 and not others & set(n) else "adam")


def _label(params: Any, label: Callable[[tuple[str, ...]], Any]) -> Any:
    """Labels each parameter by the names of its dimensions; a plain array's dimensions have empty names."""
    named = lambda x: hasattr(x, "axes")  # noqa: E731
    return jax.tree.map(
        lambda x: label(x.axes) if named(x) else label(("",) * x.ndim),
        params,
        is_leaf=named,
    )


def state_bytes(cfg: OptimConfig, params: Any) -> int:
    """Returns the bytes of the optimizer's state for these parameters, arrays or `jax.ShapeDtypeStruct`s, unsharded."""
    state = jax.eval_shape(make_optimizer(cfg, 1).init, params)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
