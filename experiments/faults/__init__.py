"""Faults of regions: from a script, injected into real jobs, simulated in one process, replayed.

In: a script (`fault`), `random:SEED:COUNT`, or the happened.yaml of an earlier run.
Out: killed, stopped, cut off or slowed jobs (`injector`, `rendezvous_cut`, `fault_hooks`); or, in
one process, who takes part in which exchange (`simulated`).
`landings` records what each job saw, and `happened` is the file made of all records.
`train` and `launch` take scripts; `tests/campaigns.py` draws some, launches jobs under them and
holds what is left against one process. Open `fault.py` first.
"""
