"""`python -m experiments sample` and `export`: use the anchor of a trained run.

In: the work directory of a run with a checkpoint.
Out: text on the terminal, or a folder with config.json and model.safetensors.
`train` starts from another run's anchor with the same loader. Open `anchor.py` first.
"""
