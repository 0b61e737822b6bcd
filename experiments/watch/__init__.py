"""`python -m experiments watch`: a live or finished run, in the terminal or on a page of its own.

In: the metrics files of a run, of one process or of one job per region; nothing is written.
Out: `view.View`, shown by `terminal` or served by `page`. `follow` reads what is new in a file,
`record` keeps what a view needs of it, `alarms` says what is wrong. Open `main.py` first.
"""
