"""`python -m experiments bench NAME`: speed and memory, as ratios measured within one process.

In: flags of the benchmark. Out: tables, and JSON where a flag asks for it.
`engine` times the engine on the models of `work`, and a loop in PyTorch. `codec` times codecs, and
`gpu` the accelerator at hand. `work` interleaves the variants of a comparison. Open `main.py`
first, then `engine.py`.
"""
