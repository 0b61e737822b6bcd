"""Plan a run before paying for it: `python -m experiments plan`."""
