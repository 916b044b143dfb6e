"""Which device has what: meshes, rules from dimension names to mesh axes, and programs written device by device.

Those are context parallelism, expert parallelism, pipelines and collective matmuls. May import kernels, distributed
and config.

Chapters: none.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, make_mesh="mesh", AXES="mesh", ShardingRules="rules", RULES="rules",
    check_mesh="check",
)  # fmt: skip
