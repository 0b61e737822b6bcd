"""Requests to the store that regions as separate jobs make: object stores have them paid for."""

from __future__ import annotations

from lowcomm_jax.runtime.heartbeat import LOOKS_PER_BEAT
from lowcomm_jax.runtime.timing import Timing


def requests_a_round(count: int) -> int:
    """Requests of one region for one exchange of all regions, at the least.

    Of whole payloads that travel through the store, where everybody is there in time. Looking again
    for those who are late comes on top, as do heartbeats (`requests_a_second`) and deleting.
    """
    others = count - 1
    looks = 3 * others  # announcements, payloads, and who has confirmed what
    own = 1 + 3 + 3 + 1  # the payload; announcing and committing (read, ask, write); confirming
    return looks + own + 2  # is there a record already, before and after


def requests_a_second(count: int, beat_s: float = Timing.beat_s) -> float:
    """Requests of one region's heartbeat: several looks at all of them a beat, and its own."""
    return (LOOKS_PER_BEAT * count + 1) / beat_s
