"""Kernels: one public function per operation, several implementations of each, and a table to choose from.

Each operation has a folder with one file per implementation, and a function of the same name here. Importing this room
loads no kernel: `dispatch` imports an implementation when it is first chosen. May import only errors and hardware; a
kernel's own file imports JAX and this room.
"""

# Folders first. Importing one binds its name here, and the function of the same name must replace it; a folder that
# has been imported before doesn't bind its name again.
import minitext.kernels.attention
import minitext.kernels.grouped_matmul
import minitext.kernels.linear
import minitext.kernels.linear_cross_entropy
import minitext.kernels.lookup
import minitext.kernels.paged_attention
import minitext.kernels.rms_norm  # noqa: F401
from minitext.kernels.attention.mask import Mask as Mask
from minitext.kernels.attention.xla import cached_attention as cached_attention
from minitext.kernels.dispatch import (  # noqa: F401
    IMPLEMENTATIONS,
    ORDER,
    attention,
    choose,
    grouped_matmul,
    leave_out,
    linear,
    linear_cross_entropy,
    lookup,
    paged_attention,
    preferred,
    rms_norm,
)  # fmt: skip
