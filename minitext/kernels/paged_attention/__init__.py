"""Attention of one new token over a cache in pages.

Chapters: 17.
"""
