"""Regions as separate jobs: programs that share nothing but a key-value store.

In: what a region's training sends. Out: everyone's payloads, agreed in one commit record an
exchange, although regions die, return, or lose the store. What to open for what:

- `connect`: makes an exchange (`store`, `peers`); `remote`: its methods; `errors`: what it raises.
- A region joins or leaves: `membership`, then `heartbeat`.
- One payload is exchanged: `whole_exchange`, or in slices `two_shot_exchange`; `commits`.
- A part of it travels before that, beside the inner steps: `early_payload` (NoLoCo's anchors).
- What stands in the store (docs/wire.md): `records`, signed by `secret`, created once by `slots`;
  payloads as files: `wire`.
- How its bytes travel: `transport`, then `peers_transport` (`serving`, `pulling`).
- A region does not answer: the docstring of `whole_exchange`; the store does not: `job_carrier`.
- A region takes another one's state: `state_transfer`, `anchor_check`, and the room `recovery`.
- What an engine's loop calls: `job_carrier`, `job_delivery`.
- Regions at a pace of their own, which wait for nobody: `round_carrier`, `rounds`, `peer_copy`.
- Several trainers, which exchange each for itself: the room `adloco`.
"""
