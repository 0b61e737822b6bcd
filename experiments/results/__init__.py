"""`python -m experiments results`: tables, figures and a page from a campaign's records alone.

In: the campaign's config and its folder of records. Out: docs/evidence.md and its pictures.
`effects` takes paired differences from the records; `verdict` says what follows for a claim; `fit`
extrapolates; `page` and `figures` show it; `main` writes, or checks what is written. Open
`main.py` first.
"""
