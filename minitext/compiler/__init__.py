"""What compilers make of a program: ahead-of-time compilation for named chips, and parsers of the compilers' output.

The parsers read HLO, memory plans, schedules and the machine code of kernels. May import sharding, kernels, distributed
and config.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, topology_mesh="targets", parse_target="targets", Report="report",
)  # fmt: skip
