"""Attention: XLA as the reference, cuDNN, and our flash kernels for TPU and GPU.

Chapters: 17.
"""
