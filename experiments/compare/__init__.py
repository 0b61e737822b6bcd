"""Compare methods fairly: `python -m experiments compare`, and the quick comparison."""
