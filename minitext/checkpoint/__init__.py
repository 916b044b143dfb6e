"""States that survive: pytrees of arrays written whole or not at all, and read onto any mesh.

Knows no model and no optimizer. May import distributed and config.

Chapters: none.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "Checkpointer": "checkpointer",
        "LocalCopies": "emergency",
    },
)
