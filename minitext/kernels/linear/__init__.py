"""A projection of tokens by a weight, forward and backward.

Chapters: 4.
"""
