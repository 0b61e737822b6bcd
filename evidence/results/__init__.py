"""`python -m evidence`: tables, figures and pages from the records of campaigns alone.

In: campaigns' configs and records. Out: evidence/pages/, and parts of docs/RESULTS.md.
`effects` computes paired differences from the records, by the tests of `stats`; `verdict` judges a
claim by them; `fit` extrapolates; `corpora` compares two campaigns; `gathered` has all of it.
`page`, `sections`, `blocks` and `figures` show it, by `markdown` and the texts in text/; `write`
writes them, or checks them. Open `write.py` first.
"""
