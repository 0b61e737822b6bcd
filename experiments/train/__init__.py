"""Train a model in several regions: `python -m experiments train`."""
