"""`python -m experiments report`: losses and costs of finished or interrupted runs.

In: work directories of runs, also of `launch`; a network, to replay their events on.
Out: tables, pictures, one HTML page, CSV or JSON.
`runlog` reads a run back; where it was one job a region, `merged` makes one log of theirs.
`virtual` replays it on a network, `costs` gives what it has cost, and `stats` intervals; `columns`
are those of the tables that `compare` and the page show. Of the page, `html_report` chooses the
content, `html_data` computes the curves, `html_plots` draws, `html_page` is the frame. Open
`main.py` first.
"""
