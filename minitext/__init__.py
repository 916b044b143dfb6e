"""minitext: train language models the way MaxText does, in code small enough to read.

The public names are imported when they are first used, so that `import minitext` costs next to nothing.
"""

import importlib

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "config",
    "load_config": "config",
    "make_mesh": "mesh",
    "ShardingRules": "sharding",
    "Transformer": "model",
    "make_batches": "data",
    "init_state": "train",
    "make_train_step": "train",
    "Checkpointer": "checkpoint",
}

__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'minitext' has no attribute {name!r}")
    return getattr(importlib.import_module(f"minitext.{module}"), name)


def __dir__():
    return sorted(__all__)
