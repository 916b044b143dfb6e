"""Token vectors from an embedding table: XLA as the reference, and a gradient for GPUs that adds in a fixed order.

Chapters: 19.
"""
