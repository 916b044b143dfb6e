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
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"minitext.{_PUBLIC[name]}"), name)
    try:
        return importlib.import_module(f"minitext.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"minitext.{name}":
            raise
        raise AttributeError(f"module 'minitext' has no attribute {name!r}") from None


def __dir__():
    return sorted(__all__)
