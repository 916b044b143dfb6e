"""Attention as its definition says, in float64: what every implementation is compared with."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

# Each changes what plain causal attention gives for 40 tokens; together they are in each other's way.
SWITCHES: dict[str, dict] = {
    "window": {"window": 7},
    "chunk": {"chunk": 10},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 9, "chunk": 24, "softcap": 2.0, "sinks": True},
}
# Each two and three of them, as families have them: Gemma 2 a window and a soft-cap, gpt-oss a window and sinks.
COMBINATIONS = {
    " and ".join(names): {k: v for name in names for k, v in SWITCHES[name].items()}
    for count in (2, 3)
    for names in itertools.combinations(["window", "chunk", "softcap", "sinks"], count)
}


def seen(T, segments=None, *, causal=True, window=None, chunk=None):
    """Which of T tokens each sees, [B, T, T] or [1, T, T]."""
    rows = np.zeros((1, T), int) if segments is None else np.asarray(segments)
    t, s = np.arange(T)[:, None], np.arange(T)
    found = rows[:, :, None] == rows[:, None]
    if causal:
        found &= s <= t
    if window is not None:
        found &= t - s < window
    if chunk is not None:
        found &= t // chunk == s // chunk
    return found


def attention(q, k, v, seen_BTS, softcap=None, sinks=None):
    """The output for queries that are the last of the keys' tokens; every query must see a key."""
    N, K = q.shape[2], k.shape[2]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3])
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    weights = jnp.where(seen_BTS[:, None], jnp.exp(logits), 0)
    total = weights.sum(-1) if sinks is None else weights.sum(-1) + jnp.exp(sinks)[:, None]
    return jnp.einsum("bnts,bsnh->btnh", weights / total[..., None], v)


def value_and_gradients(q, k, v, probe, seen_BTS, softcap=None, sinks=None):
    """The output, and gradients of its product with the probe: of q, k, v and the sinks if there are any."""
    with jax.enable_x64(True):
        args = [np.asarray(x, np.float64) for x in (q, k, v, sinks) if x is not None]

        def loss(q, k, v, sinks=None):
            out = attention(q, k, v, seen_BTS, softcap, sinks)
            return jnp.sum(np.float64(probe) * out), out

        run = jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True)
        (_, out), grads = jax.jit(run)(*args)
        return [np.asarray(x) for x in (out, *grads)]
