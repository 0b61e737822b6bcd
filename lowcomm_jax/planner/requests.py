"""Requests of independent learners to the store they meet through, and the seconds of a round.

Decoupled DiLoCo with P = H has a round after every step. A store may then charge for requests, or
limit them, more than for bytes. The counts are those of `runtime.rounds`; a test compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowcomm_jax.network.collectives import STORE_LOOK_S, store_seconds
from lowcomm_jax.network.links import Network

GROWTH = 1.5
"""Factor by which pauses between looks grow while nothing is new (`runtime.kv.Store.pauses`)."""

BEAT_S, LOOKS_PER_BEAT = 1.0, 4
"""Seconds between two heartbeats, and how often all are read meanwhile (`runtime.heartbeat`)."""


@dataclass(frozen=True)
class StoreRequests:
    """Requests of one learner, a second.

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
    """Looks at the store in a round of `round_s` seconds in which nothing is new."""
    return math.ceil(math.log1p(round_s * (GROWTH - 1) / STORE_LOOK_S) / math.log(GROWTH))


def per_round(regions: int, idle_looks: int) -> dict[str, float]:
    """Requests of one learner in a round to which everyone reports, by kind.

    A look reads the next record, and the report of each other learner to the next round. A learner
    also looks after its own report and landing, and after every payload that arrives.

    Args:
      regions: learners of the run.
      idle_looks: looks at which nothing is new.
    """
    others, seen = regions - 1, idle_looks + 2 + (regions - 1)
    return {
        # The payload, the report, and the record, which one of all learners writes.
        "writes": 2 + 1 / regions,
        # Looks; the own report's key; the others' reports and payloads; the record, three times.
        "reads": seen * (1 + others) + 1 + 2 * others + 3,
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
    beats = (1 + LOOKS_PER_BEAT * regions) / BEAT_S
    exchange_s = store_seconds(network, fragment_nbytes)
    return StoreRequests(round_s, **counted, beats=beats, exchange_s=exchange_s)
