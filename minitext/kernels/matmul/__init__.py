"""A tiled matrix product for TPUs, which chapter 16 builds.

Chapters: 16.
"""
