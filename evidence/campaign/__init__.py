"""`python -m evidence campaign`: the runs behind the claims of papers, as a function of scale.

In: a campaign's config (`config.py`): methods, sizes, the ladder of scales, claims.
Out: one small record a run in the campaign's folder of records; `results` makes its page of them.
`plan` checks the config; `cells` names the runs; `ledger` has their records; `tuning` chooses
learning rates on seeds of their own; `order` chooses what runs next; `estimate` gives its
core-seconds; `run` trains it. Open `run.py` first.
"""
