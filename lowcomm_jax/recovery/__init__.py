"""How a region that was away takes part again; needs an engine and another region's state.

In: an engine and this region's state. Out: the state at the others' step, from which it trains on.

- `rejoin`: joins a run of separate jobs (`enter`), also with several trainers, and gives the state
  to others at the end; `rejoin_regions` does the same where all regions are in one process.
- `precompile`: compiles all programs of the loop before, so that a newcomer is not far behind.
"""
