"""NVIDIA's fused attention from the cuDNN library, called through JAX.

It never writes the T x T weights to memory. For packed rows JAX passes it a mask of T x T booleans per row, which it
has to read; a row with a single document needs no mask.

Chapters: 17.
"""

import jax
import jax.numpy as jnp

HEAD_DIM_STEP, HEAD_DIM_LIMIT = 8, 128


def attention(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT=None) -> jax.Array:
    """Computes `minitext.kernels.attention` with a causal mask. The batch may be split over a mesh."""

    def local(q, k, v, segment_ids=None):
        mask = None
        if segment_ids is not None:
            mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=True, implementation="cudnn"
        )

    args = [x for x in (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) if x is not None]
    if jax.sharding.get_abstract_mesh().empty:
        return local(*args)
    # The compiler can't divide a library call, so each device makes its own on its rows.
    specs = tuple(jax.typeof(x).sharding.spec for x in args)
    return jax.shard_map(local, in_specs=specs, out_specs=specs[0])(*args)


def supports(q_BTNH, _k, v_BTKH, segment_ids_BT=None, **options) -> str | None:
    """Returns why cuDNN can't compute this, or None."""
    if options:
        # The library knows windows, but nothing here can show that its gradients honour them.
        named = {"mask": "{}", "softcap": "softcap={}", "sinks_N": "sinks"}
        given = ", ".join(named[name].format(value) for name, value in options.items())
        return (
            f"it computes plain causal attention, without {given}: set the implementation to auto"
        )
    T, H = q_BTNH.shape[1::2]
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"it computes in 16 bits and the queries are {q_BTNH.dtype}: set model.dtype=bfloat16"
        )
    if H % HEAD_DIM_STEP or H > HEAD_DIM_LIMIT:
        return (
            f"it needs heads of at most {HEAD_DIM_LIMIT} and a multiple of {HEAD_DIM_STEP}: got {H}"
        )
    if v_BTKH.shape[3] != H:
        return f"it needs values as wide as keys: got {v_BTKH.shape[3]} and {H}"
    if segment_ids_BT is not None and T % 2:
        return f"with packed rows it needs an even number of tokens: got T={T}"
    return None
