"""`python -m experiments compare`, and the quick comparison that runs without a command.

In: a comparison's config (`config.py`): variants, seeds, networks, and which quantity is equal.
Out: one run folder a variant and seed, compare.json and report.html.
`plan` checks the config and lists the runs; `equal` chooses their steps; `runs` trains them;
`result` computes what goes into compare.json; `show` prints it. Open `main.py` first.
"""
