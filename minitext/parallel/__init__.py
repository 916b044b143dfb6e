"""Programs written device by device, where the compiler would not find them.

Chapters: 12, 13.
"""
