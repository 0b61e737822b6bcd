"""Plans: one file a question, for `python -m experiments plan`."""
