"""`python -m evidence`: tables, figures and a page from a campaign's records alone.

In: the campaign's config and its folder of records. Out: docs/evidence.md and its pictures.
`effects` computes paired differences from the records; `verdict` judges a claim by them; `fit`
extrapolates; `corpora` compares two campaigns; `page` and `figures` show the results; `main` writes
them, or checks them. Open `main.py` first.
"""
