"""Requests of regions as separate jobs to the store they meet through, and the seconds of a round.

Object stores charge for requests, and limit them. Decoupled DiLoCo with P = H has a round after
every step: there they may cost more than the bytes. Tests compare the counts with those of jobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowcomm_jax.network.collectives import store_seconds
from lowcomm_jax.network.links import Network
from lowcomm_jax.store.heartbeat import LOOKS_PER_BEAT
from lowcomm_jax.store.kv import POLL_FAR_S, pauses
from lowcomm_jax.store.timing import Timing


def requests_a_round(count: int) -> int:
    """Requests of one region for one exchange of all regions, at the least.

    This is for whole payloads through the store, of regions that are all in time. Further looks for
    a late region come on top, as do heartbeats (`requests_a_second`) and deletions.

    Args:
      count: regions of the run.
    """
    others = count - 1
    looks = 3 * others  # announcements, payloads, and who has confirmed what
    own = 1 + 3 * 2  # the payload; announcing, confirming and committing (ask, write)
    return looks + own + 2  # is there a record already, before and after


def requests_a_second(count: int) -> float:
    """Requests of one region's heartbeat: its own beat, and several looks at all others' a beat."""
    return (LOOKS_PER_BEAT * count + 1) / Timing.beat_s


@dataclass(frozen=True)
class StoreRequests:
    """Requests of one independent learner (`rounds.paced_rounds`), a second.

    Attributes:
      round_s: seconds between two rounds.
      writes: of payloads, reports and records.
      reads: of the same.
      deletes: of the same.
      beats: of heartbeats: one write, else reads.
      exchange_s: seconds to write, commit and fetch a fragment.
    """

    round_s: float
    writes: float
    reads: float
    deletes: float
    beats: float
    exchange_s: float

    @property
    def total(self) -> float:
        """Requests of all kinds together."""
        return self.writes + self.reads + self.deletes + self.beats


def looks(round_s: float) -> int:
    """Looks at a store that is no folder in a round of `round_s` seconds in which nothing is new.

    Pauses between looks are those of `Store.pauses`: they grow, up to the longest.
    """
    number, waited = 0, 0.0
    longest = POLL_FAR_S[1]
    for pause in pauses(*POLL_FAR_S):
        if waited >= round_s or pause >= longest:
            break
        number, waited = number + 1, waited + pause
    return number + math.ceil(max(round_s - waited, 0.0) / longest)


def per_round(regions: int, idle_looks: int) -> dict[str, float]:
    """Requests of one learner in a round to which everyone reports, by kind.

    A look reads the next record, and the report of each other learner to the next round; where that
    is open, also to the one after. A learner looks, too, while a round is open: after its own
    report and landing, and after every payload that arrives.

    Args:
      regions: learners of the run.
      idle_looks: looks at which nothing is new.
    """
    others = regions - 1
    open_looks = 2 + others
    return {
        # The payload, the report, and the record, which one of all learners writes.
        "writes": 2 + 1 / regions,
        # Looks; the others' reports and payloads; the record, once more.
        "reads": idle_looks * (1 + others) + open_looks * (1 + 2 * others) + 2 * others + 1,
        # The payload, the report, and the confirmation, which rounds do not write.
        "deletes": 3,
    }


def learner_requests(
    network: Network, fragment_nbytes: float, period: int, fragments: int, step_s: float
) -> StoreRequests:
    """Requests of one learner a second, and the seconds of an exchange (`store_seconds`).

    Args:
      fragment_nbytes: bytes of one learner's payload.
      period: H.
      fragments: P, so that a round begins every H / P steps.
      step_s: seconds of an inner step.
    """
    regions, round_s = network.size, period / fragments * step_s
    counted = {kind: n / round_s for kind, n in per_round(regions, looks(round_s)).items()}
    exchange_s = store_seconds(network, fragment_nbytes)
    return StoreRequests(
        round_s, **counted, beats=requests_a_second(regions), exchange_s=exchange_s
    )
