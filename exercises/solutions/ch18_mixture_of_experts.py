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
    # BEGIN SOLUTION
    logits_XE = logits_XE.astype(jnp.float32)
    scores_XE = (
        jax.nn.softmax(logits_XE)
        if kind == "softmax"
        else jax.nn.sigmoid(logits_XE)
    )
    ranking_XE = scores_XE if bias_E is None else scores_XE + bias_E
    experts_Xk = jax.lax.top_k(ranking_XE, k)[1]
    # The bias has chosen; it doesn't weigh.
    weights_Xk = jnp.take_along_axis(scores_XE, experts_Xk, axis=-1)
    if normalize:
        weights_Xk = weights_Xk / jnp.sum(weights_Xk, axis=-1, keepdims=True)
    return experts_Xk, weights_Xk
    # END SOLUTION


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
    # BEGIN SOLUTION
    E, C = experts, capacity
    flat_A = experts_Xk.reshape(-1)  # earlier tokens first
    hits_AE = (flat_A[:, None] == jnp.arange(E)).astype(jnp.int32)
    before_AE = jnp.cumsum(hits_AE, axis=0) - hits_AE
    rank_A = jnp.sum(before_AE * hits_AE, axis=1)
    slots_A = jnp.where(rank_A < C, flat_A * C + rank_A, E * C)
    dropped_E = jnp.maximum(jnp.sum(hits_AE, axis=0) - C, 0)
    return slots_A.reshape(experts_Xk.shape).astype(jnp.int32), dropped_E
    # END SOLUTION


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
    # BEGIN SOLUTION
    E = logits_XE.shape[1]
    mask_X1 = mask_X.astype(jnp.float32)[:, None]
    count = jnp.maximum(jnp.sum(mask_X1), 1.0)
    shares_XE = jax.nn.softmax(logits_XE)
    chosen_XE = jnp.sum(
        jax.nn.one_hot(jax.lax.top_k(logits_XE, k)[1], E), axis=1
    )
    load_E = jnp.sum(chosen_XE * mask_X1, axis=0) / (k * count)
    mean_E = jnp.sum(shares_XE * mask_X1, axis=0) / count
    loss = E * jnp.sum(load_E * mean_E)
    # The load is a constant: a small change of the logits changes no choice.
    slope_X1 = jnp.sum(load_E * shares_XE, axis=1, keepdims=True)
    return loss, E / count * mask_X1 * shares_XE * (load_E - slope_X1)
    # END SOLUTION


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
    # BEGIN SOLUTION
    rows_eSD = jax.lax.all_to_all(
        slots_ECD, axis, split_axis=0, concat_axis=1, tiled=True
    )
    return jax.lax.all_to_all(
        compute(rows_eSD), axis, split_axis=1, concat_axis=0, tiled=True
    )
    # END SOLUTION


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
    # BEGIN SOLUTION
    share = sum(loads) // devices
    left = [(load, expert) for expert, load in enumerate(loads)]
    plan = []
    for more in reversed(range(devices)):
        # Each device finishes slots - 1 experts, and the last one slots.
        # Where there are fewer, empty experts, numbered -1, fill the list.
        missing = (more + 1) * (slots - 1) + 1 - len(left)
        left = sorted(left + missing * [(0, -1)])
        # The group one further down has less than a share, so all but the
        # largest of this group fit whole.
        groups = (left[i : i + slots] for i in range(len(left)))
        begin, group = next(
            (i, group)
            for i, group in enumerate(groups)
            if sum(load for load, _ in group) >= share
        )
        *whole, (load, cut) = group
        part = share - sum(load for load, _ in whole)
        device = {expert: load for load, expert in [*whole, (part, cut)]}
        device.pop(-1, None)
        plan.append(device)
        rest = [(load - part, cut)] if load > part else []
        left[begin : begin + slots] = rest
    return plan
    # END SOLUTION
