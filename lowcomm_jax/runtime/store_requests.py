"""Counts the requests of regions as separate jobs to their store; object stores charge for them."""

from __future__ import annotations

from lowcomm_jax.runtime.heartbeat import LOOKS_PER_BEAT
from lowcomm_jax.runtime.timing import Timing


def requests_a_round(count: int) -> int:
    """Requests of one region for one exchange of all regions, at the least.

    This is for whole payloads through the store, of regions that are all in time. Further looks for
    a late region come on top, as do heartbeats (`requests_a_second`) and deletions.

    Args:
      count: regions of the run.
    """
    others = count - 1
    looks = 3 * others  # announcements, payloads, and who has confirmed what
    own = 1 + 3 + 3 + 1  # the payload; announcing and committing (read, ask, write); confirming
    return looks + own + 2  # is there a record already, before and after


def requests_a_second(count: int, beat_s: float = Timing.beat_s) -> float:
    """Requests of one region's heartbeat: its own beat, and several looks at all others' a beat."""
    return (LOOKS_PER_BEAT * count + 1) / beat_s
