"""The networks: one decoder whose attention and feed-forward layers are chosen by the configuration.

May import sharding, kernels, checkpoint, distributed and config.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, Transformer="transformer", make_cache="transformer", count_params="flops",
    count_flops="flops",
)  # fmt: skip
