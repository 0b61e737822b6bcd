"""Comparisons: one file a question, for `python -m experiments compare`."""
