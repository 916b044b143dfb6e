"""The optimizer: AdamW with warm-up, a schedule and clipping, built from optax.

Chapters: 5.
"""

from typing import Any

import jax
import optax

from minitext.config import OptimConfig


def make_schedule(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step: linear warm-up from zero, then cosine or constant.

    Args:
      cfg: peak, warm-up and shape.
      steps: steps in the whole run; the cosine ends there at `min_ratio` of the peak.
    """
    peak = cfg.learning_rate
    rest = max(1, steps - cfg.warmup_steps)
    course = (
        optax.cosine_decay_schedule(peak, rest, alpha=cfg.min_ratio)
        if cfg.schedule == "cosine"
        else optax.constant_schedule(peak)
    )
    # Step 0 already moves: a first step at rate zero would be a step wasted.
    warmup = optax.linear_schedule(peak / (cfg.warmup_steps + 1), peak, cfg.warmup_steps)
    return optax.join_schedules([warmup, course], [cfg.warmup_steps])


def make_optimizer(cfg: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Returns clipping by global norm followed by AdamW (Loshchilov and Hutter 2019).

    Moments are float32 and shaped and sharded as the parameters are. Matrices decay, norm scales don't.
    """
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(
            make_schedule(cfg, steps),
            b1=cfg.b1,
            b2=cfg.b2,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            mask=decay_mask,
        ),
    )


def decay_mask(params: Any) -> Any:
    """Returns True for every parameter with at least two named dimensions.

    A scale of a stacked layer is an [L, D] array of one named dimension, so names count, not ranks.
    """
    named = lambda x: hasattr(x, "axes")  # noqa: E731
    return jax.tree.map(
        lambda x: x.replace(len(x.axes) >= 2) if named(x) else x.ndim >= 2, params, is_leaf=named
    )
