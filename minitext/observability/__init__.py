"""What a run reports about itself: metrics, where its time went, profiler traces, and a live view of all three.

May import models, data, compiler, checkpoint, distributed and config.
"""

from minitext import exports

__getattr__, __dir__ = exports(__name__, Ledger="goodput", Meter="metrics", read_metrics="metrics")
