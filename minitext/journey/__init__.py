"""The whole way in one command: from text to a tuned, quantized model that answers, and a report of it.

`run.run_journey` walks it: one dial says how large everything is, each stage is a small function that leaves its
results on disk, and the report reads nothing else. It is a room of its own because it needs both training and
post-training, and neither should know of it.
May import post_training, perf, training, inference, observability, models, data, compiler, sharding, kernels,
checkpoint, distributed and config.

Chapters: 27.
"""

from minitext import exports

__getattr__, __dir__ = exports(__name__, run_journey="run")
