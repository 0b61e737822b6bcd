"""Rounds between jobs: everyone's payloads, agreed on in one commit record a round.

In: the arrays of one region. Out: those of all regions that the record names, although regions die,
return, or lose the store. What to open for what:

- `connect` makes an exchange (`store`, `peers`); `remote` has its methods.
- A region joins or leaves: `membership`.
- `round`: publish, announce, fetch. When the record is written: `whole_exchange` for exchanges,
  `paced_rounds` for learners and arrivals. `two_shot_exchange`: in slices, then averages.
- A part of a payload travels before its round: `early_payload` (NoLoCo's anchors).
- A region does not answer: below, and the docstring of `whole_exchange`.
- A region takes another one's state: `state_transfer`, `anchor_check`.

Who goes on without a region. Each of these writes the record of a round, where no other region has:

================================ ========================== ====================================
class, method                    of                         waits for
================================ ========================== ====================================
`WholeExchange._propose`         whole payloads, the        `WaitList.awaited`, to the deadline;
                                 first of slices, the end   then confirmations, two deadlines
`TwoShotExchange._owes_averages` averages of slices         who was present, lives, and is
                                                            the same job, to the deadline
`._fall_back_to_whole`           whole payloads, where      those awaited of who was present,
                                 averages are missing       to the deadline
`RoundExchange._admitted`        learners' rounds, arrivals a quorum; then those awaited, for
                                                            the grace window
`RemoteExchange._close_missed`   rounds that all missed in  all awaited, until each has said
                                 an outage: empty records   that it has no part
================================ ========================== ====================================

Nobody waits for what travels early. `JobDelivery` says what goes in slices: payloads of all regions
that `slicing.goes_in_slices` names. A deadline (`timing.Pace`) runs while the loop stands still.
"""
