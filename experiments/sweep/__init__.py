"""Sweep fields of a config: `python -m experiments sweep`."""
