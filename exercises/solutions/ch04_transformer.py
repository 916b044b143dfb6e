import functools
import math

import jax
import jax.numpy as jnp


# EXERCISE 04.rms_norm
def rms_norm_f32(x, scale_D, eps=1e-6):
    """Divide each vector by its root mean square, then scale each coordinate.

    Args:
      x: [..., D], float32, bfloat16 or float16.
      scale_D: float32 [D].
      eps: added to the mean square, under the root.

    Returns:
      [..., D] in the dtype of x, rounded once, at the end.
    """
    # BEGIN SOLUTION
    x_f32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
    # All is float32 until the end: each earlier cast would round once more.
    return (x_f32 * jax.lax.rsqrt(mean_square + eps) * scale_D).astype(x.dtype)
    # END SOLUTION


# EXERCISE 04.leak
def find_leaks(model, x_TD):
    """Find where a model's output depends on inputs that come later.

    Args:
      model: pure, differentiable function, float32 [T, D] -> float32 [T, V].
      x_TD: the embeddings at which to look.

    Returns:
      bool [T, T]. Entry [t, s] is True if s > t and some output at position t
      depends, to first order, on some input at position s.
    """
    # BEGIN SOLUTION
    jacobian_TVTD = jax.jacrev(model)(x_TD)
    # Absolute values before any sum: terms of opposite sign would hide a leak.
    influence_TT = jnp.sum(jnp.abs(jacobian_TVTD), axis=(1, 3))
    # 0 is exact here: a masked weight is 0, and so are derivatives through it.
    return jnp.triu(influence_TT > 0, k=1)
    # END SOLUTION


# EXERCISE 04.rope
def rotate(x_BTNH, positions_BT, theta=10_000.0):
    """Rotate features i and i + H/2, by an angle that grows with the position.

    Args:
      x_BTNH: [B, T, N, H], float32 or bfloat16, H even.
      positions_BT: [B, T], integers, in any order and as large as 100,000.
      theta: pair i turns by theta**(-2i/H) radians for each position;
        i = 0, ..., H/2 - 1.

    Returns:
      [B, T, N, H] in the dtype of x. Angles and rotation are computed in
      float32.
    """
    # BEGIN SOLUTION
    half = x_BTNH.shape[-1] // 2
    frequency_h = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions_BT11 = positions_BT[:, :, None, None].astype(jnp.float32)
    angle_BT1h = positions_BT11 * frequency_h
    cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)
    # END SOLUTION


# EXERCISE 04.gqa
def grouped_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    """Attention of N query heads that share K key and value heads, not copied.

    Args:
      q_BTNH: [B, T, N, H] queries, float32 or bfloat16.
      k_BSKH: [B, S, K, H] keys; N = G * K, and query head n uses key and value
        head n // G.
      v_BSKH: [B, S, K, H] values.
      mask_BTS: bool [B, T, S]; True where query t may look at key s.

    Returns:
      [B, T, N, H] in the queries' dtype. A query that may look at no key at all
      gets zeros.
    """
    # BEGIN SOLUTION
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # Queries are folded, not keys unfolded: a group's heads are the axis G.
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    logits_BKGTS = einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH)
    visible = mask_BTS[:, None, None]
    # A finite number: softmax of a row of -inf has inf - inf, which is nan.
    logits_BKGTS = jnp.where(visible, logits_BKGTS / math.sqrt(H), -1e30)
    # The product clears rows that see nothing, where softmax gives 1/S.
    probs_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1) * visible
    probs_BKGTS = probs_BKGTS.astype(v_BSKH.dtype)
    out_BTKGH = einsum("BKGTS,BSKH->BTKGH", probs_BKGTS, v_BSKH)
    return out_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype)
    # END SOLUTION


# EXERCISE 04.count
def predict_cost(cfg, new, cached):
    """Predict the cost of reading `new` tokens of a text after `cached` others.

    Args:
      cfg: a `minitext.config.model.ModelConfig`: sizes `vocab`, `layers`,
        `embed`, `heads`, `mlp`, the resolved `K` (key and value heads) and `H`
        (head width), and `tie_embeddings`.
      new: tokens that the model reads now, all at once.
      cached: tokens whose keys and values are in the cache already.

    Returns:
      (parameters, cache_bytes, flops), three Python ints: the number of
      parameters; the bytes of a bfloat16 cache that holds all new + cached
      tokens and no more; the floating-point operations of all matrix products,
      when each new token's logits are computed and its scores against all new +
      cached tokens, masked or not.
    """
    # BEGIN SOLUTION
    V, L, D, N, F = cfg.vocab, cfg.layers, cfg.embed, cfg.heads, cfg.mlp
    K, H, S = cfg.K, cfg.H, new + cached
    # q and o, k and v, the feed-forward
    matrices = 2 * D * N * H + 2 * D * K * H + 3 * D * F
    tables = 1 if cfg.tie_embeddings else 2
    parameters = L * (matrices + 2 * D) + tables * V * D + D
    cache_bytes = L * S * 2 * K * H * 2  # keys and values, two bytes each
    # Looking a token up multiplies nothing; the logits do, tied or not.
    flops = new * (2 * (L * matrices + V * D) + L * 4 * N * H * S)
    return parameters, cache_bytes, flops
    # END SOLUTION


# EXERCISE 04.window
def attend_window(q_BTNH, k_BTKH, v_BTKH, cache, window):
    """Attention of new tokens to the last `window` tokens, with a cache.

    Args:
      q_BTNH: [B, T, N, H] queries of T new tokens, float32 or bfloat16.
      k_BTKH: [B, T, K, H] their keys, rotated already; query head n uses key
        and value head n // (N // K).
      v_BTKH: [B, T, K, H] their values.
      cache: None at the beginning of a text, then what the previous call
        returned.
      window: how many tokens a token sees, itself included: an int, 1 or more,
        the same in all calls for a text.

    Returns:
      (out, cache): [B, T, N, H] in the queries' dtype; and a pytree of arrays,
      of the same shapes and dtypes whatever has been read.
    """
    # BEGIN SOLUTION
    B, T, K, H = k_BTKH.shape
    if cache is None:
        empty = jnp.zeros((B, window, K, H), k_BTKH.dtype)
        cache = empty, empty, jnp.int32(0)
    k_BWKH, v_BWKH, count = cache
    # Slot j holds the last position read that leaves remainder j. A position
    # below 0 stands for a slot that is still empty.
    newest = count - 1
    slot_W = jnp.arange(window)
    held_W = newest - (newest - slot_W) % window
    new_T = count + jnp.arange(T)
    position_S = jnp.concatenate([held_W, new_T])
    age_TS = new_T[:, None] - position_S
    seen_TS = (age_TS >= 0) & (age_TS < window) & (position_S >= 0)
    # Read before writing: a new token may take the slot of one that an earlier
    # new token still sees.
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        jnp.concatenate([k_BWKH, k_BTKH], axis=1),
        jnp.concatenate([v_BWKH, v_BTKH], axis=1),
        mask=seen_TS[None, None],
    )
    slots = new_T[-window:] % window  # of a long text only its end is kept
    k_BWKH = k_BWKH.at[:, slots].set(k_BTKH[:, -window:])
    v_BWKH = v_BWKH.at[:, slots].set(v_BTKH[:, -window:])
    return out_BTNH, (k_BWKH, v_BWKH, count + T)
    # END SOLUTION
