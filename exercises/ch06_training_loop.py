import jax
import jax.numpy as jnp
import numpy as np
import optax


# EXERCISE 06.cross_entropy
def masked_cross_entropy(logits_BTV, targets_BT, mask_BT):
    """Sum the negative log-likelihood of targets that count, and count them.

    Args:
      logits_BTV: float32 or bfloat16 [B, T, V]; an entry that is not the target
        may be -inf, and under mask 0 all may be anything, including nan.
      targets_BT: int32 [B, T]; under mask 0 they may be out of range.
      mask_BT: [B, T] of any dtype; a target counts where it is not 0.

    Returns:
      (total, count): float32 scalars. total is in nats.
    """
    # YOUR CODE HERE
    raise NotImplementedError("06.cross_entropy")


# EXERCISE 06.donation
def momentum_update(loss, state, batch, learning_rate):
    """One step of momentum, in float32 whatever the parameters' dtype.

    Given; leave it as it is.

    Returns:
      (params, velocity, loss, grad_norm); params are float32.
    """
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
    params = jax.tree.map(
        lambda p, v: p.astype(jnp.float32) - learning_rate * v,
        state["params"],
        velocity,
    )
    return params, velocity, value, optax.global_norm(grads)


def make_donated_step(loss, learning_rate):
    """Return a jitted training step that reuses the memory of its state.

    Args:
      loss: pure function (params, batch) -> float32 scalar.
      learning_rate: Python float.

    Returns:
      The result of `jax.jit`, (state, batch) -> (new state, metrics).
      state: {"params": pytree of float32 or bfloat16 arrays, "velocity": the
        same pytree in float32, "step": int32 scalar}. The new state has the
        same structure, shapes and dtypes.
      batch: pytree of arrays, which the caller keeps.
      metrics: {"loss": float32, "grad_norm": float32, "step": int32}, scalars;
        "step" is that of the new state. They can be read at any later time.
    """
    # YOUR CODE HERE
    raise NotImplementedError("06.donation")


# EXERCISE 06.accumulate
def accumulated_gradient(loss_sum, params, batch, microbatches):
    """A batch's loss per target token and its gradient, part by part.

    Args:
      loss_sum: pure function (params, part of the batch) -> (summed loss,
        number of target tokens), two scalars.
      params: pytree of float32 or bfloat16 arrays.
      batch: pytree of arrays [B, ...].
      microbatches: into how many equal parts the rows are split.

    Returns:
      (loss, gradient): a float32 scalar and a pytree like params, in float32.
      Both are 0 for a batch without target tokens.

    Raises:
      ValueError: microbatches does not divide B; the message has both numbers.
    """
    # YOUR CODE HERE
    raise NotImplementedError("06.accumulate")


# EXERCISE 06.loop
def train_loop(step, state, batches, start, steps, log):
    """Train from step `start` to `steps`; log a step while the next one runs.

    Args:
      step: function (state, batch) -> (state, metrics) that returns before its
        work is done; metrics is a dict of scalars, and `float(...)` of one
        waits until it is there.
      state: the state after step `start`.
      batches: an iterator; `next` gives a batch.
      start: steps that were taken before.
      steps: the last step.
      log: function (step number, dict of Python floats).

    Returns:
      The state after step `steps`.
    """
    # YOUR CODE HERE
    raise NotImplementedError("06.loop")


# EXERCISE 06.rerun
def train_rows(loss, optimizer, params, rows_RT, seed, steps, saved=None):
    """Train some steps, from the start or from where a call stopped.

    Step i, counted from 0 over all calls, is defined by `seed` and i alone:
      - an epoch has R // 4 steps; epoch e takes the rows in the order
        `np.random.default_rng([seed, e]).permutation(R)`, four rows a step; the
        last R % 4 rows of that order are left out;
      - its key is `jax.random.fold_in(jax.random.key(seed), i)`.

    Args:
      loss: pure function (params, rows [4, T], key) -> float32 scalar.
      optimizer: an `optax.GradientTransformation`.
      params: pytree of arrays, the parameters before step 0; used only if
        `saved` is None.
      rows_RT: NumPy array [R, T] with R >= 4.
      seed: Python int.
      steps: how many steps to take in this call.
      saved: the second result of an earlier call, perhaps read back from a
        file.

    Returns:
      (losses, saved): a list of `steps` Python floats; and a dict of pytrees of
      arrays and numbers with everything that a later call needs, the parameters
      under "params".
    """
    # YOUR CODE HERE
    raise NotImplementedError("06.rerun")
