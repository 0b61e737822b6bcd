"""Commands around the library, run from a checkout: `python -m experiments COMMAND`.

One folder a command: `train/`, `trained/` (sample, export), `compare/` (also quick),
`plan/`, `report/`, `watch/`, `regions/` (launch) and `bench/`. `faults/` serves train and launch.
Modules on this level serve several commands: flags (`cli`), the train config (`config`), a run's
folder and records (`workdir`, `metrics`), progress, and child processes. `__main__.py`
lists the commands: open it first. The library imports nothing from here.
"""
