"""Figures that papers publish of bytes, time and failures, beside what the product's planner gives.

In: the published figures, which stand in the files themselves. Out: tables (`show`).

- `figures`: bandwidths, hours and speed-ups, by the planner's dry run and layer model;
- `latency`: pair exchange against tree all-reduce;
- `goodput`: what failures cost.

Nothing is trained. Claims about losses are the campaigns'.
"""
