import jax
import jax.numpy as jnp


# EXERCISE 18.router
def choose_experts(logits_XE, k, kind, normalize, bias_E=None):
    """Choose each token's k experts, and weigh them.

    Args:
      logits_XE: [X, E] router's logits, float32 or bfloat16.
      k: Python int, experts of each token.
      kind: "softmax" or "sigmoid", which turns logits into scores.
      normalize: whether the weights of a token's experts are divided by their
        sum.
      bias_E: [E] float32 added to the scores for the choice alone, or None.

    Returns:
      (experts, weights): [X, k] int32, best first, the lower number first in a
        tie; and [X, k] float32.
    """
    # YOUR CODE HERE
    raise NotImplementedError("18.router")


# EXERCISE 18.capacity
def place(experts_Xk, experts, capacity):
    """Give the assignments of one row of tokens their slots.

    Args:
      experts_Xk: [X, k] int32, each token's experts, which differ from each
        other.
      experts: Python int, number of experts E.
      capacity: Python int, slots of each expert C.

    Returns:
      (slots, dropped): [X, k] int32, each assignment's slot, below E * C, or
        E * C if it has none; and [E] int32, how many assignments each expert
        drops.
    """
    # YOUR CODE HERE
    raise NotImplementedError("18.capacity")


# EXERCISE 18.load_balance
def balance(logits_XE, k, mask_X):
    """The load-balance loss for k experts, and its gradient, by hand.

    Args:
      logits_XE: [X, E] float32 router's logits; each token's k highest choose
        its experts.
      k: Python int, experts of each token.
      mask_X: [X] bool, whether a token counts.

    Returns:
      (loss, gradient): float32 scalar, 0 if no token counts; and [X, E]
        float32, the loss's gradient with respect to the logits.
    """
    # YOUR CODE HERE
    raise NotImplementedError("18.load_balance")


# EXERCISE 18.all_to_all
def through_experts(slots_ECD, compute, axis):
    """Send slots to their experts' devices, compute, bring results back.

    Args:
      slots_ECD: [E, C, D], this device's slots for all E experts; the axis has
        n devices, and device d holds the experts from d * E/n to (d + 1) * E/n
        - 1.
      compute: maps [E/n, n*C, D], the rows of this device's experts in the
        order of their senders, to [E/n, n*C, F].
      axis: name of the mesh axis.

    Returns:
      [E, C, F]: the expert's result for each of this device's slots.
    """
    # YOUR CODE HERE
    raise NotImplementedError("18.all_to_all")


# EXERCISE 18.copies
def spread_experts(loads, devices, slots):
    """Copy experts to devices until every device gets equally many tokens.

    Args:
      loads: list of E Python ints, the tokens of each expert. Their sum is a
        multiple of `devices`.
      devices: number of devices, an int of 1 or more.
      slots: how many experts a device has room for, an int with
        devices * (slots - 1) >= E - 1.

    Returns:
      A list with a dict for each device: {expert: tokens}, Python ints.
    """
    # YOUR CODE HERE
    raise NotImplementedError("18.copies")
