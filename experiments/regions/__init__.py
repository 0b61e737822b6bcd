"""`python -m experiments launch`, and what `train` needs where regions are separate jobs.

In: a train config and a number of regions; optionally a script of faults.
Out: WORKDIR/region<i>, a run folder each; WORKDIR/rendezvous; WORKDIR/happened.yaml.
`main` starts one job a region and waits. `jobs` and `transports` serve the job itself. Open
`main.py` first.
"""
