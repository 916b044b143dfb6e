"""How kernels' machine code is shown: a table, and a strip of what each unit does along the kernel.

Chapters: none.
"""

from typing import Any

from minitext.compiler.llo import UNITS, Kernel
from minitext.compiler.report import print_tables, show_bytes, table

BARS = " ▁▂▃▄▅▆▇█"
PARTS = 96  # of a kernel in its strip


def print_kernels(kernels: list[Kernel], *, strips: bool) -> None:
    """Prints kernels in one table, and below it the strips of their units, on stdout."""
    rows = [
        (
            kernel.name, kernel.chip, f"{kernel.bundles:,}", f"{kernel.cycles:,}",
            *(f"{kernel.share(unit):.0%}" for unit in UNITS),
            f"{kernel.occupancy('MXU'):.0%}", f"{kernel.spills:,}", f"{kernel.fills:,}", show_bytes(kernel.vmem_bytes),
        )
        for kernel in kernels
    ]  # fmt: skip
    heads = ("kernel", "chip", "bundles", "cycles", *UNITS, "MXU filled", "spills", "fills", "VMEM")
    parts: list[Any] = [table(heads, rows, right=tuple(range(2, len(heads))))]
    if strips:
        parts += [_strip(kernel) for kernel in kernels]
    print_tables(
        *parts,
        "units: the share of bundles in which one is busy; filled: the share of all matrix units' cycles\n"
        "a bundle in a loop or a branch counts once",
    )


def _strip(kernel: Kernel) -> Any:
    rows = []
    for unit, shares in kernel.strip(PARTS).items():
        # The lowest bar also means: a little. A blank is nothing at all.
        bars = "".join(BARS[-int(-share * (len(BARS) - 1) // 1)] for share in shares)
        rows.append((unit, bars))
    return table((kernel.name, f"{kernel.bundles:,} bundles from first to last"), rows, right=())
