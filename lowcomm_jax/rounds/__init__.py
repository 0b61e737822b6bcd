"""Rounds between jobs: everyone's payloads, agreed on in one commit record a round.

In: the arrays of one region. Out: those of all regions that the record names, although regions die,
return, or lose the store. What to open for what:

- `connect` makes an exchange (`store`, `peers`); `remote` has its methods.
- A region joins or leaves: `membership`.
- `round`: publish, announce, fetch, and the loop that waits. `agreed_round`: when the record is
  written, and what it names. `paced_rounds`: the rounds of learners and arrivals, one after the
  other. `two_shot_exchange`: in slices, then averages.
- A part of a payload travels before its round: `early_payload` (NoLoCo's anchors).
- How many bytes an exchange moves, announced at the send: `job_traffic`.
- A region does not answer: below, and the docstring of `agreed_round`.
- A region takes another one's state: `state_transfer`.

All rounds are `AgreedRound`, which one rule ends (`AgreedRound.propose`). What differs is data, in
their `ExchangeRequest`: of R regions, of a quorum K. A round waits for the *awaited* that have
announced nothing, and for payloads on their way; for how long, *waits* says.

=============== ========= ======================= ======== ===================== ======== ==========
round           members   awaited                 payloads waits                 confirm  after
=============== ========= ======================= ======== ===================== ======== ==========
exchange        all       `WaitList.awaited`      0 to R   `Pace`, from when the yes      any
                                                           loop waits (`Due`)
gossip          the group as an exchange          0 to all as an exchange        yes      any
slices          all       as an exchange          0 to R   as an exchange        yes      any
averages        all       who was present, lives, 0 to R   the same `Due`        yes      slices
                          and is the same job
whole payloads, all       who was present, and    0 to R   the same `Due`        yes      averages
after a loss              is awaited
the end         all       as an exchange          none     as an exchange        yes      any
learner's round all       `WaitList.awaited`      K to R   the grace window,     no       the round
                                                           from a quorum                  before
arrival         all       as a learner's round    1        no time               no       the round
                                                                                          before
=============== ========= ======================= ======== ===================== ======== ==========

"Any": exchanges are agreed on in any order, and land in the order of their sends. The end compares
anchors (`JobCarrier.compare_final_anchors`); the last synchronisation is exchanges, for learners
and arrivals, too. Rounds that all have missed in an outage are ended without a wait, once each of
the awaited has said that it has no part (`RemoteExchange._end_missed`): their records are empty.
Nobody waits for what travels early. `JobCarrier` says what goes in slices: payloads of all regions
that `slicing.goes_in_slices` names.
"""
