"""Writing new tokens' keys and values, and their scales, into a cache in pages.

Chapters: 17.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from minitext.kernels.per_device import on_each_device, split


def write_pages(
    pages_KPSH: jax.Array, x_BKH: jax.Array, page_B: jax.Array, slot_B: jax.Array
) -> jax.Array:
    """Writes keys or values of tokens, in place where the program owns the pages.

    The pages are overwritten and not copied if the jitted function donates them and reads them only afterwards, as a
    step does that writes a layer's new keys and then attends to them. XLA does this one scatter in place: a loop of
    updates, or a scatter into the pages seen as one row of slots, makes the TPU's compiler copy all pages.

    Args:
      pages_KPSH: [K, P, S, H] P pages of S tokens. On a mesh, heads may be split.
      x_BKH: [B, K, H] one key or value for each head of B tokens, of any sequences.
      page_B: [B] integers, each token's page. A token whose page isn't below P is dropped.
      slot_B: [B] integers, its place in the page, likewise below S.

    Returns:
      [K, P, S, H] in the pages' type. Where several tokens have the same place, one of them is in it.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        # Devices that share the sequences among them all keep the same pages, and write all tokens.
        x_BKH = jax.sharding.reshard(x_BKH, PartitionSpec(None, split(pages_KPSH)[0]))
        page_B, slot_B = (jax.sharding.reshard(x, PartitionSpec()) for x in (page_B, slot_B))
    x_KBH = jnp.swapaxes(x_BKH, 0, 1).astype(pages_KPSH.dtype)
    return pages_KPSH.at[:, page_B, slot_B].set(x_KBH)


def write_scales(
    scales_KP2S: jax.Array, x_BK2: jax.Array, page_B: jax.Array, slot_B: jax.Array
) -> jax.Array:
    """Writes the scales of tokens' keys and values, as `write_pages` writes these.

    Each scale has an index of its own. Where a scatter's updates are slices across the tokens' dimension, the last one,
    the TPU's compiler turns all scales around for it and back.

    Args:
      scales_KP2S: [K, P, 2, S] float32. On a mesh, heads may be split.
      x_BK2: [B, K, 2] the scales of B tokens.
      page_B: [B] integers, each token's page.
      slot_B: [B] integers, its place in the page.

    Returns:
      [K, P, 2, S].
    """
    x_KB2 = jnp.swapaxes(x_BK2, 0, 1)
    if not jax.sharding.get_abstract_mesh().empty:
        x_KB2 = jax.sharding.reshard(x_KB2, PartitionSpec(split(scales_KP2S)[0], None))
        page_B, slot_B = (jax.sharding.reshard(x, PartitionSpec()) for x in (page_B, slot_B))
    return on_each_device(_write_scales, scales_KP2S, x_KB2, page_B, slot_B)


def _write_scales(scales_KP2S, x_KB2, page_B, slot_B):
    head_K11, which_2 = jnp.arange(len(scales_KP2S))[:, None, None], jnp.arange(2)
    return scales_KP2S.at[head_K11, page_B[:, None], which_2, slot_B[:, None]].set(x_KB2)
