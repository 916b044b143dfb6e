"""The output layer and the cross-entropy of its logits: XLA as the reference, and kernels that store no logits.

Chapters: 16.
"""
