"""`python -m experiments bench NAME`: speed and memory, as ratios measured within one process.

In: flags of the benchmark. Out: tables, and JSON where `--json` asks for it.
`engine` times the engine on the models of `work`, and a loop in PyTorch. `codec` times codecs, and
`gpu` the accelerator at hand. `main` takes their stages in turn, prints a table of each, and writes
the file. `work` interleaves the variants of a comparison. Open `main.py` first, then `engine.py`.
"""
