"""Decides whether an answer is mathematically the same as the gold answer."""
