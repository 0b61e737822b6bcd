"""`python -m experiments train`: train a model in several regions, or one region of several jobs.

In: a train config (`experiments/config.py`) and a work directory.
Out: config.json, metrics.jsonl, checkpoints/ and loss.png in that directory; the exit code.
`resolve` checks the config and gives a `Job`; `assemble` builds the `Run`; `loop` trains it.
Open `main.py` first, then `loop.py`.
"""
