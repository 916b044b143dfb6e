"""Which rows of a global batch a process reads, and how all processes' rows become global arrays.

Chapters: 7.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minitext.errors import UserError
from minitext.sharding.mesh import BATCH_AXES

Split = Literal["train", "validation"]

Batch = dict[str, Any]


class Placement:
    """This process's rows of a global batch; calling it makes global arrays of them.

    Attributes:
        shape: (B, T).
        rows: indices in the global batch of the rows this process reads, ascending.
    """

    def __init__(self, mesh: Mesh | None, global_batch: int, seq_len: int) -> None:
        """Finds the rows of this process's devices in the mesh's sharding."""
        self.shape = (global_batch, seq_len)
        self.rows: Sequence[int] = range(global_batch)
        self.sharding = None
        if mesh is None:
            return
        self.sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, None))
        ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        if global_batch % ways:
            raise UserError(
                f"train.global_batch={global_batch} is not divisible by mesh.data x mesh.fsdp x "
                f"mesh.expert={ways}: choose a multiple of {ways}"
            )
        # Processes along a tensor or context axis hold the same rows, so each of them reads them.
        held = self.sharding.addressable_devices_indices_map(self.shape).values()
        slices = {index[0].indices(global_batch) for index in held if index is not None}
        self.rows = sorted({row for bounds in slices for row in range(*bounds)})

    def __call__(self, batch: Batch) -> Batch:
        """Returns global arrays [B, T] made of this process's rows [len(rows), T]."""
        if self.sharding is None:
            return batch
        return {
            name: jax.make_array_from_process_local_data(self.sharding, array, self.shape)
            for name, array in batch.items()
        }
