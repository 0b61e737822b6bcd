"""The evidence: what papers claim, tried over scales, with the records of every run.

A project of its own beside the product, run from a checkout: `python -m evidence`. `campaign/`
trains the runs and keeps their records; `results/` writes pages of them. `configs/` has one file a
campaign, `records/` one small file a run, `pages/` what is written. Nothing imports this package.
"""
