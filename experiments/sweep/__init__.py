"""`python -m experiments sweep`: vary fields of a train config; find the frontier of loss and cost.

In: a sweep's config (`config.py`): a train config, the fields to vary, their values or ranges.
Out: what a comparison writes, and sweep.csv and frontier.png.
`space` makes the points, `compare` trains them, `frontier` judges. Open `main.py` first.
"""
