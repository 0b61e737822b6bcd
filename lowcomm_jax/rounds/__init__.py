"""Rounds between jobs: everyone's payloads, agreed on in one commit record a round.

In: the arrays of one region. Out: those of all regions that the record names, although regions die,
return, or lose the store. What to open for what:

- `connect` makes an exchange (`store`, `peers`, `through`); `remote` has its methods.
- A region joins or leaves: `membership`.
- `round`: publish, announce, fetch. When the record is written: `whole_exchange` for exchanges,
  `paced_rounds` for learners and arrivals. `two_shot_exchange`: in slices, then averages.
- A part of a payload travels before its round: `early_payload` (NoLoCo's anchors).
- A region does not answer: the docstring of `whole_exchange`.
- A region takes another one's state: `state_transfer`, `anchor_check`, `final_state`.
"""
