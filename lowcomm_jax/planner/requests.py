"""Requests that independent learners make of the store they meet through, and what a round takes.

Decoupled DiLoCo with P = H has a round after every step, so that requests, not bytes, may be what a
store charges for, or limits. Counted here is what `runtime.rounds` does; a test counts it there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowcomm_jax.network.collectives import STORE_LOOK_S, store_seconds
from lowcomm_jax.network.links import Network

GROWTH = 1.5
"""How pauses between two looks grow while there is no news (`runtime.kv.Store.pauses`)."""

BEAT_S, LOOKS_PER_BEAT = 1.0, 4
"""Heartbeats: written once, and all others' read four times (`runtime.heartbeat`)."""


@dataclass(frozen=True)
class StoreRequests:
    """Requests of one learner, a second.

    Attributes:
      round_s: seconds between two rounds.
      writes, reads, deletes: of rounds.
      beats: of heartbeats, of which one is a write.
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
        return self.writes + self.reads + self.deletes + self.beats


def looks(round_s: float) -> int:
    """Looks at the store in one round without news: pauses grow until there are any."""
    return math.ceil(math.log1p(round_s * (GROWTH - 1) / STORE_LOOK_S) / math.log(GROWTH))


def per_round(regions: int, idle_looks: int) -> dict[str, float]:
    """Requests of one learner in a round to which everyone reports, by kind.

    A look reads the next record, and asks each other learner for its report to the next round. News
    make as many more looks: its own report and landing, and every payload that comes.
    """
    others, seen = regions - 1, idle_looks + 2 + (regions - 1)
    return {
        # The payload and the report; one of all writes the record.
        "writes": 2 + 1 / regions,
        # Of looks; that the report is new, of the others' reports and payloads; the record, twice.
        "reads": seen * (1 + others) + 1 + 2 * others + 3,
        # The payload, the report, and a confirmation that rounds do not write.
        "deletes": 3,
    }


def learner_requests(
    network: Network, fragment_nbytes: float, period: int, fragments: int, step_s: float
) -> StoreRequests:
    """What one learner asks of the store, and how long a round takes (`store_seconds`)."""
    regions, round_s = network.size, period / fragments * step_s
    counted = {kind: n / round_s for kind, n in per_round(regions, looks(round_s)).items()}
    beats = (1 + LOOKS_PER_BEAT * regions) / BEAT_S
    exchange_s = store_seconds(network, fragment_nbytes)
    return StoreRequests(round_s, **counted, beats=beats, exchange_s=exchange_s)
