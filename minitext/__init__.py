"""minitext: train language models the way MaxText does, in code small enough to read.

The public names are imported when they are first used, so that `import minitext` costs next to nothing.
"""

import importlib
from collections.abc import Callable
from typing import Any

__version__ = "0.1.0"


def exports(package: str, **names: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and `__dir__` of a package that imports its names and modules on first use (PEP 562).

    Args:
      package: its full name.
      **names: public name -> the module below the package that defines it.
    """

    def get(name: str) -> Any:
        module = f"{package}.{names.get(name, name)}"
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        return getattr(found, name) if name in names else found

    return get, lambda: sorted(names)


_PUBLIC = {
    "Config": "config.config",
    "load_config": "config.config",
    "make_mesh": "sharding.mesh",
    "ShardingRules": "sharding.rules",
    "Transformer": "models.transformer",
    "make_batches": "data.batches",
    "init_state": "training.step",
    "make_train_step": "training.step",
    "Checkpointer": "checkpoint.checkpointer",
}
__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = exports(__name__, **_PUBLIC)
