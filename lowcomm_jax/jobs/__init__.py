"""A job that is one region of several: the loop's carriers, and what they make of arrivals.

- `job_carrier`: the loop's acts between jobs; while the store is away, acts are put off.
  `job_delivery`: a payload on its way to the others, and theirs to this one; with gossip
  `anchors_ahead`.
- Regions at a pace of their own: `round_carrier`; one that comes back: `peer_copy`.
- Anchors by their digests: `anchor_history`. Whether the others count this region:
  `job_delivery.Participation`.

How a job joins a run that goes on: the room `recovery`. Several trainers: the room `adloco`.
"""
