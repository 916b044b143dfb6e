"""States that survive: pytrees of arrays written whole or not at all, and read onto any mesh.

Works on any pytree: it knows nothing of models or optimizers. May import distributed and config.
"""

from minitext import exports

__getattr__, __dir__ = exports(__name__, Checkpointer="checkpointer", LocalCopies="emergency")
