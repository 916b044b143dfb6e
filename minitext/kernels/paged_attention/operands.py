"""What the paged attention kernels ask of their operands.

Chapters: 17.
"""

from minitext.kernels.per_device import split


def reason(q_BNH, k_pages_KPSH, v_pages_KPSH, page_table_BX, lengths_B, types) -> str | None:
    """Returns why a kernel for `types` can't take these types, or this split over devices; None if it can."""
    arrays = q_BNH, k_pages_KPSH, v_pages_KPSH
    dtypes = [x.dtype.name for x in arrays]
    if len(set(dtypes)) > 1 or dtypes[0] not in types:
        choices = " or all ".join(types)
        return f"queries, keys and values must all be {choices}: got {', '.join(dtypes)}"
    q, k, v, table, lengths = map(split, (*arrays, page_table_BX, lengths_B))
    if q[2] or any(k[1:]) or k != v or q[1] != k[0] or table != (q[0], None) or lengths != (q[0],):
        return (
            "only sequences and heads may be split over devices, each alike in every argument: "
            f"got queries {q}, keys {k}, values {v}, page table {table} and lengths {lengths}"
        )
    return None
