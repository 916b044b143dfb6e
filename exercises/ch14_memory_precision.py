from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


# EXERCISE 14.remat_policy
def keep_one(x_XD, weights):
    """Run a stack of layers that keeps one product of each layer.

    Args:
      x_XD: float32 [X, D].
      weights: dict with "up" [L, D, F] and "down" [L, F, D], float32.

    Returns:
      [X, D]: what the last layer returns.
    """
    # YOUR CODE HERE
    raise NotImplementedError("14.remat_policy")


# EXERCISE 14.scanned_stack
def scanned(x_XD, weights):
    """Run the layers of `unrolled` in a scan, with remat of each.

    Args:
      x_XD: float32 [X, D].
      weights: dict with "norm" [L, D], "up" [L, D, F] and "down" [L, F, D],
        float32.

    Returns:
      (x_XD, size_L): the last layer's result, and the mean square of what each
        layer returned.
    """
    # YOUR CODE HERE
    raise NotImplementedError("14.scanned_stack")


# EXERCISE 14.chunked_loss
def chunked_nll(x_XD, w_DV, targets_X, chunks):
    """The summed loss of a large vocabulary, from a few tokens at a time.

    Args:
      x_XD: [X, D] hidden states, float32 or bfloat16.
      w_DV: [D, V] the output layer's weight, of the same dtype.
      targets_X: int32 [X]; -1 where a token has no target.
      chunks: Python int that divides X.

    Returns:
      float32 scalar: the sum of -log softmax(x_XD @ w_DV)[target] over the
        tokens with a target.
    """
    # YOUR CODE HERE
    raise NotImplementedError("14.chunked_loss")


# EXERCISE 14.f32_accumulators
def mean_gradient(grad_fn, params, parts):
    """The mean gradient over M microbatches; no small part is lost.

    Args:
      grad_fn: grad_fn(params, part) -> (grads, count): the gradient summed over
        the part's tokens, a pytree like params whose leaves are bfloat16 or
        float32; and how many tokens, a bfloat16 scalar.
      params: a pytree of arrays, bfloat16 or float32.
      parts: a pytree of arrays [M, ...]; part m has index m of each.

    Returns:
      A pytree like params, each leaf in the dtype of its parameter: the sum of
      all gradients, divided by the number of all tokens.
    """
    # YOUR CODE HERE
    raise NotImplementedError("14.f32_accumulators")


# EXERCISE 14.fit_plan
def fit_plan(sizes, seconds, memory, rows):
    """Find the fastest way to run a step in the available memory.

    Args:
      sizes: bytes, Python ints: "parameters", "optimizer", "kept_none",
        "kept_full", "logits".
      seconds: Python floats: "forward", "microbatch", "transfer".
      memory: bytes of the device.
      rows: rows of the batch, a Python int.

    Returns:
      (remat, microbatches, offload), such as ("full", 4, False); None if
      nothing fits.
    """
    # YOUR CODE HERE
    raise NotImplementedError("14.fit_plan")


# EXERCISE 14.groups
def choose_groups(inputs, kept, times, memory):
    """Choose the layers that run again, for the least time that fits.

    Args:
      inputs: bytes of each layer's input; a list of Python ints.
      kept: bytes that each layer's backward pass needs, its input among them.
      times: microseconds of each layer's forward pass, at most 300 in all.
      memory: bytes that there are, a Python int.

    Returns:
      A list of groups (a, b) of the layers a to b - 1, from first to last;
      None if no choice fits.
    """
    # YOUR CODE HERE
    raise NotImplementedError("14.groups")
