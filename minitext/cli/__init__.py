"""The commands of `minitext`: each parses its words, calls one function of a room below, and prints.

JAX and the rooms are imported by the command that needs them, so that `minitext --help` is quick.
May import every room.

Chapters: 6.
"""

from minitext import exports

__getattr__, __dir__ = exports(__name__)
