import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P


# EXERCISE 12.tp_mlp
def tp_mlp(x_BTD, gate_DF, up_DF, down_FD):
    """`(silu(x @ gate) * (x @ up)) @ down`, features split over `tensor`.

    Args:
      x_BTD: [B, T, D], as P("data", None, None).
      gate_DF: [D, F], as P(None, "tensor").
      up_DF: [D, F], as P(None, "tensor").
      down_FD: [F, D], as P("tensor", None).

    Returns:
      [B, T, D] as P("data", None, None).
    """
    # BEGIN SOLUTION
    gate_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, gate_DF)
    up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, up_DF)
    hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
    # Each device has finished its own features: only this product gives partial
    # sums.
    return jnp.einsum(
        "BTF,FD->BTD", hidden_BTF, down_FD, out_sharding=P("data", None, None)
    )
    # END SOLUTION


# EXERCISE 12.vocab_parallel_loss
def vocab_parallel_loss(x_XD, w_DV, targets_X):
    """The cross-entropy of every token; the vocabulary is split.

    Args:
      x_XD: [X, D] float32, whole on every device.
      w_DV: [D, V] float32, as P(None, "tensor").
      targets_X: [X] int32, whole on every device, from 0 to V-1.

    Returns:
      [X] float32, whole on every device: the negative log-likelihood in nats.
    """

    # BEGIN SOLUTION
    @partial(
        jax.shard_map, in_specs=(P(), P(None, "tensor"), P()), out_specs=P()
    )
    def on_each_device(x_XD, w_Dv, targets_X):
        logits_Xv = x_XD @ w_Dv
        v = logits_Xv.shape[1]
        top_X = jax.lax.pmax(
            jax.lax.stop_gradient(jnp.max(logits_Xv, axis=1)), "tensor"
        )
        sum_X = jax.lax.psum(
            jnp.sum(jnp.exp(logits_Xv - top_X[:, None]), axis=1), "tensor"
        )
        # This device has the tokens from `first` on; a target on another device
        # hits nothing here.
        first = jax.lax.axis_index("tensor") * v
        hit_Xv = first + jnp.arange(v) == targets_X[:, None]
        target_X = jax.lax.psum(
            jnp.sum(jnp.where(hit_Xv, logits_Xv, 0.0), axis=1), "tensor"
        )
        return top_X + jnp.log(sum_X) - target_X

    return on_each_device(x_XD, w_DV, targets_X)
    # END SOLUTION


# EXERCISE 12.ring_attention
def ring_attention(q_BTNH, k_BTNH, v_BTNH):
    """Causal attention of tokens in order; keys go around a ring.

    Args:
      q_BTNH: [B, T, N, H] float32, as P(None, "context").
      k_BTNH: [B, T, N, H] float32, as P(None, "context").
      v_BTNH: [B, T, N, H] float32, as P(None, "context").

    Returns:
      [B, T, N, H] float32, as P(None, "context").
    """

    # BEGIN SOLUTION
    def on_each_device(q_BtNH, k_BtNH, v_BtNH):
        n, me = jax.lax.axis_size("context"), jax.lax.axis_index("context")
        t, H = q_BtNH.shape[1], q_BtNH.shape[3]
        onwards = [(device, (device + 1) % n) for device in range(n)]
        position_t = jnp.arange(t)

        def block(k_BsNH, v_BsNH, owner):
            logits = jnp.einsum("BtNH,BsNH->BNts", q_BtNH, k_BsNH) / math.sqrt(
                H
            )
            seen_ts = (me * t + position_t)[:, None] >= owner * t + position_t
            logits = jnp.where(seen_ts, logits, -1e30)
            top = jnp.max(logits, axis=-1)
            exps = jnp.exp(logits - top[..., None])
            return (
                jnp.einsum("BNts,BsNH->BNtH", exps, v_BsNH),
                top,
                jnp.sum(exps, axis=-1),
            )

        def turn(carry, number):
            (out, top, size), held = carry
            held = jax.lax.ppermute(held, "context", onwards)
            out_2, top_2, size_2 = block(*held, (me - number) % n)
            new = jnp.maximum(top, top_2)
            a, b = jnp.exp(top - new), jnp.exp(top_2 - new)
            out = out * a[..., None] + out_2 * b[..., None]
            return ((out, new, size * a + size_2 * b), held), None

        # Its own keys first: every query sees one of them, so every maximum is
        # that of a real logit.
        carry = block(k_BtNH, v_BtNH, me), (k_BtNH, v_BtNH)
        ((out, _, size), _), _ = jax.lax.scan(turn, carry, jnp.arange(1, n))
        return jnp.swapaxes(out / size[..., None], 1, 2)

    spec = P(None, "context")
    return jax.shard_map(on_each_device, in_specs=(spec,) * 3, out_specs=spec)(
        q_BTNH, k_BTNH, v_BTNH
    )
    # END SOLUTION


# EXERCISE 12.zigzag
def zigzag_order(T, devices):
    """The order of tokens that gives every device the same causal work.

    Args:
      T: tokens of a row, a Python int.
      devices: how many share it, a Python int.

    Returns:
      (pieces, order, back): integer arrays of shape [devices, 2], [T] and [T].
        Device i holds the pieces `pieces[i]`, of T / (2 * devices) tokens each,
        the earlier first. `row[order]` are the tokens of device 0, then those
        of device 1, and so on; `row[order][back]` is the row again.

    Raises:
      ValueError: 2 * devices does not divide T.
    """
    # BEGIN SOLUTION
    if T % (2 * devices):
        raise ValueError(
            f"{T} tokens can't be cut into {2 * devices} equal pieces"
        )
    first = np.arange(devices)
    pieces = np.stack([first, 2 * devices - 1 - first], axis=1)
    tokens = np.arange(T).reshape(2 * devices, T // (2 * devices))
    order = tokens[pieces.reshape(-1)].reshape(-1)
    # Where each token went: the positions, sorted by the tokens that are there
    # now.
    return pieces, order, np.argsort(order)
    # END SOLUTION
