"""Programs written device by device, where the compiler would not find them: attention over a split sequence, pipelines.

Chapters: 12, 13.
"""
