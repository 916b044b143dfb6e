"""A matrix product for each group of rows, as the experts of a mixture need it.

Chapters: 19.
"""
