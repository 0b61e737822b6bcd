"""How a region that was away takes part again: it needs an engine and the state of another region.

`rejoin` is the way into a run of separate jobs, `precompile` has everything compiled before, and
`rejoin_sim` does the same to regions that are all in one process.
"""
