"""Writing tokens into pages."""
def write_pages(pages_KPSH, x_BKH, page_B, slot_B):
    """Temporary."""
    import jax.numpy as jnp
    return pages_KPSH.at[:, page_B, slot_B].set(jnp.swapaxes(x_BKH,0,1))
