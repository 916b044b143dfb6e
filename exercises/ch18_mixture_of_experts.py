import jax
import jax.numpy as jnp


# EXERCISE 18.router
def choose_experts(logits_XE, k, kind, normalize, bias_E=None):
    """Choose each token's k experts, and weigh them.

    Args:
      logits_XE: [X, E] router's logits, float32 or bfloat16.
      k: Python int, experts of each token.
      kind: "softmax" or "sigmoid", what makes scores of logits.
      normalize: whether the weights of a token's experts are divided by their sum.
      bias_E: [E] float32 added to the scores for the choice alone, or None.

    Returns:
      (experts, weights): [X, k] int32, best first, of equals the lower number first; and [X, k]
      float32.
    """
    # YOUR CODE HERE
    raise NotImplementedError("18.router")


# EXERCISE 18.capacity
def place(experts_Xk, experts, capacity):
    """Give the assignments of one row of tokens their slots.

    Args:
      experts_Xk: [X, k] int32, the experts of each token; those of one token differ.
      experts: Python int, number of experts E.
      capacity: Python int, slots of each expert C.

    Returns:
      (slots, dropped): [X, k] int32, each assignment's slot among E * C, or E * C if it has none;
      and [E] int32, how many assignments each expert drops.
    """
    # YOUR CODE HERE
    raise NotImplementedError("18.capacity")


# EXERCISE 18.load_balance
def balance(logits_XE, k, mask_X):
    """The load-balance loss of Fedus et al. for k experts, and its gradient without autodiff.

    Args:
      logits_XE: [X, E] float32 router's logits; each token's k highest choose its experts.
      k: Python int, experts of each token.
      mask_X: [X] bool, whether a token counts.

    Returns:
      (loss, gradient): float32 scalar, 0 if no token counts; and [X, E] float32, the gradient of
      the loss by the logits.
    """
    # YOUR CODE HERE
    raise NotImplementedError("18.load_balance")


# EXERCISE 18.all_to_all
def through_experts(slots_ECD, compute, axis):
    """Send this device's slots to the experts' devices, compute there, and bring results back.

    Args:
      slots_ECD: [E, C, D], what this device has for each of all E experts; n devices are on the
        axis, and device d has the experts from d * E/n to (d + 1) * E/n.
      compute: function of [E/n, n*C, D], the rows of this device's experts, in the order of the
        devices that sent them, that returns [E/n, n*C, F].
      axis: name of the mesh axis.

    Returns:
      [E, C, F]: for each slot of this device what its expert made of it.
    """
    # YOUR CODE HERE
    raise NotImplementedError("18.all_to_all")
