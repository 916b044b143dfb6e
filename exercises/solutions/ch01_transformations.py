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
    # BEGIN SOLUTION
    # One jitted function for the scorer's whole life: it holds the traces.
    jitted_score = jax.jit(score)

    def scorer(line):
        n = len(line)
        if not 1 <= n <= max_length:
            raise ValueError(f"{n} tokens; the scorer takes 1 to {max_length}")
        padded_length = 1 << (n - 1).bit_length()
        # NumPy, not jnp: JAX never sees the shape [n], so it can't trace it.
        tokens_T = np.zeros(padded_length, np.int32)
        tokens_T[:n] = line
        mask_T = (np.arange(padded_length) < n).astype(np.float32)
        return jitted_score(tokens_T, mask_T)

    return scorer
    # END SOLUTION


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

    # BEGIN SOLUTION
    def flatten(average):
        return (average.params, average.count), average.decay

    def unflatten(decay, children):
        # Not Average(...): JAX may put anything in a leaf's place (a tracer, a
        # shape, None), and __init__ would try to turn it into a float32 array.
        average = object.__new__(Average)
        average.params, average.count = children
        average.decay = decay
        return average

    jax.tree_util.register_pytree_node(Average, flatten, unflatten)
    # END SOLUTION
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
    # BEGIN SOLUTION
    # Forward over reverse: how the gradient moves when params move.
    return jax.jvp(jax.grad(f), (params,), (vector,))[1]
    # END SOLUTION


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
    # BEGIN SOLUTION
    grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
    # One norm for an example's whole gradient: the squares of all leaves are
    # added, in float32 because a bfloat16 sum loses small terms.
    grads_f32 = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    squares_B = sum(
        jnp.sum(g.reshape(g.shape[0], -1) ** 2, axis=1)
        for g in jax.tree.leaves(grads_f32)
    )
    norms_B = jnp.sqrt(squares_B)
    # An example without gradient is safe: max_norm / 0 is inf, and the minimum
    # makes that 1.
    scale_B = jnp.minimum(1.0, max_norm / norms_B)

    def clipped_mean(g, p):
        clipped = jnp.einsum("B,B...->B...", scale_B, g)
        return jnp.mean(clipped, axis=0).astype(p.dtype)

    return jax.tree.map(clipped_mean, grads_f32, params), norms_B
    # END SOLUTION


# EXERCISE 01.logsumexp
@jax.custom_vjp
def frugal_logsumexp(logits):
    """log(sum(exp(logits))) over the last axis, with a gradient of your own.

    Args:
      logits: float32 or bfloat16 [..., V]; entries may be -inf.

    Returns:
      float32 [...]; -inf where a whole row is -inf.
    """
    # BEGIN SOLUTION
    return logsumexp_forward(logits)[0]
    # END SOLUTION


def logsumexp_forward(logits):
    """Return `frugal_logsumexp`'s value, and what the backward rule needs."""
    # BEGIN SOLUTION
    x = logits.astype(jnp.float32)
    top = jnp.max(x, axis=-1, keepdims=True)
    # A row of -inf has no finite top to subtract: -inf - -inf is nan.
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    value = jnp.log(jnp.sum(jnp.exp(x - top), axis=-1)) + top[..., 0]
    # The logits as they came (bfloat16 stays bfloat16) and one number a row:
    # exp is cheap to redo.
    return value, (logits, value)
    # END SOLUTION


def logsumexp_backward(residuals, g):
    """Return a tuple with the cotangent of logits, in the dtype of logits.

    Args:
      residuals: the second result of `logsumexp_forward`.
      g: float32 [...], the cotangent of the value.
    """
    # BEGIN SOLUTION
    logits, value = residuals
    finite = jnp.where(jnp.isfinite(value), value, 0.0)
    softmax = jnp.exp(logits.astype(jnp.float32) - finite[..., None])
    return ((g[..., None] * softmax).astype(logits.dtype),)
    # END SOLUTION


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
    # BEGIN SOLUTION
    rules = {
        "add": lambda ct, x, y: (ct, ct),
        "sub": lambda ct, x, y: (ct, -ct),
        "mul": lambda ct, x, y: (ct * y, ct * x),
        "neg": lambda ct, x: (-ct,),
        "sin": lambda ct, x: (ct * jnp.cos(x),),
        "cos": lambda ct, x: (-ct * jnp.sin(x),),
        "exp": lambda ct, x: (ct * jnp.exp(x),),
    }

    def run(closed, args):
        """The results, and a map from their cotangents to those of args."""
        # A jitted function has one jaxpr for all its calls: each run of it has
        # values and cotangents of its own.
        jaxpr, pulls = closed.jaxpr, []
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= zip(jaxpr.invars, args, strict=True)

        def read(x):
            return x.val if hasattr(x, "val") else values[x]

        for eqn in jaxpr.eqns:
            inputs = [read(x) for x in eqn.invars]
            if eqn.primitive.name == "jit":
                outs, pull = run(eqn.params["jaxpr"], inputs)
            else:
                outs = [eqn.primitive.bind(*inputs, **eqn.params)]
                rule = rules[eqn.primitive.name]
                pull = lambda cts, i=inputs, r=rule: r(*cts, *i)  # noqa: E731
            values |= zip(eqn.outvars, outs, strict=True)
            pulls.append((eqn, pull))

        def backward(cts):
            total = {}

            def add(variables, cts):  # a variable may be used several times
                for x, ct in zip(variables, cts, strict=True):
                    if not hasattr(x, "val"):
                        total[x] = total.get(x, 0.0) + ct

            add(jaxpr.outvars, cts)
            for eqn, pull in reversed(pulls):
                add(eqn.invars, pull([total.get(x, 0.0) for x in eqn.outvars]))
            return [total.get(x, 0.0) for x in jaxpr.invars]

        return [read(x) for x in jaxpr.outvars], backward

    _, backward = run(closed_jaxpr, args)
    return tuple(jnp.float32(ct) for ct in backward([1.0]))
    # END SOLUTION
