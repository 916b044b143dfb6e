"""Kernels: one public function per operation, several implementations of it, and a table that chooses.

An operation has a folder, with a file for each way to compute it, and a function of the same name here.
May import only errors and hardware; a kernel's own file imports JAX and its folder.

Chapters: none.
"""

# The folders first: importing one sets the name that the function is to have.
import minitext.kernels.attention
import minitext.kernels.grouped_matmul
import minitext.kernels.linear_cross_entropy
import minitext.kernels.paged_attention
import minitext.kernels.rms_norm  # noqa: F401
from minitext.kernels.attention.mask import Mask as Mask
from minitext.kernels.attention.xla import cached_attention as cached_attention
from minitext.kernels.dispatch import IMPLEMENTATIONS as IMPLEMENTATIONS
from minitext.kernels.dispatch import attention as attention
from minitext.kernels.dispatch import choose as choose
from minitext.kernels.dispatch import grouped_matmul as grouped_matmul
from minitext.kernels.dispatch import linear_cross_entropy as linear_cross_entropy
from minitext.kernels.dispatch import paged_attention as paged_attention
from minitext.kernels.dispatch import rms_norm as rms_norm
