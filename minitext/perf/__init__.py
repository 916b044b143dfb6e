"""Predictions of a step, made without running it: its time, its memory, what devices send each other, and what to change.

Each prediction can be held against the compiled program. Also here: the search for a mesh (`plan`) and for block
shapes (`tune`), and the figures that show predictions. May import every room but `cli` and `book`.

Chapters: none.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "predict_step": "roofline",
        "count": "cost",
        "draw_roofline": "figures",
        "draw_sharding": "figures",
    },
)
