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
    # YOUR CODE HERE
    raise NotImplementedError("04.rms_norm")


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
    # YOUR CODE HERE
    raise NotImplementedError("04.leak")


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
    # YOUR CODE HERE
    raise NotImplementedError("04.rope")


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
    # YOUR CODE HERE
    raise NotImplementedError("04.gqa")


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
    # YOUR CODE HERE
    raise NotImplementedError("04.count")


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
    # YOUR CODE HERE
    raise NotImplementedError("04.window")
