"""Generating text with a model: one token after another, from a key-value cache.

May import models, data, sharding, kernels, checkpoint, distributed and config.
"""

from minitext import exports

__getattr__, __dir__ = exports(__name__, Sampling="generate", Generator="generate")
