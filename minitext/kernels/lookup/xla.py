"""Token vectors in XLA. Its gradient adds to the table's rows, on a GPU in whatever order the threads finish.

Chapters: 19.
"""

import jax


def lookup(table_VD: jax.Array, tokens_BT: jax.Array, out_sharding=None) -> jax.Array:
    """Computes `minitext.kernels.lookup`."""
    return table_VD.at[tokens_BT].get(out_sharding=out_sharding)
