"""A job that is one region of several: the loop's carriers, and what they make of arrivals.

- `job_carrier`: payloads on their way to the others, and theirs to this one; while the store is
  away, acts are put off. `payload_rows`: the arrays that travel; with gossip `anchors_ahead`.
- Regions at a pace of their own: `round_carrier`. What one that comes back is given: `given_state`.
- Anchors by their digests: `anchor_history`.

How a job joins a run that goes on: the room `recovery`. Several trainers: the room `adloco`.
"""
