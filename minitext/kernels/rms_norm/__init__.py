"""RMSNorm in one kernel.

Chapters: 16.
"""
