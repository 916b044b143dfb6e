"""The output layer and the cross-entropy of its logits, in one kernel that stores no logits.

Chapters: 16.
"""
