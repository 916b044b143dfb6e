"""Attention of one new token over a cache in pages: XLA as the reference, and kernels for TPU and GPU.

Chapters: 17.
"""
