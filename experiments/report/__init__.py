"""`python -m experiments report`: what finished or interrupted runs learned, and what they cost.

In: work directories of runs, also of `launch`; a network, to replay their events on.
Out: tables, pictures, one HTML page, CSV or JSON.
`virtual` replays a run on a network. Of the HTML page, `html_report` chooses the content,
`html_data` computes the curves, `html_svg` and `html_timeline` draw, `html_page` is the frame.
Open `main.py` first.
"""
