"""`python -m experiments plan`: plan a run before paying for it.

In: a plan's config (`configs/plan/template.py`).
Out: tables, plan.json and plan.png: bytes, utilisation, hours, memory and expected loss.
`config` checks the fields, `lowcomm_jax.planner` plans, `show` prints. `target` compiles a training
config for accelerators that are not there; `goodput` computes what failures cost. Open `main.py`
first.
"""
