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
    # BEGIN SOLUTION

    @partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_only_these_names("a"),
    )
    def layer(x_XD, w):
        a_XF = checkpoint_name(x_XD @ w["up"], "a")
        y_XD = jax.nn.silu(a_XF) @ w["down"]
        return x_XD + jnp.tanh(y_XD), None

    return jax.lax.scan(layer, x_XD, weights)[0]
    # END SOLUTION


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
    # BEGIN SOLUTION

    @jax.checkpoint
    def layer(x_XD, inputs):
        number, w = inputs
        y_XD = (
            x_XD
            * jax.lax.rsqrt(jnp.mean(x_XD**2, axis=1, keepdims=True) + 1e-6)
            * w["norm"]
        )
        a_XF = y_XD @ w["up"]
        h_XF = jnp.sin(a_XF) * jax.nn.silu(a_XF)
        x_XD = x_XD + (h_XF @ w["down"]) / (number + 1)
        return x_XD, jnp.mean(x_XD**2)

    numbers_L = jnp.arange(len(weights["norm"]))
    return jax.lax.scan(layer, x_XD, (numbers_L, weights))
    # END SOLUTION


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
    # BEGIN SOLUTION

    @jax.checkpoint
    def add(total, chunk):
        x_tD, targets_t = chunk
        logits_tV = jnp.einsum(
            "td,dv->tv", x_tD, w_DV, preferred_element_type=jnp.float32
        )
        hit_tV = jnp.arange(w_DV.shape[1]) == targets_t[:, None]
        target_t = jnp.sum(jnp.where(hit_tV, logits_tV, 0.0), axis=1)
        nll_t = jax.nn.logsumexp(logits_tV, axis=1) - target_t
        return total + jnp.sum(jnp.where(targets_t >= 0, nll_t, 0.0)), None

    parts = (
        x_XD.reshape(chunks, -1, x_XD.shape[1]),
        targets_X.reshape(chunks, -1),
    )
    return jax.lax.scan(add, jnp.zeros((), jnp.float32), parts)[0]
    # END SOLUTION


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
    # BEGIN SOLUTION

    def add(total, part):
        new = grad_fn(params, part)
        return jax.tree.map(
            lambda a, b: a + b.astype(jnp.float32), total, new
        ), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (grads, count), _ = jax.lax.scan(
        add, (zeros, jnp.zeros((), jnp.float32)), parts
    )
    return jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, params)
    # END SOLUTION


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
    # BEGIN SOLUTION
    params, optimizer = sizes["parameters"], sizes["optimizer"]
    best = None
    for remat in ("none", "full"):
        for M in (m for m in range(1, rows + 1) if rows % m == 0):
            for offload in (False, True):
                summed = params if M > 1 else 0
                activations = (
                    sizes[f"kept_{remat}"] + sizes["logits"]
                ) / M + summed
                update = params + (optimizer if offload else 0)
                peak = (
                    params
                    + (0 if offload else optimizer)
                    + max(activations, update)
                )
                if peak > memory:
                    continue
                time = seconds["forward"] * (4 if remat == "full" else 3)
                time += (M - 1) * seconds["microbatch"]
                time += 2 * seconds["transfer"] if offload else 0
                if best is None or time < best[0]:
                    best = (time, (remat, M, offload))
    return None if best is None else best[1]
    # END SOLUTION


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
    # BEGIN SOLUTION
    L = len(kept)
    # least[a]: for each time, the choice for layers before a that keeps the
    # fewest bytes. One that keeps more in the same time is never better.
    least = [{} for _ in range(L + 1)]
    least[0][0] = (0, [])
    for a in range(L):
        for time, (held, groups) in least[a].items():
            reached = [(a + 1, time, held + kept[a], groups)]
            again = held
            for b in range(a + 1, L + 1):
                again += kept[b - 1]
                if again > memory:
                    break
                spent = time + sum(times[a:b])
                more = [*groups, (a, b)]
                reached.append((b, spent, held + inputs[a], more))
            for b, spent, size, found in reached:
                if size > memory:
                    continue
                if spent not in least[b] or size < least[b][spent][0]:
                    least[b][spent] = size, found
    return least[L][min(least[L])][1] if least[L] else None
    # END SOLUTION
