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
    # YOUR CODE HERE
    raise NotImplementedError("05.adamw")


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
    # YOUR CODE HERE
    raise NotImplementedError("05.clip")


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
    # YOUR CODE HERE
    raise NotImplementedError("05.wsd")


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
    # YOUR CODE HERE
    raise NotImplementedError("05.orthogonalize")


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
    # YOUR CODE HERE
    raise NotImplementedError("05.skip")
