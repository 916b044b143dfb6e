"""Attention: XLA as the reference, cuDNN, and flash kernels for TPU and GPU.

Chapters: 17.
"""
