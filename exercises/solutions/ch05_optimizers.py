import jax
import jax.numpy as jnp


# EXERCISE 05.adamw
def adamw_update(
    grads,
    state,
    params,
    rate,
    decays,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.1,
):
    """One update of AdamW, from its definition.

    Args:
      grads: pytree of float32 or bfloat16 arrays.
      state: {"count": int32 scalar, the updates made so far; "mu" and "nu":
        pytrees like grads, in float32}. All are zero before the first update.
      params: pytree of float32 arrays, like grads.
      rate: learning rate, a Python float or a float32 scalar.
      decays: pytree of Python bools, like grads: which parameters decay.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the corrected second moment.
      weight_decay: the factor lambda on a parameter that decays.

    Returns:
      (updates, state): what is to be *added* to the parameters, in float32,
      and the new state with the structure and dtypes of the old one.
    """
    # BEGIN SOLUTION
    count = state["count"] + 1
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    squares = jax.tree.map(jnp.square, grads)
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["mu"], grads)
    nu = jax.tree.map(lambda v, s: b2 * v + (1 - b2) * s, state["nu"], squares)
    # The averages began at zero; after t updates their weights add up to
    # 1 - b^t. The state keeps the averages as they are: corrected ones would
    # be corrected again in the next update.
    t = count.astype(jnp.float32)
    weight1, weight2 = 1 - b1**t, 1 - b2**t

    def update(m, v, p, decay):
        direction = (m / weight1) / (jnp.sqrt(v / weight2) + eps)
        return -rate * (direction + weight_decay * p if decay else direction)

    updates = jax.tree.map(update, mu, nu, params, decays)
    return updates, {"count": count, "mu": mu, "nu": nu}
    # END SOLUTION


# EXERCISE 05.clip
def clip_tree(grads, limit):
    """Shorten a gradient whose global norm is above a limit.

    Args:
      grads: pytree of float32 or bfloat16 arrays of any shapes, including
        scalars.
      limit: largest norm, a Python float above 0.

    Returns:
      (grads, norm): the gradient, each array in the shape and dtype it came
      in; and the norm it had *before*, a float32 scalar.
    """
    # BEGIN SOLUTION
    wide = [g.astype(jnp.float32) for g in jax.tree.leaves(grads)]
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in wide))
    # The factor for a short gradient is exactly 1. The maximum keeps the
    # division away from zero.
    scale = jnp.where(norm > limit, limit / jnp.maximum(norm, limit), 1.0)

    def shorten(g):
        return (g.astype(jnp.float32) * scale).astype(g.dtype)

    return jax.tree.map(shorten, grads), norm
    # END SOLUTION


# EXERCISE 05.wsd
def wsd_rate(step, steps, peak, warmup, decay, final=0.0):
    """The learning rate of warm-up, stable phase and decay.

    Args:
      step: int32 scalar or array of any shape, perhaps traced; steps are
        counted from 0.
      steps: steps in the whole run, a Python int above `warmup`.
      peak: rate of the stable phase.
      warmup: steps of linear warm-up, a Python int of at least 0.
      decay: steps of linear decay at the end, a Python int of at least 1.
      final: rate at step `steps` and after it.

    Returns:
      float32 in the shape of `step`.
    """
    # BEGIN SOLUTION
    step = jnp.asarray(step, jnp.float32)
    rising = peak * (step + 1) / (warmup + 1)
    # A decay never begins before the warm-up is over.
    begin = max(warmup, steps - decay)
    done = jnp.clip((step - begin) / (steps - begin), 0.0, 1.0)
    falling = peak + (final - peak) * done
    return jnp.where(step < warmup, rising, falling)
    # END SOLUTION


# EXERCISE 05.orthogonalize
def newton_schulz(x, rounds=5, a=3.4445, b=-4.7750, c=2.0315):
    """Drive singular values of matrices towards 1; singular vectors are kept.

    Args:
      x: float32 or bfloat16 [..., M, N]: matrices, tall or wide, in a stack of
        any dimensions.
      rounds: how often the polynomial a s + b s^3 + c s^5 is applied to the
        singular values.
      a: the polynomial's first coefficient.
      b: its second.
      c: its third.

    Returns:
      float32 in the shape of x.
    """
    # BEGIN SOLUTION
    x = x.astype(jnp.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # x x^T is then as small as the shorter side
        x = jnp.swapaxes(x, -2, -1)
    # The Frobenius norm is at least the largest singular value, so all of them
    # are now in [0, 1].
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ jnp.swapaxes(x, -2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return jnp.swapaxes(x, -2, -1) if tall else x
    # END SOLUTION


# EXERCISE 05.skip
def skip_spikes(inner, window, factor, patience):
    """An optimizer that skips steps whose gradient is far out of the ordinary.

    Args:
      inner: optax.GradientTransformation.
      window: how many accepted norms are remembered, an odd int.
      factor: a norm above this times their median is a spike, a float.
      patience: after this many skipped steps in a row no norm counts as a
        spike, an int of 1 or more.

    Returns:
      (init, update), two functions as in an optax.GradientTransformation:
      init(params) returns a state, a pytree of arrays, and
      update(grads, state, params) returns (updates, state).
    """

    # BEGIN SOLUTION
    def init(params):
        return {
            "inner": inner.init(params),
            "norms": jnp.zeros(window),
            "accepted": jnp.int32(0),
            "skipped": jnp.int32(0),  # in a row
        }

    def update(grads, state, params):
        norms, accepted = state["norms"], state["accepted"]
        wide = [g.astype(jnp.float32) for g in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in wide))
        spike = norm > factor * jnp.median(norms)
        spike &= (accepted >= window) & (state["skipped"] < patience)
        good = jnp.isfinite(norm) & ~spike

        def if_good(new, old):  # chosen, not multiplied: 0 times NaN is NaN
            return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

        updates, new_inner = inner.update(grads, state["inner"], params)
        zeros = jax.tree.map(jnp.zeros_like, updates)
        new = {
            "inner": new_inner,
            "norms": norms.at[accepted % window].set(norm),
            "accepted": accepted + 1,
            "skipped": jnp.int32(0),
        }
        old = state | {"skipped": state["skipped"] + 1}
        return if_good(updates, zeros), if_good(new, old)

    return init, update
    # END SOLUTION
