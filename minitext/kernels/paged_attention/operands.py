"""What the paged attention kernels ask of their operands, and what they make of them.

Chapters: 17.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from minitext.kernels.attention.mask import Mask
from minitext.kernels.attention.xla import NO_SINK
from minitext.kernels.per_device import split

NARROW = "int8", "float8_e4m3fn"  # types of pages with scales


def types_reason(
    q_BNH, k_pages_KPSH, v_pages_KPSH, scales_KP2S, types: tuple[str, ...]
) -> str | None:
    """Returns why a kernel for `types` can't take these types, or None."""
    dtypes = [x.dtype.name for x in (q_BNH, k_pages_KPSH, v_pages_KPSH)]
    if scales_KP2S is not None:
        if dtypes[0] in types and dtypes[1] == dtypes[2] and dtypes[1] in NARROW:
            return None
        return (
            f"with scales, keys and values must both be {' or both '.join(NARROW)}, and queries {' or '.join(types)}: "
            f"got {', '.join(dtypes[1:])} and {dtypes[0]}"
        )
    if len(set(dtypes)) > 1 or dtypes[0] not in types:
        choices = " or all ".join(types)
        return f"queries, keys and values must all be {choices}: got {', '.join(dtypes)}"
    return None


def caches(k_pages_KPSH, v_pages_KPSH, scales_KP2S) -> tuple:
    """Returns the arrays that make up a cache: keys, values, and their scales if there are any."""
    scales = () if scales_KP2S is None else (scales_KP2S,)
    return k_pages_KPSH, v_pages_KPSH, *scales


def split_reason(
    q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, scales_KP2S
) -> str | None:
    """Returns why devices can't each attend with their own sequences and heads, or None."""
    args = q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B
    q, k, v, table, lengths = map(split, args)
    scales = k if scales_KP2S is None else split(scales_KP2S)
    alike = k == v == scales and q[1] == k[0] and table == (q[0], None) and lengths == (q[0],)
    if q[2] or any(k[1:]) or not alike:
        return (
            "only sequences and heads may be split over devices, each alike in every argument: "
            f"got queries {q}, keys {k}, values {v}, scales {scales}, page table {table} and lengths {lengths}"
        )
    return None


def with_sinks(sinks_N: jax.Array | None, q_BNH: jax.Array) -> jax.Array:
    """Returns [N] float32 sinks, split as the query heads are; without sinks, some that take no weight from a key."""
    if sinks_N is None:
        sinks_N = jnp.full((q_BNH.shape[1],), NO_SINK, jnp.float32)
    sinks_N = sinks_N.astype(jnp.float32)
    if not jax.sharding.get_abstract_mesh().empty:
        return jax.sharding.reshard(sinks_N, PartitionSpec(split(q_BNH)[1]))
    return sinks_N


def visible_pages(
    page_table_BX: jax.Array, lengths_B: jax.Array, S: int, mask: Mask
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts the page table down to the pages that hold what a causal mask lets each sequence's last token see.

    Args:
      page_table_BX: [B, X] integers.
      lengths_B: [B] tokens of each sequence.
      S: tokens of a page.
      mask: causal, perhaps with a window or a chunk.

    Returns:
      table_BX: [B, X] int32, with a smaller X if the window or the chunk never reaches into as many pages.
      ends_B: [B] int32. Of the tokens in these pages, the last one to be seen is before this.
      starts_B: [B] int32, the first token to be seen, in the first page. Nothing is seen where it isn't below the end.
    """
    X = page_table_BX.shape[1]
    mask = mask.within(X * S)
    lengths_B = jnp.minimum(lengths_B, X * S).astype(jnp.int32)
    starts_B = jnp.zeros_like(lengths_B)
    if mask.window is not None:
        starts_B = jnp.maximum(starts_B, lengths_B - mask.window)
    if mask.chunk is not None:
        last_B = jnp.maximum(lengths_B - 1, 0)
        starts_B = jnp.maximum(starts_B, last_B - last_B % mask.chunk)
    table_BX = page_table_BX.astype(jnp.int32)
    limits = [limit for limit in (mask.window, mask.chunk) if limit is not None]
    if limits:
        # The most pages that so many tokens in a row can be in: the first page may hold one of them.
        pages = min(X, (min(limits) - 2) // S + 2)
        skipped_B = starts_B // S
        shown_BX = jnp.minimum(skipped_B[:, None] + jnp.arange(pages), X - 1)
        table_BX = jnp.take_along_axis(table_BX, shown_BX, axis=1)
        lengths_B, starts_B = lengths_B - skipped_B * S, starts_B - skipped_B * S
    return table_BX, lengths_B, starts_B
