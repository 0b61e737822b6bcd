"""`python -m experiments watch`: a live or finished run, in the terminal or on a page of its own.

In: the metrics files of a run, of one process or of one job per region; nothing is written.
Out: `view.View`, shown by `terminal`; `page` serves the run's report beside it. `record` reads a
file's new lines, and keeps what a view needs of them; `alarms` finds problems. Open `main.py`
first.
"""
