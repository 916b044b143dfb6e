"""Which device has what: meshes, sharding rules, and programs written device by device.

Those programs are context parallelism, expert parallelism, pipelines and collective matmuls. May import kernels,
distributed and config.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, make_mesh="mesh", AXES="mesh", ShardingRules="rules", RULES="rules",
    check_mesh="check",
)  # fmt: skip
