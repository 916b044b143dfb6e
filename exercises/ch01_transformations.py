import functools

import jax
import jax.numpy as jnp
import numpy as np


# EXERCISE 01.retracing
def make_scorer(score, max_length):
    """Return a scorer for lines of any length that rarely traces `score`.

    Args:
      score: pure function (tokens_T int32 [T], mask_T float32 [T]) -> float32
        scalar. It averages over the positions whose mask is 1; tokens with
        mask 0 cannot change the answer.
      max_length: the longest line the scorer accepts, in tokens.

    Returns:
      scorer(line) -> float32 scalar, where line is a NumPy array [n] of any
      integer dtype. The score is computed on arrays whose length is the
      smallest power of two that holds n.

    Raises:
      ValueError: (from the scorer) the line is empty or longer than max_length.
    """
    # YOUR CODE HERE
    raise NotImplementedError("01.retracing")


# EXERCISE 01.pytree
def make_average_class():
    """Return the class `Average`, registered with JAX as a pytree.

    Its children are `params` and `count`, in this order; `decay` is static.
    """

    class Average:
        """An exponential moving average of parameters.

        Args:
          params: pytree of arrays; kept as float32.
          decay: Python float in (0, 1): how much of the old average an update
            keeps.
          count: how many updates were made; kept as an int32 scalar.
        """

        def __init__(self, params, decay, count=0):
            if not 0.0 < decay < 1.0:
                raise ValueError(f"decay={decay} is not in (0, 1)")
            as_float32 = functools.partial(jnp.asarray, dtype=jnp.float32)
            self.params = jax.tree.map(as_float32, params)
            self.decay = float(decay)
            self.count = jnp.asarray(count, jnp.int32)

        def update(self, params):
            """Return the average after one more set of parameters."""
            keep = self.decay

            def mix(old, new):
                return keep * old + (1 - keep) * new

            mixed = jax.tree.map(mix, self.params, params)
            return Average(mixed, keep, self.count + 1)

    # YOUR CODE HERE
    raise NotImplementedError("01.pytree")
    return Average


# EXERCISE 01.hvp
def hessian_vector_product(f, params, vector):
    """Return H v, where H is the Hessian of f at params, without building H.

    Args:
      f: pure function of a pytree of float32 arrays -> float32 scalar.
      params: the pytree at which H is taken.
      vector: pytree of the same structure, shapes and dtypes as params.

    Returns:
      pytree of the same structure, shapes and dtypes as params.
    """
    # YOUR CODE HERE
    raise NotImplementedError("01.hvp")


# EXERCISE 01.per_example
def clipped_mean_gradient(loss, params, batch, max_norm):
    """Clip each example's gradient to `max_norm`, then average over the batch.

    Args:
      loss: pure function (params, example) -> scalar; an example is `batch`
        without its axis 0.
      params: pytree of float arrays, possibly of several dtypes.
      batch: pytree of arrays [B, ...].
      max_norm: float > 0, bound on the Euclidean norm of one example's whole
        gradient.

    Returns:
      (gradient, norms_B): the mean of the clipped gradients, with the
      structure, shapes and dtypes of params, and the norms before clipping,
      float32 [B].
    """
    # YOUR CODE HERE
    raise NotImplementedError("01.per_example")


# EXERCISE 01.logsumexp
@jax.custom_vjp
def frugal_logsumexp(logits):
    """log(sum(exp(logits))) over the last axis, with a gradient of your own.

    Args:
      logits: float32 or bfloat16 [..., V]; entries may be -inf.

    Returns:
      float32 [...]; -inf where a whole row is -inf.
    """
    # YOUR CODE HERE
    raise NotImplementedError("01.logsumexp")


def logsumexp_forward(logits):
    """Return `frugal_logsumexp`'s value, and what the backward rule needs."""
    # YOUR CODE HERE
    raise NotImplementedError("01.logsumexp")


def logsumexp_backward(residuals, g):
    """Return a tuple with the cotangent of logits, in the dtype of logits.

    Args:
      residuals: the second result of `logsumexp_forward`.
      g: float32 [...], the cotangent of the value.
    """
    # YOUR CODE HERE
    raise NotImplementedError("01.logsumexp")


frugal_logsumexp.defvjp(logsumexp_forward, logsumexp_backward)


# EXERCISE 01.reverse
def gradient(closed_jaxpr, args):
    """The gradient of a jaxpr's function, in reverse mode.

    Args:
      closed_jaxpr: the result of `jax.make_jaxpr` for a function of float32
        scalars whose result is one float32 scalar. Its primitives are add,
        sub, mul, neg, sin, cos, exp and jit.
      args: sequence of float32 scalars, perhaps traced.

    Returns:
      A tuple of float32 scalars, the derivative with respect to each argument.
    """
    # YOUR CODE HERE
    raise NotImplementedError("01.reverse")
