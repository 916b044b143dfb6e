"""RMSNorm: XLA as the reference, and one fused kernel each for TPU and GPU.

Chapters: 16.
"""
