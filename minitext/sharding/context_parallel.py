"""Attention over a sequence that is split over the mesh axis `context`.

Every query attends to all earlier keys, most of them on other devices. `allgather` fetches all keys and values at once,
as in the training of Llama 3 (Grattafiori et al. 2024, section 3.3.2). That's simple, but each device needs memory for
the whole sequence's keys. `ring` sends them from device to device (Liu et al. 2023) while it computes with those it
has, so a device holds at most three parts: its own, the one it computes with and the next.

Causal work is a triangle. If the sequence were cut into equal pieces in order, the first device would have almost no
work and the last one the most. So the ring cuts it into twice as many pieces and gives device i the pieces i and 2c-1-i
of c devices ("zigzag"; Brandon et al. 2023 stripe it instead). The work between any two devices is then always half of
the square: all queries against the first piece, or the second piece's queries against all keys. A window or a chunk
hides some of these blocks from all of their queries; they travel, but aren't computed with.

Chapters: 12.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from minitext.kernels.attention.mask import CAUSAL, Mask, check_options
from minitext.kernels.attention.xla import MASKED, masked_softmax
from minitext.sharding.rules import ShardingRules

AXIS = "context"


def context_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    rules: ShardingRules,
    method: str,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Causal grouped-query attention over a split sequence.

    Args:
      q_BTNH: [B, T, N, H] queries, T split over `context`; for `ring` in the order of `zigzag`.
      k_BTKH: [B, T, K, H] keys, in the same order.
      v_BTKH: [B, T, K, H] values, in the same order; their H may differ.
      segment_ids_BT: [B, T] or None; tokens attend within their own segment.
      rules: the sharding rules.
      method: `allgather` or `ring`.
      mask: which keys a query sees: causal, perhaps with a window or a chunk, of positions before `zigzag`.
      softcap: c > 0 to bound logits as c tanh(logits / c), or None.
      sinks_N: [N] one logit per query head that joins the softmax and has no value, or None.

    Returns:
      [B, T, N, H] in the queries' type and sharding and the values' width.

    Raises:
      UserError: if the mask isn't causal, has blocks or isn't one, or the soft-cap isn't positive.
    """
    T = q_BTNH.shape[1]
    check_options("context attention", T, mask, softcap, causal=True)
    mask = mask.within(T)
    if sinks_N is not None:
        sinks_N = rules.shard(sinks_N.astype(jnp.float32), "heads")
    if segment_ids_BT is None:
        segment_ids_BT = rules.shard(jnp.zeros(q_BTNH.shape[:2], jnp.int32), "batch", "seq")
    if method == "allgather":
        attend = partial(_gathered_attention, mask, softcap)
        run = _on_each_device(attend, "qkvsn", "q", rules)
        return run(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N)
    return _ring_attention(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N, rules, mask, softcap)


def _on_each_device(function: Any, inputs: str, outputs: str, rules: ShardingRules) -> Any:
    """Returns `function`, run by each device on its part of attention's arrays.

    `inputs` and `outputs` have a letter for each array. `l` is the log-sum-exp of the logits, `n` a number for each
    head, `p` one for each head from each device's tokens.
    """
    names = {
        "q": ("batch", "seq", "heads", "head_dim"),
        "k": ("batch", "seq", "kv_heads", "head_dim"),
        "v": ("batch", "seq", "kv_heads", "head_dim"),
        "s": ("batch", "seq"),
        "l": ("batch", "kv_heads", None, "seq"),
        "n": ("heads",),
        "p": ("batch", "seq", "heads"),
    }
    ins = tuple(rules.spec(names[letter]) for letter in inputs)
    outs: Any = tuple(rules.spec(names[letter]) for letter in outputs)
    outs = outs if len(outs) > 1 else outs[0]
    return jax.shard_map(function, in_specs=ins, out_specs=outs, check_vma=False)


def zigzag(x: jax.Array, *names: str | None, rules: ShardingRules, back: bool = False) -> jax.Array:
    """Moves the tokens of x [B, T, ...] to the order in which the ring computes, or back.

    T must be split over `context` and divisible by twice the number of devices there; `names` are x's dimensions.
    """
    return _reorder(x, rules.spec(names), back)


# The gradient is the reverse reordering. Autodiff's would also sum over mesh axes along which x is replicated.
@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _reorder(x, spec, back):
    exchange = partial(_exchange, back=back)
    return jax.shard_map(exchange, in_specs=spec, out_specs=spec, check_vma=False)(x)


_reorder.defvjp(
    lambda x, spec, back: (_reorder(x, spec, back), None),
    lambda spec, back, _, grad: (_reorder(grad, spec, not back),),
)


def _exchange(x: jax.Array, back: bool) -> jax.Array:
    """Sends each half of a device's tokens to the device that owns it."""
    c = jax.lax.axis_size(AXIS)
    owner = [min(piece, 2 * c - 1 - piece) for piece in range(2 * c)]
    first, second = jnp.split(x, 2, axis=1)
    me = jax.lax.axis_index(AXIS)
    # Device d's pieces are 2d and 2d + 1 in order, d and 2c-1-d in zigzag. The even pieces have one owner each.
    to = [(d, owner[2 * d]) for d in range(c)], [(d, owner[2 * d + 1]) for d in range(c)]
    if not back:
        even, odd = (jax.lax.ppermute(half, AXIS, to[i]) for i, half in enumerate((first, second)))
        low_is_even = me % 2 == 0  # piece `me` is the lower of the two
        return jnp.concatenate(
            [jnp.where(low_is_even, even, odd), jnp.where(low_is_even, odd, even)], axis=1
        )
    home = [[(b, a) for a, b in pairs] for pairs in to]
    low_is_even = me % 2 == 0
    even, odd = jnp.where(low_is_even, first, second), jnp.where(low_is_even, second, first)
    return jnp.concatenate(
        [jax.lax.ppermute(half, AXIS, home[i]) for i, half in enumerate((even, odd))], axis=1
    )


# --- one block of queries against one block of keys ------------------------------------------------


def _logits(q_BTNH, k_BSKH, softcap):
    """Returns logits [B, K, G, T, S] in float32."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = jnp.reshape(q_BTNH, (B, T, K, N // K, H))
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    logits = logits / math.sqrt(H)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _gathered_attention(mask, softcap, q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N):
    k_BSKH, v_BSKH, segments_BS = (
        jax.lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (k_BTKH, v_BTKH, segments_BT)
    )
    T, K = k_BTKH.shape[1:3]
    position_T = jax.lax.axis_index(AXIS) * T + jnp.arange(T)
    seen = mask.sees(position_T[:, None], jnp.arange(k_BSKH.shape[1]))
    seen_BTS = seen & (segments_BT[:, :, None] == segments_BS[:, None])
    sinks_KG11 = None if sinks_N is None else jnp.reshape(sinks_N, (K, -1, 1, 1))
    logits_BKGTS = _logits(q_BTNH, k_BSKH, softcap)
    probs_BKGTS = masked_softmax(logits_BKGTS, seen_BTS[:, None, None], sinks_KG11)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", probs_BKGTS.astype(v_BSKH.dtype), v_BSKH)
    return jnp.reshape(out_BTKGH, (*q_BTNH.shape[:3], -1)).astype(q_BTNH.dtype)


# --- the ring --------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _ring_attention(q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N, rules, mask, softcap):
    args = q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N
    return _ring_forward(*args, rules, mask, softcap)[0]


def _ring_forward(q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N, rules, mask, softcap):
    run = _on_each_device(partial(_ring_of_outputs, mask, softcap), "qkvsn", "ql", rules)
    args = q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N
    out_BTNH, lse_BKGT = run(*args)
    return out_BTNH, (*args, out_BTNH, lse_BKGT)


def _ring_backward(rules, mask, softcap, residuals, grad_BTNH):
    run = _on_each_device(partial(_ring_of_gradients, mask, softcap), "qkvsnqlq", "qkvp", rules)
    *grads, grad_sinks = run(*residuals, grad_BTNH)
    if grad_sinks is not None:
        grad_sinks = jnp.sum(grad_sinks, axis=(0, 1))
    return *grads, None, grad_sinks


_ring_attention.defvjp(_ring_forward, _ring_backward)


def _shift(tree: Any) -> Any:
    """Sends a tree of arrays to the next device of the ring."""
    c = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(tree, AXIS, [(d, (d + 1) % c) for d in range(c)])


def _positions(T: int, device: Any) -> jax.Array:
    """Returns the positions in the sequence of a device's T tokens in zigzag order."""
    c, half = jax.lax.axis_size(AXIS), jnp.arange(T // 2)
    return jnp.concatenate([device * (T // 2) + half, (2 * c - 1 - device) * (T // 2) + half])


def _own_mask(T: int, mask: Mask) -> jax.Array:
    """Returns the mask [T, T] of a device's queries and its own keys, in zigzag order."""
    position_T = _positions(T, jax.lax.axis_index(AXIS))
    return mask.sees(position_T[:, None], position_T)


def _around(visit, carry, travelling, back=None):
    """Calls `visit` with each other device's arrays, one device after another, while the next arrive.

    Args:
      visit: (iteration, carry, arrived, back) -> (carry, back); `arrived` are the arrays of the device that many
        positions before this one, and `back` is their owner's.
      carry: state that stays on the device.
      travelling: this device's arrays.
      back: zeros; sums that travel with the arrays and return to their owner. Or None.

    Returns:
      carry, and the sum that the other devices made for this one.
    """
    c = jax.lax.axis_size(AXIS)

    def step(state, iteration):
        carry, arrived, back = state
        following = _shift(arrived)
        carry, back = visit(iteration, carry, arrived, back)
        return (carry, following, _shift(back)), None

    state = carry, _shift(travelling), back
    state, _ = jax.lax.scan(step, state, jnp.arange(1, c - 1))
    carry, arrived, back = state
    carry, back = visit(c - 1, carry, arrived, back)
    return carry, _shift(back)


def _block_seen(
    iteration, T: int, mask: Mask, first_piece: Any, second_piece: Any, hidden: Any
) -> Any:
    """Computes with the arrays that arrived in an iteration.

    Args:
      iteration: how many devices before this one the arrays' owner is.
      T: tokens on a device.
      mask: which keys a query sees.
      first_piece: called where all queries come after the owner's first piece, which alone they see.
      second_piece: called where the queries of this device's second piece alone come after the owner's tokens. Both get
        a mask of their block, [T, T/2] or [T/2, T]; None if all of it is seen, as in plain causal attention.
      hidden: what to return if nothing of the block is seen.
    """
    me = jax.lax.axis_index(AXIS)
    owner = (me - iteration) % jax.lax.axis_size(AXIS)

    def branch(piece: Any, low: int, keys: int) -> Any:
        if mask == CAUSAL:
            return lambda: piece(None)
        t, s = _positions(T, me)[low:], _positions(T, owner)[:keys]
        # If any pair is seen, then the nearest: the first query and the last key.
        nearest = mask.sees(t[0], s[-1])
        run = lambda: piece(mask.sees(t[:, None], s))  # noqa: E731
        return lambda: jax.lax.cond(nearest, run, lambda: hidden)

    return jax.lax.cond(owner < me, branch(first_piece, 0, T // 2), branch(second_piece, T // 2, T))


def _ring_of_outputs(mask, softcap, q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N):
    T, K, segments = q_BTNH.shape[1], k_BTKH.shape[2], segments_BT

    def block(low, k, v, k_segments, limits: jax.Array | None):
        """Returns the unnormalised output, maximum and sum of a block, for the queries from `low` on."""
        seen = segments[:, low:, None] == k_segments[:, None]
        seen = seen if limits is None else seen & limits
        logits = jnp.where(seen[:, None, None], _logits(q_BTNH[:, low:], k, softcap), MASKED)
        top = jnp.max(logits, axis=-1)
        exps = jnp.exp(logits - top[..., None])
        out = jnp.einsum(
            "BKGTS,BSKH->BKGTH", exps.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return out, top, jnp.sum(exps, axis=-1)

    def merge(total, part):
        (out, top, size), (out_2, top_2, size_2) = total, part
        new = jnp.maximum(top, top_2)
        a, b = jnp.exp(top - new), jnp.exp(top_2 - new)
        return out * a[..., None] + out_2 * b[..., None], new, size * a + size_2 * b

    def visit(iteration, total, arrived, back):
        k, v, k_segments = arrived

        def first_piece(limits):
            part = block(0, k[:, : T // 2], v[:, : T // 2], k_segments[:, : T // 2], limits)
            return merge(total, part)

        def second_piece(limits):
            late = [x[..., T // 2 :, :] if x.ndim == 5 else x[..., T // 2 :] for x in total]
            merged = merge(late, block(T // 2, k, v, k_segments, limits))
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(x, y, T // 2, axis=3)
                for x, y in zip(total, merged, strict=True)
            )

        return _block_seen(iteration, T, mask, first_piece, second_piece, total), back

    total = block(0, k_BTKH, v_BTKH, segments, _own_mask(T, mask))
    total, _ = _around(visit, total, (k_BTKH, v_BTKH, segments))
    if sinks_N is not None:  # one more key for each query, whose value is zero
        out, top, size = total
        sinks_KG1 = jnp.broadcast_to(jnp.reshape(sinks_N, (K, -1, 1)), top.shape)
        total = merge(total, (jnp.zeros_like(out), sinks_KG1, jnp.ones_like(size)))
    out, top, size = total
    out_BTKGH = jnp.transpose(out / size[..., None], (0, 3, 1, 2, 4))
    out_BTNH = jnp.reshape(out_BTKGH, (*q_BTNH.shape[:3], -1))
    return out_BTNH.astype(q_BTNH.dtype), top + jnp.log(size)


def _ring_of_gradients(
    mask, softcap, q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N, out_BTNH, lse_BKGT, grad_BTNH
):
    B, T, N, H = q_BTNH.shape
    K, segments = k_BTKH.shape[2], segments_BT
    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def heads(x_BTNH):
        return jnp.reshape(x_BTNH, (B, x_BTNH.shape[1], K, N // K, x_BTNH.shape[3]))

    delta_BTN = jnp.sum(grad_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=-1)
    delta_BKGT = jnp.transpose(jnp.reshape(delta_BTN, (B, T, K, N // K)), (0, 2, 3, 1))

    def block(low, k, v, k_segments, limits: jax.Array | None):
        """Returns gradients of the queries from `low` on, and of keys and values, in float32."""
        q, grad = q_BTNH[:, low:], heads(grad_BTNH[:, low:])
        seen = segments[:, low:, None] == k_segments[:, None]
        seen = seen if limits is None else seen & limits
        logits = _logits(q, k, softcap)
        shown = jnp.where(seen[:, None, None], logits, MASKED)
        probs = jnp.exp(shown - lse_BKGT[..., low:, None])
        grad_probs = wide("BTKGH,BSKH->BKGTS", grad, v)
        grad_logits = probs * (grad_probs - delta_BKGT[..., low:, None]) / math.sqrt(H)
        if softcap is not None:
            grad_logits = grad_logits * (1 - (logits / softcap) ** 2)
        grad_logits, probs = grad_logits.astype(k.dtype), probs.astype(v.dtype)
        return (
            wide("BKGTS,BSKH->BTKGH", grad_logits, k),
            wide("BKGTS,BTKGH->BSKH", grad_logits, heads(q)),
            wide("BKGTS,BTKGH->BSKH", probs, grad),
        )

    def visit(iteration, grad_q, arrived, back):
        k, v, k_segments = arrived

        def first_piece(limits):
            first = k[:, : T // 2], v[:, : T // 2], k_segments[:, : T // 2]
            part_q, *part_kv = block(0, *first, limits)
            added = [x.at[:, : T // 2].add(y) for x, y in zip(back, part_kv, strict=True)]
            return grad_q + part_q, tuple(added)

        def second_piece(limits):
            part_q, *part_kv = block(T // 2, k, v, k_segments, limits)
            added = [x + y for x, y in zip(back, part_kv, strict=True)]
            return grad_q.at[:, T // 2 :].add(part_q), tuple(added)

        return _block_seen(iteration, T, mask, first_piece, second_piece, (grad_q, back))

    grad_q, *own = block(0, k_BTKH, v_BTKH, segments, _own_mask(T, mask))
    back = tuple(jnp.zeros_like(x) for x in own)
    grad_q, home = _around(visit, grad_q, (k_BTKH, v_BTKH, segments), back)
    grad_k, grad_v = (x + y for x, y in zip(own, home, strict=True))
    grad_q = jnp.reshape(grad_q, q_BTNH.shape)
    grad_sinks = None
    if sinks_N is not None:
        lse_BTN = jnp.reshape(jnp.transpose(lse_BKGT, (0, 3, 1, 2)), (B, T, N))
        grad_sinks = -jnp.sum(jnp.exp(sinks_N - lse_BTN) * delta_BTN, (0, 1), keepdims=True)
    grads = (grad_q, q_BTNH), (grad_k, k_BTKH), (grad_v, v_BTKH)
    return *(grad.astype(x.dtype) for grad, x in grads), grad_sinks
