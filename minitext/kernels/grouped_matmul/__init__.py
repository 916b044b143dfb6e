"""A matrix product for each group of rows, as a mixture of experts needs it: for XLA, CPU, TPU and GPU.

Chapters: 19.
"""
