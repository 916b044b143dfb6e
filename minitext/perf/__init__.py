"""Predictions for a step that never ran: its time, its memory and its messages, and what to change.

Each prediction can be compared with the compiled program. `plan` searches for a mesh, `tune_options` for the compiler's
options and `tune` for block shapes, and `figures` draws the results. May import every room but `cli`, `book` and
`post_training`.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, predict_step="roofline", count="cost", draw_roofline="figures",
    draw_sharding="figures",
)  # fmt: skip
