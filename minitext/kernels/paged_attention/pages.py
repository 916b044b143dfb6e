"""Writing new tokens' keys and values into a cache in pages.

Chapters: 17.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from minitext.kernels.per_device import split


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
