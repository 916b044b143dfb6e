"""Many processes as one job: how they find each other, start JAX, notice a lost one, and are launched.

May import config.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, Cluster="cluster", find_cluster="cluster", start="devices",
)  # fmt: skip
