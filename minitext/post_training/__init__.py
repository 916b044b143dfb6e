"""What a trained model learns next: to answer, to prefer one answer to another, and to earn a reward.

Each way is a recipe: settings for the same training run that pretraining uses, begun from another run's parameters.
May import perf, training, inference, observability, models, data, compiler, sharding, kernels, checkpoint, distributed
and config.

Chapters: 26.
"""

from minitext import exports

__getattr__, __dir__ = exports(__name__, new_config="recipes")
