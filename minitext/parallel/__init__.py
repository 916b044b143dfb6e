"""Programs written device by device where the compiler would not find them: split sequences and pipelines.

Chapters: 12, 13.
"""
