"""`python -m experiments launch`, and what `train` needs where regions are separate jobs.

In: a train config and a number of regions; a script of faults, if wanted.
Out: WORKDIR/region<i>, a run folder each; WORKDIR/rendezvous; WORKDIR/happened.yaml.
`main` starts one `region_job` a region and waits. `jobs`, `exchange` and
`rejoin_counts` are for the job itself. `merged` makes one log of those of all regions.
Open `main.py` first.
"""
